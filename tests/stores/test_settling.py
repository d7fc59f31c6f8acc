"""Settling against a real store: failures give the id back, and a committed claim means committed work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fastapi_dedup import Claim, ClaimInFlightError, ConfigurationError, DedupError, DuplicateError
from fastapi_dedup.claims import Duplicate
from tests.databases import engine_on
from tests.stores.worlds import HOUR, SOON, Order, World, intent, until

NEWS = intent("news")
NOON = datetime(2031, 7, 1, 12, tzinfo=UTC)


class HandlerError(Exception):
    """What a handler raises."""


@pytest.fixture(params=["our session", "the app's session"])
def owner(request: pytest.FixtureRequest) -> str:
    """Return whose session the claim rides in."""
    return str(request.param)


@asynccontextmanager
async def claiming(world: World, owner: str) -> AsyncIterator[AsyncSession]:
    """Claim around a block, as a job does, and commit the app's session where it succeeds."""
    if owner == "our session":
        async with world.dedup.claim("news", scope="tests") as claim:
            yield claim.session
        return
    async with world.session() as session:
        async with world.dedup.claim("news", scope="tests", session=session):
            yield session
        await session.commit()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def work(session: AsyncSession, sku: str = "news") -> None:
    session.add(Order(sku=sku))
    await session.flush()


async def fail_after(session: AsyncSession, *steps: str) -> None:
    """Do what a handler does that fails in the end."""
    for step in steps:
        if step == "COMMIT":
            await session.commit()
        else:
            await work(session, step)
    raise HandlerError


async def runs(world: World) -> bool:
    """Tell whether the next try runs."""
    return isinstance(await world.run(NEWS), Claim)


