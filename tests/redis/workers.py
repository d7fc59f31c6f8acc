"""What runs in processes of its own: only a module's functions can."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

from fastapi_dedup import ClaimInFlightError, Dedup, DuplicateError, StoreUnavailableError
from fastapi_dedup.stores.redis import RedisLeases

LEASE = timedelta(seconds=30)


async def claim(url: str, prefix: str, ids: int, copies: int) -> Counter[str]:
    """Claim every id so many times, each copy until its outcome is final; count the outcomes."""
    outcomes: Counter[str] = Counter()

    async def deliver(dedup: Dedup, logical_id: str) -> None:
        while True:
            try:
                async with dedup.claim(logical_id, scope="crowd", lease=LEASE):
                    await asyncio.sleep(0)
            except ClaimInFlightError:
                outcomes["in-flight"] += 1
            except StoreUnavailableError:
                outcomes["store-unavailable"] += 1
            except DuplicateError:
                outcomes["duplicate"] += 1
                return
            else:
                outcomes["ran"] += 1
                return

    async with Dedup(RedisLeases(url, prefix=prefix)) as dedup:
        for number in range(ids):
            await asyncio.gather(*(deliver(dedup, f"K{number}") for _ in range(copies)))
    return outcomes
