"""Savepoints: a claim shares the fate of the one that it was made in, and of those around it."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Claim
from fastapi_dedup.claims import Duplicate, InFlight
from tests.stores.promises import Promise
from tests.stores.worlds import SOON, Order, World, intent

NEWS = intent("news")

BEFORE = ("nothing", "a SELECT", "a write")


async def begun(world: World, before: str) -> AsyncSession:
    """Return a session of the app's in which something has happened already."""
    session = world.session()
    if before == "a SELECT":
        await session.scalars(text("select sku from orders"))
    elif before == "a write":
        session.add(Order(sku="before"))
        await session.flush()
    return session


@pytest.mark.parametrize("before", BEFORE)
async def test_a_claim_in_a_savepoint_that_is_rolled_back_is_free(world: World, before: str) -> None:
    # case F7
    async with await begun(world, before) as session, asyncio.timeout(SOON):
        savepoint = await session.begin_nested()
        assert await world.claim_in(session) is Claim
        session.add(Order(sku="undone"))
        await session.flush()
        await savepoint.rollback()
        if Promise.FREE_WITH_SAVEPOINT not in world.backend:
            if Promise.SEES_TWINS_ELSEWHERE in world.backend:
                assert await world.run(NEWS) == InFlight()
            await session.commit()
        await world.claimed(NEWS)
        assert isinstance(await world.run(NEWS, world.runtime()), Duplicate)
        await session.commit()
    assert await world.orders() == (["before", "news"] if before == "a write" else ["news"])


@pytest.mark.parametrize("before", BEFORE)
async def test_a_claim_in_a_released_savepoint_shares_the_fate_of_the_transaction_around(
    world: World, before: str
) -> None:
    # case F7: SQLite commits the first savepoint of a transaction that has not begun
    for ending in ("rollback", "commit"):
        async with await begun(world, before) as session:
            async with session.begin_nested():
                assert await world.claim_in(session) is Claim
                session.add(Order(sku="work"))
            await getattr(session, ending)()
        kept = ending == "commit"
        assert await world.count("orders", "sku = 'work'") == kept, ending
        assert await world.count() == kept, ending


@pytest.mark.parametrize("ending", ["rollback", "commit"])
async def test_the_release_of_a_savepoint_tells_nobody_of_a_commit(world: World, ending: str) -> None:
    told: list[str] = []
    world.dedup = world.runtime(hooks=[lambda event: told.append(event.kind.value)])
    async with world.session() as session:
        async with session.begin_nested(), world.dedup.claim("news", scope="tests", session=session):
            session.add(Order(sku="news"))
        assert told == ["claimed"]
        await getattr(session, ending)()
    assert told == ["claimed", "committed" if ending == "commit" else "released"]


async def test_a_savepoint_inside_the_claims_block_does_not_touch_the_claim(world: World) -> None:
    # case F7
    async with world.dedup.claim("news", scope="tests") as claim:
        savepoint = await claim.session.begin_nested()
        claim.session.add(Order(sku="undone"))
        await claim.session.flush()
        await savepoint.rollback()
        async with claim.session.begin_nested():
            claim.session.add(Order(sku="kept"))
    assert await world.orders() == ["kept"]
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_an_id_whose_savepoint_was_rolled_back_may_be_claimed_again_in_the_same_transaction(
    world: World,
) -> None:
    async with world.session() as session:
        for ending in ("rollback", "commit"):
            savepoint = await session.begin_nested()
            assert await world.claim_in(session) is Claim, ending
            await getattr(savepoint, ending)()
        await session.commit()
    assert await world.count() == 1


async def test_a_handler_that_raises_in_its_savepoint_frees_the_id(world: World) -> None:
    # case F7
    async with world.session() as session:
        with pytest.raises(RuntimeError):
            async with session.begin_nested(), world.dedup.claim("news", scope="tests", session=session):
                raise RuntimeError
        await session.commit()
    assert await world.rows() == []
    await world.claimed(NEWS)
