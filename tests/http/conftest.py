"""The worlds that the HTTP tests live in: one per kind of database, and one on each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from fastapi_dedup.hooks import Event
from tests.databases import orders_table, url_of
from tests.http.world import World


@asynccontextmanager
async def _world(backend: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[World]:
    events: list[Event] = []
    async with orders_table(url_of(backend, request, folder)) as engine:
        dedup = Dedup(engine, create_table=True, reap_every=None, hooks=[events.append])
        await dedup.create_table()
        yield World(engine, dedup, events)


@pytest.fixture
async def sqlite(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with _world("sqlite", request, tmp_path) as world:
        yield world


@pytest.fixture
async def postgres(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with _world("asyncpg", request, tmp_path) as world:
        yield world


@pytest.fixture(params=["sqlite", "asyncpg"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """A world on each kind of database."""
    async with _world(request.param, request, tmp_path) as each:
        yield each
