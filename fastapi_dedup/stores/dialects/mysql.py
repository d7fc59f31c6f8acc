"""MariaDB 10.6 and MySQL 8.0 and newer, through asyncmy or aiomysql.

INSERT waits for an unfinished twin, up to innodb_lock_wait_timeout, and InnoDB has no row lock that
belongs to a row which is not there yet. So a named lock (GET_LOCK) on the key comes first, and says at once
whether a twin is in flight. The unique key still decides who wins. Named locks belong to the connection: the
pool gives them back when the connection comes home after COMMIT or ROLLBACK, and a crash frees them with it.
Where an app keeps its connection after a COMMIT, they are given back when the next transaction begins.

A savepoint that is rolled back keeps its named locks until then, for InnoDB keeps some of its row locks: an
INSERT over a row that was deleted a moment ago would wait for them, and so it is "not yet" instead.

Times are UTC without a zone (DATETIME(6)), from the server's clock.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import event, exc, text

from fastapi_dedup.claims import Claimed, InFlight, Receipt, scope_text, verdict
from fastapi_dedup.stores.codes import Kind, kind
from fastapi_dedup.stores.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection, Dialect, Engine, Row, Table, TextClause

    from fastapi_dedup.claims import Duplicate, Intent, Mismatch, Outcome

__all__ = ["MySQL", "answer_of", "server_of", "utc"]

_NAMED_LOCKS = "fastapi_dedup.locks"
_RELEASED_AT_ONCE = 1000
_LOOKS = 5
"""How often to look again. Each further look needs another release or reaping in between."""

# A plain SELECT waits for the twin's row at SERIALIZABLE, and takes it for committed at READ UNCOMMITTED.
_LOCK = """
SELECT GET_LOCK(:name, 0) AS free, UTC_TIMESTAMP(6) AS at,
       found.claimed_at, found.expires_at, found.leased_until, found.fingerprint
  FROM (SELECT 1) AS attempt
  LEFT JOIN {table} AS found
    ON found.`key` = IF(@@{isolation} IN ('SERIALIZABLE', 'READ-UNCOMMITTED'), NULL, :key)
"""

_INSERT = """
{past_snapshot}INSERT INTO {table}
       (`key`, scope, logical_id, token, fingerprint, claimed_at, expires_at, leased_until)
VALUES (:key, :scope, :logical_id, :token, :fingerprint, :claimed_at, :expires_at, :leased_until)
"""

# FOR UPDATE reads what is committed, whatever snapshot the transaction has.
_LOOK = """
SELECT claimed_at, expires_at, leased_until, fingerprint, UTC_TIMESTAMP(6) AS at
  FROM {table} WHERE `key` = :key
"""
_LOOK_BEHIND_THE_SNAPSHOT = "{past_snapshot}" + _LOOK.lstrip() + " FOR UPDATE"

_TAKE_OVER = """
{past_snapshot}UPDATE {table}
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
{past_snapshot}UPDATE {table}
   SET leased_until = NULL,
       expires_at = IF(:from_end, UTC_TIMESTAMP(6), claimed_at) + INTERVAL :microseconds MICROSECOND
 WHERE `key` = :key AND token = :token
"""
_RELEASE = "DELETE FROM {table} WHERE `key` = :key AND token = coalesce(:token, token)"
_SETTLED = "SELECT `key` FROM {table} WHERE `key` = :key FOR UPDATE SKIP LOCKED"
# At REPEATABLE READ the reaper would lock the gaps that new claims are inserted into.
_REAP_AT = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_EXPIRED = """
SELECT `key` FROM {table} WHERE expires_at <= UTC_TIMESTAMP(6)
 ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
"""
# A list of keys may be answered by reading the whole table, and that would wait for claims in flight. This
# join goes from key to row, whatever the statistics say.
_DELETE = """
DELETE claim
  FROM JSON_TABLE(:keys, '$[*]' COLUMNS (digits CHAR(64) PATH '$')) AS expired
  STRAIGHT_JOIN {table} AS claim ON claim.`key` = UNHEX(expired.digits)
