"""A world per kind of session, on each database that the kind works on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fastapi_dedup import Dedup
from fastapi_dedup.hooks import Event
from tests.databases import orders_table, url_of
from tests.http.world import World
from tests.sessions.kinds import CASES, DIFFERENT, KINDS, MARIADB, Kind


@pytest.fixture(scope="package")
def pristine() -> set[str]:
    """Return the databases whose tables are as this folder's tests leave them: with rows, but as made."""
    return set()


@asynccontextmanager
async def tables(url: str, pristine: set[str]) -> AsyncIterator[AsyncEngine]:
    """Yield an engine on a database with empty tables; making them anew would cost more than most tests."""
    if url not in pristine:
        async with orders_table(url) as engine:
            await Dedup(engine, reap_every=None).create_table()
            async with engine.begin() as connection:
                await connection.execute(text("drop table if exists glances"))
                await connection.execute(text("create table glances (id integer primary key)"))
        pristine.add(url)
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(text("delete from orders"))
        await connection.execute(text("delete from dedup_claims"))
    try:
        yield engine
    finally:
        await engine.dispose()


def mariadb_of(request: pytest.FixtureRequest) -> str:
    url = make_url(request.getfixturevalue("mariadb_url")).set(drivername="mysql+asyncmy")
    return url.render_as_string(hide_password=False)


@asynccontextmanager
async def kind_on(case: tuple[str, str], request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Kind]:
    """Yield a kind of session, on a world whose runtime has an asynchronous engine."""
    events: list[Event] = []
    name, backend = case
    pristine = request.getfixturevalue("pristine")
    url = mariadb_of(request) if backend == "asyncmy" else url_of(backend, request, folder)
    async with tables(url, pristine) as engine:
        dedup = Dedup(engine, reap_every=None, hooks=[events.append])
        kind = KINDS[name](World(engine, dedup, events))
        async with kind.stack:
            await kind.prepare()
            yield kind


def name_of(case: tuple[str, str]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.fixture(params=CASES + MARIADB, ids=name_of)
async def every_kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """Yield every kind of session, on each database that it works on."""
    async with kind_on(request.param, request, tmp_path) as opened:
        yield opened


@pytest.fixture(params=DIFFERENT + MARIADB, ids=name_of)
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """Yield every kind of session whose transactions are of a kind of their own."""
    async with kind_on(request.param, request, tmp_path) as opened:
        yield opened


@pytest.fixture
async def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Yield a world on SQLite."""
    async with kind_on(("AsyncSession", "sqlite"), request, tmp_path) as opened:
        yield opened.world


@pytest.fixture
async def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Yield a world on PostgreSQL."""
    async with kind_on(("AsyncSession", "asyncpg"), request, tmp_path) as opened:
        yield opened.world
