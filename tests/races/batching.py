"""What the processes do that race with batches: only a module's functions can."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence

from sqlalchemy import text

from fastapi_dedup import Dedup, StoreUnavailableError
from fastapi_dedup.batches import Batch
from tests.databases import engine_on

SIZE = 25


async def work(batch: Batch[str], ids: Sequence[str]) -> None:
    """Order what a batch may."""
    if ids:
        insert = text("insert into orders (sku) values (:sku)")
        await batch.session.execute(insert, [{"sku": each} for each in ids])


async def consume(database: str, ids: int) -> Counter[str]:
    """Order every id in batches of a random order, each until nothing of it is unfinished; count outcomes."""
    engine = engine_on(database, pool_size=5)
    dedup = Dedup(engine, reap_every=None)
    wanted = [f"K{number}" for number in range(ids)]
    random.shuffle(wanted)
    outcomes: Counter[str] = Counter()
    for start in range(0, ids, SIZE):
        left: Sequence[str] = wanted[start : start + SIZE]
        while left:
            try:
                async with dedup.claim_many(left, scope="crowd") as batch:
                    await work(batch, batch.new)
            except StoreUnavailableError:
                outcomes["store-unavailable"] += 1
                continue
            outcomes.update(entry.outcome.value for entry in batch)
            left = batch.unfinished
    await engine.dispose()
    return outcomes


def die_in_a_batch(database: str, ids: Sequence[str], point: str) -> None:
    """Claim ids, do some of their work, and be killed: a process's whole life."""

    async def main() -> None:
        async with Dedup(engine_on(database), reap_every=None).claim_many(ids, scope="crash") as batch:
            done = {"after the claims": 0, "amid the work": len(ids) // 2, "before the commit": len(ids)}
            await work(batch, batch.new[: done[point]])
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
