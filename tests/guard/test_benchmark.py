"""The guard's benchmark keeps up with the guard."""

from __future__ import annotations

import pytest

from benchmarks import guard as benchmark
from fastapi_dedup.guard import GenerationalGuard


@pytest.mark.parametrize("contestant", [benchmark.guarded, benchmark.bare])
def test_a_contestant_goes_through_every_id(contestant: object) -> None:
    ids = benchmark.new_ids(50)
    seen = contestant(ids)  # type: ignore[operator]
    held = seen.snapshot().processed if isinstance(seen, GenerationalGuard) else len(seen)
    assert held == len(ids)


def test_the_call_that_drops_a_generation_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CEILING", 100)
    assert benchmark.pause_of_a_rotation() >= 0
