"""Databases with nothing in them, and Alembic as an app has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.databases import url_of
from tests.servers import mariadb_database, postgres_database

DATABASES = ("asyncpg", "asyncmy", "sqlite")


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of an empty database, made for this test."""
    if request.param == "sqlite":
        yield url_of("sqlite", request, tmp_path)
    elif request.param == "asyncpg":
        with postgres_database(request.getfixturevalue("postgres_url")) as made:
            yield _with_driver(made, "postgresql+asyncpg")
    else:
        with mariadb_database(request.getfixturevalue("mariadb_url")) as made:
            yield _with_driver(made, "mysql+asyncmy")


def _with_driver(url: str, driver: str) -> str:
    return make_url(url).set(drivername=driver).render_as_string(hide_password=False)


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    """Yield an engine on the empty database."""
    made = create_async_engine(url)
    yield made
    await made.dispose()
