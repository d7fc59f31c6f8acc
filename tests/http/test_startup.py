"""What cannot be kept is refused at start-up, or at the first request where no lifespan comes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Security
from fastapi.security import OAuth2PasswordBearer
from pydantic import BaseModel, Field
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import StaticPool

from fastapi_dedup import ConfigurationError, Dedup, Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, OWN, Order, StartUpError, World, add, client, lifespan
from tests.servers import driver_url


async def get_session() -> AsyncIterator[AsyncSession]:
    raise NotImplementedError
    yield


class Database:
    async def session(self) -> AsyncIterator[AsyncSession]:
        raise NotImplementedError
        yield


DATABASE = Database()
PLAIN: Any = Depends(get_session)
FUNCTION: Any = Depends(get_session, scope="function")
REQUEST: Any = Depends(get_session, scope="request")
UNCACHED: Any = Depends(get_session, use_cache=False)

Build = Callable[[FastAPI], None]


async def refusal_of(world: World, build: Build) -> str:
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


def simple(policy: Any, handler: Any) -> Build:
    def build(app: FastAPI) -> None:
        @app.post("/orders", dependencies=[Depends(Deduplicated(session=policy))])
        async def create(session: Annotated[AsyncSession, handler]) -> None:
            await add(session, "a")

    return build


TWO_SESSIONS: dict[str, tuple[Any, Any, str]] = {
    "a function-scoped handler": (PLAIN, FUNCTION, 'session=Depends(get_session, scope="function")'),
    "by callable": (get_session, FUNCTION, 'session=Depends(get_session, scope="function")'),
    "by alias": (
        Annotated[AsyncSession, Depends(get_session)],
        FUNCTION,
        'session=Depends(get_session, scope="function")',
    ),
    "a function-scoped claim": (FUNCTION, PLAIN, "session=Depends(get_session)"),
    "a request-scoped handler of a function-scoped claim": (
        FUNCTION,
        REQUEST,
        'session=Depends(get_session, scope="request")',
    ),
    "an uncached handler": (PLAIN, UNCACHED, "use_cache=False"),
    "an uncached claim": (UNCACHED, PLAIN, "session=Depends(get_session)"),
}


@pytest.mark.parametrize("case", TWO_SESSIONS)
async def test_two_sessions_under_one_callable_are_refused(sqlite: World, case: str) -> None:
    policy, handler, fix = TWO_SESSIONS[case]
    message = await refusal_of(sqlite, simple(policy, handler))
    assert message.startswith("POST /orders: ")
    assert "two different sessions of get_session" in message
    assert fix in message


async def test_two_sessions_of_a_bound_method_are_refused(sqlite: World) -> None:
    build = simple(DATABASE.session, Depends(DATABASE.session, scope="function"))
    assert "two different sessions of session" in await refusal_of(sqlite, build)


async def test_two_sessions_are_found_deep_in_the_handlers_tree(sqlite: World) -> None:
    async def repository(session: Annotated[AsyncSession, FUNCTION]) -> AsyncSession:
        return session

    async def service(found: Annotated[AsyncSession, Depends(repository)]) -> AsyncSession:
        return found

    def build(app: FastAPI) -> None:
        router = APIRouter(prefix="/v1", dependencies=[Depends(Deduplicated(session=get_session))])

        @router.post("/orders")
        async def create(found: Annotated[AsyncSession, Depends(service)]) -> None:
            await add(found, "a")

        app.include_router(router, prefix="/api")

    message = await refusal_of(sqlite, build)
    assert message.startswith("POST /api/v1/orders: ")
    assert 'session=Depends(get_session, scope="function")' in message


async def test_two_sessions_are_found_in_a_mounted_app_and_below_a_deep_policy(sqlite: World) -> None:
    async def claims(_: Annotated[Any, Depends(Deduplicated(session=get_session))]) -> None:
        pass

    def build(app: FastAPI) -> None:
        inner = FastAPI()

        @inner.post("/orders", dependencies=[Depends(claims)])
        async def create(session: Annotated[AsyncSession, FUNCTION]) -> None:
            await add(session, "a")

        app.mount("/shop", inner)

    assert "POST /orders: " in await refusal_of(sqlite, build)


async def test_two_sessions_by_the_scopes_of_a_security_dependency_are_refused(sqlite: World) -> None:
    # FastAPI's cache key holds the OAuth scopes too, where a dependency's tree ends in a security scheme.
    bearer = OAuth2PasswordBearer("token", auto_error=False)

    async def session_of_user(_: Annotated[str | None, Depends(bearer)]) -> AsyncIterator[AsyncSession]:
        async with sqlite.sessions() as session, session.begin():
            yield session

    async def service(session: Annotated[AsyncSession, Depends(session_of_user)]) -> AsyncSession:
        return session

    app = sqlite.app()
    used: list[AsyncSession] = []

    @app.post("/orders")
    async def create(
        session: Annotated[AsyncSession, Security(service, scopes=["orders"])],
        claim: Annotated[Any, Depends(Deduplicated(session=session_of_user))],
    ) -> None:
        used.extend([session, claim.session])

    try:
        async with client(app) as c:
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    except StartUpError as error:
        assert "POST /orders" in str(error)  # noqa: PT017 - either is right, and only one of them at a time
    else:
        assert used[0] is used[1]


async def test_one_session_is_no_two(sqlite: World, caplog: pytest.LogCaptureFixture) -> None:
    for policy, handler in [
        (PLAIN, PLAIN),
        (get_session, PLAIN),
        (PLAIN, REQUEST),  # a generator is request-scoped by default
        (REQUEST, PLAIN),
        (FUNCTION, FUNCTION),
        (Annotated[AsyncSession, FUNCTION], FUNCTION),
        (RequestSession, OWN),
    ]:
        app = sqlite.app()
        simple(policy, handler)(app)
        async with lifespan(app):
            pass
    assert caplog.text == ""


class Item(BaseModel):
    sku: str
    code: str = Field(alias="Code")


class Basket(BaseModel):
    item: Item
    perhaps: Item | None = None
    items: list[Item] = []
    free: dict[str, Any] = {}


def with_body(model: Any, member: Any, *, required: bool = True, embed: bool = False) -> Build:
    def build(app: FastAPI) -> None:
        policy = Deduplicated("body", member, required=required)

        @app.post("/orders", dependencies=[Depends(policy)])
        async def create(body: Annotated[model, Body(embed=embed)]) -> None:
            assert body

    return build


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("model", "member"),
    [
        (Order, "skuu"),
        (Order, "Sku"),
        (Order, "order.sku"),
        (Item, "code"),
        (Basket, "item.skuu"),
        (Basket, ("item.sku", "item.code")),
        (Basket, "perhaps.skuu"),
        (Basket, "items.0.skuu"),
        (Order | None, "skuu"),
    ],
    ids=str,
)
async def test_a_mistyped_member_of_the_body_is_refused(
    sqlite: World, model: Any, member: Any, *, required: bool
) -> None:
    # case C8
    message = await refusal_of(sqlite, with_body(model, member, required=required))
    assert message.startswith("POST /orders: member=")
    assert "spelled on the wire" in message


async def test_a_mistyped_member_of_an_embedded_body_is_refused(sqlite: World) -> None:
    # case C8
    message = await refusal_of(sqlite, with_body(Order, "sku", embed=True))
    assert "member='sku'" in message
    message = await refusal_of(sqlite, with_body(Order, "body.skuu", embed=True))
    assert "member='body.skuu'" in message


async def test_a_mistyped_path_parameter_is_refused(sqlite: World) -> None:
    # case C8
    def build(app: FastAPI) -> None:
        @app.post("/orders/{order_id}", dependencies=[Depends(Deduplicated("path", "orderid"))])
        async def create(order_id: int) -> None:
            assert order_id

    message = await refusal_of(sqlite, build)
    assert "member='orderid' is not among its path parameters (order_id)" in message


@pytest.mark.parametrize(
    ("model", "member"),
    [
        (Order, "sku"),
        (Item, "Code"),
        (Basket, "item.Code"),
        (Basket, "perhaps.sku"),
        (Basket, "items.0.sku"),
        (Basket, "free.anything.goes"),
        (dict[str, Any], "anything"),
        (list[Order], "0.sku"),
        (Any, "whatever"),
    ],
    ids=str,
)
async def test_a_member_that_may_be_there_is_not_refused(sqlite: World, model: Any, member: str) -> None:
    app = sqlite.app()
    with_body(model, member)(app)
    async with lifespan(app):
        pass


async def test_a_policy_that_never_applies_to_its_route_is_refused(sqlite: World) -> None:
    def build(app: FastAPI) -> None:
        @app.put("/orders", dependencies=[Depends(Deduplicated(methods=["POST"]))])
        async def create() -> None:
            pass

    message = await refusal_of(sqlite, build)
    assert message.startswith("PUT /orders: its policy applies to POST only")
    assert "Deduplicated(methods=...)" in message


async def test_a_policy_without_the_middleware_says_what_to_add(sqlite: World) -> None:
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(session: RequestSession) -> None:
        await add(session, "a")

    @app.get("/session")
    async def read(session: RequestSession) -> None:
        assert session.is_active

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
        for send in (c.post("/orders", headers={KEY: "k"}), c.get("/session")):
            with pytest.raises(ConfigurationError, match=r"app\.add_middleware\(DedupMiddleware\)"):
                await send
    assert await sqlite.orders() == []


async def test_a_missing_table_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    dedup = Dedup(f"sqlite+aiosqlite:///{tmp_path}/empty.db", table="my_claims")
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)
    with pytest.raises(StartUpError, match=r"'my_claims' is missing in .*create_table=True.*migration"):
        async with lifespan(app):
            pass
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as c:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="create_table=True"):
                await c.get("/anything")
    await dedup.stop()


async def test_a_missing_table_on_postgresql_is_an_error_too(postgres_url: str) -> None:
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=Dedup(driver_url(postgres_url, "asyncpg"), table="nowhere"))
    with pytest.raises(StartUpError, match="'nowhere' is missing"):
        async with lifespan(app):
            pass


async def test_a_table_may_have_another_name_and_schema(postgres_url: str) -> None:
    engine = create_async_engine(driver_url(postgres_url, "asyncpg"))
    async with engine.begin() as connection:
        await connection.execute(text("create schema if not exists ledger"))
    app = FastAPI()
    dedup = Dedup(engine, table="my claims", schema="ledger", create_table=True)
    app.add_middleware(DedupMiddleware, dedup=dedup)

    @app.post("/orders")
    async def create() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 409
    async with engine.begin() as connection:
        assert await connection.scalar(text('select logical_id from ledger."my claims"')) == "k"
        await connection.execute(text("drop schema ledger cascade"))
    await engine.dispose()


async def test_a_database_that_is_down_at_start_up_refuses_claims_until_it_is_back() -> None:
    app = FastAPI()
    dedup = Dedup("postgresql+asyncpg://nobody@127.0.0.1:1/nowhere")
    app.add_middleware(DedupMiddleware, dedup=dedup)
    ran: list[int] = []

    @app.post("/orders")
    async def create() -> None:
        ran.append(1)

    @app.get("/health")
    async def health() -> str:
        return "fine"

    async with client(app) as c:
        answer = await c.post("/orders", headers={KEY: "k"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["type"].endswith("#store-unavailable")
        assert (await c.get("/health")).json() == "fine"
        assert (await c.post("/orders")).status_code == 200
    assert ran == [1]


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (lambda: create_engine("sqlite://"), "an AsyncEngine or an async_sessionmaker, not Engine"),
        (lambda: 7, "not int"),
        (lambda: "no url", "is no database URL"),
        (lambda: "oracle+oracledb://x/y", "driver of oracle\\+oracledb is not installed"),
        (lambda: "sqlite+pysqlite:///x.db", "no asynchronous engine"),
        (async_sessionmaker, "has no AsyncEngine as its bind"),
        (lambda: "sqlite+aiosqlite://", "':memory:' has one connection"),
        (lambda: "sqlite+aiosqlite:///:memory:", "':memory:' has one connection"),
        (
            lambda: create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool),
            "':memory:' has one connection",
        ),
    ],
)
def test_a_bind_that_cannot_be_used_is_refused_where_it_is_given(bind: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Dedup(bind())


@pytest.mark.parametrize("max_body", [0, -1, True, 1.5, "1"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(sqlite: World, max_body: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_body must be a whole number of bytes"):
        DedupMiddleware(FastAPI(), sqlite.dedup, max_body=max_body)


def test_a_header_that_is_none_is_refused(sqlite: World) -> None:
    with pytest.raises(ConfigurationError, match="is no header name"):
        DedupMiddleware(FastAPI(), sqlite.dedup, header="Idempotency Key")


async def test_an_app_that_fails_to_start_is_not_started_by_us(sqlite: World) -> None:
    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        msg = "the app's own trouble"
        raise ValueError(msg)
        yield

    app = FastAPI(lifespan=life)
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    with pytest.raises(StartUpError, match="the app's own trouble"):
        async with lifespan(app):
            pass
    assert not sqlite.dedup.started


async def test_a_refusal_at_start_up_lets_the_app_shut_down(sqlite: World) -> None:
    life: list[str] = []

    @asynccontextmanager
    async def lives(_: FastAPI) -> AsyncIterator[None]:
        life.append("up")
        yield
        life.append("down")

    app = FastAPI(lifespan=lives)
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    simple(PLAIN, FUNCTION)(app)
    with pytest.raises(StartUpError):
        async with lifespan(app):
            pass
    assert life == ["up", "down"]
