"""Background tasks: they run once, see what was committed, and cannot undo it."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, OWN, Order, World, add, client, session_of


def app_with_a_task(world: World, scope: Any, task: Any) -> FastAPI:
    """Return an app that works in a session of its own, or in RequestSession where the scope is None."""
    session = OWN if scope is None else Depends(session_of(world), scope=scope)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=None if scope is None else session))])
    async def create(order: Order, tasks: BackgroundTasks, session: Annotated[AsyncSession, session]) -> None:
        await add(session, order.sku)
        tasks.add_task(task)

    return app


@pytest.mark.parametrize("scope", [None, "function"], ids=["RequestSession", "function-scoped"])
async def test_a_background_task_sees_the_committed_row_and_claim(world: World, scope: Any) -> None:
    # case A5
    seen = []

    async def task() -> None:
        seen.append((await world.orders(), await world.ids()))

    async with client(app_with_a_task(world, scope, task)) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert seen == [(["a"], ["k"])]


async def test_under_a_base_http_middleware_a_background_task_sees_them_too(world: World) -> None:
    # case A5
    # There the task runs beside the response, not after it.
    seen = []

    async def task() -> None:
        seen.append((await world.orders(), await world.ids()))

    app = FastAPI()

    @app.middleware("http")
    async def through(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        return await call_next(request)

    app.add_middleware(DedupMiddleware, dedup=world.dedup)

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(order: Order, tasks: BackgroundTasks, session: RequestSession) -> None:
        await add(session, order.sku)
        tasks.add_task(task)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert seen == [(["a"], ["k"])]


@pytest.mark.parametrize("scope", [None, "function"], ids=["RequestSession", "function-scoped"])
async def test_a_background_task_that_fails_does_not_free_an_id_whose_work_is_committed(
    world: World, scope: Any
) -> None:
    async def task() -> None:
        msg = "boom"
        raise ValueError(msg)

    async with client(app_with_a_task(world, scope, task)) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_background_task_before_the_commit_of_a_request_scoped_session_decides_with_it(
    world: World,
) -> None:
    # FastAPI ends a request-scoped session after the tasks: what fails there rolls back work and claim alike.
    tries: list[int] = []

    async def task() -> None:
        tries.append(1)
        if len(tries) == 1:
            msg = "boom"
            raise ValueError(msg)

    async with client(app_with_a_task(world, "request", task)) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 500
        assert (await world.orders(), await world.ids()) == ([], [])
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])
