"""The guard, scenario by scenario. The clock is the test's own: nothing here sleeps."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import Counter
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from fastapi_dedup.errors import ConfigurationError, MissingLogicalIdError
from fastapi_dedup.guard import Attempt, GenerationalGuard, GuardEvent, Seen
from tests.guard.doors import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW = timedelta(seconds=60)
HALF = 30.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def guard(clock: Clock) -> GenerationalGuard:
    return GenerationalGuard(WINDOW, clock=clock)


def run(guard: GenerationalGuard, logical_id: str, destination: str | None = None) -> bool:
    """Handle one delivery, successfully if the guard lets it."""
    if not guard.begin(logical_id, destination):
        return False
    guard.complete(logical_id, destination)
    return True


# Begin, complete, release


def test_the_first_delivery_of_an_id_runs(guard: GenerationalGuard) -> None:
    assert guard.begin("a") is True


def test_an_id_in_flight_is_refused(guard: GenerationalGuard) -> None:
    guard.begin("a")

    assert guard.begin("a") is False


def test_a_processed_id_is_refused(guard: GenerationalGuard) -> None:
    run(guard, "a")

    assert guard.begin("a") is False


def test_other_ids_run_meanwhile(guard: GenerationalGuard) -> None:
    guard.begin("a")
    run(guard, "b")

    assert guard.begin("c")


def test_a_released_id_runs_again(guard: GenerationalGuard) -> None:
    guard.begin("a")
    guard.release("a")

    assert guard.begin("a")


@pytest.mark.parametrize("rotations", [0, 1])
def test_release_also_forgets_a_success(guard: GenerationalGuard, clock: Clock, rotations: int) -> None:
    run(guard, "a")
    clock.advance(rotations * HALF)
    assert guard.snapshot().rotated == rotations
    guard.release("a")

    assert guard.begin("a")


def test_releasing_an_unknown_id_is_no_error(guard: GenerationalGuard) -> None:
    guard.release("a")
    guard.release("a")

    assert guard.begin("a")


def test_an_id_that_was_never_begun_can_be_completed(guard: GenerationalGuard) -> None:
    guard.complete("a")

    assert not guard.begin("a")


def test_completing_twice_is_completing_once(guard: GenerationalGuard) -> None:
    run(guard, "a")
    guard.complete("a")

    assert guard.snapshot().processed == 1


@pytest.mark.parametrize("nothing", [None, "", b""])
@pytest.mark.parametrize("destination", [None, "queue"])
def test_no_id_is_no_id(guard: GenerationalGuard, nothing: Any, destination: str | None) -> None:
    # case C1: else all that have none would be one, and only the first of them would run
    for take in (guard.begin, guard.attempt, guard.look):
        with pytest.raises(MissingLogicalIdError):
            take(nothing, destination)
    assert guard.begin("None")


def test_ids_may_be_bytes(guard: GenerationalGuard) -> None:
    assert guard.begin(b"a")
    assert not guard.begin(b"a")
    assert guard.begin("a")


# Identity


def test_one_id_at_two_destinations_runs_at_both(guard: GenerationalGuard) -> None:
    # case G1
    assert run(guard, "a", "x")
    assert run(guard, "a", "y")
    assert run(guard, "a")
    assert not run(guard, "a", "x")
    assert not run(guard, "a", "y")
    assert not run(guard, "a")


def test_releasing_an_id_at_one_destination_keeps_it_at_the_other(guard: GenerationalGuard) -> None:
    run(guard, "a", "x")
    run(guard, "a", "y")
    guard.release("a", "x")

    assert guard.look("a", "x") is Seen.NEW
    assert guard.look("a", "y") is Seen.PROCESSED


def test_with_identity_id_the_destination_does_not_matter(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, identity="id", clock=clock)

    assert run(guard, "a", "x")
    assert not run(guard, "a", "y")
    assert not run(guard, "a")
    guard.release("a", "z")
    assert run(guard, "a", "y")


# The window


def test_an_id_survives_one_rotation(guard: GenerationalGuard, clock: Clock) -> None:
    run(guard, "a")
    clock.advance(HALF)

    assert guard.snapshot().rotated == 1
    assert not guard.begin("a")


def test_an_id_is_forgotten_after_two_rotations(guard: GenerationalGuard, clock: Clock) -> None:
    run(guard, "a")
    clock.advance(HALF)
    guard.snapshot()
    clock.advance(HALF)

    assert guard.begin("a")


def test_an_id_is_remembered_up_to_the_window(guard: GenerationalGuard, clock: Clock) -> None:
    run(guard, "a")
    clock.advance(2 * HALF - 0.001)

    assert not guard.begin("a")


def test_an_id_that_lands_as_its_generation_ends_is_remembered_for_half_the_window(
    guard: GenerationalGuard, clock: Clock
) -> None:
    clock.advance(HALF - 0.001)
    run(guard, "a")
    clock.advance(HALF)

    assert not guard.begin("a")
    clock.advance(0.001)
    assert guard.begin("a")


def test_an_id_that_lands_on_the_edge_belongs_to_the_new_generation(
    guard: GenerationalGuard, clock: Clock
) -> None:
    guard.begin("a")
    clock.advance(HALF)
    guard.complete("a")
    clock.advance(HALF)

    assert not guard.begin("a")


def test_a_rotation_that_comes_late_lengthens_nobodys_memory(guard: GenerationalGuard, clock: Clock) -> None:
    run(guard, "a")
    clock.advance(2 * HALF - 1)
    run(guard, "b")  # the first call since: this is when the rotation of half a window ago happens
    clock.advance(1)

    assert guard.begin("a")
    assert not guard.begin("b")


def test_after_a_window_of_silence_everything_is_forgotten(guard: GenerationalGuard, clock: Clock) -> None:
    run(guard, "a")
    clock.advance(HALF)
    run(guard, "b")
    clock.advance(1_000 * HALF)

    assert guard.snapshot().tracked == 0
    assert guard.begin("a")
    assert guard.begin("b")


def test_a_success_counts_from_its_completion(guard: GenerationalGuard, clock: Clock) -> None:
    guard.begin("a")
    clock.advance(2 * HALF - 1)  # nobody called the guard in between
    guard.complete("a")
    clock.advance(HALF)

    assert not guard.begin("a")


def test_a_handler_that_outlives_both_rotations_keeps_its_mark(
    guard: GenerationalGuard, clock: Clock
) -> None:
    guard.begin("a")
    for _ in range(10):
        clock.advance(HALF)
        run(guard, "b")

    assert not guard.begin("a")
    guard.complete("a")
    assert not guard.begin("a")


def test_a_flood_takes_no_mark_away_either(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 100, clock=clock)
    guard.begin("slow")
    for n in range(1_000):
        run(guard, str(n))

    assert not guard.begin("slow")


# The ceiling


def test_fifty_thousand_ids_stay_under_a_ceiling_of_a_hundred(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 100, clock=clock)
    for n in range(50_000):
        assert run(guard, str(n))
        assert len(guard._in_flight) + len(guard._current) + len(guard._previous) <= 100

    snapshot = guard.snapshot()
    assert snapshot.tracked <= 100
    assert snapshot.rotated == snapshot.rotated_early == 999


def test_in_flight_ids_are_bounded_too_and_what_is_beyond_runs_untracked(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 100, clock=clock)
    assert all(guard.begin(str(n)) for n in range(50_000))

    snapshot = guard.snapshot()
    assert snapshot.in_flight == 100
    assert snapshot.untracked == 50_000 - 100
    assert not guard.begin("0"), "the marks that fit keep working"
    assert guard.begin("49999"), "what is untracked runs, twins included"


def test_a_success_that_finds_no_room_is_not_remembered(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 2, clock=clock)
    for logical_id in "abc":
        guard.begin(logical_id)
    guard.complete("c")

    assert guard.look("c") is Seen.NEW
    assert guard.snapshot().untracked == 2


def test_once_marks_come_back_new_ids_are_tracked_again(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 10, clock=clock)
    for n in range(10):
        guard.begin(str(n))
    for n in range(10):
        guard.release(str(n))

    assert guard.begin("a")
    assert not guard.begin("a")


def test_the_ceiling_is_used_and_not_only_kept(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 1_000, clock=clock)
    for n in range(50_000):
        run(guard, str(n))

    assert 500 <= guard.snapshot().processed <= 1_000


def test_a_flood_leaves_at_least_the_last_half_ceiling_of_ids(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 100, clock=clock)
    for n in range(1_237):
        run(guard, str(n))

    assert all(guard.look(str(n)) is Seen.PROCESSED for n in range(1_237 - 50, 1_237))


def test_ids_that_fail_and_are_retried_do_not_push_the_processed_out(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 10, clock=clock)
    run(guard, "a")
    for _ in range(1_000):
        assert guard.begin("failing")
        guard.release("failing")

    assert not guard.begin("a")
    assert guard.snapshot().rotated == 0


def test_an_early_rotation_restarts_the_half_window(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 4, clock=clock)
    clock.advance(HALF - 1)
    for logical_id in "abc":
        run(guard, logical_id)  # c does not fit beside a and b
    clock.advance(HALF - 1)

    assert guard.look("a") is Seen.PROCESSED
    clock.advance(1)
    assert guard.look("a") is Seen.NEW
    assert guard.look("c") is Seen.PROCESSED


def test_a_million_ids_leave_no_more_than_the_ceiling(clock: Clock) -> None:
    # case G6
    guard = GenerationalGuard(WINDOW, 1_000, clock=clock)
    for n in range(1_000_000):
        logical_id = str(n)
        assert guard.begin(logical_id)
        if n % 3:
            guard.complete(logical_id)
        else:
            guard.release(logical_id)
        if n % 997 == 0:
            assert guard.snapshot().tracked <= 1_000

    assert guard.snapshot().in_flight == 0
    assert guard._in_flight == {}
    clock.advance(HALF)
    guard.snapshot()
    clock.advance(HALF)
    assert guard.snapshot().tracked == 0


# Attempts: marks that cannot leak


def test_an_attempt_that_completes_is_remembered(guard: GenerationalGuard) -> None:
    with guard.attempt("a") as attempt:
        assert attempt.seen is Seen.NEW
        attempt.complete()

    assert guard.attempt("a").seen is Seen.PROCESSED


def test_an_attempt_that_raises_gives_the_mark_back(guard: GenerationalGuard) -> None:
    attempt = guard.attempt("a")
    with pytest.raises(ZeroDivisionError), attempt:
        raise ZeroDivisionError

    assert guard.begin("a")


def test_an_attempt_that_just_ends_was_no_success(guard: GenerationalGuard) -> None:
    attempt = guard.attempt("a")
    with attempt:
        assert attempt.seen is Seen.NEW

    assert guard.begin("a")


def test_a_failure_after_completion_does_not_undo_it(guard: GenerationalGuard) -> None:
    def handle() -> None:
        with guard.attempt("a") as attempt:
            attempt.complete()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        handle()

    assert not guard.begin("a")


async def test_a_cancelled_task_gives_its_mark_back(guard: GenerationalGuard) -> None:
    began = asyncio.Event()

    async def handler() -> None:
        with guard.attempt("a"):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(handler())
    await began.wait()
    assert guard.look("a") is Seen.IN_FLIGHT
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert guard.begin("a")


def test_a_refused_attempt_says_why_and_settles_nothing(guard: GenerationalGuard) -> None:
    with guard.attempt("a") as first:
        with guard.attempt("a") as twin:
            assert twin.seen is Seen.IN_FLIGHT
            twin.complete()
        assert guard.look("a") is Seen.IN_FLIGHT
        first.complete()

    assert guard.look("a") is Seen.PROCESSED


def test_an_attempt_that_is_lost_gives_its_mark_back(guard: GenerationalGuard) -> None:
    guard.attempt("a")
    gc.collect()

    assert guard.begin("a")


def test_a_lost_attempt_may_be_collected_inside_the_critical_section(guard: GenerationalGuard) -> None:
    held = [guard.attempt("a")]
    with guard._lock:  # where the collector may strike
        held.clear()
        gc.collect()

    assert guard.look("a") is Seen.NEW


def test_a_hundred_thousand_lost_attempts_leave_nothing(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 100, clock=clock)
    for n in range(100_000):
        guard.attempt(str(n))
    gc.collect()

    snapshot = guard.snapshot()
    assert (snapshot.tracked, snapshot.untracked, len(guard._in_flight), len(guard._orphans)) == (0, 0, 0, 0)


def test_an_attempt_outlives_rotations_as_long_as_its_owner_does(
    guard: GenerationalGuard, clock: Clock
) -> None:
    attempt = guard.attempt("a")
    clock.advance(100 * HALF)
    assert not guard.begin("a")
    del attempt
    gc.collect()

    assert guard.begin("a")


def test_an_attempt_whose_id_was_released_takes_nothing_from_its_successor(guard: GenerationalGuard) -> None:
    first = guard.attempt("a")
    guard.release("a")
    second = guard.attempt("a")
    assert second.seen is Seen.NEW
    first.release()

    assert guard.look("a") is Seen.IN_FLIGHT


@pytest.mark.parametrize("successor", [None, "second"])
def test_an_attempt_whose_id_was_released_is_not_remembered(
    guard: GenerationalGuard, successor: str | None
) -> None:
    first = guard.attempt("a")
    guard.release("a")
    second = guard.attempt("a") if successor else None
    first.complete()

    assert guard.look("a") is (Seen.IN_FLIGHT if second else Seen.NEW)


def test_the_owner_of_a_mark_is_forgotten_when_anyone_completes_the_id(guard: GenerationalGuard) -> None:
    attempt = guard.attempt("a")
    guard.complete("a")
    attempt.release()

    assert guard.look("a") is Seen.PROCESSED
    assert guard._in_flight == {}


def test_an_attempt_beyond_the_ceiling_runs_untracked(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 2, clock=clock)
    held = [guard.attempt(logical_id) for logical_id in "ab"]
    with guard.attempt("c") as attempt:
        assert attempt.seen is Seen.NEW
        attempt.complete()

    assert guard.look("c") is Seen.NEW
    assert guard.snapshot().untracked == 1
    assert all(attempt.seen is Seen.NEW for attempt in held)


def test_an_attempt_may_outlive_its_block(guard: GenerationalGuard) -> None:
    with guard.attempt("a") as attempt:
        attempt.keep()

    assert guard.look("a") is Seen.IN_FLIGHT
    attempt.complete()
    assert guard.look("a") is Seen.PROCESSED


def test_what_can_be_no_id_fails_where_it_is_given_and_nowhere_else(guard: GenerationalGuard) -> None:
    no_id: Any = ["a"]
    with pytest.raises(TypeError, match="unhashable"):
        guard.attempt(no_id)
    gc.collect()

    assert guard.begin("a")
    assert not guard.begin("a")


# In front of a durable store


def complete(attempt: Attempt, seconds: float) -> None:
    attempt.complete(window=timedelta(seconds=seconds))


def test_a_success_is_remembered_when_its_claim_outlives_the_guards_memory(
    guard: GenerationalGuard, clock: Clock
) -> None:
    with guard.attempt("a") as attempt:
        clock.advance(1)
        complete(attempt, 60)  # the generation began with the attempt, so it ends with the claim

    assert guard.look("a") is Seen.PROCESSED
    clock.advance(59)
    assert guard.look("a") is Seen.NEW


def test_a_success_is_not_remembered_when_the_guard_might_outlive_its_claim(
    guard: GenerationalGuard, clock: Clock
) -> None:
    clock.advance(1)
    with guard.attempt("a") as attempt:
        complete(attempt, 58.9)

    assert guard.look("a") is Seen.NEW
    assert guard.begin("a")


def test_the_claim_counts_from_the_attempt_and_not_from_the_commit(
    guard: GenerationalGuard, clock: Clock
) -> None:
    with guard.attempt("a") as attempt:
        clock.advance(HALF)  # a slow handler: a new generation has begun
        complete(attempt, 60)

    assert guard.look("a") is Seen.NEW


@pytest.mark.parametrize("claim_seconds", [1, 29, 31, 45, 59, 61, 90, 3_600])
@pytest.mark.parametrize("handler_seconds", [0, 1, 29, 30, 31, 59, 60, 100])
def test_no_duplicate_is_called_beyond_its_claim(
    guard: GenerationalGuard, clock: Clock, claim_seconds: float, handler_seconds: float
) -> None:
    for _ in range(100):
        begun_at = clock.now
        with guard.attempt("a") as attempt:
            assert attempt.seen is Seen.NEW
            clock.advance(handler_seconds)
            complete(attempt, claim_seconds)
        while guard.look("a") is Seen.PROCESSED:
            assert clock.now < begun_at + claim_seconds
            clock.advance(0.7)
        clock.advance(0.3)


def test_a_clock_that_moves_while_the_guard_works_lengthens_nobodys_memory() -> None:
    # An early rotation just before the end of a generation: its successor counts from the same moment.
    ticks = iter([0.0, 0.0, 29.9, 29.9])  # made; a begins; a completes; b begins, and finds no room
    guard = GenerationalGuard(WINDOW, 2, clock=lambda: 1_000 + next(ticks, 30.5))
    with guard.attempt("a") as attempt:
        complete(attempt, 60)
    with guard.attempt("b"):
        assert guard._due <= 1_000 + 29.9 + HALF


# Payloads


def test_another_payload_under_a_processed_id_is_told_apart(guard: GenerationalGuard) -> None:
    # case D3
    with guard.attempt("a", fingerprint=b"tea") as attempt:
        attempt.complete()

    assert guard.attempt("a", fingerprint=b"cocoa").seen is Seen.MISMATCH
    assert guard.attempt("a", fingerprint=b"tea").seen is Seen.PROCESSED
    assert not guard.begin("a")
    assert guard.snapshot().suppressed == 3
    assert guard.snapshot().tracked == 1


@pytest.mark.parametrize(("first", "then"), [(None, b"tea"), (b"tea", None), (None, None)])
def test_where_either_left_the_payload_out_it_does_not_matter(
    guard: GenerationalGuard, first: bytes | None, then: bytes | None
) -> None:
    with guard.attempt("a", fingerprint=first) as attempt:
        attempt.complete()

    assert guard.look("a", fingerprint=then) is Seen.PROCESSED


def test_another_payload_under_an_id_in_flight_is_in_flight(guard: GenerationalGuard) -> None:
    with guard.attempt("a", fingerprint=b"tea"):
        assert guard.attempt("a", fingerprint=b"cocoa").seen is Seen.IN_FLIGHT


def test_a_payload_survives_one_rotation_like_its_id(guard: GenerationalGuard, clock: Clock) -> None:
    with guard.attempt("a", fingerprint=b"tea") as attempt:
        attempt.complete()
    clock.advance(HALF)

    assert guard.look("a", fingerprint=b"cocoa") is Seen.MISMATCH
    clock.advance(HALF)
    assert guard.look("a", fingerprint=b"cocoa") is Seen.NEW


def test_an_id_that_failed_may_come_with_another_payload(guard: GenerationalGuard) -> None:
    with guard.attempt("a", fingerprint=b"tea"):
        pass
    with guard.attempt("a", fingerprint=b"cocoa") as attempt:
        assert attempt.seen is Seen.NEW
        attempt.complete()

    assert guard.look("a", fingerprint=b"tea") is Seen.MISMATCH


# Forgetting


@pytest.mark.parametrize("rotations", [0, 1])
@pytest.mark.parametrize("fingerprint", [None, b"tea"])
def test_what_is_forgotten_runs_again_whatever_its_payload_was(
    guard: GenerationalGuard, clock: Clock, rotations: int, fingerprint: bytes | None
) -> None:
    run(guard, "b")
    with guard.attempt("a", fingerprint=fingerprint) as attempt:
        attempt.complete()
    clock.advance(rotations * HALF)

    assert guard.forget("a")
    assert not guard.forget("a")
    assert guard.look("a", fingerprint=b"cocoa") is Seen.NEW
    assert guard.look("b") is Seen.PROCESSED


def test_what_is_too_old_to_be_remembered_is_not_forgotten_either(
    guard: GenerationalGuard, clock: Clock
) -> None:
    run(guard, "a")
    clock.advance(2 * HALF)

    assert not guard.forget("a")


def test_forgetting_an_id_at_one_destination_keeps_it_at_the_other(guard: GenerationalGuard) -> None:
    run(guard, "a", "x")
    run(guard, "a", "y")

    assert not guard.forget("a")
    assert guard.forget("a", "x")
    assert (guard.look("a", "x"), guard.look("a", "y")) == (Seen.NEW, Seen.PROCESSED)


def test_an_attempt_that_was_forgotten_in_flight_is_not_remembered(guard: GenerationalGuard) -> None:
    attempt, other = guard.attempt("a"), guard.attempt("b")
    assert not guard.forget("a")

    assert guard.look("a") is Seen.IN_FLIGHT
    attempt.complete()
    other.complete()
    assert (guard.look("a"), guard.look("b")) == (Seen.NEW, Seen.PROCESSED)
    with guard.attempt("a") as successor:
        successor.complete()
    assert guard.look("a") is Seen.PROCESSED


@pytest.mark.parametrize("late", [False, True])
def test_neither_is_an_id_that_was_begun_by_hand_and_forgotten(
    guard: GenerationalGuard, clock: Clock, late: bool
) -> None:
    guard.begin("a")
    guard.forget("a")

    assert not guard.begin("a")
    clock.advance(late * HALF)
    guard.complete("a")
    assert run(guard, "a")
    assert not run(guard, "a")


class NotToBeSearched(dict[Any, bytes | None]):
    """A generation that answers for one id at a time, and lets nobody go through all of them."""

    def __iter__(self) -> Any:
        pytest.fail("somebody goes through every id")

    keys = values = items = __iter__


def test_no_call_goes_through_the_ids_that_are_held(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 10, clock=clock)
    guard._current, guard._previous = NotToBeSearched(a=None), NotToBeSearched(b=None)
    guard._in_flight["c"] = None

    assert guard.forget("a")
    assert guard.forget("b")
    assert not guard.forget("c")
    guard.release("c")
    assert run(guard, "d")
    assert guard.attempt("e").seen is Seen.NEW
    assert guard.snapshot().processed == 1


# A guard like another one


def test_a_guard_with_another_window_is_like_the_first_otherwise(clock: Clock) -> None:
    told: list[GuardEvent] = []
    first = GenerationalGuard(WINDOW, 4, identity="id", clock=clock, on_event=told.append)
    run(first, "a")
    second = first.with_window(WINDOW / 2)

    assert (first.window, second.window) == (WINDOW, WINDOW / 2)
    assert run(second, "a", "x")
    assert not run(second, "a", "y")
    assert told == [GuardEvent.SUPPRESSED]
    clock.advance(HALF)
    assert (first.look("a"), second.look("a")) == (Seen.PROCESSED, Seen.NEW)
    for number in range(9):
        run(second, str(number))
    assert second.snapshot().tracked <= 4


# Threads


class YieldingId(str):
    """An id whose every look-up hands over to another thread, between any two steps of the guard."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0)
        return super().__hash__()


