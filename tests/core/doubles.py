"""A store and a transaction in memory, which write down in one journal what they are asked to do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi_dedup.claims import Claimed, Duplicate, Fate, InFlight, Intent, Outcome, Receipt
from fastapi_dedup.core import Delivery
from fastapi_dedup.flights import Flights
from fastapi_dedup.hooks import Event

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def intent(logical_id: str = "news", fingerprint: bytes | None = None) -> Intent:
    return Intent(("tests",), logical_id, HOUR, fingerprint)


class Memory:
    """A transaction: the claims that were made in it, and who wants to hear of its end."""

    def __init__(self, journal: list[str], *, ours: bool, waits: asyncio.Event) -> None:
        self.journal = journal
        self.ours = ours
        self.waits = waits
        self.used = True
        self.idle = True
        self.outermost = True
        self.commits = 0
        self.in_hand = True
        self.may_step_aside = True
        self.commit_error: BaseException | None = None
        self.rollback_error: BaseException | None = None
        self._watching: list[Callable[[Fate], None]] = []

    @property
    def session(self) -> Any:
        return self

    def watch(self, decided: Callable[[Fate], None]) -> None:
        self._watching.append(decided)

    async def must_lead_home(self) -> None: ...

    def before_commit(self, work: Callable[[Any], None], decided: Callable[[Fate], None]) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        pass

    async def step_aside(self) -> bool:
        self.journal.append("step aside")
        self.waits.set()
        if self.may_step_aside:
            self.end(Fate.CLOSED)
        return self.may_step_aside

    async def commit(self) -> None:
        if not self.ours:
            return
        self.journal.append("commit")
        if self.commit_error is not None:
            raise self.commit_error
        self.end(Fate.COMMITTED)

    async def rollback(self) -> None:
        if not self.ours:
            return
        self.journal.append("rollback")
        if self.rollback_error is not None:
            raise self.rollback_error
        self.end(Fate.CLOSED)

    async def confirm(self) -> None:
        pass

    async def leave(self) -> None:
        pass

    def end(self, fate: Fate) -> None:
        """End as the handler, the app or a crash makes a transaction end."""
        self.idle = True
        watching, self._watching = self._watching, []
        for decided in watching:
            decided(fate)


class MemoryStore:
    """A store whose every claim succeeds, unless `answers` says otherwise."""

    def __init__(self, journal: list[str], *, sees_in_flight: bool = True) -> None:
        self.journal = journal
        self.sees_in_flight = sees_in_flight
        self.durable = True
        self.refusals_logged_at = logging.INFO
        self.answers: list[Outcome | BaseException] = []
        self.looks: list[Outcome | None] = []
        self.release_error: Exception | None = None
        self.withdraw_error: Exception | None = None
        self.made = 0

    async def claim(self, wanted: Intent, transaction: Memory) -> Outcome:
        self.journal.append(f"claim {wanted.logical_id}")
        transaction.idle = False
        await asyncio.sleep(0)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        self.made += 1
        return Claimed(Receipt(bytes([self.made]), NOON, NOON + wanted.window))

    async def look(self, wanted: Intent, _: Memory) -> Outcome | None:
        self.journal.append(f"look {wanted.logical_id}")
        return self.looks.pop(0) if self.looks else None

    async def renew(self, wanted: Intent, receipt: Receipt, _: Memory) -> None:
        self.journal.append(f"renew {wanted.logical_id} {receipt.token[0]}")

    async def withdraw(self, wanted: Intent, receipt: Receipt, _: Memory) -> None:
        if self.withdraw_error is not None:
            raise self.withdraw_error
        self.journal.append(f"withdraw {wanted.logical_id} {receipt.token[0]}")

    async def release(self, wanted: Intent, receipt: Receipt) -> bool:
        if self.release_error is not None:
            raise self.release_error
        self.journal.append(f"release {wanted.logical_id} {receipt.token[0]}")
        return True


DONE = Duplicate(NOON, NOON + HOUR, timedelta(minutes=3))
UNDER_WAY = InFlight()


class Rehearsal(Delivery):
    """A delivery whose own transaction is in memory."""

    own: Memory


@dataclass
class Scene:
    """A store, the flights of a process, and what hooks and journal have noted."""

    sees_in_flight: bool = True
    journal: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    flights: Flights = field(default_factory=Flights)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    store: MemoryStore = field(init=False)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.journal, sees_in_flight=self.sees_in_flight)

    def transaction(self, *, ours: bool = True) -> Memory:
        return Memory(self.journal, ours=ours, waits=self.waits)

    def delivery(self, own: Memory | None = None) -> Rehearsal:
        return Rehearsal(
            self.store, own or self.transaction(), flights=self.flights, hooks=[self.events.append]
        )

    @property
    def told(self) -> list[str]:
        """Return the kinds of the events that the hooks were told."""
        return [event.kind.value for event in self.events]

    def is_in_flight(self, wanted: Intent) -> bool:
        return wanted.key in self.flights._flights
