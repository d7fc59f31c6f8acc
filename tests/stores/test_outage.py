"""A database that is down: nobody knows whether the work is done, so it is not run, and the next try may."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.util import greenlet_spawn

from fastapi_dedup import Claim, ConfigurationError, Dedup, DedupError, StoreUnavailableError
from fastapi_dedup.claims import Duplicate
from fastapi_dedup.hooks import Event, EventKind
from tests.databases import engine_on
from tests.live import free_port
from tests.stores.promises import Backend, Promise
from tests.stores.worlds import SOON, World, intent, until

NEWS = intent("news")

DRIVERS = {
    "aiomysql": "mysql+aiomysql",
    "asyncmy": "mysql+asyncmy",
    "asyncpg": "postgresql+asyncpg",
    "psycopg": "postgresql+psycopg",
}


@pytest.fixture(autouse=True)
async def threads_end_before_the_loop() -> AsyncIterator[None]:
    """Wait for aiosqlite's threads: one whose file could not be opened still has an answer to deliver."""
    before = set(threading.enumerate())
    yield

    async def have_ended() -> bool:
        started = set(threading.enumerate()) - before
        return not any("_connection_worker_thread" in thread.name for thread in started)

    await until(have_ended)


def not_there(backend: Backend, folder: Path) -> str:
    """Return the URL of a database where nothing answers."""
    if backend.database == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'no such folder' / 'app.db'}"
    driver = backend.database.partition("+")[0]
    return f"{DRIVERS[driver]}://root@127.0.0.1:{free_port()}/nowhere"


async def claim(dedup: Dedup) -> None:
    async with dedup.claim("news", scope="tests"):
        raise AssertionError


async def start_with_a_table(dedup: Dedup) -> None:
    dedup._create_table = True
    await dedup.start()


@pytest.mark.parametrize(
    "use",
    [
        claim,
        Dedup.reap,
        Dedup.create_table,
        start_with_a_table,
        lambda dedup: dedup.release("news", scope="tests"),
    ],
    ids=["claim", "reap", "create_table", "start", "release"],
)
async def test_a_database_where_nothing_listens_is_unavailable(
    backend: Backend, tmp_path: Path, use: Callable[[Dedup], Awaitable[object]]
) -> None:
    dedup = Dedup(not_there(backend, tmp_path), reap_every=None)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError) as raised:
            await use(dedup)
        assert isinstance(raised.value.__cause__, SQLAlchemyError | OSError)
    await dedup.stop()


