"""What the page on sessions says of drivers' connections, on a real server; the rest runs in tests/docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlmodel

from tests.docs.pages import DOCS
from tests.http.world import client
from tests.servers import postgres_database

PAGE = DOCS / "how-to" / "use-any-session-or-connection.md"


@pytest.fixture
def database(postgres_url: str) -> Iterator[str]:
    with postgres_database(postgres_url) as url:
        with psycopg.connect(url) as connection:
            connection.execute("create table orders (reference text, sku text)")
        yield url


@pytest.fixture(autouse=True)
def _models_of_its_own() -> Iterator[None]:
    sqlmodel.SQLModel.metadata.clear()
    yield
    sqlmodel.SQLModel.metadata.clear()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_the_routes_of_the_page_run_an_order_once(
    database: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    source = "\n\n".join(snippets).replace("postgresql://localhost/shop", database)
    defined: dict[str, Any] = {"__name__": f"page_on_{driver}"}
    exec(compile(source, PAGE.name, "exec", dont_inherit=True), defined)  # noqa: S102 - our own page
    async with client(defined["postgres_app"]) as c:
        order = {"reference": "A-1", "sku": "tea"}
        assert (await c.post(f"/{driver}", json=order)).status_code == 200
        assert (await c.post(f"/{driver}", json=order)).status_code == 409
    with psycopg.connect(database) as connection:
        assert connection.execute("select * from orders").fetchall() == [("A-1", "tea")]
