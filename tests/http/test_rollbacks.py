"""Transactions that roll back mid-way, whole or in part: claim and work stay together."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated, RequestSession
from tests.http.world import KEY, World, add, client, problem, session_of

FORMS = [
    "callable",
    "Depends",
    "Depends, function-scoped",
    "Annotated",
    "Annotated, function-scoped",
    "RequestSession",
]


async def test_a_savepoint_that_is_rolled_back_keeps_the_claim_of_the_transaction_around_it(
    world: World,
) -> None:
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "kept")
        savepoint = await session.begin_nested()
        await add(session, "dropped")
        await savepoint.rollback()
        await add(session, "after")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["kept", "after"], ["k"])


async def test_a_claim_in_a_savepoint_that_is_rolled_back_is_free(world: World) -> None:
    # DESIGN.md §4.3
    app = world.app()
    outer = session_of(world)

    async def get_session(session: Annotated[AsyncSession, Depends(outer)]) -> AsyncIterator[AsyncSession]:
        async with session.begin_nested():
            yield session

    tries: list[int] = []

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "a")
        tries.append(1)
        if len(tries) == 1:
            raise HTTPException(400)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 400
        assert await world.ids() == []
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_handler_that_rolls_back_mid_way_and_goes_on_holds_its_claim_at_the_end(world: World) -> None:
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "dropped")
        await session.rollback()
        await add(session, "kept")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["kept"], ["k"])


async def test_a_handler_that_rolls_back_mid_way_loses_against_a_twin_that_did_the_work(world: World) -> None:
    app = world.app()
    rolled_back, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders/{sku}", dependencies=[Depends(Deduplicated(scope="orders"))])
    async def create(sku: str, session: RequestSession) -> None:
        if sku == "slow":
            await session.rollback()
            rolled_back.set()
            await go_on.wait()
        await add(session, sku)

    async with client(app) as c:
        slow = asyncio.create_task(c.post("/orders/slow", headers={KEY: "k"}))
        await rolled_back.wait()
        assert (await c.post("/orders/quick", headers={KEY: "k"})).status_code == 200
        go_on.set()
        answer = await slow
        assert (answer.status_code, problem(answer)) == (409, "duplicate")
    assert (await world.orders(), await world.ids()) == (["quick"], ["k"])


@pytest.mark.parametrize("scope", ["function", "request"])
async def test_work_that_goes_on_in_the_apps_session_after_a_rollback_never_commits_without_its_claim(
    world: World, scope: Any
) -> None:
    # DESIGN.md §4.2: claim and work commit together or not at all.
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            yield session
            await session.commit()

    depends = Depends(get_session, scope=scope)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=depends))])
    async def create(session: Annotated[AsyncSession, depends]) -> None:
        await session.rollback()
        await add(session, "a")

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
        state = (answer.status_code, await world.orders(), await world.ids())
        assert state in [(200, ["a"], ["k"]), (500, [], [])]
