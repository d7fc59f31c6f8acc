"""Every id of a batch shares the fate of the transaction; only what is released goes its own way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    Claim,
    ClaimInFlightError,
    ConfigurationError,
    Dedup,
    DuplicateError,
    StoreUnavailableError,
)
from fastapi_dedup.batches import Batch, BatchOutcome
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import Event, EventKind
from tests.databases import engine_on
from tests.stores.conformance.test_batches import at_once
from tests.stores.promises import BACKENDS, Promise
from tests.stores.test_settling import HandlerError, releases_fail
from tests.stores.worlds import SOON, Order, World, intent, statements, until

IDS = ("p", "q", "r")

owners = pytest.mark.parametrize("owner", ["our session", "the app's session"])


@asynccontextmanager
async def claiming(
    world: World, owner: str, ids: Sequence[str] = IDS, dedup: Dedup | None = None
) -> AsyncIterator[Batch[str]]:
    """Claim a batch around a block, and commit the app's session where the block succeeds."""
    dedup = dedup or world.dedup
    if owner == "our session":
        async with dedup.claim_many(ids, scope="tests") as batch:
            yield batch
        return
    async with AsyncSession(dedup.engine, expire_on_commit=False) as session:
        async with dedup.claim_many(ids, scope="tests", session=session) as batch:
            yield batch
        await session.commit()


async def work(batch: Batch[str], *skus: str) -> None:
    batch.session.add_all([Order(sku=sku) for sku in skus or batch.new])
    await batch.session.flush()


def fail_on(bad: str, item: str) -> None:
    if item == bad:
        raise HandlerError


async def free(world: World, ids: Sequence[str] = IDS) -> tuple[str, ...]:
    """Return which ids the next delivery may run, and leave them free."""
    async with world.runtime().claim_many(ids, scope="tests") as batch:
        for each in batch.new:
            batch.release(each)
    return batch.new


# Together or not at all


@owners
async def test_nothing_shows_before_the_commit_and_everything_after(world: World, owner: str) -> None:
    async with claiming(world, owner) as batch:
        await work(batch)
        assert (await world.rows(), await world.orders()) == ([], [])
    assert (await world.count(), await world.orders()) == (3, [*IDS])


@owners
async def test_a_failure_frees_every_id(world: World, owner: str) -> None:
    with pytest.raises(HandlerError):
        async with claiming(world, owner) as batch:
            await work(batch)
            raise HandlerError
    assert (await world.rows(), await world.orders()) == ([], [])
    assert await free(world) == IDS


async def test_a_failed_block_withdraws_its_claims_from_the_apps_transaction(world: World) -> None:
    async with world.session() as session:
        with pytest.raises(HandlerError):
            async with world.dedup.claim_many(IDS, scope="tests", session=session):
                raise HandlerError
        session.add(Order(sku="kept"))
        with statements(world.dedup.engine) as heard:
            await session.commit()
        assert not any("dedup_claims" in sent for sent in heard.sent)
    assert (await world.rows(), await world.orders()) == ([], ["kept"])


async def test_a_failed_block_costs_one_statement_however_many_ids_it_had(world: World) -> None:
    ids = [f"K{number}" for number in range(500)]
    async with world.session() as session:
        with statements(world.dedup.engine) as heard, pytest.raises(HandlerError):
            async with world.dedup.claim_many(ids, scope="tests", session=session):
                heard.sent.clear()
                raise HandlerError
        assert len(heard.sent) == (1 if at_once(world) else 500)
        await session.commit()
    assert await world.count() == 0


@owners
async def test_a_crash_of_the_connection_frees_every_id(world: World, owner: str) -> None:
    # case E3
    with pytest.raises(HandlerError):
        async with claiming(world, owner) as batch:
            await work(batch)
            await world.crash(batch.session)
            raise HandlerError

    async def all_are_free() -> bool:
        return await free(world) == IDS

    await until(all_are_free)
    assert await world.orders() == []


