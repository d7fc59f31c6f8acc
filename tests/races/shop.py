"""The app of `tests.apps.orders` in this process, on a real socket, with gate and database at hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine
from starlette.middleware import Middleware

from tests.apps.gate import Gate, gate
from tests.apps.orders import Settings, Shop, create_app
from tests.databases import orders_table
from tests.live import live


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What the database holds, seen from outside the app."""

    engine: AsyncEngine

    async def rows(self, sku: str) -> int:
        """Return how many business rows an id has."""
        return await self._count("select count(*) from orders where sku = :id", sku)

    async def claims(self, logical_id: str) -> int:
        """Return how many claims an id has."""
        return await self._count("select count(*) from dedup_claims where logical_id = :id", logical_id)

    async def all_rows(self) -> int:
        """Return how many business rows there are."""
        return await self._count("select count(*) from orders")

    async def all_claims(self) -> int:
        """Return how many claims there are."""
        return await self._count("select count(*) from dedup_claims")

    async def _count(self, query: str, logical_id: str | None = None) -> int:
        async with self.engine.connect() as connection:
            return int(await connection.scalar(text(query), {"id": logical_id} if logical_id else {}) or 0)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A shop that is being served in this process."""

    url: str
    app: FastAPI
    shop: Shop
    gate: Gate
    ledger: Ledger


@asynccontextmanager
async def served(
    database: str,
    *,
    pool_size: int = 5,
    wait_timeout: float = 30.0,
    inside: Middleware | None = None,
    outside: Middleware | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve the shop; every handler that has done its write waits at the gate.

    Args:
        database: The URL of its database.
        pool_size: The most connections that the app may open.
        wait_timeout: How long POST /waiting waits, in seconds.
        inside: A middleware just inside of ours.
        outside: A middleware around ours.
        options: What uvicorn is to be told.
    """
    async with gate() as opened, orders_table(database) as engine:
        settings = Settings(url=database, pool_size=pool_size, gate=opened.port, wait_timeout=wait_timeout)
        app = create_app(settings)
        app.user_middleware[:] = [
            *([outside] if outside else []),
            *app.user_middleware,
            *([inside] if inside else []),
        ]
        async with live(app, **options) as url:
            yield Served(url=url, app=app, shop=app.state.shop, gate=opened, ledger=Ledger(engine=engine))
