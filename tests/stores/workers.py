"""What runs in processes of its own: only a module's functions can."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup import ClaimInFlightError, Dedup, DuplicateError
from fastapi_dedup.hooks import Event
from tests.databases import engine_on, is_pooled

IDS = 10


async def start_cold(url: str, options: Mapping[str, Any]) -> Counter[str]:
    """Start as a worker does whose table nobody has created, claim some ids, and stop."""
    met: Counter[str] = Counter()

    def hear(event: Event) -> None:
        met[event.kind.value] += 1

    bind = engine_on(url) if is_pooled(url) else url
    async with Dedup(bind, create_table=True, reap_every=None, hooks=[hear], **options) as dedup:
        for number in range(IDS):
            try:
                async with dedup.claim(str(number), scope="tests"):
                    pass
            except (ClaimInFlightError, DuplicateError):
                pass
        await dedup.reap()
    if isinstance(bind, AsyncEngine):
        await bind.dispose()
    return met


def shut_down_while_another_writes(url: str, file: str) -> None:
    """Stop while the reaper waits for the lock of SQLite's one writer, which is in no hurry."""

    async def main() -> None:
        dedup = Dedup(url, reap_every=timedelta(milliseconds=20))
        await dedup.start()
        writer = sqlite3.connect(file)
        writer.execute("begin immediate")
        await asyncio.sleep(0.3)
        await dedup.stop()

    asyncio.run(main())
