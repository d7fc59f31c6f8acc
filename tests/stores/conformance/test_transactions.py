"""A claim in the app's transaction: refusals leave no trace, and savepoints and errors stay the app's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    ConfigurationError,
    Dedup,
    DuplicateError,
    FingerprintMismatchError,
    StoreUnavailableError,
)
from fastapi_dedup.claims import Duplicate, InFlight
from tests.stores.promises import Promise
from tests.stores.worlds import SOON, Order, World, intent

NEWS = intent("news")


@asynccontextmanager
async def riding(world: World, logical_id: str = "news", **options: object) -> AsyncIterator[AsyncSession]:
    """Open a session of the app's, claim in it, and leave its transaction to the caller."""
    async with (
        world.session() as session,
        world.dedup.claim(
            logical_id,
            scope="tests",
            session=session,
            **options,  # type: ignore[arg-type]
        ),
    ):
        yield session


# Refusals leave no trace


@pytest.mark.parametrize("refusal", [DuplicateError, ClaimInFlightError, FingerprintMismatchError])
async def test_a_refused_duplicate_leaves_the_transaction_and_its_objects_usable(
    world: World, refusal: type[Exception]
) -> None:
    # case F5
    one, two = b"1" * 32, b"2" * 32
    async with world.attempt() as first, world.session() as session, asyncio.timeout(SOON):
        session.add(Order(sku="earlier"))
        await session.commit()
        await first.claim(intent("news", fingerprint=one))
        if refusal is not ClaimInFlightError:
            await first.delivery.succeed()
        earlier = (await session.scalars(text("select id from orders"))).one()
        loaded = await session.get_one(Order, earlier)
        added = Order(sku="added")
        session.add(added)
        with pytest.raises(refusal):
            async with world.dedup.claim(
                "news",
                scope="tests",
                session=session,
                fingerprint=two if refusal is FingerprintMismatchError else one,
            ):
                raise AssertionError
        assert added in session.new
        assert loaded.sku == "earlier"  # not expired: this would be a query, and fail outside of await
        assert loaded in session
        await first.delivery.fail()  # SQLite has one writer
        loaded.note = "changed"
        await session.flush()
        assert (await session.get_one(Order, added.id)).sku == "added"
        await session.commit()
    assert await world.orders() == ["added", "earlier"]
    assert await world.count("orders", "note = 'changed'") == 1


async def test_work_before_a_refused_claim_is_still_the_apps_to_commit(world: World) -> None:
    # case F5
    await world.claimed(NEWS)
    async with world.session() as session:
        session.add(Order(sku="before"))
        await session.flush()
        with pytest.raises(DuplicateError):
            async with world.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after", "before", "news"]


# Only our own unique key means duplicate


async def work(session: AsyncSession, *skus: str) -> None:
    session.add_all(Order(sku=sku) for sku in skus)
    await session.flush()


async def unique_sku(world: World) -> None:
    await world.execute("create unique index orders_sku on orders (sku)")
    await world.execute("insert into orders (sku) values ('taken')")


async def test_the_apps_integrity_error_stays_the_apps_and_frees_the_id(world: World) -> None:
    # case G9
    await unique_sku(world)
    with pytest.raises(IntegrityError):
        async with world.dedup.claim("news", scope="tests") as claim:
            await work(claim.session, "taken")
    with pytest.raises(IntegrityError):
        async with world.dedup.claim("news", scope="tests") as claim:
            claim.session.add(Order(sku="taken"))  # flushed by COMMIT
    assert await world.rows() == []
    await world.claimed(NEWS)


