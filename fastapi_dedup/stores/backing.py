"""What a `Dedup` stands on: a database, or Redis alone. Made of what it is given, checked at start-up."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import MetaData
from sqlalchemy.engine import URL

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.store import Leases
from fastapi_dedup.stores.borrowed import borrowed
from fastapi_dedup.stores.drivers import DriverTransaction, driver_of
from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE, bound
from fastapi_dedup.stores.leases_only import Anywhere, NoDatabase, NoTransaction, no_database
from fastapi_dedup.stores.redis import RedisLeases, is_redis_url
from fastapi_dedup.stores.sql import SqlStore
from fastapi_dedup.stores.startup import prepare
from fastapi_dedup.stores.transactions import OwnTransaction
from fastapi_dedup.tables import claims_table

if TYPE_CHECKING:
    from typing import NoReturn, TypeAlias

    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    from fastapi_dedup.store import Enclosing
    from fastapi_dedup.stores.riding import RidingTransaction

__all__ = ["Backing", "Bind", "Database", "LeasesAlone", "backing_of"]

logger = logging.getLogger("fastapi_dedup")

if TYPE_CHECKING:
    Bind: TypeAlias = str | URL | AsyncEngine | async_sessionmaker[Any] | Leases | None
    Backing: TypeAlias = "Database | LeasesAlone"


def backing_of(
    bind: Bind,
    leases: Leases | None,
    *,
    table: str,
    schema: str | None,
    dialect: Literal["generic"] | None,
) -> Backing:
    """Return what a runtime stands on.

    Args:
        bind: What it is bound to; None reads the environment.
        leases: Where its leased claims live; None keeps them in the database.
        table: The name of the table of claims.
        schema: The schema that it is in.
        dialect: The statements of claims.

    Raises:
        ConfigurationError: That cannot be kept.
    """
    if leases is not None and not isinstance(leases, Leases):
        msg = f"leases= takes a RedisLeases(...), not {type(leases).__name__}"
        raise ConfigurationError(msg)
    url = os.environ.get(DATABASE_URL_VARIABLE) if bind is None else bind
    if isinstance(url, str) and is_redis_url(url):
        only = RedisLeases(url)
        if bind is None:
            logger.info("claims are kept in %r", only)
        bind = only
    if not isinstance(bind, Leases):
        return Database(bind, leases, table=table, schema=schema, dialect=dialect)
    if leases is not None:
        msg = f"Dedup(...) is bound to {bind!r}, and leases= names {leases!r} too: bind it to the database"
        raise ConfigurationError(msg)
    return LeasesAlone(bind)


class Database:
    """A database with the table of claims, and the leases, which may live elsewhere.

    Args:
        bind: What `Dedup` is bound to.
        leases: The leases; None keeps them in the table.
        table: The name of the table of claims.
        schema: The schema that it is in.
        dialect: The statements of claims.

    Attributes:
        engine: Its engine.
        store: The riding claims.
        leases: The leased claims.
    """

    rides = True

    def __init__(
        self,
        bind: str | URL | AsyncEngine | async_sessionmaker[Any] | None,
        leases: Leases | None,
        *,
        table: str,
        schema: str | None,
        dialect: Literal["generic"] | None,
    ) -> None:
        self._open_session, self.engine, self._owns_engine = bound(bind)
        table_of_claims = claims_table(MetaData(), name=table, schema=schema)
        self.store = SqlStore(self.engine, table_of_claims, dialect=dialect)
        self.leases: Leases = self.store.leases if leases is None else leases

    def __repr__(self) -> str:
        """Name the database, without its password."""
        return repr(self.engine.url.render_as_string())

    def transaction(self) -> OwnTransaction:
        """Return a transaction of ours, which opens when it is used."""
        return OwnTransaction(self._open_session, self.store.home)

    def borrow(self, session: Any, *, lent: bool) -> RidingTransaction:
        """Return the transaction of a session or connection of the app's."""
        return borrowed(session, self.store.home, lent=lent)

    def followed(self, transaction: Enclosing) -> Enclosing:
        """Return a transaction whose end a leased claim is to follow.

        Raises:
            ConfigurationError: The lease is elsewhere, and nobody would tell of the COMMIT.
        """
        elsewhere = self.leases is not self.store.leases
        if elsewhere and isinstance(transaction, DriverTransaction) and transaction.in_hand:
            msg = (
                "the driver's own connection that dedup.claim was given tells nobody of its COMMIT, so a "
                f"lease in {self.leases!r} cannot follow it: give it a session or connection of SQLAlchemy's"
            )
            raise ConfigurationError(msg)
        return transaction

    async def prepare(self, *, create_table: bool) -> None:
        """Create or check the table, and look at where the leases are.

        Raises:
            ConfigurationError: The table is missing, or the database keeps no promise.
            StoreUnavailableError: The table is to be created, and the database did not answer.
        """
        await self.leases.check()
        await prepare(self.store, create=create_table)

    async def dispose(self) -> None:
        """Close the pools that are ours."""
        await self.leases.dispose()
        await self.store.leases.dispose()
        if self._owns_engine:
            await self.engine.dispose()


class LeasesAlone:
    """Leases without a database.

    Args:
        leases: The leases.

    Attributes:
        store: Refuses claims that would ride.
        leases: The leased claims.
    """

    rides = False

    def __init__(self, leases: Leases) -> None:
        self.store: Any = NoDatabase()  # of a `SqlStore` it has what the core needs, and no more
        self.leases = leases

    def __repr__(self) -> str:
        """Name the leases."""
        return repr(self.leases)

    @property
    def engine(self) -> NoReturn:
        """There is none.

        Raises:
            ConfigurationError: Always.
        """
        what = "dedup.engine"
        raise no_database(what)

    def transaction(self) -> NoTransaction:
        """Return what stands for the transaction of the handler's work."""
        return NoTransaction()

    def borrow(self, session: Any, *, lent: bool) -> RidingTransaction:
        """Return the transaction of a session or connection of the app's, which claims are to follow.

        Raises:
            ConfigurationError: It is a driver's own, which tells nobody of its COMMIT: the database would be
                asked.
        """
        if driver_of(session) is not None:
            what = f"a claim that follows a {type(session).__module__}.{type(session).__qualname__}"
            raise no_database(what)
        return borrowed(session, Anywhere(), lent=lent)

    def followed(self, transaction: Enclosing) -> Enclosing:
        """Return a transaction whose end a leased claim is to follow."""
        return transaction

    async def prepare(self, *, create_table: bool) -> None:  # noqa: ARG002 - there is none to be created
        """Look at the settings of the server."""
        await self.leases.check()

    async def dispose(self) -> None:
        """Close the client, if it is ours."""
        await self.leases.dispose()
