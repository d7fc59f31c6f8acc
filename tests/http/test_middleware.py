"""The middleware on its own: under FastAPI, Starlette, and any other ASGI app."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import Receive, Scope, Send

from fastapi_dedup import Dedup, DedupMiddleware, RequestSession
from tests.http.plain import check, endpoint, starlette_app
from tests.http.world import KEY, World, add, client, problem


async def test_on_a_fastapi_route_the_header_is_enough(world: World) -> None:
    app = world.app()

    @app.post("/orders", status_code=201)
    @app.patch("/orders", status_code=201)
    async def create(request: Request, session: RequestSession) -> None:
        await request.body()
        await add(session, "a")

    async with client(app) as c:
        await check(c, "/orders")
        await check(c, "/orders", "PATCH")
    assert len(await world.orders()) == 6
    assert await world.scopes() == ["PATCH /orders", "POST /orders"]


async def test_other_methods_are_left_alone(sqlite: World) -> None:
    app = sqlite.app()

    @app.api_route("/orders", methods=["GET", "PUT", "DELETE", "OPTIONS"])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    async with client(app) as c:
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            for _ in range(2):
                assert (await c.request(method, "/orders", headers={KEY: "k"})).status_code == 200
    assert (len(await sqlite.orders()), await sqlite.ids()) == (8, [])


async def test_header_and_methods_are_configurable(sqlite: World) -> None:
    app = sqlite.app(header="X-Request-Id", methods=["put"])

    @app.api_route("/orders", methods=["PUT", "POST"])
    async def create() -> None:
        pass

    async with client(app) as c:
        assert (await c.put("/orders", headers={"x-request-id": "k"})).status_code == 200
        assert (await c.put("/orders", headers={"X-Request-Id": "k"})).status_code == 409
        for _ in range(2):
            assert (await c.post("/orders", headers={"x-request-id": "k"})).status_code == 200
            assert (await c.put("/orders", headers={KEY: "k"})).status_code == 200
    assert await sqlite.scopes() == ["PUT /orders"]


async def test_no_header_leaves_hosting(sqlite: World) -> None:
    app = sqlite.app(header=None)

    @app.post("/orders")
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    async with client(app) as c:
        for _ in range(2):
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert (await sqlite.orders(), await sqlite.ids()) == (["a", "a"], [])


async def test_a_malformed_key_is_a_bad_request_although_none_is_required(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders")
    async def create() -> None:
        pass

    async with client(app) as c:
        assert problem(await c.post("/orders", headers={KEY: '"x'})) == "invalid-logical-id"


class Endpoint(HTTPEndpoint):
    async def post(self, request: Request) -> Response:
        return await endpoint(request)


async def test_plain_starlette_routes_are_served_alike(world: World) -> None:
    app = starlette_app(
        world,
        Route("/function", endpoint, methods=["POST"]),
        Route("/class", Endpoint),
        Mount("/mounted", routes=[Route("/deep", endpoint, methods=["POST"])]),
        Mount("/router", app=Router([Route("/deep", endpoint, methods=["POST"])])),
    )
    async with client(app) as c:
        for path in ("/function", "/class", "/mounted/deep", "/router/deep"):
            await check(c, path)
    assert len(await world.orders()) == 12
    assert await world.ids() == ["k"] * 4


@pytest.mark.parametrize("plain", [True, False], ids=["starlette", "fastapi"])
async def test_redirects_and_what_matches_no_route_claim_nothing(sqlite: World, *, plain: bool) -> None:
    fast = sqlite.app()

    @fast.post("/orders", status_code=201)
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    app = starlette_app(sqlite, Route("/orders", endpoint, methods=["POST"])) if plain else fast
    async with client(app) as c:
        for _ in range(2):
            assert (await c.post("/orders/", headers={KEY: "k"})).status_code == 307
            assert (await c.post("/nowhere", headers={KEY: "k"})).status_code == 404
            assert (await c.patch("/orders", headers={KEY: "k"})).status_code == 405
        assert sqlite.kinds() == []
        answer = await c.post("/orders/", headers={KEY: "k"}, follow_redirects=True)
        assert answer.status_code == 201
    assert await sqlite.scopes() == ["POST /orders"]


async def test_websockets_pass_through_untouched(sqlite: World) -> None:
    # case B2
    app = sqlite.app()
    keys = []

    @app.websocket("/ws")
    async def echo(websocket: WebSocket) -> None:
        keys.append(websocket.headers[KEY])
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    incoming = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hi"}]
    sent = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", b"k")]
    scope = {"type": "websocket", "path": "/ws", "headers": headers, "query_string": b"", "subprotocols": []}
    async with client(app):
        await app(scope, receive, send)
    assert (keys, sent[-1]["text"]) == (["k"], "hi")
    assert (sqlite.kinds(), await sqlite.ids()) == ([], [])


async def test_other_kinds_of_scope_pass_through_untouched(sqlite: World) -> None:
    # case B2
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    scope, receive, send = {"type": "something.new"}, object(), object()
    await DedupMiddleware(app, dedup=sqlite.dedup)(scope, receive, send)  # type: ignore[arg-type]
    assert seen == [(scope, receive, send)]


@pytest.mark.parametrize("order", ["inside", "outside"])
async def test_base_http_middlewares_inside_and_outside_change_nothing(world: World, order: str) -> None:
    # case B1
    app = FastAPI()
    if order == "outside":
        app.add_middleware(DedupMiddleware, dedup=world.dedup)

    @app.middleware("http")
    async def reads(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        body = await request.body()
        response = await call_next(request)
        response.headers["x-length"] = str(len(body))
        return response

    if order == "inside":
        app.add_middleware(DedupMiddleware, dedup=world.dedup)

    @app.post("/orders", status_code=201)
    async def create(request: Request, session: RequestSession) -> int:
        await add(session, "a")
        return len(await request.body())

    async with client(app) as c:
        await check(c, "/orders")
        answer = await c.post("/orders", content=b"12345", headers={KEY: "new"})
        assert (answer.json(), answer.headers["x-length"]) == (5, "5")
    assert len(await world.orders()) == 4


async def test_the_middleware_needs_no_argument(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTAPI_DEDUP_DATABASE_URL", raising=False)
    caplog.set_level("INFO", "fastapi_dedup")
    app = FastAPI()
    app.add_middleware(DedupMiddleware)

    @app.post("/orders")
    async def create() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert "claims are kept in sqlite+aiosqlite:///fastapi_dedup.db" in caplog.text
    assert (tmp_path / "fastapi_dedup.db").exists()


async def test_the_environment_may_name_the_database(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTAPI_DEDUP_DATABASE_URL", f"sqlite:///{tmp_path}/claims.db")
    caplog.set_level("INFO", "fastapi_dedup")
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=Dedup(create_table=True))

    @app.post("/orders")
    async def create() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert f"claims are kept in sqlite:///{tmp_path}/claims.db" in caplog.text


async def test_a_response_of_the_app_goes_through_byte_by_byte(sqlite: World) -> None:
    # peers.md §3.18: one of two Set-Cookie headers was lost, on the first response even.
    app = sqlite.app()

    @app.post("/orders")
    async def create(session: RequestSession) -> Response:
        await add(session, "a")
        response = PlainTextResponse(json.dumps({"a": 1}), 201, {"location": "/orders/1"})
        response.set_cookie("one", "1")
        response.set_cookie("two", "2")
        return response

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
    assert (answer.status_code, answer.text, answer.headers["location"]) == (201, '{"a": 1}', "/orders/1")
    assert len(answer.headers.get_list("set-cookie")) == 2
