"""The pages on RabbitMQ and JetStream, word for word, on the real brokers."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS
from tests.http.world import talk
from tests.live import until
from tests.messaging.brokers import JetStream, RabbitMQ, Topic


@pytest.fixture(autouse=True)
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where the page's database is."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute("create table orders (order_id text)")


def orders() -> list[str]:
    with closing(sqlite3.connect("shop.db")) as database:
        return [order for (order,) in database.execute("select order_id from orders")]


async def until_ordered(*wanted: str) -> None:
    async def ordered() -> bool:
        return sorted(orders()) == sorted(wanted)

    await until(ordered)


def page(name: str, renamed: Mapping[str, str]) -> dict[str, Any]:
    """Run the Python of a page, with other names on the broker, and return what it defines."""
    text = (DOCS / "how-to" / name).read_text()
    source = "\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for old, new in renamed.items():
        source = source.replace(f'"{old}"', f'"{new}"')
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)  # noqa: S102 - our own page
    return namespace


@asynccontextmanager
async def consuming(defined: dict[str, Any], url: str) -> AsyncIterator[None]:
    """Consume as the page does."""
    task = asyncio.create_task(defined["consume"](url))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_page_on_rabbitmq_keeps_its_word(rabbitmq: RabbitMQ) -> None:
    topic = await rabbitmq.topic(durable=True)
    renamed = {"orders.dead": f"{topic.name}.dead", "orders": topic.endpoint}
    defined = page("consume-from-rabbitmq.md", renamed)
    channel = await rabbitmq.channel()
    async with consuming(defined, rabbitmq.url):
        for order in ("A-17", "A-17", "", "A-18"):
            await defined["publish"](channel, defined["OrderPlaced"](order))
        (letter,) = await rabbitmq.dead_letters(topic, 1)
        await until_ordered("A-17", "A-18")

    async def consume_on() -> None:
        async with consuming(defined, rabbitmq.url):
            await asyncio.sleep(0.5)

    await rabbitmq.drain(topic, consume_on)  # a copy may have met its twin in flight
    assert letter.body == b'{"order_id": ""}'
    assert sorted(orders()) == ["A-17", "A-18"]


async def test_the_page_on_jetstream_keeps_its_word(jetstream: JetStream) -> None:
    topic = await jetstream.topic(endpoints=0)
    dead = f"{topic.name}-dead"
    renamed = {
        "shop": topic.name,
        "orders": topic.name,
        "workers": "0",
        "dead": dead,
        "dead.>": dead,
        "dead.orders": dead,
    }
    defined = page("consume-from-jetstream.md", renamed)
    topic = Topic(topic.name, (f"{topic.name}/0",))
    async with consuming(defined, jetstream.url):
        for order in ("A-17", "A-17", "", "A-18"):
            await defined["publish"](await jetstream.stream(), defined["OrderPlaced"](order))
        (letter,) = await jetstream.dead_letters(topic, 1)
        await until_ordered("A-17", "A-18")
        await until(partial(settled, jetstream, topic))
    assert letter.headers["dead-letter-delivery"] == f"{topic.name}:2"  # the second A-17 was dropped


async def settled(jetstream: JetStream, topic: Topic) -> bool:
    return await jetstream.left(topic.endpoint) == 0


async def test_an_order_that_comes_by_the_route_and_the_queue_of_the_page_commits_once(
    rabbitmq: RabbitMQ,
) -> None:
    topic = await rabbitmq.topic()
    defined = page("consume-from-rabbitmq.md", {"orders.bulk": topic.endpoint})
    await rabbitmq.consume_raw(topic.endpoint, defined["on_bulk_order"])
    async with defined["dedup"], talk(defined["app"]) as client:
        await rabbitmq.publish(topic, {"order_id": "A-17"})
        await until_ordered("A-17")
        assert (await client.post("/orders", json={"order_id": "A-17"})).status_code == 409
        assert await rabbitmq.drained(topic)
    assert orders() == ["A-17"]
