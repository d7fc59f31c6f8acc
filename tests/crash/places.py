"""Where work and claims are, when the process between them dies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.apps.orders import Settings
from tests.databases import orders_table, url_of
from tests.races.shop import Ledger
from tests.redis.worlds import client_of, new_prefix, rows_in
from tests.stores.worlds import Row

_REDIS = {"redis": "redis_url", "redis-cluster": "redis_cluster_url"}


@dataclass(frozen=True, kw_only=True)
class RedisLedger(Ledger):
    """What a database and a Redis hold; not both at the same moment."""

    redis: str
    prefix: str

    async def holds(self, sku: str) -> tuple[int, int]:
        rows, _ = await super().holds(sku)
        return rows, len([claim for claim in await self._claims() if claim.logical_id == sku])

    async def holds_in_all(self) -> tuple[int, int]:
        rows, _ = await super().holds_in_all()
        return rows, len(await self._claims())

    async def leases(self) -> dict[str, object]:
        return {claim.logical_id: claim.leased_until for claim in await self._claims()}

    async def _claims(self) -> list[Row]:
        async with client_of(self.redis, decode_responses=True) as client:
            return await rows_in(client, self.prefix)


@asynccontextmanager
async def place(
    backend: str, request: pytest.FixtureRequest, folder: Path, **options: Any
) -> AsyncIterator[tuple[Settings, Ledger]]:
    """Yield the settings of a server, and a view on what it holds.

    Args:
        backend: A database, and where leased claims are if not in it: "sqlite with redis".
        request: Who asks.
        folder: Where files may be.
        options: What else the server is to be told.
    """
    database, _, kind = backend.partition(" with ")
    options |= {"url": url_of(database, request, folder), "pool_size": 0 if database == "sqlite" else 5}
    async with orders_table(options["url"]) as engine:
        if not kind:
            yield Settings(**options), Ledger(engine=engine)
            return
        redis, prefix = request.getfixturevalue(_REDIS[kind]), new_prefix()
        yield (
            Settings(redis=redis, prefix=prefix, **options),
            RedisLedger(engine=engine, redis=redis, prefix=prefix),
        )
        async with client_of(redis) as client:
            async for key in client.scan_iter(match=f"{prefix}*"):
                await client.delete(key)
