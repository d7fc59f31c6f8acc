"""Connections of asyncpg and psycopg themselves: what no event tells is found out by asking."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

import anyio
import asyncpg
import psycopg
import psycopg_pool
import pytest
from fastapi import Depends, HTTPException
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import create_async_engine

from fastapi_dedup import (
    ClaimInFlightError,
    ConfigurationError,
    Dedup,
    Deduplicated,
    DuplicateError,
    FingerprintMismatchError,
    StoreUnavailableError,
)
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.messaging.handler import Result
from tests.http.world import KEY, World, client, eventually
from tests.servers import postgres_database
from tests.sessions.conftest import kind_on
from tests.sessions.kinds import Kind
from tests.sessions.routes import Shop


def plain(world: World) -> str:
    return world.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)


@pytest.fixture(params=["asyncpg's pool", "psycopg's pool"])
async def kind(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[Kind]:
    """Yield a driver's pool, whose connections are with somebody else as soon as they are given back."""
    async with kind_on((request.param, "asyncpg"), request, tmp_path) as opened:
        yield opened


# As the drivers' own documentation has it


async def test_a_claim_rides_a_block_of_asyncpgs(postgres: World) -> None:
    async with asyncpg.create_pool(plain(postgres), min_size=1, max_size=2) as pool:
        for refused in (False, True):
            async with pool.acquire() as connection, connection.transaction():
                try:
                    async with postgres.dedup.claim("news", scope="tests", session=connection) as claim:
                        await connection.execute("insert into orders (sku) values ($1)", "news")
                        assert claim.session is connection
                except DuplicateError:
                    assert refused
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])


async def test_a_claim_rides_a_block_of_psycopgs(postgres: World) -> None:
    async with psycopg_pool.AsyncConnectionPool(plain(postgres), open=False) as pool:
        for refused in (False, True):
            async with pool.connection() as connection:
                connection.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]  # as apps do
                try:
                    async with postgres.dedup.claim("news", scope="tests", session=connection):
                        await connection.execute("insert into orders (sku) values (%s)", ["news"])
                except DuplicateError:
                    assert refused
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])


async def test_a_block_of_psycopgs_in_autocommit_mode_is_a_transaction(postgres: World) -> None:
    connection = await psycopg.AsyncConnection.connect(plain(postgres), autocommit=True)
    async with connection:
        with pytest.raises(ZeroDivisionError):
            async with (
                connection.transaction(),
                postgres.dedup.claim("news", scope="tests", session=connection),
            ):
                raise ZeroDivisionError
        async with connection.transaction(), postgres.dedup.claim("news", scope="tests", session=connection):
            pass
    assert await postgres.ids() == ["news"]


# What is refused


async def test_a_claim_does_without_the_cursors_of_the_app(postgres: World) -> None:
    async with (
        await psycopg.AsyncConnection.connect(
            plain(postgres), cursor_factory=psycopg.AsyncRawCursor
        ) as connection,
        postgres.dedup.claim("news", scope="tests", session=connection),
    ):
        await connection.execute("insert into orders (sku) values ($1)", ["news"])
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])


async def test_an_asyncpg_connection_outside_of_a_transaction_is_refused(postgres: World) -> None:
    connection = await asyncpg.connect(plain(postgres))
    with pytest.raises(ConfigurationError, match=r"async with connection\.transaction\(\)"):
        async with postgres.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError
    await connection.close()
    assert await postgres.ids() == []


async def test_a_psycopg_connection_that_commits_every_statement_is_refused(postgres: World) -> None:
    connection = await psycopg.AsyncConnection.connect(plain(postgres), autocommit=True)
    with pytest.raises(ConfigurationError, match="autocommit"):
        async with postgres.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError
    await connection.close()
    assert await postgres.ids() == []


async def test_a_synchronous_psycopg_connection_is_refused(postgres: World) -> None:
    with (
        psycopg.connect(plain(postgres)) as connection,
        pytest.raises(ConfigurationError, match=r"cannot ride a psycopg\.Connection: session= must give"),
    ):
        async with postgres.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError


