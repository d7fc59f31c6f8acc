"""What the message tests' handlers do, and how the tests watch them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup.hooks import EventKind
from tests.http.world import World, add
from tests.live import until

PAUSE = timedelta(seconds=0.1)
"""How long messages rest in tests that do not care."""

Handler = Callable[[Any, AsyncSession], Awaitable[None]]


def body_of(message: Any) -> bytes:
    """Return a message's body, whichever library brought it."""
    body: bytes = message.body if hasattr(message, "body") else message.data
    return body


class Shop:
    """Orders what each message's body names.

    Attributes:
        runs: How often the handler was entered.
    """

    def __init__(self, *mishaps: Callable[[], Awaitable[None]]) -> None:
        self.runs = 0
        self._mishaps = [*mishaps]

    async def order(self, message: Any, session: AsyncSession) -> None:
        """Order, and then do the next of the mishaps, as long as there are any."""
        self.runs += 1
        await add(session, body_of(message).decode().strip('"'))
        if self._mishaps:
            await self._mishaps.pop(0)()


class Clock:
    """A clock that goes on while somebody sleeps, as far as the test says.

    Attributes:
        slept: For how long each time.
    """

    def __init__(self, *steps: float) -> None:
        self.slept: list[float] = []
        self._now = 1000.0
        self._steps = [*steps]

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._now += self._steps.pop(0)

    def rule(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        """Have a module's messages rest by this clock, and exactly as long as they are to on average."""
        monkeypatch.setattr(f"fastapi_dedup.messaging.{module}.asyncio", self)
        monkeypatch.setattr("fastapi_dedup.messaging.acknowledge.time", self)
        monkeypatch.setattr("fastapi_dedup.messaging.acknowledge._jittered", lambda pause: pause)


class Thread:
    """The work of a synchronous handler, which takes until the test says so."""

    def __init__(self) -> None:
        self._entered, self._go_on, self._ended = threading.Event(), threading.Event(), threading.Event()

    def work(self) -> None:
        """Work, in the handler's thread."""
        self._entered.set()
        self._go_on.wait(10)
        self._ended.set()

    async def released_too_early(self, world: World, consumer: asyncio.Task[Any]) -> bool:
        """Cancel the consumer while the thread works, and tell whether that gave the id back meanwhile."""
        assert await asyncio.to_thread(self._entered.wait, 10)
        consumer.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await until_heard(world, EventKind.RELEASED)
        too_early = heard(world, EventKind.RELEASED) > 0
        self._go_on.set()
        with suppress(asyncio.CancelledError):
            await consumer
        assert self._ended.is_set()
        await until_heard(world, EventKind.RELEASED)
        return too_early


async def fail() -> None:
    """Fail, as a handler does."""
    msg = "the handler failed, as the test wished"
    raise RuntimeError(msg)


def heard(world: World, kind: EventKind) -> int:
    """Return how many events of a kind were heard."""
    return [event.kind for event in world.events].count(kind)


async def until_heard(world: World, kind: EventKind, times: int = 1) -> None:
    """Wait until events of a kind were heard so often."""

    async def so_often() -> bool:
        return heard(world, kind) >= times

    await until(so_often)
