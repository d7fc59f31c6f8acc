"""The guard as a whole store: duplicates are suppressed in this process, at best effort, without a database.

What it remembers is lost with the process, and siblings do not know of it. See `fastapi_dedup.guard`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import Claimed, Duplicate, Fate, InFlight, Receipt
from fastapi_dedup.guard import Seen

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.guard import GenerationalGuard
    from fastapi_dedup.store import Transaction

__all__ = ["MemoryStore", "MemoryTransaction"]


class MemoryTransaction:
    """What a claim in memory waits for: the success of its delivery, and then the handler's COMMIT.

    Args:
        around: The transaction that the handler works in. The claim asks nothing of it; but where it is
            still open when the delivery has succeeded, its end decides.
    """

    used = True
    idle = True

    def __init__(self, around: Transaction) -> None:
        self._around = around
        self._decided: list[Callable[[Fate], None]] = []

    @property
    def session(self) -> Any:
        """The session that the handler works with."""
        return self._around.session

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the delivery ends."""
        self._decided.append(decided)

    def forget(self) -> None:
        """There is nothing to take anew."""

    async def step_aside(self) -> bool:
        """Say whether a duplicate may wait: not with a connection in its hands."""
        return self._around.idle

    async def commit(self) -> None:
        """Remember what was claimed, as soon as the work is durable."""
        if self._around.idle:
            self._end(Fate.COMMITTED)
        else:
            self._around.watch(self._end)

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
    """

    sees_in_flight = True
    durable = False
    refusals_logged_at = logging.DEBUG

    def __init__(self, guard: GenerationalGuard) -> None:
        self._guard = guard
        self._realm = os.urandom(8)

    def here(self, intent: Intent) -> Intent:
        """Return an intent as one in this store: a claim of the same id in another store is another claim."""
        return replace(intent, realm=self._realm)

    async def claim(self, intent: Intent, transaction: Transaction) -> Outcome:
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
        return Claimed(Receipt(b"", now, now + self._guard.window))

    async def look(self, intent: Intent, _: Transaction) -> Outcome | None:
        """Return what a remembered id answers; None where it is unknown."""
        return Duplicate() if self._guard.look(intent.guard_key) is Seen.PROCESSED else None

    async def renew(self, intent: Intent, receipt: Receipt, transaction: Transaction) -> None:
        """A guard counts from the end of the work as it is."""

    async def withdraw(self, _: Intent, __: Receipt, transaction: Transaction) -> None:
        """Let the id run again."""
        await transaction.rollback()

    async def release(self, intent: Intent, _: Receipt) -> bool:
        """Let the id run again."""
        return self.forget(intent)

    def forget(self, intent: Intent) -> bool:
        """Let an id run again whatever its payload was, and tell whether it was remembered."""
        return self._guard.forget(self.here(intent).key)
