"""The ids that this process has in flight: who waits for one is woken when it lands."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakValueDictionary

from fastapi_dedup.claims import InFlight, Mismatch

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fastapi_dedup.claims import Intent

__all__ = ["Flight", "Flights", "Place"]


class Flight:
    """One id on its way. Who makes it holds on to it: a flight lives no longer than its owner.

    Attributes:
        intent: What is being done.
        held: Whether the store has given the claim; before that, the flight only asks for it.
        landed: Set when the outcome is known.
    """

    __slots__ = ("__weakref__", "_loop", "held", "intent", "landed")

    def __init__(self, intent: Intent) -> None:
        self._loop = asyncio.get_running_loop()
        self.intent = intent
        self.held = False
        self.landed = asyncio.Event()

    def __del__(self) -> None:
        # Lost with its transaction, of whose end nobody has told. The collector comes by in any thread.
        if not self.landed.is_set():
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self.landed.set)


class Flights:
    """All flights of one runtime. Best effort across processes, exact within one."""

    def __init__(self) -> None:
        self._flights: WeakValueDictionary[bytes, Flight] = WeakValueDictionary()
        self._lines: dict[bytes, list[Place]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._meanwhile: set[asyncio.Task[None]] = set()

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
        self.begin(work)

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do the same, and return the task."""
        return _held(self._background, work)

    def meanwhile(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what may take as long as an outage: nothing waits for it, and `drain` gives it up."""
        _held(self._meanwhile, work)

    async def drain(self) -> None:
        """Wait until nothing is left to do in the background."""
        while self._background:
            await asyncio.wait(self._background)
        while self._meanwhile:
            for task in self._meanwhile:
                task.cancel()
            await asyncio.wait(self._meanwhile)

    def seen_from(self, intent: Intent) -> InFlight | Mismatch:
        """Return what an unfinished neighbour means to an intent: not yet, or another payload altogether."""
        flight = self._flights.get(intent.key)
        if flight is not None and flight.held and _differ(flight.intent, intent):
            return Mismatch()
        return InFlight()

    def ahead(self, intent: Intent) -> InFlight | Mismatch | None:
        """Return what a neighbour means to who waits for it; None where the store is to be asked.

        The connection of a claim that rides may be the pool's last, so who waits asks for none meanwhile.
        A lease costs no connection, and may be lost to another process.
        """
        waits = intent.lease is None and self.landing(intent) is not None
        return self.seen_from(intent) if waits else None

    def landing(self, intent: Intent) -> asyncio.Event | None:
        """Return what is set when a neighbour lands that holds the id; None where no neighbour does."""
        flight = self._flights.get(intent.key)
        return flight.landed if flight is not None and flight.held else None

    def line(self, intent: Intent) -> Place:
        """Return a place in the line of those who wait for an id here: enter it, and leave it."""
        return Place(self, intent, self._lines)


class Place:
    """A place in a line. Only the first in it looks for the outcome; the others hear of it.

    So however many wait here for one id, the database is asked as often as one of them would ask it, and
    when an owner has failed, one of them takes its turn and the others stay in line.

    Attributes:
        told: Whether who stands here has learnt an outcome: then its leaving is news to the others.
    """

    def __init__(self, flights: Flights, intent: Intent, lines: dict[bytes, list[Place]]) -> None:
        self.told = False
        self._flights = flights
        self._intent = intent
        self._lines = lines
        self._heard = False
        self._stirred = asyncio.Event()
        self._pause = 0.02

    def __enter__(self) -> Self:
        self._lines.setdefault(self._intent.key, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        line = self._lines[self._intent.key]
        was_first = line[0] is self
        line.remove(self)
        if not line:
            del self._lines[self._intent.key]
        if not was_first:
            return
        for place in line if self.told else line[:1]:
            place._heard |= self.told  # noqa: SLF001 - a place of the same line
            place._stirred.set()  # noqa: SLF001

    async def turn(self, *, at_most: float) -> bool:
        """Wait until it is worth looking for the outcome; False where so many seconds pass before it is.

        Then nobody looks: those who came together would all ask at once.
        """
        try:
            async with asyncio.timeout(at_most):
                while not await self._has_come():
                    await self._stirred.wait()
                    self._stirred.clear()
        except TimeoutError:
            return False
        return True

    async def _has_come(self) -> bool:
        heard, self._heard = self._heard, False
        landing = self._flights.landing(self._intent)  # and not the flight, which its owner may lose
        if heard and landing is None:  # else the one who was first is at it now
            return True
        first = self._lines[self._intent.key][0] is self
        if first:
            await (self._sleep() if landing is None else landing.wait())
        return first

    async def _sleep(self) -> None:
        """Wait before another look for what another process has in flight: there is nothing to hear of it."""
        pause = self._pause * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret
        self._pause = min(self._pause * 2, 0.5)
        await asyncio.sleep(pause)


def _held(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _differ(first: Intent, second: Intent) -> bool:
    return None not in (first.fingerprint, second.fingerprint) and first.fingerprint != second.fingerprint
