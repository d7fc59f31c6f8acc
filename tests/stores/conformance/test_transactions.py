"""A claim in the app's transaction: refusals leave no trace, and savepoints and errors stay the app's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    Dedup,
    DedupError,
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


async def test_a_commit_that_fails_frees_the_id(world: World) -> None:
    # case A2
    async def handler() -> None:
        async with world.dedup.claim("news", scope="tests") as claim:
            await work(claim.session, "lost")
            await world.crash(claim.session)

    with pytest.raises((DBAPIError, InvalidRequestError, DedupError)):
        await handler()
    assert (await world.rows(), await world.orders()) == ([], [])
    await world.claimed(NEWS)


async def test_a_constraint_that_fails_at_commit_frees_the_id(world: World) -> None:
    # case A2
    if world.hands.late is None:  # no constraint of that database's fails as late as that
        with pytest.raises(DBAPIError):
            await world.execute("create table late (n integer check (n > 0) initially deferred)")
        return
    await world.execute(world.hands.late)

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
    await world.execute(f"create unique index one_per_scope on dedup_claims ({world.hands.scope})")
    await world.claimed(NEWS)
    with pytest.raises(StoreUnavailableError) as raised:
        await world.run(intent("other"))
    assert isinstance(raised.value.__cause__, IntegrityError)
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_an_expired_claim_that_cannot_be_taken_over_is_not_called_in_flight(world: World) -> None:
    # case G9
    payload = b"1" * 32
    await world.execute("create unique index one_per_payload on dedup_claims (fingerprint)")
    await world.claimed(intent("other", fingerprint=payload))
    await world.claimed(NEWS)
    await world.expire(NEWS)
    with pytest.raises(StoreUnavailableError) as raised:
        await world.run(intent("news", fingerprint=payload))
    assert isinstance(raised.value.__cause__, IntegrityError)


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
async def test_a_claim_after_a_failed_statement_is_told_why_it_is_refused(world: World, many: bool) -> None:
    refused = pytest.raises(
        StoreUnavailableError, match="a statement has failed in the handler's transaction"
    )
    async with world.session() as session:
        with pytest.raises(DBAPIError):
            await session.execute(text("select nothing"))
        with refused if world.hands.aborts else nullcontext():
            if many:
                async with world.dedup.claim_many(["news"], scope="tests", session=session):
                    pass
            else:
                await world.claim_in(session)
        await session.commit()
    assert await world.count() == (not world.hands.aborts)


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
            outcome = await world.claim_in(session, name)
            if outcome is Claim:
                session.add(Order(sku=name))
                await session.commit()
            return outcome

    outcomes = await asyncio.gather(*(request(name) for name in names))
    assert len(await world.orders()) == outcomes.count(Claim) == len({*names})
    assert {*outcomes} <= {Claim, DuplicateError, ClaimInFlightError}


@contextmanager
def not_at_once(world: World) -> Iterator[None]:
    """Let a store that may deadlock say so: its client is told 503, and tries again."""
    try:
        yield
    except StoreUnavailableError as error:
        if Promise.ANY_ORDER in world.backend:
            raise
        assert isinstance(error.__cause__, DBAPIError)  # noqa: PT017 - and nothing else


async def test_a_holder_that_rolls_back_before_two_others_lets_one_of_them_run(world: World) -> None:
    # case F6: InnoDB gives both of those that wait for a row a shared lock on it, and ends one as deadlocked
    async def deliver(dedup: Dedup) -> object:
        while True:
            with not_at_once(world):
                outcome = await world.run(NEWS, dedup)
                if outcome != InFlight():
                    return type(outcome)

    async with world.attempt() as holder, asyncio.timeout(SOON):
        await holder.claim(NEWS)
        others = [asyncio.create_task(deliver(world.runtime())) for _ in range(2)]
        await asyncio.wait(others, timeout=0.2)
        await holder.delivery.fail()
        outcomes = await asyncio.gather(*others)
    assert sorted(outcomes, key=str) == [Claim, Duplicate]
    assert await world.orders() == ["news"]


@pytest.mark.parametrize("neighbours", ["one process", "many processes"])
async def test_batches_in_opposite_order_never_deadlock(world: World, neighbours: str) -> None:
    # case F6
    rounds = 50
    if neighbours == "many processes" and Promise.SEES_TWINS_ELSEWHERE in world.backend:
        rounds = 200
    elif neighbours == "many processes" and Promise.ANY_ORDER not in world.backend:
        rounds = 5  # PostgreSQL takes a second to find a deadlock
    elsewhere = world.dedup if neighbours == "one process" else world.runtime()
    met: list[object] = []

    async def batches(dedup: Dedup, order: str) -> None:
        for number in range(rounds):
            with not_at_once(world):
                async with world.attempt(dedup) as attempt:
                    outcomes = [await attempt.claim(intent(f"{id_}{number % 20}")) for id_ in order]
                    met.extend(type(outcome) for outcome in outcomes)
                    await attempt.delivery.fail()  # so that the next round races for free ids again

    async with asyncio.timeout(3 * SOON):
        await asyncio.gather(batches(world.dedup, "pq"), batches(elsewhere, "qp"))
    if Promise.ANY_ORDER in world.backend:
        assert len(met) == 4 * rounds
    assert {*met} <= {Claim, InFlight}
    assert await world.rows() == []
