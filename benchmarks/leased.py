"""What holding a claim costs: riding the work's transaction, leased, or hand-written in two transactions.

Run it from the repository: `python -m benchmarks.leased`. It takes the PostgreSQL that the tests take, and a
database of its own there. One process; the contestants take turns within every round, so that whatever else
the machine does hits them alike. Times are wall time; figures are medians over the rounds.

Two kinds of handlers: one that only writes its row, and one that also calls a service that takes a while, on
a pool that is smaller than the crowd. The hand-written contestant is what many apps have: an INSERT ... ON
CONFLICT in a transaction of its own, then the work in another. It protects nothing against a crash between
the two, and is here for its speed.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import count

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fastapi_dedup import Dedup
from tests.servers import POSTGRES, driver_url, postgres_database, running

ROUNDS = 11
DELIVERIES = 300
POOL, CROWD = 5, 50
SERVICE = 0.05
"""Seconds that the service takes."""

NUMBERS = count()
WORK = text("INSERT INTO orders (sku) VALUES (:sku)")
BY_HAND = text("INSERT INTO by_hand (id) VALUES (:sku) ON CONFLICT DO NOTHING")

Deliver = Callable[[str, float], Awaitable[None]]


def contestants(engine: AsyncEngine, dedup: Dedup) -> dict[str, Deliver]:
    """Return what delivers one new order, by the contestant's name."""

    async def riding(sku: str, service: float) -> None:
        async with dedup.claim(sku, scope="riding") as claim:
            await asyncio.sleep(service)
            await claim.session.execute(WORK, {"sku": sku})

    async def leased(sku: str, service: float) -> None:
        async with dedup.claim(sku, scope="leased", lease=timedelta(seconds=30)) as claim:
            await asyncio.sleep(service)
            await claim.session.execute(WORK, {"sku": sku})

    async def by_hand(sku: str, service: float) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(BY_HAND, {"sku": sku})
        await asyncio.sleep(service)
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(WORK, {"sku": sku})

    return {"riding": riding, "leased": leased, "two transactions": by_hand}


async def per_second(deliver: Deliver, at_once: int, service: float) -> float:
    """Return how many orders are delivered in a second."""

    async def some(number: int) -> None:
        for _ in range(number):
            await deliver(f"order-{next(NUMBERS)}", service)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some(DELIVERIES // at_once))
    return DELIVERIES / (time.perf_counter() - start)


async def compare(url: str) -> None:
    """Print the throughput of every contestant, and its ratio to the riding claim's."""
    engine = create_async_engine(url, pool_size=POOL, max_overflow=0)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (sku text)"))
        await connection.execute(text("CREATE TABLE by_hand (id text PRIMARY KEY)"))
    async with Dedup(engine, create_table=True, reap_every=None) as dedup:
        rivals = contestants(engine, dedup)
        for title, at_once, service in (
            ("one at a time, the handler writes a row", 1, 0.0),
            (f"{CROWD} at a time on a pool of {POOL}, the handler writes a row", CROWD, 0.0),
            (f"{CROWD} at a time on a pool of {POOL}, and calls a service of {SERVICE} s", CROWD, SERVICE),
        ):
            rates: dict[str, list[float]] = {name: [] for name in rivals}
            for number in range(ROUNDS + 1):
                for name, deliver in rivals.items():
                    rate = await per_second(deliver, at_once, service)
                    if number:  # the first round opens connections
                        rates[name].append(rate)
            print(f"\n{title}")
            for name, seen in rates.items():
                ratio = statistics.median(a / b for a, b in zip(seen, rates["riding"], strict=True))
                print(f"  {name:<17} {statistics.median(seen):7,.0f} deliveries/s   {ratio:5.2f} of riding")
    await engine.dispose()


def main() -> None:
    """Find PostgreSQL, and compare."""
    with running(POSTGRES) as found, postgres_database(found.url) as url:
        print(f"PostgreSQL {found.version} at {found.where}, asyncpg; {ROUNDS} rounds of {DELIVERIES}")
        asyncio.run(compare(driver_url(url, "asyncpg")))


if __name__ == "__main__":
    main()