@owners
async def test_a_handler_that_committed_and_failed_then_has_every_id_given_back(
    world: World, owner: str
) -> None:
    heard: list[Event] = []
    dedup = world.runtime(hooks=[heard.append])
    with pytest.raises(HandlerError), statements(dedup.engine) as sent:
        async with claiming(world, owner, dedup=dedup) as batch:
            await work(batch)
            await batch.session.commit()
            sent.sent.clear()
            raise HandlerError
    assert (await world.count(), await world.orders()) == (0, [*IDS])
    assert len([event for event in heard if event.kind is EventKind.RELEASED]) == 3
    if at_once(world):
        assert sum("DELETE" in each for each in sent.sent) == 1


async def test_a_release_that_fails_masks_nothing_and_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # case E2
    with releases_fail(world), pytest.raises(HandlerError):
        async with claiming(world, "our session") as batch:
            await batch.session.commit()
            raise HandlerError
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "could not give back a batch of 3 in scope 'tests'" in line
    assert "refused until" in line
    assert await world.count() == 3


@owners
async def test_work_after_a_rollback_of_the_handlers_is_committed_with_the_claims_taken_anew(
    world: World, owner: str
) -> None:
    async with claiming(world, owner) as batch:
        await work(batch, "undone")
        await batch.session.rollback()
        await work(batch)
    assert (await world.count(), await world.orders()) == (3, [*IDS])


@owners
async def test_a_batch_that_another_took_after_a_rollback_commits_nothing(world: World, owner: str) -> None:
    with pytest.raises((ClaimLostError, ClaimInFlightError, DuplicateError)):
        async with claiming(world, owner) as batch:
            await batch.session.rollback()
            await world.claimed(intent("q"))
            await work(batch, "twice")
    assert await world.orders() == ["q"]
    assert await free(world) == ("p", "r")


async def test_a_batch_in_a_savepoint_shares_its_fate(world: World) -> None:
    # case F7
    async with world.session() as session:
        savepoint = await session.begin_nested()
        async with world.dedup.claim_many(IDS, scope="tests", session=session) as batch:
            await work(batch)
        await savepoint.rollback()
        await session.commit()
    assert (await world.rows(), await world.orders()) == ([], [])
    assert await free(world) == IDS


async def test_a_batch_of_500_that_met_a_failed_statement_is_looked_for_at_once(world: World) -> None:
    ids = [f"K{number}" for number in range(500)]
    async with world.dedup.claim_many(ids, scope="tests") as batch:
        with pytest.raises(DBAPIError):
            async with batch.session.begin_nested():
                await batch.session.execute(text("insert into orders (sku) values (null)"))
        with statements(world.dedup.engine) as heard:
            await batch.session.commit()
        assert len(heard.sent) == (1 if at_once(world) else 500)
    assert await world.count() == 500


@pytest.mark.parametrize("ids", [["p"], IDS])
async def test_a_block_that_failed_on_a_statement_leaves_the_rest_of_the_apps_transaction_to_it(
    world: World, ids: Sequence[str]
) -> None:
    # case F5
    async with world.session() as session:
        block: AbstractAsyncContextManager[Any] = world.dedup.claim_many(ids, scope="tests", session=session)
        if len(ids) == 1:
            block = world.dedup.claim(ids[0], scope="tests", session=session)
        with pytest.raises(DBAPIError):
            async with block, session.begin_nested():
                await session.execute(text("insert into orders (sku) values (null)"))
        session.add(Order(sku="kept"))
        await session.commit()
    assert (await world.orders(), await world.count()) == (["kept"], 0)


# Release


@owners
async def test_a_released_id_runs_again_and_the_others_do_not(world: World, owner: str) -> None:
    async with claiming(world, owner, ["p", "q", "q", "r"]) as batch:
        for item in batch.new:
            try:
                async with batch.session.begin_nested():
                    await work(batch, item)
                    fail_on("q", item)
            except HandlerError:
                batch.release(item)
        assert batch.unfinished == ("q", "q"), "the repeat shares the fate of the first copy"
    assert (await world.orders(), await world.count()) == (["p", "r"], 2)
    async with claiming(world, owner, batch.unfinished) as retry:
        assert [entry.outcome for entry in retry] == [BatchOutcome.NEW, BatchOutcome.REPEAT]
        await work(retry)
    assert (await world.orders(), await world.count()) == ([*IDS], 3)


