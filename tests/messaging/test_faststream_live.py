"""The FastStream middleware on real RabbitMQ and JetStream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aio_pika import Message
from faststream.exceptions import NackMessage
from sqlalchemy import make_url

from fastapi_dedup import Deduplicated
from fastapi_dedup.hooks import EventKind
from tests.http.world import World
from tests.live import until
from tests.messaging.brokers import SOON, Broker
from tests.messaging.faststream_brokers import FastStreamJetStream, FastStreamRabbitMQ
from tests.messaging.proxy import Proxy
from tests.messaging.shop import Shop, fail, heard, until_heard

BY_HEADER = Deduplicated()
CONSUMED: dict[str, type[Broker]] = {"rabbitmq": FastStreamRabbitMQ, "jetstream": FastStreamJetStream}


@pytest.fixture
async def broker(kind: str, broker_url: str, broker_proxy: Proxy) -> AsyncIterator[Broker]:
    """Yield each broker in turn; consumers are FastStream's, and reach it through the proxy."""
    through = make_url(broker_url).set(host="127.0.0.1", port=broker_proxy.port)
    opened = CONSUMED[kind](broker_url, through.render_as_string(hide_password=False))
    yield opened
    await opened.close()


async def test_duplicates_are_acknowledged_and_not_run(broker: Broker, world: World) -> None:  # case G3
    topic = await broker.topic()
    shop = Shop()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    for _ in range(5):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE, 4)
    assert await broker.drained(topic)
    assert (await world.orders(), shop.runs) == (["tea"], 1)
    assert await world.scopes() == [f"message {topic.endpoint}"]
    assert await broker.dead(topic) == []


async def test_a_copy_in_flight_is_delivered_again_and_runs_if_the_original_fails(  # case G4
    broker: Broker, world: World
) -> None:
    topic = await broker.topic()
    entered, fails = asyncio.Event(), asyncio.Event()

    async def fail_late() -> None:
        entered.set()
        await fails.wait()
        await fail()

    shop = Shop(fail_late)
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await entered.wait()
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.IN_FLIGHT, 2)
    fails.set()
    await until_heard(world, EventKind.COMMITTED)
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (await world.orders(), shop.runs) == (["tea"], 2)


@pytest.mark.parametrize("fails", [True, False])
async def test_a_message_that_jetstream_delivers_again_meanwhile_is_never_settled_by_its_copy(  # case G4
    nats_url: str, world: World, fails: bool
) -> None:
    ending = asyncio.Event()

    async def end() -> None:
        await ending.wait()
        if fails:
            await fail()

    broker = FastStreamJetStream(nats_url)
    broker.ack_wait = SOON
    topic, shop = await broker.topic(), Shop(end)
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.IN_FLIGHT, 2)
    assert await broker.waiting(topic.endpoint) == 1
    ending.set()
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert (await world.orders(), shop.runs) == (["tea"], 2 if fails else 1)
    await broker.close()


async def test_an_id_that_fans_out_to_two_endpoints_runs_once_in_each(  # case G1
    broker: Broker, world: World
) -> None:
    topic = await broker.topic(endpoints=2)
    for endpoint in topic.endpoints:
        await broker.consume(endpoint, world.dedup, BY_HEADER, function=Shop().order)
    for _ in range(2):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE, 2)
    assert await broker.drained(topic)
    assert await world.orders() == ["tea", "tea"]
    assert await world.scopes() == [f"message {endpoint}" for endpoint in topic.endpoints]


async def test_poison_does_not_come_again(broker: Broker, world: World) -> None:
    topic = await broker.topic()
    shop = Shop()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "no id")
    await broker.publish(topic, "too long", deduplication_id="9" * 256)
    await until_heard(world, EventKind.INVALID)
    if isinstance(broker, FastStreamRabbitMQ):  # JetStream keeps what is terminated in its stream
        letters = await broker.dead_letters(topic, 2)
        assert sorted(letter.body for letter in letters) == [b'"no id"', b'"too long"']
    assert await broker.drained(topic)
    assert shop.runs == 0
    assert heard(world, EventKind.MISSING) == heard(world, EventKind.INVALID) == 1


async def test_while_the_database_is_down_nothing_is_run_or_lost(
    broker: Broker, proxied: World, database_proxy: Proxy
) -> None:
    topic = await broker.topic()
    shop = Shop()
    await broker.consume(topic.endpoint, proxied.dedup, BY_HEADER, function=shop.order)
    database_proxy.go_down()
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(proxied, EventKind.UNAVAILABLE, 2)
    assert shop.runs == 0
    database_proxy.come_back()
    await until_heard(proxied, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert await proxied.orders() == ["tea"]


async def test_a_handler_that_gives_its_message_back_keeps_nothing(broker: Broker, world: World) -> None:
    async def give_back() -> None:
        raise NackMessage

    topic = await broker.topic()
    shop = Shop(give_back)
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert (await world.orders(), shop.runs, heard(world, EventKind.RELEASED)) == (["tea"], 2, 1)


async def test_a_lost_acknowledgement_is_made_up_for_when_the_message_comes_again(  # case G3
    broker: Broker, broker_proxy: Proxy, world: World
) -> None:
    async def lose_what_follows() -> None:
        broker_proxy.swallow()

    broker.ack_wait = SOON
    topic = await broker.topic()
    shop = Shop(lose_what_follows)
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)

    async def acknowledged_in_vain() -> bool:
        return broker_proxy.lost > 0

    await until(acknowledged_in_vain)
    broker_proxy.cut()
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (await world.orders(), shop.runs) == (["tea"], 1)
    assert await broker.dead(topic) == []


async def test_a_delivery_s_id_on_rabbitmq_is_the_message_s(rabbitmq_url: str, world: World) -> None:
    broker = FastStreamRabbitMQ(rabbitmq_url)
    topic = await broker.topic()
    policy = Deduplicated(source="delivery")
    await broker.consume(topic.endpoint, world.dedup, policy, function=Shop(fail).order)
    exchange = await (await broker.channel()).get_exchange(topic.name)
    for _ in range(2):
        await exchange.publish(Message(b"tea", message_id="m1"), "")
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (await world.orders(), await world.ids()) == (["tea"], ["m1"])
    await broker.close()


async def test_a_delivery_s_id_on_jetstream_is_its_place_in_the_stream(nats_url: str, world: World) -> None:
    broker = FastStreamJetStream(nats_url)
    topic = await broker.topic()
    policy = Deduplicated(source="delivery")
    await broker.consume(topic.endpoint, world.dedup, policy, function=Shop(fail).order)
    await broker.publish(topic, "tea")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert await world.ids() == [f"{topic.name}:1"]
    await broker.close()
