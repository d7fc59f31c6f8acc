"""Batches on MariaDB and MySQL: the steps of a single id, each for all ids at once.

    1. Try every named lock, and look what is committed.      one SELECT
    2. Insert what is neither taken nor there.                one INSERT; the usual batch ends here
    3. Where that met a row of somebody's, or something has expired: insert or take over, row by row but in
       one statement, and then read whose the rows are.       one INSERT, one SELECT

The ids travel as one JSON document, so the statements' text is always the same. InnoDB locks rows, and the
gaps before the rows that it meets, in the order of the statement, which is that of the keys.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import exc, text

from fastapi_dedup.claims import Claimed, InFlight, Receipt, scope_text
from fastapi_dedup.stores.codes import Kind, kind
from fastapi_dedup.stores.dialects.mysql import answer_of, server_of, utc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, TextClause

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.stores.dialects.mysql import MySQL

__all__ = ["MySQLBatches"]

# Keys and ids travel in hexadecimal: nothing that JSON or a character set does to text can touch them.
_WANTED = """
JSON_TABLE(:wanted, '$[*]' COLUMNS (
    number FOR ORDINALITY,
    wanted_key CHAR(64) PATH '$[0]',
    lock_name CHAR(60) PATH '$[1]',
    id VARCHAR(2040) PATH '$[2]',
    payload CHAR(64) PATH '$[3]'
)) AS wanted
"""

# SERIALIZABLE turns the look into one that waits for twins, and READ UNCOMMITTED takes them for committed.
# With NULL for a key it looks at no row.
_LOCK = f"""
SELECT wanted.number, wanted.lock_name, GET_LOCK(wanted.lock_name, 0) AS free, UTC_TIMESTAMP(6) AS at,
       held.claimed_at, held.expires_at, held.leased_until, held.fingerprint
  FROM {_WANTED}
  LEFT JOIN {{table}} AS held FORCE INDEX (PRIMARY)
    ON held.`key` = IF(
       @@{{isolation}} IN ('SERIALIZABLE', 'READ-UNCOMMITTED'), NULL, UNHEX(wanted.wanted_key))
"""  # noqa: S608 - the expressions are the constants above, the table's name is quoted

_INSERT = f"""
{{past_snapshot}}INSERT INTO {{table}} (`key`, scope, logical_id, token, fingerprint, claimed_at, expires_at)
SELECT UNHEX(wanted.wanted_key), :scope, CONVERT(UNHEX(wanted.id) USING utf8mb4), :token,
       UNHEX(wanted.payload), :claimed_at, :expires_at
  FROM {_WANTED}
"""  # noqa: S608

# Another unique key than ours must change nothing. Assignments see what those before them have assigned:
# expires_at decides, so it comes last.
_OURS = "`key` = VALUES(`key`) AND expires_at <= :claimed_at"
_INSERT_OR_TAKE_OVER = f"""{_INSERT}
ON DUPLICATE KEY UPDATE
       token = IF({_OURS}, VALUES(token), token),
       fingerprint = IF({_OURS}, VALUES(fingerprint), fingerprint),
       claimed_at = IF({_OURS}, VALUES(claimed_at), claimed_at),
       leased_until = IF({_OURS}, NULL, leased_until),
       expires_at = IF({_OURS}, VALUES(expires_at), expires_at)
"""

# Joined in this order and by the primary key: a list of keys may be answered by reading the whole table, and
# that would wait for claims in flight.
_JOINED = f"""
  FROM {_WANTED}
 STRAIGHT_JOIN {{table}} AS held FORCE INDEX (PRIMARY) ON held.`key` = UNHEX(wanted.wanted_key)
