"""What the recipes run on: Redis, moto's SQS, and the pages' own database."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.session import get_session
from moto.server import ThreadedMotoServer
from redis.asyncio import Redis

from tests.live import until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Yield a client that decodes."""
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """Yield the URL of moto's server, which imitates AWS in a thread of this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
async def sqs(moto_url: str) -> AsyncIterator[Any]:
    """Yield a client for SQS."""
    session = get_session()
    async with session.create_client(
        "sqs",
        endpoint_url=moto_url,
        region_name="eu-central-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
    ) as client:
        yield client


@pytest.fixture
def name() -> str:
    """Return a new name, for a stream or queue of the test's own."""
    return f"orders-{secrets.token_hex(4)}"


class Shop:
    """The pages' database."""

    def __init__(self) -> None:
        self._database = Path("shop.db").absolute()
        self._rows("create table orders (order_id text)")

    def _rows(self, statement: str) -> list[str]:
        with closing(sqlite3.connect(self._database)) as database:
            return [row for (row,) in database.execute(statement)]

    @property
    def orders(self) -> list[str]:
        """What was ordered."""
        return self._rows("select order_id from orders")

    @property
    def ids(self) -> list[str]:
        """The logical ids that are claimed."""
        return self._rows("select logical_id from dedup_claims")

    async def until(self, condition: Callable[[], Awaitable[object] | object]) -> None:
        """Wait until a condition holds."""

        async def holds() -> bool:
            value = condition()
            return bool(await value if isinstance(value, Awaitable) else value)

        await until(holds)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Go where the page's database is."""
    monkeypatch.chdir(tmp_path)
    return Shop()


@asynccontextmanager
async def at_work(*loops: Awaitable[None]) -> AsyncIterator[None]:
    """Run loops that never end, and stop them; one that fails makes the test fail."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
    finally:
        failed = [task.exception() for task in tasks if task.done()]
        while working := [task for task in tasks if not task.done()]:
            for task in working:
                task.cancel()
            await asyncio.wait(working, timeout=0.1)  # Python 3.11's wait_for loses cancellations
    assert failed == []
