"""The reaper's loop, without a database and without waiting."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from datetime import timedelta

import pytest

from fastapi_dedup.errors import StoreUnavailableError
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.reaper import Reaper


class Table:
    """So many expired claims; some sweeps fail, and some hang."""

    def __init__(self, expired: int = 0) -> None:
        self.expired = expired
        self.limits: list[int] = []
        self.errors: list[BaseException] = []
        self.hangs = False
        self.swept = asyncio.Event()

    async def reap(self, limit: int) -> int:
        self.limits.append(limit)
        self.swept.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.errors:
            raise self.errors.pop(0)
        deleted = min(limit, self.expired)
        self.expired -= deleted
        return deleted


def reaper(table: Table, *, batch: int = 10, told: list[Event] | None = None) -> Reaper:
    hooks = [] if told is None else [told.append]
    return Reaper(table, every=timedelta(milliseconds=1), batch=batch, hooks=hooks)


@pytest.mark.parametrize(("expired", "batches"), [(0, 1), (9, 1), (10, 2), (25, 3)])
async def test_one_sweep_deletes_batch_after_batch_until_one_is_not_full(expired: int, batches: int) -> None:
    table = Table(expired)
    assert await reaper(table).run_once() == expired
    assert table.limits == [10] * batches


async def test_a_sweep_that_deleted_something_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    with caplog.at_level(logging.INFO, "fastapi_dedup"):
        await reaper(Table(25), told=told).run_once()
        await reaper(Table(0), told=told).run_once()
    assert told == [Event(EventKind.REAPED, count=25)]
    assert [(record.levelno, record.args) for record in caplog.records] == [(logging.INFO, (25,))]


async def test_one_sweep_asked_for_by_hand_raises_what_went_wrong() -> None:
    table = Table()
    table.errors = [StoreUnavailableError("down")]
    with pytest.raises(StoreUnavailableError):
        await reaper(table).run_once()


async def test_a_sweep_that_raised_is_logged_and_followed_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # case F13
    told: list[Event] = []
    table = Table(3)
    table.errors = [StoreUnavailableError("down"), RuntimeError("a bug")]
    sweeping = reaper(table, told=told)
    sweeping.start()
    async with asyncio.timeout(5):
        while not told:
            await table.swept.wait()
            table.swept.clear()
            await asyncio.sleep(0)
    await sweeping.stop()
    assert told == [Event(EventKind.REAPED, count=3)]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[0] for record in errors if record.exc_info] == [
        StoreUnavailableError,
        RuntimeError,
    ]


async def test_it_stops_at_once_in_the_middle_of_a_pause_and_of_a_batch() -> None:
    # case F13
    for hangs in (False, True):
        table = Table()
        table.hangs = hangs
        every = timedelta(milliseconds=1) if hangs else timedelta(hours=1)
        sweeping = Reaper(table, every=every, batch=10, hooks=[])
        sweeping.start()
        task = sweeping._loop
        if hangs:
            await table.swept.wait()
        else:
            await asyncio.sleep(0)
        began = time.monotonic()
        await sweeping.stop()
        assert time.monotonic() - began < 1
        assert task is not None
        assert task.done()


async def test_it_stops_within_a_second_or_so_although_a_batch_will_not_be_cancelled() -> None:
    # case F13
    stubborn = asyncio.Event()

    class Stubborn(Table):
        async def reap(self, limit: int) -> int:
            self.swept.set()
            while not stubborn.is_set():
                try:
                    await stubborn.wait()
                except asyncio.CancelledError:
                    continue
            return limit - 1

    table = Stubborn()
    sweeping = reaper(table)
    sweeping.start()
    await table.swept.wait()
    task = sweeping._loop
    began = time.monotonic()
    await sweeping.stop()
    assert time.monotonic() - began < 1.5
    stubborn.set()
    assert task is not None
    while not task.done():  # it may have swallowed the first one
        task.cancel()
        await asyncio.sleep(0.001)


async def test_it_sweeps_once_at_a_time_however_often_it_is_started_and_may_start_again() -> None:
    table = Table()
    sweeping = reaper(table)
    for _ in range(3):
        sweeping.start()
    assert sum("reaper" in task.get_name() for task in asyncio.all_tasks()) == 1
    await sweeping.stop()
    await sweeping.stop()
    sweeping.start()
    async with asyncio.timeout(5):
        await table.swept.wait()
    await sweeping.stop()


async def test_every_pause_is_jittered_the_first_included(monkeypatch: pytest.MonkeyPatch) -> None:
    # so that workers that start together do not sweep together
    pauses: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            enough.set()
            await asyncio.Event().wait()

    monkeypatch.setattr("fastapi_dedup.reaper.asyncio.sleep", sleep)
    random.seed(0)
    sweeping = Reaper(Table(), every=timedelta(seconds=100), batch=10, hooks=[])
    sweeping.start()
    await enough.wait()
    await sweeping.stop()
    assert len({*pauses}) == 50
    assert min(pauses) >= 75
    assert max(pauses) <= 125
