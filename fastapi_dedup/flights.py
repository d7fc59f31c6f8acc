"""The ids that this process has in flight: who waits for one is woken when it lands."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import InFlight, Mismatch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fastapi_dedup.claims import Intent

__all__ = ["Flight", "Flights"]


class Flight:
    """One id on its way.

    Attributes:
        intent: What is being done.
        held: Whether the store has given the claim; before that, the flight only asks for it.
        landed: Set when the outcome is known.
    """

    __slots__ = ("held", "intent", "landed")

    def __init__(self, intent: Intent) -> None:
        self.intent = intent
        self.held = False
        self.landed = asyncio.Event()


class Flights:
    """All flights of one runtime. Best effort across processes, exact within one."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight] = {}
        self._background: set[asyncio.Task[None]] = set()

    def depart(self, intent: Intent) -> Flight | None:
        """Return a new flight, or None where a neighbour has the id in flight."""
        if intent.key in self._flights:
            return None
        return self.overtake(intent)

    def overtake(self, intent: Intent) -> Flight:
        """Return a new flight that replaces one which lost the id and has not noticed yet."""
        flight = self._flights[intent.key] = Flight(intent)
        return flight

    def land(self, flight: Flight | None) -> None:
        """End a flight, and wake who waits for it."""
        if flight is None:
            return
        if self._flights.get(flight.intent.key) is flight:
            del self._flights[flight.intent.key]
        flight.landed.set()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what must wait for somebody else's transaction to end, and hold on to it meanwhile."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        """Wait until nothing is left to do in the background."""
        while self._background:
            await asyncio.wait(self._background)

    def seen_from(self, intent: Intent) -> InFlight | Mismatch:
        """Return what an unfinished neighbour means to an intent: not yet, or another payload altogether."""
        flight = self._flights.get(intent.key)
        if flight is not None and flight.held and _differ(flight.intent, intent):
            return Mismatch()
        return InFlight()

    async def landing(self, intent: Intent, *, pause: float, at_most: float) -> None:
        """Wait until a neighbour's flight lands; for another process's, pause: there is nothing to hear.

        Args:
            intent: The id that is waited for.
            pause: How long to wait before looking again, in seconds, where no neighbour holds the id.
            at_most: How long to wait for a neighbour that holds it, in seconds.
        """
        flight = self._flights.get(intent.key)
        if flight is None:
            await asyncio.sleep(pause)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most if flight.held else pause):
                await flight.landed.wait()


def _differ(first: Intent, second: Intent) -> bool:
    return None not in (first.fingerprint, second.fingerprint) and first.fingerprint != second.fingerprint
