"""Leased claims over HTTP: the handler works for long, and its session is its own."""

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Response
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.pool import QueuePool

from fastapi_dedup import Claim, Dedup, Deduplicated, DedupMiddleware, RequestSession
from fastapi_dedup.claims import InFlight, Lease
from fastapi_dedup.flights import Place
from fastapi_dedup.guard import GenerationalGuard
from tests.http.world import KEY, Statements, World, add, client, session_of
from tests.live import until

LEASE = timedelta(seconds=30)
FIRST = {KEY: "1"}


def route(app: FastAPI, policy: Deduplicated, work: Any) -> None:
    app.post("/orders", status_code=201, dependencies=[Depends(policy)])(work)


async def leases(world: World) -> list[bool]:
    """Return for each claim whether it is still leased."""
    return [when is not None for when in await world.column("select leased_until from dedup_claims")]


async def test_a_copy_is_told_in_flight_while_the_handler_holds_no_connection(world: World) -> None:
    app = world.app()
    at_work, go = asyncio.Event(), asyncio.Event()

    async def order(session: RequestSession) -> None:
        at_work.set()
        await go.wait()
        await add(session, "tea")

    route(app, Deduplicated(lease=LEASE), order)
    async with client(app) as calls:
        first = asyncio.create_task(calls.post("/orders", headers=FIRST))
        await at_work.wait()
        assert isinstance(world.dedup.engine.pool, QueuePool)
        assert world.dedup.engine.pool.checkedout() == 0
        copy = await calls.post("/orders", headers=FIRST)
        assert (copy.status_code, copy.headers["retry-after"]) == (409, "1")
        go.set()
        assert (await first).status_code == 201
        assert (await calls.post("/orders", headers=FIRST)).status_code == 409
    assert await world.orders() == ["tea"]
    assert await leases(world) == [False]
    assert world.kinds() == ["claimed", "in_flight", "committed", "duplicate"]


@pytest.mark.parametrize("scope", ["function", "request"])
@pytest.mark.parametrize("commits", ["dependency", "handler"])
async def test_the_apps_own_session_completes_the_claim_with_its_commit(
    world: World, scope: Any, commits: str
) -> None:
    app = world.app()
    get_session = session_of(world)
    if commits == "handler":

        async def get_session() -> Any:
            async with world.sessions() as session:
                yield session

    own = Depends(get_session, scope=scope)

    async def order(session: Annotated[AsyncSession, own]) -> None:
        assert await leases(world) == [True]
        await add(session, "tea")
        if commits == "handler":
            await session.commit()

    route(app, Deduplicated(lease=LEASE, session=own), order)
    async with client(app) as calls:
        assert (await calls.post("/orders", headers=FIRST)).status_code == 201
        assert await leases(world) == [False]
        assert (await calls.post("/orders", headers=FIRST)).status_code == 409
    assert await world.orders() == ["tea"]


async def test_a_handler_without_a_session_is_completed_before_its_response_leaves(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = world.app()

    async def order(claim: Annotated[Claim, Depends(Deduplicated(lease=LEASE))]) -> str:
        assert claim.expires_at - claim.claimed_at == world.dedup.window
        return claim.logical_id

    app.post("/orders", status_code=201)(order)
    async with client(app) as calls:
        assert (await calls.post("/orders", headers=FIRST)).json() == "1"
        assert await leases(world) == [False]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("how", "status"), [("raises", 500), ("HTTPException", 422), ("returns", 502), ("invalid response", 500)]
)
async def test_a_failure_frees_the_id_at_once(world: World, how: str, status: int) -> None:
    app = world.app()
    healthy = False

    async def order(session: RequestSession) -> Any:
        await add(session, "tea")
        if healthy:
            return None
        match how:
            case "raises":
                raise ZeroDivisionError
            case "HTTPException":
                raise HTTPException(422)
            case "returns":
                return Response(status_code=502)
        return "no number"

    annotated = int | None if how == "invalid response" else Any
    app.post("/orders", response_model=annotated, dependencies=[Depends(Deduplicated(lease=LEASE))])(order)
    async with client(app) as calls:
        assert (await calls.post("/orders", headers=FIRST)).status_code == status
        assert await world.ids() == []
        healthy = True
        assert (await calls.post("/orders", headers=FIRST)).status_code == 200
    assert await world.orders() == ["tea"]
    assert world.kinds() == ["claimed", "released", "claimed", "committed"]


async def test_an_error_that_comes_after_the_handlers_commit_gives_the_claim_back(world: World) -> None:
    app = world.app()

    async def order(session: RequestSession) -> Response:
        await add(session, "tea")
        await session.commit()
        return Response(status_code=503)

    route(app, Deduplicated(lease=LEASE), order)
    async with client(app) as calls:
        assert (await calls.post("/orders", headers=FIRST)).status_code == 503
    assert await world.ids() == []


