"""A request that is cancelled or whose client leaves: the id is free, and the connection is clean."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, Request
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fastapi_dedup import Dedup, Deduplicated, RequestSession
from tests.http.world import KEY, OWN, World, add, client, eventually, lifespan, session_of
from tests.live import live


@pytest.fixture
async def narrow(world: World) -> AsyncIterator[World]:
    """A world whose app has one connection for everything."""
    engine = create_async_engine(world.engine.url, pool_size=1, max_overflow=0, pool_timeout=2)
    yield World(engine, Dedup(engine, reap_every=None))
    await engine.dispose()


class Gate:
    """An app with a handler that stops in the middle of its work, the first time."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        session = OWN if kind == "RequestSession" else Depends(session_of(world), scope=kind)  # type: ignore[arg-type]
        self.app = world.app()
        policy = Deduplicated(session=None if kind == "RequestSession" else session)

        @self.app.post("/orders", dependencies=[Depends(policy)])
        async def create(session: Annotated[AsyncSession, session]) -> None:
            await add(session, "a")
            if not self.reached.is_set():
                self.reached.set()
                await self.go_on.wait()


async def call(app: Any, path: str = "/orders") -> None:
    """Send a request with a key, without HTTP around it, so that a task of it can be cancelled."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: object) -> None:
        pass

    headers = [(KEY.lower().encode(), b"k")]
    await app(
        {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""},
        receive,
        send,
    )


@pytest.mark.parametrize("kind", ["RequestSession", "function", "request"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_request_frees_the_id_and_its_connection(
    narrow: World, world: World, kind: str, times: int
) -> None:
    # case B3
    gate = Gate(narrow, kind)
    async with lifespan(gate.app):
        task = asyncio.create_task(call(gate.app))
        await gate.reached.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await world.orders(), await world.ids()) == ([], [])
        await call(gate.app)
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_request_that_is_cancelled_while_it_commits_keeps_row_and_claim_together(
    world: World,
) -> None:
    # case B3
    for wait in range(8):
        async with world.engine.begin() as connection:
            await connection.execute(text("delete from orders"))
            await connection.execute(text("delete from dedup_claims"))
        gate = Gate(world, "RequestSession")
        async with lifespan(gate.app):
            task = asyncio.create_task(call(gate.app))
            await gate.reached.wait()
            gate.go_on.set()
            for _ in range(wait * 3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            async with asyncio.timeout(5):
                while True:
                    state = (await world.orders(), await world.ids())
                    if state in [([], []), (["a"], ["k"])]:
                        break
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.02)
                assert (await world.orders(), await world.ids()) == state


@pytest.mark.parametrize("kind", ["RequestSession", "function", "request"])
async def test_a_client_that_leaves_and_is_cancelled_for_it_frees_the_id(
    narrow: World, world: World, kind: str
) -> None:
    # case B3
    gate = Gate(narrow, kind)

    class CancelOnDisconnect:
        """What frameworks and servers do that cancel the handlers of clients that left."""

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await self.app(scope, receive, send)
                return
            serving = asyncio.create_task(self.app(scope, receive, send))
            leaving = asyncio.create_task(self.left(receive))
            await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            for each in (serving, leaving):
                each.cancel()
            await asyncio.gather(serving, leaving, return_exceptions=True)

        async def left(self, receive: Any) -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

    app = CancelOnDisconnect(gate.app)
    async with live(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=0.2) as c:
            with pytest.raises(httpx.ReadTimeout):
                await c.post("/orders", headers={KEY: "k"})
        async with httpx.AsyncClient(base_url=url) as c:
            for _ in range(100):
                if (answer := await c.post("/orders", headers={KEY: "k"})).status_code != 409:
                    break
                await asyncio.sleep(0.01)
            assert answer.status_code == 200
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_client_that_leaves_is_no_failure_where_nobody_looks(world: World) -> None:
    # uvicorn lets a handler go on to its end: its work is committed, and so is its claim.
    gate = Gate(world, "RequestSession")
    async with live(gate.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=0.2) as c:
            with pytest.raises(httpx.ReadTimeout):
                await c.post("/orders", headers={KEY: "k"})
        gate.go_on.set()
        async with httpx.AsyncClient(base_url=url) as c:
            await eventually(world.orders)
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409


async def test_a_disconnect_is_still_seen_after_the_body_was_read(sqlite: World) -> None:
    # case B1
    # DESIGN.md §5: reading a body never changes what the app receives afterwards, disconnects included.
    app = sqlite.app()
    seen: list[bool] = []
    reached = asyncio.Event()

    @app.post("/orders")
    async def create(request: Request, session: RequestSession) -> None:
        seen.append(await request.is_disconnected())
        await add(session, "a")
        reached.set()
        async with asyncio.timeout(5):
            while not await request.is_disconnected():  # noqa: ASYNC110 - nobody tells the handler
                await asyncio.sleep(0.01)
        seen.append(True)
        msg = "the client left"
        raise ConnectionError(msg)

    async with live(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=0.2) as c:
            with pytest.raises(httpx.ReadTimeout):
                await c.post("/orders", content=b"payload", headers={KEY: "k"})
        await reached.wait()

        async def over() -> bool:
            return len(seen) == 2 and not await sqlite.ids()

        await eventually(over)
    assert seen == [False, True]
    assert (await sqlite.orders(), await sqlite.ids()) == ([], [])


async def test_a_half_uploaded_body_runs_nothing_and_claims_nothing(sqlite: World) -> None:
    # peers.md §3.6, §3.7: a disconnect mid-upload ran the handler on half a body, or poisoned the key.
    app = sqlite.app()
    ran: list[bytes] = []

    @app.post("/orders")
    async def create(request: Request) -> None:
        ran.append(await request.body())

    async with live(app) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /orders HTTP/1.1\r\nhost: x\r\nidempotency-key: k\r\ncontent-length: 100\r\n\r\nhalf"
        )
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert (ran, await sqlite.ids()) == ([], [])
        async with httpx.AsyncClient(base_url=url) as c:
            assert (await c.post("/orders", content=b"whole", headers={KEY: "k"})).status_code == 200
    assert ran == [b"whole"]


async def test_a_timeout_around_the_app_frees_the_id(world: World) -> None:
    gate = Gate(world, "RequestSession")

    limits: list[float | None] = [0.05]

    async def limited(scope: Any, receive: Any, send: Any) -> None:
        limit = limits.pop() if scope["type"] == "http" and limits else None
        async with asyncio.timeout(limit):
            await gate.app(scope, receive, send)

    async with client(limited) as c:
        with pytest.raises(TimeoutError):
            await call(limited)
        assert (await world.orders(), await world.ids()) == ([], [])
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    assert await world.orders() == ["a"]