"""


class _Claiming(NamedTuple):
    """The statements that one kind of server takes otherwise than another."""

    lock: TextClause
    insert: TextClause
    look_behind: TextClause
    take_over: TextClause
    complete: TextClause

    @classmethod
    def on(cls, server: Mapping[str, str], table: str) -> _Claiming:
        """Return the statements for a kind of server."""
        templates = (_LOCK, _INSERT, _LOOK_BEHIND_THE_SNAPSHOT, _TAKE_OVER, _COMPLETE)
        return cls(*(text(template.format(table=table, **server)) for template in templates))


# MySQL 8 has dropped the one name of the isolation level, and MariaDB got the other with 11.1 only.
_MYSQL = {"isolation": "transaction_isolation", "past_snapshot": ""}
_MARIADB = {"isolation": "tx_isolation", "past_snapshot": ""}
# Where innodb_snapshot_isolation is on, as from MariaDB 11.6, meeting what was committed behind the snapshot
# rolls the whole transaction back. Ours are the statements that want to meet it.
_MARIADB_WITH_SNAPSHOTS = _MARIADB | {"past_snapshot": "SET STATEMENT innodb_snapshot_isolation = OFF FOR "}


def _has_snapshots(version: tuple[int, ...]) -> bool:
    if version[:3] == (5, 5, 5):  # what MariaDB 10 says first, for the sake of old replicas
        version = version[3:]
    return version >= (11, 4, 2) or (10, 11, 8) <= version < (11,) or (10, 6, 18) <= version < (10, 7)


def server_of(dialect: Any) -> Mapping[str, str]:
    """Return what a kind of server says otherwise than another. Which it is, is known once connected."""
    if not dialect.is_mariadb:
        return _MYSQL
    return _MARIADB_WITH_SNAPSHOTS if _has_snapshots(dialect.server_version_info) else _MARIADB


class MySQL:
    """The statements of MariaDB and MySQL.

    Attributes:
        table: The table's name, quoted where that is needed.
    """

    keeps = frozenset(Promise) - {Promise.FREE_WITH_SAVEPOINT}

    def __init__(self, table: Table, dialect: Dialect) -> None:
        name = dialect.identifier_preparer.format_table(table)
        self._claiming: _Claiming | None = None
        self._look = text(_LOOK.format(table=name))
        self._holds = text(_HOLDS.format(table=name))
        self._renew = text(_RENEW.format(table=name))
        self._extend = text(_EXTEND.format(table=name))
        self._release = text(_RELEASE.format(table=name))
        self._settled = text(_SETTLED.format(table=name))
        self._expired = text(_EXPIRED.format(table=name))
        self._delete = text(_DELETE.format(table=name))
        self.table = name

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""
        statements = self._claiming or self._claiming_on(connection.dialect)
        lock = self._lock(connection, statements.lock, intent.key)
        if lock.claimed_at is not None and (seen := answer_of(lock, intent)) is not None:
            return seen
        if not lock.free:
            return InFlight()
        for turn in range(_LOOKS):
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
            receipt = Receipt(token, utc(lock.at), utc(lock.at + intent.term))
            try:
                connection.execute(statements.insert, values)
            except exc.IntegrityError as error:
                if kind(error) is not Kind.DUPLICATE:
                    raise
                found = connection.execute(statements.look_behind, {"key": intent.key}).one_or_none()
                if found is None:
                    if turn == _LOOKS - 1:
                        raise  # it was another unique key than ours, all the time
                    continue  # a release or the reaper was quicker
            else:
                return Claimed(receipt)
            if (answer := answer_of(found, intent)) is not None:
                return answer
            connection.execute(statements.take_over, values)
            return Claimed(receipt)
        return InFlight()

    def look(self, connection: Connection, intent: Intent) -> Duplicate | InFlight | Mismatch | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        row = connection.execute(self._look, {"key": intent.key}).one_or_none()
        return None if row is None else answer_of(row, intent)

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
        statements = self._claiming or self._claiming_on(connection.dialect)
        return connection.execute(statements.complete, values).rowcount

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""
        if token is None and connection.execute(self._settled, {"key": key}).first() is None:
            return 0  # an operator's DELETE would wait for a claim in flight, and then undo it
        return connection.execute(self._release, {"key": key, "token": token}).rowcount

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims; rows that somebody holds are left for the next time."""
        connection.exec_driver_sql(_REAP_AT)
        keys = connection.execute(self._expired, {"limit": limit}).scalars().all()
        if not keys:
            return 0
        return connection.execute(self._delete, {"keys": json.dumps([key.hex() for key in keys])}).rowcount

    def adopt(self, engine: Engine) -> None:
        """Have the locks of connections given back that come home to their pool, roll back, or begin anew."""
        event.listen(engine, "reset", _give_back)
        event.listen(engine, "rollback", _give_back_early)
        event.listen(engine, "begin", _give_back_early)

    def serialize_creation(self, connection: Connection) -> bool:
        """Wait for other processes that are creating the table, or be the one that others wait for."""
        name = self.lock_of(connection, b"create")
        connection.execute(text("SELECT GET_LOCK(:name, 30)"), {"name": name}).scalar_one()
        self.note(connection, name)
        return True

    def _claiming_on(self, dialect: Any) -> _Claiming:
        self._claiming = _Claiming.on(server_of(dialect), self.table)
        return self._claiming

    def _lock(self, connection: Connection, statement: TextClause, key: bytes) -> Row[Any]:
        name = self.lock_of(connection, key)
        row = connection.execute(statement, {"name": name, "key": key}).one()
        if row.free:
            self.note(connection, name)
        return row

    def lock_of(self, connection: Connection, key: bytes) -> str:
        """Return the name of a lock. Names are the server's, and its other databases have such tables too."""
        where = f"{connection.engine.url.database} {self.table} ".encode()
        return hashlib.sha256(where + key).hexdigest()[:60]

    def note(self, connection: Connection, *names: str) -> None:
        """Note locks on their connection; they are given back when it comes home to its pool."""
        connection.info.setdefault(_NAMED_LOCKS, []).extend(names)


