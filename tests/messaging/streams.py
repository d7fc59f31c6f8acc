"""FastStream's brokers, in memory: how each is made, subscribed to and published on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from faststream import BaseMiddleware
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.nats import NatsBroker, PullSub, TestNatsBroker
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from faststream.redis import RedisBroker, StreamSub, TestRedisBroker
from pydantic import BaseModel
from sqlalchemy import text

from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession
from fastapi_dedup.policy import Policy
from tests.http.world import World
from tests.messaging.shop import PAUSE


class Order(BaseModel):
    """What the messages say."""

    sku: str


@dataclass(frozen=True)
class Kind:
    """A kind of broker, and what its endpoints are called.

    Attributes:
        broker: Makes one.
        in_memory: Makes FastStream's stand-in for its server.
        subscribe: Returns the arguments of a subscriber to an address, in a group if it has one.
        publish: Returns the arguments of a publication to an address.
        place: The name of an endpoint in the default scope.
    """

    broker: Callable[..., Any]
    in_memory: Callable[..., Any]
    subscribe: Callable[[str], dict[str, Any]]
    publish: Callable[[str], dict[str, Any]]
    place: str


def _subject(address: str) -> dict[str, Any]:
    return {"subject": address}


KINDS = {
    "rabbitmq": Kind(
        RabbitBroker,
        TestRabbitBroker,
        lambda address: {"queue": address, "ack_policy": AckPolicy.NACK_ON_ERROR},
        lambda address: {"queue": address},
        "{address}",
    ),
    "kafka": Kind(
        KafkaBroker,
        TestKafkaBroker,
        lambda _: {"group_id": "shop", "ack_policy": AckPolicy.NACK_ON_ERROR},
        lambda address: {"topic": address},
        "{address}/shop",
    ),
    "jetstream": Kind(
        NatsBroker,
        TestNatsBroker,
        lambda address: {
            "subject": address,
            "stream": "s",
            "durable": "shop",
            "pull_sub": PullSub(),
            "ack_policy": AckPolicy.NACK_ON_ERROR,
        },
        _subject,
        "s/shop",
    ),
    "redis": Kind(
        RedisBroker,
        TestRedisBroker,
        lambda address: {
            "stream": StreamSub(address, group="shop", consumer="1"),
            "ack_policy": AckPolicy.NACK_ON_ERROR,
        },
        lambda address: {"stream": address},
        "{address}/shop",
    ),
}


class _Watching(BaseMiddleware[Any, Any]):
    seen: list[StreamMessage[Any]]

    async def consume_scope(self, call_next: Callable[[Any], Any], msg: StreamMessage[Any]) -> Any:
        self.seen.append(msg)
        return await call_next(msg)


@dataclass
class Stream:
    """A broker in memory, and what was seen on it.

    Attributes:
        kind: Its kind.
        broker: The broker.
        messages: The messages that were delivered.
    """

    kind: Kind
    broker: Any
    messages: list[StreamMessage[Any]] = field(default_factory=list)

    def subscriber(self, address: str = "orders", **options: Any) -> Callable[..., Any]:
        """Return a subscriber to an address: options win over the kind's."""
        topics = (address,) if self.kind.broker is KafkaBroker else ()
        subscriber: Callable[..., Any] = self.broker.subscriber(
            *topics, **{**self.kind.subscribe(address), **options}
        )
        return subscriber

    async def publish(self, body: object, address: str = "orders", **headers: str) -> None:
        """Publish; `_` in the headers' names stands for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.broker.publish(body, **self.kind.publish(address), headers=named)

    @property
    def answers(self) -> list[str | None]:
        """What the broker was told about each message."""
        return [message.committed.value if message.committed else None for message in self.messages]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the broker in memory."""
        async with self.kind.in_memory(self.broker):
            yield


def stream_of(kind: Kind, world: World, *policies: Policy, **options: Any) -> Stream:
    """Return a broker with the middleware, which has these policies."""
    stream = Stream(kind, None)
    watching = type("Watching", (_Watching,), {"seen": stream.messages})
    ours = DeduplicatingMiddleware(world.dedup, *policies, pause=PAUSE)
    stream.broker = kind.broker(middlewares=[watching, ours], **options)
    return stream


async def add(order: Order, session: MessageSession) -> None:
    """Do the business: one row in `orders`."""
    await session.execute(text("insert into orders (sku) values (:sku)"), {"sku": order.sku})
