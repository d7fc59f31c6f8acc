"""The session of the claim is the session of the handler, however the app gives it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any

import pytest
from fastapi import Depends, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fastapi_dedup import Claim, Dedup, Deduplicated, DuplicateError, RequestSession
from tests.databases import orders_table
from tests.http.world import KEY, World, add, client, problem, session_of

FORMS = [
    "callable",
    "Depends",
    "Depends, function-scoped",
    "Annotated",
    "Annotated, function-scoped",
    "RequestSession",
]


def form_of(form: str, world: World) -> tuple[Any, Any]:
    """Return what the policy is told of the session, and what the handler depends on."""
    get_session = session_of(world)
    depends = Depends(get_session, scope="function" if form.endswith("function-scoped") else None)
    if form == "RequestSession":
        return RequestSession, RequestSession
    given: Any = get_session if form == "callable" else depends
    if form.startswith("Annotated"):
        given = Annotated[AsyncSession, depends]
    return given, Annotated[AsyncSession, depends]


@pytest.mark.parametrize("form", FORMS)
async def test_the_claim_rides_the_session_of_the_handler(world: World, form: str) -> None:
    given, alias = form_of(form, world)
    app = world.app()

    @app.post("/orders/{sku}")
    async def create(
        sku: str,
        session: alias,  # type: ignore[valid-type]
        claim: Annotated[Claim, Depends(Deduplicated(session=given))],
    ) -> None:
        assert claim.session is session
        assert await session.scalar(text("select count(*) from dedup_claims")) == 1
        await add(session, sku)
        if sku == "bad":
            raise HTTPException(400)

    async with client(app) as c:
        assert (await c.post("/orders/bad", headers={KEY: "k"})).status_code == 400
        assert (await world.orders(), await world.ids()) == ([], [])
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["good"], ["k"])


class Database:
    """What many apps have: a class whose method is the session dependency."""

    def __init__(self, world: World) -> None:
        self.sessions = world.sessions

    async def session(self) -> AsyncIterator[AsyncSession]:
        async with self.sessions() as session, session.begin():
            yield session

    async def __call__(self) -> AsyncIterator[AsyncSession]:
        async with self.sessions() as session, session.begin():
            yield session


@pytest.mark.parametrize("form", ["bound method", "callable object"])
async def test_a_session_dependency_may_be_a_bound_method_or_an_object(
    sqlite: World, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(sqlite)
    app = sqlite.app()
    given = database.session if form == "bound method" else database
    again = database.session if form == "bound method" else database

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=given))])
    async def create(session: Annotated[AsyncSession, Depends(again)]) -> None:
        assert await session.scalar(text("select count(*) from dedup_claims")) == 1

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_session_that_is_begun_before_the_claim_is_ridden(world: World) -> None:
    # case F8
    # Authentication reads in the session, and the claim comes after that.
    get_session = session_of(world)
    app = world.app()

    async def user(session: Annotated[AsyncSession, Depends(get_session)]) -> Any:
        return await session.scalar(text("select count(*) from orders"))

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session)), Depends(user)])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "a")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])


@pytest.mark.parametrize("same", [False, True], ids=["distinct keys", "one key"])
async def test_many_requests_at_once_that_read_before_they_claim_get_through(
    world: World, *, same: bool
) -> None:
    # case F8
    get_session = session_of(world)
    app = world.app()

    async def user(session: Annotated[AsyncSession, Depends(get_session)]) -> Any:
        return await session.scalar(text("select count(*) from orders"))

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session)), Depends(user)])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "a")

    async with client(app) as c:
        count = 20 if world.engine.dialect.name == "sqlite" else 5  # a server is shared with other runs
        keys = ["k" if same else f"{n}" for n in range(count)]
        answers = await asyncio.gather(*[c.post("/orders", headers={KEY: key}) for key in keys])
    statuses = sorted(each.status_code for each in answers)
    assert statuses == ([200] + [409] * (count - 1) if same else [200] * count)
    assert len(await world.orders()) == len(await world.ids()) == len({*keys})


async def test_a_refused_duplicate_leaves_the_apps_transaction_usable(world: World) -> None:
    # case F5
    app = world.app()

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            await session.execute(text("insert into orders (sku) values ('seen before the claim')"))
            try:
                yield session
            except DuplicateError:
                await session.execute(text("insert into orders (sku) values ('audit')"))
                raise
            finally:
                await session.commit()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "work")

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        again = await c.post("/orders", headers={KEY: "k"})
        assert (again.status_code, problem(again)) == (409, "duplicate")
    assert await world.orders() == ["seen before the claim", "work", "seen before the claim", "audit"]
    assert await world.ids() == ["k"]


async def test_a_tolerant_handler_goes_on_after_a_duplicate_of_its_own(world: World) -> None:
    # case F5
    app = world.app()

    @app.post("/orders")
    async def create(session: RequestSession) -> list[Any]:
        try:
            async with world.dedup.claim("part", scope="parts", session=session):
                await add(session, "part")
        except DuplicateError:
            await add(session, "again")
        return [*await session.scalars(text("select sku from orders order by id"))]

    async with client(app) as c:
        assert (await c.post("/orders")).json() == ["part"]
        assert (await c.post("/orders")).json() == ["part", "again"]
    assert await world.orders() == ["part", "again"]


async def test_dependency_overrides_still_work(world: World) -> None:
    # case F5
    async def get_session() -> AsyncSession:
        msg = "the production database, in a test"
        raise AssertionError(msg)

    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        assert await session.scalar(text("select count(*) from dedup_claims")) == 1
        await add(session, "a")

    app.dependency_overrides[get_session] = session_of(world)
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    assert await world.orders() == ["a"]


async def test_a_policy_itself_may_be_overridden(sqlite: World) -> None:
    policy = Deduplicated()
    app = sqlite.app(header=None)

    @app.post("/orders", dependencies=[Depends(policy)])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    app.dependency_overrides[policy] = lambda: None
    async with client(app) as c:
        for _ in range(2):
            assert (await c.post("/orders")).status_code == 200
    assert (await sqlite.orders(), await sqlite.ids()) == (["a", "a"], [])


async def test_an_override_of_something_else_changes_nothing(sqlite: World) -> None:
    async def setting() -> str:
        return "real"

    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession, value: Annotated[str, Depends(setting)]) -> str:
        await add(session, value)
        return value

    app.dependency_overrides[setting] = lambda: "fake"
    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).json() == "fake"
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409


WRONG = {
    "a sync Session of an async engine": "give the claim its AsyncSession",
    "a sync connection of an async engine": "give the claim its AsyncConnection",
    "None": "a claim cannot ride a builtins.NoneType: session= must give an AsyncSession or Session",
    "something else": "a claim cannot ride a builtins.object: session= must give an AsyncSession or Session",
    "a connection that is not open": "the AsyncConnection is not open",
    "one session per thread": "give it a scopefunc",
}


@pytest.mark.parametrize("kind", WRONG)
async def test_what_no_claim_can_ride_is_refused_loudly(postgres: World, kind: str) -> None:
    async def give() -> AsyncIterator[Any]:
        async with postgres.engine.connect() as connection:
            yield {
                "a sync Session of an async engine": Session(connection.sync_connection),
                "a sync connection of an async engine": connection.sync_connection,
                "a connection that is not open": postgres.engine.connect(),
                "one session per thread": scoped_session(sessionmaker(postgres.engine.sync_engine)),
                "None": None,
                "something else": object(),
            }[kind]

    app = postgres.app()
    ran: list[int] = []

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=give))])
    async def create(session: Annotated[Any, Depends(give)]) -> None:
        ran.append(id(session))

    @app.exception_handler(500)
    async def show(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 500)

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
    assert (answer.status_code, ran) == (500, [])
    assert WRONG[kind] in answer.text


async def test_a_session_on_another_database_than_the_runtimes_is_refused(
    sqlite: World, tmp_path: Any
) -> None:
    async with orders_table(f"sqlite+aiosqlite:///{tmp_path}/other.db") as engine:
        other = World(engine, sqlite.dedup)
        get_session = session_of(other)
        app = sqlite.app()

        @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
        async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
            await add(session, "a")

        @app.exception_handler(500)
        async def show(_: Request, error: Exception) -> Any:
            return PlainTextResponse(str(error), 500)

        async with client(app) as c:
            answer = await c.post("/orders", headers={KEY: "k"})
        assert answer.status_code == 500
        assert "other.db" in answer.text
        assert "give Dedup(...) the handler's engine or sessionmaker" in answer.text
        assert await other.orders() == []


async def test_a_request_never_needs_a_second_connection(world: World) -> None:
    # DESIGN.md §5: one request, one connection. With a pool of one, a second one would never come.
    engine = create_async_engine(world.engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    narrow = World(engine, Dedup(engine, reap_every=None))
    get_session = session_of(narrow)
    app = narrow.app()
    for path, given in {"/own": None, "/theirs": get_session}.items():
        depends: Any = RequestSession if given is None else Annotated[AsyncSession, Depends(given)]
        policies = [Deduplicated(session=given), Deduplicated("query", "n", session=given)]

        @app.post(path, dependencies=[Depends(each) for each in policies])
        async def create(session: depends, fail: str = "") -> None:
            await add(session, "a")
            if fail:
                await session.commit()
                raise HTTPException(400)

    try:
        async with client(app) as c:
            for path in ("/own", "/theirs"):
                assert (await c.post(f"{path}?n=0&fail=1", headers={KEY: "k"})).status_code == 400
                assert (await c.post(f"{path}?n=1", headers={KEY: "k"})).status_code == 200
                assert (await c.post(f"{path}?n=1", headers={KEY: "k"})).status_code == 409
    finally:
        await engine.dispose()
