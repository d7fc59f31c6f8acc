"""Leased claims in the SQL table: each step is one short transaction, on a pool of its own.

The pool is beside the app's, for a request that waited for a second connection while it holds a first would
be how pools deadlock. It opens connections only while leases are taken, extended or completed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, event, exc
from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup.stores.failures import store_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from sqlalchemy import Connection
    from sqlalchemy.engine import Dialect as SqlDialect

    from fastapi_dedup.claims import Intent, Outcome, Receipt
    from fastapi_dedup.stores.sql import Dialect

    T = TypeVar("T")

__all__ = ["SqlLeases"]


class SqlLeases:
    """Leased claims in the table of claims.

    Args:
        engine: The app's engine, whose settings the pool of the leases has too.
        dialect: The statements.
        speak: Returns the statements in the style of a handler's connection, whose driver may be another.
    """

    completes_in_transactions = True
    realm = b""

    def __init__(
        self, engine: AsyncEngine, dialect: Dialect, *, speak: Callable[[Connection], Dialect]
    ) -> None:
        self._dialect = dialect
        self._speak = speak
        self._app_engine = engine
        event.listen(engine.sync_engine, "engine_disposed", self._dispose_too)

    @cached_property
    def _engine(self) -> AsyncEngine:
        """The pool: made when it is needed first, so that it has what listens to the app's engine by then."""
        beside = _beside(self._app_engine)
        self._dialect.adopt(beside.sync_engine)
        return beside

    async def check(self) -> None:
        """The table is looked at with the riding claims' start-up."""

    async def take(self, intent: Intent) -> Outcome:
        """Take the id for the length of the intent's lease, or say why not."""
        return await self._run(lambda connection: self._dialect.claim(connection, intent, os.urandom(16)))

    async def look(self, intent: Intent) -> Outcome | None:
        """Return what a claim answers; None where there is none, or its lease has run out."""
        return await self._run(lambda connection: self._dialect.look(connection, intent))

    async def extend(self, intent: Intent, receipt: Receipt) -> bool:
        """Count the lease anew from now; False where it is the receipt's no more."""
        return await self._run(lambda connection: self._extend(connection, intent, receipt))

    def _extend(self, connection: Connection, intent: Intent, receipt: Receipt) -> bool:
        assert intent.lease is not None  # noqa: S101 - for mypy: only leased claims come here
        return self._dialect.extend(connection, intent.key, receipt.token, intent.lease.length) > 0

    async def complete(self, intent: Intent, receipt: Receipt) -> bool:
        """Say that the work is done; False where the claim is the receipt's no more."""
        token = receipt.token
        return await self._run(lambda connection: bool(self._dialect.complete(connection, intent, token)))

    def complete_in(self, connection: Any, intent: Intent, receipt: Receipt) -> bool | None:
        """Complete on the connection of the handler's transaction; None where its snapshot is in the way."""
        completed = self._speak(connection).complete(connection, intent, receipt.token)
        if completed is not None:
            return completed > 0
        try:
            with self._engine.sync_engine.begin() as beside:
                return None if self._extend(beside, intent, receipt) else False
        except exc.MissingGreenlet:  # a synchronous session, in a thread: the last beat must do
            return None

    async def release(self, intent: Intent, receipt: Receipt | None) -> bool:
        """Delete the claim, if it still is the receipt's; None instead of a receipt: whoever's."""
        key, token = intent.key, None if receipt is None else receipt.token
        return await self._run(lambda connection: self._dialect.release(connection, key, token) > 0)

    def _dispose_too(self, _: Engine) -> None:
        """Close the pool with the app's own, for an app may use a `Dedup` that it never stops."""
        if "_engine" in vars(self):
            self._engine.sync_engine.dispose()

    async def dispose(self) -> None:
        """Close the pool."""
        if "_engine" in vars(self):
            await self._engine.dispose()

    async def _run(self, work: Callable[[Connection], T]) -> T:
        with store_errors():
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)


def _beside(engine: AsyncEngine) -> AsyncEngine:
    """Return an engine like another, with a pool of its own."""
    sync = engine.sync_engine
    beside = Engine(sync.pool.recreate(), sync.dialect, sync.url)
    if sync.dialect.name != "sqlite":
        # Once for each connection. SQLAlchemy's own option sets it when one is taken from the pool, and loses
        # the connection if it is cancelled at that.
        event.listen(beside, "connect", partial(_read_what_is_committed, sync.dialect))
    return AsyncEngine(beside)


def _read_what_is_committed(dialect: SqlDialect, connection: Any, _: object) -> None:
    """Have a connection's short transactions see what others have committed, whatever the app's own do."""
    connection.commit()  # what listeners of the app's have begun, for psycopg sets no level in a transaction
    with suppress(NotImplementedError):  # a database that has no levels
        if "READ COMMITTED" in dialect.get_isolation_level_values(connection):
            dialect.set_isolation_level(connection, "READ COMMITTED")