async def test_the_apps_integrity_error_stays_the_apps_in_a_session_of_the_apps(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # case G9
    await unique_sku(world)
    with pytest.raises(IntegrityError):
        async with riding(world) as session:
            await work(session, "taken")
    await world.claimed(NEWS)
    # The database has rolled back already: nothing is left to give back, and nobody needs to be alarmed.
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_statement_of_the_apps_that_fails_frees_the_id_without_alarm(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await unique_sku(world)
    with pytest.raises(IntegrityError):
        async with riding(world) as session:
            await session.execute(text("insert into orders (sku) values ('taken')"))
    await world.claimed(NEWS)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_constraint_that_fails_at_commit_frees_the_id(world: World) -> None:
    # case A2
    late = "create table late (order_id integer references orders (id) deferrable initially deferred)"
    await world.execute(late)

    @event.listens_for(world.dedup.engine.sync_engine, "connect")
    def _(connection: Any, _record: object) -> None:
        if world.hands.strict is not None:
            connection.execute(world.hands.strict)

    await world.dedup.engine.dispose()

    async def handler(session: AsyncSession) -> None:
        await work(session, "lost")
        await session.execute(text("insert into late values (77)"))

    with pytest.raises(IntegrityError):
        async with world.dedup.claim("news", scope="tests") as claim:
            await handler(claim.session)
    assert (await world.rows(), await world.orders()) == ([], [])
    await world.claimed(NEWS)
    await world.execute("drop table late")


async def test_another_unique_key_of_our_own_table_is_no_duplicate(world: World) -> None:
    # case G9: whoever adds a constraint to the table of claims gets its error, and no lost work
    await world.execute("create unique index one_per_scope on dedup_claims (scope)")
    await world.claimed(NEWS)
    with pytest.raises(StoreUnavailableError) as raised:
        await world.run(intent("other"))
    assert isinstance(raised.value.__cause__, IntegrityError)
    assert isinstance(await world.run(NEWS), Duplicate)


# Isolation levels


LEVELS = ("REPEATABLE READ", "SERIALIZABLE")


async def read_first(world: World, level: str) -> AsyncSession:
    """Return a session of the app's whose transaction has read: at these levels, its snapshot is taken.

    SQLite's driver begins no transaction before the first write, so nothing is taken there.
    """
    session = world.session()
    if Promise.SNAPSHOTS in world.backend:
        await session.connection(execution_options={"isolation_level": level})
    await session.scalars(text("select sku from orders"))
    return session


async def claim_in(world: World, session: AsyncSession, wanted: str = "news") -> object:
    """Claim in a session of the app's, and leave the claim in it; return the refusal, if it is one."""
    try:
        async with world.dedup.claim(wanted, scope="tests", session=session) as claim:
            pass
    except (DuplicateError, ClaimInFlightError) as refusal:
        return type(refusal)
    assert isinstance(claim, Claim)
    return Claim


HONEST = {DuplicateError, ClaimInFlightError}
"""What a loser may be told that cannot see the winner: done, or "not yet" and to try again."""


@pytest.mark.parametrize("level", LEVELS)
async def test_a_claim_committed_behind_the_snapshot_is_refused(world: World, level: str) -> None:
    # case F3
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        await world.claimed(NEWS)
        assert await claim_in(world, session) in HONEST
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after", "news"]


@pytest.mark.parametrize("level", LEVELS)
async def test_a_claim_in_flight_is_in_flight_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    async with (
        await read_first(world, level) as session,
        world.attempt() as first,
        asyncio.timeout(SOON),
    ):
        await first.claim(NEWS)
        assert await claim_in(world, session) is ClaimInFlightError
        await first.delivery.fail()
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after"]


@pytest.mark.parametrize("level", LEVELS)
async def test_a_free_id_is_claimed_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    async with await read_first(world, level) as session:
        assert await claim_in(world, session) is Claim
        session.add(Order(sku="news"))
        await session.commit()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize("level", LEVELS)
async def test_an_expired_claim_is_taken_over_at_every_isolation_level(world: World, level: str) -> None:
    # case E4
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session:
        assert await claim_in(world, session) is Claim
        await session.commit()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize("level", LEVELS)
async def test_an_expired_claim_that_was_renewed_behind_the_snapshot_is_refused(
    world: World, level: str
) -> None:
    # case F3
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        await world.claimed(NEWS)
        assert await claim_in(world, session) in HONEST
        session.add(Order(sku="after"))
        await session.commit()
    assert await world.orders() == ["after", "news", "news"]


@pytest.mark.parametrize("level", LEVELS)
async def test_an_expired_claim_that_was_reaped_behind_the_snapshot_is_never_called_done(
    world: World, level: str
) -> None:
    # Nobody has done the work inside a window: "duplicate" would lose it. "Not yet, try again" is honest.
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with await read_first(world, level) as session, asyncio.timeout(SOON):
        assert await world.dedup.reap() == 1
        assert await claim_in(world, session) in {Claim, ClaimInFlightError}
        session.add(Order(sku="after"))
        await session.commit()


async def test_an_id_that_nobody_has_claimed_is_never_called_done_under_serializable(world: World) -> None:
    # SERIALIZABLE also fails for reasons of its own: here, each of the two has read what the other writes,
    # for their claims share a page of the index.
    async with await read_first(world, "SERIALIZABLE") as session, asyncio.timeout(SOON):
        async with await read_first(world, "SERIALIZABLE") as other:
            assert await claim_in(world, other, "other") is Claim
            other.add(Order(sku="other"))
            await other.commit()
        try:
            outcome = await claim_in(world, session, "news")
        except StoreUnavailableError as error:
            assert isinstance(error.__cause__, DBAPIError)  # noqa: PT017 - honest as well
        else:
            assert outcome in {Claim, ClaimInFlightError}


@pytest.mark.parametrize("level", LEVELS)
async def test_one_of_many_claimants_runs_at_every_isolation_level(world: World, level: str) -> None:
    # case F3
    claimants = 6
    line = asyncio.Barrier(claimants)

    async def deliver() -> object:
        async with await read_first(world, level) as session:
            await line.wait()
            outcome = await claim_in(world, session)
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
        options = {"isolation_level": LEVELS[0]} if Promise.SNAPSHOTS in world.backend else {}
        connection = await session.connection(execution_options=options)
        if Promise.SNAPSHOTS not in world.backend:
            await connection.exec_driver_sql("begin")
        await session.scalars(text("select sku from orders"))
        await world.claimed(NEWS)
        if Promise.SNAPSHOTS in world.backend:
            assert await claim_in(world, session) in HONEST
        else:
            with pytest.raises(StoreUnavailableError) as raised:
                await claim_in(world, session)
            assert isinstance(raised.value.__cause__, DBAPIError)
        assert (await session.scalars(text("select sku from orders"))).all() == []
        await session.rollback()
        assert await claim_in(world, session) is DuplicateError
    assert await world.orders() == ["news"]


async def test_a_claim_that_no_rollback_can_undo_is_refused_or_released(world: World) -> None:
    # In autocommit a ROLLBACK undoes nothing: the failed handler's claim would stay for the whole window.
    dedup = world.runtime(engine=create_async_engine(world.url, isolation_level="AUTOCOMMIT"))
    with pytest.raises((ConfigurationError, RuntimeError)):
        async with dedup.claim("news", scope="tests"):
            raise RuntimeError
    assert await world.rows() == []


# Savepoints


BEFORE = ("nothing", "a SELECT", "a write")


async def begun(world: World, before: str) -> AsyncSession:
    """Return a session of the app's in which something has happened already."""
    session = world.session()
    if before == "a SELECT":
        await session.scalars(text("select sku from orders"))
    elif before == "a write":
        session.add(Order(sku="before"))
        await session.flush()
    return session


@pytest.mark.parametrize("before", BEFORE)
async def test_a_claim_in_a_savepoint_that_is_rolled_back_is_free_at_once(world: World, before: str) -> None:
    # case F7
    async with await begun(world, before) as session, asyncio.timeout(SOON):
        savepoint = await session.begin_nested()
        assert await claim_in(world, session) is Claim
        session.add(Order(sku="undone"))
        await session.flush()
        await savepoint.rollback()
        if Promise.WRITES_SIDE_BY_SIDE not in world.backend:
            await session.commit()  # the id is free before, but the one writer's lock is not
        await world.claimed(NEWS)
        assert isinstance(await world.run(NEWS, world.runtime()), Duplicate)
        await session.commit()
    assert await world.orders() == (["before", "news"] if before == "a write" else ["news"])


@pytest.mark.parametrize("before", BEFORE)
async def test_a_claim_in_a_released_savepoint_shares_the_fate_of_the_transaction_around(
    world: World, before: str
) -> None:
    # case F7: SQLite commits the first savepoint of a transaction that has not begun
    for ending in ("rollback", "commit"):
        async with await begun(world, before) as session:
            async with session.begin_nested():
                assert await claim_in(world, session) is Claim
                session.add(Order(sku="work"))
            await getattr(session, ending)()
        kept = ending == "commit"
        assert await world.count("orders", "sku = 'work'") == kept, ending
        assert await world.count() == kept, ending


async def test_a_savepoint_inside_the_claims_block_does_not_touch_the_claim(world: World) -> None:
    # case F7
    async with world.dedup.claim("news", scope="tests") as claim:
        savepoint = await claim.session.begin_nested()
        claim.session.add(Order(sku="undone"))
        await claim.session.flush()
        await savepoint.rollback()
        async with claim.session.begin_nested():
            claim.session.add(Order(sku="kept"))
    assert await world.orders() == ["kept"]
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_an_id_whose_savepoint_was_rolled_back_may_be_claimed_again_in_the_same_transaction(
    world: World,
) -> None:
    async with world.session() as session:
        for ending in ("rollback", "commit"):
            savepoint = await session.begin_nested()
            assert await claim_in(world, session) is Claim, ending
            await getattr(savepoint, ending)()
        await session.commit()
    assert await world.count() == 1


async def test_a_handler_that_raises_in_its_savepoint_frees_the_id(world: World) -> None:
    # case F7
    async with world.session() as session:
        with pytest.raises(RuntimeError):
            async with session.begin_nested(), world.dedup.claim("news", scope="tests", session=session):
                raise RuntimeError
        await session.commit()
    assert await world.rows() == []
    await world.claimed(NEWS)


# Reading before claiming, and claiming several ids


@pytest.mark.parametrize("ids", ["distinct", "the same"])
async def test_twenty_requests_that_read_first_all_get_an_answer(world: World, ids: str) -> None:
    # case F8
    requests = 20
    names = [str(number) for number in range(requests)] if ids == "distinct" else ["same"] * requests

    async def request(name: str) -> object:
        async with world.session() as session:
            await session.scalars(text("select sku from orders"))  # who is it?
            await asyncio.sleep(0)
            outcome = await claim_in(world, session, name)
            if outcome is Claim:
                session.add(Order(sku=name))
                await session.commit()
            return outcome

    outcomes = await asyncio.gather(*(request(name) for name in names))
    assert len(await world.orders()) == outcomes.count(Claim) == len({*names})
    assert {*outcomes} <= {Claim, DuplicateError, ClaimInFlightError}


@pytest.mark.parametrize("neighbours", ["one process", "many processes"])
async def test_batches_in_opposite_order_never_deadlock(world: World, neighbours: str) -> None:
    # case F6
    rounds = 200 if world.engine.dialect.name == "postgresql" else 50
    elsewhere = world.dedup if neighbours == "one process" else world.runtime()
    met: list[object] = []

    async def batches(dedup: Dedup, order: str) -> None:
        for number in range(rounds):
            async with world.attempt(dedup) as attempt:
                outcomes = [await attempt.claim(intent(f"{id_}{number % 20}")) for id_ in order]
                met.extend(type(outcome) for outcome in outcomes)
                await attempt.delivery.fail()  # so that the next round races for free ids again

    async with asyncio.timeout(3 * SOON):
        await asyncio.gather(batches(world.dedup, "pq"), batches(elsewhere, "qp"))
    assert len(met) == 4 * rounds
    assert {*met} <= {Claim, InFlight}
    assert await world.rows() == []
