"""The runtime starts after the app and stops before it; where no lifespan comes, a request starts it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request
from sqlalchemy import text
from starlette.types import Receive, Scope, Send
from uvicorn.lifespan.on import LifespanOn

from fastapi_dedup import Dedup, Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, World, add, client, eventually, lifespan, talk
from tests.live import live


def reaping(world: World) -> Dedup:
    """Return a runtime that sweeps many times per second."""
    return Dedup(world.engine, reap_every=timedelta(milliseconds=20))


async def expire(world: World) -> None:
    """Let the window of every claim be over."""
    earlier = {"sqlite": "datetime('now', '-1 hour')"}.get(
        world.engine.dialect.name, "now() - interval '1 hour'"
    )
    async with world.engine.begin() as connection:
        await connection.execute(text(f"update dedup_claims set expires_at = {earlier}"))


def orders(app: FastAPI) -> None:
    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")


async def reaped(world: World) -> None:
    async def gone() -> bool:
        return not await world.ids()

    await eventually(gone)


async def test_the_runtime_starts_after_the_app_and_stops_before_it(sqlite: World) -> None:
    seen: list[bool] = []

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[dict[str, int]]:
        seen.append(sqlite.dedup.started)
        yield {"shared": 7}
        seen.append(sqlite.dedup.started)

    app = FastAPI(lifespan=life)
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    async with lifespan(app):
        assert sqlite.dedup.started
    assert seen == [False, False]
    assert not sqlite.dedup.started


async def test_the_state_of_the_apps_lifespan_is_kept(sqlite: World) -> None:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[dict[str, int]]:
        yield {"shared": 7}

    app = FastAPI(lifespan=life)
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)

    @app.get("/")
    async def read(request: Request) -> int:
        return int(request.state.shared)

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        assert (await c.get("/")).json() == 7


async def test_the_lifespan_starts_the_reaper_and_stops_it_at_once(world: World) -> None:
    # case F13
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=reaping(world))
    orders(app)
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        await expire(world)
        await reaped(world)
        loop = asyncio.get_running_loop()
        before = loop.time()
    assert loop.time() - before < 1
    assert not [each for each in asyncio.all_tasks() if each.get_name() == "fastapi_dedup reaper"]


async def test_under_a_parent_the_middleware_of_a_mounted_app_starts_with_its_first_request(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # case A7
    # fastapi#811: a mounted app's lifespan never comes.
    dedup = reaping(world)
    inner = FastAPI()
    inner.add_middleware(DedupMiddleware, dedup=dedup)
    orders(inner)
    app = FastAPI()
    app.mount("/shop", inner)
    async with client(app) as c:
        assert not dedup.started
        assert (await c.post("/shop/orders", headers={KEY: "k"})).status_code == 200
        assert dedup.started
        assert (await c.post("/shop/orders", headers={KEY: "k"})).status_code == 409
        await expire(world)
        await reaped(world)
        assert (await c.post("/shop/orders", headers={KEY: "k"})).status_code == 200
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.startswith("no lifespan reached DedupMiddleware")
    assert "outermost app" in warning
    await dedup.stop()


async def test_a_policy_in_a_mounted_app_uses_the_runtime_of_its_parent(world: World) -> None:
    # case A7
    inner = FastAPI()
    orders(inner)
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=reaping(world))
    app.mount("/shop", inner)
    async with client(app) as c:
        assert (await c.post("/shop/orders", headers={KEY: "k"})).status_code == 200
        await expire(world)
        await reaped(world)
        assert (await c.post("/shop/orders", headers={KEY: "k"})).status_code == 200
    assert await world.orders() == ["a", "a"]


async def test_an_expired_claim_that_no_reaper_has_met_counts_as_absent(world: World) -> None:
    # case A7
    # case E4
    app = world.app()
    orders(app)
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        await expire(world)
        answers = await asyncio.gather(*[c.post("/orders", headers={KEY: "k"}) for _ in range(5)])
    assert sorted(each.status_code for each in answers) == [200] + [409] * 4
    assert (await world.orders(), await world.ids()) == (["a", "a"], ["k"])


async def test_without_a_lifespan_the_first_request_starts_the_runtime(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = sqlite.app()
    orders(app)
    async with talk(app) as c:
        answers = await asyncio.gather(*[c.post("/orders", headers={KEY: "k"}) for _ in range(5)])
        assert sorted(each.status_code for each in answers) == [200] + [409] * 4
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert sqlite.dedup.started
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each[:46] for each in warnings] == ["no lifespan reached DedupMiddleware, so its re"]


async def test_without_a_lifespan_a_database_that_is_down_refuses_what_claims_and_nothing_else() -> None:
    dedup = Dedup("postgresql+asyncpg://nobody@127.0.0.1:1/nowhere", create_table=True)
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)

    @app.get("/ping")
    @app.post("/orders")
    async def answer() -> None: ...

    async with talk(app) as c:
        assert (await c.get("/ping")).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 503
    await dedup.stop()


async def test_an_app_that_knows_no_lifespan_is_served(sqlite: World) -> None:
    # case B2
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            msg = "no such protocol here"
            raise NotImplementedError(msg)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    wrapped = DedupMiddleware(app, dedup=sqlite.dedup)
    config = uvicorn.Config(wrapped, lifespan="auto", port=0, log_config=None)
    config.load()
    started = LifespanOn(config)
    await started.startup()
    assert not started.should_exit
    async with talk(wrapped) as c:
        assert (await c.post("/", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/", headers={KEY: "k"})).status_code == 409


async def test_a_runtime_may_start_again(sqlite: World) -> None:
    app = sqlite.app()
    orders(app)
    for status in (200, 409):
        async with client(app) as c:
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == status


async def test_four_cold_starts_at_once_are_fine(world: World) -> None:
    # case F13
    async with world.engine.begin() as connection:
        await connection.execute(text("drop table dedup_claims"))

    async def start() -> None:
        app: Any = FastAPI()
        app.add_middleware(DedupMiddleware, dedup=Dedup(world.engine, create_table=True))
        async with lifespan(app):
            pass

    await asyncio.gather(*[start() for _ in range(4)])
    assert await world.ids() == []
