"""`Dedup("redis://…")`: leased claims for apps without a database, and what they are refused.

No `from __future__ import annotations`: FastAPI could not resolve what the endpoints' annotations name.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import pytest
from fastapi import APIRouter, Depends, FastAPI
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    ClaimLostError,
    ConfigurationError,
    Dedup,
    Deduplicated,
    DedupMiddleware,
    DuplicateError,
    RequestSession,
)
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import Event
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware
from fastapi_dedup.messaging.handler import Result
from fastapi_dedup.stores.redis import RedisLeases
from tests.databases import count, orders_table
from tests.http.world import KEY, StartUpError, client, lifespan, problem, talk
from tests.live import until
from tests.stores.worlds import Order

LEASE = timedelta(seconds=30)
FIRST = {KEY: "1"}
RIDING = r"a claim without lease= rides .* give the claim a lease=, or give Dedup a database too"


@pytest.fixture
async def events() -> list[Event]:
    return []


@pytest.fixture
async def dedup(url: str, prefix: str, events: list[Event]) -> AsyncIterator[Dedup]:
    made = Dedup(RedisLeases(url, prefix=prefix), hooks=[events.append])
    yield made
    await made.stop()


def app_of(dedup: Dedup, **middleware: Any) -> FastAPI:
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup, **{"header": None, **middleware})
    return app


# doors


async def test_a_route_runs_once_and_needs_no_database(dedup: Dedup, events: list[Event]) -> None:
    app = app_of(dedup)
    at_work, go = asyncio.Event(), asyncio.Event()
    charged: list[str] = []

    @app.post("/charges", status_code=201)
    async def charge(claim: Annotated[Claim, Depends(Deduplicated(lease=LEASE))]) -> None:
        at_work.set()
        await go.wait()
        charged.append(claim.logical_id)

    async with client(app) as calls:
        first = asyncio.create_task(calls.post("/charges", headers=FIRST))
        await at_work.wait()
        copy = await calls.post("/charges", headers=FIRST)
        assert (problem(copy), copy.headers["retry-after"]) == ("in-flight", "1")
        go.set()
        assert (await first).status_code == 201
        assert problem(await calls.post("/charges", headers=FIRST)) == "duplicate"
        assert problem(await calls.post("/charges")) == "missing-logical-id"
    assert charged == ["1"]
    assert [event.kind.value for event in events] == [
        "claimed",
        "in_flight",
        "committed",
        "duplicate",
        "missing",
    ]


async def test_a_failure_frees_the_id_and_a_copy_that_waits_runs(dedup: Dedup) -> None:
    app = app_of(dedup)
    at_work, go = asyncio.Event(), asyncio.Event()
    runs = 0

    @app.post("/charges", dependencies=[Depends(Deduplicated(lease=LEASE, in_flight="wait"))])
    async def charge() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            at_work.set()
            await go.wait()
            raise ZeroDivisionError

    async with client(app) as calls:
        first = asyncio.create_task(calls.post("/charges", headers=FIRST))
        await at_work.wait()
        copy = asyncio.create_task(calls.post("/charges", headers=FIRST))
        go.set()
        assert ((await first).status_code, (await copy).status_code) == (500, 200)
        assert problem(await calls.post("/charges", headers=FIRST)) == "duplicate"


async def test_the_middleware_deduplicates_by_header_with_a_leased_policy(dedup: Dedup) -> None:
    policy = Deduplicated("header", KEY, required=False, lease=LEASE, methods=["POST"])
    app = app_of(dedup, policy=policy)
    router = APIRouter()

    @router.post("/charges")
    async def charge() -> None: ...

    app.include_router(router)
    async with client(app) as calls:
        assert (await calls.post("/charges", headers=FIRST)).status_code == 200
        assert problem(await calls.post("/charges", headers=FIRST)) == "duplicate"
        assert (await calls.post("/charges")).status_code == 200


async def test_a_handler_of_messages_needs_no_database(
    dedup: Dedup, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[str] = []

    @dedup.handler(Deduplicated("body", "order_id", lease=LEASE))
    async def on_order(message: dict[str, str]) -> None:
        sent.append(message["order_id"])

    assert [await on_order({"order_id": "A-1"}) for _ in range(2)] == [Result.HANDLED, Result.DUPLICATE]
    assert sent == ["A-1"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_ids_of_deliveries_are_kept_after_the_handling(dedup: Dedup) -> None:
    @dedup.handler(Deduplicated("delivery", lease=LEASE, keep_after_handling=timedelta(seconds=0.2)))
    async def on_order(message: Any) -> None: ...

    letter = Envelope({}, {}, delivery_id="7", destination="orders")
    assert [await on_order(letter) for _ in range(2)] == [Result.HANDLED, Result.DUPLICATE]

    async def forgotten() -> bool:
        return await on_order(letter) is Result.HANDLED

    await until(forgotten)


async def test_a_job_claims_around_a_block(dedup: Dedup) -> None:
    async with dedup.claim("nightly", scope="jobs", lease=LEASE) as claim:
        assert claim.expires_at - claim.claimed_at == timedelta(hours=24)
        with pytest.raises(ClaimInFlightError):
            async with dedup.claim("nightly", scope="jobs", lease=LEASE):
                pass
    with pytest.raises(DuplicateError):
        async with dedup.claim("nightly", scope="jobs", lease=LEASE, in_flight="wait"):
            pass


INSERT = text("insert into orders (sku) values ('tea')")


def in_a_session(url: str) -> Any:
    engine = create_async_engine(url, poolclass=NullPool)

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session, session.begin():
            yield session

    return get_session


def in_a_connection(url: str) -> Any:
    engine = create_async_engine(url, poolclass=NullPool)

    async def get_connection() -> AsyncIterator[AsyncConnection]:
        async with engine.begin() as connection:
            yield connection

    return get_connection


def in_a_synchronous_session(url: str) -> Any:
    engine = create_engine(url.replace("+aiosqlite", ""), poolclass=NullPool)

    def get_session() -> Iterator[Session]:
        with Session(engine) as session, session.begin():
            yield session

    return get_session


@pytest.mark.parametrize("kind", [in_a_session, in_a_connection, in_a_synchronous_session])
async def test_the_commit_of_the_handlers_own_session_is_followed(
    dedup: Dedup, tmp_path: Path, kind: Callable[[str], Any]
) -> None:
    place = f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"
    own = Depends(kind(place), scope="function")
    app = app_of(dedup)
    loop = asyncio.get_running_loop()

    def rob() -> Any:
        return dedup.release("1", scope=("POST", "/orders"))

    def order_in_a_thread(session: Annotated[Any, own], robbed: bool = False) -> None:  # noqa: FBT002
        session.execute(INSERT)
        if robbed:
            asyncio.run_coroutine_threadsafe(rob(), loop).result()

    async def order(session: Annotated[Any, own], robbed: bool = False) -> None:  # noqa: FBT002
        await session.execute(INSERT)
        if robbed:
            await rob()

    handler = order_in_a_thread if kind is in_a_synchronous_session else order
    app.post("/orders", dependencies=[Depends(Deduplicated(lease=LEASE, session=own))])(handler)
    async with orders_table(place) as engine, client(app) as calls:
        assert (await calls.post("/orders?robbed=true", headers=FIRST)).status_code == 500
        assert await count(engine, "orders") == 0
        assert (await calls.post("/orders", headers=FIRST)).status_code == 200
        assert problem(await calls.post("/orders", headers=FIRST)) == "duplicate"
        assert await count(engine, "orders") == 1


async def test_the_commit_of_a_session_of_several_binds_is_followed(dedup: Dedup, tmp_path: Path) -> None:
    class Glances(DeclarativeBase):
        """What is in another database."""

    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    async with orders_table(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}") as engine:
        for robbed in (True, False):
            async with AsyncSession(binds={Glances: other, Order: engine}) as session:
                with pytest.raises(ClaimLostError) if robbed else nullcontext():
                    async with dedup.claim("1", scope="orders", lease=LEASE, session=session):
                        session.add(Order(sku="tea"))
                        if robbed:
                            await dedup.release("1", scope="orders")
                        await session.commit()
            assert await count(engine, "orders") == (not robbed)
    await other.dispose()


async def test_a_connection_that_tells_nobody_of_its_commit_cannot_be_followed(
    dedup: Dedup, postgres_url: str
) -> None:
    connection = await asyncpg.connect(postgres_url)
    with pytest.raises(ConfigurationError, match=r"follows a asyncpg.* needs a database"):
        async with dedup.claim("1", scope="jobs", lease=LEASE, session=connection):
            pytest.fail("it must not run")
    await connection.close()


async def test_a_batch_would_ride(dedup: Dedup) -> None:
    with pytest.raises(ConfigurationError, match=RIDING):
        async with dedup.claim_many(["1", "2"], scope="jobs"):
            pytest.fail("it must not run")


async def test_a_guard_in_front_and_a_store_in_memory_work_as_they_do_elsewhere(
    url: str, prefix: str
) -> None:
    dedup = Dedup(RedisLeases(url, prefix=prefix), guard=GenerationalGuard())
    for policy in (Deduplicated("body", "id", lease=LEASE), Deduplicated("body", "id", store="memory")):

        @dedup.handler(policy)
        async def on_order(message: dict[str, str]) -> None: ...

        assert [await on_order({"id": "1"}) for _ in range(2)] == [Result.HANDLED, Result.DUPLICATE]
    await dedup.stop()


# operation


async def test_what_a_table_needs_is_done_by_the_server(dedup: Dedup) -> None:
    async with dedup:
        await dedup.create_table()
        async with dedup.claim("1", scope="jobs", lease=LEASE):
            assert await dedup.reap() == 0
        assert await dedup.release("1", scope="jobs")
        assert not await dedup.release("1", scope="jobs")
        assert dedup._reaper._loop is None
    async with dedup, dedup.claim("1", scope="jobs", lease=LEASE):  # it may be started again
        pass


async def test_the_environment_may_name_redis(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTAPI_DEDUP_DATABASE_URL", redis_url)
    caplog.set_level(logging.INFO)
    assert not Dedup().has_database
    assert "claims are kept in RedisLeases('redis://" in caplog.text


def test_it_names_redis_and_no_password() -> None:
    told = repr(Dedup("redis://me:secret@localhost/1"))
    assert told == "Dedup(RedisLeases('redis://localhost/1', prefix='dedup:'))"


# what is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"bind": "redis://localhost", "leases": RedisLeases("redis://localhost")},
            "bind it to the database",
        ),
        ({"bind": "sqlite:///x.db", "leases": "redis://localhost"}, r"leases= takes a RedisLeases\(...\)"),
    ],
)
def test_leases_that_are_none_or_given_twice_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Dedup(**options)


def route(app: FastAPI, *policies: Deduplicated) -> None:
    @app.post("/charges", dependencies=[Depends(policy) for policy in policies])
    async def charge() -> None: ...


async def refusal(build: Callable[[], FastAPI]) -> str:
    """Return why an app does not start; its first request is refused alike."""
    with pytest.raises((StartUpError, ConfigurationError)) as refused:
        async with lifespan(build()):
            pass
    async with talk(build()) as calls:
        assert (await calls.post("/charges", headers=FIRST)).status_code == 500
    return str(refused.value)


async def test_a_route_whose_claim_would_ride_keeps_the_app_from_starting(dedup: Dedup) -> None:
    def build() -> FastAPI:
        app = app_of(dedup)
        route(app, Deduplicated())
        return app

    told = await refusal(build)
    assert told.startswith("POST /charges: a claim without lease= rides")
    assert "lease=" in told
    assert "leases=RedisLeases" in told


async def test_a_route_that_asks_for_a_session_of_ours_does_too(dedup: Dedup) -> None:
    def build() -> FastAPI:
        app = app_of(dedup)

        @app.post("/charges", dependencies=[Depends(Deduplicated(lease=LEASE))])
        async def charge(session: RequestSession) -> None: ...

        return app

    assert (await refusal(build)).startswith("POST /charges: RequestSession needs a database")


async def test_the_middleware_s_own_policy_would_ride_by_default(dedup: Dedup) -> None:
    def build() -> FastAPI:
        app = app_of(dedup, header=KEY)
        route(app, Deduplicated(lease=LEASE))
        return app

    assert "DedupMiddleware's own policy: a claim without lease= rides" in await refusal(build)


async def test_what_is_required_of_routes_is_checked_too(dedup: Dedup) -> None:
    dedup.require(lambda endpoint: endpoint.name == "/charges", Deduplicated())

    def build() -> FastAPI:
        app = app_of(dedup)
        route(app)
        return app

    assert (await refusal(build)).startswith("POST /charges: a claim without lease= rides")


async def claim(dedup: Dedup) -> None:
    async with dedup.claim("1", scope="jobs"):
        pytest.fail("it must not run")


async def define_a_handler(dedup: Dedup) -> None:
    dedup.handler(Deduplicated("body", "id"))(lambda message: message)


async def call_a_handler_of_which_it_is_required(dedup: Dedup) -> None:
    dedup.require(lambda _: True, Deduplicated("body", "id"))
    await dedup.handler()(lambda message: message)({"id": "1"})


async def define_a_middleware_of_faststream_s(dedup: Dedup) -> None:
    DeduplicatingMiddleware(dedup, Deduplicated())


@pytest.mark.parametrize(
    "use",
    [claim, define_a_handler, call_a_handler_of_which_it_is_required, define_a_middleware_of_faststream_s],
)
async def test_whoever_else_would_ride_is_refused(
    dedup: Dedup, use: Callable[[Dedup], Awaitable[None]]
) -> None:
    with pytest.raises(ConfigurationError, match=RIDING):
        await use(dedup)


async def test_a_session_is_refused_where_it_is_used(dedup: Dedup) -> None:
    with pytest.raises(ConfigurationError, match=r"session.execute needs a database, .* its own"):
        async with dedup.claim("1", scope="jobs", lease=LEASE) as held:
            await held.session.execute(text("select 1"))
    with pytest.raises(ConfigurationError, match=r"dedup.engine needs a database"):
        create_async_engine(dedup.engine.url)
    async with dedup.claim("1", scope="jobs", lease=LEASE):  # the refusal was a failure, which freed the id
        pass

    @dedup.handler(Deduplicated("body", "id", lease=LEASE))
    async def on_order(_: dict[str, str], session: AsyncSession) -> None:
        await session.commit()

    with pytest.raises(ConfigurationError, match=r"asks for a .*AsyncSession, and nobody opens one"):
        await on_order({"id": "1"})
