"""Deliveries that meet an unfinished twin: they are told "not yet", or wait for its outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.apps.forked import Forked
from tests.apps.gate import gate
from tests.apps.orders import Settings, checked_out, serve
from tests.databases import BACKENDS, orders_table, url_of
from tests.live import Reply, call, until
from tests.races.shop import Ledger, Served, served

WAITERS = 50


def order(url: str, path: str, sku: str = "K") -> asyncio.Task[Reply]:
    return asyncio.create_task(call(url, "POST", path, {"sku": sku}))


def summary(replies: list[Reply]) -> Counter[str]:
    return Counter(reply.problem or str(reply.status) for reply in replies)


async def waiters_of(shop: Served, number: int) -> list[asyncio.Task[Reply]]:
    """Send so many duplicates of what is at the gate, and return when all wait."""
    waiters = [order(shop.url, "/waiting") for _ in range(number)]

    async def all_wait() -> bool:
        return shop.shop.waiting == number

    await until(all_wait)
    return waiters


# case F1
@pytest.mark.parametrize("verdict", ["raise", "refuse", "time out"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_refused_duplicate_is_told_not_yet_and_a_retry_after_the_failure_runs(
    backend: str, verdict: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path)) as shop:
        a = order(shop.url, "/orders")
        at_work = await shop.gate.visitor()

        b = await order(shop.url, "/orders")
        assert (b.status, b.problem) == (409, "in-flight")
        assert int(b.headers["retry-after"]) >= 1

        await at_work.answer(verdict)
        assert (await a).status in {500, 503}
        assert await shop.ledger.holds("K") == (0, 0)

        c = order(shop.url, "/orders")
        await (await shop.gate.visitor()).answer("go")
        assert (await c).status == 201
        assert (await order(shop.url, "/orders")).problem == "duplicate"
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == 2


# case A3, DESIGN.md §4.3
@pytest.mark.parametrize("path", ["/orders", "/waiting", "/committed-by-handler", "/committed-by-dependency"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_handler_that_committed_and_failed_then_has_its_id_given_back(
    backend: str, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1) as shop:
        first = order(shop.url, path)
        await (await shop.gate.visitor()).answer("commit and raise")
        assert (await first).status == 500

        async def the_id_is_free() -> bool:
            return await shop.ledger.holds("K") == (1, 0)

        await until(the_id_is_free)  # the handler's work stays, for that was its wish
        again = order(shop.url, path)
        await (await shop.gate.visitor()).answer("go")
        assert (await again).status == 201
        assert await shop.ledger.holds("K") == (2, 1)


# case F1
@pytest.mark.parametrize("verdict", ["raise", "refuse"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_when_the_first_fails_exactly_one_of_its_waiters_runs(
    backend: str, verdict: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path)) as shop:
        a = order(shop.url, "/waiting")
        at_work = await shop.gate.visitor()
        waiters = await waiters_of(shop, WAITERS)

        await at_work.answer(verdict)
        assert (await a).status in {500, 503}
        await (await shop.gate.visitor()).answer("go")

        assert summary(await asyncio.gather(*waiters)) == {"201": 1, "duplicate": WAITERS - 1}
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == 2


# case F1
@pytest.mark.parametrize("backend", BACKENDS)
async def test_as_long_as_the_runners_fail_the_next_waiter_runs(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path)) as shop:
        a = order(shop.url, "/waiting")
        at_work = await shop.gate.visitor()
        waiters = await waiters_of(shop, 5)

        for _ in range(5):
            await at_work.answer("raise")
            at_work = await shop.gate.visitor()
        await at_work.answer("go")

        assert summary(await asyncio.gather(a, *waiters)) == {"500": 5, "201": 1}
        assert await shop.ledger.holds("K") == (1, 1)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_when_the_first_succeeds_all_its_waiters_are_duplicates(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path)) as shop:
        a = order(shop.url, "/waiting")
        at_work = await shop.gate.visitor()
        waiters = await waiters_of(shop, WAITERS)

        await at_work.answer("go")
        assert (await a).status == 201
        assert summary(await asyncio.gather(*waiters)) == {"duplicate": WAITERS}
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_waiter_whose_time_is_up_is_told_not_yet(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), wait_timeout=0.2) as shop:
        a = order(shop.url, "/waiting")
        at_work = await shop.gate.visitor()

        b = await order(shop.url, "/waiting")
        assert (b.status, b.problem) == (409, "in-flight")
        assert int(b.headers["retry-after"]) >= 1
        assert checked_out(shop.shop.engine) == 1

        await at_work.answer("go")
        assert (await a).status == 201
        assert (await order(shop.url, "/waiting")).problem == "duplicate"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_waiter_that_hangs_up_leaves_the_others_alone(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path)) as shop:
        a = order(shop.url, "/waiting")
        at_work = await shop.gate.visitor()
        waiters = await waiters_of(shop, 10)
        for waiter in waiters[:5]:
            waiter.cancel()
        await asyncio.wait(waiters[:5])

        await at_work.answer("raise")
        assert (await a).status == 500
        await (await shop.gate.visitor()).answer("go")

        # The one that runs may be one whose client is gone: uvicorn does not cancel it, and its work counts.
        assert summary(await asyncio.gather(*waiters[5:]))["duplicate"] >= 4

        async def settled() -> bool:
            return checked_out(shop.shop.engine) == 0

        await until(settled)
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == 2


# case F1
@pytest.mark.parametrize("verdict", ["raise", "go"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_waiters_in_two_processes_learn_the_outcome_and_one_runs_if_it_is_a_failure(
    backend: str, verdict: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with gate() as opened, orders_table(database) as engine, AsyncExitStack() as stack:
        settings = Settings(url=database, pool_size=0 if backend == "sqlite" else 5, gate=opened.port)
        servers = [Forked(serve, settings) for _ in range(2)]
        for server in servers:
            stack.callback(server.close)
            server.start()
            await call(server.url, "GET", "/ping")

        a = order(servers[0].url, "/waiting")
        at_work = await opened.visitor()
        waiters = [order(server.url, "/waiting") for server in servers for _ in range(10)]

        async def all_wait() -> bool:
            replies = [await call(server.url, "GET", "/pool") for server in servers]
            return all(reply.json()["waiting"] == 10 for reply in replies)

        if backend != "sqlite":  # where the other process's waiters queue for the file's one writer
            await until(all_wait)

        await at_work.answer(verdict)
        assert (await a).status == (201 if verdict == "go" else 500)
        if verdict == "raise":
            await (await opened.visitor()).answer("go")

        expected = {"duplicate": 20} if verdict == "go" else {"201": 1, "duplicate": 19}
        assert summary(await asyncio.gather(*waiters)) == expected
        ledger = Ledger(engine=engine)
        assert await ledger.holds("K") == (1, 1)
        assert opened.visits == (1 if verdict == "go" else 2)
