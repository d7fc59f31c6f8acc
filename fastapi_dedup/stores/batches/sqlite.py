"""Batches on SQLite: one look at all ids, and one INSERT of those that are free, under the writer's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import Claimed, InFlight, Receipt, scope_text
from fastapi_dedup.stores.dialects.sqlite import NOW, answer_of, begin_immediate, modifier, time_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.stores.dialects.sqlite import SQLite

__all__ = ["SQLiteBatches"]

_LOOK = f"""
SELECT key, claimed_at, expires_at, leased_until, fingerprint, {NOW} AS at
  FROM {{table}} WHERE key IN ({{keys}})
"""  # noqa: S608 - the expressions are constants, the table's name is quoted

_CLAIM = f"""
WITH wanted (key, logical_id, fingerprint) AS (VALUES {{rows}})
INSERT INTO {{table}} AS held (key, scope, logical_id, token, fingerprint, claimed_at, expires_at)
SELECT key, ?, logical_id, ?, fingerprint, {NOW}, strftime('%Y-%m-%d %H:%M:%f', 'now', ?) || '000'
  FROM wanted
 WHERE true
ON CONFLICT (key) DO UPDATE
   SET token = excluded.token, fingerprint = excluded.fingerprint,
       claimed_at = excluded.claimed_at, expires_at = excluded.expires_at,
       leased_until = NULL
 WHERE held.expires_at <= excluded.claimed_at
RETURNING key, claimed_at, expires_at
"""  # noqa: S608

_HOLD = "SELECT count(*) FROM {table} WHERE token = ? AND key IN ({keys})"

_RELEASE = "DELETE FROM {table} WHERE token = ? AND key IN ({keys})"


class SQLiteBatches:
    """The statements of SQLite for many ids.

    Args:
        single: The statements for one id.
    """

    def __init__(self, single: SQLite) -> None:
        self._table = single.table

    def claim(self, connection: Connection, intents: Sequence[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""
        # A look takes no lock, so a batch of finished work never queues behind another writer.
        outcomes = self._look(connection, intents)
        wanted = {intent.key: intent for intent in intents if intent.key not in outcomes}
        if not wanted:
            return outcomes
        begin_immediate(connection)
        rows = ", ".join(["(?, ?, ?)"] * len(wanted))
        some = intents[0]
        values: list[Any] = []
        for intent in wanted.values():
            values += intent.key, intent.logical_id, intent.fingerprint
        values += scope_text(some.scope), token, modifier(some.window)
        for row in connection.exec_driver_sql(
            _CLAIM.format(table=self._table, rows=rows), tuple(values)
        ).all():
            receipt = Receipt(token, time_of(row.claimed_at), time_of(row.expires_at))
            outcomes[row.key] = Claimed(receipt)
        lost = [intent for intent in wanted.values() if intent.key not in outcomes]
        if lost:  # to who wrote between the look and the writer's lock
            outcomes |= dict.fromkeys((intent.key for intent in lost), InFlight())
            outcomes |= self._look(connection, lost)
        return outcomes

    def _look(self, connection: Connection, intents: Sequence[Intent]) -> dict[bytes, Outcome]:
        """Return what committed, unexpired claims answer."""
        by_key: Mapping[bytes, Intent] = {intent.key: intent for intent in intents}
        found = connection.exec_driver_sql(self._of(_LOOK, len(intents)), tuple(by_key))
        answers = ((row.key, answer_of(row, by_key[row.key])) for row in found)
        return {key: answer for key, answer in answers if answer is not None}

    def hold(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""
        held = connection.exec_driver_sql(self._of(_HOLD, len(keys)), (token, *keys)).scalar_one()
        return bool(held == len(keys))

    def release(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""
        return connection.exec_driver_sql(self._of(_RELEASE, len(keys)), (token, *keys)).rowcount

    def _of(self, statement: str, keys: int) -> str:
        return statement.format(table=self._table, keys=", ".join("?" * keys))
