"""What only JetStream and nats-py have: a message and its own copy, heartbeats, streams of dead letters."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Claim, ConfigurationError, Deduplicated, InvalidLogicalIdError
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.nats import _heartbeats, consumer, stamped
from tests.http.world import World
from tests.live import until
from tests.messaging.brokers import SOON, JetStream
from tests.messaging.shop import PAUSE, Shop, fail, heard, until_heard

BY_HEADER = Deduplicated()
NEVER = timedelta(hours=1)

PATIENCE = 1.0
"""Seconds after which JetStream delivers again what sends no heartbeats: long enough for a loaded machine."""

OFTEN = timedelta(seconds=PATIENCE / 7)


async def test_the_handler_gets_the_message_the_session_and_the_claim(
    jetstream: JetStream, world: World
) -> None:
    seen: list[Any] = []

    async def on_order(message: Msg, session: AsyncSession, claim: Claim) -> None:
        seen.extend((message.data, message.subject, claim.logical_id, claim.session is session))

    topic = await jetstream.topic()
    await jetstream.consume(topic.endpoint, world.dedup, BY_HEADER, function=on_order)
    await jetstream.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await jetstream.drained(topic)
    assert seen == [b'"tea"', topic.name, "1", True]


# case G4
@pytest.mark.parametrize("fails", [True, False])
async def test_a_message_that_comes_again_while_it_is_being_handled_is_never_settled_by_its_copy(
    jetstream: JetStream, world: World, fails: bool
) -> None:
    ending = asyncio.Event()

    async def end() -> None:
        await ending.wait()
        if fails:
            await fail()

    jetstream.ack_wait = SOON
    shop, topic = Shop(end), await jetstream.topic()
    await jetstream.consume(
        topic.endpoint, world.dedup, BY_HEADER, function=shop.order, pause=PAUSE, heartbeat=NEVER
    )
    await jetstream.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.IN_FLIGHT, 2)
    assert await jetstream.waiting(topic.endpoint) == 1
    ending.set()
    await until_heard(world, EventKind.COMMITTED)
    assert await jetstream.drained(topic)
    assert (shop.runs, await world.orders(), await jetstream.dead(topic)) == (2 if fails else 1, ["tea"], [])


@pytest.mark.parametrize("ack_policy", [AckPolicy.ALL, AckPolicy.NONE])
async def test_a_consumer_that_does_not_acknowledge_each_message_by_itself_is_refused(
    jetstream: JetStream, world: World, ack_policy: AckPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    # Else the acknowledgement of a later message, or none at all, would settle one whose work may still fail.
    topic, shop = await jetstream.topic(), Shop()
    stream = await jetstream.stream()
    await stream.add_consumer(topic.name, ConsumerConfig(durable_name="all", ack_policy=ack_policy))
    on_order = consumer(world.dedup, BY_HEADER)(shop.order)
    await jetstream.publish(topic, "tea", deduplication_id="1")
    subscription = await stream.pull_subscribe_bind(durable="all", stream=topic.name)
    (message,) = await subscription.fetch(1)
    with pytest.raises(ConfigurationError, match=f"its ack_policy is {ack_policy.value}"):
        await on_order(message)
    assert (shop.runs, message.is_acked, await world.ids()) == (0, False, [])
    assert f"{topic.name}/all does not acknowledge each message by itself" in caplog.text


async def test_a_consumer_that_cannot_be_asked_about_is_consumed_all_the_same(
    jetstream: JetStream, world: World
) -> None:
    # It may be forbidden to ask, too: the check is a help, and no condition.
    topic, shop = await jetstream.topic(), Shop()
    stream = await jetstream.stream()
    await jetstream.publish(topic, "tea", deduplication_id="1")
    subscription = await stream.pull_subscribe_bind(durable="0", stream=topic.name)
    (message,) = await subscription.fetch(1)
    await stream.delete_consumer(topic.name, "0")
    await consumer(world.dedup, BY_HEADER)(shop.order)(message)
    assert (shop.runs, message.is_acked, await world.orders()) == (1, True, ["tea"])


@pytest.mark.parametrize(("ack_wait", "warns"), [(9, True), (11, False)])
async def test_a_heartbeat_that_comes_too_late_is_warned_of_once(
    jetstream: JetStream, world: World, ack_wait: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    jetstream.ack_wait = ack_wait
    topic = await jetstream.topic()
    await jetstream.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    for number in ("1", "2"):
        await jetstream.publish(topic, "tea", deduplication_id=number)
        await until_heard(world, EventKind.COMMITTED, int(number))
    warned = [record.message for record in caplog.records if "heartbeat" in record.message]
    assert [topic.endpoint in message for message in warned] == [True] * warns


async def test_a_handler_may_take_longer_than_the_servers_patience(
    jetstream: JetStream, world: World
) -> None:
    async def take_long() -> None:
        await asyncio.sleep(1.3 * PATIENCE)

    jetstream.ack_wait = PATIENCE
    shop, topic = Shop(take_long), await jetstream.topic()
    await jetstream.consume(
        topic.endpoint,
        world.dedup,
        BY_HEADER,
        function=shop.order,
        heartbeat=OFTEN,
    )
    await jetstream.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.COMMITTED)
    assert await jetstream.drained(topic)
    assert [event.kind for event in world.events] == [EventKind.CLAIMED, EventKind.COMMITTED]


async def test_heartbeats_outlast_a_lost_connection_and_end_with_the_handling() -> None:
    heard_of: list[str] = []

    class Message:
        """One whose connection is lost at first."""

        async def in_progress(self) -> None:
            heard_of.append("beat")
            if len(heard_of) == 1:
                raise nats.errors.ConnectionClosedError

    async def beats_again() -> bool:
        return len(heard_of) > 1

    async with _heartbeats(Envelope(b"", message=Message()), 0.001):
        await until(beats_again)
    before = len(heard_of)
    await asyncio.sleep(0.02)
    assert len(heard_of) == before


async def test_a_copy_that_waits_sends_heartbeats_too(jetstream: JetStream, world: World) -> None:
    jetstream.ack_wait = PATIENCE
    waits = Deduplicated(in_flight="wait")
    topic = await jetstream.topic()
    async with world.dedup.claim("1", scope=("message", topic.endpoint)):
        await jetstream.consume(
            topic.endpoint,
            world.dedup,
            waits,
            function=Shop().order,
            heartbeat=OFTEN,
        )
        await jetstream.publish(topic, "tea", deduplication_id="1")
        await jetstream.busy(1)
        await asyncio.sleep(1.3 * PATIENCE)
        await jetstream.busy(1)  # and not two
    await until_heard(world, EventKind.DUPLICATE)
    assert await jetstream.drained(topic)
    assert heard(world, EventKind.DUPLICATE) == 1


@pytest.mark.parametrize("queue", ["workers", None])
async def test_a_push_consumer_works_the_same(jetstream: JetStream, world: World, queue: str | None) -> None:
    shop, topic = Shop(fail), await jetstream.topic(endpoints=0)
    on_order = consumer(world.dedup, BY_HEADER, pause=PAUSE)(shop.order)
    stream = (await jetstream.client()).jetstream()
    await stream.subscribe(
        topic.name, queue=queue, durable=None if queue else "pushed", cb=on_order, manual_ack=True
    )
    for _ in range(2):
        await jetstream.publish(topic, "tea", deduplication_id="1")
    await until_heard(world, EventKind.DUPLICATE)

    async def settled() -> bool:
        return await jetstream.left(f"{topic.name}/{queue or 'pushed'}") == 0

    await until(settled)
    assert (shop.runs, await world.orders()) == (2, ["tea"])
    assert await world.scopes() == [f"message {topic.name}/{queue or 'pushed'}"]


async def test_a_consumer_with_a_new_name_at_every_start_is_one_endpoint_if_it_is_named(
    jetstream: JetStream, world: World
) -> None:
    shop, topic = Shop(), await jetstream.topic(endpoints=0)
    on_order = consumer(world.dedup, BY_HEADER, endpoint="orders")(shop.order)
    await jetstream.publish(topic, "tea", deduplication_id="1")
    for kind in (EventKind.COMMITTED, EventKind.DUPLICATE):
        stream = (await jetstream.client()).jetstream()
        await stream.subscribe(topic.name, cb=on_order, manual_ack=True, config=ConsumerConfig())
        await until_heard(world, kind)
        await jetstream.hang_up()
    assert (shop.runs, await world.scopes()) == (1, ["message orders"])


async def test_a_message_that_did_not_come_through_jetstream_is_refused_loudly(
    jetstream: JetStream, world: World
) -> None:
    shop = Shop()
    on_order = consumer(world.dedup, BY_HEADER)(shop.order)
    with pytest.raises(nats.errors.NotJSMessageError):
        await on_order(Msg(await jetstream.client(), subject="orders", data=b"tea"))
    assert shop.runs == 0


# dead letters


async def test_a_dead_letter_keeps_its_own_headers_and_says_where_it_came_from_and_why(
    jetstream: JetStream, world: World
) -> None:
    topic = await jetstream.topic()
    await jetstream.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    stream = await jetstream.stream()
    headers = {"origin": "till 3", "Nats-Msg-Id": "m1", "Nats-Expected-Stream": topic.name}
    await stream.publish(topic.name, b"tea", headers=headers)
    (letter,) = await jetstream.dead_letters(topic, 1)
    assert letter.body == b"tea"
    assert dict(letter.headers) == {
        "origin": "till 3",
        "Nats-Msg-Id": f"dead-letter|{topic.endpoint}|{topic.name}:1",
        "dead-letter-reason": "a logical id is required, and header.deduplication-id has none",
        "dead-letter-subject": topic.name,
        "dead-letter-delivery": f"{topic.name}:1",
        "dead-letter-endpoint": topic.endpoint,
    }
    assert await jetstream.drained(topic)


async def test_a_dead_letter_that_is_published_twice_is_stored_once_for_each_endpoint(
    jetstream: JetStream, world: World
) -> None:
    jetstream.ack_wait = SOON
    topic = await jetstream.topic(endpoints=2)
    for endpoint in topic.endpoints:
        forgetful = consumer(world.dedup, BY_HEADER, dead_letter=f"{topic.name}-dead")(Shop().order)
        await jetstream.consume_raw(endpoint, crashing_before_term(forgetful))
    await jetstream.publish(topic, "no id")
    await until_heard(world, EventKind.MISSING, 4)
    await jetstream.dead_letters(topic, 2)
    assert await jetstream.drained(topic)
    assert len(await jetstream.dead(topic)) == 2


def crashing_before_term(callback: Any) -> Any:
    """Return a callback whose first `term` never happens, as in a crash just before."""
    crashes = [True]

    async def on_message(message: Msg) -> None:
        if crashes:
            crashes.clear()

            async def crash() -> None:
                raise ConnectionResetError

            message.term = crash  # type: ignore[method-assign]
        await callback(message)

    return on_message


async def test_a_message_that_cannot_be_dead_lettered_is_kept(
    jetstream: JetStream, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await jetstream.topic()
    on_order = consumer(world.dedup, BY_HEADER, dead_letter="no.stream.has.this", pause=PAUSE)(Shop().order)
    await jetstream.consume_raw(topic.endpoint, on_order)
    await jetstream.publish(topic, "no id")
    await until_heard(world, EventKind.MISSING, 2)
    assert not await jetstream.drained(topic)
    assert "no.stream.has.this" in caplog.text


async def test_without_a_dead_letter_subject_a_message_without_an_id_is_terminated_and_logged(
    jetstream: JetStream, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await jetstream.topic()
    await jetstream.consume_raw(topic.endpoint, consumer(world.dedup, BY_HEADER)(Shop().order))
    await jetstream.publish(topic, "no id")
    await until_heard(world, EventKind.MISSING)
    assert await jetstream.drained(topic)
    assert heard(world, EventKind.MISSING) == 1
    assert f"dead-lettered message '{topic.name}:1' of {topic.endpoint}: " in caplog.text


# The publisher's stamp


def test_the_stamp_is_our_header_and_the_brokers_own() -> None:
    assert stamped("1") == {"deduplication-id": "1", "Nats-Msg-Id": "1"}
    assert stamped("1", native=False) == {"deduplication-id": "1"}


# case G8
def test_the_stamp_is_on_a_copy_so_that_no_id_leaks_into_the_next_message() -> None:
    shared = {"origin": "till 3"}
    assert stamped("1", shared) == {"origin": "till 3", "deduplication-id": "1", "Nats-Msg-Id": "1"}
    assert shared == {"origin": "till 3"}


@pytest.mark.parametrize(
    ("given", "headers"),
    [
        ({"Deduplication-Id": "mine"}, {"Deduplication-Id": "mine", "Nats-Msg-Id": "mine"}),
        ({"Nats-Msg-Id": "m1"}, {"Nats-Msg-Id": "m1", "deduplication-id": "1"}),
        ({"deduplication-id": ""}, {"deduplication-id": ""}),
    ],
)
def test_a_header_that_is_there_already_is_kept(given: dict[str, str], headers: dict[str, str]) -> None:
    assert stamped("1", given) == headers


@pytest.mark.parametrize("nothing", [None, "", "  "])
def test_without_an_id_there_is_no_stamp(nothing: str | None) -> None:
    assert stamped(nothing) == {}


@pytest.mark.parametrize("illegal", ["9" * 256, "tea ", " tea"])
def test_an_id_that_would_not_arrive_as_it_is_is_not_published(illegal: str) -> None:
    with pytest.raises(InvalidLogicalIdError):
        stamped(illegal)


async def test_what_is_stamped_arrives_as_it_is(jetstream: JetStream, world: World) -> None:
    ids = ["tea", "Tea", "thé", "the\u0301", "茶", '"tea"', "a: b", "9" * 255]
    topic = await jetstream.topic()
    await jetstream.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    stream = await jetstream.stream()
    for logical_id in ids:
        await stream.publish(topic.name, b"order", headers=stamped(logical_id))
    await until_heard(world, EventKind.COMMITTED, len(ids))
    assert await jetstream.drained(topic)
    assert sorted(await world.ids()) == sorted(ids)


async def test_jetstream_drops_what_has_the_same_stamp_before_a_consumer_sees_it(
    jetstream: JetStream, world: World
) -> None:
    topic = await jetstream.topic()
    stream = await jetstream.stream()
    acks = [await stream.publish(topic.name, b"tea", headers=stamped("1")) for _ in range(2)]
    assert [bool(ack.duplicate) for ack in acks] == [False, True]
    await jetstream.consume(topic.endpoint, world.dedup, BY_HEADER, function=Shop().order)
    await until_heard(world, EventKind.COMMITTED)
    assert await jetstream.drained(topic)
    assert heard(world, EventKind.DUPLICATE) == 0
