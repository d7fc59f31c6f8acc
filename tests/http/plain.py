"""Plain Starlette and ASGI endpoints, and what the middleware on its own does for them."""

from typing import Any

from fastapi import Request
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from fastapi_dedup import DedupMiddleware
from fastapi_dedup.http.dependency import request_session
from tests.http.world import KEY, World, add, problem


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
