"""Success is told only after COMMIT."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, OWN, Order, World, add, client, session_of


@pytest.fixture
async def strict(world: World) -> World:
    """A world whose table `lines` has a constraint that is looked at by COMMIT only."""
    if world.engine.dialect.name == "sqlite":

        @event.listens_for(world.engine.sync_engine, "connect")
        def _(connection: Any, _record: object) -> None:
            connection.execute("pragma foreign_keys = on")

        await world.engine.dispose()
    async with world.engine.begin() as connection:
        await connection.execute(text("drop table if exists lines"))
        await connection.execute(text("drop table if exists parents"))
        await connection.execute(text("create table parents (id integer primary key)"))
        await connection.execute(
            text("create table lines (parent integer references parents (id) deferrable initially deferred)")
        )
    return world


async def add_line(session: AsyncSession, parent: int) -> None:
    await session.execute(text("insert into lines (parent) values (:parent)"), {"parent": parent})


def apps_session(world: World, scope: Any, *, commits: str) -> Any:
    """Return the app's session dependency: the session is committed at its exit, or by the handler itself."""

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            try:
                yield session
                if commits == "dependency":
                    await session.commit()
            except BaseException:
                await session.rollback()  # on SQLite, closing is not enough after a failed COMMIT
                raise

    return Depends(get_session, scope=scope)


SESSIONS: dict[str, Callable[[World], tuple[Any, Any]]] = {
    "RequestSession": lambda _: (OWN, None),
    "function-scoped": lambda world: (apps_session(world, "function", commits="dependency"), ...),
    "request-scoped": lambda world: (apps_session(world, "request", commits="dependency"), ...),
    "committed in the handler": lambda world: (apps_session(world, None, commits="handler"), ...),
}


def app_of(world: World, kind: str) -> FastAPI:
    depends, given = SESSIONS[kind](world)
    app = world.app()

    @app.post("/lines/{parent}", dependencies=[Depends(Deduplicated(session=depends if given else None))])
    async def create(parent: int, session: Annotated[AsyncSession, depends]) -> dict[str, int]:
        await add_line(session, parent)
        if kind == "committed in the handler":
            await session.commit()
        return {"parent": parent}

    return app


@pytest.mark.parametrize("kind", SESSIONS)
async def test_a_commit_that_fails_is_never_told_as_a_success(strict: World, kind: str) -> None:
    # case A2
    async with client(app_of(strict, kind)) as c:
        for _ in range(2):
            answer = await c.post("/lines/1", headers={KEY: "k"})
            assert answer.status_code == 500
            assert answer.text == "Internal Server Error"
            assert await strict.ids() == []
        async with strict.engine.begin() as connection:
            await connection.execute(text("insert into parents (id) values (1)"))
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 409
    assert await strict.column("select parent from lines") == [1]
    assert await strict.ids() == ["k"]


@pytest.mark.parametrize(
    ("kind", "handled"), [*((kind, False) for kind in SESSIONS), ("RequestSession", True)]
)
async def test_a_failed_commit_reaches_the_server_as_the_database_raised_it(
    strict: World, kind: str, handled: bool
) -> None:
    # DESIGN.md §4.8: the app's constraint errors stay the app's.
    async def ignore(_: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    app = app_of(strict, kind)
    if handled:  # then Starlette raises a RuntimeError of its own instead

        @app.exception_handler(IntegrityError)
        async def handle(_: Request, __: Exception) -> Response:
            return JSONResponse({"mine": True}, 409)

    headers = [(b"idempotency-key", b"k")]
    scope = {"type": "http", "method": "POST", "path": "/lines/1", "headers": headers, "query_string": b""}
    async with client(app):
        with pytest.raises(IntegrityError):
            await app(scope, receive, ignore)


async def test_a_handler_of_the_apps_own_does_not_hide_a_failed_commit(strict: World) -> None:
    # Starlette thinks that the response has started, and answers by raising RuntimeError.
    app = app_of(strict, "RequestSession")

    @app.exception_handler(IntegrityError)
    async def handle(_: Request, __: Exception) -> Response:
        return JSONResponse({"mine": True}, 409)

    async with client(app) as c:
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 500
        assert await strict.ids() == []


@pytest.mark.parametrize("kind", SESSIONS)
@pytest.mark.parametrize("side", ["inside", "outside"])
async def test_a_commit_that_fails_under_a_base_http_middleware_is_no_success(
    strict: World, kind: str, side: str
) -> None:
    depends, given = SESSIONS[kind](strict)
    app = FastAPI()
    if side == "outside":
        app.add_middleware(DedupMiddleware, dedup=strict.dedup)

    @app.middleware("http")
    async def through(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        return await call_next(request)

    if side == "inside":
        app.add_middleware(DedupMiddleware, dedup=strict.dedup)

    @app.post("/lines/{parent}", dependencies=[Depends(Deduplicated(session=depends if given else None))])
    async def create(parent: int, session: Annotated[AsyncSession, depends]) -> None:
        await add_line(session, parent)
        if kind == "committed in the handler":
            await session.commit()

    async with client(app) as c:
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 500
        assert await strict.ids() == []
        async with strict.engine.begin() as connection:
            await connection.execute(text("insert into parents (id) values (1)"))
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/lines/1", headers={KEY: "k"})).status_code == 409


class Onlooker:
    """Notes what the database holds at the moment that the response leaves."""

    def __init__(self, app: ASGIApp, world: World) -> None:
        self.app = app
        self.world = world
        self.seen: list[tuple[list[str], list[str]]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def look(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.seen.append((await self.world.orders(), await self.world.ids()))
            await send(message)

        await self.app(scope, receive, look)


@pytest.mark.parametrize("kind", SESSIONS)
async def test_when_the_response_leaves_row_and_claim_are_there_for_everyone(world: World, kind: str) -> None:
    # case A2
    depends, given = SESSIONS[kind](world)
    app = world.app()

    @app.post(
        "/orders", status_code=201, dependencies=[Depends(Deduplicated(session=depends if given else None))]
    )
    async def create(order: Order, session: Annotated[AsyncSession, depends]) -> None:
        await add(session, order.sku)
        if kind == "committed in the handler":
            await session.commit()

    onlooker = Onlooker(app, world)
    async with client(onlooker) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 201
    assert onlooker.seen == [(["a"], ["k"])]


async def test_before_a_refusal_for_failure_leaves_the_id_is_free(world: World) -> None:
    # Wolverine #4547: released after the response was flushed, a prompt retry was still refused.
    get_session = session_of(world)
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(order: Order, session: Annotated[AsyncSession, Depends(get_session)]) -> Response:
        await add(session, order.sku)
        return JSONResponse({}, 404)

    onlooker = Onlooker(app, world)
    async with client(onlooker) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 404
    assert [ids for _, ids in onlooker.seen] == [[]]


async def test_a_transaction_that_the_database_has_aborted_is_never_told_as_a_success(
    postgres: World,
) -> None:
    # PostgreSQL answers COMMIT of an aborted transaction with ROLLBACK, and no driver calls that an error.
    app = postgres.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")
        with pytest.raises(IntegrityError):
            await session.execute(text("insert into orders (sku) values (null)"))

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
        assert (await postgres.orders(), await postgres.ids()) == ([], [])
        assert answer.status_code == 500
