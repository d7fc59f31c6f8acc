"""What a riding claim costs beside a hand-written INSERT ... ON CONFLICT in the same place, on PostgreSQL.

Run it from the repository: `python -m benchmarks.riding`. It takes the PostgreSQL that the tests take, and a
database of its own there. One process; the contestants take turns within every round, so that whatever else
the machine does hits them alike. Every request has an id of its own, and does one INSERT of business.

Requests are ASGI calls in this process: no network but the database's. A real server adds the same cost to
both sides, and brings the ratio nearer to 1. Ratios are medians over the rounds: of requests per second, for
who asks a database waits for it; and of the process's own CPU time, which its neighbours blur less. On a busy
machine both are blurred more than the contestants differ; how many functions a request calls is not.
"""
# No `from __future__ import annotations`: FastAPI could not resolve what the endpoints' annotations name.

import asyncio
import cProfile
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from fastapi_dedup import Dedup, Deduplicated, DedupMiddleware, RequestSession
from tests.servers import POSTGRES, driver_url, postgres_database, running

ROUNDS = 61
REQUESTS = 100
"""How many requests a contestant answers in a round."""

AT_ONCE = 5

TABLES = (
    "create table orders (id bigserial primary key, sku text not null)",
    "create table seen (key text primary key, seen_at timestamptz not null default now())",
)
WORK = text("insert into orders (sku) values (:sku)")
SEEN = text("insert into seen (key) values (:sku) on conflict do nothing returning key")

MakeApp = Callable[[AsyncEngine], FastAPI]


class Order(BaseModel):
    """What is ordered."""

    sku: str


class Cost(NamedTuple):
    """What a request cost: requests per second, and CPU time in microseconds."""

    rate: float
    cpu: float


def by_hand(engine: AsyncEngine) -> FastAPI:
    """Return what one writes without this package: the claim as a first statement of the handler's."""
    sessions = async_sessionmaker(engine, expire_on_commit=False)
    app = FastAPI()

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session, session.begin():
            yield session

    @app.post("/orders", status_code=201)
    async def create(order: Order, session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        if (await session.execute(SEEN, {"sku": order.sku})).first() is None:
            raise HTTPException(409)
        await session.execute(WORK, {"sku": order.sku})

    return app


def _ours(engine: AsyncEngine, header: str | None) -> FastAPI:
    app = FastAPI()
    dedup = Dedup(engine, reap_every=None)
    app.state.dedup = dedup
    app.add_middleware(DedupMiddleware, dedup=dedup, header=header)

    @app.post("/orders", status_code=201, dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(order: Order, session: RequestSession) -> None:
        await session.execute(WORK, {"sku": order.sku})

    return app


def riding(engine: AsyncEngine) -> FastAPI:
    """Return the same with a riding claim, and a middleware that also looks for `Idempotency-Key`."""
    return _ours(engine, "Idempotency-Key")


def riding_only(engine: AsyncEngine) -> FastAPI:
    """Return the same with a middleware that only hosts."""
    return _ours(engine, None)


CONTESTANTS: tuple[MakeApp, ...] = (by_hand, riding, riding_only)


async def post(app: FastAPI, sku: str) -> int:
    """Post an order, and return the status."""
    body = json.dumps({"sku": sku}).encode()
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/orders",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"shop.example")],
    }
    await app(scope, receive, send)
    return status


async def cost_of(app: FastAPI, skus: Iterator[int]) -> Cost:
    """Return what a request costs, over a round of them."""
    statuses: Counter[int] = Counter()

    async def some() -> None:
        for _ in range(REQUESTS // AT_ONCE):
            statuses[await post(app, f"sku-{next(skus)}")] += 1

    wall, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if statuses != {201: REQUESTS}:
        msg = f"these were to be new orders: {statuses}"
        raise RuntimeError(msg)
    return Cost(REQUESTS / wall, cpu / REQUESTS * 1e6)


async def calls_of(app: FastAPI, skus: Iterator[int]) -> float:
    """Return how many functions a request calls, C's included."""
    profile = cProfile.Profile()
    profile.enable()
    await cost_of(app, skus)
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) / REQUESTS


async def compare(url: str) -> None:
    """Print the contestants' costs, and the ratios."""
    engines = [create_async_engine(url, pool_size=AT_ONCE) for _ in CONTESTANTS]
    async with engines[0].begin() as connection:
        for table in TABLES:
            await connection.execute(text(table))
    await Dedup(engines[0]).create_table()
    apps = [make(engine) for make, engine in zip(CONTESTANTS, engines, strict=True)]
    for app in apps:
        if (dedup := getattr(app.state, "dedup", None)) is not None:
            await dedup.start()
    skus = count()
    for app in apps:
        await cost_of(app, skus)  # connections, caches, the routes' inspection
    rounds = [[await cost_of(app, skus) for app in apps] for _ in range(ROUNDS)]
    calls = [await calls_of(app, skus) for app in apps]
    print(f"{ROUNDS} rounds of {REQUESTS} requests each, {AT_ONCE} at a time")
    for position, make in enumerate(CONTESTANTS):
        rate = statistics.median(row[position].rate for row in rounds)
        cpu = statistics.median(row[position].cpu for row in rounds)
        rates = [row[position].rate / row[0].rate for row in rounds]
        cpus = [row[0].cpu / row[position].cpu for row in rounds]
        print(
            f"  {make.__name__:<12} {rate:6.0f} requests/s  {cpu:6.0f} µs CPU"
            f"   ratio {statistics.median(rates):.3f} ({min(rates):.2f} to {max(rates):.2f})"
            f"   by CPU {statistics.median(cpus):.3f} ({min(cpus):.2f} to {max(cpus):.2f})"
            f"   {calls[position]:5.0f} calls: {calls[0] / calls[position]:.3f}"
        )
    for engine in engines:
        await engine.dispose()


def main() -> None:
    """Find PostgreSQL, and compare."""
    with running(POSTGRES) as found, postgres_database(found.url) as url:
        print(f"PostgreSQL {found.version} at {found.where}, asyncpg; load average {os.getloadavg()[0]:.1f}")
        asyncio.run(compare(driver_url(url, "asyncpg")))


if __name__ == "__main__":
    main()