@pytest.mark.parametrize("make_id", [str, YieldingId])
def test_eight_threads_have_one_winner_for_each_of_two_hundred_ids(make_id: Callable[[str], str]) -> None:
    # case G6
    guard = GenerationalGuard()
    barrier = threading.Barrier(8, timeout=30)
    winners: list[list[str]] = [[] for _ in range(8)]

    def claim(mine: list[str]) -> None:
        for n in range(200):
            logical_id = make_id(str(n))
            barrier.wait()
            if guard.begin(logical_id):
                mine.append(str(n))
                if n % 2:
                    guard.complete(logical_id)

    threads = [threading.Thread(target=claim, args=(mine,)) for mine in winners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    won = Counter(logical_id for mine in winners for logical_id in mine)
    assert won == Counter(str(n) for n in range(200))
    assert guard.snapshot().suppressed == 7 * 200


def test_threads_under_a_tiny_ceiling_never_exceed_it_and_leave_no_marks() -> None:
    guard = GenerationalGuard(max_tracked=16)
    seen_over: list[int] = []
    barrier = threading.Barrier(8, timeout=30)

    def work(seed: int) -> None:
        barrier.wait()
        for n in range(2_000):
            with guard.attempt(str((seed * 7 + n) % 50)) as attempt:
                if n % 3:
                    attempt.complete()
            if (tracked := guard.snapshot().tracked) > 16:
                seen_over.append(tracked)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen_over == []
    assert guard.snapshot().in_flight == 0


# Settings


@pytest.mark.parametrize("window", [timedelta(0), timedelta(seconds=-1)])
def test_a_window_that_is_not_positive_is_refused(window: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="guard's window must be longer than zero"):
        GenerationalGuard(window)


@pytest.mark.parametrize("window", [300, 300.0, None, "5m"])
def test_a_window_that_is_no_timedelta_is_refused_with_the_fix(window: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"write timedelta\(seconds"):
        GenerationalGuard(window)


@pytest.mark.parametrize("max_tracked", [1, 0, -5, 2.0, True, None, "100"])
def test_a_ceiling_without_two_generations_is_refused_with_the_fix(max_tracked: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"int of at least 2.*try 100_000"):
        GenerationalGuard(max_tracked=max_tracked)


@pytest.mark.parametrize("identity", ["destination", None, []])
def test_an_unknown_identity_is_refused_with_the_known_ones(identity: Any) -> None:
    with pytest.raises(ConfigurationError, match="'id' or 'id_and_destination', not "):
        GenerationalGuard(identity=identity)


@pytest.mark.parametrize("option", ["clock", "on_event"])
def test_what_the_guard_is_to_call_must_be_callable(option: str) -> None:
    options: Any = {option: 5}
    with pytest.raises(ConfigurationError, match="the guard's clock and on_event must be callables"):
        GenerationalGuard(**options)


@pytest.mark.parametrize("max_tracked", [2, 3])
def test_the_smallest_ceilings_work(clock: Clock, max_tracked: int) -> None:
    guard = GenerationalGuard(WINDOW, max_tracked, clock=clock)
    for n in range(10):
        assert run(guard, str(n))
        assert not run(guard, str(n))
        assert guard.snapshot().tracked <= max_tracked


def test_the_defaults_are_five_minutes_and_a_hundred_thousand_ids() -> None:
    guard = GenerationalGuard()

    assert guard._half_window == 150
    assert guard._max_tracked == 100_000


# What is counted and told


def test_refusals_are_counted_and_looks_are_not(guard: GenerationalGuard) -> None:
    guard.begin("a")
    guard.begin("a")
    guard.attempt("a")
    guard.look("a")
    guard.complete("a")
    guard.begin("a")

    assert guard.snapshot().suppressed == 3


def test_only_rotations_that_the_ceiling_forced_count_as_early(clock: Clock) -> None:
    guard = GenerationalGuard(WINDOW, 4, clock=clock)
    run(guard, "a")
    clock.advance(HALF)
    guard.snapshot()
    assert (guard.snapshot().rotated, guard.snapshot().rotated_early) == (1, 0)
    for logical_id in "bcd":
        run(guard, logical_id)

    assert (guard.snapshot().rotated, guard.snapshot().rotated_early) == (2, 1)


def test_a_snapshot_is_frozen(guard: GenerationalGuard) -> None:
    snapshot: Any = guard.snapshot()

    with pytest.raises(FrozenInstanceError):
        snapshot.suppressed = 1


def test_every_event_is_told_once_and_agrees_with_the_counters(clock: Clock) -> None:
    told: list[GuardEvent] = []
    guard = GenerationalGuard(WINDOW, 4, clock=clock, on_event=told.append)
    for n in range(6):
        run(guard, str(n))
        run(guard, str(n))
    for n in range(6):
        guard.begin(f"held {n}")
    clock.advance(HALF)
    snapshot = guard.snapshot()

    assert Counter(event.value for event in told) == {
        "suppressed": snapshot.suppressed,
        "rotated": snapshot.rotated,
        "rotated_early": snapshot.rotated_early,
        "untracked": snapshot.untracked,
    }
    assert min(snapshot.suppressed, snapshot.rotated, snapshot.rotated_early, snapshot.untracked) > 0


def test_a_callback_may_use_the_guard(clock: Clock) -> None:
    suppressed: list[int] = []

    def note(_event: GuardEvent) -> None:
        suppressed.append(watched.snapshot().suppressed)

    watched = GenerationalGuard(WINDOW, clock=clock, on_event=note)
    watched.begin("a")
    watched.begin("a")

    assert suppressed == [1]


def test_a_callback_that_raises_is_logged_and_changes_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_event: GuardEvent) -> None:
        raise ZeroDivisionError

    guard = GenerationalGuard(WINDOW, clock=clock, on_event=fail)
    run(guard, "a")
    with caplog.at_level(logging.ERROR, logger="fastapi_dedup"):
        assert not guard.begin("a")

    assert "failed on suppressed" in caplog.text
