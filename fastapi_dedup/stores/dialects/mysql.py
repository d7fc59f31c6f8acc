"""MariaDB 10.6 and MySQL 8.0 and newer, through asyncmy or aiomysql.

INSERT waits for an unfinished twin, up to innodb_lock_wait_timeout, and InnoDB has no row lock that
belongs to a row which is not there yet. So a named lock (GET_LOCK) on the key comes first, and says at once
whether a twin is in flight. The unique key still decides who wins. Named locks belong to the connection: the
pool gives them back when the connection comes home after COMMIT or ROLLBACK, and a crash frees them with it.

Times are UTC without a zone (DATETIME(6)), from the server's clock.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import event, exc, text

from fastapi_dedup.claims import Claimed, InFlight, Receipt, scope_text, verdict

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, Engine, Row, Table

    from fastapi_dedup.claims import Duplicate, Intent, Mismatch, Outcome

__all__ = ["MySQL"]

_DUPLICATE_ENTRY = 1062
_LOCKS = "fastapi_dedup.locks"
_LOOKS = 5
"""How often to look again. Each further look needs another release or reaping in between."""

_LOCK = "SELECT GET_LOCK(:name, 0) AS free, UTC_TIMESTAMP(6) AS at, @@{isolation} AS isolation"

_INSERT = """
INSERT INTO {table} (`key`, scope, logical_id, token, fingerprint, claimed_at, expires_at, leased_until)
VALUES (:key, :scope, :logical_id, :token, :fingerprint, :claimed_at, :expires_at, :leased_until)
"""

# FOR UPDATE reads what is committed, whatever snapshot the transaction has.
_LOOK = """
SELECT claimed_at, expires_at, leased_until, fingerprint, UTC_TIMESTAMP(6) AS at
  FROM {table} WHERE `key` = :key
"""
_LOOK_BEHIND_THE_SNAPSHOT = _LOOK + " FOR UPDATE"

_TAKE_OVER = """
UPDATE {table}
   SET token = :token, fingerprint = :fingerprint, claimed_at = :claimed_at, expires_at = :expires_at,
       leased_until = :leased_until
 WHERE `key` = :key
"""

_HOLDS = "SELECT count(*) FROM {table} WHERE `key` = :key AND token = :token"
_RENEW = """
UPDATE {table} SET expires_at = UTC_TIMESTAMP(6) + INTERVAL :microseconds MICROSECOND
 WHERE `key` = :key AND token = :token
"""
_EXTEND = """
UPDATE {table}
   SET leased_until = UTC_TIMESTAMP(6) + INTERVAL :microseconds MICROSECOND,
       expires_at = greatest(expires_at, UTC_TIMESTAMP(6) + INTERVAL :microseconds MICROSECOND)
 WHERE `key` = :key AND token = :token AND leased_until IS NOT NULL
"""
_COMPLETE = """
UPDATE {table}
   SET leased_until = NULL,
       expires_at = IF(:from_end, UTC_TIMESTAMP(6), claimed_at) + INTERVAL :microseconds MICROSECOND
 WHERE `key` = :key AND token = :token
"""
_RELEASE = "DELETE FROM {table} WHERE `key` = :key AND token = coalesce(:token, token)"
_EXPIRED = """
SELECT `key` FROM {table} WHERE expires_at <= UTC_TIMESTAMP(6)
 ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
