"""Streaming responses, over real sockets: they stay streams, and a broken one undoes nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from fastapi.responses import StreamingResponse
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.types import Message, Receive, Scope, Send

from fastapi_dedup import Deduplicated, DedupMiddleware, StoreUnavailableError
from tests.http.world import KEY, OWN, World, add, eventually, session_of
from tests.live import live


def depends_of(world: World, kind: Any) -> tuple[Any, Any]:
    """Return what the handler depends on, and what the policy is told of it."""
    if kind == "RequestSession":
        return OWN, None
    session = Depends(session_of(world), scope=kind)
    return session, session


KINDS = ["RequestSession", "function", "request"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_chunk_arrives_before_the_last_is_made(world: World, kind: str) -> None:
    # case A5
    depends, given = depends_of(world, kind)
    app = world.app()
    go_on = asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=given))])
    async def create(session: Annotated[AsyncSession, depends]) -> StreamingResponse:
        await add(session, "a")

        async def chunks() -> AsyncIterator[bytes]:
            yield b"first "
            await go_on.wait()
            yield b"last"

        return StreamingResponse(chunks())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c, asyncio.timeout(10):
        async with c.stream("POST", "/orders", headers={KEY: "k"}) as response:
            assert response.status_code == 200
            received = response.aiter_bytes()
            assert await anext(received) == b"first "
            go_on.set()
            assert b"".join([each async for each in received]) == b"last"
        await eventually(world.orders)
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_a_stream_without_an_id_or_a_session_is_untouched(sqlite: World) -> None:
    app = sqlite.app()
    go_on = asyncio.Event()

    @app.api_route("/stream", methods=["GET", "POST"])
    async def stream() -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first "
            await go_on.wait()
            for _ in range(3):
                yield b"x" * 100_000

        return StreamingResponse(chunks())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c, asyncio.timeout(10):
        for method, headers in (("GET", {}), ("POST", {}), ("POST", {KEY: "k"})):
            go_on.clear()
            async with c.stream(method, "/stream", headers=headers) as response:
                received = response.aiter_bytes()
                assert await anext(received) == b"first "
                go_on.set()
                assert sum([len(each) async for each in received]) == 300_000


@pytest.mark.parametrize("kind", ["RequestSession", "request"])
async def test_a_stream_may_use_the_session_to_its_end(world: World, kind: str) -> None:
    # case A5
    depends, given = depends_of(world, kind)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=given))])
    async def create(session: Annotated[AsyncSession, depends]) -> StreamingResponse:
        for n in range(5):
            await add(session, f"sku-{n}")

        async def chunks() -> AsyncIterator[str]:
            for n in range(1, 6):
                sku = await session.scalar(text("select sku from orders where id = :n"), {"n": n})
                yield f"{sku} "

        return StreamingResponse(chunks())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        response = await c.post("/orders", headers={KEY: "k"})
        assert response.text == "sku-0 sku-1 sku-2 sku-3 sku-4 "
        await eventually(world.orders)
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409


async def test_a_stream_over_an_open_app_session_is_warned_of_once(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    session, _ = depends_of(sqlite, "request")
    app = sqlite.app()

    @app.post("/orders/{n}", dependencies=[Depends(Deduplicated(session=session))])
    async def create(session: Annotated[AsyncSession, session]) -> StreamingResponse:
        await add(session, "a")

        async def chunks() -> AsyncIterator[bytes]:
            yield b"x"

        return StreamingResponse(chunks())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        for n in range(3):
            assert (await c.post(f"/orders/{n}", headers={KEY: "k"})).status_code == 200
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warning.startswith(
        "POST /orders/{n} streams its response while the session of its claim is still open"
    )
    assert "RequestSession" in warning


@pytest.mark.parametrize("kind", ["RequestSession", "function"])
async def test_a_stream_that_breaks_after_the_commit_does_not_free_the_id(world: World, kind: str) -> None:
    # The work is committed, so a freed id would let the retry do it again.
    depends, given = depends_of(world, kind)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=given))])
    async def create(session: Annotated[AsyncSession, depends]) -> StreamingResponse:
        await add(session, "a")

        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            msg = "boom"
            raise ValueError(msg)

        return StreamingResponse(chunks())

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        with pytest.raises(httpx.RemoteProtocolError):
            await c.post("/orders", headers={KEY: "k"})
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


@pytest.mark.parametrize("kind", ["RequestSession", "function"])
async def test_a_client_that_leaves_mid_stream_does_not_free_the_id(world: World, kind: str) -> None:
    # case B3
    depends, given = depends_of(world, kind)
    app = world.app()
    ended = asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=given))])
    async def create(session: Annotated[AsyncSession, depends]) -> StreamingResponse:
        await add(session, "a")

        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 100_000
                    await asyncio.sleep(0)
            finally:
                ended.set()

        return StreamingResponse(chunks())

    async with live(app) as url:
        async with httpx.AsyncClient(base_url=url) as c, c.stream("POST", "/orders", headers={KEY: "k"}) as r:
            assert r.status_code == 200
            await anext(r.aiter_bytes())
        async with httpx.AsyncClient(base_url=url) as c:
            async with asyncio.timeout(5):
                await ended.wait()
            await asyncio.sleep(0.05)
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


def app_with_a_big_answer(world: World) -> FastAPI:
    session, _ = depends_of(world, "request")
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=session))])
    async def create(session: Annotated[AsyncSession, session]) -> str:
        await add(session, "a")
        return "x" * 3_000_000

    return app


async def test_an_answer_beyond_what_is_held_back_is_delivered_once_and_whole(world: World) -> None:
    # case B6
    async with live(app_with_a_big_answer(world)) as url, httpx.AsyncClient(base_url=url) as c:
        response = await c.post("/orders", headers={KEY: "k"})
        assert (response.status_code, len(response.json())) == (200, 3_000_000)
        await eventually(world.orders)
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


async def test_the_size_of_an_answer_decides_nothing_about_commit_first(world: World) -> None:
    # case A2
    # DESIGN.md §4.4: "No 2xx leaves before the transaction is durable."
    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            yield session
            msg = "the commit failed"
            raise ValueError(msg)

    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> str:
        await add(session, "a")
        return "x" * 3_000_000

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 500
    assert (await world.orders(), await world.ids()) == ([], [])


async def test_a_refusal_after_the_response_has_started_begins_no_other(sqlite: World) -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        msg = "in the middle of a stream"
        raise StoreUnavailableError(msg)

    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["type"])

    async def receive() -> Message:
        raise NotImplementedError

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    async with sqlite.dedup:
        with pytest.raises(StoreUnavailableError):
            await DedupMiddleware(app, sqlite.dedup, header=None)(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]
