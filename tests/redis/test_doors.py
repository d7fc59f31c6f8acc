"""Leases in Redis beside a database, through every door: routes, a session of the app's own, messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import ClaimLostError, ConfigurationError, Dedup, Deduplicated, DuplicateError
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import Event
from fastapi_dedup.stores.redis import RedisLeases
from tests.databases import orders_table, url_of
from tests.guard.doors import DOORS, SCOPE, Queries, endpoint
from tests.http.world import World
from tests.redis.worlds import client_of, rows_in
from tests.servers import driver_url

LEASE = timedelta(seconds=30)


class Shop(World):
    """A database for the orders, and Redis for the leases of their claims."""

    leases: RedisLeases
    url: str
    prefix: str

    async def leased(self) -> list[bool]:
        """Return for each claim in Redis whether its work goes on."""
        async with client_of(self.url, decode_responses=True) as client:
            return [row.leased_until is not None for row in await rows_in(client, self.prefix)]


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=["sqlite", "psycopg"])
async def shop(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, prefix: str
) -> AsyncIterator[Shop]:
    events = list[Event]()
    leases = RedisLeases(redis_url, prefix=prefix)
    async with orders_table(url_of(request.param, request, tmp_path)) as engine:
        dedup = Dedup(
            engine,
            create_table=True,
            reap_every=None,
            hooks=[events.append],
            leases=leases,
        )
        await dedup.create_table()
        made = Shop(engine, dedup, events)
        made.leases, made.url, made.prefix = leases, redis_url, prefix
        yield made
        await dedup.stop()


async def fail(_: AsyncSession) -> None:
    msg = "the handler failed, as the test wished"
    raise RuntimeError(msg)


async def commit_and_fail(session: AsyncSession) -> None:
    await session.commit()
    await fail(session)


async def test_copies_are_told_in_flight_while_the_handler_works_and_duplicate_afterwards(
    shop: Shop, door: str
) -> None:
    async with endpoint(door, shop.dedup, lease=LEASE) as orders:
        gate = orders.gate()
        first = orders.delivering("1")
        await gate.reached.wait()
        assert await shop.leased() == [True]
        assert await orders.deliver("1") == "in-flight"
        gate.open()
        assert await first == "ran"
        assert await shop.leased() == [False]
        assert await orders.deliver("1") == "duplicate"
        assert await orders.deliver("1", "coffee") == "fingerprint-mismatch"
    assert (orders.runs, await shop.orders(), await shop.ids()) == (1, ["tea"], [])
    assert shop.kinds() == ["claimed", "in_flight", "committed", "duplicate", "mismatch"]


@pytest.mark.parametrize("mishap", [fail, commit_and_fail])
async def test_a_handler_that_fails_frees_its_id_at_once(shop: Shop, door: str, mishap: Any) -> None:
    async with endpoint(door, shop.dedup, lease=LEASE) as orders:
        orders.mishaps.append(mishap)
        assert await orders.deliver("1") == "failed"
        assert await shop.leased() == []
        assert await orders.deliver("1") == "ran"
    assert await shop.orders() == ["tea"] * (2 if mishap is commit_and_fail else 1)


async def test_a_copy_waits_for_the_outcome(shop: Shop, door: str) -> None:
    async with endpoint(door, shop.dedup, lease=LEASE, in_flight="wait") as orders:
        for mishap, outcomes in ((None, ["ran", "duplicate"]), (fail, ["failed", "ran"])):
            gate = orders.gate()
            if mishap is not None:
                wait = orders.mishaps.pop()

                async def then_fail(session: AsyncSession, wait: Any = wait) -> None:
                    await wait(session)
                    await fail(session)

                orders.mishaps.append(then_fail)
            logical_id = outcomes[0]
            first = orders.delivering(logical_id)
            await gate.reached.wait()
            copy = orders.delivering(logical_id)
            gate.open()
            assert [await first, await copy] == outcomes


async def test_a_guard_in_front_answers_duplicates_without_asking_redis_or_the_database(
    shop: Shop, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.dedup._guard = GenerationalGuard()
    async with endpoint(door, shop.dedup, lease=LEASE) as orders:
        assert await orders.deliver("1") == "ran"
        queries = Queries(shop.engine)

        async def ask(*_: Any) -> None:
            queries.append("Redis")

        monkeypatch.setattr(shop.leases, "_evaluate", ask)
        assert await orders.deliver("1") == "duplicate"
        monkeypatch.undo()
        assert queries == []
        assert await shop.dedup.release("1", scope=SCOPE)
        assert await orders.deliver("1") == "ran"
    assert await shop.orders() == ["tea", "tea"]


async def test_riding_claims_stay_in_the_database_and_do_not_meet_leased_ones(shop: Shop, door: str) -> None:
    async with (
        endpoint(door, shop.dedup) as riding,
        endpoint(door, shop.dedup, lease=LEASE) as leased,
    ):
        for orders in (riding, leased):
            assert [await orders.deliver("1") for _ in range(2)] == ["ran", "duplicate"]
    assert (await shop.ids(), await shop.leased()) == (["1"], [False])
    assert await shop.dedup.release("1", scope=SCOPE)
    assert (await shop.ids(), await shop.leased()) == ([], [])
    assert not await shop.dedup.release("1", scope=SCOPE)


async def test_a_job_takes_a_lease_too(shop: Shop) -> None:
    async with shop.dedup.claim("nightly", scope="jobs", lease=LEASE) as claim:
        assert claim.expires_at - claim.claimed_at == shop.dedup.window
        assert await shop.leased() == [True]
    assert await shop.leased() == [False]
    with pytest.raises(DuplicateError):
        async with shop.dedup.claim("nightly", scope="jobs", lease=LEASE):
            pass


async def test_a_handler_that_needs_no_database_takes_no_connection(shop: Shop) -> None:
    async with endpoint("message", shop.dedup, lease=LEASE, works=False) as orders:
        queries = Queries(shop.engine)
        assert await orders.deliver("1") == "ran"
        assert queries == []
    assert await shop.leased() == [False]


@pytest.fixture
async def driven(postgres_url: str, redis_url: str, prefix: str) -> AsyncIterator[tuple[Shop, asyncpg.Pool]]:
    """Yield a shop whose handlers work on asyncpg's own connections."""
    leases = RedisLeases(redis_url, prefix=prefix)
    async with (
        orders_table(driver_url(postgres_url, "asyncpg")) as engine,
        asyncpg.create_pool(postgres_url, min_size=1) as pool,
    ):
        dedup = Dedup(engine, reap_every=None, leases=leases)
        await dedup.create_table()
        made = Shop(engine, dedup)
        made.leases, made.url, made.prefix = leases, redis_url, prefix
        yield made, pool
        await dedup.stop()


