"""What only MariaDB and MySQL do: named locks, and transactions that end without a word."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fastapi_dedup import Claim, ClaimInFlightError, Dedup, DuplicateError
from fastapi_dedup.claims import Duplicate, InFlight
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.stores.dialects.mysql import MySQL, _has_snapshots
from tests.stores.promises import BACKENDS
from tests.stores.worlds import SOON, Order, World, intent, until

NEWS = intent("news")

on_mariadb = pytest.mark.parametrize(
    "backend",
    [pytest.param(backend, id=backend.name) for backend in BACKENDS if backend.dialect is MySQL],
    indirect=True,
)


async def tell_connections(engine: AsyncEngine, statement: str) -> None:
    """Have every connection of an engine begin with a statement."""

    @event.listens_for(engine.sync_engine, "connect")
    def _(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(statement)
        cursor.close()

    await engine.dispose()


@asynccontextmanager
async def snapshot(world: World) -> AsyncIterator[AsyncSession]:
    """Open a session of the app's whose transaction sees nothing that is committed from now on."""
    async with world.session() as session:
        session.add(Order(sku="before"))
        await session.flush()
        await session.execute(text("select sku from orders"))
        yield session


@on_mariadb
async def test_the_same_id_in_another_database_of_the_server_is_another_id(world: World) -> None:
    other = world.engine.url.set(database=f"{world.engine.url.database}_b")
    await world.execute(f"create database {other.database}")
    try:
        engine = create_async_engine(other)
        async with Dedup(engine, create_table=True) as elsewhere, world.attempt() as here:
            await here.claim(NEWS)
            assert isinstance(await world.run(NEWS, world.runtime()), InFlight)
            async with elsewhere.claim("news", scope="tests"):
                pass
            await here.delivery.succeed()
        await engine.dispose()
    finally:
        await world.execute(f"drop database {other.database}")


@on_mariadb
@pytest.mark.parametrize("outcome", ["done", "expired", "renewed", "reaped"])
async def test_a_race_lost_behind_a_snapshot_ends_no_transaction(world: World, outcome: str) -> None:
    # case F3
    # From MariaDB 11.6 on, to meet a row behind the snapshot is to lose the whole transaction.
    async with world.engine.connect():
        if not _has_snapshots(cast("tuple[int, ...]", world.engine.dialect.server_version_info)):
            pytest.skip("this server has no innodb_snapshot_isolation")
    await tell_connections(world.dedup.engine, "set innodb_snapshot_isolation = on")
    if outcome != "done":
        await world.claimed(NEWS)
        await world.expire(NEWS)
    async with snapshot(world) as session, asyncio.timeout(SOON):
        assert await session.scalar(text("select @@innodb_snapshot_isolation")) == 1
        if outcome in {"done", "renewed"}:
            async with world.attempt() as other:
                assert isinstance(await other.claim(NEWS), Claim)
                await other.delivery.succeed()
        elif outcome == "reaped":
            assert await world.dedup.reap() == 1
        told = await world.claim_in(session)
        await session.commit()
    assert told is (DuplicateError if outcome in {"done", "renewed"} else Claim)
    assert "before" in await world.orders()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((10, 6, 17), False),
        ((10, 6, 18), True),
        ((5, 5, 5, 10, 6, 18, 0), True),
        ((5, 5, 5, 10, 6, 17, 0), False),
        ((10, 11, 7), False),
        ((10, 11, 8), True),
        ((11, 0, 1), False),
        ((11, 4, 1), False),
        ((11, 4, 2), True),
        ((12, 1, 0), True),
    ],
)
def test_the_setting_is_named_to_servers_that_have_it_only(version: tuple[int, ...], expected: bool) -> None:
    assert _has_snapshots(version) is expected


@on_mariadb
async def test_an_unfinished_twin_is_never_taken_for_done_at_read_uncommitted(world: World) -> None:
    # there, a plain SELECT sees what may still be rolled back
    await tell_connections(world.dedup.engine, "set session transaction isolation level read uncommitted")
    elsewhere = world.runtime()
    await tell_connections(elsewhere.engine, "set session transaction isolation level read uncommitted")
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        assert await world.run(NEWS, elsewhere) == InFlight()
        await first.delivery.fail()
        assert isinstance(await world.run(NEWS, elsewhere), Claim)


@on_mariadb
async def test_a_named_lock_does_not_stay_behind_in_the_pool(world: World) -> None:
    dedup = world.runtime()
    for ending in ("fail", "succeed"):
        async with world.attempt(dedup) as attempt:
            await attempt.claim(NEWS)
            await getattr(attempt.delivery, ending)()
    async with dedup.engine.connect() as connection:
        assert await connection.scalar(text("select release_all_locks()")) == 0


@on_mariadb
async def test_a_deadlock_that_the_handler_swallows_is_no_success(world: World) -> None:
    # the server rolls the whole transaction back, and lets the next statement begin a new one
    await world.execute("insert into orders (id, sku) values (1, 'a'), (2, 'b')")
    update = text("update orders set sku = 'x' where id = :id")
    async with world.session() as other, asyncio.timeout(SOON):
        await other.execute(update, {"id": 2})
        # more rows than the claim's transaction has changed: InnoDB sacrifices the smaller one
        await other.execute(text("insert into orders (sku) select 'z' from seq_1_to_200"))

        async def handler(session: AsyncSession) -> None:
            await session.execute(update, {"id": 1})
            waiting = asyncio.create_task(other.execute(update, {"id": 1}))
            with pytest.raises(OperationalError):
                await session.execute(update, {"id": 2})
            session.add(Order(sku="lost"))
            await session.flush()
            await waiting

        with pytest.raises(ClaimLostError):
            async with world.dedup.claim("news", scope="tests") as claim:
                await handler(claim.session)
        await other.rollback()
    assert await world.rows() == []
    assert await world.orders() == ["a", "b"]


