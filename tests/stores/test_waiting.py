"""Waiting for the outcome of a twin: without a connection, and with the right answer in the end."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import ClaimInFlightError, Dedup, DuplicateError
from fastapi_dedup.claims import Claim, Duplicate, InFlight
from tests.databases import engine_on
from tests.stores.promises import Promise
from tests.stores.worlds import SOON, Order, World, intent

NEWS = intent("news")
WAITERS = 20


async def wait_for(dedup: Dedup, seconds: float = SOON) -> type:
    """Claim as a duplicate that waits; do the work where it may."""
    patience = timedelta(seconds=seconds)
    try:
        async with dedup.claim("news", scope="tests", in_flight="wait", wait_timeout=patience) as claim:
            claim.session.add(Order(sku="news"))
    except (DuplicateError, ClaimInFlightError) as refusal:
        return type(refusal)
    return Claim


@pytest.mark.parametrize("ending", ["succeed", "fail"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_those_who_wait_hold_no_connection_and_all_get_the_right_answer(
    world: World, ending: str, where: str
) -> None:
    # cases F1, F2
    engine = engine_on(world.url, pool_size=2, max_overflow=0, pool_timeout=SOON)
    waiting_here = world.runtime(engine=engine)
    holds_here = where == "here" or Promise.SEES_TWINS_ELSEWHERE not in world.backend
    async with world.attempt(waiting_here if holds_here else world.dedup) as first, asyncio.timeout(2 * SOON):
        await first.claim(NEWS)
        await first.work("news")
        waiters = [asyncio.create_task(wait_for(waiting_here)) for _ in range(WAITERS)]
        await asyncio.sleep(0.2)
        assert not any(waiter.done() for waiter in waiters)
        async with engine.connect() as unrelated:  # the pool has one to spare, or will have at once
            assert await unrelated.scalar(text("select 1")) == 1
        await getattr(first.delivery, ending)()
        outcomes = await asyncio.gather(*waiters)
    assert outcomes.count(Claim) == (ending == "fail")
    assert {*outcomes} <= {Claim, DuplicateError}
    assert await world.orders() == ["news"]


async def test_who_has_waited_long_enough_is_told_that_the_twin_is_still_in_flight(world: World) -> None:
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        assert await wait_for(world.dedup, 0.1) is ClaimInFlightError
        await first.delivery.succeed()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize("ending", ["succeed", "fail", "outlast them"])
async def test_who_waits_for_a_neighbour_needs_no_connection_before_it_lands(
    world: World, ending: str
) -> None:
    engine = engine_on(world.url, pool_size=1, max_overflow=0, pool_timeout=0.2)
    dedup = world.runtime(engine=engine)
    async with world.attempt(dedup) as first, asyncio.timeout(2 * SOON):
        await first.claim(NEWS)
        await first.work("news")
        assert engine.pool.checkedout() == 1  # type: ignore[attr-defined]  # as a QueuePool has it
        patience = 0.5 if ending == "outlast them" else SOON
        waiters = [asyncio.create_task(wait_for(dedup, patience)) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert not any(waiter.done() for waiter in waiters)
        if ending == "outlast them":
            assert await asyncio.gather(*waiters) == [ClaimInFlightError] * 3
            await first.delivery.fail()
            return
        await getattr(first.delivery, ending)()
        outcomes = await asyncio.gather(*waiters)
    assert outcomes.count(Claim) == (ending == "fail")
    assert {*outcomes} <= {Claim, DuplicateError}


async def test_who_waits_in_a_session_that_was_used_before_is_answered_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # its connection cannot be given back: the app has something open in it
    async with world.attempt() as first, world.session() as session, asyncio.timeout(SOON):
        await first.claim(NEWS)
        await session.execute(text("select sku from orders"))
        with pytest.raises(ClaimInFlightError):
            async with world.dedup.claim(
                "news",
                scope="tests",
                session=session,
                in_flight="wait",
                wait_timeout=timedelta(hours=1),
            ):
                raise AssertionError
        assert "cannot wait" in caplog.text
        await first.delivery.fail()


async def test_what_a_session_has_done_before_is_not_given_up_to_wait(world: World) -> None:
    hour = timedelta(hours=1)
    async with (
        world.runtime().claim("news", scope="tests", lease=hour),  # for everyone to see, in every store
        world.session() as session,
        asyncio.timeout(SOON),
    ):
        await session.execute(text("insert into orders (sku) values ('before')"))
        with pytest.raises(ClaimInFlightError):
            async with world.dedup.claim(
                "news", scope="tests", session=session, in_flight="wait", wait_timeout=hour
            ):
                raise AssertionError
        await session.commit()
    assert await world.orders() == ["before"]


async def test_what_a_session_has_loaded_is_not_expired_to_wait(world: World) -> None:
    hour = timedelta(hours=1)
    order = Order(sku="before")
    async with (
        world.runtime().claim("news", scope="tests", lease=hour),
        AsyncSession(world.dedup.engine, expire_on_commit=False) as session,
        asyncio.timeout(SOON),
    ):
        session.add(order)
        await session.commit()
        with pytest.raises(ClaimInFlightError):
            async with world.dedup.claim(
                "news", scope="tests", session=session, in_flight="wait", wait_timeout=hour
            ):
                raise AssertionError
        assert order.sku == "before"


async def test_a_claim_that_a_delivery_has_is_not_given_up_to_wait_for_another(world: World) -> None:
    flight = world.dedup._flights.overtake(intent("other"))
    flight.held = True  # by a neighbour
    async with world.attempt() as attempt, asyncio.timeout(SOON):
        await attempt.claim(NEWS)
        outcome = await attempt.delivery.claim(
            intent("other"), attempt.transaction, wait=timedelta(seconds=SOON / 4)
        )
        assert outcome == InFlight()
        assert await attempt.session.scalar(text("select count(*) from dedup_claims")) == 1
        await attempt.delivery.fail()
