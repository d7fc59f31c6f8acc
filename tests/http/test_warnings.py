"""What works but cannot keep the promise is said once per route, with the fixes."""

import logging
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, BackgroundTasks, Depends, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from starlette.types import Receive, Scope, Send

from fastapi_dedup import Claim, Deduplicated, RequestSession
from tests.http.world import KEY, World, add, client, session_of


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Yield what is warned of, as it comes."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    handler = Handler()
    logging.getLogger("fastapi_dedup").addHandler(handler)
    yield said
    logging.getLogger("fastapi_dedup").removeHandler(handler)
    assert caplog is not None


async def test_a_claim_in_a_transaction_that_its_handler_never_used_is_told_once_per_route(
    sqlite: World, warnings: list[str]
) -> None:
    app = sqlite.app()

    app.post("/first/{n}", dependencies=[Depends(Deduplicated())])(lambda: None)
    app.post("/second", dependencies=[Depends(Deduplicated())])(lambda: None)

    @app.post("/used", dependencies=[Depends(Deduplicated())])
    async def used(session: RequestSession) -> None:
        await add(session, "a")

    async with client(app) as c:
        for key in ("k", "l", "m"):
            for path in ("/first/1", "/first/2", "/second", "/used"):
                assert (await c.post(path, headers={KEY: key})).status_code == 200
    assert [each.split(" has ")[0] for each in warnings] == ["POST /first/{n}", "POST /second"]
    for warning in warnings:
        assert "a claim in a transaction that its handler never used" in warning
        assert "RequestSession" in warning
        assert "Deduplicated(session=...)" in warning


async def test_a_handler_that_cannot_work_beside_its_claim_is_told_why(
    sqlite: World, warnings: list[str]
) -> None:
    # SQLite has one writer: the claim's transaction, while the handler waits for it in a session of its own.
    # What the log shows without a hint is "database is locked", for ever.
    engine = create_async_engine(sqlite.engine.url, connect_args={"timeout": 0.1})
    app = sqlite.app()

    @app.post("/orders")
    async def create() -> None:
        async with AsyncSession(engine) as session, session.begin():
            await add(session, "elsewhere")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 500
    await engine.dispose()
    assert await sqlite.ids() == []
    assert len(warnings) == 1
    assert warnings[0].startswith("POST /orders has a claim in a transaction that its handler never used")


async def test_what_is_written_after_the_commit_is_lost_but_not_silently(
    sqlite: World, warnings: list[str]
) -> None:
    # The request's session commits when its response starts: a stream or a background task comes too late.
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession, tasks: BackgroundTasks) -> None:
        await add(session, "in time")
        tasks.add_task(add, session, "too late")

    async with client(app) as c:
        for key in ("k", "l"):
            assert (await c.post("/orders", headers={KEY: key})).status_code == 200
    orders = await sqlite.orders()
    assert orders == ["in time", "too late"] * 2 or (len(warnings), orders) == (1, ["in time"] * 2)


async def test_the_claims_own_session_counts_as_used(sqlite: World, warnings: list[str]) -> None:
    app = sqlite.app()

    @app.post("/orders")
    async def create(claim: Annotated[Claim, Depends(Deduplicated())]) -> None:
        await add(claim.session, "a")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert warnings == []


async def test_a_route_without_an_id_or_with_a_refusal_or_a_failure_warns_of_nothing(
    sqlite: World, warnings: list[str]
) -> None:
    app = sqlite.app()

    @app.post("/orders/{status}", dependencies=[Depends(Deduplicated(required=False))])
    async def create(status: int) -> Any:
        raise HTTPException(status)

    async with client(app) as c:
        assert (await c.post("/orders/400")).status_code == 400
        assert (await c.post("/orders/400", headers={KEY: "k"})).status_code == 400
        assert (await c.post("/orders/400", headers={KEY: '"'})).status_code == 400
    assert warnings == []


