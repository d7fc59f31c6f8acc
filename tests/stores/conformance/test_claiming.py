"""One winner, together or not at all, and who may give an id back."""

from __future__ import annotations

import asyncio

import pytest

from fastapi_dedup import Claim, Dedup
from fastapi_dedup.claims import Claimed, Duplicate, InFlight, Mismatch, Receipt
from fastapi_dedup.refusals import Refusal
from tests import databases
from tests.stores.promises import BACKENDS, Promise
from tests.stores.worlds import SOON, World, intent, until

NEWS = intent("news")


def test_every_database_that_the_tests_know_is_run_through_the_suite() -> None:
    known = {*databases.BACKENDS, *databases.MARIADB, *databases.PGBOUNCER}
    assert {backend.database for backend in BACKENDS} == known


async def test_the_database_is_no_older_than_the_documentation_asks_for(world: World) -> None:
    async with world.engine.connect():
        version = world.engine.dialect.server_version_info
    assert version is not None
    assert version >= world.backend.store.floor


@pytest.mark.parametrize("neighbours", ["one process", "many processes"])
async def test_one_of_many_concurrent_claimants_runs(world: World, neighbours: str) -> None:
    claimants = 8
    runtimes = [world.dedup if neighbours == "one process" else world.runtime() for _ in range(claimants)]
    line = asyncio.Barrier(claimants)

    async def deliver(dedup: Dedup) -> Claim | Refusal:
        async with world.attempt(dedup) as attempt:
            await attempt.session.connection()  # each on a connection of its own
            await line.wait()
            return await attempt.run(NEWS)

    async with asyncio.timeout(SOON):
        outcomes = await asyncio.gather(*(deliver(dedup) for dedup in runtimes))
    assert [type(outcome) for outcome in outcomes].count(Claim) == 1
    assert {type(outcome) for outcome in outcomes} <= {Claim, Duplicate, InFlight}
    assert await world.orders() == ["news"]
    assert [row.logical_id for row in await world.rows()] == ["news"]


async def test_a_claim_shows_when_its_transaction_commits_and_not_before(world: World) -> None:
    async with world.attempt() as attempt:
        await attempt.claim(NEWS)
        await attempt.work("news")
        assert (await world.rows(), await world.orders()) == ([], [])
        await attempt.delivery.succeed()
        assert (len(await world.rows()), await world.orders()) == (1, ["news"])


async def test_a_claim_tells_what_was_claimed(world: World) -> None:
    claim = await world.claimed(NEWS)
    row = await world.row(NEWS)
    assert row is not None
    assert (claim.logical_id, claim.scope) == ("news", "tests")
    assert (claim.claimed_at, claim.expires_at) == (row.claimed_at, row.expires_at)


async def test_a_duplicate_of_finished_work_is_told_when_it_was_claimed(world: World) -> None:
    claim = await world.claimed(NEWS)
    for dedup in (world.dedup, world.runtime()):
        outcome = await world.run(NEWS, dedup)
        assert isinstance(outcome, Duplicate)
        assert (outcome.claimed_at, outcome.expires_at) == (claim.claimed_at, claim.expires_at)
        assert outcome.age is not None
        assert 0 <= outcome.age.total_seconds() < SOON


async def test_a_twin_of_unfinished_work_is_told_so_at_once(world: World) -> None:
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        assert await world.run(NEWS) == InFlight()
        await first.delivery.succeed()
    assert isinstance(await world.run(NEWS), Duplicate)


@pytest.mark.parametrize("ending", ["succeed", "fail"])
async def test_a_twin_in_another_process_is_told_so_at_once_or_the_outcome(world: World, ending: str) -> None:
    elsewhere = world.runtime()
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        twin = asyncio.create_task(world.run(NEWS, elsewhere))
        if Promise.SEES_TWINS_ELSEWHERE in world.backend:
            assert await twin == InFlight()
        await getattr(first.delivery, ending)()
        if Promise.SEES_TWINS_ELSEWHERE not in world.backend:
            # case F1: who waited for a failed twin runs
            assert isinstance(await twin, Duplicate if ending == "succeed" else Claim)


async def test_claims_of_other_ids_go_on_beside_an_unfinished_one(world: World) -> None:
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        other = asyncio.create_task(world.claimed(intent("other")))
        if Promise.WRITES_SIDE_BY_SIDE in world.backend:
            await other
        await first.delivery.succeed()
        await other
    assert len(await world.rows()) == 2


async def test_duplicates_of_finished_work_never_wait_for_the_writer_of_another_id(world: World) -> None:
    await world.claimed(NEWS)
    async with world.attempt() as other, asyncio.timeout(SOON):
        await other.claim(intent("other"))
        assert isinstance(await world.run(NEWS), Duplicate)
        assert isinstance(await world.run(NEWS, world.runtime()), Duplicate)


async def test_the_same_id_in_another_table_is_another_id(world: World) -> None:
    if Promise.WRITES_SIDE_BY_SIDE not in world.backend:
        return  # who is second waits for the file's one writer, whichever table it writes to
    other = world.runtime(table="other_claims")
    await other.create_table()
    try:
        async with world.attempt() as first, world.attempt(other) as second, asyncio.timeout(SOON):
            assert isinstance(await first.claim(NEWS), Claim)
            assert isinstance(await second.claim(NEWS), Claim)
            await first.delivery.fail()
            await second.delivery.fail()
    finally:
        await world.execute("drop table other_claims")


