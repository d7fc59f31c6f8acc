"""The orders example, as a real server: what its README calls promises, and the demonstration of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from examples.orders.demo import Report, kind_of
from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from tests.live import process
from tests.servers import driver_url, postgres_database

ROOT = Path(__file__).parents[2]


class Server:
    """The service, and a look into its database."""

    def __init__(self, url: str, database: str) -> None:
        self.url = url
        self._database = database

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30)

    def empty(self) -> None:
        engine = create_engine(self._database)
        with engine.begin() as connection:
            for table in ("orders", "stock", "dedup_claims"):
                connection.execute(text(f"DELETE FROM {table}"))
        engine.dispose()

    def rows(self, query: str) -> list[tuple[object, ...]]:
        engine = create_engine(self._database)
        try:
            with engine.connect() as connection:
                return [tuple(row) for row in connection.execute(text(query))]
        finally:
            engine.dispose()

    @property
    def orders(self) -> list[tuple[object, ...]]:
        return self.rows("SELECT reference, sku, quantity FROM orders ORDER BY reference")

    @property
    def claims(self) -> list[tuple[object, ...]]:
        return self.rows("SELECT scope, logical_id FROM dedup_claims ORDER BY scope, logical_id")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "sqlite":
        file = tmp_path_factory.mktemp("orders") / "orders.db"
        environ = {DATABASE_URL_VARIABLE: f"sqlite+aiosqlite:///{file}"}
        with process("examples.orders.app:app", environ=environ) as service:
            yield Server(service.url, f"sqlite:///{file}")
        return
    with postgres_database(request.getfixturevalue("postgres_url")) as url:
        environ = {DATABASE_URL_VARIABLE: driver_url(url, "asyncpg")}
        with process("examples.orders.app:app", environ=environ) as service:
            yield Server(service.url, driver_url(url, "psycopg"))


@pytest.fixture
def server(running: Server) -> Server:
    """Return the service, with nothing in stock, no orders and no claims."""
    running.empty()
    return running


async def deliver(client: httpx.AsyncClient, sku: str, quantity: int, key: str) -> httpx.Response:
    return await client.post(f"/stock/{sku}", json={"quantity": quantity}, headers={"Idempotency-Key": key})


async def test_copies_of_an_order_are_one_order(server: Server) -> None:
    order = {"reference": "A-1", "sku": "tea", "quantity": 2}
    async with server.client() as client:
        await deliver(client, "tea", 10, "1")
        answers = [await client.post("/orders", json=order) for _ in range(2)]
        answers += await asyncio.gather(*(client.post("/orders", json=order) for _ in range(20)))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: 21}
    assert answers[0].json() == {"reference": "A-1", "sku": "tea", "quantity": 2, "gift": False}
    assert server.orders == [("A-1", "tea", 2)]
    assert server.claims == [("POST /stock/tea", "1"), ("orders", "A-1")]
    assert server.rows("SELECT quantity FROM stock") == [(8,)]


async def test_an_order_that_fails_leaves_nothing_and_may_be_sent_again(server: Server) -> None:
    order = {"reference": "A-1", "sku": "coffee"}
    async with server.client() as client:
        for _ in range(2):
            failure = await client.post("/orders", json=order)
            assert (failure.status_code, failure.json()) == (422, {"detail": "not in stock"})
        assert (server.orders, server.claims) == ([], [])
        await deliver(client, "coffee", 1, "1")
        assert [(await client.post("/orders", json=order)).status_code for _ in range(2)] == [201, 409]
    assert server.orders == [("A-1", "coffee", 1)]


async def test_a_copy_of_a_slow_order_is_told_not_yet(server: Server) -> None:
    order = {"reference": "A-1", "sku": "tea", "gift": True}
    async with server.client() as client:
        await deliver(client, "tea", 1, "1")
        slow = asyncio.create_task(client.post("/orders", json=order))
        while (await client.get("/gifts")).json() != ["A-1"]:
            assert not slow.done()
            await asyncio.sleep(0.01)
        copy = await client.post("/orders", json=order)
        assert kind_of(copy) == "409 in-flight"
        assert copy.headers["retry-after"] == "1"
        assert server.orders == []
        assert (await client.put("/gifts/A-2/wrapped")).status_code == 404
        assert (await client.put("/gifts/A-1/wrapped")).status_code == 204
        assert (await slow).status_code == 201
        assert kind_of(await client.post("/orders", json=order)) == "409 duplicate"
    assert server.orders == [("A-1", "tea", 1)]


async def test_a_delivery_counts_once_per_key(server: Server) -> None:
    async with server.client() as client:
        answers = [await deliver(client, "tea", 5, key) for key in ("1", "1", "2")]
        assert [kind_of(answer) for answer in answers] == ["200", "409 duplicate", "200"]
        assert kind_of(await deliver(client, "tea", 6, "2")) == "422 fingerprint-mismatch"
        assert kind_of(await client.post("/stock/tea", json={"quantity": 5})) == "400 missing-logical-id"
    assert server.rows("SELECT quantity FROM stock") == [(10,)]


# The demonstration


def test_the_demonstration_succeeds_is_quick_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.orders.demo"],
        cwd=ROOT,
        # A database that somebody has chosen for something else is not for the demonstration.
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            DATABASE_URL_VARIABLE: "postgresql://nobody@127.0.0.1:1/x",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert any(
        "50 more copies at once" in line and "1 order, 1 claim for 52 copies" in line for line in lines
    )
    assert any("all of it" in line and "4 orders, 4 claims for 107 copies" in line for line in lines)
    assert lines[-1].startswith("Every promise held")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def report() -> Iterator[Report]:
    """Yield a report on a database that holds two rows and one claim of order A-1."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "orders.db"
        engine = create_engine(f"sqlite:///{database}")
        with engine.begin() as connection:
            for statement in (
                "CREATE TABLE orders (reference TEXT)",
                "CREATE TABLE dedup_claims (scope TEXT, logical_id TEXT)",
                "INSERT INTO orders VALUES ('A-1'), ('A-1')",
                "INSERT INTO dedup_claims VALUES ('orders', 'A-1')",
            ):
                connection.execute(text(statement))
        engine.dispose()
        yield Report(database, Counter({"A-1": 2}))


def test_the_report_tells_of_doubled_work(report: Report) -> None:
    report.add("twice", "A-1", [httpx.Response(201), httpx.Response(201)], {"201": 1, "409": 1}, held=1)
    report.total()
    assert not report.kept
    assert len(report.broken) == 3
    assert report.verdict().startswith("BROKEN: twice: the answers are not")
    assert "2 orders, 1 claim for 2 copies" in report.table()


def test_the_report_wants_retry_after_on_what_is_in_flight(report: Report) -> None:
    problem = {"content-type": "application/problem+json"}
    answer = httpx.Response(409, headers=problem, json={"type": "x#in-flight"})
    report.add("a copy", "A-1", [answer], {"409 in-flight": 1}, held=2)
    assert "a copy: an in-flight 409 has no Retry-After" in report.broken
