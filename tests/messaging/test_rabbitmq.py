"""What only RabbitMQ and aio-pika have: places of the prefetch, quorum queues, message objects."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractIncomingMessage, HeadersType
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Claim, ConfigurationError, Deduplicated, InvalidLogicalIdError
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.aio_pika import consumer, stamped
from tests.http.world import World
from tests.live import until
from tests.messaging.brokers import RabbitMQ
from tests.messaging.shop import PAUSE, Shop, fail, heard, until_heard

BY_HEADER = Deduplicated()


async def test_the_handler_gets_the_message_the_session_and_the_claim(
    rabbitmq: RabbitMQ, world: World
) -> None:
    seen: list[Any] = []

    async def on_order(message: AbstractIncomingMessage, session: AsyncSession, claim: Claim) -> None:
        """Order."""
        seen.extend((message.body, message.headers["origin"], claim.logical_id, claim.session is session))

    topic = await rabbitmq.topic()
    await rabbitmq.consume(topic.endpoint, world.dedup, BY_HEADER, function=on_order)
    await rabbitmq.publish(topic, "tea", deduplication_id="1", origin="till 3")
    await until_heard(world, EventKind.COMMITTED)
    assert await rabbitmq.drained(topic)
    assert seen == [b'"tea"', "till 3", "1", True]


async def test_a_declared_queue_names_the_endpoint_too(rabbitmq: RabbitMQ, world: World) -> None:
    topic = await rabbitmq.topic()
    channel = await rabbitmq.channel()
    queue = await channel.get_queue(topic.endpoint)
    await rabbitmq.consume_raw(topic.endpoint, consumer(world.dedup, BY_HEADER, queue=queue)(Shop().order))
    await rabbitmq.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await rabbitmq.drained(topic)
    assert await world.scopes() == [f"message {topic.endpoint}"]


async def test_who_reads_the_queue_message_by_message_does_not_rest_with_one(
    rabbitmq: RabbitMQ, world: World
) -> None:
    topic = await rabbitmq.topic()
    shop = Shop()
    on_order = consumer(world.dedup, BY_HEADER, queue=topic.endpoint, pause=PAUSE)(shop.order)
    for sku in ("tea", "cocoa"):
        await rabbitmq.publish(topic, sku, deduplication_id=sku)
    channel = await rabbitmq.channel()
    queue = await channel.get_queue(topic.endpoint)
    ordered: list[str] = []
    async with (
        world.dedup.claim("tea", scope=("message", topic.endpoint)),  # in flight elsewhere
        asyncio.timeout(10),
        queue.iterator() as messages,
    ):
        async for message in messages:
            await on_order(message)
            if ordered := await world.orders():
                break
    assert ordered == ["cocoa"]

    async def put_back() -> bool:
        return await rabbitmq.waiting(topic.endpoint) == 1

    await until(put_back)


async def test_with_one_place_in_the_prefetch_a_copy_holds_up_the_queue_for_no_longer_than_its_pause(
    rabbitmq: RabbitMQ, world: World
) -> None:
    topic = await rabbitmq.topic()
    shop = Shop()
    on_order = consumer(world.dedup, BY_HEADER, queue=topic.endpoint, pause=PAUSE)(shop.order)
    async with world.dedup.claim("tea", scope=("message", topic.endpoint)):
        await rabbitmq.publish(topic, "tea", deduplication_id="tea")
        await rabbitmq.consume_raw(topic.endpoint, on_order, prefetch_count=1)
        await until_heard(world, EventKind.IN_FLIGHT, 5)
    await until_heard(world, EventKind.DUPLICATE)
    assert await rabbitmq.drained(topic)
    assert shop.runs == 0


async def test_a_quorum_queue_gives_up_after_its_delivery_limit(rabbitmq: RabbitMQ, world: World) -> None:
    shop = Shop(*[fail] * 9)
    topic = await rabbitmq.topic(durable=True, arguments={"x-queue-type": "quorum", "x-delivery-limit": 2})
    await rabbitmq.consume(
        topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=timedelta(seconds=0.02)
    )
    await rabbitmq.publish(topic, "tea", deduplication_id="1")
    (letter,) = await rabbitmq.dead_letters(topic, 1)
    assert (letter.body, shop.runs, await world.ids()) == (b'"tea"', 3, [])
    assert await rabbitmq.drained(topic)


async def test_a_handler_that_is_cancelled_leaves_its_message_to_the_broker(
    rabbitmq: RabbitMQ, world: World
) -> None:
    entered = asyncio.Event()

    async def work_on_and_on() -> None:
        entered.set()
        await asyncio.Event().wait()

    topic = await rabbitmq.topic()
    await rabbitmq.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop(work_on_and_on).order)
    await rabbitmq.publish(topic, "tea", deduplication_id="1")
    await entered.wait()
    await rabbitmq.hang_up()
    assert await rabbitmq.left(topic.endpoint) == 1
    assert (await world.orders(), await world.ids()) == ([], [])
    await rabbitmq.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    await until_heard(world, EventKind.COMMITTED)
    assert await rabbitmq.drained(topic)
    assert await world.orders() == ["tea"]


async def test_a_message_that_is_acknowledged_before_it_is_handled_is_refused_loudly(
    rabbitmq: RabbitMQ, world: World
) -> None:
    topic = await rabbitmq.topic()
    shop = Shop()
    on_order = consumer(world.dedup, BY_HEADER, queue=topic.endpoint)(shop.order)
    await rabbitmq.publish(topic, "tea", deduplication_id="1")
    queue = await (await rabbitmq.channel()).get_queue(topic.endpoint)
    with pytest.raises(ConfigurationError, match="no_ack=False"):
        await on_order(await queue.get(no_ack=True))
    assert shop.runs == 0


async def test_a_synchronous_handler_runs_beside_the_loop(rabbitmq: RabbitMQ, world: World) -> None:
    bodies: list[bytes] = []

    def on_order(message: AbstractIncomingMessage) -> None:
        bodies.append(message.body)

    topic = await rabbitmq.topic()
    await rabbitmq.consume(topic.endpoint, world.dedup, BY_HEADER, function=on_order)
    for _ in range(2):
        await rabbitmq.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE)
    assert await rabbitmq.drained(topic)
    assert bodies == [b'"tea"']


# The publisher's stamp


# case G8
def test_the_stamp_is_on_a_copy_so_that_no_id_leaks_into_the_next_message() -> None:
    shared: HeadersType = {"origin": "till 3"}
    first = stamped(aio_pika.Message(b"tea", headers=shared), "1")
    second = aio_pika.Message(b"cocoa", headers=shared)
    assert (first.body, first.headers) == (b"tea", {"origin": "till 3", "deduplication-id": "1"})
    assert second.headers == shared == {"origin": "till 3"}


@pytest.mark.parametrize("name", ["deduplication-id", "Deduplication-Id"])
@pytest.mark.parametrize("said", ["mine", ""])
def test_a_header_that_is_there_already_is_kept(name: str, said: str) -> None:
    message = aio_pika.Message(b"tea", headers={name: said})
    assert stamped(message, "1").headers == {name: said}


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_without_an_id_there_is_no_stamp(nothing: str | None) -> None:
    assert stamped(aio_pika.Message(b"tea"), nothing).headers == {}


def test_an_id_that_no_consumer_would_take_is_not_published() -> None:
    with pytest.raises(InvalidLogicalIdError):
        stamped(aio_pika.Message(b"tea"), "9" * 256)


async def test_what_is_stamped_arrives_as_it_is(rabbitmq: RabbitMQ, world: World) -> None:
    ids = ["tea", "Tea", "tea ", " tea", "thé", "the\u0301", "茶", '"tea"', "9" * 255]
    topic = await rabbitmq.topic()
    await rabbitmq.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    channel = await rabbitmq.channel()
    exchange = await channel.get_exchange(topic.name)
    for logical_id in ids:
        await exchange.publish(stamped(aio_pika.Message(b"order"), logical_id), routing_key="")
    await until_heard(world, EventKind.COMMITTED, len(ids))
    assert await rabbitmq.drained(topic)
    assert sorted(await world.ids()) == sorted(ids)
    assert heard(world, EventKind.DUPLICATE) == 0