"""

# FOR UPDATE reads what is committed, whatever snapshot the transaction has. The rows are locked by now.
_WHOSE = f"""
{{past_snapshot}}SELECT wanted.number, held.token, UTC_TIMESTAMP(6) AS at,
       held.claimed_at, held.expires_at, held.leased_until, held.fingerprint
{_JOINED} FOR UPDATE
"""

_HOLD = f"SELECT count(*) {_JOINED} WHERE held.token = :token"

_RELEASE = f"DELETE held {_JOINED} WHERE held.token = :token"


class _Claiming(NamedTuple):
    """The statements that one kind of server takes otherwise than another."""

    lock: TextClause
    insert: TextClause
    insert_or_take_over: TextClause
    whose: TextClause

    @classmethod
    def on(cls, server: Mapping[str, str], table: str) -> _Claiming:
        """Return the statements for a kind of server."""
        templates = (_LOCK, _INSERT, _INSERT_OR_TAKE_OVER, _WHOSE)
        return cls(*(text(template.format(table=table, **server)) for template in templates))


class MySQLBatches:
    """The statements of MariaDB and MySQL for many ids.

    Args:
        single: The statements for one id.
    """

    def __init__(self, single: MySQL) -> None:
        self._single = single
        self._claiming: _Claiming | None = None
        self._hold = text(_HOLD.format(table=single.table))
        self._release = text(_RELEASE.format(table=single.table))

    def claim(self, connection: Connection, intents: Sequence[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""
        claiming = self._claiming or self._claiming_on(connection.dialect)
        rows = connection.execute(claiming.lock, {"wanted": self._document(connection, intents)}).all()
        self._single.note(connection, *(row.lock_name for row in rows if row.free))
        outcomes: dict[bytes, Outcome] = {}
        free: set[bytes] = set()
        expired = False
        for row in rows:
            intent = intents[row.number - 1]
            answer = None if row.claimed_at is None else answer_of(row, intent)
            if answer is None and row.free:
                free.add(intent.key)
                expired |= row.claimed_at is not None
            else:
                outcomes[intent.key] = answer or InFlight()
        if free:
            wanted = [intent for intent in intents if intent.key in free]
            outcomes |= self._take(connection, wanted, token, rows[0].at, expired=expired)
        return outcomes

    def _take(
        self, connection: Connection, intents: Sequence[Intent], token: bytes, at: datetime, *, expired: bool
    ) -> dict[bytes, Outcome]:
        """Insert claims, and take those over that have expired."""
        claiming = self._claiming or self._claiming_on(connection.dialect)
        expires_at = at + intents[0].window
        claimed = Claimed(Receipt(token, utc(at), utc(expires_at)))
        values = {
            "wanted": self._document(connection, intents),
            "scope": scope_text(intents[0].scope),
            "token": token,
            "claimed_at": at,
            "expires_at": expires_at,
        }
        if not expired:
            try:
                connection.execute(claiming.insert, values)
            except exc.IntegrityError as error:
                if kind(error) is not Kind.DUPLICATE:
                    raise
            else:
                return dict.fromkeys((intent.key for intent in intents), claimed)
        connection.execute(claiming.insert_or_take_over, values)
        outcomes: dict[bytes, Outcome] = {}
        for row in connection.execute(claiming.whose, values).all():
            intent = intents[row.number - 1]
            outcomes[intent.key] = claimed if row.token == token else answer_of(row, intent) or InFlight()
        left = [intent for intent in intents if intent.key not in outcomes]
        if left:  # another unique key than ours is in the way: say so
            connection.execute(claiming.insert, values | {"wanted": self._document(connection, left)})
            outcomes |= dict.fromkeys((intent.key for intent in left), claimed)
        return outcomes

    def _claiming_on(self, dialect: Any) -> _Claiming:
        self._claiming = _Claiming.on(server_of(dialect), self._single.table)
        return self._claiming

    def _document(self, connection: Connection, intents: Sequence[Intent]) -> str:
        return json.dumps(
            [
                [
                    intent.key.hex(),
                    self._single.lock_of(connection, intent.key),
                    intent.logical_id.encode().hex(),
                    intent.fingerprint and intent.fingerprint.hex(),
                ]
                for intent in intents
            ]
        )

    def hold(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""
        held = connection.execute(self._hold, {"wanted": _keys(keys), "token": token}).scalar_one()
        return bool(held == len(keys))

    def release(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""
        return connection.execute(self._release, {"wanted": _keys(keys), "token": token}).rowcount


def _keys(keys: Sequence[bytes]) -> str:
    return json.dumps([[key.hex()] for key in keys])
