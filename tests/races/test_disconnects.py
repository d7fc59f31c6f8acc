"""A client hangs up, a request is cancelled, a server is told to stop: no id is poisoned, nothing leaks."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.apps.forked import Forked
from tests.apps.gate import gate
from tests.apps.orders import Settings, checked_out, serve
from tests.databases import BACKENDS, orders_table, url_of
from tests.live import Caller, Reply, call, until
from tests.races.shop import Ledger, Served, served

PATHS = ("/orders", "/committed-by-handler", "/committed-by-dependency")
PLACES = ("inside", "outside")
How = Literal["asyncio", "anyio"]
HOW: tuple[How, ...] = ("asyncio", "anyio")


class CancelOnDisconnect:
    """Cancels the app when its client hangs up, by a task's `cancel()` or by an anyio cancel scope."""

    def __init__(self, app: ASGIApp, how: How) -> None:
        self.app = app
        self.run = self._in_a_task if how == "asyncio" else self._in_a_scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.run(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _in_a_task(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: asyncio.Queue[Message] = asyncio.Queue()

        async def run() -> None:
            await self.app(scope, messages.get, send)

        running = asyncio.create_task(run())
        listening = asyncio.create_task(_listen(receive, messages.put))
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            listening.cancel()
            await running
        else:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def _in_a_scope(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: asyncio.Queue[Message] = asyncio.Queue()
        raised: Exception | None = None

        async def cancel_after_the_last() -> None:
            await _listen(receive, messages.put)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel_after_the_last)
            try:
                await self.app(scope, messages.get, send)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the group that would wrap it
                raised = error
            group.cancel_scope.cancel()
        if raised is not None:
            raise raised


async def _listen(receive: Receive, put: Callable[[Message], Awaitable[None]]) -> None:
    """Pass on what the client sends, until it has hung up."""
    while True:
        message = await receive()
        await put(message)
        if message["type"] == "http.disconnect":
            return


class Passing(BaseHTTPMiddleware):
    """What most apps have of their own: it passes requests on."""

    async def dispatch(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        return await call_next(request)


class Impatient(BaseHTTPMiddleware):
    """Answers 504 when the app takes too long."""

    async def dispatch(
        self, request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            async with asyncio.timeout(0.2):
                return await call_next(request)
        except TimeoutError:
            return JSONResponse({"detail": "it took too long"}, status_code=504)


CANCELLING = [
    pytest.param({place: Middleware(CancelOnDisconnect, how=how)}, id=f"{how}-{place}")
    for place in PLACES
    for how in HOW
]
PASSING = [pytest.param({place: Middleware(Passing)}, id=place) for place in PLACES]


def order(shop: Served, path: str) -> asyncio.Task[Reply]:
    return asyncio.create_task(call(shop.url, "POST", path, {"sku": "K"}))


async def hang_up_mid_handler(shop: Served, path: str) -> Any:
    """Send an order, and hang up when its handler is at the gate; return the handler that waits there."""
    caller = await Caller.connect(shop.url)
    await caller.send("POST", path, {"sku": "K"})
    at_work = await shop.gate.visitor()
    caller.hang_up()
    return at_work


async def no_connection_is_out(shop: Served) -> None:
    async def all_are_in() -> bool:
        return checked_out(shop.shop.engine) == 0

    await until(all_are_in)


@asynccontextmanager
async def noticing_dead_clients(database: str) -> AsyncIterator[None]:
    """Have PostgreSQL look during a query whether its client is still there.

    Under anyio's cancellation, which comes again and again, asyncpg hangs up without having asked the server
    to stop. The server goes on with the query, and keeps every lock until then.
    """
    name = make_url(database).database
    engine = create_async_engine(database)
    try:
        async with engine.begin() as connection:
            await connection.execute(
                text(f"alter database {name} set client_connection_check_interval = '50ms'")
            )
        yield
        async with engine.begin() as connection:
            await connection.execute(text(f"alter database {name} reset client_connection_check_interval"))
    finally:
        await engine.dispose()


async def expect_a_free_id_and_a_clean_pool(shop: Served, path: str) -> None:
    await no_connection_is_out(shop)
    await until(shop.ledger.is_quiet)
    assert await shop.ledger.holds("K") == (0, 0)
    assert (await call(shop.url, "GET", "/ping")).status == 200

    again = order(shop, path)
    await (await shop.gate.visitor()).answer("go")
    assert (await again).status == 201
    assert (await order(shop, path)).problem == "duplicate"
    assert await shop.ledger.holds("K") == (1, 1)


# case B3
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cancelling", CANCELLING)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_disconnect_that_cancels_the_handler_frees_the_id_and_the_connection(
    backend: str, cancelling: dict[str, Any], path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1, **cancelling) as shop:
        at_work = await hang_up_mid_handler(shop, path)
        await at_work.gone()
        await expect_a_free_id_and_a_clean_pool(shop, path)


# case B3, F1
@pytest.mark.parametrize("cancelling", CANCELLING)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_when_the_first_is_cancelled_exactly_one_of_its_waiters_runs(
    backend: str, cancelling: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), **cancelling) as shop:
        caller = await Caller.connect(shop.url)
        await caller.send("POST", "/waiting", {"sku": "K"})
        at_work = await shop.gate.visitor()
        waiters = [order(shop, "/waiting") for _ in range(10)]

        async def all_wait() -> bool:
            return shop.shop.waiting == len(waiters)

        await until(all_wait)
        caller.hang_up()
        await at_work.gone()
        await (await shop.gate.visitor()).answer("go")

        answers = Counter(reply.problem or str(reply.status) for reply in await asyncio.gather(*waiters))
        assert answers == {"201": 1, "duplicate": 9}
        assert await shop.ledger.holds("K") == (1, 1)
        assert shop.gate.visits == 2


# case B3
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cancelling", CANCELLING)
@pytest.mark.parametrize("backend", ["asyncpg", "psycopg"])
async def test_a_disconnect_that_cancels_a_running_query_frees_the_id_and_the_connection(
    backend: str, cancelling: dict[str, Any], path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with noticing_dead_clients(database), served(database, pool_size=1, **cancelling) as shop:
        caller = await Caller.connect(shop.url)
        await caller.send("POST", path, {"sku": "K"})
        await (await shop.gate.visitor()).answer("query for ever")

        async def queries_running() -> int:
            query = (
                "select count(*) from pg_stat_activity where state = 'active' and query like '%pg_sleep(600)'"
            )
            async with shop.ledger.engine.connect() as connection:
                return int(await connection.scalar(text(f"{query} and datname = current_database()")) or 0)

        async def it_runs() -> bool:
            return await queries_running() == 1

        async def it_is_over() -> bool:
            return await queries_running() == 0

        await until(it_runs)
        caller.hang_up()
        await no_connection_is_out(shop)
        await until(it_is_over)
        await expect_a_free_id_and_a_clean_pool(shop, path)


# case B3
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_handler_that_goes_on_without_its_client_does_its_work_and_the_retry_is_a_duplicate(
    backend: str, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1) as shop:
        at_work = await hang_up_mid_handler(shop, path)
        await at_work.answer("go")
        await no_connection_is_out(shop)

        assert await shop.ledger.holds("K") == (1, 1)
        assert (await order(shop, path)).problem == "duplicate"
        assert shop.gate.visits == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_handler_that_fails_without_its_client_frees_the_id(
    backend: str, path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1) as shop:
        at_work = await hang_up_mid_handler(shop, path)
        await at_work.answer("raise")
        await expect_a_free_id_and_a_clean_pool(shop, path)


# case B1
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("passing", PASSING)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_base_http_middleware_changes_no_outcome(
    backend: str, passing: dict[str, Any], path: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1, **passing) as shop:
        left = 0
        for verdict in ("raise", "time out", "refuse"):
            failing = order(shop, path)
            await (await shop.gate.visitor()).answer(verdict)
            assert (await failing).status in {500, 503}
            # Where a dependency commits whatever was returned, the work of "refuse" stays. Its id is free.
            left += (verdict, path) == ("refuse", "/committed-by-dependency")
            assert await shop.ledger.holds("K") == (left, 0)

        working = order(shop, path)
        await (await shop.gate.visitor()).answer("go")
        assert (await working).status == 201
        assert (await order(shop, path)).problem == "duplicate"
        assert await shop.ledger.holds("K") == (left + 1, 1)


# case B3
@pytest.mark.parametrize("passing", PASSING)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_disconnect_under_base_http_middleware_leaves_one_row_and_one_claim(
    backend: str, passing: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1, **passing) as shop:
        at_work = await hang_up_mid_handler(shop, "/orders")
        await at_work.answer("go")
        await no_connection_is_out(shop)

        assert await shop.ledger.holds("K") == (1, 1)
        assert (await order(shop, "/orders")).problem == "duplicate"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_timeout_between_handler_and_middleware_undoes_what_the_handler_goes_on_to_do(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1, inside=Middleware(Impatient)) as shop:
        late = order(shop, "/orders")
        at_work = await shop.gate.visitor()
        assert (await late).status == 504
        await at_work.answer("go")  # too late, the client has been told
        await expect_a_free_id_and_a_clean_pool(shop, "/orders")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_timeout_around_the_middleware_leaves_claim_and_work_together(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with served(url_of(backend, request, tmp_path), pool_size=1, outside=Middleware(Impatient)) as shop:
        late = order(shop, "/orders")
        at_work = await shop.gate.visitor()
        assert (await late).status == 504
        await at_work.answer("go")  # nobody listens, and yet the work is done
        await no_connection_is_out(shop)

        assert await shop.ledger.holds("K") == (1, 1)
        assert (await order(shop, "/orders")).problem == "duplicate"


@pytest.mark.parametrize("patient", [True, False])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_server_told_to_stop_mid_request_leaves_claim_and_work_together(
    backend: str, path: str, patient: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with gate() as opened, orders_table(database) as engine:
        ledger = Ledger(engine=engine)
        settings = Settings(url=database, pool_size=1, gate=opened.port)
        server = Forked(serve, settings, timeout_graceful_shutdown=None if patient else 0)
        try:
            server.start()
            idle = await Caller.connect(server.url)
            assert (await idle.call("GET", "/ping")).status == 200
            working = asyncio.create_task(call(server.url, "POST", path, {"sku": "K"}))
            at_work = await opened.visitor()
            server.kill(signal.SIGTERM)
            with pytest.raises(ConnectionError):
                await idle.reply()  # idle connections are closed when the shutdown has begun
            idle.hang_up()
            if patient:
                await at_work.answer("go")
                assert (await working).status == 201
            else:
                await at_work.gone()
                with suppress(ConnectionError):  # it is either, as the socket is closed before or after
                    assert (await working).status == 500
            assert await server.ended() in {0, -signal.SIGTERM}

            done = 1 if patient else 0
            assert await ledger.holds("K") == (done, done)
            server.start()
            again = asyncio.create_task(call(server.url, "POST", path, {"sku": "K"}))
            if not patient:
                await (await opened.visitor()).answer("go")
            reply = await again
            assert (reply.problem or reply.status) == ("duplicate" if patient else 201)
            assert await ledger.holds("K") == (1, 1)
        finally:
            server.close()
