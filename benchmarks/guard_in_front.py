"""What a guard in front of PostgreSQL is worth: duplicates of committed ids, with it and without it.

Run it from the repository: `python -m benchmarks.guard_in_front`. It takes the PostgreSQL that the tests
take, and a database of its own there. One process; the contestants take turns within every round, on the same
ids and the same table, so that whatever else the machine does hits them alike. Times are wall time, for who
asks a database waits for it. Ratios are medians over the rounds.

Requests are ASGI calls in this process: no network but the database's, so what is measured is the package,
FastAPI and the query. A real server adds its own cost to both sides, and lowers the ratio.
"""
# No `from __future__ import annotations`: FastAPI could not resolve what the endpoint's annotations name.

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fastapi_dedup import Dedup, Deduplicated, DedupMiddleware, RequestSession
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.messaging.handler import Result
from tests.servers import POSTGRES, driver_url, postgres_database, running

ROUNDS = 15
IDS = [f"order-{number}" for number in range(100)]
DUPLICATES = 500
"""How many duplicates a contestant answers in a round."""

AT_ONCE = 10

ONE_POLICY = Deduplicated("body", "sku", scope="orders")

Deliver = Callable[[str], Awaitable[str]]


class Order(BaseModel):
    """What is ordered."""

    sku: str


class Contestant:
    """A runtime, and the doors to one endpoint on it.

    Attributes:
        statements: How many statements the database was sent.
        doors: What delivers an order, by the door's name, and returns what came of it.
    """

    def __init__(self, engine: AsyncEngine, guard: GenerationalGuard | None) -> None:
        self.dedup = Dedup(engine, reap_every=None, guard=guard)
        self.statements = 0
        self.doors: dict[str, Deliver] = {"HTTP": self._http(), "message": self._message()}
        event.listen(engine.sync_engine, "before_cursor_execute", self._count)

    def _count(self, *_: object) -> None:
        self.statements += 1

    def _http(self) -> Deliver:
        app = FastAPI()
        app.add_middleware(DedupMiddleware, dedup=self.dedup, header=None)

        @app.post("/orders", dependencies=[Depends(ONE_POLICY)])
        async def create(order: Order, session: RequestSession) -> None: ...

        async def post(sku: str) -> str:
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
                "headers": [(b"content-type", b"application/json")],
            }
            await app(scope, receive, send)
            return {200: "ran", 409: "duplicate"}[status]

        return post

    def _message(self) -> Deliver:
        @self.dedup.handler(ONE_POLICY)
        async def on_order(message: dict[str, str], session: RequestSession) -> None: ...

        async def send(sku: str) -> str:
            result = await on_order({"sku": sku})
            return {Result.HANDLED: "ran", Result.DUPLICATE: "duplicate"}[result]

        return send

    async def per_second(self, door: str) -> float:
        """Return how many duplicates a door answers in a second."""
        deliver = self.doors[door]
        outcomes: Counter[str] = Counter()

        async def some(first: int) -> None:
            for number in range(first, DUPLICATES, AT_ONCE):
                outcomes[await deliver(IDS[number % len(IDS)])] += 1

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for first in range(AT_ONCE):
                group.create_task(some(first))
        seconds = time.perf_counter() - start
        if outcomes != {"duplicate": DUPLICATES}:
            msg = f"these were to be duplicates: {outcomes}"
            raise RuntimeError(msg)
        return DUPLICATES / seconds


async def compare(url: str) -> None:
    """Print the throughput of both contestants through both doors, and the ratios."""
    engines = [create_async_engine(url, pool_size=AT_ONCE) for _ in range(2)]
    guarded = Contestant(engines[0], GenerationalGuard())
    bare = Contestant(engines[1], None)
    await bare.dedup.create_table()
    for contestant in (guarded, bare):
        await contestant.dedup.start()
    for sku in IDS:
        if await guarded.doors["message"](sku) != "ran":
            msg = f"{sku} was not new"
            raise RuntimeError(msg)
    print(f"{ROUNDS} rounds of {DUPLICATES} duplicates of {len(IDS)} committed ids, {AT_ONCE} at a time")
    for door in ("HTTP", "message"):
        for contestant in (guarded, bare):
            await contestant.per_second(door)  # connections, caches
            contestant.statements = 0
        rounds = [(await guarded.per_second(door), await bare.per_second(door)) for _ in range(ROUNDS)]
        ratio = statistics.median(mine / other for mine, other in rounds)
        lowest, highest = min(a / b for a, b in rounds), max(a / b for a, b in rounds)
        print(f"\n{door}")
        for name, contestant, column in (("guard in front", guarded, 0), ("without it", bare, 1)):
            rate = statistics.median(row[column] for row in rounds)
            queries = contestant.statements / (ROUNDS * DUPLICATES)
            print(f"  {name:<16} {rate:7,.0f} duplicates/s   {queries:.2f} statements each")
        print(f"  ratio            {ratio:7.1f}   (rounds: {lowest:.1f} to {highest:.1f})")
    for contestant, engine in zip((guarded, bare), engines, strict=True):
        await contestant.dedup.stop()
        await engine.dispose()


def main() -> None:
    """Find PostgreSQL, and compare."""
    with running(POSTGRES) as found, postgres_database(found.url) as url:
        print(f"PostgreSQL {found.version} at {found.where}, asyncpg")
        asyncio.run(compare(driver_url(url, "asyncpg")))


if __name__ == "__main__":
    main()
