"""`dedup.require`: a policy for every route that a predicate picks."""

from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI

from fastapi_dedup import ConfigurationError, Deduplicated, RequestSession
from fastapi_dedup.policy import Endpoint, Policy
from tests.http.world import KEY, StartUpError, World, add, client, lifespan


def payments(app: FastAPI | APIRouter, path: str = "/payments", *policies: Deduplicated) -> None:
    @app.post(path, dependencies=[Depends(each) for each in policies])
    async def pay(session: RequestSession) -> None:
        await add(session, path)


def is_payment(endpoint: Endpoint) -> bool:
    return endpoint.kind == "http" and endpoint.name.endswith("/payments") and "POST" in endpoint.methods


async def test_a_required_policy_is_kept_by_every_route_that_is_picked(world: World) -> None:
    world.dedup.require(is_payment, Deduplicated(duplicate_status=202))
    app = world.app()
    router = APIRouter(prefix="/v1")
    payments(app)
    payments(app, "/orders")
    payments(router)
    app.include_router(router)
    async with client(app) as c:
        for path in ("/payments", "/v1/payments"):
            assert (await c.post(path)).status_code == 400
            assert (await c.post(path, headers={KEY: "k"})).status_code == 200
            assert (await c.post(path, headers={KEY: "k"})).status_code == 202
        assert (await c.post("/orders")).status_code == 200
        operations = (await c.get("/openapi.json")).json()["paths"]
    shown = {path: operations[path]["post"]["parameters"][0]["required"] for path in operations}
    assert shown == {"/payments": True, "/orders": False, "/v1/payments": True}
    assert await world.scopes() == ["POST /payments", "POST /v1/payments"]


async def test_a_policy_of_the_routes_own_is_kept_instead(sqlite: World) -> None:
    sqlite.dedup.require(is_payment, Deduplicated())
    app = sqlite.app()
    payments(app, "/payments", Deduplicated("query", "n"))
    async with client(app) as c:
        assert (await c.post("/payments?n=1")).status_code == 200
        assert (await c.post("/payments?n=1")).status_code == 409
    assert await sqlite.ids() == ["1"]


async def test_the_first_predicate_that_picks_a_route_counts(sqlite: World) -> None:
    sqlite.dedup.require(is_payment, Deduplicated(scope="first"))
    sqlite.dedup.require(lambda _: True, Deduplicated(scope="second", required=False))
    app = sqlite.app()
    payments(app)
    payments(app, "/orders")
    async with client(app) as c:
        assert (await c.post("/payments", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders")).status_code == 200
    assert await sqlite.scopes() == ["first", "second"]


async def test_a_required_policy_is_there_once_after_routes_are_added(sqlite: World) -> None:
    sqlite.dedup.require(is_payment, Deduplicated())
    app = sqlite.app()
    payments(app)
    async with client(app) as c:
        for n in range(3):
            app.post(f"/late{n}")(lambda: None)
            assert (await c.post("/payments", headers={KEY: f"{n}"})).status_code == 200
            assert (await c.post("/payments", headers={KEY: f"{n}"})).status_code == 409
    assert sqlite.kinds() == ["claimed", "committed", "duplicate"] * 3


async def test_a_required_policy_that_cannot_be_kept_is_refused(sqlite: World) -> None:
    sqlite.dedup.require(is_payment, Deduplicated("path", "nowhere"))
    app = sqlite.app()
    payments(app)
    with pytest.raises(StartUpError, match="POST /payments: member='nowhere'"):
        async with lifespan(app):
            pass


async def test_what_is_required_of_a_route_is_a_policy_of_this_door(sqlite: World) -> None:
    sqlite.dedup.require(is_payment, Policy())
    app = sqlite.app()
    payments(app)
    with pytest.raises(StartUpError, match=r"POST /payments: .* must be a Deduplicated"):
        async with lifespan(app):
            pass


@pytest.mark.parametrize("arguments", [(None, Deduplicated()), (is_payment, None), (is_payment, "header")])
def test_what_is_no_predicate_or_no_policy_is_refused_at_once(sqlite: World, arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match="require"):
        sqlite.dedup.require(*arguments)