@pytest.mark.parametrize("robbed", [True, False])
async def test_a_connection_of_a_drivers_own_is_followed_to_its_end(
    driven: tuple[Shop, asyncpg.Pool], robbed: bool
) -> None:
    shop, pool = driven

    async def get_connection() -> AsyncIterator[Any]:
        async with pool.acquire() as connection, connection.transaction():
            yield connection

    @shop.dedup.handler(Deduplicated("body", "sku", lease=LEASE, session=get_connection, scope=SCOPE))
    async def on_order(message: dict[str, str], connection: asyncpg.Connection) -> None:
        await connection.execute("insert into orders (sku) values ($1)", message["sku"])
        if robbed:
            await shop.dedup.release(message["sku"], scope=SCOPE)

    if robbed:
        with pytest.raises(ClaimLostError):
            await on_order({"sku": "tea"})
    else:
        results = [await on_order({"sku": "tea"}) for _ in range(2)]
        assert [result.value for result in results] == ["handled", "duplicate"]
    assert await shop.orders() == ([] if robbed else ["tea"])
    assert await shop.leased() == ([] if robbed else [False])


async def test_a_connection_of_a_drivers_own_that_is_committed_after_the_block_cannot_be_followed(
    driven: tuple[Shop, asyncpg.Pool],
) -> None:
    shop, pool = driven
    async with pool.acquire() as connection, connection.transaction():
        with pytest.raises(
            ConfigurationError, match=r"tells nobody of its COMMIT, so a lease in RedisLeases"
        ):
            async with shop.dedup.claim("1", scope=SCOPE, lease=LEASE, session=connection):
                pytest.fail("it must not run")
    assert await shop.leased() == []
