"""The life of a leased claim, without a database: heartbeats, completion, release, and what goes wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fastapi_dedup.claims import Claim, Claimed, Fate, InFlight, Intent, Lease, Outcome, Receipt
from fastapi_dedup.core import Delivery, settled
from fastapi_dedup.errors import ClaimLostError, StoreUnavailableError
from fastapi_dedup.leases import LeasedStore, LeasedTransaction
from tests.core.doubles import HOUR, NOON, Memory, Scene, intent

LONG = Lease(HOUR)
BRIEF = Lease(timedelta(milliseconds=30))
DOWN = StoreUnavailableError("the store is down")


class Work(Memory):
    """The handler's transaction, which does what is asked for before it commits."""

    def __init__(self, *, idle: bool = True) -> None:
        super().__init__([], ours=False, waits=asyncio.Event())
        self.idle = idle
        self.joined: tuple[Callable[[Any], None], Callable[[Fate], None]] | None = None

    def before_commit(self, work: Callable[[Any], None], decided: Callable[[Fate], None]) -> None:
        self.joined = work, decided

    def forget(self) -> None:
        self.joined = None

    def committed(self) -> None:
        """Commit as the app does."""
        work, decided = self.joined or (lambda _: None, lambda _: None)
        work(self)
        self.idle = True
        decided(Fate.COMMITTED)

    def rolled_back(self) -> None:
        _, decided = self.joined or (None, lambda _: None)
        self.idle = True
        decided(Fate.ROLLED_BACK)


class Ledger:
    """Where leases live: it writes down what it is asked for, and answers what the test wants.

    Args:
        apart: Whether it is apart from the handler's database.
    """

    realm = b""

    def __init__(self, *, apart: bool = False) -> None:
        self.completes_in_transactions = not apart
        self.journal: list[str] = []
        self.fails: dict[str, list[BaseException]] = {}
        complete_in = None if apart else True
        self.answers: dict[str, Any] = {"extend": True, "complete": True, "complete_in": complete_in}
        self.asked = asyncio.Condition()

    async def _ask(self, what: str) -> Any:
        async with self.asked:
            self.journal.append(what)
            self.asked.notify_all()
        if fails := self.fails.get(what):
            raise fails.pop(0)
        return self.answers.get(what, True)

    async def times(self, what: str, number: int) -> None:
        """Wait until it has been asked for something so many times."""
        async with asyncio.timeout(10), self.asked:
            await self.asked.wait_for(lambda: self.journal.count(what) >= number)

    async def take(self, wanted: Intent) -> Outcome:
        await self._ask("take")
        return Claimed(Receipt(b"1", NOON, NOON + wanted.term))

    async def look(self, _: Intent) -> Outcome | None:
        return InFlight()

    async def extend(self, _: Intent, __: Receipt) -> bool:
        return bool(await self._ask("extend"))

    async def complete(self, _: Intent, __: Receipt) -> bool:
        return bool(await self._ask("complete"))

    def complete_in(self, _: Any, __: Intent, ___: Receipt) -> bool | None:
        self.journal.append("complete_in")
        if fails := self.fails.get("complete_in"):
            raise fails.pop(0)
        answer: bool | None = self.answers["complete_in"]
        return answer

    async def release(self, _: Intent, __: Receipt | None) -> bool:
        return bool(await self._ask("release"))

    async def check(self) -> None:
        self.journal.append("check")

    async def dispose(self) -> None:
        self.journal.append("dispose")


class Stage:
    """A delivery with a leased claim on a `Ledger`."""

    def __init__(self, lease: Lease = LONG, *, idle: bool = True, apart: bool = False) -> None:
        self.scene = Scene()
        self.ledger = Ledger(apart=apart)
        self.work = Work(idle=idle)
        self.lease = lease
        self.intent = replace(intent(), lease=lease)
        self.delivery: Delivery = self.scene.delivery()

    async def claim(self) -> Claim:
        held = LeasedTransaction(self.work, self.lease, flights=self.scene.flights)
        outcome = await self.delivery.claim(self.intent, held, store=LeasedStore(self.ledger))
        assert isinstance(outcome, Claim)
        return outcome

    @property
    def told(self) -> list[str]:
        return self.scene.told


