"""What the batches of one kind of database do, and the way that serves every one: one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from fastapi_dedup.claims import Intent, Outcome

__all__ = ["Batches", "OneByOne", "Single"]


class Batches(Protocol):
    """The statements for many ids, inside the connection's transaction.

    The ids of a call differ, are of one scope and window, and come in the order of their keys: whatever waits
    for a row waits in that order, so two batches never wait for each other.
    """

    def claim(self, connection: Connection, intents: Sequence[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""

    def hold(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""

    def release(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""


class Single(Protocol):
    """The statements for one id, as far as a batch can be made of them."""

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there."""

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's."""


class OneByOne:
    """Batches on a database that has nothing better: the statements for one id, again and again.

    Args:
        single: The statements for one id.
    """

    def __init__(self, single: Single) -> None:
        self._single = single

    def claim(self, connection: Connection, intents: Sequence[Intent], token: bytes) -> dict[bytes, Outcome]:
        """Take the ids, and return what came of each by its key."""
        return {intent.key: self._single.claim(connection, intent, token) for intent in intents}

    def hold(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> bool:
        """Tell whether all of the token's claims are there, by the view of the connection's transaction."""
        return all(self._single.holds(connection, key, token) for key in keys)

    def release(self, connection: Connection, keys: Sequence[bytes], token: bytes) -> int:
        """Delete the token's claims, and return how many were deleted."""
        return sum(self._single.release(connection, key, token) for key in keys)
