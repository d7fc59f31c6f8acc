"""SQLite 3.35 and newer, through aiosqlite.

SQLite has one writer at a time, and the writer's lock is on the whole file. So a twin in the same process is
found among the process's own flights, never by queueing for the lock; one in another process waits for the
writer to end (the driver's `timeout`) and is then told the outcome.

Times are kept as SQLAlchemy keeps them, as UTC text, and come from SQLite's own clock, in milliseconds.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, exc, text
from sqlalchemy.pool import StaticPool

from fastapi_dedup.claims import Claimed, Duplicate, InFlight, Receipt, scope_text, verdict
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from sqlalchemy import Connection, Dialect, Engine, Row, Table

    from fastapi_dedup.claims import Intent, Mismatch, Outcome

__all__ = [
    "NOW",
    "SQLite",
    "answer_of",
    "begin_immediate",
    "is_open",
    "modifier",
    "prepare_engine",
    "time_of",
]

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"
_THEN = "strftime('%Y-%m-%d %H:%M:%f', 'now', :window) || '000'"
_TERM_ENDS = "strftime('%Y-%m-%d %H:%M:%f', 'now', :term) || '000'"
_LEASE_ENDS = "strftime('%Y-%m-%d %H:%M:%f', 'now', :lease) || '000'"
"""NULL where there is no lease, for so is everything that strftime makes of NULL."""

# One step of a statement sees one 'now', so claim and window start at the same moment.
_CLAIM = f"""
INSERT INTO {{table}} AS held
       (key, scope, logical_id, token, fingerprint, claimed_at, expires_at, leased_until)
VALUES (:key, :scope, :logical_id, :token, :fingerprint, {NOW}, {_TERM_ENDS}, {_LEASE_ENDS})
ON CONFLICT (key) DO UPDATE
   SET token = excluded.token, fingerprint = excluded.fingerprint,
       claimed_at = excluded.claimed_at, expires_at = excluded.expires_at,
       leased_until = excluded.leased_until
 WHERE held.expires_at <= excluded.claimed_at
RETURNING claimed_at, expires_at
"""  # noqa: S608 - the expressions are the constants above, the table's name is quoted

_LOOK = f"""
SELECT claimed_at, expires_at, leased_until, fingerprint, {NOW} AS at FROM {{table}} WHERE key = :key
"""  # noqa: S608

_HOLDS = "SELECT count(*) FROM {table} WHERE key = :key AND token = :token"

_RENEW = f"UPDATE {{table}} SET expires_at = {_THEN} WHERE key = :key AND token = :token"  # noqa: S608

_EXTEND = f"""
UPDATE {{table}} SET leased_until = {_LEASE_ENDS}, expires_at = max(expires_at, {_LEASE_ENDS})
 WHERE key = :key AND token = :token AND leased_until IS NOT NULL
"""  # noqa: S608

_COMPLETE = """
UPDATE {table}
   SET leased_until = NULL,
       expires_at = strftime('%Y-%m-%d %H:%M:%f', CASE WHEN :from_end THEN 'now' ELSE claimed_at END, :window)
                    || '000'
 WHERE key = :key AND token = :token
"""

_RELEASE = "DELETE FROM {table} WHERE key = :key AND token = coalesce(:token, token)"

_REAP = f"""
DELETE FROM {{table}} WHERE key IN (
    SELECT key FROM {{table}} WHERE expires_at <= {NOW} ORDER BY expires_at LIMIT :limit
)
"""  # noqa: S608


_PATIENCE = 250
"""How long what can be done later waits for the writer's lock, in milliseconds."""