# heartbeats


async def test_a_heartbeat_that_the_store_does_not_answer_is_followed_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(BRIEF)
    stage.ledger.fails["extend"] = [DOWN, DOWN, RuntimeError("unforeseen")]
    async with settled(stage.delivery):
        await stage.claim()
        await stage.ledger.times("extend", 5)
    assert caplog.text.count("could not extend the lease") == 3
    assert stage.told == ["claimed", "committed"]


async def test_a_heartbeat_that_hangs_is_given_up_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(BRIEF)
    calls = 0

    async def hang(_: Intent, __: Receipt) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.Event().wait()
        return bool(await stage.ledger._ask("extend"))

    stage.ledger.extend = hang  # type: ignore[method-assign]
    async with settled(stage.delivery):
        await stage.claim()
        await stage.ledger.times("extend", 2)
    assert "TimeoutError" in caplog.text


async def test_heartbeats_end_with_the_claim() -> None:
    stage = Stage(BRIEF)
    async with settled(stage.delivery):
        await stage.claim()
    assert len(asyncio.all_tasks()) == 1


async def test_a_session_that_is_never_ended_does_not_keep_the_claim_alive_for_ever() -> None:
    stage = Stage(BRIEF, idle=False)
    async with settled(stage.delivery):
        await stage.claim()
    (beating,) = asyncio.all_tasks() - {asyncio.current_task()}
    async with asyncio.timeout(10):
        await beating
    assert stage.ledger.journal.count("extend") <= 1


async def test_a_claim_is_kept_alive_until_all_of_the_apps_own_has_unwound() -> None:
    stage = Stage(BRIEF, idle=False)
    await stage.claim()
    await stage.delivery.succeed()
    await stage.ledger.times("extend", 4)
    stage.work.committed()
    await stage.delivery.finish()
    assert stage.told == ["claimed", "committed"]


async def test_a_lease_that_another_has_taken_is_not_extended_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(BRIEF)
    stage.ledger.answers |= {"extend": False, "complete": False}
    with pytest.raises(ClaimLostError):
        async with settled(stage.delivery):
            await stage.claim()
            (beating,) = asyncio.all_tasks() - {asyncio.current_task()}
            await beating
    assert "was lost to another delivery" in caplog.text
    assert stage.told == ["claimed", "released"]


# completion


async def test_the_handlers_commit_completes_and_nothing_else_is_needed() -> None:
    stage = Stage(idle=False)
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
    assert stage.ledger.journal == ["take", "complete_in"]
    assert stage.told == ["claimed", "committed"]


async def test_a_commit_that_comes_after_the_delivery_completes_too() -> None:
    stage = Stage(idle=False)
    async with settled(stage.delivery):
        await stage.claim()
    assert stage.told == ["claimed"]
    stage.work.committed()
    assert stage.ledger.journal == ["take", "complete_in"]
    assert stage.told == ["claimed", "committed"]


async def test_a_transaction_that_cannot_complete_the_claim_is_followed_by_one_that_can() -> None:
    stage = Stage(idle=False)
    stage.ledger.answers["complete_in"] = None
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
        assert stage.told == ["claimed"]
    assert stage.ledger.journal == ["take", "complete_in", "complete"]
    assert stage.told == ["claimed", "committed"]


async def test_what_was_committed_without_its_claim_is_done_though_the_store_goes_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(BRIEF, idle=False)
    stage.ledger.answers["complete_in"] = None
    stage.ledger.fails["complete"] = [DOWN]
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
    assert stage.told == ["claimed", "committed"]
    assert "is done, and its claim could not be completed" in caplog.text
    await stage.ledger.times("complete", 2)


async def test_the_commit_of_a_late_owner_fails_before_anything_is_durable() -> None:
    stage = Stage(idle=False)
    stage.ledger.answers["complete_in"] = False
    with pytest.raises(ClaimLostError, match="another delivery has taken the id over"):
        async with settled(stage.delivery):
            await stage.claim()
            stage.work.committed()


