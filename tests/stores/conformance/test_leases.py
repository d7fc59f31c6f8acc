"""Leased claims: held while a slow handler works, without its transaction and without a connection."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.pool import QueuePool

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    ClaimLostError,
    ConfigurationError,
    Dedup,
    DuplicateError,
)
from fastapi_dedup.claims import Claimed, Duplicate, InFlight, Lease, Receipt
from fastapi_dedup.refusals import Refusal
from tests.databases import engine_on
from tests.stores.promises import LEASING, Backend, Promise
from tests.stores.worlds import HOUR, SOON, Order, World, intent, statements, until

NEWS = intent("news")
NOON = datetime(2031, 7, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SHORT = timedelta(seconds=0.6)


@pytest.fixture(params=LEASING, ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return each place of leased claims in turn."""
    chosen: Backend = request.param
    return chosen


def leased(
    world: World, dedup: Dedup | None = None, *, lease: timedelta = HOUR, **options: Any
) -> AbstractAsyncContextManager[Claim]:
    """Claim the news with a lease; with one of an hour, its owner is not heard of during a test."""
    return (dedup or world.dedup).claim("news", scope="tests", lease=lease, window=HOUR, **options)


async def write(session: AsyncSession, sku: str = "news") -> None:
    session.add(Order(sku=sku))
    await session.flush()


async def abandon(world: World, lease: Lease) -> Receipt:
    """Claim, and die: no heartbeat, no release."""
    outcome = await world.leases().take(intent("news", lease=lease))
    assert isinstance(outcome, Claimed)
    return outcome.receipt


# while the handler works


async def test_a_leased_claim_is_there_for_everyone_to_see_while_its_work_goes_on(world: World) -> None:
    async with leased(world) as claim:
        row = await world.row(NEWS)
        assert row is not None
        assert row.leased_until is not None
        for dedup in (world.dedup, world.runtime()):
            assert await world.run(NEWS, dedup) == InFlight()
            with pytest.raises(ClaimInFlightError):
                async with leased(world, dedup):
                    pass
        await write(claim.session)
    assert isinstance(await world.run(NEWS), Duplicate)
    assert await world.orders() == ["news"]


async def test_no_connection_is_held_while_the_handler_works(world: World) -> None:
    async with leased(world):
        for engine in world.engines():
            assert isinstance(engine.pool, QueuePool)
            assert engine.pool.checkedout() == 0


async def test_a_live_owner_is_never_robbed_however_slow_it_is(world: World) -> None:
    # case E3
    seen: set[datetime | None] = set()
    elsewhere = world.runtime()
    async with leased(world, lease=SHORT) as claim, asyncio.timeout(SOON):
        while len(seen) < 6:  # claimed, and extended five times: longer than one lease
            row = await world.row(NEWS)
            assert row is not None
            seen.add(row.leased_until)
            assert await world.run(NEWS, elsewhere) == InFlight()
            await asyncio.sleep(0.02)
        await write(claim.session)
    assert isinstance(await world.run(NEWS), Duplicate)
    assert await world.orders() == ["news"]


async def test_a_live_owner_is_not_reaped_though_its_window_is_over(timed: World) -> None:
    await timed.at(NOON)
    async with timed.dedup.claim("news", scope="tests", lease=2 * HOUR, window=MINUTE):
        await timed.at(NOON + HOUR)
        assert await timed.dedup.reap() == 0
        assert await timed.run(NEWS) == InFlight()
    assert await timed.run(NEWS) != InFlight()  # counted from the claim, the window is over


# completion


async def test_claim_and_work_are_completed_by_one_commit(world: World) -> None:
    async with leased(world) as claim:
        await write(claim.session)
        with statements(world.dedup.engine) as heard:
            await claim.session.commit()
        if world.backend.leases is None:
            changing = [sent for sent in heard.sent if not re.match("(?i)(savepoint|release|select)", sent)]
            assert [sent.split()[0].lower() for sent in changing][-1] == "update"
        else:
            assert [sent.lower() for sent in heard.sent] == ["select 1"]  # it asks whether all is well
        await until_done(world)


async def until_done(world: World) -> None:
    """See that the claim is completed: at once, or where it is elsewhere, right after the COMMIT."""

    async def done() -> bool:
        return isinstance(await world.run(NEWS), Duplicate)

    if world.backend.leases is None:
        assert await done()
    else:
        await until(done)


