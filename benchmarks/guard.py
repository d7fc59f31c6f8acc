"""What the guard costs beside a bare set of the same ids: time per id, and memory per tracked id.

Run it from the repository: `python -m benchmarks.guard`. One process; the contestants take turns within
every round, so that whatever else the machine does hits them alike. Times are CPU time, and ratios are
medians over the rounds.

A bare set is two bytecodes on a local variable: no call, no lock, no clock. Two more contestants say what
these cost, so that what is the guard's own can be told from what is CPython's: a set behind two methods, and
one whose methods take a lock, and of which one reads the clock.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
import tracemalloc
import uuid
from typing import TYPE_CHECKING, Any

from fastapi_dedup.guard import GenerationalGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

ROUNDS = 21
DESTINATION = "orders"
CEILING = 100_000
STEP = 1_000
"""How far the counts of ids are apart whose memory is measured."""

AIM = 1.3
"""How many times the memory of a plain set the guard is to take at most."""


def new_ids(count: int) -> list[str]:
    """Return ids in an order that has nothing to do with where they lie in memory, as in real traffic."""
    ids = [str(uuid.uuid4()) for _ in range(count)]
    random.shuffle(ids)
    return ids


def bare(ids: Sequence[Hashable]) -> set[Hashable]:
    """Test membership, then add."""
    seen: set[Hashable] = set()
    for logical_id in ids:
        if logical_id not in seen:
            seen.add(logical_id)
    return seen


class Methods:
    """A set behind two methods."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def begin(self, logical_id: str) -> bool:
        """Test membership."""
        return logical_id not in self._seen

    def complete(self, logical_id: str) -> None:
        """Add."""
        self._seen.add(logical_id)


