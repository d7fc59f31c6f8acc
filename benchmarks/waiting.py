"""What waiting for another process costs, and what LISTEN/NOTIFY would cost instead, on PostgreSQL.

Run it from the repository: `python -m benchmarks.waiting`. It takes the PostgreSQL that the tests take, and a
database of its own there.

1. Some wait in this process for an id that another runtime holds, as another process would: how often they
   look, how much of a processor they use, and how long after the owner's COMMIT each has its answer.
2. Clients commit as fast as they can, with a `pg_notify` in each transaction and without, in alternating
   rounds: what every claim would pay so that those who wait need not look.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import timedelta

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fastapi_dedup import Dedup, DuplicateError
from tests.servers import POSTGRES, driver_url, postgres_database, running

SECONDS = 5.0
"""How long those who wait are watched."""

ENDINGS = 20
"""How many owners are waited for, one after the other, to time the answers."""

CLIENTS, ROUNDS, COMMITS = 10, 8, 1000


class Looks:
    """Counts the statements of an engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.count = 0
        event.listen(engine.sync_engine, "before_cursor_execute", self._hear)

    def _hear(self, *_: object) -> None:
        self.count += 1


async def answered(dedup: Dedup, logical_id: str) -> float:
    """Wait for an id as a duplicate, and return when the answer was there."""
    try:
        async with dedup.claim(
            logical_id, scope="benchmark", in_flight="wait", wait_timeout=timedelta(minutes=1)
        ):
            msg = "the owner was to succeed"
            raise RuntimeError(msg)
    except DuplicateError:
        return time.perf_counter()


async def watch(url: str, waiters: int) -> None:
    """Print what it costs that so many wait for one id."""
    engine = create_async_engine(url, pool_size=5, max_overflow=0)
    elsewhere, here, looks = Dedup(url, reap_every=None), Dedup(engine, reap_every=None), Looks(engine)
    async with elsewhere.claim(f"watched by {waiters}", scope="benchmark"):
        tasks = [asyncio.create_task(answered(here, f"watched by {waiters}")) for _ in range(waiters)]
        await asyncio.sleep(2)  # the pauses have grown to what they stay at
        looks.count, processor = 0, time.process_time()
        await asyncio.sleep(SECONDS)
        rate, used = looks.count / SECONDS, (time.process_time() - processor) / SECONDS
    await asyncio.gather(*tasks)
    print(f"  {waiters:4} wait: {rate:6.1f} looks/s, {used:6.1%} of a processor")
    await elsewhere.stop()
    await engine.dispose()


async def time_answers(url: str) -> None:
    """Print how long after the owner's COMMIT elsewhere a duplicate has its answer."""
    engine = create_async_engine(url)
    elsewhere, here = Dedup(url, reap_every=None), Dedup(engine, reap_every=None)
    delays = []
    for number in range(ENDINGS):
        async with elsewhere.claim(f"timed {number}", scope="benchmark"):
            task = asyncio.create_task(answered(here, f"timed {number}"))
            await asyncio.sleep(2)
        committed = time.perf_counter()
        delays.append(await task - committed)
    delays.sort()
    print(
        f"  answers after the owner's COMMIT: median {statistics.median(delays) * 1000:.0f} ms, "
        f"the last of {ENDINGS} {delays[-1] * 1000:.0f} ms"
    )
    await elsewhere.stop()
    await engine.dispose()


async def commits_per_second(engine: AsyncEngine, *, notify: bool) -> float:
    """Return how many small transactions a second the clients commit."""
    left = iter(range(COMMITS))

    async def client() -> None:
        async with engine.connect() as connection:
            for number in left:
                await connection.execute(text("insert into work values (:number)"), {"number": number})
                if notify:
                    await connection.execute(text("select pg_notify('claims', :id)"), {"id": str(number)})
                else:
                    await connection.execute(text("select :id"), {"id": str(number)})
                await connection.commit()

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return COMMITS / (time.perf_counter() - start)


async def compare_notify(url: str) -> None:
    """Print what a NOTIFY in every transaction costs."""
    engine = create_async_engine(url, pool_size=CLIENTS)
    async with engine.begin() as connection:
        await connection.execute(text("create table work (number integer)"))
    await commits_per_second(engine, notify=True)  # connections
    rounds = [
        (await commits_per_second(engine, notify=False), await commits_per_second(engine, notify=True))
        for _ in range(ROUNDS)
    ]
    ratio = statistics.median(notified / bare for bare, notified in rounds)
    lowest, highest = min(b / a for a, b in rounds), max(b / a for a, b in rounds)
    print(
        f"  {CLIENTS} clients, a NOTIFY in every transaction: {ratio:.2f} times the commits/s of a SELECT "
        f"in its place (rounds: {lowest:.2f} to {highest:.2f})"
    )
    await engine.dispose()


async def measure(url: str) -> None:
    """Measure all of it."""
    await Dedup(url).create_table()
    for waiters in (1, 20, 200):
        await watch(url, waiters)
    await time_answers(url)
    await compare_notify(url)


def main() -> None:
    """Find PostgreSQL, and measure."""
    with running(POSTGRES) as found, postgres_database(found.url) as url:
        print(f"PostgreSQL {found.version} at {found.where}, asyncpg")
        asyncio.run(measure(driver_url(url, "asyncpg")))


if __name__ == "__main__":
    main()
