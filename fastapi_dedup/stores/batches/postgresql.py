"""Batches on PostgreSQL: one statement over arrays in key order, which works as the one for a single id does.

Every id that is claimed takes an advisory lock until the transaction ends, and the server has room for
max_locks_per_transaction x max_connections locks in all (6,400 by default), tables included. A batch that
does not find room fails as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Boolean, Double, LargeBinary, Text, bindparam, exc, text
from sqlalchemy.dialects.postgresql import ARRAY, BIGINT

from fastapi_dedup.claims import Claimed, InFlight, scope_text
from fastapi_dedup.errors import StoreUnavailableError
from fastapi_dedup.stores.batches.one_by_one import OneByOne
from fastapi_dedup.stores.codes import sqlstate
from fastapi_dedup.stores.dialects.postgresql import (
    LOOKS,
    MAY_READ,
    SERIALIZATION_FAILURE,
    answer_of,
    receipt_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from sqlalchemy import Connection, Row, TextClause

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.stores.dialects.postgresql import PostgreSQL

__all__ = ["PostgreSQLBatches"]

_OUT_OF_LOCKS = "53200"

_WANTED = """
wanted AS MATERIALIZED (
    SELECT * FROM unnest(:keys, :locks, :logical_ids, :fingerprints)
               AS each (key, lock, logical_id, fingerprint)
)
"""

# The moment is read in `attempt`, and thus while its locks are taken: a claim counts from then.
_CLAIM = f"""
WITH {_WANTED}, attempt AS MATERIALIZED (
    SELECT wanted.*, pg_try_advisory_xact_lock(lock) AS free,
           :any_snapshot OR current_setting('transaction_isolation') = 'read committed' AS fresh,
           clock_timestamp() AS at
      FROM wanted
), taken AS (
    INSERT INTO {{table}} (key, scope, logical_id, token, fingerprint, claimed_at, expires_at)
    SELECT key, :scope, logical_id, :token, fingerprint, at, at + make_interval(secs => :window)
      FROM attempt
     WHERE free AND fresh
    ON CONFLICT (key) DO NOTHING
    RETURNING key, claimed_at, expires_at
)
SELECT attempt.key, attempt.free, attempt.fresh, attempt.at,
       taken.claimed_at AS taken_at, taken.expires_at AS taken_until,
       found.claimed_at AS found_at, found.expires_at AS found_until,
       found.leased_until, found.fingerprint
  FROM attempt
  LEFT JOIN taken ON taken.key = attempt.key
  LEFT JOIN LATERAL (
    SELECT claimed_at, expires_at, leased_until, fingerprint FROM {{table}} AS each
     WHERE each.key = attempt.key
       AND {MAY_READ}
    OFFSET 0
  ) AS found ON true
"""  # noqa: S608 - the expressions are the constants above, the table's name is quoted

_TAKE_OVER = f"""
WITH {_WANTED}, moment AS MATERIALIZED (SELECT clock_timestamp() AS at)
UPDATE {{table}} AS expired
   SET token = :token, fingerprint = wanted.fingerprint, claimed_at = moment.at,
       expires_at = moment.at + make_interval(secs => :window), leased_until = NULL
  FROM wanted, moment
 WHERE expired.key = wanted.key AND expired.expires_at <= moment.at
