"""Isolation levels: a race lost behind a snapshot is a refusal, and "done" is said only of what is done."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    ConfigurationError,
    DuplicateError,
    StoreUnavailableError,
)
from fastapi_dedup.claims import Duplicate
from fastapi_dedup.stores.dialects.postgresql import PostgreSQL
from tests.databases import engine_on
from tests.stores.promises import BACKENDS, Promise
from tests.stores.worlds import SOON, Order, World, intent

NEWS = intent("news")

SNAPSHOT = "REPEATABLE READ"
LEVELS = [
    pytest.param(backend, level, id=f"{backend.name}-{level}")
    for backend in BACKENDS
    for level in ((SNAPSHOT, "SERIALIZABLE") if Promise.SNAPSHOTS in backend else ("its only level",))
]
at_every_level = pytest.mark.parametrize(("backend", "level"), LEVELS, indirect=["backend"])


async def read_first(world: World, level: str) -> AsyncSession:
    """Return a session of the app's whose transaction has read: at these levels, its snapshot is taken.

    SQLite's driver begins no transaction before the first write, so nothing is taken there.
    """
    session = world.session()
    if Promise.SNAPSHOTS in world.backend:
        await session.connection(execution_options={"isolation_level": level})
    await (await session.connection()).exec_driver_sql(world.hands.snapshot)
    return session


HONEST = {DuplicateError, ClaimInFlightError}
"""What a loser may be told that cannot see the winner: done, or "not yet" and to try again."""


@at_every_level
async def test_a_claim_committed_behind_the_snapshot_is_refused(world: World, level: str) -> None:
    # case F3
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        await world.claimed(NEWS)
        assert await world.claim_in(session) in HONEST
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after", "news"]


@at_every_level
async def test_a_claim_in_flight_is_in_flight_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    async with (
        await read_first(world, level) as session,
        world.attempt() as first,
        asyncio.timeout(SOON),
    ):
        await first.claim(NEWS)
        assert await world.claim_in(session) is ClaimInFlightError
        await first.delivery.fail()
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after"]


@at_every_level
async def test_a_free_id_is_claimed_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    async with await read_first(world, level) as session:
        assert await world.claim_in(session) is Claim
        session.add(Order(sku="news"))
        await session.commit()
    assert isinstance(await world.run(NEWS), Duplicate)


@at_every_level
async def test_an_expired_claim_is_taken_over_at_every_isolation_level(world: World, level: str) -> None:
    # case E4
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session:
        assert await world.claim_in(session) is Claim
        await session.commit()
    assert isinstance(await world.run(NEWS), Duplicate)


@at_every_level
async def test_an_expired_claim_that_was_renewed_behind_the_snapshot_is_refused(
    world: World, level: str
) -> None:
    # case F3
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        await world.claimed(NEWS)
        assert await world.claim_in(session) in HONEST
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after", "news", "news"]


@at_every_level
async def test_an_expired_claim_that_was_reaped_behind_the_snapshot_is_never_called_done(
    world: World, level: str
) -> None:
    # Nobody has done the work inside a window: "duplicate" would lose it. "Not yet, try again" is honest.
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        assert await world.dedup.reap() == 1
        assert await world.claim_in(session) in {Claim, ClaimInFlightError}
        session.add(Order(sku="after"))
        await session.commit()


async def test_an_id_that_nobody_has_claimed_is_never_called_done_under_serializable(world: World) -> None:
    # SERIALIZABLE also fails for reasons of its own: here, each of the two has read what the other writes,
    # for their claims share a page of the index.
    async with await read_first(world, "SERIALIZABLE") as session, asyncio.timeout(SOON):
        async with await read_first(world, "SERIALIZABLE") as other:
            assert await world.claim_in(other, "other") is Claim
            other.add(Order(sku="other"))
            await other.commit()
        try:
            outcome = await world.claim_in(session, "news")
        except StoreUnavailableError as error:
            assert isinstance(error.__cause__, DBAPIError)  # noqa: PT017 - honest as well
        else:
            assert outcome in {Claim, ClaimInFlightError}


@pytest.mark.parametrize(
    "backend",
    [pytest.param(backend, id=backend.name) for backend in BACKENDS if backend.dialect is PostgreSQL],
    indirect=True,
)
@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
async def test_claims_of_different_ids_leave_each_other_alone_under_serializable(
    world: World, many: bool
) -> None:
    # PostgreSQL ends one of two that have each read where the other inserts: anywhere, in a small table
    await world.claimed(NEWS)
    await world.execute(world.hands.analyze)  # so that the planner knows that it is small
    async with world.session() as first, world.session() as second:
        for session, name in ((first, "first"), (second, "second")):
            await session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
            if many:
                ids = [f"{name} {number}" for number in range(3)]
                async with world.dedup.claim_many(ids, scope="tests", session=session) as batch:
                    assert batch.new == tuple(ids)
            else:
                assert await world.claim_in(session, name) is Claim
            session.add(Order(sku=name))
            await session.flush()
        await first.commit()
        await second.commit()
    assert await world.orders() == ["first", "news", "second"]


@at_every_level
async def test_what_is_done_and_what_has_expired_is_told_exactly_without_a_snapshot_in_the_way(
    world: World, level: str
) -> None:
    # cases E4, F3
    for name in ("done", "expired", "done too", "expired too"):
        await world.claimed(intent(name))
    for name in ("expired", "expired too"):
        await world.expire(intent(name))
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        assert await world.claim_in(session, "done") is DuplicateError
        assert await world.claim_in(session, "expired") is Claim
        ids = ["done", "done too", "expired too", "new"]
        async with world.dedup.claim_many(ids, scope="tests", session=session) as batch:
            assert batch.duplicates == ("done", "done too")
            assert batch.new == ("expired too", "new")
        await session.commit()
    assert await world.count() == 5


@at_every_level
async def test_one_of_many_claimants_runs_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    claimants = 6
    line = asyncio.Barrier(claimants)

    async def deliver() -> object:
        async with await read_first(world, level) as session:
            await line.wait()
            outcome = await world.claim_in(session)
            if outcome is Claim:
                session.add(Order(sku="news"))
                await session.commit()
            return outcome

    outcomes = await asyncio.gather(*(deliver() for _ in range(claimants)))
    assert outcomes.count(Claim) == 1
    assert {*outcomes} <= {Claim, *HONEST}
    assert await world.orders() == ["news"]


async def test_a_transaction_that_sees_the_past_is_refused_or_told_that_it_cannot_write(world: World) -> None:
    # case F8: an app that begins its transactions itself, and reads, has a snapshot on SQLite too
    if world.engine.dialect.name == "sqlite":
        await world.execute("pragma journal_mode = wal")  # else a reader keeps every writer from committing
    async with world.session() as session, asyncio.timeout(SOON):
        options = {"isolation_level": SNAPSHOT} if world.hands.keeps_snapshots else {}
        connection = await session.connection(execution_options=options)
        if not world.hands.keeps_snapshots:
            await connection.exec_driver_sql("begin")
        await session.scalars(text("select sku from orders"))
        await world.claimed(NEWS)
        if world.hands.keeps_snapshots:
            assert await world.claim_in(session) in HONEST
        else:
            with pytest.raises(StoreUnavailableError) as raised:
                await world.claim_in(session)
            assert isinstance(raised.value.__cause__, DBAPIError)
        assert (await session.scalars(text("select sku from orders"))).all() == []
        await session.rollback()
        assert await world.claim_in(session) is DuplicateError
    assert await world.orders() == ["news"]


async def test_a_claim_that_no_rollback_can_undo_is_refused_or_released(world: World) -> None:
    # In autocommit a ROLLBACK undoes nothing: the failed handler's claim would stay for the whole window.
    dedup = world.runtime(engine=engine_on(world.url, isolation_level="AUTOCOMMIT"))
    with pytest.raises((ConfigurationError, RuntimeError)):
        async with dedup.claim("news", scope="tests"):
            raise RuntimeError
    assert await world.rows() == []
