"""What becomes of a message, on the real brokers: what is acknowledged, what comes again, what is dead."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.policy import Endpoint
from tests.http.world import World, add
from tests.live import until
from tests.messaging.brokers import SOON, Broker
from tests.messaging.proxy import Proxy
from tests.messaging.shop import PAUSE, Shop, fail, heard, until_heard

BY_HEADER = Deduplicated()


async def test_a_message_is_handled_committed_and_acknowledged(broker: Broker, world: World) -> None:
    topic = await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert await world.orders() == ["tea"]
    assert await world.scopes() == [f"message {topic.endpoint}"]


# wolverine.md row 9, DESIGN.md §4.13
async def test_a_duplicate_is_acknowledged_and_not_run_and_told_at_info(
    broker: Broker, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastapi_dedup")
    shop, topic = Shop(), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    await broker.publish(topic, "the same id, another body", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders(), await broker.dead(topic)) == (1, ["tea"], [])
    (told,) = [record for record in caplog.records if record.name == "fastapi_dedup"]
    assert told.levelno == logging.INFO
    assert all(part in told.message for part in ("'1'", topic.endpoint, "duplicate", "age 0:00:0"))


# case G3
async def test_a_message_whose_acknowledgement_got_lost_is_acknowledged_when_it_comes_again_and_not_run(
    broker: Broker, broker_proxy: Proxy, world: World
) -> None:
    async def lose_the_acknowledgement() -> None:
        broker_proxy.swallow()

    broker.ack_wait = SOON
    shop, topic = Shop(lose_the_acknowledgement), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    await broker.busy(0)
    broker_proxy.cut()
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders(), await broker.dead(topic)) == (1, ["tea"], [])
    assert heard(world, EventKind.DUPLICATE) == 1


# case G4
async def test_a_copy_in_flight_comes_again_in_its_own_time_and_runs_if_the_original_fails(
    broker: Broker, world: World
) -> None:
    failing = asyncio.Event()

    async def fail_in_the_end() -> None:
        await failing.wait()
        await fail()

    shop, topic = Shop(fail_in_the_end), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=PAUSE)
    for _ in range(2):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.IN_FLIGHT)
    await asyncio.sleep(5 * PAUSE.total_seconds())
    assert heard(world, EventKind.IN_FLIGHT) <= 11  # it rests half a PAUSE at least
    failing.set()
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders(), await broker.dead(topic)) == (2, ["tea"], [])


# case G4
@pytest.mark.parametrize("fails", [True, False])
async def test_a_copy_that_waits_knows_the_originals_outcome(
    broker: Broker, world: World, fails: bool
) -> None:
    settled = asyncio.Event()

    async def end() -> None:
        await settled.wait()
        if fails:
            await fail()

    shop, topic = Shop(end), await broker.topic()
    waits = Deduplicated(in_flight="wait")
    await broker.consume(topic.endpoint, world.dedup, waits, function=shop.order, pause=PAUSE)
    for _ in range(2):
        await broker.publish(topic, "tea", deduplication_id="1")
    await broker.busy(2)
    settled.set()
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (2 if fails else 1, ["tea"])
    assert heard(world, EventKind.IN_FLIGHT) == 0


async def test_the_handlers_of_a_connection_that_is_lost_commit_nothing_or_are_recognised(
    broker: Broker, broker_proxy: Proxy, world: World
) -> None:
    cut = asyncio.Event()

    async def lose_the_connection() -> None:
        broker_proxy.cut()
        cut.set()
        await asyncio.sleep(0.3)

    broker.ack_wait = SOON
    shop, topic = Shop(lose_the_connection), await broker.topic()

    async def consume() -> None:
        await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=PAUSE)

    await consume()
    await broker.publish(topic, "tea", deduplication_id="1")
    await cut.wait()
    await broker.drain(topic, consume)
    assert await world.orders() == ["tea"]


async def test_messages_pass_copies_that_rest(broker: Broker, world: World) -> None:
    ending = asyncio.Event()

    async def wait() -> None:
        await ending.wait()

    shop, topic = Shop(wait), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order)
    for _ in range(5):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.IN_FLIGHT, 4)
    for number in range(20):
        await broker.publish(topic, f"cup {number}", deduplication_id=f"cup {number}")
    await until_heard(world, EventKind.COMMITTED, 20)
    assert len(await world.orders()) == 20
    ending.set()
    await until_heard(world, EventKind.DUPLICATE, 4)
    assert await broker.drained(topic)


async def test_a_message_whose_handler_raised_comes_again_and_runs(
    broker: Broker, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    shop, topic = Shop(fail, fail), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=PAUSE)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders(), await broker.dead(topic)) == (3, ["tea"], [])
    assert [record.exc_info is not None for record in caplog.records if "failed" in record.message] == [
        True
    ] * 2


BY_HAND = {"rabbitmq": ["ack", "nack", "reject"], "jetstream": ["ack", "ack_sync", "nak", "term"]}


async def test_a_handler_cannot_answer_its_broker_itself(
    kind: str, broker: Broker, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    # Before the COMMIT, "done" may lose the message, and "again" would let its copy be called a duplicate.
    by_hand = [*BY_HAND[kind]]
    topic = await broker.topic()

    async def on_order(message: Any, session: AsyncSession) -> None:
        await add(session, "tea")
        if by_hand:
            await getattr(message, by_hand.pop())()

    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=on_order, pause=PAUSE)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert (await world.orders(), await broker.dead(topic)) == (["tea"], [])
    assert heard(world, EventKind.RELEASED) == caplog.text.count("does not acknowledge") == len(BY_HAND[kind])


async def test_a_message_whose_handler_raised_is_dead_at_once_if_the_consumer_says_so(
    broker: Broker, world: World
) -> None:
    shop, topic = Shop(fail), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, BY_HEADER, function=shop.order, on_error="reject")
    await broker.publish(topic, "tea", deduplication_id="1", origin="till 3")
    (letter,) = await broker.dead_letters(topic, 1)
    assert (letter.body, letter.headers["origin"]) == (b'"tea"', "till 3")
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders(), await world.ids()) == (1, [], [])


# wolverine.md row 10, DESIGN.md §4.9
@pytest.mark.parametrize(
    ("policy", "body", "headers"),
    [
        (BY_HEADER, "no id", {}),
        (BY_HEADER, "blank", {"deduplication_id": "  "}),
        (BY_HEADER, "too long", {"deduplication_id": "9" * 256}),
        (Deduplicated("body", "sku"), {"sku": None}, {}),
        (Deduplicated("body", "sku"), {"sku": ["no", "id"]}, {}),
        (Deduplicated("body", "sku"), b"{no JSON", {}),
    ],
    ids=["missing", "blank", "too long", "null", "a list", "no JSON"],
)
async def test_a_message_without_a_legal_id_is_dead_at_once(
    broker: Broker, world: World, policy: Deduplicated, body: object, headers: dict[str, str]
) -> None:
    shop, topic = Shop(), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, policy, function=shop.order)
    await broker.publish(topic, body, origin="till 3", **headers)
    (letter,) = await broker.dead_letters(topic, 1)
    assert letter.headers["origin"] == "till 3"
    assert await broker.drained(topic)
    assert (shop.runs, await world.ids()) == (0, [])
    assert heard(world, EventKind.MISSING) + heard(world, EventKind.INVALID) == 1


async def test_an_id_that_was_used_for_another_payload_is_dead_at_once(broker: Broker, world: World) -> None:
    shop, topic = Shop(), await broker.topic()
    strict = Deduplicated(fingerprint=True)
    await broker.consume(topic.endpoint, world.dedup, strict, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    await broker.publish(topic, "cocoa", deduplication_id="1")
    (letter,) = await broker.dead_letters(topic, 1)
    assert letter.body == b'"cocoa"'
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (1, ["tea"])


# DESIGN.md §4.9
async def test_an_optional_id_that_is_missing_costs_nothing_and_dedupes_nothing(
    broker: Broker, world: World
) -> None:
    shop, topic = Shop(), await broker.topic()
    optional = Deduplicated(required=False)
    await broker.consume(topic.endpoint, world.dedup, optional, function=shop.order)
    for _ in range(2):
        await broker.publish(topic, "tea")

    async def ordered_twice() -> bool:
        return len(await world.orders()) == 2

    await until(ordered_twice)
    assert await broker.drained(topic)
    assert (await world.orders(), await world.ids()) == (["tea", "tea"], [])


# DESIGN.md §4.9
async def test_while_the_store_is_down_nothing_runs_and_nothing_is_lost(
    broker: Broker, proxied: World, database_proxy: Proxy
) -> None:
    shop, topic = Shop(), await broker.topic()
    database_proxy.go_down()
    await broker.consume(topic.endpoint, proxied.dedup, BY_HEADER, function=shop.order, pause=PAUSE)
    for sku in ("tea", "cocoa"):
        await broker.publish(topic, sku, deduplication_id=sku)
    await until_heard(proxied, EventKind.UNAVAILABLE, 6)
    assert shop.runs == 0
    assert await broker.dead(topic) == []
    database_proxy.come_back()
    await until_heard(proxied, EventKind.COMMITTED, 2)
    assert await broker.drained(topic)
    assert sorted(await proxied.orders()) == ["cocoa", "tea"]
    assert heard(proxied, EventKind.DUPLICATE) == 0


async def test_while_the_table_is_missing_nothing_runs_and_nothing_is_lost(
    broker: Broker, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    shop, topic = Shop(), await broker.topic()
    async with world.engine.begin() as connection:
        await connection.execute(text("drop table dedup_claims"))
    await broker.consume(
        topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=PAUSE, on_error="reject"
    )
    await broker.publish(topic, "tea", deduplication_id="1")

    async def told() -> bool:
        return "the table of claims is missing" in caplog.text

    await until(told)
    assert shop.runs == 0
    await world.dedup.create_table()
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert await world.orders() == ["tea"]


# case G1
async def test_one_id_that_fans_out_to_two_endpoints_runs_once_in_each(broker: Broker, world: World) -> None:
    shop, topic = Shop(), await broker.topic(endpoints=2)
    for endpoint in topic.endpoints:
        await broker.consume(endpoint, world.dedup, BY_HEADER, function=shop.order)
    for _ in range(2):
        await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE, 2)
    assert await broker.drained(topic)
    assert (shop.runs, await world.orders()) == (2, ["tea", "tea"])
    assert await world.scopes() == [f"message {endpoint}" for endpoint in topic.endpoints]


async def test_endpoints_that_name_one_scope_share_the_work(broker: Broker, world: World) -> None:
    shop, topic = Shop(), await broker.topic(endpoints=2)
    shared = Deduplicated("body", "sku", scope="orders")
    for endpoint in topic.endpoints:
        await broker.consume(endpoint, world.dedup, shared, function=shop.order, pause=PAUSE)
    await broker.publish(topic, {"sku": "tea"})
    await until_heard(world, EventKind.DUPLICATE)
    assert await broker.drained(topic)
    assert (shop.runs, await world.scopes()) == (1, ["orders"])


async def test_a_consumer_without_a_policy_gets_the_one_that_is_required_of_its_endpoint(
    broker: Broker, world: World
) -> None:
    seen: list[Endpoint] = []

    def of_orders(endpoint: Endpoint) -> bool:
        seen.append(endpoint)
        return endpoint.kind == "message"

    world.dedup.require(of_orders, BY_HEADER)
    shop, topic = Shop(), await broker.topic()
    await broker.consume(topic.endpoint, world.dedup, function=shop.order)
    await broker.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await broker.drained(topic)
    assert [endpoint.function for endpoint in seen] == [shop.order]