@owners
async def test_what_a_database_error_made_fail_is_released_too(world: World, owner: str) -> None:
    # case F5: an error inside a savepoint leaves the transaction, and the other claims in it, usable
    await world.execute("create unique index once on orders (sku)")
    await world.execute("insert into orders (sku) values ('q')")
    async with claiming(world, owner) as batch:
        for item in batch.new:
            try:
                async with batch.session.begin_nested():
                    await work(batch, item)
            except IntegrityError:
                batch.release(item)
        assert batch.unfinished == ("q",)
    assert (await world.orders(), await free(world)) == ([*IDS], ("q",))


@owners
async def test_all_that_is_released_costs_one_statement(world: World, owner: str) -> None:
    async with claiming(world, owner) as batch:
        for item in batch.new:
            batch.release(item)
        sql = statements(world.dedup.engine)
        heard = sql.__enter__()
    sql.__exit__(None, None, None)
    if at_once(world):
        assert len(heard.sent) == 1
    assert await world.count() == 0


@owners
async def test_a_release_after_the_handlers_own_commit_still_frees_the_id(world: World, owner: str) -> None:
    guard = GenerationalGuard()
    dedup = world.runtime(guard=guard)
    async with claiming(world, owner, dedup=dedup) as batch:
        await batch.session.commit()
        batch.release("q")
    assert await free(world) == ("q",)
    async with claiming(world, owner, dedup=dedup) as again:
        assert again.new == ("q",)


@owners
async def test_a_released_id_is_not_taken_anew_after_the_handlers_rollback(world: World, owner: str) -> None:
    async with claiming(world, owner) as batch:
        batch.release("q")
        await batch.session.rollback()
        await work(batch, "p", "r")
    assert (await world.orders(), await free(world)) == (["p", "r"], ("q",))


async def test_a_release_that_cannot_be_made_lets_nothing_be_committed(world: World) -> None:
    with releases_fail(world), pytest.raises(StoreUnavailableError):
        async with claiming(world, "our session") as batch:
            await work(batch, "p", "r")
            batch.release("q")
    assert (await world.orders(), await world.count()) == ([], 0)


async def test_hooks_hear_which_ids_were_released(world: World) -> None:
    heard: list[Event] = []
    async with claiming(world, "our session", dedup=world.runtime(hooks=[heard.append])) as batch:
        batch.release("q")
    told = [(event.kind, event.logical_id) for event in heard if event.kind is not EventKind.CLAIMED]
    assert sorted(told, key=str) == sorted(
        [(EventKind.RELEASED, "q"), (EventKind.COMMITTED, "p"), (EventKind.COMMITTED, "r")], key=str
    )


async def test_only_new_items_of_a_batch_that_is_open_can_be_released(world: World) -> None:
    await world.claimed(intent("done"))
    async with claiming(world, "our session", ["p", "done"]) as batch:
        for wrong in ("done", "never seen"):
            with pytest.raises(ConfigurationError, match=r"batch\.new"):
                batch.release(wrong)
    with pytest.raises(ConfigurationError, match="has ended"):
        batch.release("p")
    assert await world.count() == 2


# In one process


async def test_a_cancelled_batch_leaves_every_id_free(world: World) -> None:
    async with world.attempt() as holder:
        await world.hold_up(holder.session)
        claim = world.dedup.claim_many(IDS, scope="tests")
        claiming = asyncio.create_task(claim.__aenter__())
        await asyncio.wait([claiming], timeout=0.1)
        assert not claiming.done()
        claiming.cancel()
        await holder.delivery.fail()  # SQLite's thread cannot be cancelled while it waits for the lock
        with pytest.raises(asyncio.CancelledError):
            await claiming

    async def all_are_free() -> bool:
        async with world.dedup.claim_many(IDS, scope="tests") as batch:
            for each in batch.new:
                batch.release(each)
            return batch.new == IDS

    await until(all_are_free)


