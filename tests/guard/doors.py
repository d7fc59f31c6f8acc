"""One endpoint behind each door, and what came of a delivery to it in one vocabulary.

No `from __future__ import annotations`: FastAPI could not resolve what the endpoints' annotations name.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Response
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from fastapi_dedup import (
    Dedup,
    Deduplicated,
    DedupMiddleware,
    FingerprintMismatchError,
    StoreUnavailableError,
)
from fastapi_dedup.http.dependency import request_session
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.handler import Result
from tests.http.world import KEY, Order, Statements, add, client

DOORS = ("http", "own session", "message")
"""A route on `RequestSession`, a route on a session dependency of the app's, and a message handler."""

SCOPE = "orders"
"""The scope of every endpoint here, unless its options say otherwise."""

Deliver = Callable[[str, str], Awaitable[str]]
Mishap = Callable[[AsyncSession], Awaitable[int | None]]


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Queries(Statements):
    """What an engine was asked for while this was listening: statements, and connections from its pool."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine)
        event.listen(engine.sync_engine, "checkout", lambda *_: self.append("a connection"))


@asynccontextmanager
async def undone(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Yield a session whose every COMMIT is undone in the end, as the fixtures of many test suites do."""
    async with engine.connect() as connection, connection.begin() as transaction:
        async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        await transaction.rollback()


class Endpoint:
    """An endpoint behind some door.

    Attributes:
        runs: How often the handler was entered.
        mishaps: What the next runs do beside their work; a status that one returns is the response's.
        works: Whether the handler writes an order; without, it needs no database.
    """

    def __init__(self, *, works: bool = True) -> None:
        self.runs = 0
        self.mishaps: list[Mishap] = []
        self.works = works
        self._door: Deliver

    async def deliver(self, logical_id: str, sku: str = "tea") -> str:
        """Deliver an order, and return "ran", "failed", or the kind of the refusal."""
        return await self._door(logical_id, sku)

    def delivering(self, logical_id: str, sku: str = "tea") -> asyncio.Task[str]:
        """Return a delivery that is on its way."""
        coroutine: Coroutine[Any, Any, str] = self.deliver(logical_id, sku)
        return asyncio.create_task(coroutine)

    def gate(self) -> "Gate":
        """Let the next run wait at a gate, after its work."""
        gate = Gate()
        self.mishaps.append(gate.wait)
        return gate

    async def handle(self, session: AsyncSession, sku: str) -> int | None:
        """Do the work, and the next mishap."""
        self.runs += 1
        if self.works:
            await add(session, sku)
        return await self.mishaps.pop(0)(session) if self.mishaps else None


class Gate:
    """Where a run waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()

    def open(self) -> None:
        """Let the run go on."""
        self._opened.set()

    async def wait(self, _: object = None) -> None:
        """Wait until it is opened."""
        self.reached.set()
        await self._opened.wait()


@asynccontextmanager
async def endpoint(
    door: str, dedup: Dedup, *, works: bool = True, policy: Deduplicated | None = None, **options: Any
) -> AsyncIterator[Endpoint]:
    """Yield an endpoint behind a door, with a policy of these options or with the one that is given."""
    made = Endpoint(works=works)
    options = {"fingerprint": True, "scope": SCOPE, **options}
    sessions = async_sessionmaker(dedup.engine, expire_on_commit=False)
    if door == "message":
        made._door = _message_door(made, dedup, policy or Deduplicated("header", KEY, **options))
        yield made
        return

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session
            await session.commit()

    source = request_session if door == "http" else get_session
    if door == "own session":
        options["session"] = get_session
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup, header=None)
    policy = policy or Deduplicated("header", KEY, **options)

    @app.post("/orders", status_code=201, dependencies=[Depends(policy)])
    async def create(
        order: Order, response: Response, session: Annotated[AsyncSession, Depends(source)]
    ) -> None:
        status = await made.handle(session, order.sku)
        if status is not None:
            response.status_code = status

    async with client(app) as speaking:

        async def post(logical_id: str, sku: str) -> str:
            response = await speaking.post("/orders", json={"sku": sku}, headers={KEY: logical_id})
            if response.headers.get("content-type") == "application/problem+json":
                return str(response.json()["type"]).partition("#")[2]
            return "ran" if response.status_code == 201 else "failed"

        made._door = post
        yield made


def _message_door(made: Endpoint, dedup: Dedup, policy: Deduplicated) -> Deliver:
    @dedup.handler(policy)
    async def on_order(message: dict[str, str], session: AsyncSession) -> None:
        await made.handle(session, message["sku"])

    async def send(logical_id: str, sku: str) -> str:
        try:
            result = await on_order(Envelope({"sku": sku}, {KEY: logical_id}))
        except FingerprintMismatchError:
            return "fingerprint-mismatch"
        except StoreUnavailableError:
            return "store-unavailable"
        except Exception:  # noqa: BLE001 - whatever the handler raised
            return "failed"
        return {Result.HANDLED: "ran", Result.DUPLICATE: "duplicate", Result.IN_FLIGHT: "in-flight"}[result]

    return send
