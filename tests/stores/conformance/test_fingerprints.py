"""An id that comes back with another payload is a re-used id, and no retry."""

from __future__ import annotations

import asyncio

import pytest

from fastapi_dedup import Claim
from fastapi_dedup.claims import Duplicate, InFlight, Mismatch
from tests.stores.promises import Promise
from tests.stores.worlds import SOON, World, intent

ONE = intent("news", fingerprint=b"1" * 32)
TWO = intent("news", fingerprint=b"2" * 32)
WITHOUT = intent("news")


async def test_another_payload_is_told_from_a_retry_when_the_work_is_done(world: World) -> None:
    # case D3
    await world.claimed(ONE)
    original = await world.row(ONE)
    for dedup in (world.dedup, world.runtime()):
        assert await world.run(TWO, dedup) == Mismatch()
        assert isinstance(await world.run(ONE, dedup), Duplicate)
    assert await world.row(ONE) == original
    assert await world.orders() == ["news"]


async def test_another_payload_is_told_from_a_retry_while_the_work_is_under_way(world: World) -> None:
    # case D3
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(ONE)
        assert await world.run(TWO) == Mismatch()
        assert await world.run(ONE) == InFlight()
        assert await world.run(WITHOUT) == InFlight()
        if Promise.SEES_TWINS_ELSEWHERE in world.backend:
            # No other process can see an uncommitted payload: "not yet" is the most that it can say.
            assert await world.run(TWO, world.runtime()) == InFlight()
        await first.delivery.succeed()
    assert await world.run(TWO) == Mismatch()


async def test_another_payload_runs_once_the_first_has_failed(world: World) -> None:
    async with world.attempt() as first:
        await first.claim(ONE)
        await first.delivery.fail()
    assert isinstance(await world.run(TWO), Claim)
    row = await world.row(TWO)
    assert row is not None
    assert row.fingerprint == b"2" * 32


@pytest.mark.parametrize(("first", "second"), [(WITHOUT, ONE), (ONE, WITHOUT), (WITHOUT, WITHOUT)])
async def test_without_a_payload_on_either_side_there_is_nothing_to_compare(
    world: World, first: object, second: object
) -> None:
    await world.claimed(first)  # type: ignore[arg-type]  # parametrize has no types
    assert isinstance(await world.run(second), Duplicate)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 1, 20, 31, 33, 64])
async def test_a_digest_of_any_length_tells_a_retry_from_another_payload(world: World, length: int) -> None:
    # A column of 32 bytes fills up what is shorter, or does not take what is longer.
    short, other = b"1" * length, b"1" * length + b"\x00"
    await world.claimed(intent("news", fingerprint=short))
    assert isinstance(await world.run(intent("news", fingerprint=short), world.runtime()), Duplicate)
    assert await world.run(intent("news", fingerprint=other), world.runtime()) == Mismatch()
