"""PostgreSQL 12 and newer, through asyncpg or psycopg.

One statement, one round trip. An advisory lock on the key, held until the transaction ends, makes an
unfinished twin visible without waiting for it: INSERT ... ON CONFLICT DO NOTHING alone does wait. The unique
key still decides who wins; the lock only keeps losers from queueing. Transaction-level locks work through
pgbouncer's transaction mode, and a crash frees them with the connection.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Boolean, Double, LargeBinary, Text, bindparam, exc, text

from fastapi_dedup.claims import Claimed, InFlight, Receipt, scope_text, verdict
from fastapi_dedup.stores.codes import sqlstate
from fastapi_dedup.stores.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from sqlalchemy import BindParameter, Connection, CursorResult, Dialect, Engine, Row, Table

    from fastapi_dedup.claims import Duplicate, Intent, Mismatch, Outcome

__all__ = ["LOOKS", "MAY_READ", "SERIALIZATION_FAILURE", "PostgreSQL", "answer_of", "receipt_of"]

SERIALIZATION_FAILURE = "40001"
LOOKS = 5
"""How often to look again. Each further look needs another commit, rollback or reaping in between."""

MAY_READ = "(:reads OR NOT attempt.free OR current_setting('transaction_isolation') <> 'serializable')"
"""Whether a claim looks for a row. Under SERIALIZABLE, to read where there is none is to conflict with who
else inserts near there. So who has the lock reads only when its INSERT has met a row."""

# The final SELECT reads the statement's snapshot, which the winner's COMMIT may postdate: then the row shows
# neither `taken` nor `found`, and the statement is run again.
_CLAIM = """
WITH attempt AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock(:lock) AS free,
           :any_snapshot OR current_setting('transaction_isolation') = 'read committed' AS fresh,
           clock_timestamp() AS at
), taken AS (
    INSERT INTO {table} (key, scope, logical_id, token, fingerprint, claimed_at, expires_at, leased_until)
    SELECT :key, :scope, :logical_id, :token, CAST(:fingerprint AS bytea),
           at, at + make_interval(secs => :term), at + make_interval(secs => :lease)
      FROM attempt
     WHERE free AND fresh
    ON CONFLICT (key) DO NOTHING
    RETURNING claimed_at, expires_at
)
SELECT attempt.free, attempt.fresh, attempt.at,
       taken.claimed_at AS taken_at, taken.expires_at AS taken_until,
       found.claimed_at AS found_at, found.expires_at AS found_until,
       found.leased_until, found.fingerprint
  FROM attempt
  LEFT JOIN taken ON true
  LEFT JOIN LATERAL (
    SELECT claimed_at, expires_at, leased_until, fingerprint FROM {table}
     WHERE key = :key
       AND {may_read}
    OFFSET 0
  ) AS found ON true
"""

_TAKE_OVER = """
UPDATE {table} AS expired
   SET token = :token, fingerprint = CAST(:fingerprint AS bytea), claimed_at = moment.at,
       expires_at = moment.at + make_interval(secs => :term),
       leased_until = moment.at + make_interval(secs => :lease)
  FROM (SELECT clock_timestamp() AS at) AS moment
 WHERE expired.key = :key AND expired.expires_at <= moment.at
RETURNING expired.claimed_at, expired.expires_at
"""

_LOOK = """
SELECT claimed_at AS found_at, expires_at AS found_until, leased_until, fingerprint, clock_timestamp() AS at
  FROM {table} WHERE key = :key
"""

_HOLDS = "SELECT count(*) FROM {table} WHERE key = :key AND token = :token"

_RENEW = """
UPDATE {table} SET expires_at = clock_timestamp() + make_interval(secs => :window)
 WHERE key = :key AND token = :token
"""

_EXTEND = """
UPDATE {table}
   SET leased_until = moment.at + make_interval(secs => :lease),
       expires_at = greatest(expires_at, moment.at + make_interval(secs => :lease))
  FROM (SELECT clock_timestamp() AS at) AS moment
 WHERE key = :key AND token = :token AND leased_until IS NOT NULL
