"""Redis is down, dies under a handler, comes back, or has forgotten everything: what becomes of the work."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Dedup
from fastapi_dedup.claims import Duplicate, InFlight
from fastapi_dedup.hooks import Event
from fastapi_dedup.stores.redis import RedisLeases
from tests.databases import orders_table
from tests.guard.doors import DOORS, SCOPE, Endpoint, endpoint
from tests.http.world import World
from tests.live import until
from tests.redis_servers import PrivateRedis, private_redis

LONG = timedelta(seconds=30)
BRIEF = timedelta(seconds=0.6)


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@asynccontextmanager
async def world_on(url: str, folder: Path) -> AsyncIterator[World]:
    """Yield a database, and a runtime on it that keeps its leases in a Redis."""
    events = list[Event]()
    async with orders_table(f"sqlite+aiosqlite:///{folder / 'shop.db'}") as engine:
        dedup = Dedup(engine, reap_every=None, hooks=[events.append], leases=RedisLeases(url))
        await dedup.create_table()
        yield World(engine, dedup, events)
        await dedup.stop()


@pytest.fixture
async def world(mortal: PrivateRedis, tmp_path: Path) -> AsyncIterator[World]:
    async with world_on(mortal.url, tmp_path) as made:
        yield made


async def outcome(world: World) -> object:
    """Return what the claim of order 1 answers now."""
    return await world.dedup._backing.leases.look(world.dedup.intent("1", scope=SCOPE))


async def until_done(world: World) -> None:
    """Wait until the claim of order 1 says that its work is done."""

    async def done() -> bool:
        return isinstance(await outcome(world), Duplicate)

    await until(done)


async def raise_an_error(_: AsyncSession) -> None:
    msg = "the handler failed, as the test wished"
    raise ZeroDivisionError(msg)


async def test_nothing_runs_while_it_is_down_and_everything_when_it_is_back(
    world: World, mortal: PrivateRedis, door: str
) -> None:
    async with endpoint(door, world.dedup, lease=LONG) as orders:
        mortal.kill()
        for _ in range(2):
            assert await orders.deliver("1") == "store-unavailable"
        assert orders.runs == 0
        mortal.start()
        assert await orders.deliver("1") == "ran"
    assert world.kinds() == ["unavailable", "unavailable", "claimed", "committed"]


async def die_under_a_handler(orders: Endpoint, mortal: PrivateRedis) -> str:
    """Kill Redis while a handler works, and return the outcome of its delivery."""
    gate = orders.gate()
    first = orders.delivering("1")
    await gate.reached.wait()
    mortal.kill()
    gate.open()
    return await first


async def test_work_whose_lease_is_sure_to_last_is_committed_and_recorded_when_it_is_back(
    world: World, mortal: PrivateRedis, door: str
) -> None:
    async with endpoint(door, world.dedup, lease=timedelta(seconds=3)) as orders:
        assert await die_under_a_handler(orders, mortal) == "ran"
        assert await world.orders() == ["tea"]
        mortal.start()
        await until_done(world)
        assert await orders.deliver("1") == "duplicate"
    assert orders.runs == 1
    assert world.kinds() == ["claimed", "committed", "duplicate"]


async def test_effects_without_a_database_are_told_so_and_recorded_when_it_is_back(
    world: World, mortal: PrivateRedis, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint("message", world.dedup, lease=BRIEF, works=False) as orders:
        assert await die_under_a_handler(orders, mortal) == "ran"
        assert "is done, and its claim could not be completed: trying again" in caplog.text
        mortal.start()
        await until_done(world)
        assert await orders.deliver("1") == "duplicate"


async def test_work_whose_lease_nobody_can_be_sure_of_is_not_committed(
    world: World, mortal: PrivateRedis, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint(door, world.dedup, lease=BRIEF) as orders:
        gate = orders.gate()
        first = orders.delivering("1")
        await gate.reached.wait()
        mortal.kill()

        killed = time.monotonic()

        async def a_lease_has_passed() -> bool:
            return time.monotonic() > killed + BRIEF.total_seconds()

        await until(a_lease_has_passed)
        assert "could not extend the lease" in caplog.text
        gate.open()
        assert await first in {"store-unavailable", "failed"}
        assert await world.orders() == []
        mortal.start()
        outcomes = []

        async def runs_again() -> bool:
            outcomes.append(await orders.deliver("1"))
            return outcomes[-1] == "ran"

        await until(runs_again)
        assert set(outcomes[:-1]) <= {"in-flight"}
    assert (orders.runs, await world.orders()) == (2, ["tea"])


async def test_what_the_handler_raised_is_not_masked(
    world: World, mortal: PrivateRedis, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint(door, world.dedup, lease=LONG) as orders:

        async def kill_and_raise(session: AsyncSession) -> None:
            mortal.kill()
            await raise_an_error(session)

        orders.mishaps.append(kill_and_raise)
        assert await orders.deliver("1") == "failed"
        assert "it is in flight until its lease runs out" in caplog.text
        mortal.start()
        assert await outcome(world) == InFlight()
        assert await world.orders() == []


async def test_a_failover_that_forgot_the_claim_refuses_the_work(tmp_path: Path, door: str) -> None:
    with private_redis() as forgetful:
        async with (
            world_on(forgetful.url, tmp_path) as world,
            endpoint(door, world.dedup, lease=LONG) as orders,
        ):
            gate = orders.gate()
            first = orders.delivering("1")
            await gate.reached.wait()
            forgetful.kill()
            forgetful.start()
            gate.open()
            assert await first == "failed"
            assert await world.orders() == []
            assert await orders.deliver("1") == "ran"


async def test_a_failover_that_forgot_work_that_is_done_lets_it_run_again(tmp_path: Path, door: str) -> None:
    """What the page on Redis warns of: nothing here can know better."""
    with private_redis() as forgetful:
        async with (
            world_on(forgetful.url, tmp_path) as world,
            endpoint(door, world.dedup, lease=LONG) as orders,
        ):
            assert await orders.deliver("1") == "ran"
            forgetful.kill()
            forgetful.start()
            assert await orders.deliver("1") == "ran"
            assert await world.orders() == ["tea", "tea"]


async def test_a_stop_does_not_wait_for_an_outage_to_end(world: World, mortal: PrivateRedis) -> None:
    async with endpoint("message", world.dedup, lease=LONG, works=False) as orders:
        assert await die_under_a_handler(orders, mortal) == "ran"
    assert world.dedup._flights._meanwhile
    await world.dedup.stop()
    assert not world.dedup._flights._meanwhile