async def test_who_waits_for_an_id_of_a_batch_is_woken_by_its_end(world: World) -> None:
    # case F1
    async def wait_for(logical_id: str) -> object:
        async with world.dedup.claim(logical_id, scope="tests", in_flight="wait") as claim:
            return claim.logical_id

    with pytest.raises(HandlerError):
        async with claiming(world, "our session") as batch, asyncio.timeout(SOON):
            waiter = asyncio.create_task(wait_for("q"))
            await asyncio.sleep(0.1)
            assert not waiter.done()
            await work(batch)
            raise HandlerError
    async with asyncio.timeout(SOON):
        assert await waiter == "q"


@owners
async def test_the_guard_answers_for_what_a_batch_has_committed(world: World, owner: str) -> None:
    dedup = world.runtime(guard=GenerationalGuard())
    async with claiming(world, owner, dedup=dedup) as batch:
        batch.release("q")
        async with dedup.claim_many(IDS, scope="tests") as twin:
            assert twin.in_flight == IDS
    with statements(dedup.engine) as heard:
        async with dedup.claim_many(["p", "r"], scope="tests") as again:
            assert again.duplicates == ("p", "r")
    assert heard.sent == []
    async with claiming(world, owner, dedup=dedup) as rest:
        assert (rest.new, rest.duplicates) == (("q",), ("p", "r"))


async def test_the_guard_forgets_a_batch_that_failed(world: World) -> None:
    dedup = world.runtime(guard=GenerationalGuard())
    for ending in ("fail", "commit and fail"):
        with pytest.raises(HandlerError):
            async with claiming(world, "our session", dedup=dedup) as batch:
                assert batch.new == IDS
                if ending == "commit and fail":
                    await batch.session.commit()
                raise HandlerError
    async with claiming(world, "our session", dedup=dedup) as batch:
        assert batch.new == IDS


# Snapshots

SNAPSHOT = "REPEATABLE READ"
LEVELS = [
    pytest.param(backend, level, id=f"{backend.name}-{level}")
    for backend in BACKENDS
    for level in ((SNAPSHOT, "SERIALIZABLE") if Promise.SNAPSHOTS in backend else ("its only level",))
]


@pytest.mark.parametrize(("backend", "level"), LEVELS, indirect=["backend"])
async def test_ids_that_were_committed_behind_the_snapshot_are_refused_and_the_others_run(
    world: World, level: str
) -> None:
    # case F3
    for each in ("expired", "renewed"):
        await world.claimed(intent(each))
        await world.expire(intent(each))
    async with world.session() as session, asyncio.timeout(SOON):
        if Promise.SNAPSHOTS in world.backend:
            await session.connection(execution_options={"isolation_level": level})
        await session.execute(text(world.hands.snapshot))
        await world.claimed(intent("hidden"))
        await world.claimed(intent("renewed"))
        ids = ["free", "hidden", "expired", "renewed"]
        async with world.dedup.claim_many(ids, scope="tests", session=session) as batch:
            assert batch.new == ("free", "expired")
            honest = {BatchOutcome.DUPLICATE, BatchOutcome.IN_FLIGHT}
            assert {entry.outcome for entry in batch} - {BatchOutcome.NEW} <= honest
            await work(batch)
        await session.commit()
    assert isinstance(await world.run(intent("another")), Claim)
    assert await free(world, ids) == ()


@pytest.mark.parametrize(("backend", "level"), LEVELS, indirect=["backend"])
async def test_a_batch_of_what_is_free_costs_no_statement_per_id_at_any_level(
    world: World, level: str
) -> None:
    ids = [f"K{number}" for number in range(300)]
    async with world.session() as session:
        if Promise.SNAPSHOTS in world.backend:
            await session.connection(execution_options={"isolation_level": level})
        with statements(world.dedup.engine) as heard:
            async with world.dedup.claim_many(ids, scope="tests", session=session) as batch:
                assert batch.new == tuple(ids)
        assert len(heard.sent) <= 6 or not at_once(world)
        await session.commit()
    assert await world.count() == 300


async def test_a_batch_on_an_autocommit_connection_is_refused_or_released(world: World) -> None:
    dedup = world.runtime(engine=engine_on(world.url, isolation_level="AUTOCOMMIT"))
    with pytest.raises((ConfigurationError, HandlerError)):
        async with claiming(world, "our session", dedup=dedup):
            raise HandlerError
    assert await world.rows() == []
