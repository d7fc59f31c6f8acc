"""RabbitMQ and JetStream as the tests see them: topics that fan out to endpoints, consumers, dead letters.

Both are the real servers. A topic is a fanout exchange with a queue per endpoint, or a stream with a durable
consumer per endpoint. Every name is new, and `close` deletes what was made.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aio_pika
import nats
import nats.errors
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractIncomingMessage,
    AbstractRobustConnection,
)
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, StreamConfig
from nats.js.client import JetStreamContext
from pamqp.commands import Queue
from pamqp.common import Arguments

from fastapi_dedup import Dedup
from fastapi_dedup.messaging import aio_pika as on_rabbitmq
from fastapi_dedup.messaging import nats as on_jetstream
from fastapi_dedup.policy import Policy
from tests.live import until

AT_ONCE = 10
"""How many messages one consumer handles at a time."""

SOON, LATE = 0.5, 30.0
"""Seconds after which JetStream misses an acknowledgement: where a test loses some, and everywhere else."""


@dataclass(frozen=True)
class Topic:
    """Where messages are published to, and the endpoints that each of them reaches."""

    name: str
    endpoints: tuple[str, ...]

    @property
    def endpoint(self) -> str:
        """The only endpoint."""
        (only,) = self.endpoints
        return only


@dataclass(frozen=True)
class Dead:
    """A message in the dead-letter queue."""

    body: bytes
    headers: Mapping[str, Any]


class Broker(ABC):
    """A broker, and the consumers on it.

    Args:
        url: For publishing and looking.
        consumers_url: For the consumers; a test may put a proxy in between.

    Attributes:
        kind: Its name in `BROKERS`.
        ack_wait: After how many seconds JetStream delivers a message again that nobody has settled; for
            topics that are made from then on. RabbitMQ waits for the end of the connection instead.
    """

    kind: str
    ack_wait = LATE

    def __init__(self, url: str, consumers_url: str | None = None) -> None:
        self.url = url
        self._consumers_url = consumers_url or url
        self._busy = 0

    @abstractmethod
    async def topic(self, endpoints: int = 1) -> Topic:
        """Make a topic with so many endpoints, and a place for its dead letters."""

    @abstractmethod
    async def publish(self, topic: Topic, document: object, **headers: str) -> None:
        """Publish a JSON document (bytes as they are); `_` in the headers' names stands for `-`."""

    @abstractmethod
    async def consume(
        self, endpoint: str, dedup: Dedup, *policies: Policy, function: Callable[..., Any], **options: Any
    ) -> None:
        """Consume an endpoint with `consumer(dedup, *policies, **options)(function)`."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the consumers' connections, whatever is unacknowledged."""

    @abstractmethod
    async def waiting(self, endpoint: str) -> int:
        """Return how many messages an endpoint holds, as far as can be seen while it is consumed."""

    @abstractmethod
    async def left(self, endpoint: str) -> int:
        """Return how many messages an endpoint holds whose consumers have hung up."""

    @abstractmethod
    async def dead(self, topic: Topic) -> list[Dead]:
        """Return a topic's dead letters, oldest first."""

    @abstractmethod
    async def close(self) -> None:
        """Hang up, and delete every topic."""

    async def busy(self, callbacks: int) -> None:
        """Wait until exactly so many of the consumers' callbacks are running."""

        async def so_many() -> bool:
            return self._busy == callbacks

        await until(so_many)

    async def stop(self) -> None:
        """Let the consumers' callbacks finish, then hang up."""
        await self.busy(0)
        await self.hang_up()

    async def dead_letters(self, topic: Topic, number: int) -> list[Dead]:
        """Wait for so many dead letters, and return all that are there."""
        letters: list[Dead] = []

        async def so_many() -> bool:
            letters[:] = await self.dead(topic)
            return len(letters) >= number

        await until(so_many)
        return letters

    async def drained(self, topic: Topic) -> bool:
        """Stop the consumers, and tell whether every message of a topic was acknowledged or dead-lettered."""
        await self.stop()
        return not any([await self.left(endpoint) for endpoint in topic.endpoints])

    async def drain(self, topic: Topic, consume: Callable[[], Awaitable[None]]) -> None:
        """Consume until every message of a topic was acknowledged or dead-lettered."""
        while not await self.drained(topic):
            await consume()
            await asyncio.sleep(0.3)

    async def _counted(self, callback: Callable[[Any], Awaitable[None]], message: Any) -> None:
        self._busy += 1
        try:
            await callback(message)
        finally:
            self._busy -= 1