async def test_a_connection_to_another_database_is_refused_and_stays_usable(
    postgres: World, sqlite: World, postgres_url: str
) -> None:
    with postgres_database(postgres_url) as url:
        connection = await asyncpg.connect(url)
        transaction = connection.transaction()
        await transaction.start()
        for world, where in (
            (postgres, "another PostgreSQL database"),
            (sqlite, "PostgreSQL, but this Dedup"),
        ):
            with pytest.raises(ConfigurationError, match=where):
                async with world.dedup.claim("news", scope="tests", session=connection):
                    raise AssertionError
        assert await connection.fetchval("select 1") == 1
        await transaction.rollback()
        await connection.close()


async def test_a_missing_table_is_named(postgres: World) -> None:
    dedup = Dedup(postgres.engine, table="missing", reap_every=None)
    connection = await asyncpg.connect(plain(postgres))
    async with connection.transaction():
        with pytest.raises(ConfigurationError, match="the table of claims is missing"):
            async with dedup.claim("news", scope="tests", session=connection):
                raise AssertionError
    await connection.close()


async def test_a_broken_connection_is_a_store_that_is_unavailable(postgres: World) -> None:
    connection = await asyncpg.connect(plain(postgres))
    await connection.execute("begin")
    async with postgres.dedup.claim("first", scope="tests", session=connection):
        pass
    async with postgres.engine.connect() as other:
        await other.execute(text(f"select pg_terminate_backend({connection.get_server_pid()}, 5000)"))
    with pytest.raises(StoreUnavailableError):
        async with postgres.dedup.claim("news", scope="tests", session=connection):
            raise AssertionError
    connection.terminate()


async def test_another_payload_is_a_mismatch(kind: Kind) -> None:
    async with kind.open() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session, fingerprint=b"1" * 32):
            pass
        await kind.commit(session)
        await kind.begin(session)
        with pytest.raises(FingerprintMismatchError):
            async with kind.world.dedup.claim("news", scope="tests", session=session, fingerprint=b"2" * 32):
                raise AssertionError


# What is found out, and how


async def test_a_rollback_and_a_commit_of_the_handlers_own_are_told_as_lost(kind: Kind) -> None:
    # Weaker than in a session: nobody is asked before this COMMIT. The work is there, and no success is told.
    async def create(session: Any, sku: str) -> None:
        await kind.rollback(session)
        await kind.add(session, sku)
        await kind.commit(session)

    app = Shop(kind, "async def").app(create, get_session=kind.dependency(commits=False))
    async with client(app) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
    assert (await kind.world.orders(), await kind.world.ids()) == (["a"], [])


async def test_a_connection_that_is_with_somebody_else_already_is_left_alone(kind: Kind) -> None:
    # With an exit at function scope, the pool has the connection back before the response starts. The next
    # one to ask for it is in a transaction of its own by then.
    thieves: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    get_session = kind.dependency()
    app = Shop(kind, "async def").app(create, get_session=get_session, exits="function")

    async def steal() -> None:
        async with kind.open() as session:
            before = await kind.run(session, "select count(*) from pg_stat_activity")
            assert before
            await asyncio.sleep(0.05)
            thieves.append(await kind.run(session, "select txid_current_if_assigned()"))

    async with client(app) as c:
        requests = [c.post(f"/orders/{n}", headers={KEY: f"{n}"}) for n in range(12)]
        answers = await asyncio.gather(*requests, *(steal() for _ in range(12)))
    assert [each.status_code for each in answers if each is not None] == [200] * 12
    assert thieves == [None] * 12  # nothing was written in a stranger's transaction
    assert len(await kind.world.ids()) == 12


