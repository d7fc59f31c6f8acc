"""200 duplicates that wait on a pool of 5: they hold no connection, and all end with the right answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from tests.apps.forked import Forked
from tests.apps.orders import Settings, checked_out, serve
from tests.databases import MARIADB, url_of
from tests.live import Caller, Reply, call, until
from tests.races.shop import Served, served

WAITERS, POOL = 200, 5

ENDINGS = {
    "succeeds": {"duplicate": WAITERS},
    "fails": {"201": 1, "duplicate": WAITERS - 1},
    "outlasts them": {"in-flight": WAITERS},
}
"""What becomes of the first, and what those who have waited for it are told."""

DATABASES = ("asyncpg", "sqlite", MARIADB[0])
every_ending = pytest.mark.parametrize("ending", ENDINGS)


@dataclass
class Pool:
    """What a pool's counters say, as long as this listens.

    Attributes:
        looks: How often a connection was taken from the pool.
        longest: The longest time that one was out, in seconds.
    """

    engine: AsyncEngine
    looks: int = 0
    longest: float = 0.0
    _out: dict[Any, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        event.listen(self.engine.sync_engine, "checkout", self._taken)
        event.listen(self.engine.sync_engine, "checkin", self._given_back)

    def _taken(self, _connection: object, record: Any, _proxy: object) -> None:
        self.looks += 1
        self._out[record] = time.monotonic()

    def _given_back(self, _connection: object, record: Any) -> None:
        if (since := self._out.pop(record, None)) is not None:
            self.longest = max(self.longest, time.monotonic() - since)


@asynccontextmanager
async def waiters_of(shop: Served) -> AsyncIterator[list[asyncio.Task[Reply]]]:
    """Send the duplicates of what is at the gate, and yield when all wait, and who had to look has looked."""
    callers = [await Caller.connect(shop.url) for _ in range(WAITERS)]
    waiters = [asyncio.create_task(each.call("POST", "/waiting", {"sku": "K"})) for each in callers]

    async def all_wait() -> bool:
        return shop.shop.waiting == WAITERS and checked_out(shop.shop.engine) <= 1

    await until(all_wait)
    yield waiters
    for each in callers:
        each.hang_up()


def answers(replies: list[Reply]) -> Counter[str]:
    return Counter(reply.problem or str(reply.status) for reply in replies)


def first(url: str) -> asyncio.Task[Reply]:
    return asyncio.create_task(call(url, "POST", "/waiting", {"sku": "K"}))


async def end(shop: Served, at_work: Any, ending: str) -> None:
    """Let the first go on: it succeeds, or it fails and one of those who have waited runs."""
    if ending == "succeeds":
        await at_work.answer("go")
    elif ending == "fails":
        await at_work.answer("raise")
        await (await shop.gate.visitor()).answer("go")


# cases F1 and F2, DESIGN.md §4.5
@every_ending
@pytest.mark.parametrize("backend", DATABASES)
async def test_200_who_wait_for_a_neighbour_hold_no_connection_of_a_pool_of_5(
    backend: str, ending: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    patience = 3.0 if ending == "outlasts them" else 3600.0
    async with served(url_of(backend, request, tmp_path), pool_size=POOL, wait_timeout=patience) as shop:
        a = first(shop.url)
        at_work = await shop.gate.visitor()
        pool = Pool(shop.shop.engine)
        async with waiters_of(shop) as waiters:
            for _ in range(50):
                assert checked_out(shop.shop.engine) == 1, "the first one's, at its work"
                await asyncio.sleep(0.01)
            assert pool.looks == 0, "there is nothing to look for: the neighbour will tell"
            assert (await call(shop.url, "GET", "/ping")).status == 200

            await end(shop, at_work, ending)
            assert answers(await asyncio.gather(*waiters)) == ENDINGS[ending]
            if ending == "outlasts them":
                assert checked_out(shop.shop.engine) == 1
                await at_work.answer("go")
        assert (await a).status == (500 if ending == "fails" else 201)
        assert checked_out(shop.shop.engine) == 0
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == (2 if ending == "fails" else 1)


# cases F1 and F2, DESIGN.md §4.5
@every_ending
@pytest.mark.parametrize("backend", [each for each in DATABASES if each != "sqlite"])
async def test_200_who_wait_for_another_process_look_as_often_as_one_and_hold_no_connection_in_between(
    backend: str, ending: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # On SQLite who waits for another process waits for the file's one writer, in the driver.
    database = url_of(backend, request, tmp_path)
    patience = 6.0 if ending == "outlasts them" else 3600.0
    async with served(database, pool_size=POOL, wait_timeout=patience) as shop:
        elsewhere = Forked(serve, Settings(url=database, pool_size=POOL, gate=shop.gate.port))
        try:
            elsewhere.start()
            a = first(elsewhere.url)
            at_work = await shop.gate.visitor()
            async with waiters_of(shop) as waiters:
                pool, began = Pool(shop.shop.engine), time.monotonic()
                assert (await call(shop.url, "GET", "/ping")).status == 200

                async def has_looked_again() -> bool:
                    return pool.looks >= 4

                await until(has_looked_again)
                took = time.monotonic() - began
                assert checked_out(shop.shop.engine) <= 1
                # One looks for all, in pauses that grow to half a second, give or take a half of that.
                assert pool.looks <= 5 + 4 * took
                assert not any(waiter.done() for waiter in waiters)

                await end(shop, at_work, ending)
                assert answers(await asyncio.gather(*waiters)) == ENDINGS[ending]
                if ending == "outlasts them":
                    await at_work.answer("go")
            assert (await a).status == (500 if ending == "fails" else 201)
            assert checked_out(shop.shop.engine) == 0
            assert pool.longest < 5.0, "a look takes as long as its query, however busy the machine is"
            assert await shop.ledger.holds("K") == (1, 1)
            assert shop.gate.visits == (2 if ending == "fails" else 1)
        finally:
            elsewhere.close()
