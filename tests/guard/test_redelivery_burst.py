"""RabbitMQ, for real: a connection ends with unacknowledged deliveries, and they all come again at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from aio_pika.abc import AbstractIncomingMessage
from sqlalchemy import make_url

from fastapi_dedup import Dedup, Deduplicated
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.messaging.aio_pika import consumer
from tests.live import until
from tests.messaging.brokers import RabbitMQ
from tests.messaging.proxy import Proxy, proxy

HANDLED, UNFINISHED = 20, 10
"""How many messages are handled, and how many are being handled, when the connection ends."""

MESSAGES = HANDLED + UNFINISHED

Callback = Callable[[AbstractIncomingMessage], Awaitable[None]]


class Service:
    """A process that consumes a queue, with a guard or without; it has no database.

    Attributes:
        entered: How often the handler was entered, by the message's id.
        done: How often it came to its end: aio-pika cancels it when the connection ends.
        redelivered: How many deliveries came for the second time or more.
    """

    def __init__(self, *, guarded: bool) -> None:
        self.entered: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.redelivered = 0
        self.open = asyncio.Event()
        self.failing: set[int] = set()
        self._guarded = guarded
        self._heard: Counter[EventKind] = Counter()
        self._dedup = Dedup(
            "postgresql+asyncpg://nobody@127.0.0.1:1/nothing", reap_every=None, hooks=[self._hear]
        )

    def _hear(self, event: Event) -> None:
        self._heard[event.kind] += 1

    async def work(self, message: AbstractIncomingMessage) -> None:
        """Count; some messages take their time, and some fail at first."""
        number = int(str(message.headers["deduplication-id"]))
        self.entered[number] += 1
        if number >= HANDLED:
            await self.open.wait()
        if number in self.failing:
            self.failing.remove(number)
            msg = "the handler failed, as the test wished"
            raise RuntimeError(msg)
        self.done[number] += 1

    def callback(self, queue: str) -> Callback:
        """Return what consumes the queue, built anew as after a reconnect."""
        policy = Deduplicated(store="memory")
        guarded = consumer(self._dedup, policy, queue=queue, pause=timedelta(seconds=0.1))(self.work)

        async def plain(message: AbstractIncomingMessage) -> None:
            await self.work(message)
            with suppress(Exception):  # the connection may be gone
                await message.ack()

        async def on_message(message: AbstractIncomingMessage) -> None:
            self.redelivered += bool(message.redelivered)
            await (guarded if self._guarded else plain)(message)

        return on_message

    async def until_settled(self, copies: int) -> None:
        """Wait until every message is done, and so many copies of done ones were recognised, or done too."""

        async def all_of_them() -> bool:
            settled = self.done.total() + self._heard[EventKind.DUPLICATE]
            return len(self.done) == MESSAGES and settled >= MESSAGES + copies

        await until(all_of_them)


@pytest.fixture
async def broker_proxy(rabbitmq_url: str) -> AsyncIterator[Proxy]:
    url = make_url(rabbitmq_url)
    async with proxy(url.host or "127.0.0.1", url.port or 5672) as opened:
        yield opened


@asynccontextmanager
async def rabbitmq(url: str, through: Proxy) -> AsyncIterator[RabbitMQ]:
    """Yield RabbitMQ, whose consumers reach it through the proxy."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    netloc = f"{login}@127.0.0.1:{through.port}" if login else f"127.0.0.1:{through.port}"
    broker = RabbitMQ(url, parts._replace(netloc=netloc).geturl())
    try:
        yield broker
    finally:
        await broker.close()


class Unacknowledged:
    """A message whose acknowledgement never leaves the process."""

    def __init__(self, message: AbstractIncomingMessage) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    async def ack(self) -> None:
        """Say nothing to the broker."""


def without_acknowledgements(callback: Callback) -> Callback:
    """Return a callback that never acknowledges."""

    async def on_message(message: AbstractIncomingMessage) -> None:
        await callback(Unacknowledged(message))  # type: ignore[arg-type]

    return on_message


@pytest.mark.parametrize("guarded", [True, False], ids=["with the guard", "without it"])
@pytest.mark.parametrize("how", ["cut", "closed"])
async def test_of_a_burst_of_redeliveries_nothing_that_was_handled_runs_twice_where_there_is_a_guard(
    how: str, guarded: bool, rabbitmq_url: str, broker_proxy: Proxy
) -> None:
    service = Service(guarded=guarded)
    async with rabbitmq(rabbitmq_url, broker_proxy) as broker:
        topic = await broker.topic()
        queue = topic.endpoint
        callback = service.callback(queue)
        if how == "closed":
            callback = without_acknowledgements(callback)
        await broker.consume_raw(queue, callback, prefetch_count=MESSAGES)
        if how == "cut":
            broker_proxy.swallow()  # the acknowledgements get lost on their way
        for number in range(MESSAGES):
            await broker.publish(topic, number, deduplication_id=str(number))

        async def all_came() -> bool:
            return service.entered.total() == MESSAGES

        await until(all_came)
        await broker.busy(UNFINISHED)
        assert (service.done.total(), service.redelivered) == (HANDLED, 0)

        if how == "cut":
            broker_proxy.cut()  # and aio-pika connects again by itself
        else:
            await broker.hang_up()
            await broker.consume_raw(queue, service.callback(queue), prefetch_count=MESSAGES)

        async def all_came_again() -> bool:
            return service.redelivered >= MESSAGES

        await until(all_came_again)
        service.open.set()
        await service.until_settled(HANDLED)
        assert await broker.drained(topic)
        assert await broker.dead(topic) == []
    handled = range(HANDLED)
    assert {service.entered[number] for number in handled} == {1 if guarded else 2}
    assert {service.done[number] for number in handled} == {1 if guarded else 2}
    if guarded:
        assert service.done == dict.fromkeys(range(MESSAGES), 1)


async def test_a_message_that_is_requeued_because_its_handler_failed_runs_again(
    rabbitmq_url: str, broker_proxy: Proxy
) -> None:
    service = Service(guarded=True)
    service.open.set()
    service.failing = {3, 25}
    async with rabbitmq(rabbitmq_url, broker_proxy) as broker:
        topic = await broker.topic()
        await broker.consume_raw(topic.endpoint, service.callback(topic.endpoint))
        for _ in range(2):
            for number in range(MESSAGES):
                await broker.publish(topic, number, deduplication_id=str(number))
        await service.until_settled(MESSAGES)
        assert await broker.drained(topic)
    assert service.entered == {n: 2 if n in {3, 25} else 1 for n in range(MESSAGES)}
    assert service.done == dict.fromkeys(range(MESSAGES), 1)