@pytest.mark.parametrize("exits", [None, "function"])
async def test_asking_costs_four_queries(postgres: World, exits: Any) -> None:
    asked: list[str] = []
    pool = await asyncpg.create_pool(plain(postgres), min_size=1, max_size=1)

    async def get() -> AsyncIterator[asyncpg.Connection]:
        async with pool.acquire() as connection, connection.transaction():
            yield connection

    depends = Depends(get, scope=exits)
    app = postgres.app()

    def log(query: Any) -> None:
        asked.append(query.query)

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=depends))])
    async def create(connection: Annotated[Any, depends]) -> None:
        connection.add_query_logger(log)

    def note(_c: object, _cursor: object, statement: str, *_: Any) -> None:
        asked.append(statement)

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "first"})).status_code == 200  # looks where it is
        asked.clear()
        event.listen(postgres.engine.sync_engine, "before_cursor_execute", note)
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    await pool.close()
    told = [" ".join(each.split())[:40] for each in asked]
    assert [each for each in told if "dedup_claims" in each or "txid" in each] == [
        "SELECT count(*) FROM dedup_claims WHERE ",
        "SELECT txid_current_if_assigned() AS num",
        "SELECT txid_status(CAST($1 AS bigint))",
        "SELECT count(*) FROM dedup_claims WHERE ",
    ]


async def test_no_success_is_told_while_nobody_can_be_asked(kind: Kind) -> None:
    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    def refuse(_c: object, _cursor: object, statement: str, *_: Any) -> None:
        if "txid_status" in statement:
            msg = "the connection broke"
            raise OSError(msg)

    engine = kind.world.engine.sync_engine
    async with client(Shop(kind, "async def").app(create)) as c:
        event.listen(engine, "before_cursor_execute", refuse)
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
        event.remove(engine, "before_cursor_execute", refuse)
        # It was committed all the same, and the retry is told so.
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert (await kind.world.orders(), await kind.world.ids()) == (["a"], ["k"])