@contextmanager
def releases_fail(world: World) -> Iterator[None]:
    """Make the database refuse to delete claims."""

    def refuse(_c: object, _cursor: object, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE"):
            msg = "the connection broke"
            raise OSError(msg)

    event.listen(world.dedup.engine.sync_engine, "before_cursor_execute", refuse)
    try:
        yield
    finally:
        event.remove(world.dedup.engine.sync_engine, "before_cursor_execute", refuse)


async def test_a_handler_that_raises_frees_the_id(
    world: World, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    # case E2
    for _ in range(2):
        with pytest.raises(HandlerError):
            async with claiming(world, owner) as session:
                await fail_after(session, "lost")
    async with claiming(world, owner) as session:
        await work(session)
    assert await world.orders() == ["news"]
    assert isinstance(await world.run(NEWS), Duplicate)
    assert errors(caplog) == []


async def test_a_handler_that_was_cancelled_frees_the_id(world: World, owner: str) -> None:
    # case B3
    started = asyncio.Event()

    async def handler() -> None:
        async with claiming(world, owner) as session:
            await work(session, "lost")
            started.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(handler())
    async with asyncio.timeout(SOON):
        await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(SOON):
        await world.claimed(NEWS)
    assert await world.orders() == ["news"]


async def never_end(session: AsyncSession) -> None:
    await work(session, "lost")
    await asyncio.Event().wait()


async def test_a_handler_that_ran_out_of_time_frees_the_id(world: World, owner: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), claiming(world, owner) as session:
            await never_end(session)
    await world.claimed(NEWS)
    assert await world.orders() == ["news"]


async def test_a_handler_that_committed_midway_and_then_failed_gets_its_claim_released(
    world: World, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    # cases A3, E2
    with pytest.raises(HandlerError):
        async with claiming(world, owner) as session:
            await fail_after(session, "first half", "COMMIT")
    assert await world.orders() == ["first half"]
    assert await world.rows() == []
    await world.claimed(NEWS)
    assert errors(caplog) == []


async def test_a_handler_that_went_on_after_its_commit_and_then_failed_gets_its_claim_released(
    world: World, owner: str
) -> None:
    # cases A3, E2: when the block ends, the app's session holds a connection again
    with pytest.raises(HandlerError):
        async with claiming(world, owner) as session:
            await fail_after(session, "first half", "COMMIT", "second half")
    assert await world.orders() == ["first half"]
    await until(partial(runs, world))


async def test_a_release_takes_no_second_connection_while_the_app_holds_the_only_one(
    world: World, owner: str
) -> None:
    engine = engine_on(world.url, pool_size=1, max_overflow=0, pool_timeout=0.5)
    world.dedup = world.runtime(engine=engine)
    async with asyncio.timeout(SOON):
        with pytest.raises(HandlerError):
            async with claiming(world, owner) as session:
                await fail_after(session, "COMMIT", "lost")
        assert await world.orders() == []
        await until(partial(runs, world))


async def test_a_release_that_fails_does_not_hide_why_the_handler_failed(
    world: World, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    # case E2
    with releases_fail(world), pytest.raises(HandlerError) as raised:
        async with claiming(world, owner) as session:
            await fail_after(session, "COMMIT")
    assert raised.value.__cause__ is None
    [message] = errors(caplog)
    assert "'news'" in message
    assert "'tests'" in message
    assert isinstance(await world.run(NEWS), Duplicate)  # as the message says, until the window ends


async def test_work_after_a_rollback_midway_is_claimed_anew(world: World, owner: str) -> None:
    # The handler rolled its claim back together with its first try; the second must not go unclaimed.
    async with claiming(world, owner) as session:
        await work(session, "first try")
        await session.rollback()
        await work(session)
    assert await world.orders() == ["news"]
    assert isinstance(await world.run(NEWS), Duplicate)
    assert await world.count() == 1


@pytest.mark.parametrize("other", ["done", "under way"])
async def test_work_after_a_rollback_midway_is_refused_where_another_has_taken_the_id(
    world: World, owner: str, other: str
) -> None:
    refusal = DuplicateError if other == "done" else ClaimInFlightError
    async with world.attempt() as thief, asyncio.timeout(SOON):

        async def handler(session: AsyncSession) -> None:
            await session.rollback()
            assert isinstance(await thief.claim(NEWS), Claim)
            await thief.work("the other's")
            if other == "done":
                await thief.delivery.succeed()
                await work(session, "mine")

        with pytest.raises(refusal):
            async with claiming(world, owner) as session:
                await handler(session)
        if other == "under way":
            await thief.delivery.succeed()
    assert await world.orders() == ["the other's"]
    assert await world.count() == 1


async def test_a_commit_midway_settles_the_claim_and_the_rest_is_the_apps(world: World, owner: str) -> None:
    async with claiming(world, owner) as session:
        await work(session, "first half")
        await session.commit()
        assert isinstance(await world.run(NEWS), Duplicate)
        await work(session, "second half")
    assert await world.orders() == ["first half", "second half"]
    assert await world.count() == 1


@pytest.mark.parametrize("when", ["before COMMIT is sent", "after COMMIT is done"])
async def test_a_cancellation_at_commit_leaves_both_claim_and_work_or_neither(
    world: World, owner: str, when: str
) -> None:
    # cases B3, E2
    running: list[asyncio.Task[None]] = []

    def cancel(_connection: object) -> None:
        running[0].cancel()

    async def handler() -> None:
        async with claiming(world, owner) as session:
            await work(session)
            engine = world.dedup.engine.sync_engine
            if when == "before COMMIT is sent":
                event.listen(engine, "commit", cancel, once=True)
            else:
                event.listen(session.sync_session, "after_commit", cancel, once=True)

    running.append(asyncio.create_task(handler()))
    with pytest.raises(asyncio.CancelledError):
        await running[0]

    async def agree() -> bool:  # at once, but for a COMMIT that the server ends between our two looks
        return await world.count() == len(await world.orders())

    await until(agree)
    async with asyncio.timeout(SOON):
        retry = await world.run(NEWS)
    assert isinstance(retry, Claim | Duplicate)
    assert await world.orders() == ["news"]


async def test_a_failed_delivery_is_settled_once_however_often_it_is_told(world: World) -> None:
    async with world.attempt() as attempt:
        await attempt.claim(NEWS)
        await attempt.session.commit()
        await attempt.delivery.fail()
        await world.claimed(NEWS)
        await attempt.delivery.fail()
        await attempt.delivery.finish()
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_a_claim_of_the_apps_session_is_withdrawn_and_the_rest_stays_the_apps(world: World) -> None:
    async with world.session() as session:
        await work(session, "before")
        with pytest.raises(HandlerError):
            async with world.dedup.claim("news", scope="tests", session=session):
                raise HandlerError
        await session.commit()  # the app tolerates the failure
    assert await world.orders() == ["before"]
    assert await world.rows() == []


async def test_a_window_counted_from_the_end_of_the_work_is_renewed_by_its_owner_only(timed: World) -> None:
    await timed.at(NOON)
    wanted = timed.dedup.intent("news", scope="tests", window=HOUR, from_end=True)
    async with timed.attempt() as attempt:
        await attempt.claim(wanted)
        await timed.at(NOON + HOUR / 2)
        await attempt.delivery.worked()
        await attempt.delivery.succeed()
    row = await timed.row(NEWS)
    assert row is not None
    assert (row.claimed_at, row.expires_at) == (NOON, NOON + 1.5 * HOUR)
    async with timed.attempt() as stranger:
        stale = row.receipt._replace(token=b"x" * 16)
        await timed.store().renew(wanted, stale, stranger.transaction)
        await stranger.delivery.succeed()
    assert await timed.row(NEWS) == row


async def test_a_session_on_another_database_is_refused_before_anything_is_written(
    world: World, tmp_path: Any
) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'another.db'}")
    async with AsyncSession(engine) as session:
        with pytest.raises(DedupError, match=r"another\.db"):
            async with world.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        assert (await session.scalars(text("select name from sqlite_master"))).all() == []
    await engine.dispose()
    assert await world.rows() == []


@pytest.mark.parametrize("lease", [None, HOUR])
async def test_a_session_that_takes_no_statement_yet_is_told_as_such(
    world: World, lease: timedelta | None
) -> None:
    claim = partial(world.dedup.claim, "news", scope="tests", lease=lease)
    async with world.session(autobegin=False) as session:
        if lease is None:  # else the handler may begin, and the COMMIT completes the claim
            with pytest.raises(ConfigurationError, match=r"begin\(\)"):
                async with claim(session=session):
                    raise AssertionError
        async with session.begin(), claim(session=session):
            await work(session)
    assert await world.orders() == ["news"]


async def test_a_failed_statement_that_the_handler_swallows_never_makes_a_success_without_a_claim(
    world: World, owner: str
) -> None:
    # PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, and calls it no error.
    async def handler(session: AsyncSession) -> None:
        await work(session)
        with suppress(DBAPIError):
            await session.execute(text("select * from no_such_table"))

    succeeded = True
    try:
        async with claiming(world, owner) as session:
            await handler(session)
    except Exception:  # noqa: BLE001 - whatever it is, it is no success
        succeeded = False
    assert await world.count() == len(await world.orders()) == succeeded
    assert isinstance(await world.run(NEWS), Duplicate if succeeded else Claim)


async def test_hooks_hear_what_became_of_each_claim(world: World, owner: str) -> None:
    told: list[str] = []
    world.dedup = world.runtime(hooks=[lambda event: told.append(event.kind.value)])
    with pytest.raises(HandlerError):
        async with claiming(world, owner) as session:
            await fail_after(session)
    assert told == ["claimed", "released"]
    async with claiming(world, owner):
        pass
    assert told[2:] == ["claimed", "committed"]
    with pytest.raises(DuplicateError):
        async with claiming(world, owner):
            raise AssertionError
    assert told[4:] == ["duplicate"]


async def test_one_session_of_the_apps_may_carry_claim_after_claim(world: World) -> None:
    async with world.session() as session:
        for number, ending in enumerate(("commit", "rollback", "commit")):
            async with world.dedup.claim(str(number), scope="tests", session=session):
                await work(session, str(number))
            await getattr(session, ending)()
    assert await world.orders() == ["0", "2"]
    assert {row.logical_id for row in await world.rows()} == {"0", "2"}
    assert isinstance(await world.run(intent("1")), Claim)


async def test_a_claim_in_a_savepoint_fails_without_those_around_it(world: World) -> None:
    # case F7
    async with world.session() as session:
        async with world.dedup.claim("outer", scope="tests", session=session):
            await work(session, "outer")
            with pytest.raises(HandlerError):
                async with session.begin_nested(), world.dedup.claim("inner", scope="tests", session=session):
                    await fail_after(session, "inner")
        await session.commit()
    assert await world.orders() == ["outer"]
    assert isinstance(await world.run(intent("outer")), Duplicate)
    assert isinstance(await world.run(intent("inner")), Claim)


async def test_a_statement_that_fails_in_a_savepoint_of_its_own_spoils_nothing(
    world: World, owner: str
) -> None:
    async def handler(session: AsyncSession) -> None:
        await work(session)
        with suppress(DBAPIError):
            async with session.begin_nested():
                await session.execute(text("select * from no_such_table"))

    async with claiming(world, owner) as session:
        await handler(session)
    assert await world.orders() == ["news"]
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_work_that_the_handler_commits_itself_after_a_rollback_is_claimed_with_it(
    world: World, owner: str
) -> None:
    told: list[str] = []
    world.dedup = world.runtime(hooks=[lambda event: told.append(event.kind.value)])
    async with claiming(world, owner) as session:
        await work(session, "first try")
        await session.rollback()
        await work(session)
        await session.commit()
        assert (await world.orders(), await world.count()) == (["news"], 1)
    assert told == ["claimed", "released", "committed"]
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_work_that_the_handler_commits_itself_after_a_rollback_is_refused_where_another_has_the_id(
    world: World, owner: str
) -> None:
    async def handler(session: AsyncSession) -> None:
        await session.rollback()
        async with world.attempt(world.runtime()) as thief:
            await thief.claim(NEWS)
            await thief.work("the other's")
            await thief.delivery.succeed()
        await work(session, "mine")
        await session.commit()

    async with asyncio.timeout(SOON):
        with pytest.raises(DedupError):
            async with claiming(world, owner) as session:
                await handler(session)
    assert (await world.orders(), await world.count()) == (["the other's"], 1)
    assert isinstance(await world.run(NEWS), Duplicate)