class Locked:
    """A set behind two methods that take a lock, as any that threads share; one reads the clock."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._clock = time.monotonic

    def begin(self, logical_id: str) -> bool:
        """Test membership."""
        lock = self._lock
        lock.acquire()
        try:
            return logical_id not in self._seen
        finally:
            lock.release()

    def complete(self, logical_id: str) -> None:
        """Read the clock, and add."""
        lock = self._lock
        lock.acquire()
        try:
            self._clock()
            self._seen.add(logical_id)
        finally:
            lock.release()


def begun(make: Callable[[], Any]) -> Callable[[Sequence[str]], Any]:
    """Return what begins and completes every id with a contestant."""

    def run(ids: Sequence[str]) -> Any:
        contestant = make()
        begin, complete = contestant.begin, contestant.complete
        for logical_id in ids:
            if begin(logical_id):
                complete(logical_id)
        return contestant

    return run


guarded = begun(GenerationalGuard)


def bare_pairs(ids: Sequence[str]) -> set[tuple[str, str]]:
    """Test membership of (id, destination), then add it."""
    seen: set[tuple[str, str]] = set()
    for logical_id in ids:
        pair = (logical_id, DESTINATION)
        if pair not in seen:
            seen.add(pair)
    return seen


def guarded_pairs(ids: Sequence[str]) -> GenerationalGuard:
    """Begin, then complete, with a destination."""
    guard = GenerationalGuard()
    begin, complete = guard.begin, guard.complete
    for logical_id in ids:
        if begin(logical_id, DESTINATION):
            complete(logical_id, DESTINATION)
    return guard


def attempted(ids: Sequence[str]) -> GenerationalGuard:
    """Begin and complete through an attempt, the way that cannot leak."""
    guard = GenerationalGuard()
    for logical_id in ids:
        with guard.attempt(logical_id) as attempt:
            attempt.complete()
    return guard


TIMED: list[tuple[str, Callable[[Sequence[str]], object], Callable[[Sequence[str]], object]]] = [
    ("begin + complete", guarded, bare),
    ("a set behind two methods", begun(Methods), bare),
    ("the same, locked, with a clock", begun(Locked), bare),
    ("begin + complete, destination", guarded_pairs, bare_pairs),
    ("attempt + complete", attempted, bare),
]
"""What is timed, and against which bare set."""


def nanoseconds(contestant: Callable[[Sequence[str]], object], ids: Sequence[str], repeats: int) -> float:
    """Return the time that one id takes."""
    start = time.process_time()
    for _ in range(repeats):
        contestant(ids)
    return (time.process_time() - start) / repeats / len(ids) * 1e9


def print_times(count: int) -> None:
    """Print how long each contestant takes for an id, and how many times the bare cost that is."""
    ids = new_ids(count)
    contestants = [*dict.fromkeys(run for _, mine, other in TIMED for run in (mine, other))]
    repeats = max(1, 50_000 // count)
    rounds = [{run: nanoseconds(run, ids, repeats) for run in contestants} for _ in range(ROUNDS)]
    print(f"\n{count:,} ids, {ROUNDS} rounds")
    for name, mine, other in TIMED:
        ratios = [row[mine] / row[other] for row in rounds]
        cost, bare_cost = (statistics.median(row[run] for row in rounds) for run in (mine, other))
        print(
            f"  {name:<31} {cost:6.0f} ns  bare {bare_cost:4.0f} ns  ratio {statistics.median(ratios):5.2f}"
            f"   (rounds: {min(ratios):.2f} to {max(ratios):.2f})"
        )


def print_forgetting() -> None:
    """Print what `forget` costs, by how many ids are held."""
    print("\nforget, which `Dedup.release` calls")
    for count in (1_000, 10_000, CEILING):
        ids = new_ids(count)
        guard = guarded(ids)
        some = ids[-500:]  # the last ones, that none is gone with its generation
        start = time.process_time()
        for logical_id in some:
            guard.forget(logical_id)
        print(f"  {count:>7,} ids held {(time.process_time() - start) / len(some) * 1e6:6.1f} µs")


def pause_of_a_rotation() -> float:
    """Return how many seconds the call takes that drops a full generation."""
    now = 0.0
    guard = GenerationalGuard(max_tracked=CEILING, clock=lambda: now)
    for logical_id in new_ids(CEILING // 2):
        guard.begin(logical_id)
        guard.complete(logical_id)
    half = guard.window.total_seconds() / 2
    now = half
    guard.look("nobody")  # the generation becomes the previous one
    now = 2 * half
    start = time.process_time()
    guard.look("nobody")
    return time.process_time() - start


def print_rotation() -> None:
    """Print how long the call takes that drops a full generation."""
    pause = statistics.median(pause_of_a_rotation() for _ in range(9))
    print(f"\nthe call that drops {CEILING // 2:,} ids: {pause * 1e3:.1f} ms")


def pair(logical_id: str | bytes) -> Hashable:
    """Return what stands for an id at a destination."""
    return logical_id, DESTINATION


def alone(logical_id: str | bytes) -> Hashable:
    """Return what stands for an id without a destination."""
    return logical_id


def sizes_of_a_set(ids: Sequence[str | bytes], key: Callable[[str | bytes], Hashable]) -> Iterator[float]:
    """Yield what a set has allocated for each id, at every step."""
    tracemalloc.start()
    seen: set[Hashable] = set()
    for number, logical_id in enumerate(ids, 1):
        seen.add(key(logical_id))
        if number % STEP == 0:
            yield tracemalloc.get_traced_memory()[0] / number
    tracemalloc.stop()


def sizes_of_a_guard(ids: Sequence[str | bytes], destination: str | None) -> Iterator[float]:
    """Yield what a guard has allocated for each id that it holds, at every step."""
    tracemalloc.start()
    guard = GenerationalGuard(max_tracked=CEILING)
    for number, logical_id in enumerate(ids, 1):
        if guard.begin(logical_id, destination):
            guard.complete(logical_id, destination)
        if number % STEP == 0:
            yield tracemalloc.get_traced_memory()[0] / guard.snapshot().tracked
    tracemalloc.stop()


def print_memory() -> None:
    """Print memory per tracked id: at some counts, and over every count in steps of a thousand.

    Tables grow in leaps, a set's other than a dict's, and the guard holds two: the ratio hangs on the count.
    The ids themselves are there before; a pair is made for each id.
    """
    print("\nmemory per tracked id, the id itself not counted")
    kinds: list[tuple[str, Sequence[str | bytes], str | None]] = [
        ("str", new_ids(CEILING), None),
        ("bytes, as in Dedup", [uuid.uuid4().bytes * 2 for _ in range(CEILING)], None),
        ("str + destination", new_ids(CEILING), DESTINATION),
    ]
    for name, ids, destination in kinds:
        counts = range(STEP, CEILING + 1, STEP)
        mine = dict(zip(counts, sizes_of_a_guard(ids, destination), strict=True))
        other = dict(zip(counts, sizes_of_a_set(ids, alone if destination is None else pair), strict=True))
        for count in (10_000, 50_000, 75_000, CEILING):
            print(
                f"  {count:>7,} {name:<18} {mine[count]:6.1f} B  plain set {other[count]:6.1f} B"
                f"  ratio {mine[count] / other[count]:5.2f}"
            )
        ratios = {count: mine[count] / other[count] for count in counts}
        above = [count for count, ratio in ratios.items() if round(ratio, 2) > AIM]
        worst = max(ratios, key=ratios.__getitem__)
        print(
            f"  {STEP:,} to {CEILING:,}: median {statistics.median(ratios.values()):.2f}, worst"
            f" {ratios[worst]:.2f} at {worst:,}, above {AIM} at {len(above)} of {len(ratios)} counts"
            f"{f' ({above[0]:,} to {above[-1]:,})' if above else ''}"
        )


def print_ceilings() -> None:
    """Print what the tables of a full guard take, by its ceiling: one just below a leap takes half."""
    print("\ntables of a guard that three times its ceiling of ids went through")
    for ceiling in (87_000, CEILING):
        ids = new_ids(3 * ceiling)
        tracemalloc.start()
        guard = GenerationalGuard(max_tracked=ceiling)
        for logical_id in ids:
            if guard.begin(logical_id):
                guard.complete(logical_id)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"  max_tracked={ceiling:<7} {size / 1e6:4.1f} MB for {guard.snapshot().tracked:,} ids")


def main() -> None:
    """Print everything."""
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for count in (1_000, 10_000, CEILING):
        print_times(count)
    print_forgetting()
    print_rotation()
    print_memory()
    print_ceilings()
    print(f"\nload average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
