"""A server is killed with SIGKILL at named points: its claims are there if and only if their work is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.apps.forked import Forked
from tests.apps.orders import KILL_POINTS, serve
from tests.crash.places import place
from tests.live import Caller, Reply, call
from tests.races.shop import Ledger

BACKENDS = ("asyncpg", "asyncmy", "sqlite")
ROUNDS = 20
SOAK_ROUNDS = 200
BORROWED = ("/committed-by-handler", "/committed-by-dependency")
KILLED = -9


@asynccontextmanager
async def mortal(
    backend: str, request: pytest.FixtureRequest, folder: Path
) -> AsyncIterator[tuple[Forked, Ledger]]:
    """Run a server that may be killed and started again, and yield it with a view on what it holds."""
    async with place(backend, request, folder) as (settings, ledger):
        server = Forked(serve, settings)
        server.start()
        try:
            await call(server.url, "GET", "/ping")
            yield server, ledger
        finally:
            server.close()


async def retry(url: str, path: str, sku: str) -> Reply:
    """Send an order until the answer is final: PostgreSQL needs a moment to notice that a client is dead."""
    async with asyncio.timeout(30):
        reply = await call(url, "POST", path, {"sku": sku})
        while reply.problem == "in-flight":
            reply = await call(url, "POST", path, {"sku": sku})
    return reply


async def kill_again_and_again(server: Forked, ledger: Ledger, path: str, point: str, rounds: int) -> None:
    """Kill the server at a point so many times, and count where claim, work and retry disagree."""
    expected = (1, 1) if point == "after_commit" else (0, 0)
    answer = "duplicate" if point == "after_commit" else "201"
    disagreements: list[str] = []
    for number in range(rounds):
        sku = f"{point}-{number}"
        caller = await Caller.connect(server.url)
        with pytest.raises(ConnectionError):
            await caller.call("POST", path, {"sku": sku}, {"Kill-At": point})
        caller.hang_up()
        assert await server.ended() == KILLED
        if caller.answered:
            disagreements.append(f"{sku}: an answer had begun when the server died {point}")

        seen = await ledger.holds(sku)
        if seen != expected:
            disagreements.append(f"{sku}: (rows, claims) = {seen} after the kill")
        server.start()
        reply = await retry(server.url, path, sku)
        if (reply.problem or str(reply.status)) != answer:
            disagreements.append(f"{sku}: the retry was answered {reply}")
        seen = await ledger.holds(sku)
        if seen != (1, 1):
            disagreements.append(f"{sku}: (rows, claims) = {seen} after the retry")
    assert disagreements == []


# case E3, DESIGN.md §4.2
@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_claim_and_work_agree_after_20_kills_and_the_retry_gets_the_right_answer(
    backend: str, point: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_again_and_again(server, ledger, "/orders", point, ROUNDS)


# case E3
@pytest.mark.parametrize("path", BORROWED)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_they_agree_where_the_claim_rides_a_session_of_the_apps_own(
    backend: str, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        for point in KILL_POINTS:
            await kill_again_and_again(server, ledger, path, point, 3)


async def kill_under_a_crowd(server: Forked, skus: list[str], answers: int) -> dict[str, int]:
    """Kill the server when so many of its customers have been answered; return who was told which status."""
    told: dict[str, int] = {}

    async def order(sku: str) -> None:
        caller = await Caller.connect(server.url)
        try:
            reply = await caller.call("POST", "/orders", {"sku": sku})
        except ConnectionError:
            return
        finally:
            caller.hang_up()
        told[sku] = reply.status
        if len(told) == answers:
            server.kill()

    async with asyncio.TaskGroup() as customers:
        for sku in skus:
            customers.create_task(order(sku))
        assert await server.ended() == KILLED
        server.start()  # whoever has not been accepted by the first one is served by the second
    return told


async def kill_at_random(server: Forked, ledger: Ledger, chance: random.Random, rounds: int) -> None:
    """Kill the server among ten customers, and count where claim, work and what was told disagree."""
    disagreements: list[str] = []
    for number in range(rounds):
        skus = [f"{number}-{customer}" for customer in range(10)]
        told = await kill_under_a_crowd(server, skus, chance.randint(1, len(skus)))
        for sku in skus:
            seen = await ledger.holds(sku)
            if seen not in {(0, 0), (1, 1)} or (sku in told and (told[sku], seen) != (201, (1, 1))):
                disagreements.append(f"{sku}: (rows, claims) = {seen}, told {told.get(sku)}")
        replies = await asyncio.gather(*(retry(server.url, "/orders", sku) for sku in skus))
        for sku, reply in zip(skus, replies, strict=True):
            seen = await ledger.holds(sku)
            if seen != (1, 1) or (reply.problem or reply.status) not in {201, "duplicate"}:
                disagreements.append(f"{sku}: (rows, claims) = {seen} after the retry, {reply}")
    assert disagreements == []


# case E3
@pytest.mark.parametrize("backend", BACKENDS)
async def test_they_agree_after_kills_at_random_moments(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_at_random(server, ledger, random.Random(0), ROUNDS)  # noqa: S311 - repeatable


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", ["/orders", *BORROWED])
@pytest.mark.parametrize("point", KILL_POINTS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_claim_and_work_agree_after_200_kills(
    backend: str, point: str, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_again_and_again(server, ledger, path, point, SOAK_ROUNDS)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_they_agree_after_500_kills_at_random_moments(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_at_random(server, ledger, random.Random(), 500)  # noqa: S311 - not a secret
