"""Batches of any size: in the order of their keys, and in statements of bounded size."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fastapi_dedup.stores.batches.mysql import MySQLBatches
from fastapi_dedup.stores.batches.one_by_one import OneByOne
from fastapi_dedup.stores.batches.postgresql import PostgreSQLBatches
from fastapi_dedup.stores.batches.sqlite import SQLiteBatches
from fastapi_dedup.stores.dialects.mysql import MySQL
from fastapi_dedup.stores.dialects.postgresql import PostgreSQL
from fastapi_dedup.stores.dialects.sqlite import SQLite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sqlalchemy import Connection

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.stores.batches.one_by_one import Batches, Single

__all__ = ["AT_ONCE", "InOrder"]

AT_ONCE = 1000
"""How many ids of a batch one statement takes."""

T = TypeVar("T")


class InOrder:
    """The statements for many ids, as many as there may be and in whatever order.

    Args:
        single: The statements for one id.
    """

    def __init__(self, single: Single) -> None:
        self._batches = _batches_of(single)

    def claim(self, connection: Connection, intents: Iterable[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""
        outcomes: dict[bytes, Outcome] = {}
        for some in _chunks(sorted(intents, key=_key_of)):
            outcomes |= self._batches.claim(connection, some, token)
        return outcomes

    def hold(self, connection: Connection, keys: Iterable[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""
        return all(self._batches.hold(connection, some, token) for some in _chunks(sorted(keys)))

    def release(self, connection: Connection, keys: Iterable[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""
        return sum(self._batches.release(connection, some, token) for some in _chunks(sorted(keys)))


def _batches_of(single: Single) -> Batches:
    match single:
        case MySQL():
            return MySQLBatches(single)
        case PostgreSQL():
            return PostgreSQLBatches(single)
        case SQLite():
            return SQLiteBatches(single)
    return OneByOne(single)


def _key_of(intent: Intent) -> bytes:
    return intent.key


def _chunks(many: Sequence[T]) -> Iterator[Sequence[T]]:
    return (many[start : start + AT_ONCE] for start in range(0, len(many), AT_ONCE))
