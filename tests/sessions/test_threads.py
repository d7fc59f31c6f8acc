"""Synchronous sessions: claims in worker threads, fates that come from whatever thread commits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from fastapi_dedup import ClaimInFlightError, ConfigurationError, Dedup, DuplicateError
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.stores.threads import entered_in_thread, in_thread
from tests.http.world import KEY, Statements, World, client, eventually
from tests.live import call, live
from tests.sessions.conftest import kind_on, tables
from tests.sessions.kinds import ASession, Kind, sync_url
from tests.sessions.routes import Shop
from tests.sessions.test_claims import SOON, found, outcome


@pytest.fixture
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ASession]:
    """Yield a synchronous session on PostgreSQL."""
    async with kind_on(("Session", "asyncpg"), request, tmp_path) as opened:
        assert isinstance(opened, ASession)
        yield opened


async def test_no_claim_blocks_the_event_loop(kind: ASession) -> None:
    threads: set[int] = set()

    @event.listens_for(kind.engine, "before_cursor_execute")
    def _(*_: Any) -> None:
        threads.add(threading.get_ident())

    with kind.sessions() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            pass
        assert threads
        assert threading.get_ident() not in threads


async def test_a_commit_in_another_thread_is_told_on_the_event_loop(kind: ASession) -> None:
    told: list[tuple[str, int]] = []
    dedup = Dedup(
        kind.world.engine,
        reap_every=None,
        hooks=[lambda heard: told.append((heard.kind.value, threading.get_ident()))],
    )
    with kind.sessions() as session:
        async with dedup.claim("news", scope="tests", session=session):
            await to_thread.run_sync(session.commit)
            assert told == [("claimed", threading.get_ident()), ("committed", threading.get_ident())]


async def test_who_waits_is_woken_by_a_commit_in_another_thread(kind: ASession) -> None:
    # case F1
    with kind.sessions() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            waiting = asyncio.create_task(outcome(kind, in_flight="wait"))
            await eventually(lambda: is_waiting(kind))
            await to_thread.run_sync(session.commit)
            async with asyncio.timeout(SOON):
                assert await waiting is DuplicateError


async def is_waiting(kind: Kind) -> bool:
    return any(flight.landed._waiters for flight in kind.world.dedup._flights._flights.values())


def test_a_session_that_commits_after_the_event_loop_is_closed_commits(postgres_url: str) -> None:
    engine = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))

    async def claim(session: Session) -> None:
        async with tables(postgres_url.replace("postgresql:", "postgresql+asyncpg:"), set()) as asynchronous:
            dedup = Dedup(asynchronous, reap_every=None)
            async with dedup.claim("news", scope="tests", session=session):
                session.execute(text("insert into orders (sku) values ('news')"))

    with Session(engine) as session:
        asyncio.run(claim(session))
        session.commit()
        assert session.scalar(text("select count(*) from dedup_claims")) == 1
    engine.dispose()


async def test_a_claim_whose_caller_is_cancelled_meanwhile_is_undone(kind: ASession) -> None:
    # case B3: the thread cannot be cancelled, and the app may commit what it has done besides
    claiming = threading.Event()
    go_on = threading.Event()

    @event.listens_for(kind.engine, "before_cursor_execute")
    def _(_c: object, _cursor: object, statement: str, *_: Any) -> None:
        if "pg_try_advisory" in statement:
            claiming.set()
            go_on.wait(SOON)

    async def claim(session: Session) -> None:
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            raise AssertionError

    with kind.sessions() as session:
        await kind.add(session, "before")
        task = asyncio.create_task(claim(session))
        assert await to_thread.run_sync(claiming.wait, SOON)
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        session.commit()
    assert await found(kind) == (["before"], [])


async def test_what_a_cancelled_caller_leaves_is_undone_as_far_as_possible(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(SOON)

    def undo() -> None:
        msg = "the connection broke"
        raise OSError(msg)

    task = asyncio.create_task(in_thread(work, connected=True, undo=undo))
    assert await to_thread.run_sync(started.wait, SOON)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "could not undo what a cancelled delivery has done" in caplog.text


async def test_claims_that_wait_for_a_connection_do_not_keep_threads_from_handlers(
    kind: ASession,
) -> None:
    # 60 requests and a pool of two: more than there are threads. A claim that waited for its connection in a
    # handler's thread would keep that from the handler which holds the connection.
    narrow = create_engine(kind.engine.url, pool_size=2, max_overflow=0, pool_timeout=60)
    kind.sessions.configure(bind=narrow)

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    app = Shop(kind, "def").app(create)
    async with live(app) as url, asyncio.timeout(50):
        orders = [call(url, "POST", "/orders/a", headers={KEY: str(number)}) for number in range(60)]
        replies = await asyncio.gather(*orders)
    assert {reply.status for reply in replies} == {200}
    assert len(await kind.world.ids()) == 60
    narrow.dispose()


@pytest.mark.parametrize("style", ["def", "async def"])
async def test_many_copies_at_once_over_a_socket_run_once(kind: ASession, style: str) -> None:
    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    async with live(Shop(kind, style).app(create)) as url, asyncio.timeout(50):
        copies = [call(url, "POST", "/orders/a", headers={KEY: "k"}) for _ in range(30)]
        replies = await asyncio.gather(*copies)
    assert sorted(reply.status for reply in replies) == [200] + [409] * 29
    assert await found(kind) == (["a"], ["k"])


@pytest.mark.parametrize("style", ["def", "async def"])
async def test_a_request_never_needs_a_second_connection(kind: ASession, style: str) -> None:
    # DESIGN.md §5. With a pool of one, a second one would never come.
    narrow = create_engine(kind.engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    kind.sessions.configure(bind=narrow)
    failing = iter([True, False, False])

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        if next(failing):
            await kind.commit(session)
            msg = "the handler failed after its COMMIT, as the test wished"
            raise RuntimeError(msg)

    async with client(Shop(kind, style).app(create, members=(None, "word"))) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert isinstance(narrow.pool, QueuePool)
    assert narrow.pool.checkedout() == 0
    narrow.dispose()


async def test_a_guard_in_front_remembers_what_another_thread_committed(kind: ASession) -> None:
    kind.world.dedup = Dedup(kind.world.engine, reap_every=None, guard=GenerationalGuard())

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    statements = Statements(kind.world.engine)
    async with client(Shop(kind, "def").app(create)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200

        @event.listens_for(kind.engine, "before_cursor_execute")
        def _(_c: object, _cursor: object, statement: str, *_: Any) -> None:
            statements.append(statement)

        statements.clear()
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert [each for each in statements if "dedup_claims" in each and "logical_id from" not in each] == []


async def test_a_blocking_context_manager_is_entered_and_left_in_threads() -> None:
    steps: list[tuple[str, bool]] = []

    class Manager:
        swallows = False

        def __enter__(self) -> str:
            steps.append(("enter", threading.current_thread() is threading.main_thread()))
            return "entered"

        def __exit__(self, *error: object) -> bool:
            steps.append(
                ("raised" if error[0] else "left", threading.current_thread() is threading.main_thread())
            )
            return self.swallows

    manager = Manager()
    async with entered_in_thread(manager) as value:
        assert value == "entered"
    with pytest.raises(ZeroDivisionError):
        async with entered_in_thread(manager):
            raise ZeroDivisionError
    manager.swallows = True
    async with entered_in_thread(manager):
        raise ZeroDivisionError
    assert steps == [(step, False) for step in ("enter", "left", "enter", "raised", "enter", "raised")]


async def test_a_two_phase_transaction_of_a_connection_is_refused(kind: ASession) -> None:
    with kind.engine.connect() as connection, pytest.raises(ConfigurationError, match="two-phase"):
        connection.begin_twophase()
        async with kind.world.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError


async def test_a_closed_connection_is_refused(kind: ASession) -> None:
    connection = kind.engine.connect()
    connection.close()
    with pytest.raises(ClaimLostError, match="is closed"):
        async with kind.world.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError


# SQLite: its driver begins no transaction before a savepoint


async def test_the_first_claim_of_an_unprepared_sqlite_engine_is_refused_in_a_savepoint(
    sqlite: World,
) -> None:
    # case F7
    engine = create_engine(sync_url(sqlite.engine.url, ""))
    with Session(engine) as session:
        with session.begin_nested(), pytest.raises(ConfigurationError, match=r"dedup\.adopt\(engine\)"):
            async with sqlite.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        session.rollback()
        sqlite.dedup.adopt(engine)
        with session.begin_nested():
            async with sqlite.dedup.claim("news", scope="tests", session=session):
                pass
        session.rollback()
    assert await sqlite.ids() == []
    engine.dispose()


async def test_a_connection_whose_commit_failed_goes_home_without_a_transaction(sqlite: World) -> None:
    # SQLite keeps a transaction whose COMMIT failed, and SQLAlchemy takes it for ended when it is closed.
    engine = create_engine(sync_url(sqlite.engine.url, ""))
    event.listen(engine, "connect", lambda connection, _: connection.execute("pragma foreign_keys = on"))
    late = "create table late (parent integer references orders (id) deferrable initially deferred)"
    with engine.begin() as connection:
        connection.execute(text(late))
    with engine.connect() as connection:
        async with sqlite.dedup.claim("news", scope="tests", session=connection):
            connection.execute(text("insert into late values (77)"))
        with pytest.raises(IntegrityError):
            connection.commit()
    async with asyncio.timeout(SOON), sqlite.dedup.claim("news", scope="tests"):
        pass
    engine.dispose()


async def test_an_engine_on_another_database_is_not_adopted(sqlite: World, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(ConfigurationError, match=r"other\.db"):
        sqlite.dedup.adopt(engine)
    sqlite.dedup.adopt(sqlite.engine)  # its own is adopted from the first


async def test_writers_of_one_sqlite_file_take_turns_whatever_their_sessions_are(
    sqlite: World,
) -> None:
    # case F8
    engine = create_engine(sync_url(sqlite.engine.url, ""))

    async def synchronous(number: int) -> None:
        with Session(engine) as session:
            async with sqlite.dedup.claim(f"sync {number}", scope="tests", session=session):
                session.execute(text("insert into orders (sku) values ('sync')"))
            session.commit()

    async def asynchronous(number: int) -> None:
        async with sqlite.dedup.claim(f"async {number}", scope="tests") as claim:
            await claim.session.execute(text("insert into orders (sku) values ('async')"))

    async with asyncio.timeout(50):
        await asyncio.gather(*(deliver(n) for n in range(8) for deliver in (synchronous, asynchronous)))
    assert sorted(await sqlite.orders()) == ["async"] * 8 + ["sync"] * 8
    engine.dispose()


async def test_a_twin_is_in_flight_across_kinds_of_sessions(kind: ASession) -> None:
    with kind.sessions() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            with pytest.raises(ClaimInFlightError):
                async with kind.world.dedup.claim("news", scope="tests"):
                    raise AssertionError
        session.commit()
    with pytest.raises(DuplicateError):
        async with kind.world.dedup.claim("news", scope="tests"):
            raise AssertionError
