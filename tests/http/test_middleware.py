"""The middleware on its own: under FastAPI, Starlette, and any other ASGI app."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request, WebSocket
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Host, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from fastapi_dedup import ConfigurationError, Dedup, Deduplicated, DedupMiddleware, RequestSession
from fastapi_dedup.http.dependency import request_session
from tests.http.world import KEY, StartUpError, World, add, client, lifespan, problem, talk


async def endpoint(request: Request) -> Response:
    """Work in the request's session, as an endpoint of any framework does."""
    session = await request_session(request)
    await add(session, request.url.path)
    return JSONResponse({"length": len(await request.body())}, 201)


def starlette_app(world: World, *routes: Any, **options: Any) -> Starlette:
    return Starlette(routes=[*routes], middleware=[Middleware(DedupMiddleware, dedup=world.dedup, **options)])


async def raw(scope: Scope, receive: Receive, send: Send) -> None:
    """Be an ASGI app that knows no framework, and no lifespan either."""
    assert scope["type"] == "http"
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    status = 404 if scope["path"] == "/missing" else 201
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"%02d" % len(body)})


async def check(c: Any, path: str, method: str = "POST") -> None:
    """Send twice what middleware deduplicates on its own, and once without an id."""
    assert (await c.request(method, path, content=b"xyz", headers={KEY: "k"})).status_code == 201
    again = await c.request(method, path, content=b"xyz", headers={KEY: "k"})
    assert (again.status_code, problem(again)) == (409, "duplicate")
    other = await c.request(method, path, content=b"another", headers={KEY: "k"})
    assert (other.status_code, problem(other)) == (422, "fingerprint-mismatch")
    assert (await c.request(method, path, content=b"xyz")).status_code == 201
    assert (await c.request(method, path, content=b"xyz", headers={KEY: ""})).status_code == 201


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


async def test_plain_routes_and_mounts_of_a_fastapi_app_are_served_alike(sqlite: World) -> None:
    app = sqlite.app()
    app.add_route("/plain", endpoint, methods=["POST"])
    app.mount("/starlette", Starlette(routes=[Route("/deep", endpoint, methods=["POST"])]))
    app.mount("/raw", raw)
    async with client(app) as c:
        for path in ("/plain", "/starlette/deep", "/raw/anything"):
            await check(c, path)
            assert (await c.get(path, headers={KEY: "k"})).status_code in {201, 405}
    assert await sqlite.ids() == ["k"] * 3


async def test_plain_routes_and_mounts_of_an_included_router_are_served_alike(sqlite: World) -> None:
    app = sqlite.app()
    router = APIRouter()
    router.add_route("/plain", endpoint, methods=["POST"])
    router.mount("/raw", raw)
    router.mount("/starlette", Starlette(routes=[Route("/deep", endpoint, methods=["POST"])]))
    app.include_router(router, prefix="/v1")
    async with client(app) as c:
        paths = ["/v1/plain", "/v1/starlette/deep", "/v1/raw/x"]
        # Which of them a FastAPI serves at all differs between its releases.
        served = [path for path in paths if (await c.post(path)).status_code != 404]
        assert "/v1/plain" in served
        for path in served:
            await check(c, path)


async def test_routes_behind_a_host_are_served_alike(sqlite: World) -> None:
    app = starlette_app(sqlite, Host("test", Router([Route("/orders", endpoint, methods=["POST"])])))
    async with client(app) as c:
        await check(c, "/orders")


@pytest.mark.parametrize("how", ["mounted", "included"])
async def test_a_mounted_fastapi_app_is_served_like_one_of_its_own(world: World, how: str) -> None:
    inner = FastAPI()

    @inner.post("/orders", status_code=201)
    async def create(request: Request, session: RequestSession) -> None:
        await request.body()
        await add(session, "a")

    app = world.app()
    if how == "mounted":
        app.mount("/shop", inner)
    else:
        router = APIRouter()
        router.mount("/shop", inner)
        app.include_router(router)
    async with client(app) as c:
        if (await c.get("/shop/openapi.json")).status_code == 404:
            pytest.skip("this FastAPI does not include mounts")
        await check(c, "/shop/orders")
    assert len(await world.orders()) == 3


async def test_a_policy_in_a_mounted_app_is_kept(world: World) -> None:
    # case A7
    inner = FastAPI()
    policy = Deduplicated("body", "sku", duplicate_status=202)

    @inner.post("/orders", status_code=201, dependencies=[Depends(policy)])
    async def create(body: dict[str, str], session: RequestSession) -> None:
        await add(session, body["sku"])

    app = world.app()
    app.mount("/shop", inner)
    async with client(app) as c:
        assert (await c.post("/shop/orders", json={"sku": "a"})).status_code == 201
        again = await c.post("/shop/orders", json={"sku": "a"})
        assert (again.status_code, again.json()["duplicate"]) == (202, True)
        assert (await c.post("/shop/orders", json={})).status_code == 400
    assert await world.orders() == ["a"]


async def test_an_asgi_app_may_be_wrapped(sqlite: World) -> None:
    wrapped: ASGIApp = DedupMiddleware(raw, dedup=sqlite.dedup)
    await sqlite.dedup.start()
    async with talk(wrapped) as c:
        await check(c, "/anything")
        answer = await c.post("/other", content=b"abc", headers={KEY: "k"})
        assert answer.text == "03"
        for _ in range(2):
            assert (await c.post("/missing", headers={KEY: "k"})).status_code == 404
    assert await sqlite.scopes() == ["POST /anything", "POST /other"]


@pytest.mark.parametrize("how", ["bare", "under a middleware"])
async def test_a_fastapi_app_may_be_wrapped(world: World, how: str) -> None:
    app = FastAPI()

    @app.post("/orders", status_code=201, dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(body: dict[str, str], session: RequestSession) -> None:
        await add(session, body["sku"])

    @app.post("/other", status_code=201)
    async def other(request: Request) -> None:
        await request.body()

    inner: ASGIApp = app if how == "bare" else GZipMiddleware(app)
    async with client(DedupMiddleware(inner, dedup=world.dedup)) as c:
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 201
        again = await c.post("/orders", json={"sku": "a"})
        assert (again.status_code, problem(again)) == (409, "duplicate")
        await check(c, "/other")
    assert await world.orders() == ["a"]


@pytest.mark.parametrize("how", ["lifespan", "first request"])
async def test_a_policy_behind_a_wrapping_middleware_is_inspected_like_any_other(
    sqlite: World, how: str
) -> None:
    # What cannot be seen can be neither ordered after authentication nor refused.
    app = FastAPI()

    @app.put("/orders", dependencies=[Depends(Deduplicated(methods=["POST"]))])
    async def put() -> None:
        pass

    wrapped = DedupMiddleware(GZipMiddleware(app), dedup=sqlite.dedup)
    if how == "lifespan":
        with pytest.raises(StartUpError, match="PUT /orders"):
            async with lifespan(wrapped):
                pass
    else:
        transport = httpx.ASGITransport(wrapped)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
            with pytest.raises(ConfigurationError, match="PUT /orders"):
                await c.put("/orders")


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


async def test_the_same_runtime_twice_is_one_exchange(world: World) -> None:
    inner = FastAPI()
    inner.add_middleware(DedupMiddleware, dedup=world.dedup)

    @inner.post("/orders", status_code=201)
    async def create(request: Request, session: RequestSession) -> None:
        await request.body()
        await add(session, "a")

    app = world.app()
    app.mount("/shop", inner)
    async with client(app) as c:
        await check(c, "/shop/orders")
    assert world.kinds() == ["claimed", "committed", "duplicate", "mismatch"]


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