async def test_a_cancellation_does_not_cut_the_completion_in_half() -> None:
    stage = Stage()
    at_it, go = asyncio.Event(), asyncio.Event()

    async def slow(_: Intent, __: Receipt) -> bool:
        at_it.set()
        await go.wait()
        return True

    stage.ledger.complete = slow  # type: ignore[method-assign]

    async def deliver() -> None:
        async with settled(stage.delivery):
            await stage.claim()

    task = asyncio.create_task(deliver())
    await at_it.wait()
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.told == ["claimed", "committed"]
    assert stage.ledger.journal == ["take"]  # and no release


# release


async def test_a_failure_releases_once() -> None:
    stage = Stage()
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            raise ZeroDivisionError
    assert stage.ledger.journal == ["take", "release"]
    assert stage.told == ["claimed", "released"]


async def test_a_release_that_fails_leaves_the_lease_to_run_out(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.ledger.fails["release"] = [DOWN]
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            raise ZeroDivisionError
    assert "until its lease runs out" in caplog.text
    assert not stage.scene.is_in_flight(stage.intent)


async def test_a_commit_that_fails_has_not_completed_the_claim_in_it() -> None:
    stage = Stage(idle=False)
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            assert stage.work.joined is not None
            before_commit, _ = stage.work.joined
            before_commit(stage.work)
            stage.work.rolled_back()
            raise ZeroDivisionError
    assert stage.ledger.journal == ["take", "complete_in", "extend", "release"]  # it asks before it releases
    assert stage.told == ["claimed", "released"]


async def test_what_the_app_commits_after_a_failure_completes_nothing() -> None:
    stage = Stage(idle=False)
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            raise ZeroDivisionError
    stage.work.committed()
    await stage.scene.flights.drain()
    assert stage.ledger.journal == ["take", "release"]


async def test_a_release_waits_for_the_transaction_that_may_have_the_row_locked() -> None:
    stage = Stage(idle=False)
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            raise ZeroDivisionError
    assert stage.ledger.journal == ["take"]
    stage.work.rolled_back()
    await stage.scene.flights.drain()
    assert stage.ledger.journal == ["take", "release"]


async def test_a_claim_that_was_granted_to_a_cancelled_task_is_released() -> None:
    stage = Stage()
    at_it, go = asyncio.Event(), asyncio.Event()
    take = stage.ledger.take

    async def slow(wanted: Intent) -> Outcome:
        at_it.set()
        await go.wait()
        return await take(wanted)

    stage.ledger.take = slow  # type: ignore[method-assign]
    task = asyncio.create_task(stage.claim())
    await at_it.wait()
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.ledger.journal == ["take", "release"]
    assert not stage.scene.is_in_flight(stage.intent)


@pytest.mark.parametrize(
    ("on_abandoned", "expected"),
    [("retry", ["take", "complete", "release"]), ("block", ["take", "complete"])],
)
async def test_work_that_is_done_but_not_recorded_runs_again_unless_it_must_not(
    on_abandoned: Any, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    stage = Stage(Lease(HOUR, on_abandoned))
    stage.ledger.fails["complete"] = [DOWN]
    with pytest.raises(StoreUnavailableError):
        async with settled(stage.delivery):
            await stage.claim()
    assert stage.ledger.journal == expected


# where leases are apart from the handler's database


async def test_the_commit_asks_for_the_lease_before_and_the_claim_is_completed_after() -> None:
    stage = Stage(idle=False, apart=True)
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
        assert stage.ledger.journal == ["take", "complete_in"]
        await stage.ledger.times("complete", 1)  # though the handler goes on
    assert stage.ledger.journal == ["take", "complete_in", "complete"]
    assert stage.told == ["claimed", "committed"]


async def test_a_commit_that_comes_after_the_delivery_is_followed_too() -> None:
    stage = Stage(idle=False, apart=True)
    async with settled(stage.delivery):
        await stage.claim()
    stage.work.committed()
    await stage.scene.flights.drain()
    assert stage.ledger.journal == ["take", "complete_in", "complete"]
    assert stage.told == ["claimed", "committed"]


async def test_the_commit_of_an_owner_that_was_robbed_is_refused() -> None:
    stage = Stage(idle=False, apart=True)
    stage.ledger.answers["complete_in"] = False
    with pytest.raises(ClaimLostError, match="another delivery has taken the id over"):
        async with settled(stage.delivery):
            await stage.claim()
            stage.work.committed()
    assert "complete" not in stage.ledger.journal


async def test_a_commit_goes_on_without_an_answer_while_the_lease_is_sure_to_last() -> None:
    stage = Stage(idle=False, apart=True)
    stage.ledger.fails["complete_in"] = [DOWN]
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
    assert stage.told == ["claimed", "committed"]


async def test_a_commit_without_an_answer_is_refused_when_nobody_knows_whose_the_lease_is() -> None:
    stage = Stage(Lease(timedelta(microseconds=1)), idle=False, apart=True)
    stage.ledger.fails |= {"complete_in": [DOWN], "extend": [DOWN] * 1000}
    with pytest.raises(StoreUnavailableError):
        async with settled(stage.delivery):
            await stage.claim()
            stage.work.committed()
    assert "complete" not in stage.ledger.journal


@pytest.mark.parametrize(("minutes", "goes_on"), [(39, True), (40, False)])
async def test_a_lease_is_sure_to_last_for_as_long_as_it_leaves_a_commit_its_time(
    minutes: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("fastapi_dedup.leases.time", SimpleNamespace(monotonic=lambda: now))
    stage = Stage(Lease(HOUR), idle=False, apart=True)
    stage.ledger.fails["complete_in"] = [DOWN]
    async with settled(stage.delivery):
        await stage.claim()
        now = 60.0 * minutes
        with nullcontext() if goes_on else pytest.raises(StoreUnavailableError):
            stage.work.committed()
        if not goes_on:
            stage.work.committed()  # the store is back


@pytest.mark.parametrize("works_in_a_transaction", [True, False])
async def test_work_that_is_done_is_told_so_and_recorded_as_soon_as_the_store_is_back(
    works_in_a_transaction: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(BRIEF, idle=not works_in_a_transaction, apart=True)
    stage.ledger.fails["complete"] = [DOWN, DOWN, RuntimeError("unforeseen")]
    async with settled(stage.delivery):
        await stage.claim()
        if works_in_a_transaction:
            stage.work.committed()
    assert stage.told == ["claimed", "committed"]
    assert "is done, and its claim could not be completed" in caplog.text
    await stage.ledger.times("complete", 4)
    assert "release" not in stage.ledger.journal


async def test_work_that_is_done_and_whose_claim_is_gone_is_told_so_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage(idle=False, apart=True)
    stage.ledger.answers["complete"] = False
    async with settled(stage.delivery):
        await stage.claim()
        stage.work.committed()
    assert stage.told == ["claimed", "committed"]
    assert "another delivery may do the work again" in caplog.text


async def test_work_that_is_done_without_a_transaction_and_whose_claim_is_gone_has_failed() -> None:
    stage = Stage(apart=True)
    stage.ledger.answers["complete"] = False
    with pytest.raises(ClaimLostError):
        async with settled(stage.delivery):
            await stage.claim()
    assert stage.told == ["claimed", "released"]


async def test_a_failure_after_the_commit_gives_back_what_is_not_recorded_yet() -> None:
    stage = Stage(BRIEF, idle=False, apart=True)
    stage.ledger.fails["complete"] = [DOWN]
    with pytest.raises(ZeroDivisionError):
        async with settled(stage.delivery):
            await stage.claim()
            stage.work.committed()
            raise ZeroDivisionError
    (trying_again,) = stage.scene.flights._meanwhile
    await asyncio.wait([trying_again])
    assert stage.ledger.journal == ["take", "complete_in", "complete", "release"]
    assert stage.told == ["claimed", "committed", "released"]


async def test_a_stop_gives_up_what_an_outage_keeps_from_being_recorded() -> None:
    stage = Stage(apart=True)
    stage.ledger.fails["complete"] = [DOWN]
    async with settled(stage.delivery):
        await stage.claim()
    async with asyncio.timeout(1):
        await stage.scene.flights.drain()
    assert len(asyncio.all_tasks()) == 1