async def test_a_completed_claim_counts_for_its_window_from_the_claim(timed: World) -> None:
    await timed.at(NOON)
    async with leased(timed, lease=2 * HOUR) as claim:
        assert (claim.claimed_at, claim.expires_at) == (NOON, NOON + HOUR)
        await timed.at(NOON + 59 * MINUTE)
    row = await timed.row(NEWS)
    assert row is not None
    assert (row.expires_at, row.leased_until) == (NOON + HOUR, None)
    assert await timed.run(NEWS) == Duplicate(NOON, NOON + HOUR, 59 * MINUTE)


@pytest.mark.parametrize("used", [True, False])
async def test_a_handler_that_needs_no_database_is_completed_too(world: World, used: bool) -> None:
    async with leased(world) as claim:
        if used:
            await claim.session.execute(text("select 1"))
            await claim.session.rollback()
    row = await world.row(NEWS)
    assert row is not None
    assert row.leased_until is None


async def test_the_commit_of_a_borrowed_session_completes_the_claim(world: World) -> None:
    async with world.session() as session:
        async with leased(world, session=session):
            await write(session)
        assert await world.run(NEWS) == InFlight()
        await session.commit()
        await until_done(world)
    assert await world.orders() == ["news"]


async def test_a_session_on_another_database_is_refused_before_its_handler_runs(
    world: World, tmp_path: Path
) -> None:
    if world.backend.leases is not None:  # then any database will do, for none completes the claim
        return
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'another.db'}")
    async with AsyncSession(engine) as session:
        with pytest.raises(ConfigurationError, match=r"another\.db"):
            async with leased(world, session=session):
                raise AssertionError
    await engine.dispose()
    assert await world.rows() == []


async def test_a_rollback_of_the_handlers_leaves_the_claim_alone(world: World) -> None:
    async with world.session() as session, leased(world, session=session):
        await write(session, "a mistake")
        await session.rollback()
        assert await world.run(NEWS) == InFlight()
        async with session.begin_nested():
            await write(session)
        await session.commit()
        await until_done(world)
    assert await world.orders() == ["news"]


async def test_a_borrowed_session_that_was_only_read_from_leaves_the_completion_to_us(world: World) -> None:
    async with world.session() as session:
        async with leased(world, session=session):
            await session.execute(text("select 1"))
            await session.close()
        assert isinstance(await world.run(NEWS), Duplicate)


async def test_a_session_that_was_used_before_the_claim_does_not_get_in_its_way(world: World) -> None:
    async with world.session() as session:
        await session.execute(text("select count(*) from orders"))
        async with leased(world, session=session):
            await write(session)
            await session.commit()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_snapshot_that_is_older_than_the_claim_does_not_get_in_its_way(
    world: World, level: str
) -> None:
    # case F3
    if Promise.SNAPSHOTS not in world.backend:
        level = "SERIALIZABLE"
    async with world.session() as session:
        await session.connection(execution_options={"isolation_level": level})
        await session.execute(text("select count(*) from orders"))
        if Promise.WRITES_SIDE_BY_SIDE not in world.backend:
            await session.rollback()  # one that has read an older state cannot write at all
        async with leased(world, lease=SHORT, session=session):
            first = await world.row(NEWS)
            assert first is not None

            async def extended() -> bool:
                row = await world.row(NEWS)
                return row is not None and row.leased_until != first.leased_until

            await until(extended)
            await write(session)
            await session.commit()
        assert isinstance(await world.run(NEWS), Duplicate)
    assert await world.orders() == ["news"]


async def test_leases_see_what_others_have_committed_whatever_the_apps_isolation(world: World) -> None:
    dedup = world.runtime(engine=engine_on(world.url, isolation_level="SERIALIZABLE"))
    if world.hands.keeps_snapshots:
        async with dedup._store.leases._engine.connect() as connection:
            assert await connection.get_isolation_level() == "READ COMMITTED"
    async with leased(world, dedup):
        assert await world.run(NEWS) == InFlight()
    assert isinstance(await world.run(NEWS), Duplicate)


# failure