@pytest.mark.parametrize("url", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_server_that_turns_the_connection_down_is_unavailable(postgres_url: str, url: str) -> None:
    # It answers, and says no: as while it starts up, at too many connections, and for a wrong password.
    gone = make_url(postgres_url).set(drivername=url, database="no_such_database")
    dedup = Dedup(gone, reap_every=None)
    for use in (claim, Dedup.reap, Dedup.create_table):
        with pytest.raises(StoreUnavailableError) as raised:
            await use(dedup)
        assert raised.value.__cause__ is not None
    await dedup.stop()


async def test_an_app_starts_although_its_database_is_down(
    backend: Backend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dedup = Dedup(not_there(backend, tmp_path), reap_every=None)
    await dedup.start()
    assert dedup.started
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "does not answer" in record.getMessage()
    await dedup.stop()


async def test_no_free_connection_is_unavailable_and_the_next_try_runs(world: World) -> None:
    told: list[EventKind] = []
    engine = engine_on(world.url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    dedup = world.runtime(engine=engine, hooks=[lambda event: told.append(event.kind)])
    async with engine.connect():
        for use in (claim, Dedup.reap):
            with pytest.raises(StoreUnavailableError) as raised:
                await use(dedup)
            assert isinstance(raised.value.__cause__, PoolTimeoutError)
    assert told == [EventKind.UNAVAILABLE]
    assert isinstance(await world.run(NEWS, dedup), Claim)


async def test_a_refusal_of_the_store_is_told_to_hooks_with_its_id(world: World) -> None:
    told: list[Event] = []
    dedup = world.runtime(hooks=[told.append])
    await world.execute("drop table dedup_claims")
    with pytest.raises(DedupError):
        await claim(dedup)
    if Promise.NAMES_A_MISSING_TABLE not in world.backend:
        assert told == [Event(EventKind.UNAVAILABLE, "news", "tests")]


async def test_a_connection_killed_in_the_middle_of_a_claim_is_unavailable_and_the_next_try_runs(
    world: World,
) -> None:
    if world.hands.backend is None:
        await breaks_in_the_middle(world)
        return
    async with world.session() as holder, world.attempt() as attempt, asyncio.timeout(SOON):
        await world.hold_up(holder)
        backend = await attempt.session.scalar(text(world.hands.backend))
        claiming = asyncio.create_task(attempt.claim(NEWS))
        await asyncio.wait([claiming], timeout=0.1)
        assert not claiming.done()
        await world.kill(backend)
        with pytest.raises(StoreUnavailableError) as raised:
            await claiming
        assert isinstance(raised.value.__cause__, DBAPIError)
        await attempt.delivery.fail()
    async with asyncio.timeout(SOON):
        await world.claimed(NEWS)


async def breaks_in_the_middle(world: World) -> None:
    """See that a claim whose INSERT the driver fails is no claim."""

    def fail(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.lstrip().startswith("INSERT INTO dedup_claims"):
            msg = "disk I/O error"
            raise OSError(msg)

    event.listen(world.dedup.engine.sync_engine, "before_cursor_execute", fail)
    with pytest.raises(StoreUnavailableError) as raised:
        await claim(world.dedup)
    assert isinstance(raised.value.__cause__, OSError)
    event.remove(world.dedup.engine.sync_engine, "before_cursor_execute", fail)
    async with asyncio.timeout(SOON):
        await world.claimed(NEWS)


async def test_a_connection_that_died_in_the_pool_costs_one_try(world: World) -> None:
    engine = engine_on(world.url, pool_size=1, max_overflow=0)
    dedup = world.runtime(engine=engine)
    async with world.attempt(dedup) as attempt:
        await attempt.claim(intent("before"))
        raw = (await (await attempt.session.connection()).get_raw_connection()).dbapi_connection
        assert raw is not None
        await attempt.delivery.succeed()
    await greenlet_spawn(raw.close)
    with pytest.raises(StoreUnavailableError):
        await claim(dedup)
    assert isinstance(await world.run(NEWS, dedup), Claim)


async def test_a_table_that_was_dropped_is_told_from_a_database_that_is_down(world: World) -> None:
    await world.execute("drop table dedup_claims")
    error = ConfigurationError if Promise.NAMES_A_MISSING_TABLE in world.backend else StoreUnavailableError
    for use in (claim, Dedup.reap):
        with pytest.raises(error) as raised:
            await use(world.dedup)
        assert isinstance(raised.value.__cause__, DBAPIError)
        if error is ConfigurationError:
            assert "create_table" in str(raised.value)
    await world.dedup.create_table()
    async with asyncio.timeout(SOON):
        await world.claimed(NEWS)


async def test_a_missing_table_is_an_error_at_start_that_names_the_fix(world: World) -> None:
    await world.execute("drop table dedup_claims")
    with pytest.raises(ConfigurationError, match=r"'dedup_claims' is missing .* create_table=True"):
        await world.dedup.start()
    assert not world.dedup.started
    await world.dedup.create_table()
    await world.dedup.start()


async def test_a_transaction_that_the_app_has_broken_already_is_unavailable(world: World) -> None:
    async with world.session() as session:
        with pytest.raises(DBAPIError):
            await session.execute(text("select * from no_such_table"))
        if not world.hands.aborts:  # a failed statement breaks nothing
            async with world.dedup.claim("news", scope="tests", session=session):
                pass
            await session.rollback()
        else:
            with pytest.raises(StoreUnavailableError) as raised:
                async with world.dedup.claim("news", scope="tests", session=session):
                    raise AssertionError
            assert isinstance(raised.value.__cause__, DBAPIError)
    async with asyncio.timeout(SOON):
        await world.claimed(NEWS)


async def test_an_outage_hides_nothing_of_what_was_committed(world: World) -> None:
    await world.claimed(NEWS)
    await world.dedup.engine.dispose()
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_no_password_is_shown_when_the_database_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dedup = Dedup(f"postgresql+asyncpg://me:secret@127.0.0.1:{free_port()}/x", reap_every=None)
    await dedup.start()
    with pytest.raises(StoreUnavailableError) as raised:
        await claim(dedup)
    assert "secret" not in f"{dedup!r} {raised.value} {caplog.text}"
    await dedup.stop()
