"""One request, one claim per id: the policy that is nearest to the handler wins."""

from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI

from fastapi_dedup import Claim, Deduplicated, RequestSession
from fastapi_dedup.http.bound import policies_of
from fastapi_dedup.http.checks import is_claim
from tests.http.world import KEY, World, add, client


def route(app: FastAPI | APIRouter, *policies: Deduplicated) -> None:
    @app.post("/orders", status_code=201, dependencies=[Depends(each) for each in policies])
    async def create(session: RequestSession) -> None:
        await add(session, "a")


async def test_a_routes_policy_wins_over_the_middlewares_options_included(world: World) -> None:
    app = world.app()
    route(app, Deduplicated(scope="orders", duplicate_status=202, fingerprint=False))
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"}, json=1)).status_code == 201
        assert (await c.post("/orders", headers={KEY: "k"}, json=2)).status_code == 202
        assert (await c.post("/orders")).status_code == 400
    assert await world.scopes() == ["orders"]
    assert world.kinds() == ["claimed", "committed", "duplicate", "missing"]


@pytest.mark.parametrize("name", ["idempotency-key", "IDEMPOTENCY-KEY"])
async def test_a_header_is_the_same_however_it_is_spelled(sqlite: World, name: str) -> None:
    app = sqlite.app()
    route(app, Deduplicated(member=name, scope="orders"))
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
    assert await sqlite.scopes() == ["orders"]


async def test_a_routes_policy_that_is_optional_stays_optional(sqlite: World) -> None:
    app = sqlite.app()
    route(app, Deduplicated(required=False, scope="orders"))
    async with client(app) as c:
        assert (await c.post("/orders")).status_code == 201
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert await sqlite.scopes() == ["orders"]


async def test_a_policy_on_another_header_or_field_leaves_the_middlewares_own(world: World) -> None:
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(body: dict[str, Any], session: RequestSession) -> None:
        await add(session, body["sku"])

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 409
        assert (await c.post("/orders", json={"sku": "b"}, headers={KEY: "k"})).status_code == 422
        assert (await c.post("/orders", json={"sku": "b"})).status_code == 200
    assert await world.ids() == ["a", "b", "k"]


async def test_the_middlewares_own_costs_such_a_route_no_dependency(sqlite: World) -> None:
    app = sqlite.app()
    route(app, Deduplicated("query", "sku"), Deduplicated("query", "sku", scope="skus"))
    async with client(app) as c:
        for _ in range(2):  # inspecting the routes again changes nothing
            app.post(f"/more/{len(app.routes)}")(lambda: None)
            await c.post("/orders")
    (served,) = [each for each in app.routes if getattr(each, "path", None) == "/orders"]
    claims = [each.call for each in served.dependant.dependencies if is_claim(each)]  # type: ignore[attr-defined]
    assert [len(policies_of(call)) for call in claims] == [2, 1]


async def test_a_policy_that_is_also_a_dependencys_leaves_the_middlewares_own_alone(sqlite: World) -> None:
    policy = Deduplicated("query", "sku", scope="skus")

    async def sku(claim: Annotated[Claim, Depends(policy)]) -> str:
        return claim.logical_id

    app = sqlite.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(policy)])
    async def create(session: RequestSession, name: Annotated[str, Depends(sku)]) -> None:
        await add(session, name)

    async with client(app) as c:
        assert (await c.post("/orders?sku=a", headers={KEY: "k"})).status_code == 201
        assert (await c.post("/orders?sku=b", headers={KEY: "k"})).status_code == 422
        assert (await c.post("/orders?sku=a")).status_code == 409
    assert await sqlite.ids() == ["a", "k"]


async def test_a_routes_policy_wins_over_its_routers_on_the_same_header(world: World) -> None:
    app = world.app()
    router = APIRouter(dependencies=[Depends(Deduplicated(scope="router"))])
    route(router, Deduplicated(scope="route", duplicate_status=200))
    app.include_router(router, dependencies=[Depends(Deduplicated(scope="include"))])
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert await world.scopes() == ["route"]


async def test_a_routers_policy_wins_over_the_middlewares(sqlite: World) -> None:
    app = sqlite.app()
    router = APIRouter(dependencies=[Depends(Deduplicated(scope="router"))])
    route(router)
    app.include_router(router)
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 201
    assert await sqlite.scopes() == ["router"]


async def test_a_parameters_policy_wins_too(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(scope="route"))])
    async def create(claim: Annotated[Claim, Depends(Deduplicated(scope="parameter"))]) -> str:
        return claim.scope

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).json() == "parameter"
    assert await sqlite.scopes() == ["parameter"]


async def test_a_policy_deep_in_the_tree_of_dependencies_wins_over_the_middlewares(sqlite: World) -> None:
    app = sqlite.app()

    async def service(claim: Annotated[Claim, Depends(Deduplicated(scope="orders"))]) -> str:
        return claim.logical_id

    @app.post("/orders")
    async def create(found: Annotated[str, Depends(service)], session: RequestSession) -> str:
        await add(session, found)
        return found

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).json() == "k"
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert await sqlite.scopes() == ["orders"]


@pytest.mark.parametrize("of", ["the middleware", "the router"])
async def test_a_policy_for_other_methods_leaves_the_one_around_it(sqlite: World, of: str) -> None:
    # A route of two methods: its own policy speaks for one of them, the one around it for the other.
    app = sqlite.app() if of == "the middleware" else sqlite.app(header=None)
    router = APIRouter(dependencies=[Depends(Deduplicated())] if of == "the router" else [])
    policy = Deduplicated(scope="orders", methods=["PATCH"])

    @router.api_route("/orders", methods=["POST", "PATCH"], dependencies=[Depends(policy)])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    app.include_router(router)
    async with client(app) as c:
        for method in ("POST", "PATCH"):
            assert (await c.request(method, "/orders", headers={KEY: "k"})).status_code == 200
            assert (await c.request(method, "/orders", headers={KEY: "k"})).status_code == 409
    assert await sqlite.scopes() == ["POST /orders", "orders"]
    assert await sqlite.orders() == ["a", "a"]