async def test_what_a_handler_raises_is_not_masked_by_the_state_of_its_transaction(kind: Kind) -> None:
    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        with suppress(asyncpg.PostgresError, psycopg.Error):
            await session.execute("select nothing")
        raise HTTPException(422)

    async with client(Shop(kind, "async def").app(create)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 422
    assert (await kind.world.orders(), await kind.world.ids()) == ([], [])


async def test_no_message_is_handled_while_nobody_can_be_asked(kind: Kind) -> None:
    async def create(sku: str, session: Any) -> None:
        await kind.add(session, sku)

    def refuse(_c: object, _cursor: object, statement: str, *_: Any) -> None:
        if "txid_status" in statement:
            msg = "the connection broke"
            raise OSError(msg)

    create.__annotations__["session"] = kind.annotation
    policy = Deduplicated(source=str, session=kind.dependency())
    handle = kind.world.dedup.handler(policy)(create)
    engine = kind.world.engine.sync_engine
    event.listen(engine, "before_cursor_execute", refuse)
    with pytest.raises(ClaimLostError):
        await handle("a")
    event.remove(engine, "before_cursor_execute", refuse)
    # It was committed all the same, and is acknowledged when it comes again.
    assert await handle("a") is Result.DUPLICATE
    assert (await kind.world.orders(), await kind.world.ids()) == (["a"], ["a"])


async def test_a_claim_in_memory_is_free_again_when_its_work_was_found_to_be_undone(postgres: World) -> None:
    async with asyncpg.create_pool(plain(postgres), min_size=1, max_size=1) as pool:

        async def get_connection() -> AsyncIterator[Any]:
            async with pool.acquire() as connection:
                transaction = connection.transaction()
                await transaction.start()
                yield connection
                await transaction.rollback()

        app, runs = postgres.app(), []
        policy = Deduplicated(store="memory", session=get_connection)

        @app.post("/orders", dependencies=[Depends(policy)])
        async def create(connection: Annotated[Any, Depends(get_connection)]) -> None:
            runs.append(await connection.execute("insert into orders (sku) values ('tea')"))

        async with client(app) as c:
            for _ in range(2):
                assert (await c.post("/orders", headers={KEY: "k"})).status_code == 500
    assert (len(runs), await postgres.orders()) == (2, [])


async def test_a_guard_in_front_remembers_what_was_found_to_be_committed(kind: Kind) -> None:
    kind.world.dedup = Dedup(kind.world.engine, reap_every=None, guard=GenerationalGuard())
    told: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    async with client(Shop(kind, "async def").app(create)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        event.listen(
            kind.world.engine.sync_engine,
            "before_cursor_execute",
            lambda _c, _cursor, statement, *_: told.append(statement),
        )
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert [each for each in told if "txid_status" in each] == []


@pytest.mark.parametrize("commits", [False, True])
async def test_a_request_that_anyio_cancels_leaves_nothing_in_flight(kind: Kind, *, commits: bool) -> None:
    # case B3: Starlette cancels by level, so whatever is awaited then is cancelled again
    guard = GenerationalGuard()
    kind.world.dedup = Dedup(kind.world.engine, reap_every=None, guard=guard)
    cancels = [True]

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        if cancels:
            cancels.clear()
            if commits:
                await kind.commit(session)
            tasks.cancel_scope.cancel()
            await anyio.sleep(60)

    async with client(Shop(kind, "async def").app(create, scope="orders")) as c:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(c.post, "/orders/a", headers={KEY: "k"}))
        assert guard.snapshot().in_flight == 0
        assert kind.world.dedup._flights._flights == {}
        answers = [await c.post("/orders/b", headers={KEY: "k"}) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 409]
    assert await kind.world.orders() == (["a", "b"] if commits else ["b"])


async def test_a_block_that_ends_before_its_commit_leaves_no_mark_behind(kind: Kind) -> None:
    # Nobody will tell what becomes of it, so who waits must look, and a guard must ask.
    guard = GenerationalGuard()
    dedup = Dedup(kind.world.engine, reap_every=None, guard=guard)
    async with kind.open() as session:
        async with dedup.claim("news", scope="tests", session=session):
            assert dedup._flights._flights
        assert dedup._flights._flights == {}
        with pytest.raises(ClaimInFlightError):
            async with dedup.claim("news", scope="tests"):
                raise AssertionError
        await kind.rollback(session)
    async with dedup.claim("news", scope="tests"):
        pass


async def test_a_claim_that_another_took_over_meanwhile_is_lost(kind: Kind) -> None:
    async with kind.open() as session:
        with pytest.raises(ClaimLostError, match="ended the transaction of its claim without COMMIT"):
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                await kind.run(session, "rollback")


async def test_a_cancelled_claim_is_undone(kind: Kind) -> None:
    # case B3: the statement has reached the server, and the app may commit what it has done besides
    async with kind.world.engine.connect() as other, kind.open() as session:
        await kind.add(session, "before")
        await other.execute(text("lock table dedup_claims in access exclusive mode"))
        task = asyncio.create_task(claim(kind.world.dedup, session))
        await eventually(lambda: waits_for_a_lock(kind.world))
        task.cancel()
        await asyncio.sleep(0)
        await other.rollback()
        with pytest.raises(asyncio.CancelledError):
            await task
        await kind.commit(session)
    assert (await kind.world.orders(), await kind.world.ids()) == (["before"], [])


async def waits_for_a_lock(world: World) -> bool:
    return bool((await world.column("select count(*) from pg_locks where not granted"))[0])


async def claim(dedup: Dedup, session: Any) -> None:
    async with dedup.claim("news", scope="tests", session=session):
        await asyncio.Event().wait()


def test_no_driver_is_needed_to_know_which_connections_are_drivers() -> None:
    code = (
        "import sys; sys.modules['asyncpg'] = sys.modules['psycopg'] = sys.modules['psycopg2'] = None\n"
        "from fastapi_dedup.stores.borrowed import is_session\n"
        "assert not is_session(int)\n"
        "import fastapi_dedup; fastapi_dedup.Dedup('sqlite:///x.db')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


async def test_an_engine_of_another_driver_serves_the_same_database(postgres: World) -> None:
    # The runtime on psycopg, the handlers on asyncpg's pool.
    engine = create_async_engine(postgres.engine.url.set(drivername="postgresql+psycopg"))
    dedup = Dedup(engine, reap_every=None)
    connection = await asyncpg.connect(plain(postgres))
    async with connection.transaction(), dedup.claim("news", scope="tests", session=connection):
        pass
    await connection.close()
    await engine.dispose()
    assert await postgres.ids() == ["news"]
