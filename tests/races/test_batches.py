"""Batches of many processes: each id's work commits once, and a killed process leaves no half of a batch."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from tests.apps.forked import forking
from tests.databases import BACKENDS, MARIADB, orders_table, url_of
from tests.live import until
from tests.races import batching, crowd
from tests.races.shop import Ledger

PROCESSES, IDS = 4, 200
ROUNDS = 5

every_backend = pytest.mark.parametrize("backend", [*BACKENDS, MARIADB[0]])


# DESIGN.md §4.1, case F6
@every_backend
async def test_4_processes_that_order_200_ids_in_batches_of_25_get_200_rows(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with orders_table(database) as engine:
        await Dedup(engine).create_table()
        outcomes = await crowd.crowd(PROCESSES, batching.consume, database, IDS)
        print(f"{backend}: {dict(outcomes)}")  # noqa: T201
        assert await Ledger(engine=engine).holds_in_all() == (IDS, IDS)
        assert outcomes["new"] == IDS
        assert outcomes["duplicate"] == (PROCESSES - 1) * IDS
        assert outcomes["store-unavailable"] == 0 or backend == "sqlite", (
            "one who loses a deadlock is told so"
        )


# DESIGN.md §4.2, case E3
@every_backend
@pytest.mark.parametrize("point", ["after the claims", "amid the work", "before the commit"])
async def test_a_killed_process_leaves_nothing_of_its_batch(
    backend: str, point: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    database = url_of(backend, request, tmp_path)
    async with orders_table(database) as engine:
        dedup = Dedup(engine, reap_every=None)
        await dedup.create_table()
        ledger = Ledger(engine=engine)
        for number in range(ROUNDS):
            ids = [f"{number} {each}" for each in range(40)]
            victim = forking().Process(
                target=batching.die_in_a_batch, args=(database, ids, point), daemon=True
            )
            victim.start()
            await asyncio.to_thread(victim.join, 30)
            assert victim.exitcode == -signal.SIGKILL
            assert await ledger.holds_in_all() == (number * 40, number * 40)

            async def every_id_runs(ids: list[str] = ids) -> bool:
                async with dedup.claim_many(ids, scope="crash") as batch:
                    if batch.in_flight:  # the server has not noticed yet
                        for each in batch.new:
                            batch.release(each)
                        return False
                    await batching.work(batch, batch.new)
                return len(batch.new) == 40

            await until(every_id_runs)
            assert await ledger.holds_in_all() == ((number + 1) * 40, (number + 1) * 40)