async def test_an_owner_that_was_robbed_tells_nobody_of_a_success(world: World) -> None:
    # case E3
    app = world.app()

    async def order(session: RequestSession) -> None:
        await add(session, "tea")
        await world.dedup.release("1", scope=("POST", "/orders"))  # as if the lease had run out
        if world.engine.dialect.name != "sqlite":  # where nobody else can write just now
            async with world.dedup.claim("1", scope=("POST", "/orders")):
                pass

    async def order_later(session: RequestSession) -> None:
        await world.dedup.release("1", scope=("POST", "/orders"))
        await add(session, "tea")

    on_sqlite = world.engine.dialect.name == "sqlite"
    route(app, Deduplicated(lease=LEASE), order_later if on_sqlite else order)
    async with client(app) as calls:
        assert (await calls.post("/orders", headers=FIRST)).status_code == 500
    assert await world.orders() == []


async def test_an_abandoned_claim_is_told_apart_and_asks_for_no_retry(world: World) -> None:
    app = world.app()
    lease = Lease(timedelta(milliseconds=1), "block")
    dead = replace(world.dedup.intent("1", scope=("POST", "/orders")), lease=lease)
    leases_of_another_process = world.dedup._store.leases
    await leases_of_another_process.take(dead)

    async def abandoned() -> bool:
        return await leases_of_another_process.look(dead) == InFlight(abandoned=True)

    await until(abandoned)

    async def order() -> None:
        pytest.fail("it must not run")

    route(app, Deduplicated(lease=LEASE, on_abandoned="block"), order)
    async with client(app) as calls:
        copy = await calls.post("/orders", headers=FIRST)
    assert copy.status_code == 409
    assert copy.json()["abandoned"] is True
    assert "retry-after" not in copy.headers


async def test_it_waits_for_a_leased_twin_without_a_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = world.app()
    at_work, go, all_wait = asyncio.Event(), asyncio.Event(), asyncio.Barrier(21)
    turn = Place.turn

    async def turn_of_all(place: Place, *, at_most: float) -> bool:
        await all_wait.wait()
        return await turn(place, at_most=at_most)

    monkeypatch.setattr(Place, "turn", turn_of_all)

    async def order(session: RequestSession) -> None:
        at_work.set()
        await go.wait()
        await add(session, "tea")

    route(app, Deduplicated(lease=LEASE, in_flight="wait", duplicate_status=200), order)
    async with client(app) as calls:
        first = asyncio.create_task(calls.post("/orders", headers=FIRST))
        await at_work.wait()
        copies = [asyncio.create_task(calls.post("/orders", headers=FIRST)) for _ in range(20)]
        await all_wait.wait()
        for engine in (world.dedup.engine, world.dedup._store.leases._engine):
            assert isinstance(engine.pool, QueuePool)
            assert engine.pool.checkedout() == 0
        go.set()
        assert (await first).status_code == 201
        assert {(await copy).status_code for copy in copies} == {200}
    assert await world.orders() == ["tea"]


async def test_a_messages_handler_takes_the_same_policy(world: World) -> None:
    entered: list[list[bool]] = []

    @world.dedup.handler(Deduplicated("body", "order_id", lease=LEASE))
    async def on_order(message: dict[str, str], session: AsyncSession) -> None:
        entered.append(await leases(world))
        await session.execute(text("insert into orders (sku) values (:order_id)"), message)

    results = [(await on_order({"order_id": "tea"})).value for _ in range(2)]
    assert results == ["handled", "duplicate"]
    assert entered == [[True]]
    assert await leases(world) == [False]
    assert await world.orders() == ["tea"]


async def test_a_guard_in_front_answers_for_leased_claims_too(world: World) -> None:
    dedup = Dedup(world.engine, guard=GenerationalGuard(), reap_every=None)
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)
    at_work, go = asyncio.Event(), asyncio.Event()

    async def order(session: RequestSession) -> None:
        at_work.set()
        await go.wait()
        await add(session, "tea")

    route(app, Deduplicated(lease=LEASE), order)
    async with client(app) as calls:
        first = asyncio.create_task(calls.post("/orders", headers=FIRST))
        await at_work.wait()
        heard = [Statements(world.engine), Statements(dedup._store.leases._engine)]
        assert (await calls.post("/orders", headers=FIRST)).json()["type"].endswith("#in-flight")
        assert heard == [[], []]
        go.set()
        assert (await first).status_code == 201
        for statements in heard:
            statements.clear()
        assert (await calls.post("/orders", headers=FIRST)).json()["type"].endswith("#duplicate")
        assert heard == [[], []]
