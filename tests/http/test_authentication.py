"""Who may not call learns nothing about ids, and burns none."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import fastapi
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Query, Request, Response, Security
from fastapi.security import HTTPBearer, OAuth2PasswordBearer
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, World, add, client

GOOD = {"authorization": "Bearer good"}


async def authenticate(request: Request) -> str:
    if request.headers.get("authorization") != "Bearer good":
        raise HTTPException(401)
    return "ann"


POLICY = Depends(Deduplicated())
AUTH = Depends(authenticate)
ORDERS: dict[str, dict[str, list[Any]]] = {
    "route, auth first": {"route": [AUTH, POLICY]},
    "route, policy first": {"route": [POLICY, AUTH]},
    "policy on the router, auth on the route": {"router": [POLICY], "route": [AUTH]},
    "auth on the router, policy on the route": {"router": [AUTH], "route": [POLICY]},
    "both on the router": {"router": [POLICY, AUTH]},
    "policy on the app, auth on the router": {"app": [POLICY], "router": [AUTH]},
    "policy of the middleware, auth on the route": {"route": [AUTH]},
}


async def check(world: World, app: Any, *, refusal: int = 401) -> None:
    """Send a fresh and a used key, with and without credentials."""
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "fresh"})).status_code == refusal
        assert await world.ids() == []
        assert (await c.post("/orders", headers={KEY: "fresh", **GOOD})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "fresh"})).status_code == refusal
        assert (await c.post("/orders", headers={KEY: "fresh"}, json={"other": 1})).status_code == refusal
        assert (await c.post("/orders", headers={KEY: '"malformed'})).status_code == refusal
        assert (await c.post("/orders")).status_code == refusal
        assert (await c.post("/orders", headers={KEY: "fresh", **GOOD})).status_code == 409
    assert await world.ids() == ["fresh"]


@pytest.mark.parametrize("order", ORDERS)
async def test_authentication_answers_first_wherever_it_stands(sqlite: World, order: str) -> None:
    # case A9
    placed = ORDERS[order]
    app = FastAPI(dependencies=placed.get("app"))
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    router = APIRouter(dependencies=placed.get("router"))

    @router.post("/orders", dependencies=placed.get("route"))
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    app.include_router(router)
    await check(sqlite, app)


async def test_a_parameter_that_authenticates_answers_first(world: World) -> None:
    # case A9
    app = world.app()

    @app.post("/orders", dependencies=[POLICY])
    async def create(user: Annotated[str, AUTH], session: RequestSession) -> None:
        await add(session, user)

    await check(world, app)


async def test_a_parameter_after_the_claim_that_authenticates_answers_first(sqlite: World) -> None:
    # case A9
    app = sqlite.app()

    @app.post("/orders")
    async def create(
        claim: Annotated[Any, POLICY], user: Annotated[str, AUTH], session: RequestSession
    ) -> None:
        await add(session, f"{user} {claim.logical_id}")

    await check(sqlite, app)


@pytest.mark.parametrize(
    "scheme", [HTTPBearer(), OAuth2PasswordBearer("token")], ids=lambda each: type(each).__name__
)
async def test_fastapis_security_schemes_answer_first(sqlite: World, scheme: Any) -> None:
    # case A9
    app = sqlite.app()

    async def user(_: Annotated[Any, Security(scheme)]) -> str:
        return "ann"

    @app.post("/orders", dependencies=[POLICY])
    async def create(
        name: Annotated[str, Security(user, scopes=["orders"])], session: RequestSession
    ) -> None:
        await add(session, name)

    unauthenticated = 403 if scheme.scheme_name == "HTTPBearer" and _old() else 401
    await check(sqlite, app, refusal=unauthenticated)


def _old() -> bool:
    """Tell whether this FastAPI answers 403 where HTTPBearer finds no credentials."""
    return tuple(map(int, fastapi.__version__.split(".")[:2])) < (0, 122)


async def test_a_credential_that_fastapi_itself_misses_answers_first(sqlite: World) -> None:
    # case A9
    # FastAPI goes on solving dependencies after one of them did not validate, and answers 422 at the end.
    app = sqlite.app()

    async def user(authorization: Annotated[str, Header()]) -> str:
        return authorization

    @app.post("/orders", dependencies=[POLICY, Depends(user)])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    await check(sqlite, app, refusal=422)
    assert sqlite.kinds() == ["claimed", "committed", "duplicate"]


async def test_a_credential_in_the_handlers_own_parameters_answers_first(sqlite: World) -> None:
    # case A9
    app = sqlite.app()

    @app.post("/orders", dependencies=[POLICY])
    async def create(authorization: Annotated[str, Header()], session: RequestSession) -> None:
        await add(session, authorization)

    await check(sqlite, app, refusal=422)


async def test_a_credential_that_a_test_overrides_is_not_asked_for(sqlite: World) -> None:
    # With dependency_overrides the request runs, so it is deduplicated too.
    app = sqlite.app()

    async def user(authorization: Annotated[str, Header()]) -> str:
        return authorization

    @app.post("/orders", dependencies=[POLICY])
    async def create(name: Annotated[str, Depends(user)], session: RequestSession) -> None:
        await add(session, name)

    app.dependency_overrides[user] = lambda: "ann"
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert await sqlite.orders() == ["ann"]


async def test_a_parameter_that_is_a_model_answers_first(sqlite: World) -> None:
    # case A9
    class Credentials(BaseModel):
        authorization: str

    async def user(credentials: Annotated[Credentials, Header()]) -> str:
        return credentials.authorization

    app = sqlite.app()

    @app.post("/orders", dependencies=[POLICY])
    async def create(name: Annotated[str, Depends(user)], session: RequestSession) -> None:
        await add(session, name)

    await check(sqlite, app, refusal=422)


async def test_authentication_answers_before_a_policy_deep_in_the_tree(sqlite: World) -> None:
    # case A9
    app = sqlite.app()

    async def service(claim: Annotated[Any, POLICY], session: RequestSession) -> None:
        await add(session, claim.logical_id)

    @app.post("/orders", dependencies=[Depends(service), AUTH])
    async def create() -> None:
        pass

    await check(sqlite, app)


async def test_authorisation_by_the_principal_of_the_scope_answers_first(sqlite: World) -> None:
    # case A9
    # case D1
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(scope=Depends(authenticate)))])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    await check(sqlite, app)
    assert await sqlite.scopes() == ["POST /orders ann"]


@pytest.mark.parametrize("side", ["inside", "outside"])
async def test_authentication_in_a_middleware_answers_first(sqlite: World, side: str) -> None:
    # case A9
    app = FastAPI()
    if side == "outside":
        app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.headers.get("authorization") != "Bearer good":
            return PlainTextResponse("who?", 401)
        return await call_next(request)

    if side == "inside":
        app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)

    @app.post("/orders", dependencies=[POLICY])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    await check(sqlite, app)


class Guard:
    """Pure ASGI authentication, as a route's or a mount's own middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (b"authorization", b"Bearer good") in scope["headers"]:
            await self.app(scope, receive, send)
        else:
            await PlainTextResponse("who?", 401)(scope, receive, send)