def _give_back_early(connection: Connection) -> None:
    """Give the locks of a connection back that its owner keeps after a ROLLBACK or a COMMIT."""
    if not connection.invalidated and (names := connection.info.pop(_NAMED_LOCKS, ())):
        _release(connection.connection, names)


def _give_back(driver_connection: Any, record: Any, state: Any) -> None:
    names = record.info.pop(_NAMED_LOCKS, ())
    if names and not state.terminate_only:  # the server frees the locks of a connection that ends
        _release(driver_connection, names)


def _release(driver_connection: Any, names: Sequence[str]) -> None:
    cursor = driver_connection.cursor()
    for start in range(0, len(names), _RELEASED_AT_ONCE):
        some = names[start : start + _RELEASED_AT_ONCE]
        cursor.execute(f"DO {', '.join(['RELEASE_LOCK(%s)'] * len(some))}", tuple(some))
    cursor.close()


def answer_of(row: Row[Any], intent: Intent) -> Duplicate | InFlight | Mismatch | None:
    """Return what a row that was found answers; None where its window is over."""
    return verdict(
        intent,
        claimed_at=utc(row.claimed_at),
        expires_at=utc(row.expires_at),
        leased_until=None if row.leased_until is None else utc(row.leased_until),
        fingerprint=row.fingerprint,
        now=utc(row.at),
    )


def utc(stored: datetime) -> datetime:
    """Return a moment as it is stored, with its zone."""
    return stored.replace(tzinfo=UTC)


def _microseconds(length: timedelta) -> int:
    return length // timedelta(microseconds=1)
