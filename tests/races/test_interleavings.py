"""Random interleavings of deliveries, expiry and reaping, against a model: work is never doubled or lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import pytest
from fastapi import Depends, FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fastapi_dedup import (
    ClaimInFlightError,
    Dedup,
    Deduplicated,
    DedupMiddleware,
    DuplicateError,
    RequestSession,
)
from tests.databases import BACKENDS, orders_table, url_of

EXAMPLES = 40
SOAK_EXAMPLES = 2000
SHORTEST, LONGEST = 20, 60
PROCESSES = 2  # runtimes with a pool of their own each
SCOPE = "orders"

Door = Literal["dedup.claim", "http"]
End = Literal["succeed", "fail", "cancel"]


@dataclass(frozen=True)
class Send:
    """A delivery of an id arrives at a door of a process; if it gets to run, it stays at work."""

    id: str
    door: Door
    process: int


@dataclass(frozen=True)
class Finish:
    """One of the deliveries that are at work comes to its end."""

    which: int
    how: End


@dataclass(frozen=True)
class Race:
    """Deliveries of an id arrive at all doors at once; whoever gets to run succeeds."""

    id: str
    copies: int


@dataclass(frozen=True)
class Expire:
    """The window of an id comes to its end."""

    id: str


@dataclass(frozen=True)
class Reap:
    """A process reaps."""

    process: int


Step = Send | Finish | Race | Expire | Reap

IDS = ("p", "q", "r")
DOORS: tuple[Door, ...] = ("dedup.claim", "http")
ENDS: tuple[End, ...] = ("succeed", "fail", "cancel")
FINISHES = [Finish(which, how) for which in range(3) for how in ENDS]
STEPS: list[Step] = [
    *FINISHES,  # as often as sends, or else everything stays at work
    *(Expire(id_) for id_ in IDS),
    *(Reap(process) for process in range(PROCESSES)),
    *(Race(id_, copies) for id_ in IDS for copies in (2, 6)),
    *(Send(id_, door, process) for id_ in IDS for door in DOORS for process in range(PROCESSES)),
    *FINISHES,
]


class Delivery:
    """One delivery: a task that stays at work until it is told how to end."""

    def __init__(self, id_: str, process: int) -> None:
        self.id = id_
        self.process = process
        self.at_work = asyncio.Event()
        self.verdict: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[str] | None = None

    async def outcome(self) -> str:
        """Wait until it is at work, or has ended: then for what it was told."""
        assert self.task is not None
        arriving = asyncio.create_task(self.at_work.wait())
        await asyncio.wait({arriving, self.task}, return_when=asyncio.FIRST_COMPLETED)
        arriving.cancel()
        return self.task.result() if self.task.done() else "at work"

    async def finish(self, how: End) -> str:
        """Tell it how to end, and return what it was told."""
        assert self.task is not None
        if how == "cancel":
            self.task.cancel()
        else:
            self.verdict.set_result(how)
        with suppress(asyncio.CancelledError):
            return await self.task
        return "cancelled"


_current: ContextVar[Delivery] = ContextVar("current")


class Order(BaseModel):
    sku: str


async def work(session: AsyncSession, sku: str) -> None:
    """Write the business row, and stay until the delivery is told how to end."""
    delivery = _current.get()
    await session.execute(text("insert into orders (sku) values (:sku)"), {"sku": sku})
    delivery.at_work.set()
    if await delivery.verdict == "fail":
        msg = "the handler failed"
        raise RuntimeError(msg)


class Process:
    """What one process has: a pool, a runtime, an app."""

    def __init__(self, database: str) -> None:
        self.engine = create_async_engine(database)
        self.dedup = Dedup(self.engine, create_table=True, reap_every=None)
        app = FastAPI()
        app.add_middleware(DedupMiddleware, dedup=self.dedup)
        policy = Deduplicated(source="body", member="sku", scope=(SCOPE,))

        @app.post("/orders", status_code=201, dependencies=[Depends(policy)])
        async def orders(order: Order, session: RequestSession) -> None:
            await work(session, order.sku)

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def deliver(self, delivery: Delivery, door: Door) -> str:
        """Deliver through a door, and return what the sender is told."""
        _current.set(delivery)
        if door == "http":
            response = await self._client.post("/orders", json={"sku": delivery.id})
            if response.status_code == 201:
                return "done"
            return "failed" if response.status_code == 500 else response.json()["type"].partition("#")[2]
        try:
            async with self.dedup.claim(delivery.id, scope=SCOPE) as claim:
                await work(claim.session, delivery.id)
        except DuplicateError:
            return "duplicate"
        except ClaimInFlightError:
            return "in-flight"
        except RuntimeError:
            return "failed"
        return "done"

    async def close(self) -> None:
        await self._client.aclose()
        await self.engine.dispose()


@dataclass
class Known:
    """What must be true of an id."""

    windows: int = 0
    row: Literal["none", "open", "expired"] = "none"
    at_work: Delivery | None = None


@dataclass
class World:
    """The processes, and the database that they share."""

    processes: list[Process]
    observer: AsyncEngine
    known: dict[str, Known] = field(default_factory=dict)

    async def play(self, script: list[Step]) -> None:
        """Take every step, and compare the database with what must be true after each."""
        self.known = {id_: Known() for id_ in IDS}
        async with self.observer.begin() as connection:
            await connection.execute(text("delete from orders"))
            await connection.execute(text("delete from dedup_claims"))
        try:
            for step in script:
                if self._possible(step):
                    await self._take(step)
                    await self._compare()
        finally:
            for delivery in self._at_work():
                await delivery.finish("cancel")
        for known in self.known.values():
            known.at_work = None
        await self._compare()
        assert [process.dedup._flights._flights for process in self.processes] == [{}, {}]
        assert [process.engine.sync_engine.pool.checkedout() for process in self.processes] == [0, 0]  # type: ignore[attr-defined]  # it is a QueuePool

    def _at_work(self) -> list[Delivery]:
        return [known.at_work for known in self.known.values() if known.at_work is not None]

    def _possible(self, step: Step) -> bool:
        """Tell whether a step can be taken now without waiting for a delivery that is at work."""
        at_work = self._at_work()
        if isinstance(step, Finish):
            return bool(at_work)
        if isinstance(step, Expire) and self.known[step.id].at_work is not None:
            return False  # what a test writes into a claim's row waits for who is taking it over
        if self.observer.dialect.name != "sqlite" or not at_work:
            return True
        # There is one writer, and it is at work. Only looks are answered.
        if not isinstance(step, Send | Race):
            return False
        known = self.known[step.id]
        here = known.at_work is not None and isinstance(step, Send) and known.at_work.process == step.process
        return here or (known.at_work is None and known.row == "open")

    async def _take(self, step: Step) -> None:
        match step:
            case Send(id_, door, process):
                await self._send(self.known[id_], id_, door, process)
            case Finish(which, how):
                at_work = self._at_work()
                await self._finish(self.known[at_work[which % len(at_work)].id], how)
            case Race(id_, copies):
                await self._race(self.known[id_], id_, copies)
            case Expire(id_):
                await self._expire(self.known[id_], id_)
            case Reap(process):
                await self._reap(process)

    def _start(self, id_: str, door: Door, process: int) -> Delivery:
        delivery = Delivery(id_, process)
        delivery.task = asyncio.create_task(self.processes[process].deliver(delivery, door))
        return delivery

    async def _send(self, known: Known, id_: str, door: Door, process: int) -> None:
        delivery = self._start(id_, door, process)
        outcome = await delivery.outcome()
        if known.at_work is not None:
            assert outcome == "in-flight"
        elif known.row == "open":
            assert outcome == "duplicate"
        else:
            assert outcome == "at work"
            known.at_work = delivery

    async def _finish(self, known: Known, how: End) -> None:
        assert known.at_work is not None
        told = await known.at_work.finish(how)
        assert told == {"succeed": "done", "fail": "failed", "cancel": "cancelled"}[how]
        known.at_work = None
        if how == "succeed":
            known.windows += 1
            known.row = "open"

    async def _race(self, known: Known, id_: str, copies: int) -> None:
        racers = [self._start(id_, DOORS[n % 2], n // 2 % PROCESSES) for n in range(copies)]
        for racer in racers:
            racer.verdict.set_result("succeed")
        told = Counter([await racer.task for racer in racers if racer.task is not None])
        if known.at_work is not None:
            assert told == {"in-flight": copies}
        elif known.row == "open":
            assert told == {"duplicate": copies}
        else:
            assert told["done"] == 1
            assert told["in-flight"] + told["duplicate"] == copies - 1
            known.windows += 1
            known.row = "open"

    async def _expire(self, known: Known, id_: str) -> None:
        async with self.observer.begin() as connection:
            await connection.execute(
                text("update dedup_claims set expires_at = claimed_at where logical_id = :id"), {"id": id_}
            )
        if known.row == "open":
            known.row = "expired"

    async def _reap(self, process: int) -> None:
        reaped = await self.processes[process].dedup.reap()
        # A claim that is being taken over just now is left alone.
        over = [known for known in self.known.values() if known.row == "expired" and known.at_work is None]
        assert reaped == len(over)
        for known in over:
            known.row = "none"

    async def _compare(self) -> None:
        async with self.observer.connect() as connection:
            rows = (await connection.execute(text("select sku, count(*) from orders group by sku"))).all()
            claims = (await connection.scalars(text("select logical_id from dedup_claims"))).all()
        windows = {id_: known.windows for id_, known in self.known.items() if known.windows}
        assert {str(sku): int(number) for sku, number in rows} == windows
        assert sorted(claims) == [id_ for id_, known in self.known.items() if known.row != "none"]


@asynccontextmanager
async def world(database: str) -> AsyncIterator[World]:
    async with orders_table(database) as observer, AsyncExitStack() as stack:
        processes = [Process(database) for _ in range(PROCESSES)]
        for process in processes:
            stack.push_async_callback(process.close)
            await stack.enter_async_context(process.dedup)
        yield World(processes, observer)


def explore(database: str, examples: int) -> None:
    """Play so many random scripts."""
    with asyncio.Runner() as runner:
        opened = world(database)
        stage = runner.run(opened.__aenter__())

        @settings(max_examples=examples, deadline=None)
        @given(st.lists(st.sampled_from(STEPS), min_size=SHORTEST, max_size=LONGEST))
        def play(script: list[Step]) -> None:
            runner.run(stage.play(script))

        try:
            play()
        finally:
            runner.run(opened.__aexit__(None, None, None))


# case F1, E4, DESIGN.md §4.1, §4.2, §4.3 and §4.6
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rows_of_an_id_are_as_many_as_the_windows_that_were_opened(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    explore(url_of(backend, request, tmp_path), EXAMPLES)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_they_are_through_thousands_of_scripts(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    explore(url_of(backend, request, tmp_path), SOAK_EXAMPLES)
