"""A request is cancelled at every point where it waits for something: claim and work never part."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from starlette.types import Message

from tests.apps.orders import Settings, Shop, checked_out, create_app
from tests.databases import BACKENDS, orders_table, url_of
from tests.live import until
from tests.races.shop import Ledger

When = Literal["while it waits", "when the wait is over"]
Cancel = Callable[[], object]


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

    def __init__(self, app: Any) -> None:
        self._app = app

    async def order(self, path: str, sku: str, told: list[int]) -> None:
        """Send an order, and note the status that the client is told, if it is."""
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


HOW = {"asyncio": cancelled_in_a_task, "anyio": cancelled_in_a_scope}


# case B3, DESIGN.md §4.2 and §4.3
@pytest.mark.parametrize("path", ["/orders", "/committed-by-handler", "/committed-by-dependency"])
@pytest.mark.parametrize("when", ["while it waits", "when the wait is over"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_claim_and_work_stay_together_wherever_the_request_is_cancelled(
    backend: str, how: str, when: When, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with orders_table(database) as engine:
        ledger = Ledger(engine=engine)
        app = create_app(Settings(url=database, pool_size=1))
        shop: Shop = app.state.shop
        async with shop.dedup:
            client = Client(app)

            async def no_connection_is_out() -> bool:
                return checked_out(shop.engine) == 0

            point, points = 0, 1
            while point < points:
                sku = f"K{point}"
                told: list[int] = []
                points = await HOW[how](client.order(path, sku, told), point, when)
                await until(no_connection_is_out)
                gc.collect()

                rows, claims = await ledger.rows(sku), await ledger.claims(sku)
                where = f"{told}, (rows, claims) = {(rows, claims)}, cancelled at point {point} of {points}"
                if path == "/orders":
                    assert rows == claims, where
                else:  # the handler committed, and failed by being cancelled: its id was given back
                    assert claims <= rows, where
                if 201 in told:
                    assert (rows, claims) == (1, 1), where

                await client.order(path, sku, told)
                assert told[-1] == (409 if claims else 201), where
                point += 1
        await shop.engine.dispose()
        print(f"{backend} {how} {path}: cancelled at {point} points {when}")  # noqa: T201
        assert point > 5
