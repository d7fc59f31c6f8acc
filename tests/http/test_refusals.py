"""How a refusal is told: to the client, to the log, to the hooks."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from fastapi_dedup import (
    ClaimInFlightError,
    DedupError,
    Deduplicated,
    DuplicateError,
    RequestSession,
)
from tests.http.world import KEY, World, add, client, problem
from tests.live import live

PAGE = "https://fastapi-dedup.readthedocs.io/en/stable/reference/problems/"


def app_of(world: World, *policies: Deduplicated) -> FastAPI:
    app = world.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(each) for each in policies])
    async def create(request: Request, session: RequestSession) -> None:
        await request.body()
        await add(session, "a")

    return app


async def test_a_duplicate_is_told_as_problem_details(world: World) -> None:
    async with live(app_of(world, Deduplicated())) as url, httpx.AsyncClient(base_url=url) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
        again = await c.post("/orders", headers={KEY: "k"})
    assert again.status_code == 409
    assert again.headers["content-type"] == "application/problem+json"
    assert "retry-after" not in again.headers
    said = again.json()
    claimed_at = datetime.fromisoformat(said.pop("claimed_at"))
    assert claimed_at.tzinfo is not None
    assert abs(claimed_at - datetime.now(UTC)) < timedelta(seconds=10)
    assert said == {
        "type": f"{PAGE}#duplicate",
        "title": "The work is already done",
        "status": 409,
        "detail": "the work of logical id 'k' in scope 'POST /orders' is already done",
        "logical_id": "k",
    }


async def test_every_kind_of_refusal_has_its_own_type(sqlite: World) -> None:
    async with client(app_of(sqlite, Deduplicated())) as c:
        first = await c.post("/orders", headers={KEY: "k"}, json=1)
        assert first.status_code == 201
        refusals = {
            "missing-logical-id": await c.post("/orders"),
            "invalid-logical-id": await c.post("/orders", headers={KEY: '"'}),
            "fingerprint-mismatch": await c.post("/orders", headers={KEY: "k"}, json=2),
            "payload-too-large": await c.post("/orders", headers={KEY: "new"}, content=b"x" * 1_048_577),
        }
    assert {kind: problem(answer) for kind, answer in refusals.items()} == {kind: kind for kind in refusals}
    assert {kind: answer.status_code for kind, answer in refusals.items()} == {
        "missing-logical-id": 400,
        "invalid-logical-id": 400,
        "fingerprint-mismatch": 422,
        "payload-too-large": 413,
    }
    for answer in refusals.values():
        assert answer.json()["type"].startswith(PAGE)
        assert {"type", "title", "status", "detail"} <= set(answer.json())
        assert "retry-after" not in answer.headers


async def test_in_flight_is_told_at_once_and_never_as_done(world: World) -> None:
    # case F1
    app = world.app()
    running, go_on = asyncio.Event(), asyncio.Event()
    fail: list[bool] = [True]

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> Response:
        await add(session, "a")
        running.set()
        await go_on.wait()
        return JSONResponse({}, 500 if fail.pop() else 200)

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await running.wait()
        twin = await c.post("/orders", headers={KEY: "k"})
        assert (twin.status_code, problem(twin)) == (409, "in-flight")
        assert int(twin.headers["retry-after"]) > 0
        assert "still in flight" in twin.json()["detail"]
        go_on.set()
        assert (await first).status_code == 500
        # The first has failed, so what was "not yet" runs now.
        fail.append(False)
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert await world.orders() == ["a"]


@pytest.mark.parametrize("first_fails", [False, True])
async def test_a_twin_may_wait_for_the_outcome(world: World, *, first_fails: bool) -> None:
    # case F1
    app = world.app()
    running, go_on = asyncio.Event(), asyncio.Event()
    runs: list[int] = []

    @app.post("/orders", dependencies=[Depends(Deduplicated(in_flight="wait"))])
    async def create(session: RequestSession) -> Response:
        await add(session, "a")
        runs.append(1)
        running.set()
        await go_on.wait()
        return JSONResponse({}, 500 if first_fails and len(runs) == 1 else 200)

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await running.wait()
        twin = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await asyncio.sleep(0.1)
        assert not twin.done()
        go_on.set()
        answers = [(await first).status_code, (await twin).status_code]
    assert answers == ([500, 200] if first_fails else [200, 409])
    assert await world.orders() == ["a"]


async def test_a_twin_waits_no_longer_than_it_may(sqlite: World) -> None:
    app = sqlite.app()
    running, go_on = asyncio.Event(), asyncio.Event()
    policy = Deduplicated(in_flight="wait", wait_timeout=timedelta(milliseconds=50))

    @app.post("/orders", dependencies=[Depends(policy)])
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        running.set()
        await go_on.wait()

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await running.wait()
        twin = await c.post("/orders", headers={KEY: "k"})
        assert (twin.status_code, problem(twin)) == (409, "in-flight")
        go_on.set()
        await first


async def test_a_duplicate_may_have_any_status(sqlite: World) -> None:
    app = sqlite.app(header=None)
    statuses = [200, 201, 202, 204, 205, 208, 303, 304, 400, 409, 410, 422, 500, 599]
    for status in statuses:

        @app.post(f"/{status}", dependencies=[Depends(Deduplicated(duplicate_status=status))])
        async def create(request: Request, session: RequestSession) -> None:
            await request.body()
            await add(session, request.url.path)

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        for status in statuses:
            assert (await c.post(f"/{status}", headers={KEY: "k"})).status_code == 200
            for _ in range(2):  # the connection stays usable
                again = await c.post(f"/{status}", headers={KEY: "k"})
                assert again.status_code == status
                if status in {204, 205, 304}:
                    assert again.content == b""
                elif status < 400:
                    assert again.headers["content-type"] == "application/json"
                    assert again.json().keys() == {"duplicate", "logical_id", "claimed_at"}
                    assert (again.json()["duplicate"], again.json()["logical_id"]) == (True, "k")
                else:
                    assert problem(again) == "duplicate"
            # The status is for duplicates only: missing, malformed and mismatching ids keep theirs.
            assert (await c.post(f"/{status}")).status_code == 400
            assert (await c.post(f"/{status}", headers={KEY: '"'})).status_code == 400
            assert (await c.post(f"/{status}", headers={KEY: "k"}, json=1)).status_code == 422
    assert await sqlite.orders() == [f"/{status}" for status in statuses]


async def test_in_flight_keeps_its_status_whatever_a_duplicates_is(sqlite: World) -> None:
    app = sqlite.app()
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated(duplicate_status=200))])
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        running.set()
        await go_on.wait()

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", headers={KEY: "k"}))
        await running.wait()
        twin = await c.post("/orders", headers={KEY: "k"})
        assert (twin.status_code, problem(twin)) == (409, "in-flight")
        go_on.set()
        await first


async def test_an_exception_handler_of_the_apps_own_answers_instead(world: World) -> None:
    app = app_of(world, Deduplicated())

    @app.exception_handler(DuplicateError)
    async def mine(_: Request, error: Exception) -> Response:
        assert isinstance(error, DuplicateError)
        assert error.age is not None
        assert error.claimed_at is not None
        assert error.expires_at is not None
        return JSONResponse({"mine": [error.logical_id, error.scope]}, 418)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
        again = await c.post("/orders", headers={KEY: "k"})
        assert (again.status_code, again.json()) == (418, {"mine": ["k", "POST /orders"]})
        assert problem(await c.post("/orders")) == "missing-logical-id"
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_one_exception_handler_may_answer_all_refusals(sqlite: World) -> None:
    app = app_of(sqlite, Deduplicated())
    met: list[type[Exception]] = []

    @app.exception_handler(DedupError)
    async def mine(_: Request, error: Exception) -> Response:
        met.append(type(error))
        return JSONResponse({}, 418)

    async with client(app) as c:
        await c.post("/orders", headers={KEY: "k"})
        for headers in ({KEY: "k"}, {KEY: '"'}, {}):
            assert (await c.post("/orders", headers=headers)).status_code == 418
    assert [each.__name__ for each in met] == [
        "DuplicateError",
        "InvalidLogicalIdError",
        "MissingLogicalIdError",
    ]


async def test_an_answer_of_the_apps_own_is_kept_whatever_its_status(sqlite: World) -> None:
    app = app_of(sqlite, Deduplicated())

    @app.exception_handler(DuplicateError)
    async def mine(_: Request, __: Exception) -> Response:
        return JSONResponse({"mine": True}, 500)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
        again = await c.post("/orders", headers={KEY: "k"})
        assert (again.status_code, again.json()) == (500, {"mine": True})


async def test_a_dedup_error_of_the_handlers_own_is_told_like_ours(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders")
    async def create() -> None:
        raise ClaimInFlightError("x", "y")

    async with client(app) as c:
        answer = await c.post("/orders")
        assert (answer.status_code, problem(answer)) == (409, "in-flight")


async def test_an_id_is_echoed_whatever_it_holds(sqlite: World) -> None:
    # case C5
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(body: dict[str, Any]) -> None:
        assert body

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        for sku in ("é", "🦊", '"><script>', "日本", "\u202e"):
            assert (await c.post("/orders", json={"sku": sku})).status_code == 200
            again = await c.post("/orders", json={"sku": sku})
            assert (again.status_code, again.json()["logical_id"]) == (409, sku)
            assert json.loads(again.content)["logical_id"] == sku
