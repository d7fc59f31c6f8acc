"""Apps inside of apps: mounted, included, behind a host, and wrapped from outside."""

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.applications import Starlette
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Host, Route, Router
from starlette.types import ASGIApp

from fastapi_dedup import ConfigurationError, Deduplicated, DedupMiddleware, RequestSession
from tests.http.plain import check, endpoint, raw, starlette_app
from tests.http.world import KEY, StartUpError, World, add, client, lifespan, problem, talk


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
