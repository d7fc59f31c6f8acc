"""The databases that a test runs on: each with the claims' table and one of the app's, both empty."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import URL, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests import pgbouncer
from tests.servers import driver_url

BACKENDS = ("asyncpg", "psycopg", "sqlite")
MARIADB = ("asyncmy", "aiomysql")
PGBOUNCER = ("asyncpg+pgbouncer", "psycopg+pgbouncer")


def mariadb() -> list[Any]:
    """Return the drivers of MariaDB, for tests that take seconds: the second one is left to `make soak`."""
    first, *others = MARIADB
    return [first, *(pytest.param(other, marks=pytest.mark.soak) for other in others)]


_POOLED = "pooled"
"""Marks a URL as pgbouncer's: `engine_on` then leaves out what transaction pooling cannot do."""


def url_of(backend: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the URL of a backend's database; asking for a server's may skip the test, or fail it in CI."""
    if backend == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'test.db'}"
    if backend in MARIADB:
        url = make_url(request.getfixturevalue("mariadb_url")).set(drivername=f"mysql+{backend}")
        return url.render_as_string(hide_password=False)
    driver, _, pooler = backend.partition("+")
    if not pooler:
        return driver_url(request.getfixturevalue("postgres_url"), driver)
    pooled = make_url(driver_url(request.getfixturevalue("pgbouncer_url"), driver))
    return pooled.update_query_dict({_POOLED: "yes"}).render_as_string(hide_password=False)


def is_pooled(url: str) -> bool:
    """Tell whether a URL is pgbouncer's."""
    return _POOLED in make_url(url).query


def reconnect(url: str) -> None:
    """Have a pooler let go of the server's processes, which know nothing of a database's new settings."""
    if is_pooled(url):
        pgbouncer.command(url, "RECONNECT")


def engine_on(url: str | URL, **options: Any) -> AsyncEngine:
    """Return an engine as an app makes it, which on pgbouncer means: without prepared statements kept."""
    address = make_url(url)
    if _POOLED in address.query:
        address = address.difference_update_query([_POOLED])
        options["connect_args"] = {
            "asyncpg": {
                "statement_cache_size": 0,
                "prepared_statement_cache_size": 0,
                "prepared_statement_name_func": lambda: f"__asyncpg_{uuid4()}__",
            },
            "psycopg": {"prepare_threshold": None},
        }[address.get_driver_name()]
    return create_async_engine(address, **options)


_KEYS = {
    "mysql": "integer auto_increment primary key",
    "postgresql": "serial primary key",
    "sqlite": "integer primary key",
}


@asynccontextmanager
async def orders_table(url: str) -> AsyncIterator[AsyncEngine]:
    """Yield an engine on a database with an empty table `orders(id, sku, note)` and no table of claims."""
    engine = engine_on(url)
    async with engine.begin() as connection:
        await connection.execute(text("drop table if exists orders"))
        await connection.execute(text("drop table if exists dedup_claims"))
        key = _KEYS[engine.dialect.name]
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
