"""The guard as a whole store: duplicates are suppressed in this process, at best effort, without a database.

What it remembers is lost with the process, and siblings do not know of it. See `fastapi_dedup.guard`.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from fastapi_dedup.claims import Claimed, Duplicate, Fate, InFlight, Receipt
from fastapi_dedup.guard import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.guard import GenerationalGuard

__all__ = ["MemoryStore", "MemoryTransaction"]


class MemoryTransaction:
    """What a claim in memory waits for: the end of its delivery."""

    session = None
    used = True
    idle = True

    def __init__(self) -> None:
        self._decided: list[Callable[[Fate], None]] = []

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the delivery ends."""
        self._decided.append(decided)

    def forget(self) -> None:
        """There is nothing to forget."""

    async def step_aside(self) -> bool:
        """There is no connection to give back."""
        return True

    async def commit(self) -> None:
        """Remember what was claimed."""
        self._end(Fate.COMMITTED)

    async def rollback(self) -> None:
        """Let what was claimed run again."""
        self._end(Fate.CLOSED)

    def _end(self, fate: Fate) -> None:
        decided, self._decided = self._decided, []
        for each in decided:
            each(fate)


class MemoryStore:
    """Claims in a `GenerationalGuard`.

    Args:
        guard: The guard.
        window: How long it keeps an id at the most.
    """

    sees_in_flight = True
    refusals_logged_at = logging.DEBUG

    def __init__(self, guard: GenerationalGuard, window: timedelta) -> None:
        self._guard = guard
        self._window = window

    async def claim(self, intent: Intent, transaction: MemoryTransaction) -> Outcome:
        """Take the id, or say why not."""
        attempt = self._guard.attempt(intent.guard_key)
        if attempt.seen is not Seen.NEW:
            return Duplicate() if attempt.seen is Seen.PROCESSED else InFlight()

        def decided(fate: Fate) -> None:
            if fate is Fate.COMMITTED:
                attempt.complete()
            else:
                attempt.release()

        transaction.watch(decided)
        now = datetime.now(UTC)
        return Claimed(Receipt(b"", now, now + self._window))

    async def look(self, intent: Intent, _: MemoryTransaction) -> Outcome | None:
        """Return what a remembered id answers; None where it is unknown."""
        return Duplicate() if self._guard.look(intent.guard_key) is Seen.PROCESSED else None

    async def renew(self, intent: Intent, receipt: Receipt, transaction: MemoryTransaction) -> None:
        """A guard counts from the end of the work as it is."""

    async def withdraw(self, _: Intent, __: Receipt, transaction: MemoryTransaction) -> None:
        """Let the id run again."""
        await transaction.rollback()

    async def release(self, intent: Intent, _: Receipt | None) -> bool:
        """Let the id run again."""
        seen = self._guard.look(intent.guard_key)
        self._guard.release(intent.guard_key)
        return seen is not Seen.NEW
