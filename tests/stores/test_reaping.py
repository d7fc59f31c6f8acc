"""The reaper against a real store: bounded, in nobody's way, and never at a claim that lives."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from datetime import timedelta

import pytest

from fastapi_dedup import Claim, Dedup
from fastapi_dedup.claims import Duplicate, InFlight
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.reaper import Reaper
from tests.apps.forked import forking
from tests.races.crowd import crowd
from tests.stores.promises import Promise
from tests.stores.workers import IDS, shut_down_while_another_writes, start_cold
from tests.stores.worlds import SOON, World, intent, statements

NEWS = intent("news")
LIMITED = re.compile(r"(?i)\blimit\b")
"""Tells the statement of a batch: some databases need a second one to delete what the first has found."""
EXPIRED = 50_000
LIVE = 500


async def test_a_sweep_is_bounded_batches_and_claims_go_on_beside_it(world: World) -> None:
    # case F12
    expired = EXPIRED if world.backend.reaps_fast else EXPIRED // 10
    await world.fill(expired, LIVE)
    dedup = world.runtime(reap_batch=1000)
    slowest = 0.0
    claimed = 0

    with statements(dedup.engine) as heard:
        sweep = asyncio.create_task(dedup.reap())
        while not sweep.done():
            began = time.monotonic()
            await world.claimed(intent(f"new {claimed}"))
            slowest = max(slowest, time.monotonic() - began)
            claimed += 1
        reaped = await sweep
        if Promise.WRITES_SIDE_BY_SIDE not in world.backend:
            reaped += await dedup.reap()  # a sweep ends early where a claim has the writer's lock
        assert reaped == expired
    batches = [n for sent, n in zip(heard.sent, heard.touched, strict=True) if LIMITED.search(sent)]
    assert max(batches) == 1000
    assert expired // 1000 <= len(batches) <= expired // 1000 + 2
    assert await world.count() == LIVE + claimed
    assert claimed > 0  # and each of them got through, though SQLite makes it wait for its turn
    if Promise.WRITES_SIDE_BY_SIDE in world.backend:
        assert slowest < 2


async def test_reaping_uses_the_index_and_reads_no_more_than_a_batch(world: World) -> None:
    # case F12
    await world.fill(5000, LIVE)
    await world.execute(world.hands.analyze)
    with statements(world.dedup.engine) as heard:
        await world.dedup.reap()
    reaping = next(sent for sent in heard.sent if LIMITED.search(sent))
    async with world.engine.connect() as connection:
        reaping = re.sub(r"\$\d::TIMESTAMP WITH TIME ZONE|(?<=expires_at <= )%s", world.hands.now, reaping)
        reaping = re.sub(r"(\$\d|%\(limit\)s)(::\w+)?|%s|\?", "1000", reaping)
        rows = await connection.exec_driver_sql(f"{world.hands.explain} {reaping}")
        plan = "\n".join(str(row) for row in rows.all())
    assert "ix_dedup_claims_expires_at" in plan, plan
    assert world.hands.range_scan in plan, plan
    assert "Seq Scan" not in plan, plan


async def test_a_sweep_counts_logs_and_tells(world: World, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    dedup = world.runtime(reap_batch=2, hooks=[told.append])
    await world.fill(5, live=1)
    with caplog.at_level(logging.INFO, "fastapi_dedup"):
        assert await dedup.reap() == 5
        assert await dedup.reap() == 0
    assert told == [Event(EventKind.REAPED, count=5)]
    [record] = [record for record in caplog.records if "reaped" in record.getMessage()]
    assert (record.levelno, record.args) == (logging.INFO, (5,))
    assert await world.count() == 1


@pytest.mark.parametrize(("expired", "statements_sent"), [(0, 1), (3, 1), (4, 2), (9, 3)])
async def test_a_sweep_ends_with_the_first_batch_that_is_not_full(
    world: World, expired: int, statements_sent: int
) -> None:
    dedup = world.runtime(reap_batch=4)
    await world.fill(expired)
    with statements(dedup.engine) as heard:
        assert await dedup.reap() == expired
    assert sum(LIMITED.search(sent) is not None for sent in heard.sent) == statements_sent
    assert await world.rows() == []


async def test_live_claims_and_those_in_flight_are_never_reaped(world: World) -> None:
    # case F12
    await world.claimed(intent("live"))
    await world.claimed(intent("renewed"))
    await world.expire(intent("renewed"))
    await world.claimed(intent("renewed"))
    async with world.attempt() as attempt, asyncio.timeout(SOON):
        await attempt.claim(intent("in flight"))
        sweep = asyncio.create_task(world.dedup.reap())
        if Promise.WRITES_SIDE_BY_SIDE in world.backend:
            assert await sweep == 0
        await attempt.work("in flight")
        await attempt.delivery.succeed()
        assert await sweep == 0
    assert {row.logical_id for row in await world.rows()} == {"in flight", "live", "renewed"}


@pytest.mark.parametrize("ending", ["succeed", "fail"])
async def test_an_expired_claim_that_is_just_taken_over_is_left_to_its_taker(
    world: World, ending: str
) -> None:
    # case F12
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with world.attempt() as taker, asyncio.timeout(SOON):
        assert isinstance(await taker.claim(NEWS), Claim)
        sweep = asyncio.create_task(world.dedup.reap())
        if Promise.WRITES_SIDE_BY_SIDE in world.backend:
            assert await sweep == 0  # it does not wait for the taker either
        await getattr(taker.delivery, ending)()
        reaped = await sweep
    reaped += await world.dedup.reap()
    assert reaped == (ending == "fail")
    assert await world.count() == (ending == "succeed")


async def test_claims_do_not_wait_for_a_batch_that_is_under_way(world: World) -> None:
    # case F12
    await world.fill(10)
    await world.claimed(intent("done"))
    async with world.dedup.engine.connect() as reaping, asyncio.timeout(SOON):
        assert await reaping.run_sync(world.store()._dialect.reap, 100) == 10
        assert isinstance(await world.run(intent("done")), Duplicate)
        claiming = asyncio.create_task(world.run(intent("new")))
        if Promise.WRITES_SIDE_BY_SIDE in world.backend:
            assert isinstance(await claiming, Claim)
        await reaping.commit()
        assert isinstance(await claiming, Claim)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_an_expired_claim_that_is_just_being_reaped_is_taken_by_one(world: World, ending: str) -> None:
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with world.dedup.engine.connect() as reaping, asyncio.timeout(SOON):
        await reaping.run_sync(world.store()._dialect.reap, 100)
        takers = [asyncio.create_task(world.run(NEWS, world.runtime())) for _ in range(3)]
        await asyncio.wait(takers, timeout=0.1)
        await getattr(reaping, ending)()
        outcomes = await asyncio.gather(*takers)
    assert [type(outcome) for outcome in outcomes].count(Claim) == 1
    assert {type(outcome) for outcome in outcomes} <= {Claim, Duplicate, InFlight}
    assert await world.orders() == ["news", "news"]
    assert await world.count() == 1


async def test_twenty_reapers_at_once_delete_each_claim_once(world: World) -> None:
    # case F13
    await world.fill(2000, live=5)
    dedup = world.runtime(reap_batch=50)
    sweeps = await asyncio.gather(*(dedup.reap() for _ in range(20)))
    total = sum(sweeps) + await dedup.reap()  # who skips what others hold may stop early
    assert total == 2000
    assert await world.count() == 5


async def test_a_runtime_sweeps_by_itself_until_it_is_stopped(world: World) -> None:
    # case F13
    swept = asyncio.Event()
    dedup = world.runtime(reap_every=timedelta(milliseconds=5), hooks=[lambda _: swept.set()])
    await dedup.start()
    for _ in range(2):
        await world.fill(3)
        async with asyncio.timeout(SOON):
            await swept.wait()
        swept.clear()
        assert await world.count() == 0
    await dedup.stop()
    assert [task for task in asyncio.all_tasks() if "reaper" in task.get_name()] == []


async def test_a_reaper_stops_within_a_second_in_the_middle_of_a_batch(world: World) -> None:
    # case F13
    await world.fill(100)
    begun = asyncio.Event()
    store = world.store()

    class Noted:
        async def reap(self, limit: int) -> int:
            begun.set()
            return await store.reap(limit)

    reaper = Reaper(Noted(), every=timedelta(milliseconds=1), batch=10, hooks=[])
    async with world.attempt() as holder:
        await world.hold_up(holder.session)
        reaper.start()
        await begun.wait()
        await asyncio.sleep(0.05)  # the batch waits for the lock
        began = time.monotonic()
        loop = reaper._loop
        await reaper.stop()
        assert time.monotonic() - began < 1.5
    assert loop is not None
    async with asyncio.timeout(SOON):
        await asyncio.wait([loop])
        await world.claimed(NEWS)  # nothing is left behind that would hold a lock
    assert await world.dedup.reap() == 100


async def test_a_process_exits_although_its_reaper_waits_for_the_writers_lock(world: World) -> None:
    # case F13
    if Promise.WRITES_SIDE_BY_SIDE in world.backend:
        async with world.attempt() as writer:
            await writer.claim(NEWS)
            assert await world.dedup.reap() == 0  # there is no such lock to wait for
        return
    file = world.engine.url.database
    process = forking().Process(target=shut_down_while_another_writes, args=(world.url, file))
    process.start()
    await asyncio.to_thread(process.join, SOON)
    exit_code = process.exitcode
    process.kill()
    assert exit_code == 0


async def test_four_workers_that_start_cold_create_one_table_and_win_each_id_once(world: World) -> None:
    # case F13
    await world.execute("drop table dedup_claims")
    await world.engine.dispose()
    met = await crowd(4, start_cold, world.url, world.backend.options)
    assert met["claimed"] == met["committed"] == IDS
    assert met.total() == 5 * IDS  # of the others, each is refused
    assert await world.count() == IDS


async def test_tables_are_created_at_once_by_many_and_twice_by_one(world: World) -> None:
    # case F13
    await world.execute("drop table dedup_claims")
    runtimes: list[Dedup] = [world.runtime() for _ in range(6)]
    async with asyncio.timeout(SOON):
        await asyncio.gather(*(dedup.create_table() for dedup in runtimes))
    await world.claimed(NEWS)
    await world.dedup.create_table()
    assert isinstance(await world.run(NEWS), Duplicate)
