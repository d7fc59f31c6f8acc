"""The page on leases in Redis, word for word, on a real one."""

from __future__ import annotations

import inspect
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fastapi_dedup.stores.redis import RedisLeases
from tests.docs.pages import DOCS, code, table_of
from tests.http.world import KEY, client, problem
from tests.messaging.test_pages import page
from tests.redis.worlds import client_of, rows_in

PAGE = DOCS / "how-to" / "keep-leases-in-redis.md"
ORDER = {"order_id": "A-1"}


@pytest.fixture
def defined(redis_url: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute("create table payments (order_id text, receipt text)")
    names = page(PAGE.name, {"redis://127.0.0.1:6379/0": redis_url, "shop:": prefix})
    names["charging"]._backing.leases._prefix = prefix  # the page's is everybody's default
    return names


async def test_beside_a_database_the_claim_is_in_redis_and_the_payment_in_the_table(
    defined: dict[str, Any], redis_url: str, prefix: str
) -> None:
    async with client(defined["app"]) as calls:
        assert (await calls.post("/payments", json=ORDER)).status_code == 201
        assert problem(await calls.post("/payments", json=ORDER)) == "duplicate"
    with closing(sqlite3.connect("shop.db")) as database:
        assert database.execute("select * from payments").fetchall() == [("A-1", "receipt of A-1")]
        assert database.execute("select count(*) from dedup_claims").fetchone() == (0,)
    async with client_of(redis_url, decode_responses=True) as looking:
        (row,) = await rows_in(looking, prefix)
        assert (row.scope, row.logical_id, row.leased_until) == ("POST /payments", "A-1", None)
    assert await defined["dedup"].release("A-1", scope=("POST", "/payments"))


async def test_without_a_database_charges_run_once(defined: dict[str, Any]) -> None:
    async with client(defined["api"]) as calls:
        assert (await calls.post("/charges", json=ORDER)).json() == "receipt of A-1"
        assert problem(await calls.post("/charges", json=ORDER)) == "duplicate"
        assert await defined["charging"].release("A-1", scope=("POST", "/charges"))


async def test_the_middleware_s_policy_for_the_header_is_one_that_can_be_kept(
    defined: dict[str, Any],
) -> None:
    by_key = defined["by_key"]
    by_key.post("/anything")(lambda: None)
    async with client(by_key) as calls:
        first, second = [await calls.post("/anything", headers={KEY: "1"}) for _ in range(2)]
        assert (first.status_code, problem(second)) == (200, "duplicate")
        assert await defined["charging"].release("1", scope=("POST", "/anything"))


def test_the_options_of_redis_leases() -> None:
    told = {code(row[0]): row[1] for row in table_of(PAGE, "## Clients")}
    parameters = inspect.signature(RedisLeases).parameters
    assert list(told) == list(parameters)
    assert told["prefix"] == f'`"{parameters["prefix"].default}"`'
    assert parameters["timeout"].default.total_seconds() == 5
    assert "seconds=5" in told["timeout"]
