"""The SQL store: riding claims in one table.

What differs between databases is in `dialects/`: each is a handful of statements behind `Dialect`. They are
plain synchronous functions over a `Connection`, which SQLAlchemy runs for asynchronous sessions too.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, MetaData, Table, exc, inspect

from fastapi_dedup.claims import Claimed
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.batches.in_order import InOrder
from fastapi_dedup.stores.dialects.generic import Generic
from fastapi_dedup.stores.dialects.mysql import MySQL
from fastapi_dedup.stores.dialects.postgresql import PostgreSQL
from fastapi_dedup.stores.dialects.sqlite import SQLite
from fastapi_dedup.stores.engines import root_of
from fastapi_dedup.stores.failures import store_errors
from fastapi_dedup.stores.homes import Home
from fastapi_dedup.stores.leases import SqlLeases
from fastapi_dedup.stores.promises import Promise
from fastapi_dedup.stores.riding import Carried
from fastapi_dedup.stores.undone import note_failures
from fastapi_dedup.tables import additions, must_be_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from sqlalchemy import Dialect as Driver
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from fastapi_dedup.claims import Intent, Outcome, Receipt
    from fastapi_dedup.stores.riding import RidingTransaction

__all__ = ["SqlStore"]


class Dialect(Protocol):
    """What one kind of database does in its own way, inside the connection's transaction."""

    keeps: frozenset[Promise]

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""

    def look(self, connection: Connection, intent: Intent) -> Outcome | None:
        """Return what a committed, unexpired claim answers; None where there is none."""

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there, by the view of the connection's transaction."""

    def renew(self, connection: Connection, intent: Intent, token: bytes) -> None:
        """Count the window of the token's claim anew from now."""

    def extend(self, connection: Connection, key: bytes, token: bytes, length: timedelta) -> int:
        """Count the lease of the token's claim anew from now, and return how many there were."""

    def complete(self, connection: Connection, intent: Intent, token: bytes) -> int | None:
        """Make the token's leased claim a settled one, and return how many there were.

        None where the transaction's snapshot is older than the claim or its last extension, and the database
        lets no such transaction write there.
        """

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims in a transaction of its own, and return how many."""

    def adopt(self, engine: Engine) -> None:
        """Prepare an engine whose connections claims will ride on."""

    def serialize_creation(self, connection: Connection) -> bool:
        """Make other processes wait that are creating the table too, and tell whether that can be done."""


DIALECTS: dict[str, type[MySQL | PostgreSQL | SQLite]] = {
    "mariadb": MySQL,
    "mysql": MySQL,
    "postgresql": PostgreSQL,
    "sqlite": SQLite,
}


class SqlStore:
    """Claims in one table of a SQL database.

    Args:
        engine: The engine for what is no request's: creation, compensating releases, the reaper.
        table: The table of claims.
        dialect: `"generic"` where another than the database's own is wanted.

    Attributes:
        home: Where the table is, as the handlers' transactions must know it.
        keeps: What it promises beyond what every store does.
        leases: The leased claims in the same table.

    Raises:
        ConfigurationError: There is no such dialect, or it cannot serve that database.
    """

    def __init__(self, engine: AsyncEngine, table: Table, *, dialect: str | None = None) -> None:
        if dialect not in {None, "generic"}:
            msg = f"dialect must be 'generic' or None, not {dialect!r}"
            raise ConfigurationError(msg)
        own = None if dialect == "generic" else DIALECTS.get(engine.dialect.name)
        self._engine = engine
        self._table = _translated(table, engine)
        self._statements: Callable[[Table, Driver], Dialect] = own or Generic
        self._spoken: WeakKeyDictionary[Driver, Dialect] = WeakKeyDictionary()
        self._many: WeakKeyDictionary[Driver, InOrder] = WeakKeyDictionary()
        self._meeting = threading.Lock()
        self._dialect = self._adopt(engine.sync_engine)
        self._batches = self._many[engine.dialect]
        self.home = Home(engine, self._table, self._dialect.holds)
        self.keeps = self._dialect.keeps
        self.sees_in_flight = Promise.SEES_TWINS_ELSEWHERE in self.keeps
        self.leases = SqlLeases(engine, self._dialect, speak=self._on)

    durable = True
    refusals_logged_at = logging.INFO

    # Claims, on the handler's connection

    async def claim(self, intent: Intent, transaction: RidingTransaction) -> Outcome:
        """Take the id inside the transaction, or say why not, and leave the transaction usable."""
        token = os.urandom(16)

        def take(connection: Connection) -> Outcome:
            _refuse_autocommit(connection)
            return self._on(connection).claim(connection, intent, token)

        def undo(connection: Connection) -> int:
            return self._on(connection).release(connection, intent.key, token)

        def keys() -> set[bytes]:
            return {intent.key} - transaction.withdrawn

        outcome = await transaction.run(take, undo=undo)
        if isinstance(outcome, Claimed):
            transaction.carry(
                Carried(
                    token,
                    keys,
                    holds=lambda on: not keys() or self._on(on).holds(on, intent.key, token),
                    retake=lambda on: isinstance(take(on), Claimed),
                )
            )
        return outcome

    async def claim_many(
        self, intents: Sequence[Intent], transaction: RidingTransaction
    ) -> dict[bytes, Outcome]:
        """Take the ids inside the transaction, in the order of their keys, and leave it usable."""
        token = os.urandom(16)

        def take(connection: Connection, wanted: Sequence[Intent]) -> dict[bytes, Outcome]:
            _refuse_autocommit(connection)
            return self._many_on(connection).claim(connection, wanted, token)

        def undo(connection: Connection) -> int:
            return self._many_on(connection).release(connection, [each.key for each in intents], token)

        outcomes = await transaction.run(partial(take, wanted=intents), undo=undo)
        claimed = {key for key, outcome in outcomes.items() if isinstance(outcome, Claimed)}

        def keys() -> set[bytes]:
            return claimed - transaction.withdrawn

        def retake(connection: Connection) -> bool:
            again = take(connection, [intent for intent in intents if intent.key in keys()])
            return all(isinstance(outcome, Claimed) for outcome in again.values())

        transaction.carry(
            Carried(token, keys, holds=lambda on: self._many_on(on).hold(on, keys(), token), retake=retake)
        )
        return outcomes

    async def look(self, intent: Intent, transaction: RidingTransaction) -> Outcome | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        return await transaction.run(lambda on: self._on(on).look(on, intent))

    async def renew(self, intent: Intent, receipt: Receipt, transaction: RidingTransaction) -> None:
        """Count a claim's window anew from now, inside the transaction that made it."""
        await transaction.run(lambda on: self._on(on).renew(on, intent, receipt.token))

    async def withdraw(self, intent: Intent, receipt: Receipt, transaction: RidingTransaction) -> None:
        """Delete a claim inside the transaction that made it."""
        await transaction.run(lambda on: self._on(on).release(on, intent.key, receipt.token))
        transaction.withdrawn.add(intent.key)

    async def withdraw_many(
        self, intents: Sequence[Intent], receipt: Receipt, transaction: RidingTransaction
    ) -> None:
        """Delete claims of one batch inside the transaction that made them."""
        keys = [intent.key for intent in intents]
        await transaction.run(lambda on: self._many_on(on).release(on, keys, receipt.token))
        transaction.withdrawn.update(keys)

    def _many_on(self, connection: Connection) -> InOrder:
        """Return the statements for many ids, likewise."""
        self._on(connection)
        return self._many[connection.dialect]

    def _on(self, connection: Connection) -> Dialect:
        """Return the statements in the style of a connection's driver, which need not be ours.

        Raises:
            ConfigurationError: No claim can ride there.
        """
        spoken = self._spoken.get(connection.dialect)
        if spoken is None:
            with self._meeting:  # connections of synchronous engines come from many threads
                spoken = self._spoken.get(connection.dialect) or self._meet(connection)
        return spoken

    def _meet(self, connection: Connection) -> Dialect:
        if not isinstance(connection, Connection):  # a driver's own, which has been looked at before
            return self._speak(connection.dialect, PostgreSQL)
        self.home.must_be_at(connection.engine)
        if connection.dialect.name == "sqlite" and connection.in_nested_transaction():
            # Its driver has begun no transaction before the savepoint, so releasing that would COMMIT.
            msg = (
                "the first claim on this SQLite engine is in a savepoint, which holds on a prepared engine "
                "only: call dedup.adopt(engine) when the app starts"
            )
            raise ConfigurationError(msg)
        return self._adopt(connection.engine)

    def adopt(self, engine: Engine) -> None:
        """Prepare an engine of the app's whose connections claims will ride on.

        Raises:
            ConfigurationError: It is on another database, or no claim can ride there.
        """
        self.home.must_be_at(engine)
        with self._meeting:
            if engine.dialect not in self._spoken:
                self._adopt(engine)

    def _adopt(self, engine: Engine) -> Dialect:
        root = root_of(engine)
        spoken = self._speak(root.dialect, self._statements)
        note_failures(root)
        spoken.adopt(root)
        return spoken

    def _speak(self, driver: Driver, statements: Callable[[Table, Driver], Dialect]) -> Dialect:
        dialect = statements(self._table, driver)
        self._many[driver] = InOrder(dialect)
        self._spoken[driver] = dialect  # last: who finds it here looks there without the lock
        return dialect

    # On connections of our own

    async def release(self, intent: Intent, receipt: Receipt | None) -> bool:
        """Delete a committed claim in a transaction of its own; None instead of a receipt: whoever's."""
        token = None if receipt is None else receipt.token
        with store_errors():
            async with self._engine.begin() as connection:
                deleted = await connection.run_sync(self._dialect.release, intent.key, token)
        return deleted > 0

    async def release_many(self, intents: Sequence[Intent], receipt: Receipt) -> None:
        """Delete committed claims of one batch in a transaction of its own."""
        keys = [intent.key for intent in intents]
        with store_errors():
            async with self._engine.begin() as connection:
                await connection.run_sync(self._batches.release, keys, receipt.token)

    async def reap(self, limit: int) -> int:
        """Delete at most so many expired claims in one transaction, and return how many."""
        with store_errors():
            async with self._engine.begin() as connection:
                return await connection.run_sync(self._dialect.reap, limit)

    async def create_table(self) -> None:
        """Create the table and its index unless they are there; any number of processes may try at once."""
        with store_errors():
            async with self._engine.connect() as connection:
                await connection.run_sync(self._create)

    def _create(self, connection: Connection) -> None:
        connection.execution_options(schema_translate_map=None)  # the table's schema is translated already
        alone = self._dialect.serialize_creation(connection)
        try:
            self._table.create(connection, checkfirst=True)
        except exc.DBAPIError:
            connection.rollback()
            if alone or not inspect(connection).has_table(self._table.name, schema=self._table.schema):
                raise
            return  # another process was quicker
        connection.commit()

    async def missing(self) -> list[str] | None:
        """Return the statements that add what an older table lacks; None where there is no table at all."""
        with store_errors():
            async with self._engine.connect() as connection:
                return await connection.run_sync(self._missing)

    def _missing(self, connection: Connection) -> list[str] | None:
        try:
            columns = inspect(connection).get_columns(self._table.name, schema=self._table.schema)
        except exc.NoSuchTableError:
            return None
        return additions(self._table, {column["name"] for column in columns}, connection.dialect)

    async def verify(self) -> None:
        """Try out a database that the dialect does not know.

        Raises:
            ConfigurationError: It keeps no promise.
        """
        if isinstance(self._dialect, Generic):
            with store_errors():
                async with self._engine.connect() as connection:
                    await connection.run_sync(self._dialect.verify)

    @property
    def is_generic(self) -> bool:
        """Whether its statements are those for any database."""
        return isinstance(self._dialect, Generic)

    @property
    def was_run(self) -> bool:
        """Whether the tests run its statements on such a database."""
        return not isinstance(self._dialect, Generic) or self._dialect.was_run

    @property
    def table(self) -> str:
        """The name of the table."""
        return self._table.fullname

    @property
    def where(self) -> str:
        """The database's URL, without its password."""
        return self._engine.url.render_as_string()


def _translated(table: Table, engine: AsyncEngine) -> Table:
    """Return the table where an engine's `schema_translate_map` puts it: statements as text know no map."""
    schemas = engine.get_execution_options().get("schema_translate_map") or {}
    if table.schema not in schemas:
        return table
    must_be_plain("the engine's schema_translate_map", schemas[table.schema])
    return table.to_metadata(MetaData(), schema=schemas[table.schema])


def _refuse_autocommit(connection: Connection) -> None:
    """Refuse a connection that commits every statement at once: nothing could undo a claim."""
    if connection.dialect.name == "sqlite" or not isinstance(connection, Connection):
        return  # there the store begins the transaction itself, here the transaction has been looked at
    driver_connection = connection.connection.dbapi_connection
    try:
        commits = driver_connection is not None and connection.dialect.detect_autocommit_setting(
            driver_connection
        )
    except NotImplementedError:  # SQLAlchemy cannot tell
        return
    if commits:
        msg = (
            "the claim's connection is in AUTOCOMMIT mode, so no rollback can undo the claim: "
            "give the session an engine with a transactional isolation level"
        )
        raise ConfigurationError(msg)
