"""The database that a store's claims live in, and which of a session's connections leads there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from sqlalchemy import text, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.failures import store_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine, Table
    from sqlalchemy.engine import URL
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = ["IDENTITY", "Home", "binds_of"]

IDENTITY = """
SELECT system_identifier AS system,
       (SELECT CAST(oid AS bigint) FROM pg_database WHERE datname = current_database()) AS database
  FROM pg_control_system()
"""
"""Which database this is, whatever name and address lead to it, and after a restart or fail-over."""

_STATUS = text("SELECT txid_status(CAST(:number AS bigint))")
_PORTS = {"postgresql": 5432, "mysql": 3306}
_THIS_MACHINE = {"", "127.0.0.1", "::1", "localhost"}


class _Place(NamedTuple):
    """A database, as URLs name it."""

    backend: str
    host: str
    port: int | None
    database: str | None


class Home:
    """The database that a store's claims live in.

    Args:
        engine: The store's engine.
        table: The table of claims.
        holds: Returns whether a claim is there, by its key and token.

    Attributes:
        engine: The store's engine.
    """

    def __init__(
        self, engine: AsyncEngine, table: Table, holds: Callable[[Connection, bytes, bytes], bool]
    ) -> None:
        self.engine = engine
        self._place = _place_of(engine.url)
        self._statement = update(table)
        self._holds = holds
        self._looking = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._identity: tuple[int, int] | None = None
        self._known: WeakSet[Any] = WeakSet()

    def must_be_at(self, engine: Engine) -> None:
        """Refuse a session on another database: its claims would be reaped and released by nobody.

        Raises:
            ConfigurationError: It is on another one.
        """
        if not self._is_at(engine):
            raise self.elsewhere(engine.url.render_as_string())

    def elsewhere(self, where: str) -> ConfigurationError:
        """Return the error that a session elsewhere is."""
        msg = (
            f"the handler's session is on {where}, but this Dedup is on "
            f"{self.engine.url.render_as_string()}: give Dedup(...) the handler's engine or sessionmaker"
        )
        return ConfigurationError(msg)

    def bind_of(self, session: Session) -> Engine | Connection:
        """Return the one of a session's binds that leads here.

        Raises:
            ConfigurationError: None does, or nobody can say which.
        """
        binds = binds_of(session)
        if type(session).get_bind is Session.get_bind and not binds:
            return session.get_bind()
        # The app's own routing decides, if it knows: by a write, for a replica takes no claim.
        try:
            chosen = session.get_bind(clause=self._statement)
        except UnboundExecutionError:
            chosen = None
        if chosen is not None and self._is_at(chosen.engine):
            return chosen
        here: dict[int, Engine | Connection] = {id(bind): bind for bind in binds if self._is_at(bind.engine)}
        if len(here) == 1:
            return here.popitem()[1]
        others = {bind.engine.url.render_as_string() for bind in (*binds, *([chosen] if chosen else ()))}
        if not here:
            raise self.elsewhere(" and ".join(sorted(others)))
        msg = (
            f"the handler's session has {len(here)} binds to {self.engine.url.render_as_string()}, and thus "
            "as many transactions: which of them the claim belongs to, nobody can say. Give it one of them"
        )
        raise ConfigurationError(msg)

    # For drivers' connections, which have no URL, and tell nobody what becomes of their transactions

    def knows(self, connection: Any) -> bool:
        """Tell whether a driver's connection is known to lead here."""
        return _itself(connection) in self._known

    async def must_lead_here(self, system: int, database: int, connection: Any) -> None:
        """Refuse a driver's connection to another database than the store's.

        Args:
            system: The identifier of the connection's server.
            database: The number of its database there.
            connection: The connection.

        Raises:
            ConfigurationError: It is another one.
        """
        if self._place.backend != "postgresql":
            raise self.elsewhere("PostgreSQL")
        if self._identity is None:
            async with self._looking.connect() as looking:
                row = (await looking.execute(text(IDENTITY))).one()
                self._identity = (row.system, row.database)
        if (system, database) != self._identity:
            where = "another PostgreSQL database"
            raise self.elsewhere(where)
        self._known.add(_itself(connection))

    async def stands(self, number: int | None, claim: tuple[bytes, bytes] | None) -> bool | None:
        """Tell whether a transaction has committed, and its claim with it; None while it is open.

        Args:
            number: The transaction's number; None where it is not known: then it counts as ended.
            claim: The claim's key and token; None asks for the transaction only.

        Raises:
            StoreUnavailableError: The database did not answer.
        """
        with store_errors():
            async with self._looking.connect() as connection:
                status = number and await connection.scalar(_STATUS, {"number": number})
                if status == "in progress":
                    return None
                if claim is None:
                    return status == "committed"
                return await connection.run_sync(self._holds, *claim)

    def _is_at(self, engine: Engine) -> bool:
        return _place_of(engine.url) == self._place


def _itself(connection: Any) -> Any:
    """Return the connection that asyncpg's pool lends out under a proxy, which no weak reference takes."""
    return getattr(connection, "_con", connection)


def binds_of(session: Session) -> list[Any]:
    """Return what a session's tables and classes are bound to, beside its own bind."""
    binds = vars(session).get("binds") or vars(session).get("_Session__binds")  # SQLAlchemy 2.1, and before
    return [*binds.values()] if binds else []


def _place_of(url: URL) -> _Place:
    """Return the database that a URL leads to, alike for two drivers that leave out different defaults."""
    backend = url.get_backend_name()
    backend = "mysql" if backend == "mariadb" else backend
    if backend == "sqlite":
        database = url.database
        if database and database != ":memory:" and not database.startswith("file:"):
            database = str(Path(database).absolute())
        return _Place(backend, "", None, database)
    host = url.host or url.query.get("host") or ""
    host = host if isinstance(host, str) else ",".join(host)
    if host.lower() in _THIS_MACHINE or host.startswith("/"):  # a socket is of this machine
        host = "localhost"
    return _Place(backend, host.lower(), url.port or _PORTS.get(backend), url.database)
