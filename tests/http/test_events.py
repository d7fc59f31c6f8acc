"""Nothing vanishes silently: the log and the hooks hear of every refusal and every claim."""

import asyncio
import logging
from datetime import timedelta
from typing import Annotated

import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    Dedup,
    Deduplicated,
    DedupMiddleware,
    RequestSession,
)
from fastapi_dedup.hooks import Event, EventKind
from tests.http.world import KEY, World, add, client, problem, session_of

PAGE = "https://fastapi-dedup.readthedocs.io/en/stable/reference/problems/"


def app_of(world: World, *policies: Deduplicated) -> FastAPI:
    app = world.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(each) for each in policies])
    async def create(request: Request, session: RequestSession) -> None:
        await request.body()
        await add(session, "a")

    return app


async def test_every_refusal_is_logged_at_info_with_id_scope_and_age(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastapi_dedup")
    async with client(app_of(sqlite, Deduplicated())) as c:
        assert (await c.post("/orders", headers={KEY: "k"}, json="secret")).status_code == 201
        caplog.clear()
        await c.post("/orders", headers={KEY: "k"}, json="secret")
        await c.post("/orders", headers={KEY: "k"}, json="another secret")
        await c.post("/orders", json="secret")
        await c.post("/orders", headers={KEY: '"'}, json="secret")
        await c.post("/orders", headers={KEY: "l"}, content=b"secret" * 1_000_000)
    records = [(each.levelno, each.getMessage()) for each in caplog.records if each.name == "fastapi_dedup"]
    assert [level for level, _ in records] == [logging.INFO] * 5
    said = [message for _, message in records]
    assert said[0].startswith("refused logical id 'k' in scope 'POST /orders': duplicate, age 0:00:0")
    assert said[1].startswith("refused logical id 'k' in scope 'POST /orders': mismatch, age ")
    assert "header.Idempotency-Key has none" in said[2]
    assert "header.Idempotency-Key is not a legal logical id" in said[3]
    assert "larger than" in said[4]
    assert "secret" not in caplog.text


async def test_a_store_that_is_down_refuses_and_says_so(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastapi_dedup")
    events: list[Event] = []
    dedup = Dedup("postgresql+asyncpg://nobody@127.0.0.1:1/x", hooks=[events.append])
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)
    ran: list[int] = []

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create() -> None:
        ran.append(1)

    async with client(app) as c:
        caplog.clear()
        answer = await c.post("/orders", headers={KEY: "k"})
    assert (answer.status_code, problem(answer), answer.headers["retry-after"]) == (
        503,
        "store-unavailable",
        "1",
    )
    assert "127.0.0.1" not in answer.text  # what is down is no business of the client's
    assert ran == []
    assert [each.kind for each in events] == [EventKind.UNAVAILABLE]
    (record,) = [each for each in caplog.records if each.name == "fastapi_dedup"]
    assert "'k'" in record.getMessage()
    assert "POST /orders" in record.getMessage()
    assert sqlite.events == []


async def test_a_table_that_is_gone_at_run_time_is_the_servers_fault(world: World) -> None:
    app = app_of(world, Deduplicated())
    async with client(app) as c:
        async with world.engine.begin() as connection:
            await connection.execute(text("drop table dedup_claims"))
        answer = await c.post("/orders", headers={KEY: "k"})
        assert answer.status_code in {500, 503}
    assert await world.orders() == []


async def test_hooks_hear_of_every_event(sqlite: World) -> None:
    app = sqlite.app()
    statuses = iter([500, 200])
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(request: Request, session: RequestSession) -> Response:
        await request.body()
        await add(session, "a")
        running.set()
        await go_on.wait()
        return JSONResponse({}, next(statuses))

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await running.wait()
        await c.post("/orders", headers={KEY: "k"})
        go_on.set()
        await first
        assert sqlite.kinds() == ["claimed", "in_flight", "released"]
        await c.post("/orders", headers={KEY: "k"})
        await c.post("/orders", headers={KEY: "k"})
        (claimed, committed, duplicate) = sqlite.events
        assert (claimed.logical_id, claimed.scope, claimed.age) == ("k", "POST /orders", None)
        assert duplicate.age is not None
        assert timedelta(0) <= duplicate.age < timedelta(seconds=5)
        assert committed.kind is EventKind.COMMITTED
        sqlite.kinds()
        await c.post("/orders", headers={KEY: "k"}, json=1)
        await c.post("/orders")
        await c.post("/orders", headers={KEY: '"'})
        assert sqlite.kinds() == ["mismatch", "missing", "invalid"]


async def test_a_returned_error_in_an_open_app_session_is_heard_as_released(world: World) -> None:
    # The claim is withdrawn from a transaction that the app commits afterwards: that commits no claim.
    get_session = session_of(world)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> Response:
        await add(session, "a")
        return JSONResponse({}, 500)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 500
    assert world.kinds() == ["claimed", "released"]
    assert await world.ids() == []


async def test_a_hook_that_raises_keeps_nobody_from_hearing_or_working(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []

    def broken(_: Event) -> None:
        msg = "boom"
        raise ValueError(msg)

    dedup = Dedup(sqlite.engine, reap_every=None, hooks=[broken, heard.append])
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert [each.kind.value for each in heard] == ["claimed", "committed", "duplicate"]
    assert caplog.text.count("boom") >= 3
