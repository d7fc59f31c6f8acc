"""The orders example with its consumer: the service and the queue, as two processes on one database."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aio_pika
import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from tests.examples.test_orders import ROOT, deliver
from tests.live import process, until
from tests.messaging.brokers import RabbitMQ, Topic
from tests.servers import driver_url, postgres_database


@dataclass
class Shop:
    """The service, the queue, and a look into their database."""

    client: httpx.AsyncClient
    rabbitmq: RabbitMQ
    engine: AsyncEngine
    topic: Topic

    async def send(self, order: object) -> None:
        """Put an order into the queue."""
        channel = await self.rabbitmq.channel()
        message = aio_pika.Message(json.dumps(order).encode())
        await channel.default_exchange.publish(message, self.topic.endpoint)

    async def until_ordered(self, *wanted: str) -> None:
        """Wait until the shop has these orders."""

        async def ordered() -> bool:
            async with self.engine.connect() as connection:
                orders = await connection.scalars(text("select reference from orders order by reference"))
                return [*orders] == [*wanted]

        await until(ordered)

    async def drained(self) -> None:
        """Wait until the queue is empty, and nothing in it is unacknowledged."""

        async def drained() -> bool:
            channel = await self.rabbitmq.channel()
            queue = await channel.declare_queue(self.topic.endpoint, passive=True)
            return queue.declaration_result.message_count == 0

        await until(drained)


@pytest.fixture
async def shop(postgres_url: str, rabbitmq_url: str, tmp_path: Path) -> AsyncIterator[Shop]:
    """Run the service and the consumer, each as a process of its own."""
    rabbitmq = RabbitMQ(rabbitmq_url)
    channel = await rabbitmq.channel()  # now, for those who send at once would open one each
    queue = f"orders-{secrets.token_hex(4)}"
    with postgres_database(postgres_url) as database:
        url = driver_url(database, "asyncpg")
        environ = {DATABASE_URL_VARIABLE: url, "RABBITMQ_URL": rabbitmq_url, "ORDERS_QUEUE": queue}
        engine = create_async_engine(url)
        with process("examples.orders.app:app", environ=environ) as service:
            async with (
                consumer(environ, tmp_path / "consumer.log"),
                httpx.AsyncClient(base_url=service.url, timeout=30) as client,
            ):
                yield Shop(client, rabbitmq, engine, Topic(queue, (queue,)))
        await engine.dispose()
    for name in (queue, f"{queue}.dead"):
        await channel.queue_delete(name)
    await rabbitmq.close()


@asynccontextmanager
async def consumer(environ: Mapping[str, str], log: Path) -> AsyncIterator[None]:
    """Run the consumer until it listens, and see to it that it ends when it is told to."""
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.orders.consumer"),
            cwd=ROOT,
            env={**os.environ, **environ},
            stdout=output,
            stderr=output,
        )

    async def listens() -> bool:
        return "waiting for messages" in await asyncio.to_thread(log.read_text)

    try:
        await until(listens)
        yield
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_orders_that_come_by_http_and_by_queue_commit_once(shop: Shop) -> None:
    orders = [{"reference": f"A-{number}", "sku": "tea"} for number in range(5)]
    await deliver(shop.client, "tea", 99, "1")
    answers, _ = await asyncio.gather(
        asyncio.gather(*(shop.client.post("/orders", json=order) for order in orders * 4)),
        asyncio.gather(*(shop.send(order) for order in orders * 4)),
    )
    await shop.until_ordered(*(str(order["reference"]) for order in orders))
    await shop.drained()
    assert {answer.status_code for answer in answers} <= {201, 409}
    async with shop.engine.connect() as connection:
        assert await connection.scalar(text("select quantity from stock")) == 94
        scopes = await connection.scalars(text("select scope from dedup_claims order by scope"))
        assert [*scopes] == ["POST /stock/tea", *["orders"] * 5]
    assert await shop.rabbitmq.dead(shop.topic) == []


async def test_what_cannot_be_an_order_is_in_the_dead_letter_queue_and_its_id_is_free(shop: Shop) -> None:
    sold_out, no_id = {"reference": "A-1", "sku": "tea"}, {"reference": "", "sku": "tea"}
    for order in (sold_out, no_id):
        await shop.send(order)
    letters = await shop.rabbitmq.dead_letters(shop.topic, 2)
    assert sorted(json.loads(letter.body)["reference"] for letter in letters) == ["", "A-1"]
    await deliver(shop.client, "tea", 1, "1")
    await shop.send(sold_out)
    await shop.until_ordered("A-1")