@on_mariadb
async def test_a_connection_that_goes_on_after_its_commit_keeps_no_id_from_others(world: World) -> None:
    # case E4: a consumer may have one connection for its life
    elsewhere = world.runtime()
    async with world.dedup.engine.connect() as connection:
        for logical_id in ("news", "more"):
            async with (
                connection.begin(),
                world.dedup.claim(logical_id, scope="tests", session=connection),
            ):
                pass
            async with connection.begin(), world.dedup.claim_many(["a", "b"], scope="t", session=connection):
                pass
        await connection.execute(text("select 1"))
        await world.expire(NEWS)
        assert isinstance(await world.run(NEWS, elsewhere), Claim)
        assert await connection.scalar(text("select release_all_locks()")) == 0


@on_mariadb
async def test_a_connection_that_rests_after_its_rollback_keeps_no_id_from_others(world: World) -> None:
    elsewhere = world.runtime()
    async with world.dedup.engine.connect() as connection:
        async with world.dedup.claim("news", scope="tests", session=connection):
            pass
        await connection.rollback()
        assert isinstance(await world.run(NEWS, elsewhere), Claim)


async def wait_in_vain(world: World, session: AsyncSession) -> None:
    """Have a session's statement wait for another's lock for too long, and take no notice."""
    await world.execute("insert into orders (id, sku) values (-1, 'there')")
    update = text("update orders set note = 'x' where id = -1")
    async with world.session() as other:
        await other.execute(update)
        await session.execute(text("set innodb_lock_wait_timeout = 0"))
        with pytest.raises(OperationalError, match="1205"):
            await session.execute(update)


@on_mariadb
@pytest.mark.parametrize("undoes", ["the statement", "the transaction"])
async def test_a_wait_for_a_lock_that_was_too_long_undoes_what_the_server_says(
    world: World, undoes: str
) -> None:
    if undoes == "the transaction":  # which only a server's start can be told: so the answer is made up

        @event.listens_for(world.dedup.engine.sync_engine, "before_cursor_execute", retval=True)
        def _(_c: object, _cursor: object, sent: str, values: Any, *_: object) -> tuple[str, Any]:
            return sent.replace("@@innodb_rollback_on_timeout", "1"), values

    with nullcontext() if undoes == "the statement" else pytest.raises(ClaimLostError):
        async with world.dedup.claim("news", scope="tests", lease=timedelta(hours=1)) as claim:
            claim.session.add(Order(sku="news"))
            await claim.session.flush()
            await wait_in_vain(world, claim.session)
            with pytest.raises(ProgrammingError):  # a later and lesser failure does not hide that
                await claim.session.execute(text("select * from nowhere"))
    if undoes == "the statement":
        assert await world.orders() == ["news", "there"]
        assert isinstance(await world.run(NEWS), Duplicate)
    else:
        assert await world.orders() == ["there"]
        assert isinstance(await world.run(NEWS), Claim)


@on_mariadb
async def test_the_commit_of_a_synchronous_session_that_was_a_deadlocks_victim_completes_no_lease(
    world: World,
) -> None:
    # The first request on an engine of the app's that the runtime has never met.
    engine = create_engine(world.engine.url.set(drivername="mysql+pymysql"))
    await world.execute("insert into orders (id, sku) values (1, 'a'), (2, 'b')")
    update = text("update orders set note = 'x' where id = :id")

    def handler(session: Session) -> None:
        session.execute(text("insert into orders (sku) values ('undone')"))
        session.execute(update, {"id": 1})
        first.set()
        assert second.wait(SOON)
        with pytest.raises(OperationalError, match="1213"):
            session.execute(update, {"id": 2})
        session.execute(text("insert into orders (sku) values ('the rest')"))
        session.commit()

    def rival() -> None:
        with engine.begin() as other:
            # more rows than the handler has changed: InnoDB sacrifices the smaller one
            other.execute(text("insert into orders (sku) select 'z' from seq_1_to_200"))
            other.execute(update, {"id": 2})
            second.set()
            assert first.wait(SOON)
            other.execute(update, {"id": 1})
            other.execute(text("delete from orders where sku = 'z'"))

    first, second = threading.Event(), threading.Event()
    with Session(engine) as session:
        with pytest.raises(ClaimLostError):
            async with world.dedup.claim("news", scope="tests", lease=timedelta(hours=1), session=session):
                await asyncio.gather(asyncio.to_thread(rival), asyncio.to_thread(handler, session))
        session.rollback()

    async def released() -> bool:
        return await world.rows() == []

    await until(released)
    engine.dispose()
    assert await world.orders() == ["a", "b"]


@on_mariadb
async def test_the_table_is_of_an_engine_that_has_transactions(world: World) -> None:
    await world.execute("drop table dedup_claims")
    await tell_connections(world.dedup.engine, "set default_storage_engine = 'MyISAM'")
    await world.dedup.create_table()
    with pytest.raises(ClaimInFlightError):
        async with world.dedup.claim("news", scope="tests"), world.dedup.claim("news", scope="tests"):
            raise AssertionError
    assert await world.rows() == []
