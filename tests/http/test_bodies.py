"""Reading a body in the middleware changes nothing of what the app receives."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from fastapi_dedup import Deduplicated, DedupMiddleware
from tests.http.world import KEY, World, client, problem
from tests.live import live

CHUNKS = [b"sku=", b"a&note", b"=x%20y"]
BODY = b"sku=a&note=x%20y"
FORM = {"content-type": "application/x-www-form-urlencoded", KEY: "k"}


async def chunked() -> AsyncIterator[bytes]:
    for each in CHUNKS:
        yield each
        await asyncio.sleep(0.01)


async def read(request: Request) -> Response:
    """Answer with the body as read in the way that the path asks for."""
    match request.url.path.rpartition("/")[2]:
        case "body":
            found: Any = (await request.body()).decode()
        case "stream":
            found = b"".join([each async for each in request.stream()]).decode()
        case "form":
            async with request.form() as form:
                found = "&".join(f"{name}={value}" for name, value in form.items())
        case "twice":
            found = [(await request.body()).decode(), dict((await request.form()).items())]
        case _:
            found = await request.json()
    return JSONResponse({"found": found, "left": await request.is_disconnected()})


async def raw(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body += message.get("body", b"")
        more = message.get("more_body", False)
    await JSONResponse({"found": body.decode(), "left": False})(scope, receive, send)


def fastapi_app(world: World, policy: Deduplicated | None) -> FastAPI:
    app = world.app()
    dependencies = [Depends(policy)] if policy else []
    for way in WAYS:
        app.add_api_route(f"/{way}", read, methods=["POST"], dependencies=dependencies, response_model=None)
    return app


def starlette_app(world: World, policy: Deduplicated | None) -> Starlette:
    routes = [Route(f"/{way}", read, methods=["POST"]) for way in WAYS]
    middleware = Middleware(DedupMiddleware, dedup=world.dedup, policy=policy)
    return Starlette(routes=[*routes, Mount("/raw", app=raw)], middleware=[middleware])


WAYS = ["body", "stream", "form", "json", "twice"]
POLICIES = {
    "the middleware's": None,
    "header": Deduplicated(),
    "form": Deduplicated("form", "sku"),
    "form, compared": Deduplicated("form", ["sku", "note"], fingerprint=True),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [fastapi_app, starlette_app])
async def test_a_body_arrives_whole_in_whatever_way_it_is_read(
    sqlite: World, make: Callable[[World, Deduplicated | None], Any], policy: str
) -> None:
    # case B1
    async with live(make(sqlite, POLICIES[policy])) as url, httpx.AsyncClient(base_url=url, timeout=3) as c:
        for way in ("body", "stream", "form", "twice"):
            answer = await c.post(f"/{way}", content=chunked(), headers=FORM)
            assert answer.status_code == 200, way
            found = answer.json()["found"]
            if way == "form":
                assert found == "sku=a&note=x y"
            elif way == "twice":
                assert found == [BODY.decode(), {"sku": "a", "note": "x y"}]
            else:
                assert found.encode() == BODY
            assert answer.json()["left"] is False
            assert (await c.post(f"/{way}", content=BODY, headers=FORM)).status_code == 409
        if make is starlette_app:
            answer = await c.post("/raw/x", content=chunked(), headers=FORM)
            assert answer.json()["found"].encode() == BODY


@pytest.mark.parametrize(
    "policy", [None, Deduplicated(), Deduplicated("body", "a")], ids=["own", "header", "body"]
)
@pytest.mark.parametrize("make", [fastapi_app, starlette_app])
async def test_a_json_body_is_read_by_whoever_asks(
    sqlite: World, make: Callable[[World, Deduplicated | None], Any], policy: Deduplicated | None
) -> None:
    # case B1
    async with client(make(sqlite, policy)) as c:
        for way in ("json", "body", "stream"):
            answer = await c.post(f"/{way}", json={"a": 1}, headers={KEY: "k"})
            assert answer.json()["found"] in ({"a": 1}, '{"a":1}', '{"a": 1}')
            assert (await c.post(f"/{way}", json={"a": 1}, headers={KEY: "k"})).status_code == 409


@pytest.mark.parametrize("side", ["inside", "outside"])
async def test_a_base_http_middleware_reads_the_body_too(sqlite: World, side: str) -> None:
    # case B1
    app = FastAPI()
    seen: list[bytes] = []
    if side == "outside":
        app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)

    @app.middleware("http")
    async def reads(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        seen.append(await request.body())
        return await call_next(request)

    if side == "inside":
        app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    for way in WAYS:
        app.add_api_route(f"/{way}", read, methods=["POST"], response_model=None)
        app.add_route(f"/plain/{way}", read, methods=["POST"])
    async with live(app) as url, httpx.AsyncClient(base_url=url, timeout=3) as c:
        for way in ("body", "stream", "form", "plain/body", "plain/stream", "plain/form"):
            answer = await c.post(f"/{way}", content=chunked(), headers=FORM)
            assert answer.status_code == 200
            assert answer.json()["found"] in (BODY.decode(), "sku=a&note=x y")
    assert seen == [BODY] * 6


@pytest.mark.parametrize("make", [fastapi_app, starlette_app])
async def test_files_of_a_form_are_read_to_the_end_and_left_open_by_nobody(
    sqlite: World, make: Callable[[World, Deduplicated | None], Any]
) -> None:
    # case B1
    # Starlette keeps a file of more than 1 MiB on disk; one that nobody closes is a ResourceWarning.
    app = make(sqlite, Deduplicated("form", "sku", fingerprint=True))
    for each in app.user_middleware:
        each.kwargs["max_body"] = 8 * 1024 * 1024
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        await post_files(app)
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def post_files(app: Any) -> None:
    async with client(app) as c:
        for status, content in ((200, b"x" * 2_000_000), (409, b"x" * 2_000_000), (422, b"y" * 2_000_000)):
            answer = await c.post("/body", data={"sku": "a"}, files={"file": ("a.bin", content)})
            assert answer.status_code == status
            assert status != 200 or len(answer.json()["found"]) > 2_000_000


async def test_a_refusal_before_the_body_is_read_leaves_the_connection_usable(sqlite: World) -> None:
    app = sqlite.app(header=None)

    @app.post("/orders", dependencies=[Depends(Deduplicated(fingerprint=False))])
    async def create() -> int:
        return 1

    big = b"x" * 3_000_000
    async with live(app) as url, httpx.AsyncClient(base_url=url, timeout=5) as c:
        assert (await c.post("/orders", content=big, headers={KEY: "k"})).status_code == 200
        for _ in range(3):
            assert (await c.post("/orders", content=big, headers={KEY: "k"})).status_code == 409
            assert (await c.post("/orders", content=big)).status_code == 400


async def test_a_body_that_nobody_reads_is_no_trouble(sqlite: World) -> None:
    # case B1
    app = sqlite.app()

    @app.post("/orders")
    async def create() -> int:
        return 1

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        for key in ("k", "l"):
            assert (await c.post("/orders", content=chunked(), headers={KEY: key})).json() == 1


def endless(sent: list[int]) -> AsyncIterator[bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(400):
            sent.append(64 * 1024)
            yield b"x" * 64 * 1024
            await asyncio.sleep(0)

    return chunks()


SOURCES = {
    "header": Deduplicated(),
    "body": Deduplicated("body", "sku"),
    "form": Deduplicated("form", "sku"),
    "body, compared": Deduplicated("body", "sku", fingerprint=True),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("door", ["dependency", "middleware"])
async def test_a_body_beyond_the_limit_is_refused_after_about_the_limit(
    sqlite: World, source: str, door: str
) -> None:
    # case B6
    # 25 MB in chunks, without a Content-Length; the handler would have read it as a stream.
    fast = sqlite.app(header=None, max_body=1024 * 1024)

    @fast.post("/orders", dependencies=[Depends(SOURCES[source])])
    async def create(request: Request) -> int:
        return sum([len(each) async for each in request.stream()])

    app: Starlette = fast
    if door == "middleware":
        options: Any = {"dedup": sqlite.dedup, "max_body": 1024 * 1024, "policy": SOURCES[source]}
        app = Starlette(
            routes=[Route("/orders", read, methods=["POST"])],
            middleware=[Middleware(DedupMiddleware, **options)],
        )
    received: list[int] = []

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        async def count() -> Any:
            message = await receive()
            received.append(len(message.get("body", b"")))
            return message

        await app(scope, count if scope["type"] == "http" else receive, send)

    content_type = "application/x-www-form-urlencoded" if "form" in source else "application/json"
    headers = {KEY: "k", "content-type": content_type}
    async with live(counting) as url, httpx.AsyncClient(base_url=url) as c:
        try:
            refused = await c.post("/orders", content=endless([]), headers=headers)
        except (httpx.WriteError, httpx.ReadError):
            refused = None  # the server closed while the client was still sending
        assert await sqlite.ids() == []
    assert sum(received) < 2 * 1024 * 1024
    if refused is not None:
        assert (refused.status_code, problem(refused)) == (413, "payload-too-large")


async def test_the_limit_is_a_limit_and_not_less(sqlite: World) -> None:
    # case B6
    app = sqlite.app(max_body=100)

    @app.post("/orders")
    async def create(request: Request) -> int:
        return len(await request.body())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        assert (await c.post("/orders", content=b"x" * 100, headers={KEY: "k"})).json() == 100
        refused = await c.post("/orders", content=b"x" * 101, headers={KEY: "l"})
        assert (refused.status_code, problem(refused)) == (413, "payload-too-large")
        # Without a key nobody reads the body but the app.
        assert (await c.post("/orders", content=b"x" * 1000)).json() == 1000
    assert await sqlite.ids() == ["k"]


async def test_a_large_body_that_is_compared_is_never_passed_by(sqlite: World) -> None:
    # peers.md §3.16: bodies over 1 MiB bypassed dedup silently, and ran twice.
    app = sqlite.app(max_body=8 * 1024 * 1024)
    runs: list[int] = []

    @app.post("/orders")
    async def create(request: Request) -> None:
        runs.append(len(await request.body()))

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        big = b"x" * 3_000_000
        assert (await c.post("/orders", content=big, headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", content=big, headers={KEY: "k"})).status_code == 409
        assert (await c.post("/orders", content=big + b"y", headers={KEY: "k"})).status_code == 422
    assert runs == [3_000_000]


async def test_a_large_body_is_no_trouble_where_the_payload_is_not_compared(sqlite: World) -> None:
    app = sqlite.app(header=None)

    @app.post("/orders", dependencies=[Depends(Deduplicated(fingerprint=False))])
    async def create(request: Request) -> int:
        return sum([len(each) async for each in request.stream()])

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        big = b"x" * 3_000_000
        assert (await c.post("/orders", content=big, headers={KEY: "k"})).json() == 3_000_000
        assert (await c.post("/orders", content=big, headers={KEY: "k"})).status_code == 409