"""

# Its lock tells twins that the row is about to change: an INSERT would wait for that, and for as long as the
# handler's transaction is inside another one. Who has the lock already is such a twin.
_COMPLETE = """
UPDATE {table}
   SET leased_until = NULL,
       expires_at = CASE WHEN :from_end THEN clock_timestamp() ELSE claimed_at END
                    + make_interval(secs => :window)
 WHERE key = :key AND token = :token AND pg_try_advisory_xact_lock(:lock) IS NOT NULL
"""

_RELEASE = "DELETE FROM {table} WHERE key = :key AND token = coalesce(CAST(:token AS bytea), token)"

# now() and not clock_timestamp(): only a stable function lets the index on expires_at be used.
_REAP = """
DELETE FROM {table} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {table} WHERE expires_at <= now() ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED
))
"""


_TYPES = {
    "lock": BigInteger,
    "any_snapshot": Boolean,
    "reads": Boolean,
    "key": LargeBinary,
    "scope": Text,
    "logical_id": Text,
    "token": LargeBinary,
    "fingerprint": LargeBinary,
    "window": Double,
    "term": Double,
    "lease": Double,
    "from_end": Boolean,
    "limit": BigInteger,
}


class _Statement:
    """A statement that SQLAlchemy compiles once, for it is run with every claim."""

    def __init__(self, template: str, table: str, dialect: Dialect) -> None:
        statement = text(template.format(table=table, may_read=MAY_READ))
        binds: list[BindParameter[Any]] = [
            bindparam(name, type_=_TYPES[name]) for name in statement.compile().params
        ]
        compiled = statement.bindparams(*binds).compile(dialect=dialect)
        self._sql = str(compiled)
        self._order: Sequence[str] | None = compiled.positiontup

    def run(self, connection: Connection, values: Mapping[str, Any]) -> CursorResult[Any]:
        """Run it; values that it does not use are left alone."""
        if self._order is None:
            return connection.exec_driver_sql(self._sql, dict(values))
        return connection.exec_driver_sql(self._sql, tuple([values[name] for name in self._order]))


class PostgreSQL:
    """The statements of PostgreSQL.

    Attributes:
        table: The table's name, quoted where that is needed.
    """

    keeps = frozenset(Promise)

    def __init__(self, table: Table, dialect: Dialect) -> None:
        name = self.table = dialect.identifier_preparer.format_table(table)
        self._claim = _Statement(_CLAIM, name, dialect)
        self._take_over = _Statement(_TAKE_OVER, name, dialect)
        self._look = _Statement(_LOOK, name, dialect)
        self._holds = _Statement(_HOLDS, name, dialect)
        self._renew_window = _Statement(_RENEW, name, dialect)
        self._extend = _Statement(_EXTEND, name, dialect)
        self._complete = _Statement(_COMPLETE, name, dialect)
        self._release = _Statement(_RELEASE, name, dialect)
        self._reap = _Statement(_REAP, name, dialect)
        # Two tables of claims in one database must not see each other's flights.
        self._salt = _salt(name)

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""
        values = {
            "lock": self.lock_of(intent.key),
            "any_snapshot": False,
            "reads": False,
            "key": intent.key,
            "scope": scope_text(intent.scope),
            "logical_id": intent.logical_id,
            "token": token,
            "fingerprint": intent.fingerprint,
            "term": intent.term.total_seconds(),
            "lease": None if intent.lease is None else intent.lease.length.total_seconds(),
        }
        for _ in range(LOOKS):
            row = self._claim.run(connection, values).one()
            if row.free and not row.fresh and row.found_at is None:
                seen = self._claim_on_snapshot(connection, values)
                if seen is None:
                    break
                row = seen
            if row.taken_at is not None:
                return Claimed(receipt_of(token, row.taken_at, row.taken_until))
            if (answer := answer_of(row, intent)) is not None:
                return answer
            if not row.free:
                return InFlight()
            if row.found_at is not None:
                renewed = self._on_snapshot(connection, self._take_over, values)
                if renewed is not None:
                    return Claimed(receipt_of(token, renewed.claimed_at, renewed.expires_at))
                if not row.fresh:
                    break
        return InFlight()

    def _claim_on_snapshot(self, connection: Connection, values: dict[str, Any]) -> Row[Any] | None:
        row = self._on_snapshot(connection, self._claim, values | {"any_snapshot": True})
        if row is None or row.taken_at is not None or row.found_at is not None:
            return row
        return self._claim.run(connection, values | {"reads": True}).one()  # its INSERT has met a row

    def _on_snapshot(
        self, connection: Connection, statement: _Statement, values: dict[str, Any]
    ) -> Row[Any] | None:
        """Run a statement that a snapshot may make fail; None where it does, or has nothing to do.

        Under REPEATABLE READ and SERIALIZABLE, what others have committed behind the snapshot makes even
        ON CONFLICT DO NOTHING fail with 40001, which would abort the caller's transaction. It does not say
        why: the id may be done, reaped, or no concern of the other transaction's at all. So the answer is
        "not yet", and a retry, with a snapshot of its own, is told the truth.
        """
        try:
            with connection.begin_nested():
                return statement.run(connection, values).one_or_none()
        except exc.DBAPIError as error:
            if sqlstate(error) != SERIALIZATION_FAILURE:
                raise
            return None

    def look(self, connection: Connection, intent: Intent) -> Outcome | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        row = self._look.run(connection, {"key": intent.key}).one_or_none()
        return None if row is None else answer_of(row, intent)

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there, by the view of the connection's transaction."""
        return bool(self._holds.run(connection, {"key": key, "token": token}).scalar_one())

    def renew(self, connection: Connection, intent: Intent, token: bytes) -> None:
        """Count the window of the token's claim anew from now."""
        values = {"key": intent.key, "token": token, "window": intent.window.total_seconds()}
        self._renew_window.run(connection, values)

    def extend(self, connection: Connection, key: bytes, token: bytes, length: timedelta) -> int:
        """Count the lease of the token's claim anew from now, and return how many there were."""
        values = {"key": key, "token": token, "lease": length.total_seconds()}
        return self._extend.run(connection, values).rowcount

    def complete(self, connection: Connection, intent: Intent, token: bytes) -> int | None:
        """Make the token's leased claim a settled one, and return how many there were.

        None under REPEATABLE READ and SERIALIZABLE where the claim, or its last extension, was committed
        behind the transaction's snapshot.
        """
        values = {
            "lock": self.lock_of(intent.key),
            "key": intent.key,
            "token": token,
            "window": intent.window.total_seconds(),
            "from_end": intent.from_end,
        }
        told = connection.get_execution_options().get("isolation_level")
        if (told or connection.get_isolation_level()) == "READ COMMITTED":
            return self._complete.run(connection, values).rowcount
        try:
            with connection.begin_nested():
                return self._complete.run(connection, values).rowcount or None
        except exc.DBAPIError as error:
            if sqlstate(error) != SERIALIZATION_FAILURE:
                raise
            return None

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""
        return self._release.run(connection, {"key": key, "token": token}).rowcount

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims; rows that somebody holds are left for the next time."""
        return self._reap.run(connection, {"limit": limit}).rowcount

    def adopt(self, engine: Engine) -> None:
        """Nothing to prepare."""

    def serialize_creation(self, connection: Connection) -> bool:
        """CREATE TABLE IF NOT EXISTS can still collide with itself, so only one process at a time tries."""
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": self.lock_of(bytes(8))})
        return True

    def lock_of(self, key: bytes) -> int:
        """Return the advisory lock of a key."""
        return int.from_bytes(key[:8], "big", signed=True) ^ self._salt


def _salt(table: str) -> int:
    return int.from_bytes(hashlib.sha256(table.encode()).digest()[:8], "big", signed=True)


def receipt_of(token: bytes, claimed_at: datetime, expires_at: datetime) -> Receipt:
    """Return the receipt of a claim that was just made."""
    # Drivers give times in the connection's time zone.
    return Receipt(token, claimed_at.astimezone(UTC), expires_at.astimezone(UTC))


def answer_of(row: Row[Any], intent: Intent) -> Duplicate | InFlight | Mismatch | None:
    """Return what a row that was found answers; None where there is none, or its window is over."""
    if row.found_at is None:
        return None
    return verdict(
        intent,
        claimed_at=row.found_at.astimezone(UTC),
        expires_at=row.found_until.astimezone(UTC),
        leased_until=row.leased_until,
        fingerprint=None if row.fingerprint is None else bytes(row.fingerprint),  # psycopg2's is a memoryview
        now=row.at,
    )
