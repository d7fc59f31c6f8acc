"""What the guard costs beside a bare set of the same ids: time per id, and memory per tracked id.

Run it from the repository: `python -m benchmarks.guard`. One process; the contestants take turns within
every round, so that whatever else the machine does hits them alike. Times are CPU time, and ratios are
medians over the rounds.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
import uuid
from typing import TYPE_CHECKING, Any

from fastapi_dedup.guard import GenerationalGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 21
DESTINATION = "orders"


def new_ids(count: int) -> list[str]:
    """Return ids in an order that has nothing to do with where they lie in memory, as in real traffic."""
    ids = [str(uuid.uuid4()) for _ in range(count)]
    random.shuffle(ids)
    return ids


def bare(ids: Sequence[str]) -> object:
    """Test membership, then add."""
    seen: set[str] = set()
    for logical_id in ids:
        if logical_id not in seen:
            seen.add(logical_id)
    return seen


def guarded(ids: Sequence[str]) -> object:
    """Begin, then complete."""
    guard = GenerationalGuard()
    begin, complete = guard.begin, guard.complete
    for logical_id in ids:
        if begin(logical_id):
            complete(logical_id)
    return guard


def bare_pairs(ids: Sequence[str]) -> object:
    """Test membership of (id, destination), then add it."""
    seen: set[tuple[str, str]] = set()
    for logical_id in ids:
        pair = (logical_id, DESTINATION)
        if pair not in seen:
            seen.add(pair)
    return seen


def guarded_pairs(ids: Sequence[str]) -> object:
    """Begin, then complete, with a destination."""
    guard = GenerationalGuard()
    begin, complete = guard.begin, guard.complete
    for logical_id in ids:
        if begin(logical_id, DESTINATION):
            complete(logical_id, DESTINATION)
    return guard


def attempted(ids: Sequence[str]) -> object:
    """Begin and complete through an attempt, the way that cannot leak."""
    guard = GenerationalGuard()
    for logical_id in ids:
        with guard.attempt(logical_id) as attempt:
            attempt.complete()
    return guard


def nanoseconds(contestant: Callable[[Sequence[str]], object], ids: Sequence[str], repeats: int) -> float:
    """Return the time that one id takes."""
    start = time.process_time()
    for _ in range(repeats):
        contestant(ids)
    return (time.process_time() - start) / repeats / len(ids) * 1e9


def print_times(count: int) -> None:
    """Print how long each contestant takes for an id, and how many times the bare cost that is."""
    ids = new_ids(count)
    contestants = [bare, guarded, bare_pairs, guarded_pairs, attempted]
    rounds = [[nanoseconds(run, ids, max(1, 50_000 // count)) for run in contestants] for _ in range(ROUNDS)]
    print(f"\n{count:,} ids, {ROUNDS} rounds")
    for name, contestant, against in [
        ("begin + complete", guarded, bare),
        ("the same with a destination", guarded_pairs, bare_pairs),
        ("attempt + complete", attempted, bare),
    ]:
        mine, other = contestants.index(contestant), contestants.index(against)
        ratio = statistics.median(row[mine] / row[other] for row in rounds)
        cost = statistics.median(row[mine] for row in rounds)
        bare_cost = statistics.median(row[other] for row in rounds)
        print(f"  {name:<28} {cost:6.0f} ns  bare {bare_cost:5.0f} ns  ratio {ratio:5.2f}")


def bytes_per_id(contestant: Callable[[Sequence[str]], Any], ids: Sequence[str]) -> float:
    """Return what a contestant allocates for each id that it holds; the ids themselves are there before."""
    gc.collect()
    tracemalloc.start()
    kept = contestant(ids)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = kept.snapshot().tracked if isinstance(kept, GenerationalGuard) else len(kept)
    return size / held


def print_memory(count: int) -> None:
    """Print memory per tracked id. A set's table grows in leaps, so the ratio depends on the count."""
    ids = new_ids(count)
    for name, contestant, against in [
        ("ids", guarded, bare),
        ("with a destination", guarded_pairs, bare_pairs),
    ]:
        mine, other = bytes_per_id(contestant, ids), bytes_per_id(against, ids)
        print(f"  {count:>7,} {name:<20} {mine:6.1f} B  plain set {other:6.1f} B  ratio {mine / other:5.2f}")


def main() -> None:
    """Print everything."""
    for count in (1_000, 100_000):
        print_times(count)
    print("\nmemory per tracked id, the id itself not counted")
    for count in (10_000, 50_000, 75_000, 100_000):
        print_memory(count)


if __name__ == "__main__":
    main()
