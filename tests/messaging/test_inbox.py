"""The delivery-level inbox: one delivery of the broker's is handled once, whatever the message says."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text

from fastapi_dedup import Deduplicated
from fastapi_dedup.hooks import EventKind
from tests.http.world import World
from tests.live import until
from tests.messaging.brokers import SOON, Broker, Topic
from tests.messaging.proxy import Proxy
from tests.messaging.shop import PAUSE, Shop, heard, until_heard

INBOX = Deduplicated(source="delivery")


class Losing:
    """A mishap: what the consumers send from now on, their acknowledgement first of all, is lost."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def __call__(self) -> None:
        self._proxy.swallow()


async def handled_but_not_acknowledged(broker: Broker, world: World, topic: Topic, **headers: str) -> None:
    """Publish a message whose acknowledgement the handler is about to lose."""
    await broker.publish(topic, "tea", **headers)
    await until_heard(world, EventKind.COMMITTED)
    await broker.busy(0)


async def test_a_delivery_that_was_handled_is_not_handled_again(
    broker: Broker, broker_proxy: Proxy, world: World
) -> None:
    broker.ack_wait = SOON
    shop, topic = Shop(Losing(broker_proxy)), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, INBOX, function=shop.order)
    await handled_but_not_acknowledged(broker, world, topic)
    broker_proxy.cut()
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (1, ["tea"])


async def test_two_publications_are_two_deliveries_whatever_they_say(broker: Broker, world: World) -> None:
    shop, topic = Shop(), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, INBOX, function=shop.order)
    for _ in range(2):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED, 2)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (2, ["tea", "tea"])


# case G1
@pytest.mark.parametrize(
    ("policy", "runs"),
    [(INBOX, 2), (Deduplicated(source="delivery", identity="id"), 1)],
    ids=["per endpoint", "in all"],
)
async def test_a_delivery_that_fans_out_is_one_per_endpoint_or_one_in_all(
    broker: Broker, world: World, policy: Deduplicated, runs: int
) -> None:
    shop, topic = Shop(), await broker.topic(endpoints=2)
    for endpoint in topic.endpoints:
        await broker.consume(endpoint, world.dedup, policy, function=shop.order, pause=PAUSE)
    await broker.publish(topic, "tea")
    await until_heard(world, EventKind.COMMITTED, runs)
    await until_heard(world, EventKind.DUPLICATE, 2 - runs)
    assert await broker.drained(topic)
    assert (shop.runs, len(await world.orders())) == (runs, runs)


@pytest.mark.parametrize("inbox_first", [True, False])
async def test_it_goes_together_with_a_logical_id(
    broker: Broker, broker_proxy: Proxy, world: World, inbox_first: bool
) -> None:
    policies = [INBOX, Deduplicated(scope="orders")]
    broker.ack_wait = SOON
    shop, topic = Shop(Losing(broker_proxy)), await broker.topic()
    await broker.consume(
        topic.endpoint, world.dedup, *policies[:: 1 if inbox_first else -1], function=shop.order
    )
    await handled_but_not_acknowledged(broker, world, topic, deduplication_id="1")
    broker_proxy.cut()
    await broker.publish(topic, "the same order, published again", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE, 2)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (1, ["tea"])
    assert len(await world.ids()) == 2  # the refused publication left nothing in the inbox


async def test_it_is_kept_from_the_end_of_the_handling_by_the_databases_clock(
    broker: Broker, world: World
) -> None:
    async def take_some_time_of_the_database() -> None:
        async with world.engine.connect() as connection:
            await connection.execute(text("select pg_sleep(0.3)"))

    shop, topic = Shop(take_some_time_of_the_database), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, INBOX, function=shop.order)
    await broker.publish(topic, "tea")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    (kept,) = await world.column("select expires_at - claimed_at from dedup_claims")
    assert timedelta(minutes=5, seconds=0.3) <= kept < timedelta(minutes=5, seconds=15)


# case G9
async def test_a_delivery_that_comes_again_after_the_window_runs_again(
    broker: Broker, broker_proxy: Proxy, world: World
) -> None:
    broker.ack_wait = SOON
    shop, topic = Shop(Losing(broker_proxy)), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, INBOX, function=shop.order)
    await handled_but_not_acknowledged(broker, world, topic)
    async with world.engine.begin() as connection:
        await connection.execute(text("update dedup_claims set expires_at = clock_timestamp()"))
    broker_proxy.cut()

    async def twice() -> bool:
        return shop.runs == 2

    await until(twice)
    assert await broker.drained(topic)
    assert await world.orders() == ["tea", "tea"]
    assert heard(world, EventKind.DUPLICATE) == 0