"""
_DELETE = "DELETE FROM {table} WHERE `key` = :key"


class MySQL:
    """The statements of MariaDB and MySQL."""

    sees_in_flight = True
    reaps_at: str | None = "READ COMMITTED"
    """At REPEATABLE READ the reaper would lock the gaps that new claims are inserted into."""

    def __init__(self, table: Table, dialect: Dialect) -> None:
        name = dialect.identifier_preparer.format_table(table)
        self._insert = text(_INSERT.format(table=name))
        self._look = text(_LOOK.format(table=name))
        self._look_behind = text(_LOOK_BEHIND_THE_SNAPSHOT.format(table=name))
        self._take_over = text(_TAKE_OVER.format(table=name))
        self._holds = text(_HOLDS.format(table=name))
        self._renew = text(_RENEW.format(table=name))
        self._extend = text(_EXTEND.format(table=name))
        self._complete = text(_COMPLETE.format(table=name))
        self._release = text(_RELEASE.format(table=name))
        self._expired = text(_EXPIRED.format(table=name))
        self._delete = text(_DELETE.format(table=name))
        self._table = name

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""
        lock = self._lock(connection, hashlib.sha256(self._table.encode() + intent.key).hexdigest()[:60])
        if not lock.free:
            # SERIALIZABLE turns even a plain SELECT into one that waits for the twin.
            seen = None if lock.isolation == "SERIALIZABLE" else self.look(connection, intent)
            return seen or InFlight()
        for _ in range(_LOOKS):
            values = {
                "key": intent.key,
                "scope": scope_text(intent.scope),
                "logical_id": intent.logical_id,
                "token": token,
                "fingerprint": intent.fingerprint,
                "claimed_at": lock.at,
                "expires_at": lock.at + intent.term,
                "leased_until": None if intent.lease is None else lock.at + intent.lease.length,
            }
            receipt = Receipt(token, _utc(lock.at), _utc(lock.at + intent.term))
            try:
                connection.execute(self._insert, values)
            except exc.IntegrityError as error:
                if error.orig is None or error.orig.args[0] != _DUPLICATE_ENTRY:
                    raise
            else:
                return Claimed(receipt)
            found = connection.execute(self._look_behind, {"key": intent.key}).one_or_none()
            if found is None:
                continue  # the reaper was quicker
            if (answer := _answer(found, intent)) is not None:
                return answer
            connection.execute(self._take_over, values)
            return Claimed(receipt)
        return InFlight()

    def look(self, connection: Connection, intent: Intent) -> Duplicate | InFlight | Mismatch | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        row = connection.execute(self._look, {"key": intent.key}).one_or_none()
        return None if row is None else _answer(row, intent)

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there, by the view of the connection's transaction."""
        return bool(connection.execute(self._holds, {"key": key, "token": token}).scalar_one())

    def renew(self, connection: Connection, intent: Intent, token: bytes) -> None:
        """Count the window of the token's claim anew from now."""
        values = {"key": intent.key, "token": token, "microseconds": _microseconds(intent.window)}
        connection.execute(self._renew, values)

    def extend(self, connection: Connection, key: bytes, token: bytes, length: timedelta) -> int:
        """Count the lease of the token's claim anew from now, and return how many there were."""
        values = {"key": key, "token": token, "microseconds": _microseconds(length)}
        return connection.execute(self._extend, values).rowcount

    def complete(self, connection: Connection, intent: Intent, token: bytes) -> int:
        """Make the token's leased claim a settled one, and return how many there were."""
        values = {
            "key": intent.key,
            "token": token,
            "microseconds": _microseconds(intent.window),
            "from_end": intent.from_end,
        }
        return connection.execute(self._complete, values).rowcount

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""
        return connection.execute(self._release, {"key": key, "token": token}).rowcount

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims; rows that somebody holds are left for the next time."""
        keys = connection.execute(self._expired, {"limit": limit}).scalars().all()
        if keys:
            # Row by row: a list of keys may be answered by reading the whole table, and that would wait for
            # claims in flight. The rows are locked by now, so each of them is deleted.
            connection.execute(self._delete, [{"key": key} for key in keys])
        return len(keys)

    def adopt(self, engine: Engine) -> None:
        """Have the engine's pool give back the locks of connections that come home."""
        event.listen(engine, "reset", _give_back)

    def serialize_creation(self, connection: Connection) -> None:
        """Wait for other processes that are creating the table, or be the one that others wait for."""
        name = hashlib.sha256(f"create {self._table}".encode()).hexdigest()[:60]
        connection.execute(text("SELECT GET_LOCK(:name, 30)"), {"name": name}).scalar_one()
        self._note(connection, name)

    def _lock(self, connection: Connection, name: str) -> Row[Any]:
        # MySQL 8 has dropped the one name, and MariaDB got the other with 11.1 only.
        isolation = (
            "tx_isolation" if getattr(connection.dialect, "is_mariadb", False) else "transaction_isolation"
        )
        row = connection.execute(text(_LOCK.format(isolation=isolation)), {"name": name}).one()
        if row.free:
            self._note(connection, name)
        return row

    def _note(self, connection: Connection, name: str) -> None:
        """Note a lock on its connection; it is given back when the connection comes home to its pool."""
        connection.info.setdefault(_LOCKS, []).append(name)


def _give_back(driver_connection: Any, record: Any, state: Any) -> None:
    names = record.info.pop(_LOCKS, ())
    if not names or state.terminate_only:
        return  # the server frees the locks of a connection that ends
    cursor = driver_connection.cursor()
    for name in names:
        cursor.execute("DO RELEASE_LOCK(%s)", (name,))
    cursor.close()


def _answer(row: Row[Any], intent: Intent) -> Duplicate | InFlight | Mismatch | None:
    return verdict(
        intent,
        claimed_at=_utc(row.claimed_at),
        expires_at=_utc(row.expires_at),
        leased_until=None if row.leased_until is None else _utc(row.leased_until),
        fingerprint=row.fingerprint,
        now=_utc(row.at),
    )


def _utc(stored: datetime) -> datetime:
    return stored.replace(tzinfo=UTC)


def _microseconds(length: timedelta) -> int:
    return length // timedelta(microseconds=1)
