"""The pages on FastStream and taskiq, word for word: on real RabbitMQ, and on taskiq's in-memory broker."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from faststream.rabbit import RabbitBroker

from tests.live import until
from tests.messaging.brokers import RabbitMQ
from tests.messaging.test_pages import orders, page, until_ordered


@pytest.fixture(autouse=True)
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where the pages' database is."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute("create table orders (order_id text)")


async def test_the_page_on_faststream_keeps_its_word(rabbitmq: RabbitMQ) -> None:
    topic = await rabbitmq.topic(durable=True)
    renamed = {
        "amqp://guest:guest@localhost:5672/": rabbitmq.url,
        "orders.dead": f"{topic.name}.dead",
        "orders": topic.endpoint,
    }
    defined = page("use-with-faststream.md", renamed)
    broker: RabbitBroker = defined["broker"]
    async with defined["dedup"], broker:
        await broker.start()
        for order in ("A-17", "A-17", "", "A-18"):
            await defined["place"](order)
        (letter,) = await rabbitmq.dead_letters(topic, 1)
        await until_ordered("A-17", "A-18")

        async def empty() -> bool:
            return await rabbitmq.waiting(topic.endpoint) == 0

        await until(empty)
    assert letter.body == b'{"order_id":""}'
    assert "deduplication-id" not in letter.headers
    assert orders() == ["A-17", "A-18"]


async def test_the_page_on_taskiq_keeps_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "use-with-taskiq.md", ModuleType("use-with-taskiq.md"))
    defined = page("use-with-taskiq.md", {})
    await defined["main"]()
    assert orders() == ["A-17"]
    await defined["dedup"].engine.dispose()