class SQLite:
    """The statements of SQLite.

    Attributes:
        table: The table's name, quoted where that is needed.
    """

    keeps = frozenset({Promise.ANY_ORDER})

    def __init__(self, table: Table, dialect: Dialect) -> None:
        name = self.table = dialect.identifier_preparer.format_table(table)
        self._claim = text(_CLAIM.format(table=name))
        self._look = text(_LOOK.format(table=name))
        self._holds = text(_HOLDS.format(table=name))
        self._renew = text(_RENEW.format(table=name))
        self._extend = text(_EXTEND.format(table=name))
        self._complete = text(_COMPLETE.format(table=name))
        self._release = text(_RELEASE.format(table=name))
        self._reap = text(_REAP.format(table=name))

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""
        # A look takes no lock, so the duplicates of finished work never queue behind another id's writer.
        if (answer := self.look(connection, intent)) is not None:
            return answer
        begin_immediate(connection)
        values = {
            "key": intent.key,
            "scope": scope_text(intent.scope),
            "logical_id": intent.logical_id,
            "token": token,
            "fingerprint": intent.fingerprint,
            "term": modifier(intent.term),
            "lease": None if intent.lease is None else modifier(intent.lease.length),
        }
        row = connection.execute(self._claim, values).one_or_none()
        if row is not None:
            return Claimed(Receipt(token, time_of(row.claimed_at), time_of(row.expires_at)))
        return self.look(connection, intent) or InFlight()

    def look(self, connection: Connection, intent: Intent) -> Duplicate | InFlight | Mismatch | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        row: Row[Any] | None = connection.execute(self._look, {"key": intent.key}).one_or_none()
        return None if row is None else answer_of(row, intent)

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there, by the view of the connection's transaction."""
        return bool(connection.execute(self._holds, {"key": key, "token": token}).scalar_one())

    def renew(self, connection: Connection, intent: Intent, token: bytes) -> None:
        """Count the window of the token's claim anew from now."""
        connection.execute(
            self._renew, {"key": intent.key, "token": token, "window": modifier(intent.window)}
        )

    def extend(self, connection: Connection, key: bytes, token: bytes, length: timedelta) -> int:
        """Count the lease of the token's claim anew from now, and return how many there were.

        The writer of the moment may be the claim's own handler, so this waits for the writer's lock a moment
        only. Nobody can take the lease over meanwhile, for that too needs the lock.
        """
        with _briefly(connection):
            begin_immediate(connection)
            values = {"key": key, "token": token, "lease": modifier(length)}
            return connection.execute(self._extend, values).rowcount

    def complete(self, connection: Connection, intent: Intent, token: bytes) -> int:
        """Make the token's leased claim a settled one, and return how many there were."""
        begin_immediate(connection)
        values = {
            "key": intent.key,
            "token": token,
            "window": modifier(intent.window),
            "from_end": intent.from_end,
        }
        return connection.execute(self._complete, values).rowcount

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""
        return connection.execute(self._release, {"key": key, "token": token}).rowcount

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims; none while another has the writer's lock.

        It waits for that lock a moment only: the driver's thread cannot be called back when the app shuts
        down meanwhile.
        """
        with _briefly(connection):
            try:
                begin_immediate(connection)
                return connection.execute(self._reap, {"limit": limit}).rowcount
            except exc.OperationalError as error:
                if getattr(error.orig, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                return 0

    def adopt(self, engine: Engine) -> None:
        """Have the engine's savepoints hold."""
        refuse_shared_connection(engine)
        event.listen(engine, "savepoint", _begin_before_savepoint)

    def serialize_creation(self, connection: Connection) -> bool:
        """Take the writer's lock before looking whether the table is there."""
        begin_immediate(connection)
        return True


@contextmanager
def _briefly(connection: Connection) -> Iterator[None]:
    """Have a connection wait for the writer's lock a moment only."""
    patience = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {_PATIENCE}")
    try:
        yield
    finally:
        if not connection.invalidated:  # as a cancellation leaves it
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {patience}")


def begin_immediate(connection: Connection) -> None:
    """Take the writer's lock, waiting for it, unless a transaction is open already.

    The driver begins a transaction only before INSERT, UPDATE and DELETE, and as a deferred one. A deferred
    transaction that has read cannot wait for the writer's lock ("database is locked" at once).
    """
    if not is_open(connection):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def is_open(connection: Connection) -> bool:
    """Tell whether a transaction is open: the driver knows, and SQLAlchemy does not."""
    try:
        return bool(connection.connection.driver_connection.in_transaction)  # type: ignore[union-attr]  # both drivers have it
    except (ValueError, sqlite3.ProgrammingError):  # the connection is closed
        return False


def _begin_before_savepoint(connection: Connection, _name: str | None) -> None:
    """Begin first: what a SAVEPOINT outside any transaction holds is committed when it is released."""
    begin_immediate(connection)


def prepare_engine(engine: Engine, *, busy_timeout: float) -> None:
    """Set up an engine of our own: readers beside the writer, and patience for the writer's lock.

    Args:
        engine: The engine.
        busy_timeout: How long to wait for the writer's lock, in seconds.
    """

    @event.listens_for(engine, "connect")
    def _(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.close()


def refuse_shared_connection(engine: Engine) -> None:
    """Refuse an in-memory database whose requests would commit and roll back each other's work."""
    if isinstance(engine.pool, StaticPool):
        msg = (
            "sqlite ':memory:' has one connection, and thus one transaction, for all requests: use a file, "
            "such as sqlite+aiosqlite:///app.db (in tests, one in a temporary folder)"
        )
        raise ConfigurationError(msg)


def answer_of(row: Row[Any], intent: Intent) -> Duplicate | InFlight | Mismatch | None:
    """Return what a row that was found answers; None where its window is over."""
    return verdict(
        intent,
        claimed_at=time_of(row.claimed_at),
        expires_at=time_of(row.expires_at),
        leased_until=None if row.leased_until is None else time_of(row.leased_until),
        fingerprint=row.fingerprint,
        now=time_of(row.at),
    )


def modifier(length: timedelta) -> str:
    """Return a length of time as SQLite adds it to a moment."""
    return f"+{length.total_seconds():.3f} seconds"


def time_of(stored: str | datetime) -> datetime:
    """Return a moment as it is stored, with its zone."""
    moment = datetime.fromisoformat(stored) if isinstance(stored, str) else stored
    return moment.replace(tzinfo=UTC)
