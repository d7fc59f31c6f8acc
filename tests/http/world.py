"""What most tests of the HTTP doors stand on: a database, a runtime, and an app that is spoken to in-process.

No `from __future__ import annotations` in files that declare endpoints inside of tests: FastAPI could not
resolve what their annotations name.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from fastapi_dedup import ConfigurationError, Dedup, DedupMiddleware
from fastapi_dedup.hooks import Event
from fastapi_dedup.http.dependency import request_session

KEY = "Idempotency-Key"
OWN: Any = Depends(request_session)
"""What the alias `RequestSession` depends on."""


class Order(BaseModel):
    sku: str
    note: str | None = None


async def add(session: AsyncSession, sku: str) -> None:
    """Do the business: one row in `orders`."""
    await session.execute(text("insert into orders (sku) values (:sku)"), {"sku": sku})


@dataclass
class World:
    """A database with the tables `orders` and `dedup_claims`, its runtime, and what the hooks heard."""

    engine: AsyncEngine
    dedup: Dedup
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    def app(self, **middleware: Any) -> FastAPI:
        """Return an app with the middleware, which takes these options."""
        app = FastAPI()
        app.add_middleware(DedupMiddleware, dedup=self.dedup, **middleware)
        return app

    async def column(self, query: str) -> list[Any]:
        async with self.engine.connect() as connection:
            return [*await connection.scalars(text(query))]

    async def orders(self) -> list[str]:
        """Return what was ordered, in order."""
        return await self.column("select sku from orders order by id")

    async def ids(self) -> list[str]:
        """Return the logical ids that are claimed, sorted."""
        return await self.column("select logical_id from dedup_claims order by logical_id")

    async def scopes(self) -> list[str]:
        """Return the scopes of the claims, sorted."""
        return await self.column("select scope from dedup_claims order by scope")

    def kinds(self) -> list[str]:
        """Return the kinds of the events so far, and forget them."""
        kinds = [each.kind.value for each in self.events]
        self.events.clear()
        return kinds


class Statements(list[str]):
    """The statements that an engine ran while this was listening."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        event.listen(engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.append(statement)


def session_of(world: World) -> Callable[[], AsyncIterator[AsyncSession]]:
    """Return the session dependency that most apps have: commits at its end, rolls back on an error."""

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session, session.begin():
            yield session

    return get_session


class StartUpError(Exception):
    """The app's lifespan failed; the text is its message."""


@asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    """Run an app's lifespan around a block, as a server does.

    Raises:
        StartUpError: The app said that its start-up failed.
    """
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outgoing: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()

    async def receive() -> dict[str, Any]:
        return await incoming.get()

    async def send(message: MutableMapping[str, Any]) -> None:
        outgoing.put_nowait(message)

    async def live() -> None:
        try:
            await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
        except BaseException as error:
            outgoing.put_nowait({"type": "raised", "message": repr(error)})
            raise

    task = asyncio.create_task(live())
    incoming.put_nowait({"type": "lifespan.startup"})
    started = await outgoing.get()
    if started["type"] != "lifespan.startup.complete":
        await asyncio.wait([task])
        task.exception()
        raise StartUpError(started["message"])
    try:
        yield
    finally:
        incoming.put_nowait({"type": "lifespan.shutdown"})
        await task


def talk(app: Any) -> httpx.AsyncClient:
    """Return a client that speaks to an app in-process, without a lifespan; what the app raises is a 500."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@asynccontextmanager
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Start an app and yield a client that speaks to it in-process."""
    async with lifespan(app), talk(app) as speaking:
        yield speaking


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait until a condition holds, which nobody here is told of."""
    async with asyncio.timeout(5):
        while not await condition():  # noqa: ASYNC110 - it is in a database, or on the other side of a socket
            await asyncio.sleep(0.01)


def problem(response: httpx.Response) -> str:
    """Return the kind of a refusal, which is the anchor of its type; else say what was answered instead."""
    if response.headers.get("content-type") != "application/problem+json":
        return f"no problem but {response.status_code}: {response.text[:100]}"
    assert response.json()["status"] == response.status_code
    return str(response.json()["type"]).partition("#")[2]


async def refusal_of(world: World, build: Callable[[FastAPI], None]) -> str:
    """Return the message that an app is refused with: the same by lifespan and by a first request."""
    app = world.app()
    build(app)
    with pytest.raises(StartUpError) as raised:
        async with lifespan(app):
            pass
    app = world.app()
    build(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
        for _ in range(2):
            with pytest.raises(ConfigurationError) as met:
                await c.post("/orders", headers={KEY: "k"})
            assert str(met.value) == str(raised.value)
    return str(raised.value)
