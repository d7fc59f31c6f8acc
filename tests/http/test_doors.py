"""The FastAPI door: a policy on a route, a router, the app, and as a parameter."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, WebSocket

from fastapi_dedup import Claim, Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, Order, World, add, client, problem

BY_SKU = Deduplicated(source="body", member="sku")


def order_app(world: World, where: str) -> FastAPI:
    """Return an app whose one route has the policy on itself, its router, its inclusion, or the app."""
    policy = [Depends(BY_SKU)]
    app = FastAPI(dependencies=policy if where == "app" else None)
    app.add_middleware(DedupMiddleware, dedup=world.dedup)
    router = APIRouter(prefix="/shop", dependencies=policy if where == "router" else None)

    @router.post("/orders", status_code=201, dependencies=policy if where == "route" else None)
    async def create(order: Order, session: RequestSession) -> Order:
        await add(session, order.sku)
        return order

    app.include_router(router, dependencies=policy if where == "include" else None)
    return app


@pytest.mark.parametrize("where", ["route", "router", "include", "app"])
async def test_an_order_that_is_sent_twice_commits_once(world: World, where: str) -> None:
    async with client(order_app(world, where)) as c:
        first = await c.post("/shop/orders", json={"sku": "a"})
        again = await c.post("/shop/orders", json={"sku": "a"})
        other = await c.post("/shop/orders", json={"sku": "b"})
    assert (first.status_code, again.status_code, other.status_code) == (201, 409, 201)
    assert first.json() == {"sku": "a", "note": None}
    assert problem(again) == "duplicate"
    assert await world.orders() == ["a", "b"]
    assert await world.ids() == ["a", "b"]
    assert await world.scopes() == ["POST /shop/orders"] * 2


async def test_a_parameter_gives_the_handler_its_claim(world: World) -> None:
    app = world.app()
    claims: list[Claim] = []

    @app.post("/orders", status_code=201)
    async def create(order: Order, claim: Annotated[Claim, Depends(BY_SKU)]) -> None:
        claims.append(claim)
        await add(claim.session, order.sku)

    before = datetime.now(UTC) - timedelta(seconds=5)
    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 201
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 409
    (claim,) = claims
    assert (claim.logical_id, claim.scope) == ("a", "POST /orders")
    assert before < claim.claimed_at < datetime.now(UTC) + timedelta(seconds=5)
    assert claim.expires_at - claim.claimed_at == timedelta(hours=24)
    assert await world.orders() == ["a"]


async def test_a_parameter_is_none_where_an_optional_id_is_missing(sqlite: World) -> None:
    app = sqlite.app()
    claims: list[Claim | None] = []

    @app.post("/orders")
    async def create(claim: Annotated[Claim | None, Depends(Deduplicated(required=False))]) -> None:
        claims.append(claim)

    async with client(app) as c:
        assert (await c.post("/orders")).status_code == 200
    assert claims == [None]


async def test_a_window_of_the_policy_is_the_claims(sqlite: World) -> None:
    app = sqlite.app()
    policy = Deduplicated(window=timedelta(minutes=5))

    @app.post("/orders")
    async def create(claim: Annotated[Claim, Depends(policy)]) -> float:
        return (claim.expires_at - claim.claimed_at).total_seconds()

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).json() == 300


async def test_the_same_policy_on_router_and_route_is_one_claim(world: World) -> None:
    app = world.app()
    router = APIRouter(dependencies=[Depends(BY_SKU)])

    @router.post("/orders", status_code=201, dependencies=[Depends(BY_SKU)])
    async def create(order: Order, claim: Annotated[Claim, Depends(BY_SKU)]) -> str:
        await add(claim.session, order.sku)
        return claim.logical_id

    app.include_router(router, dependencies=[Depends(Deduplicated(source="body", member="sku"))])
    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"})).json() == "a"
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 409
    assert await world.ids() == ["a"]
    assert world.kinds() == ["claimed", "committed", "duplicate"]


async def test_two_policies_of_different_ids_are_two_claims_of_one_request(world: World) -> None:
    app = world.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(BY_SKU), Depends(Deduplicated())])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 201
        # Either id is enough to recognise a duplicate, and the one that was fresh is not burnt by that.
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "other"})).status_code == 409
        assert (await c.post("/orders", json={"sku": "b"}, headers={KEY: "other"})).status_code == 201
        assert (await c.post("/orders", json={"sku": "c"}, headers={KEY: "other"})).status_code == 422
        assert (await c.post("/orders", json={"sku": "c"}, headers={KEY: "new"})).status_code == 201
    assert await world.orders() == ["a", "b", "c"]
    assert await world.ids() == ["a", "b", "c", "k", "new", "other"]


async def test_the_get_routes_of_a_router_with_a_policy_are_left_alone(sqlite: World) -> None:
    app = sqlite.app()
    router = APIRouter(prefix="/orders", dependencies=[Depends(Deduplicated())])

    @router.get("")
    async def read(session: RequestSession) -> str:
        assert session.is_active
        return "all"

    @router.post("")
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    app.include_router(router)
    async with client(app) as c:
        for _ in range(2):
            assert (await c.get("/orders")).json() == "all"
            assert (await c.get("/orders", headers={KEY: "k"})).json() == "all"
        assert (await c.head("/orders", headers={KEY: "k"})).status_code == 405
        assert await sqlite.ids() == []
        assert (await c.post("/orders")).status_code == 400


async def test_a_request_session_without_a_policy_commits_with_the_response(world: World) -> None:
    app = world.app()

    @app.put("/orders/{sku}")
    async def put(sku: str, session: RequestSession) -> None:
        await add(session, sku)

    @app.get("/fail/{sku}", status_code=404)
    async def fail(sku: str, session: RequestSession) -> None:
        await add(session, sku)

    async with client(app) as c:
        assert (await c.put("/orders/a")).status_code == 200
        assert await world.orders() == ["a"]
        assert (await c.get("/fail/b")).status_code == 404
    assert await world.orders() == ["a"]


async def test_a_policy_of_the_app_leaves_its_websockets_alone(sqlite: World) -> None:
    # case B2
    app = FastAPI(dependencies=[Depends(Deduplicated())])
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)

    @app.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", b"k")]
    scope = {"type": "websocket", "path": "/ws", "headers": headers, "query_string": b"", "subprotocols": []}
    async with client(app):
        await app(scope, receive, send)
    assert [each["type"] for each in sent] == ["websocket.accept", "websocket.send", "websocket.close"]
    assert await sqlite.ids() == []


async def test_a_policy_may_be_reused_by_many_routes(sqlite: World) -> None:
    app = sqlite.app()
    policy = Depends(Deduplicated())
    for path in ("/a", "/b"):

        @app.post(path, dependencies=[policy])
        async def endpoint(session: RequestSession) -> None:
            await add(session, "x")

    async with client(app) as c:
        for path in ("/a", "/b"):
            assert (await c.post(path, headers={KEY: "k"})).status_code == 200
            assert (await c.post(path, headers={KEY: "k"})).status_code == 409


async def test_routes_that_are_added_after_start_are_served_alike(sqlite: World) -> None:
    app = sqlite.app()
    router = APIRouter()
    app.include_router(router)
    async with client(app) as c:
        assert (await c.post("/late", headers={KEY: "k"})).status_code == 404

        @router.post("/late", dependencies=[Depends(BY_SKU)])
        async def late(order: Order, session: RequestSession) -> None:
            await add(session, order.sku)

        if (await c.post("/late", json={"sku": "z"})).status_code == 404:
            app.include_router(router)  # a FastAPI that copies routes when it includes them
            await c.post("/late", json={"sku": "z"})
        assert (await c.post("/late", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/late", json={"sku": "a"}, headers={KEY: "l"})).status_code == 409
        assert (await c.post("/late", json={"sku": "b"}, headers={KEY: "k"})).status_code == 422
