"""A failure never poisons the id: whatever goes wrong in a try, the next one runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated, DuplicateError, RequestSession
from tests.http.world import KEY, OWN, Order, World, add, client, session_of


class Receipt(BaseModel):
    total: int


async def raises(_: AsyncSession) -> None:
    msg = "boom"
    raise ValueError(msg)


async def raises_http_exception(_: AsyncSession) -> None:
    raise HTTPException(409, "the app's own conflict")


async def returns_500(_: AsyncSession) -> Response:
    return JSONResponse({"error": "full"}, 500)


async def returns_404(_: AsyncSession) -> Response:
    return JSONResponse({"error": "no such sku"}, 404)


async def redirects_to_the_same_request_elsewhere(_: AsyncSession) -> Response:
    return RedirectResponse("/elsewhere", 307)


async def breaks_its_response_model(_: AsyncSession) -> dict[str, Any]:
    return {"total": "not a number"}


async def times_out(_: AsyncSession) -> None:
    async with asyncio.timeout(0.01):
        await asyncio.sleep(1)


async def fails_in_the_database(session: AsyncSession) -> None:
    await session.execute(text("select * from nowhere"))


async def rolls_back_and_raises(session: AsyncSession) -> None:
    await session.rollback()
    raise HTTPException(400)


Failure = Callable[[AsyncSession], Any]
FAILURES: dict[Failure, int] = {
    raises: 500,
    raises_http_exception: 409,
    returns_500: 500,
    returns_404: 404,
    redirects_to_the_same_request_elsewhere: 307,
    breaks_its_response_model: 500,
    times_out: 500,
    fails_in_the_database: 500,
    rolls_back_and_raises: 400,
}


def failing_app(world: World, session: Any, fail: Failure, policy: Deduplicated) -> FastAPI:
    """Return an app whose handler works in a session, and fails the first time after its work."""
    app = world.app()
    tries: list[int] = []

    @app.post("/orders", response_model=Receipt, dependencies=[Depends(policy)])
    async def create(order: Order, session: Annotated[AsyncSession, session]) -> Any:
        await add(session, order.sku)
        tries.append(1)
        return await fail(session) if len(tries) == 1 else {"total": 1}

    return app


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
async def test_in_the_requests_own_session_a_failure_frees_the_id(world: World, fail: Failure) -> None:
    # case A3
    # case E2
    app = failing_app(world, OWN, fail, Deduplicated())
    async with client(app) as c:
        first = await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})
        assert first.status_code == FAILURES[fail]
        assert (await world.orders(), await world.ids()) == ([], [])
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])
    assert world.kinds() == ["claimed", "released", "claimed", "committed", "duplicate"]


@pytest.mark.parametrize("scope", ["function", "request"])
async def test_in_the_apps_session_a_failure_frees_the_id(world: World, scope: Any) -> None:
    # case A3
    session = Depends(session_of(world), scope=scope)
    for fail, status in FAILURES.items():
        app = failing_app(world, session, fail, Deduplicated(session=session, scope=fail.__name__))
        before = len(await world.orders())
        async with client(app) as c:
            first = await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})
            assert first.status_code == status
            assert fail.__name__ not in await world.scopes()
            # A returned error is a success to the app's session, and what it commits is the app's decision.
            returned = fail in {returns_500, returns_404, redirects_to_the_same_request_elsewhere}
            assert len(await world.orders()) == before + returned, fail.__name__
            assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
            assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
        assert len(await world.orders()) == before + returned + 1
    assert await world.scopes() == sorted(fail.__name__ for fail in FAILURES)


@pytest.mark.parametrize("scope", ["function", "request"])
async def test_a_session_that_commits_although_the_handler_failed_frees_the_id(
    world: World, scope: Any
) -> None:
    # case A3
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            try:
                yield session
            except HTTPException:
                await session.commit()
                raise
            await session.commit()

    session = Depends(get_session, scope=scope)
    app = failing_app(world, session, raises_http_exception, Deduplicated(session=session))
    async with client(app) as c:
        answers = [await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"}) for _ in range(3)]
    assert [each.status_code for each in answers] == [409, 200, 409]
    assert answers[0].json() == {"detail": "the app's own conflict"}
    assert await world.orders() == ["a", "a"]


@pytest.mark.parametrize("session", ["own", "function", "request"])
async def test_a_body_that_does_not_validate_frees_the_id(world: World, session: Any) -> None:
    # case A1
    app = world.app()
    depends: Any = OWN
    policy = Deduplicated()
    if session != "own":
        depends = Depends(session_of(world), scope=session)
        policy = Deduplicated(session=depends)

    @app.post("/orders", dependencies=[Depends(policy)])
    async def create(order: Order, session: Annotated[AsyncSession, depends]) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        bad = [
            await c.post("/orders", json={"no": "sku"}, headers={KEY: "k"}),
            await c.post(
                "/orders", content=b"{no json", headers={KEY: "k", "content-type": "application/json"}
            ),
            await c.post("/orders", headers={KEY: "k"}),
        ]
        assert [each.status_code for each in bad] == [422] * 3
        assert all("detail" in each.json() for each in bad)  # FastAPI's answer, not ours
        assert await world.ids() == []
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
    assert await world.orders() == ["a"]


async def test_a_session_that_commits_for_a_request_that_never_ran_frees_the_id(world: World) -> None:
    # case A1
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            try:
                yield session
            finally:
                await session.commit()

    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(order: Order, session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        assert (await c.post("/orders", json={}, headers={KEY: "k"})).status_code == 422
        assert await world.ids() == []
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200


@pytest.mark.parametrize("own", [True, False], ids=["own session", "app session"])
async def test_a_handler_that_commits_mid_way_and_then_fails_frees_the_id(world: World, *, own: bool) -> None:
    get_session = session_of(world)
    depends: Any = OWN if own else Depends(get_session)
    app = world.app()
    tries: list[int] = []

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=None if own else get_session))])
    async def create(order: Order, session: Annotated[AsyncSession, depends]) -> None:
        await add(session, order.sku)
        await session.commit()
        tries.append(1)
        if len(tries) == 1:
            msg = "boom"
            raise ValueError(msg)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 500
        assert await world.ids() == []
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert await world.orders() == ["a", "a"]
    assert world.kinds() == ["claimed", "committed", "released", "claimed", "committed", "duplicate"]


@pytest.mark.parametrize("returned", [False, True], ids=["raised", "returned"])
async def test_a_release_that_fails_never_masks_what_went_wrong(
    sqlite: World, caplog: pytest.LogCaptureFixture, *, returned: bool
) -> None:
    # case E2
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> Response:
        await add(session, "a")
        await session.commit()
        async with sqlite.engine.begin() as other:
            await other.execute(text("drop table dedup_claims"))
        if returned:
            return JSONResponse({"mine": True}, 418)
        raise HTTPException(418, "mine")

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
    assert answer.status_code == 418
    assert "mine" in answer.text
    said = {each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING}
    assert len(said) == 1
    assert "could not give back logical id 'k' in scope 'POST /orders'" in said.pop()


async def test_an_unhandled_exception_reaches_the_server_unchanged(sqlite: World) -> None:
    app = sqlite.app()
    error = ValueError("boom")

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        raise error

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: object) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "headers": [(b"idempotency-key", b"k")],
        "query_string": b"",
    }
    async with client(app):
        with pytest.raises(ValueError, match="boom") as raised:
            await app(scope, receive, send)
    assert raised.value is error


async def test_a_policy_may_count_client_errors_as_done(world: World) -> None:
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(failed=lambda status: status >= 500))])
    async def create(order: Order, session: RequestSession) -> Response:
        await add(session, order.sku)
        return JSONResponse({}, {"full": 503, "odd": 404}.get(order.sku, 200))

    async with client(app) as c:
        for sku, expected in {"odd": [404, 409], "full": [503, 503], "fine": [200, 409]}.items():
            for status in expected:
                assert (await c.post("/orders", json={"sku": sku}, headers={KEY: sku})).status_code == status
    assert await world.orders() == ["odd", "fine"]


async def test_what_one_of_two_policies_takes_for_a_failure_frees_both_ids(world: World) -> None:
    app = world.app()
    tolerant, strict = Deduplicated(failed=lambda _: False), Deduplicated("path", "sku")

    @app.post("/orders/{sku}", status_code=404, dependencies=[Depends(tolerant), Depends(strict)])
    async def create(sku: str, session: RequestSession) -> None:
        await add(session, sku)

    async with client(app) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 404
    assert (await world.orders(), await world.ids()) == ([], [])


async def test_an_exception_is_a_failure_whatever_its_status(world: World) -> None:
    # DESIGN.md §4.3: `failed` judges *returned* statuses; an HTTPException always means that the try failed.
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(failed=lambda status: status >= 500))])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)
        raise HTTPException(404)

    async with client(app) as c:
        for _ in range(2):
            assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 404
    assert (await world.orders(), await world.ids()) == ([], [])


async def test_a_see_other_after_a_form_post_is_a_success(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> Response:
        await add(session, "a")
        return RedirectResponse("/orders/1", 303)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 303
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert await sqlite.orders() == ["a"]


@pytest.mark.parametrize("header", [None, KEY])
async def test_a_see_other_that_is_raised_is_a_failure_with_an_id_and_without(
    sqlite: World, header: str | None
) -> None:
    app = sqlite.app(header=header)

    @app.post("/orders")
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        raise HTTPException(303)

    async with client(app) as c:
        assert (await c.post("/orders")).status_code == 303
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 303
    assert (await sqlite.orders(), await sqlite.ids()) == ([], [])


async def test_a_refused_twin_never_frees_the_owners_id(world: World) -> None:
    # case E1
    app = world.app()
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)
        running.set()
        await go_on.wait()

    async with client(app) as c:
        owner = asyncio.create_task(c.post("/orders", json={"sku": "a"}, headers={KEY: "k"}))
        await running.wait()
        for _ in range(2):
            assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
            assert (await c.post("/orders", json={"sku": "b"}, headers={KEY: "k"})).status_code == 422
        go_on.set()
        assert (await owner).status_code == 200
        for _ in range(2):
            assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
            assert (await c.post("/orders", json={"sku": "b"}, headers={KEY: "k"})).status_code == 422
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_refusal_that_the_app_answers_with_a_success_burns_no_other_id(world: World) -> None:
    # The request claimed its header's id, then met a duplicate sku: its handler never ran.
    app = world.app()

    @app.exception_handler(DuplicateError)
    async def already_done(_: object, __: Exception) -> Response:
        return JSONResponse({"again": True}, 200)

    policies = [Depends(Deduplicated()), Depends(Deduplicated(source="body", member="sku"))]

    @app.post("/orders", dependencies=policies, status_code=201)
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "1"})).status_code == 201
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "2"})).status_code == 200
        assert await world.ids() == ["1", "a"]
        assert (await c.post("/orders", json={"sku": "b"}, headers={KEY: "2"})).status_code == 201
    assert await world.orders() == ["a", "b"]
