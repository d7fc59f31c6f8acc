"""A request is cancelled at every point where it waits for something: claim and work never part."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from starlette.types import Message

from fastapi_dedup import Dedup, DuplicateError
from tests.apps.orders import Settings, Shop, checked_out, create_app
from tests.databases import BACKENDS, orders_table, url_of
from tests.live import until
from tests.races.shop import Ledger

When = Literal["while it waits", "when the wait is over"]
Cancel = Callable[[], object]


RIDING = ("/orders", "dedup.claim")
BORROWING = ("/committed-by-handler", "/committed-by-dependency")


class CancelledAt:
    """Awaits a coroutine, and has it cancelled at one of the points where it waits.

    Args:
        coroutine: What to await.
        point: At which of its waits, counted from 0.
        when: Before what it waits for has happened, or just after: then the outcome is there, and unseen.
        cancel: Cancels the task that awaits this.

    Attributes:
        points: At how many points it has waited.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None], point: int, when: When, cancel: Cancel) -> None:
        self.points = 0
        self._coroutine = coroutine
        self._point = point
        self._when = when
        self._cancel = cancel

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._coroutine.__await__()
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                waits_for = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration:
                return
            if self.points == self._point:
                if self._when == "while it waits" or waits_for is None:
                    asyncio.get_running_loop().call_soon(self._cancel)
                else:
                    waits_for.add_done_callback(lambda _: self._cancel())
            self.points += 1
            try:
                answer, error = (yield waits_for), None
            except BaseException as thrown:  # noqa: BLE001 - passed into the coroutine
                error = thrown


class Client:
    """Sends orders into the app without a server in between, which would be one more thing to cancel."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._dedup: Dedup = app.state.shop.dedup

    async def order(self, door: str, sku: str, told: list[int]) -> None:
        """Send an order through a door, and note the status that the client is told, if it is."""
        if door != "dedup.claim":
            await self._post(door, sku, told)
            return
        try:
            async with self._dedup.claim(sku, scope="orders") as claim:
                await claim.session.execute(text("insert into orders (sku) values (:sku)"), {"sku": sku})
        except DuplicateError:
            told.append(409)
        else:
            told.append(201)

    async def _post(self, path: str, sku: str, told: list[int]) -> None:
        body = b'{"sku": "' + sku.encode() + b'"}'
        asked = False

        async def receive() -> Message:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.append(message["status"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await self._app(scope, receive, send)


async def cancelled_in_a_task(coroutine: Coroutine[Any, Any, None], point: int, when: When) -> int:
    async def run() -> int:
        task = asyncio.current_task()
        assert task is not None
        stepping = CancelledAt(coroutine, point, when, task.cancel)
        with suppress(asyncio.CancelledError):
            await stepping
        return stepping.points

    return await asyncio.create_task(run())


async def cancelled_in_a_scope(coroutine: Coroutine[Any, Any, None], point: int, when: When) -> int:
    with anyio.CancelScope() as scope:
        stepping = CancelledAt(coroutine, point, when, scope.cancel)
        await stepping
    return stepping.points


How = Callable[[Coroutine[Any, Any, None], int, When], Awaitable[int]]
WHEN: tuple[When, ...] = ("while it waits", "when the wait is over")
WAYS = [
    pytest.param((how, when), id=f"{name} {when}")
    for name, how in {"asyncio": cancelled_in_a_task, "anyio": cancelled_in_a_scope}.items()
    for when in WHEN
]


@asynccontextmanager
async def cheap_collections() -> AsyncIterator[None]:
    """Keep the garbage collector from looking at what was there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# case B3, DESIGN.md §4.2 and §4.3
@pytest.mark.parametrize("door", [*RIDING, *BORROWING])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", [*BACKENDS, "asyncpg without a pool"])
async def test_claim_and_work_stay_together_wherever_the_request_is_cancelled(
    backend: str, way: tuple[How, When], door: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    driver, _, unpooled = backend.partition(" ")
    database = url_of(driver, request, tmp_path)
    cancelled, when = way
    async with cheap_collections(), orders_table(database) as engine:
        ledger = Ledger(engine=engine)
        app = create_app(Settings(url=database, pool_size=-1 if unpooled else 1))
        shop: Shop = app.state.shop

        async def all_is_over() -> bool:
            return checked_out(shop.engine) == 0 and await ledger.is_quiet()

        async with shop.dedup:
            client = Client(app)
            point, points = 0, 1
            while point < points:
                sku = f"K{point}"
                told: list[int] = []
                points = await cancelled(client.order(door, sku, told), point, when)
                await until(all_is_over)

                rows, claims = await ledger.holds(sku)
                where = f"told {told}, {rows} rows, {claims} claims, cancelled at point {point} of {points}"
                if door in RIDING:
                    assert rows == claims, where
                else:  # the handler committed, and failed by being cancelled: its id was given back
                    assert claims <= rows, where
                if 201 in told:
                    assert (rows, claims) == (1, 1), where

                await client.order(door, sku, told)
                assert told[-1] == (409 if claims else 201), where
                point += 1
        await shop.engine.dispose()
        print(f"{backend} {door}: cancelled at {point} points")  # noqa: T201
        assert point > 3
