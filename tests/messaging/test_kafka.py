"""FastStream on Kafka's protocol over a socket: groups, partitions and offsets, of librdkafka's mock cluster.

The mock cluster comes with confluent-kafka, and is made for testing clients. It is no real Kafka: it keeps
everything in memory, never fails over, and knows neither retention nor compaction.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from confluent_kafka import Producer
from faststream import AckPolicy
from faststream.kafka import KafkaBroker

from fastapi_dedup import Deduplicated
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession
from fastapi_dedup.policy import Policy
from tests.http.world import World, add
from tests.live import until
from tests.messaging.shop import PAUSE, fail, heard, until_heard

ORDERS = Deduplicated(scope="orders")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address of a mock cluster of one broker, which lives as long as the client that made it."""
    options: dict[str, object] = {"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0}
    producer = Producer(options)
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    yield f"{broker.host}:{broker.port}"
    producer.flush()


@pytest.fixture
def topic() -> str:
    """Return the name of a topic that is made when it is published to."""
    return f"orders-{secrets.token_hex(4)}"


class Shop:
    """A consumer of a topic, which orders; what else its next runs do is up to the test."""

    def __init__(self, broker: KafkaBroker, topic: str) -> None:
        self.runs: list[str] = []
        self.mishaps: list[Callable[[], Awaitable[None]]] = []
        self._broker = broker
        self._topic = topic

    async def order(self, body: str, session: MessageSession) -> None:
        self.runs.append(body)
        await add(session, body)
        if self.mishaps:
            await self.mishaps.pop(0)()

    async def publish(self, sku: str, logical_id: str = "") -> None:
        """Publish an order, always into the same partition."""
        headers = {"deduplication-id": logical_id}
        await self._broker.publish(sku, self._topic, key=b"one partition", headers=headers)


@asynccontextmanager
async def consuming(address: str, topic: str, world: World, *policies: Policy) -> AsyncIterator[Shop]:
    """Yield a shop whose consumer is in a group of the topic's name."""
    middleware = DeduplicatingMiddleware(world.dedup, *policies, pause=PAUSE)
    broker = KafkaBroker(address, middlewares=[middleware], logger=None)
    shop = Shop(broker, topic)
    subscribe = broker.subscriber(
        topic, group_id=topic, ack_policy=AckPolicy.NACK_ON_ERROR, auto_offset_reset="earliest"
    )
    subscribe(shop.order)
    await broker.start()
    try:
        yield shop
    finally:
        await broker.stop()


async def done(address: str, topic: str) -> int:
    """Return up to which offset the topic's group has committed."""
    admin = AIOKafkaAdminClient(bootstrap_servers=address)
    await admin.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(4)]
        offsets = await admin.list_consumer_group_offsets(topic, partitions=partitions)
    finally:
        await admin.close()
    return sum(each.offset for each in offsets.values() if each.offset > 0)


async def test_failures_are_read_again_duplicates_and_poison_are_passed_and_the_offset_says_so(
    address: str, topic: str, world: World
) -> None:
    async with consuming(address, topic, world, Deduplicated("delivery"), ORDERS) as shop:
        shop.mishaps.append(fail)
        for sku, logical_id in (("tea", "1"), ("tea", "1"), ("poison", ""), ("cocoa", "2")):
            await shop.publish(sku, logical_id)
        await until_heard(world, EventKind.COMMITTED, 4)  # each order, and its delivery

        async def all_is_done() -> bool:
            return await done(address, topic) == 4

        await until(all_is_done)
    assert (shop.runs, await world.orders()) == (["tea", "tea", "cocoa"], ["tea", "cocoa"])
    assert (heard(world, EventKind.DUPLICATE), heard(world, EventKind.MISSING)) == (1, 1)
    first, second, *deliveries = await world.ids()
    assert (first, second) == ("1", "2")
    (partition,) = {each.split(":")[1] for each in deliveries}
    assert deliveries == [f"{topic}:{partition}:{offset}" for offset in (0, 3)]


async def test_a_copy_in_flight_holds_its_partition_up_and_runs_if_the_original_fails(  # case G4
    address: str, topic: str, world: World
) -> None:
    async with consuming(address, topic, world, ORDERS) as shop:
        with pytest.raises(RuntimeError):
            async with world.dedup.claim("1", scope="orders"):
                await shop.publish("tea", "1")
                await shop.publish("cocoa", "2")
                await until_heard(world, EventKind.IN_FLIGHT, 3)
                assert (shop.runs, await done(address, topic)) == ([], 0)
                await fail()

        async def both_are_ordered() -> bool:
            return await world.orders() == ["tea", "cocoa"]

        await until(both_are_ordered)
    assert shop.runs == ["tea", "cocoa"]


async def test_what_is_read_again_from_an_earlier_offset_is_recognised(
    address: str, topic: str, world: World
) -> None:
    """As if a worker had committed its work, and died before it committed the offset."""
    for number in range(10):
        async with world.dedup.claim(f"{number}", scope="orders") as claim:
            await add(claim.session, f"cup {number}")
    async with consuming(address, topic, world, ORDERS) as shop:
        await asyncio.gather(*(shop.publish(f"cup {number}", f"{number}") for number in range(11)))
        await until_heard(world, EventKind.DUPLICATE, 10)
        await until_heard(world, EventKind.COMMITTED, 11)
    assert (shop.runs, len(await world.orders())) == (["cup 10"], 11)
