"""The worlds that the guard's tests live in: a database, and a runtime with a guard in front of it."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import Event
from tests.databases import orders_table, url_of
from tests.guard.doors import DOORS, Clock
from tests.http.world import World

WINDOW = timedelta(seconds=60)


@dataclass
class Guarded(World):
    """A world whose runtime has a guard in front, which goes by the test's clock."""

    clock: Clock = field(kw_only=True)
    guard: GenerationalGuard = field(kw_only=True)


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> str:
    """Return each door in turn."""
    chosen: str = request.param
    return chosen


@pytest.fixture(params=["sqlite", "asyncpg"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guarded]:
    """Yield a world on each kind of database; afterwards nothing may still be in flight for its guard."""
    clock, events = Clock(), list[Event]()
    guard = GenerationalGuard(WINDOW, clock=clock)
    async with orders_table(url_of(request.param, request, tmp_path)) as engine:
        dedup = Dedup(engine, create_table=True, reap_every=None, hooks=[events.append], guard=guard)
        await dedup.create_table()
        yield Guarded(engine, dedup, events, clock=clock, guard=guard)
    if guard.snapshot().in_flight:
        gc.collect()  # a lost attempt gives its mark back when it is collected
    assert guard.snapshot().in_flight == 0