async def endpoint(_: Request) -> Response:
    return PlainTextResponse("done")


PLAIN = Route("/orders", endpoint, methods=["POST"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Route("/orders", endpoint, methods=["POST"], middleware=[Middleware(Guard)]),
        lambda: Mount("/", routes=[PLAIN], middleware=[Middleware(Guard)]),
        lambda: Mount("/", app=Guard(Starlette(routes=[PLAIN]))),
    ],
    ids=["of the route", "of the mount", "around a mounted app"],
)
async def test_authentication_in_the_middleware_of_a_plain_route_answers_first(
    sqlite: World, make: Callable[[], Any]
) -> None:
    # case A9
    middleware = [Middleware(DedupMiddleware, dedup=sqlite.dedup)]
    app = Starlette(routes=[make()], middleware=middleware)
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 401
        assert (await c.post("/orders", headers={KEY: "k", **GOOD})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 401
        assert (await c.post("/orders", headers={KEY: "k", **GOOD})).status_code == 409


async def test_a_validation_error_answers_before_a_duplicate_only_where_it_may(sqlite: World) -> None:
    # A retry of a used key with a query that FastAPI cannot validate is not told that the work is done.
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(fingerprint=False))])
    async def create(number: Annotated[int, Query()], session: RequestSession) -> None:
        await add(session, str(number))

    async with client(app) as c:
        assert (await c.post("/orders?number=x", headers={KEY: "k"})).status_code == 422
        assert (await c.post("/orders?number=1", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders?number=1", headers={KEY: "k"})).status_code == 409
