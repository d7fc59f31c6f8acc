"""The databases that a test runs on: each with the claims' table and one of the app's, both empty."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.servers import driver_url

BACKENDS = ("asyncpg", "psycopg", "sqlite")


def url_of(backend: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the URL of a backend's database; asking for a server's may skip the test, or fail it in CI."""
    if backend == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'test.db'}"
    return driver_url(request.getfixturevalue("postgres_url"), backend)


@asynccontextmanager
async def orders_table(url: str) -> AsyncIterator[AsyncEngine]:
    """Yield an engine on a database with an empty table `orders(id, sku, note)` and no table of claims."""
    engine = create_async_engine(url)
    key = "integer primary key" if engine.dialect.name == "sqlite" else "serial primary key"
    async with engine.begin() as connection:
        await connection.execute(text("drop table if exists orders"))
        await connection.execute(text("drop table if exists dedup_claims"))
        await connection.execute(
            text(f"create table orders (id {key}, sku varchar(300) not null, note text)")
        )
    try:
        yield engine
    finally:
        await engine.dispose()


async def count(engine: AsyncEngine, table: str, where: str = "1 = 1") -> int:
    """Return how many rows of a table meet a condition."""
    async with engine.connect() as connection:
        return int(await connection.scalar(text(f"select count(*) from {table} where {where}")) or 0)