async def test_routes_of_included_routers_are_named_whole_and_told_apart(
    sqlite: World, warnings: list[str]
) -> None:
    app = sqlite.app()
    for prefix in ("/a", "/b"):
        router = APIRouter(prefix=prefix)
        router.post("/orders/{n}", dependencies=[Depends(Deduplicated())])(lambda: None)
        app.include_router(router, prefix="/v1")
    async with client(app) as c:
        for prefix in ("/a", "/b"):
            assert (await c.post(f"/v1{prefix}/orders/1", headers={KEY: "k"})).status_code == 200
            assert (await c.post(f"/v1{prefix}/orders/2", headers={KEY: "k"})).status_code == 200
    assert [each.split(" has ")[0] for each in warnings] == ["POST /v1/a/orders/{n}", "POST /v1/b/orders/{n}"]


@pytest.mark.parametrize("door", ["path parameter", "raw app"])
async def test_a_route_of_many_paths_is_one_route(sqlite: World, warnings: list[str], door: str) -> None:
    # Else the log and the memory of what was said would grow with the paths that clients think of.
    app = sqlite.app()

    async def raw(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app.post("/numbers/{n:int}/{m:int}")(lambda: None)
    app.post("/files/{name:path}")(lambda: None)
    app.mount("/raw", raw)
    paths = ["/raw/a", "/raw/b/c", "/raw/d"]
    if door == "path parameter":
        paths = ["/files/a", "/files/b/c", "/files/files", "/numbers/007/1", "/numbers/1/1", "/numbers/1/2"]
    async with client(app) as c:
        for path in paths:
            assert (await c.post(path, headers={KEY: "k"})).status_code == 200
    expected = {"path parameter": ["POST /files/{name", "POST /numbers/{n"], "raw app": ["POST /raw"]}[door]
    assert len(warnings) == len(expected)
    for warning, start in zip(sorted(warnings), expected, strict=True):
        assert warning.startswith(start)


async def test_a_session_of_the_app_that_its_handler_never_uses_is_told_at_start_up_once(
    sqlite: World, warnings: list[str]
) -> None:
    get_session = session_of(sqlite)
    app = sqlite.app()
    router = APIRouter()
    app.include_router(router)

    @app.post("/unused", dependencies=[Depends(Deduplicated(session=get_session))])
    async def unused() -> None:
        pass

    async def service(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "a")

    @app.post("/used", dependencies=[Depends(Deduplicated(session=get_session)), Depends(service)])
    async def used() -> None:
        pass

    async with client(app) as c:
        assert len(warnings) == 1
        assert warnings[0].startswith("POST /unused has a claim in a session of get_session")
        assert "Let the handler depend on get_session, or take the claim's own session" in warnings[0]
        # Routes that come later are inspected too, and what was said is not said again.
        for app_or_router in (app, router):
            app_or_router.post(f"/late/{id(app_or_router)}")(lambda: None)
            assert (await c.post("/unused", headers={KEY: f"{id(app_or_router)}"})).status_code == 200
    assert len(warnings) == 1


async def test_taking_the_claims_own_session_is_no_reason_to_warn(sqlite: World, warnings: list[str]) -> None:
    get_session = session_of(sqlite)
    app = sqlite.app()

    @app.post("/orders")
    async def create(claim: Annotated[Claim, Depends(Deduplicated(session=get_session))]) -> None:
        await add(claim.session, "a")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert warnings == []
    assert await sqlite.orders() == ["a"]


async def test_a_session_that_nobody_commits_or_closes_is_told_of(sqlite: World, warnings: list[str]) -> None:
    opened: list[AsyncSession] = []

    async def get_session() -> AsyncSession:
        opened.append(sqlite.sessions())
        return opened[-1]

    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "a")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert len(warnings) == 1
    assert "the session of its claim is neither committed nor closed" in warnings[0]
    for session in opened:
        await session.close()
    assert (await sqlite.orders(), await sqlite.ids()) == ([], [])