RETURNING expired.key, expired.claimed_at AS taken_at, expired.expires_at AS taken_until
"""  # noqa: S608

_HOLD = "SELECT count(*) FROM {table} WHERE key = ANY (:keys) AND token = :token"

_RELEASE = "DELETE FROM {table} WHERE key = ANY (:keys) AND token = :token"

_TYPES: Mapping[str, Any] = {
    "keys": ARRAY(LargeBinary),
    "locks": ARRAY(BIGINT),
    "logical_ids": ARRAY(Text),
    "fingerprints": ARRAY(LargeBinary),
    "any_snapshot": Boolean,
    "reads": Boolean,
    "scope": Text,
    "token": LargeBinary,
    "window": Double,
}


def _statement(template: str, table: str) -> TextClause:
    statement = text(template.format(table=table))
    return statement.bindparams(*(bindparam(name, type_=_TYPES[name]) for name in statement.compile().params))


class PostgreSQLBatches:
    """The statements of PostgreSQL for many ids.

    Args:
        single: The statements for one id.
    """

    def __init__(self, single: PostgreSQL) -> None:
        name = single.table
        self._single = single
        self._claim = _statement(_CLAIM, name)
        self._take_over = _statement(_TAKE_OVER, name)
        self._hold = _statement(_HOLD, name)
        self._release = _statement(_RELEASE, name)

    def claim(self, connection: Connection, intents: Sequence[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""
        try:
            return self._claim_all(connection, intents, token)
        except exc.DBAPIError as error:
            if sqlstate(error) != _OUT_OF_LOCKS:
                raise
            msg = (
                f"PostgreSQL has no room for the locks of {len(intents)} more claims: make batches smaller, "
                "let fewer of them run at once, or raise max_locks_per_transaction"
            )
            raise StoreUnavailableError(msg) from error

    def _claim_all(
        self, connection: Connection, intents: Sequence[Intent], token: bytes
    ) -> dict[bytes, Outcome]:
        left = {intent.key: intent for intent in intents}
        outcomes: dict[bytes, Outcome] = {}
        for _ in range(LOOKS):
            rows = connection.execute(self._claim, self._values(left.values(), token)).all()
            outcomes |= _answers(rows, left, token)
            expired = [left[key] for key, row in _by_key(rows) if key not in outcomes and row.found_at]
            left = {key: intent for key, intent in left.items() if key not in outcomes}
            if left and not rows[0].fresh:
                return outcomes | self._claim_on_snapshot(connection, list(left.values()), expired, token)
            if expired:
                outcomes |= self._taken_over(connection, expired, token)
                left = {key: intent for key, intent in left.items() if key not in outcomes}
            if not left:
                break
        return outcomes | dict.fromkeys(left, InFlight())

    def _claim_on_snapshot(
        self, connection: Connection, intents: Sequence[Intent], expired: Sequence[Intent], token: bytes
    ) -> dict[bytes, Outcome]:
        """Take ids that are free by the snapshot of a transaction under REPEATABLE READ or SERIALIZABLE.

        One id of them that others have committed behind the snapshot makes the statement fail, and does not
        say which it was. Then they are tried one by one.
        """
        absent = [intent for intent in intents if intent not in expired]
        outcomes: dict[bytes, Outcome] = dict.fromkeys((intent.key for intent in intents), InFlight())
        try:
            with connection.begin_nested():
                if absent:
                    values = self._values(absent, token) | {"any_snapshot": True}
                    rows = connection.execute(self._claim, values).all()
                    outcomes |= _answers(rows, {intent.key: intent for intent in absent}, token)
                    met = {
                        key for key, row in _by_key(rows) if row.free and not (row.taken_at or row.found_at)
                    }
                    if met:  # under SERIALIZABLE, where it has not looked yet
                        asked = {intent.key: intent for intent in absent if intent.key in met}
                        values = self._values(asked.values(), token) | {"reads": True}
                        rows = connection.execute(self._claim, values).all()
                        told = _answers(rows, asked, token)
                        outcomes |= told
                        expired = [*expired, *(asked[key] for key, row in _by_key(rows) if key not in told)]
                if expired:
                    outcomes |= self._taken_over(connection, expired, token)
        except exc.DBAPIError as error:
            if sqlstate(error) != SERIALIZATION_FAILURE:
                raise
            return OneByOne(self._single).claim(connection, intents, token)
        return outcomes

    def _taken_over(
        self, connection: Connection, expired: Sequence[Intent], token: bytes
    ) -> dict[bytes, Outcome]:
        rows = connection.execute(self._take_over, self._values(expired, token))
        return {key: Claimed(receipt_of(token, row.taken_at, row.taken_until)) for key, row in _by_key(rows)}

    def _values(self, intents: Collection[Intent], token: bytes) -> dict[str, Any]:
        some = next(iter(intents))
        return {
            "keys": [intent.key for intent in intents],
            "locks": [self._single.lock_of(intent.key) for intent in intents],
            "logical_ids": [intent.logical_id for intent in intents],
            "fingerprints": [intent.fingerprint for intent in intents],
            "any_snapshot": False,
            "reads": False,
            "scope": scope_text(some.scope),
            "token": token,
            "window": some.window.total_seconds(),
        }

    def hold(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""
        held = connection.execute(self._hold, {"keys": list(keys), "token": token}).scalar_one()
        return bool(held == len(keys))

    def release(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""
        return connection.execute(self._release, {"keys": list(keys), "token": token}).rowcount


def _by_key(rows: Iterable[Row[Any]]) -> Iterator[tuple[bytes, Row[Any]]]:
    return ((bytes(row.key), row) for row in rows)  # psycopg2 gives a memoryview, which is no key


def _answers(rows: Sequence[Row[Any]], intents: Mapping[bytes, Intent], token: bytes) -> dict[bytes, Outcome]:
    """Return what is known of ids by now: not of those that are expired, or hidden by the snapshot."""
    answers: dict[bytes, Outcome] = {}
    for key, row in _by_key(rows):
        if row.taken_at is not None:
            answers[key] = Claimed(receipt_of(token, row.taken_at, row.taken_until))
        elif (answer := answer_of(row, intents[key])) is not None:
            answers[key] = answer
        elif not row.free:
            answers[key] = InFlight()
    return answers
