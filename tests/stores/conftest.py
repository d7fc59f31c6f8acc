"""The worlds that the suite runs in: one per backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.databases import url_of
from tests.stores.promises import BACKENDS, Backend
from tests.stores.worlds import World, world_of


@pytest.fixture(params=BACKENDS, ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return each backend in turn."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def database_url(backend: Backend, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the backend's database."""
    return url_of(backend.database, request, tmp_path)


@pytest.fixture(scope="session")
def pristine() -> set[str]:
    """Return the tables that may be used again."""
    return set()


@pytest.fixture
async def world(backend: Backend, database_url: str, pristine: set[str]) -> AsyncIterator[World]:
    """Yield a world on the backend."""
    async with world_of(backend, database_url, pristine=pristine) as new:
        yield new


@pytest.fixture
async def timed(backend: Backend, database_url: str, pristine: set[str]) -> AsyncIterator[World]:
    """Yield a world whose database's clock stands where the test puts it."""
    async with world_of(backend, database_url, pristine=pristine, stopped_clock=True) as new:
        yield new
