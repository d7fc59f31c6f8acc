"""What cannot be kept is refused at start-up, or at the first request where no lifespan comes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.pool import StaticPool

from fastapi_dedup import ConfigurationError, Dedup, Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, StartUpError, World, add, client, lifespan, refusal_of
from tests.servers import driver_url


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
    app.put("/orders", dependencies=[Depends(Deduplicated(methods=["POST"]))])(lambda: None)
    with pytest.raises(StartUpError):
        async with lifespan(app):
            pass
    assert life == ["up", "down"]
