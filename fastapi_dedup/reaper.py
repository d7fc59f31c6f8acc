"""The reaper: deletes expired claims in bounded batches, each in a transaction of its own.

It is housekeeping and no part of any promise: a claim whose window is over counts as absent whether or not
the reaper has met it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Protocol

from fastapi_dedup.hooks import Event, EventKind, tell

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from fastapi_dedup.hooks import Hook

__all__ = ["Reaper"]

logger = logging.getLogger("fastapi_dedup")


class Reapable(Protocol):
    """A store whose expired claims need deleting."""

    async def reap(self, limit: int) -> int:
        """Delete at most so many expired claims in one transaction, and return how many."""


class Reaper:
    """Sweeps again and again until it is stopped. One per process; any number of processes may sweep.

    Args:
        store: Whose claims to reap.
        every: How long to pause between two sweeps; each pause is jittered by a quarter, and so is the
            first, so that workers that start together do not sweep together.
        batch: The most claims that one statement deletes.
        hooks: Who hears of a sweep that deleted something.
    """

    def __init__(self, store: Reapable, *, every: timedelta, batch: int, hooks: Sequence[Hook]) -> None:
        self._store = store
        self._every = every.total_seconds()
        self._batch = batch
        self._hooks = hooks
        self._loop: asyncio.Task[None] | None = None

    async def run_once(self) -> int:
        """Sweep: delete batch after batch until one comes back short, and return how many were deleted.

        Raises:
            StoreUnavailableError: The database did not answer.
        """
        total = 0
        while True:
            deleted = await self._store.reap(self._batch)
            total += deleted
            if deleted < self._batch:
                break
        if total:
            logger.info("reaped %d expired claims", total)
            tell(self._hooks, Event(EventKind.REAPED, count=total))
        return total

    def start(self) -> None:
        """Start sweeping in the background, unless that goes on already."""
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._sweep_forever(), name="fastapi_dedup reaper")

    async def stop(self) -> None:
        """Stop at once; a batch that is under way is rolled back."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            await asyncio.wait([loop], timeout=1)

    async def _sweep_forever(self) -> None:
        while self._loop is asyncio.current_task():  # a driver may swallow the cancellation of stop()
            await asyncio.sleep(self._every * random.uniform(0.75, 1.25))  # noqa: S311 - jitter, not a secret
            try:
                await self.run_once()
            except Exception:
                logger.exception("a sweep failed; the next one comes in about %.0f s", self._every)