async def test_a_rollback_frees_the_id_at_once(world: World) -> None:
    async with world.attempt() as first:
        await first.claim(NEWS)
        await first.work("failed")
        await first.delivery.fail()
        assert isinstance(await world.run(NEWS), Claim)
    assert await world.orders() == ["news"]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_a_crash_of_the_connection_frees_the_id_at_once(world: World, where: str) -> None:
    # case E3
    async with world.attempt() as first:
        await first.claim(NEWS)
        await first.work("lost")
        await world.crash(first.session)
        if where == "here":  # the handler meets the dead connection, and fails
            await first.delivery.fail()
        async with asyncio.timeout(SOON):
            assert isinstance(
                await world.run(NEWS, world.dedup if where == "here" else world.runtime()), Claim
            )
        await first.delivery.fail()
    assert await world.orders() == ["news"]


async def test_the_refused_do_not_free_the_owners_claim(world: World) -> None:
    # case E1
    wanted, reused = intent("news", fingerprint=b"1" * 32), intent("news", fingerprint=b"2" * 32)

    async def is_refused(twin: object, refusal: type[Refusal]) -> None:
        async with world.attempt() as attempt:
            assert isinstance(await attempt.claim(twin), refusal)  # type: ignore[arg-type]
            await attempt.delivery.fail()

    async with world.attempt() as owner:
        assert isinstance(await owner.claim(wanted), Claim)
        await owner.work("news")
        for _ in range(2):
            await is_refused(wanted, InFlight)
            await is_refused(reused, Mismatch)
        await owner.delivery.succeed()
    for _ in range(2):
        await is_refused(wanted, Duplicate)
        await is_refused(reused, Mismatch)
    assert await world.orders() == ["news"]


async def test_only_the_receipt_of_the_claim_that_stands_releases_it(world: World) -> None:
    # case E3: a late owner does not delete the claim of who took over from it
    await world.claimed(NEWS)
    stale = await world.row(NEWS)
    await world.expire(NEWS)
    await world.claimed(NEWS)
    standing = await world.row(NEWS)
    assert stale is not None
    assert standing is not None
    assert stale.token != standing.token
    store = world.store()
    assert await store.release(NEWS, stale.receipt) is False
    async with world.attempt() as late:
        await store.withdraw(NEWS, stale.receipt, late.transaction)
        await late.delivery.succeed()
    assert await world.row(NEWS) == standing
    assert await store.release(NEWS, standing.receipt) is True
    assert await world.rows() == []


async def test_releasing_twice_is_releasing_once(world: World) -> None:
    await world.claimed(NEWS)
    await world.claimed(intent("other"))
    row = await world.row(NEWS)
    assert row is not None
    released = [await world.store().release(NEWS, row.receipt) for _ in range(2)]
    assert released == [True, False]
    assert [row.logical_id for row in await world.rows()] == ["other"]


async def test_releasing_what_nobody_claimed_does_nothing(world: World) -> None:
    await world.claimed(intent("other"))
    never = Receipt(b"t" * 16, *(2 * [(await world.rows())[0].claimed_at]))
    assert await world.store().release(NEWS, never) is False
    assert await world.store().release(NEWS, None) is False
    assert await world.count() == 1


async def test_an_operator_releases_whoever_holds_the_id(world: World) -> None:
    await world.claimed(NEWS)
    assert await world.dedup.release("news", scope="another") is False
    assert await world.dedup.release("news", scope="tests") is True
    assert isinstance(await world.run(NEWS), Claim)


async def test_an_operator_cannot_release_an_id_in_flight(world: World) -> None:
    async with world.attempt() as first:
        await first.claim(NEWS)
        if Promise.SEES_TWINS_ELSEWHERE in world.backend:  # else the release waits for the first to end
            async with asyncio.timeout(SOON):
                assert await world.dedup.release("news", scope="tests") is False
        await first.delivery.succeed()
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_a_withdrawn_claim_is_not_committed_with_the_rest(world: World) -> None:
    async with world.attempt() as attempt:
        outcome = await world.store().claim(NEWS, attempt.transaction)
        assert isinstance(outcome, Claimed)
        await attempt.work("kept")
        await world.store().withdraw(NEWS, outcome.receipt, attempt.transaction)
        await attempt.delivery.succeed()
    assert (await world.rows(), await world.orders()) == ([], ["kept"])


async def test_the_same_id_met_twice_in_one_delivery_is_one_claim(world: World) -> None:
    async with world.attempt() as attempt:
        first, second = await attempt.claim(NEWS), await attempt.claim(NEWS)
        assert isinstance(first, Claim)
        assert second is first
        await attempt.delivery.succeed()
    assert await world.count() == 1


async def test_several_claims_of_one_delivery_share_its_fate(world: World) -> None:
    ids = [intent("p"), intent("q"), intent("r")]
    for ending, expected in (("fail", 0), ("succeed", 3)):
        async with world.attempt() as attempt:
            for wanted in ids:
                assert isinstance(await attempt.claim(wanted), Claim)
            await getattr(attempt.delivery, ending)()
        assert await world.count() == expected


async def test_a_claim_without_any_work_still_counts(world: World) -> None:
    async with world.attempt() as attempt:
        await attempt.claim(NEWS)
        await attempt.delivery.succeed()
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_a_cancelled_claim_leaves_the_id_free(world: World) -> None:
    async with world.attempt() as holder:
        await world.hold_up(holder.session)
        async with world.attempt() as attempt:
            claiming = asyncio.create_task(attempt.claim(NEWS))
            await asyncio.wait([claiming], timeout=0.1)
            assert not claiming.done()
            claiming.cancel()
            await holder.delivery.fail()  # SQLite's thread cannot be cancelled while it waits for the lock
            with pytest.raises(asyncio.CancelledError):
                await claiming
            await attempt.delivery.fail()

    async def is_free() -> bool:
        return isinstance(await world.run(NEWS), Claim)

    await until(is_free)  # as soon as the server notices that the client has gone
    assert isinstance(await world.run(intent("other")), Claim)
    assert await world.orders() == ["news", "other"]