async def test_connections_begin_with_what_the_app_has_them_begin_with(world: World) -> None:
    # with psycopg that has begun a transaction, in which no isolation level can be set
    engine = engine_on(world.url)
    dedup = world.runtime(engine=engine)
    begun: list[object] = []

    @event.listens_for(engine.sync_engine, "connect")
    def _(connection: Any, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("select 1")
        cursor.close()
        begun.append(connection)

    async with leased(world, dedup) as claim:
        assert len(begun) == (world.backend.leases is None)
        await write(claim.session)
    assert await world.orders() == ["news"]
    await until_done(world)


async def test_a_handler_that_fails_frees_its_id_at_once(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        async with leased(world) as claim:
            await write(claim.session)
            raise ZeroDivisionError
    assert await world.rows() == []
    await world.claimed(NEWS)
    assert await world.orders() == ["news"]


async def test_a_handler_that_is_cancelled_frees_its_id(world: World) -> None:
    at_work = asyncio.Event()

    async def work() -> None:
        async with leased(world):
            at_work.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await at_work.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await world.rows() == []


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_commit_whose_answer_is_lost_leaves_both_claim_and_work_or_neither(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_done: bool
) -> None:
    # cases B3, E2: the connection broke, or the request was cancelled, while COMMIT was under way
    dialect = world.dedup.engine.sync_engine.dialect
    commit = dialect.do_commit

    def lose_the_answer(connection: Any) -> None:
        monkeypatch.undo()
        if is_done:
            commit(connection)
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        async with leased(world) as claim:
            await write(claim.session)
            monkeypatch.setattr(dialect, "do_commit", lose_the_answer)
    # Where completing follows the COMMIT, nobody knows whether it should: that work may be repeated.
    kept = is_done and world.leases().completes_in_transactions
    assert (await world.orders(), await world.count()) == (["news"] * is_done, kept)
    assert isinstance(await world.run(NEWS), Duplicate if kept else Claim)


async def test_a_handler_that_committed_and_then_failed_gets_its_claim_released(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        async with world.session() as session, leased(world, session=session):
            await write(session)
            await session.commit()
            raise ZeroDivisionError
    assert await world.rows() == []


async def test_what_the_app_commits_after_a_failure_is_its_own_affair(world: World) -> None:
    async with world.session() as session:
        with pytest.raises(ZeroDivisionError):
            async with leased(world, session=session):
                raise ZeroDivisionError
        await write(session, "audit")
        await session.commit()
    assert await world.orders() == ["audit"]
    assert await world.rows() == []


async def test_a_failed_statement_that_the_handler_hides_is_no_success(world: World) -> None:
    # case F5
    lost = pytest.raises(ClaimLostError, match="a statement failed")
    async with world.session() as session:
        if not world.hands.aborts:  # a failed statement costs only itself
            async with leased(world, session=session):
                with pytest.raises(DBAPIError):
                    await session.execute(text("select nothing"))
                await session.commit()
            assert isinstance(await world.run(NEWS), Duplicate)
            return
        with lost:
            async with leased(world, session=session):
                with pytest.raises(DBAPIError):
                    await session.execute(text("select nothing"))
                await session.commit()

    async def released() -> bool:
        return await world.rows() == []

    await until(released)  # when the session has let go of the row


@pytest.mark.parametrize("fails_again", [False, True])
async def test_work_that_the_database_has_undone_is_not_done_and_runs_again(
    world: World, fails_again: bool
) -> None:
    # A deadlock's victim on MariaDB, ON CONFLICT ROLLBACK on SQLite: the next statement begins a new
    # transaction, and its COMMIT succeeds.
    async with world.session() as session:
        with pytest.raises(ClaimLostError, match="a statement failed"):
            async with leased(world, session=session):
                await write(session, "undone")
                await world.undo(session)
                with suppress(DBAPIError):
                    await session.execute(text("insert into orders (sku) values ('the rest')"))
                if fails_again:  # which undoes itself only
                    with pytest.raises(DBAPIError):
                        await session.execute(text("select nothing"))
                await session.commit()

    async def released() -> bool:
        return await world.rows() == []

    await until(released)
    assert await world.orders() == []
    async with leased(world) as claim:
        await write(claim.session)
    assert await world.orders() == ["news"]
    await until_done(world)


async def test_work_on_a_connection_that_was_lost_is_not_done_and_runs_again(world: World) -> None:
    async with world.session() as session:
        with pytest.raises(ClaimLostError):
            async with leased(world, session=session):
                await write(session, "lost")
                await world.crash(session)
                with suppress(DBAPIError, PendingRollbackError):
                    await session.execute(text("insert into orders (sku) values ('the rest')"))
                await session.commit()

    async def released() -> bool:
        return await world.rows() == []

    await until(released)
    async with leased(world) as claim:
        await write(claim.session)
    assert await world.orders() == ["news"]


async def test_a_handler_that_rolls_back_what_the_database_has_undone_may_try_again(world: World) -> None:
    async with leased(world) as claim:
        await write(claim.session, "undone")
        await world.undo(claim.session)
        await claim.session.rollback()
        await write(claim.session)
    assert await world.orders() == ["news"]
    await until_done(world)


# abandoned


async def test_a_lease_that_has_run_out_is_taken_over_by_one_of_many(timed: World) -> None:
    # cases E3, E4
    await timed.at(NOON)
    await abandon(timed, Lease(MINUTE))
    await timed.at(NOON + MINUTE - timed.backend.tick)
    assert await timed.run(NEWS) == InFlight()
    await timed.at(NOON + MINUTE)
    takers = 20
    line = asyncio.Barrier(takers)
    runtimes = [timed.runtime() for _ in range(4)]

    async def deliver(number: int, dedup: Dedup) -> Claim | Refusal | type[Exception]:
        await line.wait()
        if number % 2:
            return await timed.run(NEWS, dedup)
        try:
            async with leased(timed, dedup) as claim:
                await write(claim.session)
                return claim
        except (ClaimInFlightError, DuplicateError) as error:
            return type(error)

    async with asyncio.timeout(SOON):
        outcomes = await asyncio.gather(*map(deliver, range(takers), islice(cycle(runtimes), takers)))
    assert [type(outcome) for outcome in outcomes].count(Claim) == 1
    assert await timed.orders() == ["news"]
    assert await timed.count() == 1


async def test_a_lease_that_has_run_out_is_reaped(timed: World) -> None:
    await timed.at(NOON)
    await abandon(timed, Lease(MINUTE))
    assert await timed.dedup.reap() == 0
    await timed.at(NOON + MINUTE)
    reaped = timed.backend.leases is None
    assert await timed.dedup.reap() == int(reaped)
    assert await timed.count() == int(not reaped)  # elsewhere, the server reaps: tests.redis


@asynccontextmanager
async def robbed(timed: World, **options: Any) -> AsyncIterator[tuple[Claim, AsyncSession]]:
    """Yield a claim whose lease has run out, and which another delivery has taken over and completed."""
    await timed.at(NOON)
    async with timed.session() as session, leased(timed, session=session, **options) as claim:
        await timed.at(NOON + HOUR)
        assert isinstance(await timed.run(NEWS, timed.runtime()), Claim)
        yield claim, session


async def test_a_late_owners_commit_is_refused(timed: World) -> None:
    # case E3
    with pytest.raises(ClaimLostError, match="another delivery has taken the id over"):
        async with robbed(timed) as (_, session):
            await write(session, "late")
            await session.commit()
    assert await timed.orders() == ["news"]
    assert isinstance(await timed.run(NEWS), Duplicate)


async def test_a_late_owner_that_has_nothing_to_commit_is_told_too(timed: World) -> None:
    with pytest.raises(ClaimLostError, match="another delivery has taken the id over"):
        async with robbed(timed):
            pass
    assert isinstance(await timed.run(NEWS), Duplicate)


async def test_a_late_owner_cannot_release_what_is_anothers(timed: World) -> None:
    # case E3
    with pytest.raises(ZeroDivisionError):
        async with robbed(timed):
            raise ZeroDivisionError
    assert isinstance(await timed.run(NEWS), Duplicate)


async def test_a_late_owner_whom_nobody_has_robbed_may_complete(timed: World) -> None:
    await timed.at(NOON)
    async with leased(timed, lease=MINUTE) as claim:
        await timed.at(NOON + 10 * MINUTE)
        await write(claim.session)
    assert isinstance(await timed.run(NEWS), Duplicate)
    assert await timed.orders() == ["news"]


async def test_an_owner_that_is_robbed_hears_of_it_with_the_next_heartbeat(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ClaimLostError):
        async with leased(world, lease=SHORT):
            assert await world.dedup.release("news", scope="tests")
            await until(lambda: _logged(caplog, "was lost to another delivery"))


async def _logged(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return words in caplog.text


async def test_effects_that_must_not_repeat_keep_the_id_until_an_operator_decides(
    timed: World, caplog: pytest.LogCaptureFixture
) -> None:
    await timed.at(NOON)
    await abandon(timed, Lease(MINUTE, "block"))
    await timed.at(NOON + MINUTE)
    assert await timed.dedup.reap() == 0
    with caplog.at_level(logging.WARNING, "fastapi_dedup"):
        assert await timed.run(NEWS) == InFlight(abandoned=True)
    assert "leaves it to you to release it" in caplog.text
    with pytest.raises(ClaimInFlightError) as refused:  # at once: nothing is coming
        async with leased(timed, in_flight="wait", wait_timeout=HOUR):
            pass
    assert refused.value.abandoned
    assert await timed.dedup.release("news", scope="tests")
    await timed.claimed(NEWS)


@pytest.mark.parametrize("beats", [0, 1])
async def test_effects_that_must_not_repeat_keep_the_id_for_its_window(timed: World, beats: int) -> None:
    await timed.at(NOON)
    lease = Lease(MINUTE, "block")
    receipt = await abandon(timed, lease)
    for _ in range(beats):
        await timed.at(NOON + MINUTE / 2)
        assert await timed.leases().extend(intent("news", lease=lease), receipt)
    await timed.at(NOON + HOUR - timed.backend.tick)
    assert await timed.run(NEWS) == InFlight(abandoned=True)
    await timed.at(NOON + HOUR)
    await timed.claimed(NEWS)


async def test_a_heartbeat_that_comes_after_the_end_leaves_the_claim_done(world: World) -> None:
    receipt = await abandon(world, Lease(HOUR))
    wanted = intent("news", lease=Lease(HOUR))
    assert await world.leases().complete(wanted, receipt)
    assert not await world.leases().extend(wanted, receipt)
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_a_handler_that_raised_frees_its_id_though_effects_must_not_repeat(world: World) -> None:
    with pytest.raises(ZeroDivisionError):
        async with leased(world, on_abandoned="block"):
            raise ZeroDivisionError
    await world.claimed(NEWS)


# waiting


async def test_a_twin_does_not_wait_for_the_transaction_around_the_owners(world: World) -> None:
    # as the fixtures of many test suites have it: the session's COMMIT is not the database's
    elsewhere = world.runtime()
    async with (
        asyncio.timeout(SOON),
        world.dedup.engine.connect() as connection,
        AsyncSession(connection, join_transaction_mode="create_savepoint") as session,
    ):
        outer = await connection.begin()
        async with leased(world, session=session):
            await write(session)
            await session.commit()
        for dedup in (world.dedup, elsewhere):
            with pytest.raises((ClaimInFlightError, DuplicateError)):
                async with leased(world, dedup):
                    raise AssertionError
        await outer.rollback()
    assert await world.orders() == []


async def test_a_duplicate_waits_for_the_outcome_of_a_leased_claim(world: World) -> None:
    waiting = asyncio.Event()
    elsewhere = world.runtime()

    async def duplicate(dedup: Dedup) -> None:
        waiting.set()
        async with leased(world, dedup, in_flight="wait"):
            pass

    async with asyncio.timeout(SOON), leased(world) as claim:
        twins = [asyncio.create_task(duplicate(dedup)) for dedup in (world.dedup, elsewhere)]
        await waiting.wait()
        await write(claim.session)
    outcomes = await asyncio.gather(*twins, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DuplicateError, DuplicateError]


async def test_a_riding_claim_and_a_leased_one_of_the_same_id_exclude_each_other(world: World) -> None:
    if world.backend.leases is not None:
        async with leased(world), world.dedup.claim("news", scope="tests"):
            assert await world.count() == 1
        assert len(await World.rows(world)) == 1
        return
    async with world.attempt() as riding:
        await riding.claim(NEWS)
        if Promise.SEES_TWINS_ELSEWHERE in world.backend:
            with pytest.raises(ClaimInFlightError):
                async with leased(world, world.runtime()):
                    pass
        await riding.delivery.succeed()
    with pytest.raises(DuplicateError):
        async with leased(world):
            pass
