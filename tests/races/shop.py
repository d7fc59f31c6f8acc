"""The app of `tests.apps.orders` in this process, on a real socket, with gate and database at hand."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
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

    async def holds(self, sku: str) -> tuple[int, int]:
        """Return how many business rows and how many claims an id has, both at the same moment."""
        return await self._counts("where sku = :id", "where logical_id = :id", {"id": sku})

    async def holds_in_all(self) -> tuple[int, int]:
        """Return how many business rows and how many claims there are."""
        return await self._counts("", "", {})

    async def leases(self) -> dict[str, object]:
        """Return for each id until when its claim is leased; None where its work is done."""
        async with self.engine.connect() as connection:
            rows = await connection.execute(text("select logical_id, leased_until from dedup_claims"))
            return {row.logical_id: row.leased_until for row in rows}

    async def _counts(self, of_rows: str, of_claims: str, values: dict[str, str]) -> tuple[int, int]:
        rows = f"select count(*) from orders {of_rows}"
        claims = f"select count(*) from dedup_claims {of_claims}"
        async with self.engine.connect() as connection:
            counts = (await connection.execute(text(f"select ({rows}), ({claims})"), values)).one()
        return int(counts[0]), int(counts[1])

    async def is_quiet(self) -> bool:
        """Tell whether every transaction of the app's is over, those included whose client is gone."""
        if self.engine.dialect.name == "sqlite":
            return self._is_free()
        query = """
            select count(*) from pg_stat_activity
             where datname = current_database() and pid <> pg_backend_pid()
               and (state <> 'idle' or pid in (select pid from pg_locks where locktype = 'advisory'))
        """
        async with self.engine.connect() as connection:
            return int(await connection.scalar(text(query)) or 0) == 0

    def _is_free(self) -> bool:
        """Tell whether nobody holds the file's write lock, a driver's thread at a COMMIT included."""
        # A connection closed under an open cursor keeps its transaction until the cursor is collected.
        gc.collect()
        with closing(sqlite3.connect(self.engine.url.database or "", timeout=0)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                return False
        return True


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
    wait_timeout: float = 3600.0,
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
