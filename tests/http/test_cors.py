"""Browsers: refusals carry CORS headers where CORSMiddleware is outside, as documented."""

import asyncio

import httpx
from fastapi import Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, World, add, client
from tests.live import live

ORIGIN = {"origin": "https://shop.example"}


async def test_a_refusal_has_cors_headers_and_shows_retry_after(sqlite: World) -> None:
    # case B4
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["https://shop.example"],
        allow_methods=["POST"],
        allow_headers=[KEY],
        expose_headers=["Retry-After"],
    )
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        running.set()
        await go_on.wait()

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": KEY.lower()}
        preflight = await c.options("/orders", headers={**ORIGIN, **asks})
        assert preflight.status_code == 200
        assert KEY.lower() in preflight.headers["access-control-allow-headers"].lower()

        first = asyncio.create_task(c.post("/orders", headers={KEY: "k", **ORIGIN}))
        await running.wait()
        refusals = [await c.post("/orders", headers={KEY: "k", **ORIGIN})]
        go_on.set()
        assert (await first).status_code == 200
        refusals += [
            await c.post("/orders", headers={KEY: "k", **ORIGIN}),
            await c.post("/orders", headers={KEY: "k", **ORIGIN}, json=1),
            await c.post("/orders", headers=ORIGIN),
        ]
    assert [each.status_code for each in refusals] == [409, 409, 422, 400]
    for refusal in refusals:
        assert refusal.headers["access-control-allow-origin"] == "https://shop.example"
        assert "Retry-After" in refusal.headers["access-control-expose-headers"]
    assert "retry-after" in refusals[0].headers


async def test_a_preflight_claims_nothing(sqlite: World) -> None:
    # case B4
    app = sqlite.app(methods=["POST", "OPTIONS"])
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["POST"], allow_headers=["*"])

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    async with client(app) as c:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": KEY.lower()}
        for _ in range(2):
            assert (await c.options("/orders", headers={**ORIGIN, **asks})).status_code == 200
    assert (sqlite.kinds(), await sqlite.ids()) == ([], [])