def _body(document: object) -> bytes:
    return document if isinstance(document, bytes) else json.dumps(document).encode()


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


class RabbitMQ(Broker):
    """RabbitMQ, through aio-pika."""

    kind = "rabbitmq"

    def __init__(self, url: str, consumers_url: str | None = None) -> None:
        super().__init__(url, consumers_url)
        self._topics: list[Topic] = []
        self._admin: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._consumers: AbstractRobustConnection | None = None

    async def channel(self) -> AbstractChannel:
        """Return the channel of the test's own connection."""
        if self._channel is None:
            self._admin = await aio_pika.connect(self.url)
            self._channel = await self._admin.channel()
        return self._channel

    async def topic(self, endpoints: int = 1, *, durable: bool = False, arguments: Arguments = None) -> Topic:
        """Make a topic; the arguments are for its queues."""
        name = f"dedup-{secrets.token_hex(4)}"
        topic = Topic(name, tuple(f"{name}.{number}" for number in range(endpoints)))
        self._topics.append(topic)
        channel = await self.channel()
        exchange = await channel.declare_exchange(name, aio_pika.ExchangeType.FANOUT)
        await channel.declare_queue(f"{name}.dead", durable=durable)
        dead_lettering = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name}.dead"}
        for endpoint in topic.endpoints:
            queue = await channel.declare_queue(
                endpoint, durable=durable, arguments={**(arguments or {}), **dead_lettering}
            )
            await queue.bind(exchange)
        return topic

    async def publish(self, topic: Topic, document: object, **headers: str) -> None:
        channel = await self.channel()
        exchange = await channel.get_exchange(topic.name, ensure=False)
        message = aio_pika.Message(_body(document), headers=dict(_headers(headers)))
        await exchange.publish(message, routing_key="the same for all queues")

    async def consume(
        self, endpoint: str, dedup: Dedup, *policies: Policy, function: Callable[..., Any], **options: Any
    ) -> None:
        callback = on_rabbitmq.consumer(dedup, *policies, queue=endpoint, **options)(function)
        await self.consume_raw(endpoint, callback)

    async def consume_raw(
        self,
        endpoint: str,
        callback: Callable[[AbstractIncomingMessage], Awaitable[None]],
        prefetch_count: int = AT_ONCE,
    ) -> None:
        """Consume an endpoint with a ready callback."""
        if self._consumers is None:
            self._consumers = await aio_pika.connect_robust(self._consumers_url, reconnect_interval=0.1)
        channel = await self._consumers.channel()
        await channel.set_qos(prefetch_count=prefetch_count)
        queue = await channel.get_queue(endpoint)

        async def counted(message: AbstractIncomingMessage) -> None:
            await self._counted(callback, message)

        await queue.consume(counted)

    async def hang_up(self) -> None:
        if self._consumers is not None:
            await self._consumers.close()
            self._consumers = None

    async def waiting(self, endpoint: str) -> int:
        return (await self._state(endpoint)).message_count or 0

    async def left(self, endpoint: str) -> int:
        async def deserted() -> bool:
            return (await self._state(endpoint)).consumer_count == 0

        # What a consumer has not acknowledged is counted again from the moment when it is gone.
        await until(deserted)
        return await self.waiting(endpoint)

    async def _state(self, endpoint: str) -> Queue.DeclareOk:
        channel = await self.channel()
        return (await channel.declare_queue(endpoint, passive=True)).declaration_result

    async def dead(self, topic: Topic) -> list[Dead]:
        channel = await self.channel()
        queue = await channel.get_queue(f"{topic.name}.dead")
        messages: list[AbstractIncomingMessage] = []
        while (message := await queue.get(fail=False)) is not None:
            messages.append(message)
        for message in messages:
            await message.nack()
        return [Dead(message.body, message.headers) for message in messages]

    async def close(self) -> None:
        await self.hang_up()
        if self._admin is None:
            return
        channel = await self.channel()
        for topic in self._topics:
            await channel.exchange_delete(topic.name)
            for queue in (*topic.endpoints, f"{topic.name}.dead"):
                await channel.queue_delete(queue)
        await self._admin.close()


