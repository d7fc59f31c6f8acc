"""Consumer processes that a test may kill: each consumes every endpoint of a topic, and notes what it sees.

SIGTERM ends one when it has acknowledged what it is at, SIGUSR1 makes it close its connections while
deliveries are unacknowledged, and start anew. What it writes down is in the file before it goes on, and so
outlives SIGKILL.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.process
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fastapi_dedup import Dedup, Deduplicated
from fastapi_dedup.hooks import Event
from tests.apps.forked import forking
from tests.messaging.brokers import BROKERS, Topic
from tests.messaging.shop import PAUSE, body_of, fail

SLOWEST = 0.06
FAILING = 0.1


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        kind: The kind of broker.
        broker: Its URL.
        database: The database's URL.
        topic: What to consume.
        scope: The scope that all endpoints share; None leaves each its own.
        journal: The file that events are written to, a word a line.
    """

    kind: str
    broker: str
    database: str
    topic: Topic
    scope: str | None
    journal: Path

    def events(self) -> Counter[str]:
        """Return what was written down so far, counted."""
        return Counter(self.journal.read_text().split())


def work(job: Job) -> None:
    """Consume until told to stop: a process's whole life."""
    logging.disable()  # everything that goes wrong here is meant to
    asyncio.run(_work(job))


async def _work(job: Job) -> None:
    loop, stopped, hang_up = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, hang_up.set)
    if (test := multiprocessing.process.parent_process()) is not None:
        loop.add_reader(test.sentinel, os._exit, 1)  # a test that is killed itself leaves nobody behind
    journal = os.open(job.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: Event) -> None:
        os.write(journal, f"{event.kind.value}\n".encode())

    broker = BROKERS[job.kind](job.broker)
    dedup = Dedup(
        create_async_engine(job.database, pool_size=5, max_overflow=0), reap_every=None, hooks=[note]
    )
    policy = Deduplicated(scope=job.scope)
    signals = [asyncio.create_task(each.wait()) for each in (stopped, hang_up)]
    while not stopped.is_set():
        hang_up.clear()
        for endpoint in job.topic.endpoints:
            await broker.consume(endpoint, dedup, policy, function=_handler(endpoint), pause=PAUSE)
        await asyncio.wait(signals, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            await broker.hang_up()
            signals[1] = asyncio.create_task(hang_up.wait())
    await broker.stop()
    await dedup.engine.dispose()


def _handler(endpoint: str) -> Callable[..., Any]:
    async def on_order(message: Any, session: AsyncSession) -> None:
        order = {"sku": body_of(message).decode(), "note": endpoint}
        await session.execute(text("insert into orders (sku, note) values (:sku, :note)"), order)
        await asyncio.sleep(random.uniform(0, SLOWEST))  # noqa: S311 - no secret
        if random.random() < FAILING:  # noqa: S311 - no secret
            await fail()

    return on_order


class Crew:
    """Some workers on one job.

    Attributes:
        killed: How many were killed.
        hung_up: How often one was told to close its connections.
    """

    def __init__(self, job: Job, size: int) -> None:
        self.killed = 0
        self.hung_up = 0
        self._job = job
        self._workers = [self._start() for _ in range(size)]

    def _start(self) -> multiprocessing.process.BaseProcess:
        worker = forking().Process(target=work, args=(self._job,), daemon=True)
        worker.start()
        return worker

    def disturb(self) -> None:
        """Kill one of the workers, and start another one; or make one hang up."""
        unlucky = random.randrange(len(self._workers))  # noqa: S311 - no secret
        if random.random() < 0.3:  # noqa: S311 - no secret
            self._signal(self._workers[unlucky], signal.SIGUSR1)
            self.hung_up += 1
            return
        self._workers[unlucky].kill()
        self._workers[unlucky].join(30)
        self.killed += 1
        self._workers[unlucky] = self._start()

    def restore(self) -> None:
        """Start whoever is gone."""
        self._workers = [each if each.is_alive() else self._start() for each in self._workers]

    async def stop(self) -> None:
        """Let everyone finish what is under way."""
        for worker in self._workers:
            self._signal(worker, signal.SIGTERM)
        for worker in self._workers:
            await asyncio.to_thread(worker.join, 30)

    def _signal(self, worker: multiprocessing.process.BaseProcess, what: signal.Signals) -> None:
        if worker.is_alive() and worker.pid is not None:
            os.kill(worker.pid, what)
