"""Many processes deliver the same ids at the same time, and each id's work commits once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from tests.apps.orders import Settings
from tests.databases import BACKENDS, mariadb, orders_table, url_of
from tests.live import process
from tests.races import crowd
from tests.races.shop import Ledger

PROCESSES, IDS, COPIES = 8, 50, 10


def expect_one_winner_each(backend: str, outcomes: Counter[str]) -> None:
    print(f"{backend}: {dict(outcomes)}")  # noqa: T201
    final = Counter({"201": IDS, "duplicate": PROCESSES * IDS * COPIES - IDS})
    passing = {"in-flight", "store-unavailable"} if backend == "sqlite" else {"in-flight"}
    assert final == {outcome: n for outcome, n in outcomes.items() if outcome not in passing}


# DESIGN.md §4.1
@pytest.mark.parametrize("backend", ["asyncpg", "asyncmy", "sqlite"])
async def test_8_processes_that_send_50_ids_10_times_each_to_4_workers_get_50_rows(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    settings = Settings(url=database, pool_size=0 if backend == "sqlite" else 5)
    async with orders_table(database) as engine:
        with process("tests.apps.orders:app", workers=4, environ=settings.environ()) as server:
            outcomes = await crowd.crowd(PROCESSES, crowd.order, server.url, IDS, COPIES)
        ledger = Ledger(engine=engine)
        assert await ledger.holds_in_all() == (IDS, IDS)
        expect_one_winner_each(backend, outcomes)


# DESIGN.md §4.1
@pytest.mark.parametrize("backend", [*BACKENDS, *mariadb()])
async def test_8_processes_that_claim_50_ids_10_times_each_on_connections_of_their_own_get_50_rows(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with orders_table(database) as engine:
        await Dedup(engine).create_table()
        outcomes = await crowd.crowd(PROCESSES, crowd.claim, database, IDS, COPIES)
        ledger = Ledger(engine=engine)
        assert await ledger.holds_in_all() == (IDS, IDS)
        expect_one_winner_each(backend, outcomes)