class JetStream(Broker):
    """NATS JetStream, through nats-py: pull consumers."""

    kind = "jetstream"

    def __init__(self, url: str, consumers_url: str | None = None) -> None:
        super().__init__(url, consumers_url)
        self._streams: list[str] = []
        self._admin: Client | None = None
        self._consumers: Client | None = None
        self._loops: list[asyncio.Task[None]] = []

    async def stream(self) -> JetStreamContext:
        """Return JetStream over the test's own connection."""
        if self._admin is None:
            self._admin = await nats.connect(self.url)
        return self._admin.jetstream(timeout=20)

    async def topic(self, endpoints: int = 1) -> Topic:
        name = f"dedup-{secrets.token_hex(4)}"
        topic = Topic(name, tuple(f"{name}/{number}" for number in range(endpoints)))
        stream = await self.stream()
        for each in (name, f"{name}-dead"):
            self._streams.append(each)
            await stream.add_stream(StreamConfig(name=each, subjects=[each]))
        for number in range(endpoints):
            config = ConsumerConfig(durable_name=str(number), ack_wait=self.ack_wait)
            await stream.add_consumer(name, config)
        return topic

    async def publish(self, topic: Topic, document: object, **headers: str) -> None:
        stream = await self.stream()
        await stream.publish(topic.name, _body(document), headers=_headers(headers) or None)

    async def consume(
        self, endpoint: str, dedup: Dedup, *policies: Policy, function: Callable[..., Any], **options: Any
    ) -> None:
        name = endpoint.partition("/")[0]
        callback = on_jetstream.consumer(dedup, *policies, dead_letter=f"{name}-dead", **options)(function)
        await self.consume_raw(endpoint, callback)

    async def client(self) -> Client:
        """Return the consumers' connection."""
        if self._consumers is None:
            self._consumers = await nats.connect(
                self._consumers_url, reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=_ignore
            )
        return self._consumers

    async def consume_raw(self, endpoint: str, callback: Callable[[Msg], Awaitable[None]]) -> None:
        """Consume an endpoint with a ready callback."""
        name, _, durable = endpoint.partition("/")
        stream = (await self.client()).jetstream()
        subscription = await stream.pull_subscribe_bind(durable=durable, stream=name)
        self._loops += [asyncio.create_task(self._pull(subscription, callback)) for _ in range(AT_ONCE // 2)]

    async def _pull(
        self, subscription: JetStreamContext.PullSubscription, callback: Callable[[Msg], Awaitable[None]]
    ) -> None:
        while True:
            with suppress(nats.errors.TimeoutError):
                for message in await subscription.fetch(1, timeout=1):
                    await self._counted(callback, message)

    async def hang_up(self) -> None:
        for loop in self._loops:
            loop.cancel()
        if self._consumers is not None:
            if self._consumers.is_connected:
                await self._consumers.flush()
            await self._consumers.close()
            self._consumers = None
        # Python 3.11's wait_for loses cancellations; a loop that got none ends with the connection.
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops.clear()

    async def left(self, endpoint: str) -> int:
        async def nothing() -> bool:
            return await self.waiting(endpoint) == 0

        # The server takes note of an acknowledgement a little after it has received it.
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await until(nothing)
        return await self.waiting(endpoint)

    async def waiting(self, endpoint: str) -> int:
        name, _, durable = endpoint.partition("/")
        info = await (await self.stream()).consumer_info(name, durable)
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def dead(self, topic: Topic) -> list[Dead]:
        stream = await self.stream()
        count = (await stream.stream_info(f"{topic.name}-dead")).state.messages
        letters = [await stream.get_msg(f"{topic.name}-dead", seq) for seq in range(1, count + 1)]
        return [Dead(letter.data or b"", letter.headers or {}) for letter in letters]

    async def close(self) -> None:
        await self.hang_up()
        if self._admin is None:
            return
        stream = await self.stream()
        for name in self._streams:
            await stream.delete_stream(name)
        await self._admin.close()


async def _ignore(_: Exception) -> None:
    """Connections are cut here on purpose."""


BROKERS: Mapping[str, type[Broker]] = {each.kind: each for each in (RabbitMQ, JetStream)}
