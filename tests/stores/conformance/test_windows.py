"""The window is exact: counted from the claim, by the database's clock, and stored with the claim."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import text

from fastapi_dedup import Claim, Dedup
from fastapi_dedup.claims import Duplicate, InFlight
from fastapi_dedup.refusals import Refusal
from tests.stores.promises import Promise
from tests.stores.worlds import HOUR, SOON, World, intent

NEWS = intent("news")
NOON = datetime(2031, 7, 1, 12, tzinfo=UTC)
"""Years from what the app's clock says: only the database's may count."""


async def test_the_window_is_counted_from_the_claim_by_the_databases_clock(timed: World) -> None:
    # cases E4, F11
    await timed.at(NOON)
    claim = await timed.claimed(NEWS)
    assert (claim.claimed_at, claim.expires_at) == (NOON, NOON + HOUR)
    row = await timed.row(NEWS)
    assert row is not None
    assert (row.claimed_at, row.expires_at) == (NOON, NOON + HOUR)


async def test_a_duplicates_age_is_told_by_the_databases_clock(timed: World) -> None:
    await timed.at(NOON)
    await timed.claimed(NEWS)
    await timed.at(NOON + timedelta(minutes=10))
    assert await timed.run(NEWS) == Duplicate(NOON, NOON + HOUR, timedelta(minutes=10))


async def test_an_id_is_honoured_up_to_the_last_tick_of_its_window(timed: World) -> None:
    # case E4
    await timed.at(NOON)
    await timed.claimed(NEWS)
    for early in (timedelta(seconds=1), timedelta(milliseconds=1), timed.backend.tick):
        await timed.at(NOON + HOUR - early)
        assert isinstance(await timed.run(NEWS), Duplicate), early
        assert await timed.dedup.reap() == 0


@pytest.mark.parametrize("ticks", [0, 1])
async def test_an_expired_claim_counts_as_absent_though_no_reaper_has_met_it(
    timed: World, ticks: int
) -> None:
    # case E4
    await timed.at(NOON)
    await timed.claimed(NEWS)
    old = await timed.row(NEWS)
    later = NOON + HOUR + ticks * timed.backend.tick
    await timed.at(later)
    renewed = intent("news", window=2 * HOUR, fingerprint=b"2" * 32)
    claim = await timed.claimed(renewed)
    assert (claim.claimed_at, claim.expires_at) == (later, later + 2 * HOUR)
    new = await timed.row(NEWS)
    assert old is not None
    assert new is not None
    assert new.token != old.token
    assert (new.claimed_at, new.expires_at, new.fingerprint) == (later, later + 2 * HOUR, b"2" * 32)
    assert await timed.count() == 1
    assert isinstance(await timed.run(renewed), Duplicate)
    assert await timed.orders() == ["news", "news"]


@pytest.mark.parametrize("ticks", [0, 1])
async def test_an_expired_claim_is_reaped(timed: World, ticks: int) -> None:
    await timed.at(NOON)
    await timed.claimed(NEWS)
    await timed.at(NOON + HOUR + ticks * timed.backend.tick)
    assert await timed.dedup.reap() == 1
    assert await timed.rows() == []


@pytest.mark.parametrize("neighbours", ["one process", "many processes"])
async def test_an_expired_claim_is_taken_over_by_one_of_many(world: World, neighbours: str) -> None:
    # case E4
    await world.claimed(NEWS)
    await world.expire(NEWS)
    takers = 20
    runtimes = [world.dedup] if neighbours == "one process" else [world.runtime() for _ in range(4)]
    line = asyncio.Barrier(takers)

    async def deliver(dedup: Dedup) -> Claim | Refusal:
        async with world.attempt(dedup) as attempt:
            await line.wait()
            return await attempt.run(NEWS)

    async with asyncio.timeout(SOON):
        outcomes = await asyncio.gather(*map(deliver, islice(cycle(runtimes), takers)))
    assert [type(outcome) for outcome in outcomes].count(Claim) == 1
    assert {type(outcome) for outcome in outcomes} <= {Claim, Duplicate, InFlight}
    assert await world.orders() == ["news"] * 2
    assert await world.count() == 1


async def test_a_takeover_that_rolls_back_leaves_the_expired_claim_to_the_next(world: World) -> None:
    await world.claimed(NEWS)
    await world.expire(NEWS)
    old = await world.row(NEWS)
    async with world.attempt() as first:
        assert isinstance(await first.claim(NEWS), Claim)
        assert await world.row(NEWS) == old
        await first.delivery.fail()
    assert await world.row(NEWS) == old
    await world.claimed(NEWS)


async def test_the_twin_of_an_unfinished_takeover_is_in_flight(world: World) -> None:
    await world.claimed(NEWS)
    await world.expire(NEWS)
    async with world.attempt() as first, asyncio.timeout(SOON):
        assert isinstance(await first.claim(NEWS), Claim)
        assert await world.run(NEWS) == InFlight()
        if Promise.SEES_TWINS_ELSEWHERE in world.backend:
            assert await world.run(NEWS, world.runtime()) == InFlight()
        await first.delivery.succeed()
    assert isinstance(await world.run(NEWS), Duplicate)


async def test_an_expired_claim_for_another_payload_is_no_mismatch(world: World) -> None:
    await world.claimed(intent("news", fingerprint=b"1" * 32))
    await world.expire(NEWS)
    await world.claimed(intent("news", fingerprint=b"2" * 32))


async def test_the_window_is_the_one_that_was_stored_with_the_claim(timed: World) -> None:
    await timed.at(NOON)
    long = timed.runtime(window=timedelta(hours=2))
    short = timed.runtime(window=timedelta(seconds=1))
    await timed.run(long.intent("long", scope="tests"), long)
    await timed.run(short.intent("short", scope="tests"), short)
    await timed.at(NOON + HOUR)
    assert isinstance(await timed.run(short.intent("long", scope="tests"), short), Duplicate)
    assert await short.reap() == 1  # "short", and only that
    assert isinstance(await timed.run(long.intent("short", scope="tests"), long), Claim)


async def test_a_policys_own_window_wins_over_the_runtimes(timed: World) -> None:
    await timed.at(NOON)
    async with timed.dedup.claim("news", scope="tests", window=timedelta(days=400)) as claim:
        assert claim.expires_at == NOON + timedelta(days=400)
    async with timed.dedup.claim("other", scope="tests") as claim:
        assert claim.expires_at == NOON + timedelta(hours=24)


@contextmanager
def time_zone(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run this process in a time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", name)
        time.tzset()
        try:
            yield
        finally:
            patch.undo()
            time.tzset()


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "Asia/Kathmandu"])
async def test_no_time_zone_moves_a_window(timed: World, zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # case F11: neither the process's zone, nor the connection's, nor a change to or from summer time
    before = datetime(2030, 11, 2, 12, tzinfo=ZoneInfo("America/New_York"))  # clocks go back the next night
    day = timedelta(hours=24)
    async with timed.zone(zone) as told:
        with time_zone(zone, monkeypatch):
            assert time.strftime("%Z") != "UTC"
            dedup = timed.runtime(window=day)
            await timed.at(before)
            async with dedup.claim("news", scope="tests") as claim:
                if timed.hands.zone:
                    assert await claim.session.scalar(text(timed.hands.zone)) == told
                assert claim.expires_at - claim.claimed_at == day
                assert claim.expires_at == before.astimezone(UTC) + day
                assert (claim.claimed_at.tzinfo, claim.expires_at.tzinfo) == (UTC, UTC)
            await timed.at(before.astimezone(UTC) + day - timed.backend.tick)
            refused = await timed.run(dedup.intent("news", scope="tests"), dedup)
            assert isinstance(refused, Duplicate)
            assert refused.age == day - timed.backend.tick
            await timed.at(before.astimezone(UTC) + day)
            assert isinstance(await timed.run(dedup.intent("news", scope="tests"), dedup), Claim)
