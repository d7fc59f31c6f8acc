"""The FastStream middleware on RabbitMQ, Kafka, JetStream and Redis, each in memory."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
from faststream import AckPolicy, Context, Depends
from faststream.exceptions import AckMessage
from faststream.kafka import KafkaBroker
from faststream.rabbit import (
    ExchangeType,
    RabbitBroker,
    RabbitExchange,
    RabbitQueue,
    RabbitRouter,
    TestRabbitBroker,
)
from faststream.redis import RedisBroker, StreamSub, TestRedisBroker
from nats.js.api import AckPolicy as JetStreamAckPolicy
from nats.js.api import ConsumerConfig
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import ConfigurationError, Deduplicated
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.faststream import (
    DeduplicatingMiddleware,
    MessageClaim,
    MessageSession,
    deduplicated,
)
from tests.http.world import World, session_of
from tests.messaging.shop import PAUSE, Clock, Thread, fail, heard
from tests.messaging.streams import KINDS, Kind, Order, Stream, add, stream_of

BY_SKU = Deduplicated(source="body", member="sku")
TEA = Order(sku="tea")

pytestmark = pytest.mark.filterwarnings("ignore:the JetStream Push consumer:RuntimeWarning")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Return each kind of broker in turn."""
    return KINDS[request.param]


@pytest.fixture
def rabbitmq_in_memory(world: World) -> Stream:
    """Return RabbitMQ, for what is the same on each broker."""
    return stream_of(KINDS["rabbitmq"], world)


# What becomes of a message


async def test_a_duplicate_is_acknowledged_and_not_run(kind: Kind, world: World) -> None:  # case G3
    stream = stream_of(kind, world, BY_SKU)
    stream.subscriber()(add)
    async with stream.running():
        for _ in range(3):
            await stream.publish(TEA)
    assert await world.orders() == ["tea"]
    assert stream.answers == ["ACKED"] * 3
    assert heard(world, EventKind.DUPLICATE) == 2


async def test_claim_and_work_are_committed_before_the_acknowledgement(kind: Kind, world: World) -> None:
    told: list[list[str]] = []
    stream = stream_of(kind, world, BY_SKU)
    stream.subscriber()(add)
    async with stream.running():
        await stream.publish(TEA)
        acknowledge = type(stream.messages[0]).ack

        async def ack(message: Any) -> None:
            told.append(await world.orders())
            await acknowledge(message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(stream.messages[0]), "ack", ack)
            await stream.publish(Order(sku="cocoa"))
    assert told == [["tea", "cocoa"]]


async def test_a_copy_in_flight_is_given_back_and_runs_if_the_original_fails(  # case G4
    kind: Kind, world: World
) -> None:
    stream = stream_of(kind, world, Deduplicated(scope="orders"))
    stream.subscriber()(add)
    async with stream.running():
        with pytest.raises(RuntimeError):
            async with world.dedup.claim("1", scope="orders"):
                await stream.publish(TEA, deduplication_id="1")
                await fail()
        assert await world.orders() == []
        await stream.publish(TEA, deduplication_id="1")
    assert stream.answers == ["NACKED", "ACKED"]
    assert await world.orders() == ["tea"]


@pytest.mark.parametrize("store", ["durable", "memory"])
async def test_a_message_that_its_handler_gives_back_itself_runs_again(
    kind: Kind, world: World, store: Literal["durable", "memory"]
) -> None:
    stream = stream_of(kind, world, Deduplicated(store=store))
    gives_back = [True]

    async def on_order(
        order: Order, message: Annotated[Any, Context("message")], session: MessageSession
    ) -> None:
        if gives_back and gives_back.pop():
            await message.nack()
            return
        await add(order, session)

    stream.subscriber()(on_order)
    async with stream.running():
        for _ in range(3):
            await stream.publish(TEA, deduplication_id="1")
    assert stream.answers == ["NACKED", "ACKED", "ACKED"]
    assert await world.orders() == ["tea"]


@pytest.mark.parametrize("requeue", [True, False])
async def test_a_message_that_its_handler_rejects_itself_was_not_handled(
    rabbitmq_in_memory: Stream, world: World, requeue: bool
) -> None:
    # It comes again, or a person sends its dead letter anew: to call that a duplicate would lose the work.
    stream = rabbitmq_in_memory
    rejects = [True]

    @stream.subscriber()
    @deduplicated(BY_SKU)
    async def on_order(
        order: Order, message: Annotated[Any, Context("message")], session: MessageSession
    ) -> None:
        await add(order, session)
        if rejects and rejects.pop():
            await message.reject(requeue=requeue)

    async with stream.running():
        for _ in range(3):
            await stream.publish(TEA)
    assert stream.answers == ["REJECTED", "ACKED", "ACKED"]
    assert (await world.orders(), heard(world, EventKind.RELEASED)) == (["tea"], 1)


@pytest.mark.parametrize("headers", [{}, {"deduplication_id": " "}, {"deduplication_id": "9" * 256}])
async def test_a_message_without_a_legal_id_is_rejected(
    kind: Kind, world: World, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    stream = stream_of(kind, world, Deduplicated())
    stream.subscriber()(add)
    async with stream.running():
        await stream.publish(TEA, **headers)
    # Kafka has no rejection: FastStream commits the offset.
    assert stream.answers == ["ACKED" if kind.broker is KafkaBroker else "REJECTED"]
    assert await world.orders() == []
    if kind.broker is KafkaBroker:  # the others have no ids in memory
        assert "rejected message 'orders:0:0' of orders/shop: " in caplog.text


@pytest.mark.parametrize("body", [b"{no JSON", b"\xff"])
async def test_a_message_that_cannot_be_decoded_has_no_id_and_is_rejected(
    rabbitmq_in_memory: Stream, world: World, body: bytes
) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(BY_SKU)(add))
    async with stream.running():
        await stream.broker.publish(body, "orders", content_type="application/json")
    assert stream.answers == ["REJECTED"]
    assert heard(world, EventKind.INVALID) == 1


async def test_an_id_that_was_used_for_another_payload_is_rejected(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(Deduplicated(fingerprint=True))(add))
    async with stream.running():
        await stream.publish(TEA, deduplication_id="1")
        await stream.publish(Order(sku="cocoa"), deduplication_id="1")
    assert stream.answers == ["ACKED", "REJECTED"]
    assert await world.orders() == ["tea"]


async def test_while_the_database_is_down_messages_are_given_back_and_not_run(
    kind: Kind, world: World
) -> None:
    stream = stream_of(kind, world, BY_SKU)
    stream.subscriber()(add)
    async with world.engine.begin() as connection:
        await connection.execute(text("alter table dedup_claims rename to gone"))
    async with stream.running():
        await stream.publish(TEA)
        async with world.engine.begin() as connection:
            await connection.execute(text("alter table gone rename to dedup_claims"))
        await stream.publish(TEA)
    assert stream.answers == ["NACKED", "ACKED"]
    assert await world.orders() == ["tea"]


async def test_pauses_grow_with_an_outage_and_begin_anew_after_it(
    rabbitmq_in_memory: Stream, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A queue's delivery limit must not be used up by asking: 20 returns would last for 10 seconds of outage.
    clock = Clock(4, 60, 60, 0)
    clock.rule(monkeypatch, "faststream")
    rabbitmq_in_memory.subscriber()(deduplicated(BY_SKU)(add))

    async def rename(table: str, to: str) -> None:
        async with world.engine.begin() as connection:
            await connection.execute(text(f"alter table {table} rename to {to}"))

    async with rabbitmq_in_memory.running():
        await rename("dedup_claims", "gone")
        for _ in range(3):
            await rabbitmq_in_memory.publish(TEA)
        await rename("gone", "dedup_claims")
        await rabbitmq_in_memory.publish(TEA)
        await rename("dedup_claims", "gone")
        await rabbitmq_in_memory.publish(TEA)
        await rename("gone", "dedup_claims")
    usual = PAUSE.total_seconds()
    assert clock.slept == [usual, 4, 30, usual]


@pytest.mark.filterwarnings("ignore:AckPolicy.REJECT_ON_ERROR has the same effect:UserWarning")
@pytest.mark.parametrize(
    ("policy", "answer"),
    [(AckPolicy.NACK_ON_ERROR, "NACKED"), (AckPolicy.REJECT_ON_ERROR, "REJECTED"), (AckPolicy.ACK, "ACKED")],
)
async def test_what_a_handler_raises_goes_to_the_ack_policy_and_frees_the_id(
    kind: Kind, world: World, policy: AckPolicy, answer: str
) -> None:
    if kind.broker is KafkaBroker and policy is AckPolicy.REJECT_ON_ERROR:
        answer = "ACKED"  # as FastStream warns: Kafka has no rejection
    mishaps = [fail]
    stream = stream_of(kind, world, BY_SKU)

    @stream.subscriber(ack_policy=policy)
    async def on_order(order: Order, session: MessageSession) -> None:
        await add(order, session)
        if mishaps:
            await mishaps.pop()()

    async with stream.running():
        with pytest.raises(RuntimeError, match="as the test wished"):
            await stream.publish(TEA)
        assert (await world.orders(), await world.ids()) == ([], [])
        await stream.publish(TEA)
    assert stream.answers == [answer, "ACKED"]
    assert await world.orders() == ["tea"]


async def test_an_error_of_ours_that_a_handler_raises_is_the_handler_s(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory

    @stream.subscriber()
    @deduplicated(BY_SKU)
    async def on_order(order: Order) -> None:
        raise ConfigurationError(order.sku)

    async with stream.running():
        with pytest.raises(ConfigurationError, match="tea"):
            await stream.publish(TEA)
    assert stream.answers == ["NACKED"]
    assert await world.ids() == []


async def test_work_whose_handler_asks_for_the_acknowledgement_is_committed(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory

    @stream.subscriber()
    @deduplicated(BY_SKU)
    async def on_order(order: Order, session: MessageSession) -> None:
        await add(order, session)
        raise AckMessage

    async with stream.running():
        await stream.publish(TEA)
    assert (stream.answers, await world.orders()) == (["ACKED"], ["tea"])


async def test_a_duplicate_has_no_result_to_publish(rabbitmq_in_memory: Stream) -> None:
    stream = rabbitmq_in_memory
    replies: list[str] = []

    async def on_order(order: Order, session: MessageSession) -> str:
        await add(order, session)
        return f"ordered {order.sku}"

    stream.subscriber()(stream.broker.publisher("replies")(deduplicated(BY_SKU)(on_order)))

    @stream.subscriber("replies")
    async def on_reply(reply: str) -> None:
        replies.append(reply)

    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert replies == ["ordered tea"]


# Places


async def test_the_default_scope_names_the_place_and_its_group(kind: Kind, world: World) -> None:
    stream = stream_of(kind, world, BY_SKU)
    stream.subscriber()(add)
    async with stream.running():
        await stream.publish(TEA)
    assert await world.scopes() == [f"message {kind.place.format(address='orders')}"]


async def test_an_id_that_fans_out_to_two_endpoints_runs_once_in_each(world: World) -> None:  # case G1
    stream = stream_of(KINDS["rabbitmq"], world, BY_SKU)
    exchange = RabbitExchange("orders", type=ExchangeType.FANOUT)
    for queue in ("billing", "shipping"):
        stream.broker.subscriber(queue, exchange)(add)
    async with stream.running():
        for _ in range(2):
            await stream.broker.publish(TEA, exchange=exchange)
    assert await world.scopes() == ["message billing", "message shipping"]
    assert await world.orders() == ["tea", "tea"]


@pytest.mark.parametrize(
    ("kind", "subscription", "publication"),
    [
        ("kafka", {"ack_policy": AckPolicy.NACK_ON_ERROR}, {"topic": "orders"}),
        ("jetstream", {"subject": "orders"}, {"subject": "orders"}),
        ("redis", {"channel": "orders"}, {"channel": "orders"}),
    ],
)
async def test_where_no_group_shares_the_messages_each_handler_gets_them(  # case G1
    kind: str, subscription: dict[str, Any], publication: dict[str, Any], world: World
) -> None:
    async def add_again(order: Order, session: MessageSession) -> None:
        await add(order, session)

    stream = stream_of(KINDS[kind], world, BY_SKU)
    for function in (add, add_again):
        stream.broker.subscriber(*(["orders"] if kind == "kafka" else []), **subscription)(function)
    async with stream.running():
        for _ in range(2):
            await stream.broker.publish(TEA, **publication)
    assert await world.orders() == ["tea", "tea"]


async def test_a_router_s_prefix_is_part_of_the_place(world: World) -> None:
    broker = RabbitBroker(middlewares=[DeduplicatingMiddleware(world.dedup, BY_SKU)])
    shop = RabbitExchange("shop", type=ExchangeType.TOPIC)
    for prefix in ("eu.", "us."):
        router = RabbitRouter(prefix=prefix)
        router.subscriber(RabbitQueue("orders", routing_key="placed.*"), shop)(add)
        broker.include_router(router)
    async with TestRabbitBroker(broker):
        await broker.publish(TEA, "eu.placed.today", shop)
    assert await world.scopes() == ["message eu.orders"]


@pytest.mark.parametrize(
    ("kind", "options", "delivery_id"),
    [("rabbitmq", {"message_id": "m1"}, "m1"), ("kafka", {}, "orders:0:0")],
)
async def test_a_delivery_s_id_is_the_broker_s_own(
    kind: str, options: dict[str, str], delivery_id: str, world: World
) -> None:
    """Kafka counts within its partition; in memory it stays at 0. The others have ids on real servers."""
    stream = stream_of(KINDS[kind], world, Deduplicated(source="delivery"))
    stream.subscriber()(add)
    async with stream.running():
        for _ in range(2):
            await stream.broker.publish(TEA, **stream.kind.publish("orders"), **options)
    assert (await world.ids(), await world.orders()) == ([delivery_id], ["tea"])
    assert stream.answers == ["ACKED", "ACKED"]


async def test_a_list_has_no_acknowledgements_and_yet_no_duplicates(world: World) -> None:
    broker = RedisBroker(middlewares=[DeduplicatingMiddleware(world.dedup, BY_SKU)])
    broker.subscriber(list="orders")(add)
    async with TestRedisBroker(broker):
        for _ in range(2):
            await broker.publish(TEA, list="orders")
    assert (await world.orders(), await world.scopes()) == (["tea"], ["message orders"])


async def test_a_copy_in_flight_that_cannot_come_again_is_reported_as_lost(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Deduplicated(source="body", member="sku", scope="orders")
    broker = RedisBroker(middlewares=[DeduplicatingMiddleware(world.dedup, policy)])
    broker.subscriber(list="orders")(add)
    async with TestRedisBroker(broker), world.dedup.claim("tea", scope="orders"):
        await broker.publish(TEA, list="orders")
    assert "a message of orders is lost" in caplog.text
    assert await world.orders() == []


# Policies


async def test_a_handler_s_own_policy_wins_over_the_middleware_s(world: World) -> None:
    stream = stream_of(KINDS["rabbitmq"], world, BY_SKU)
    stream.subscriber("own")(deduplicated(Deduplicated(scope="own"))(add))
    stream.subscriber("middleware's")(add)
    async with stream.running():
        await stream.publish(TEA, "own", deduplication_id="1")
        await stream.publish(TEA, "middleware's", deduplication_id="1")
    assert await world.scopes() == ["message middleware's", "own"]
    assert await world.ids() == ["1", "tea"]


async def test_what_is_required_holds_for_handlers_without_a_policy(world: World) -> None:
    world.dedup.require(lambda endpoint: endpoint.name == "orders", BY_SKU)
    world.dedup.require(lambda endpoint: endpoint.function is ping, Deduplicated())
    stream = stream_of(KINDS["rabbitmq"], world)
    stream.subscriber("orders")(add)
    stream.subscriber("own")(deduplicated(Deduplicated(source="body", member="sku", scope="own"))(add))
    stream.subscriber("pings")(ping)
    async with stream.running():
        await stream.publish(TEA, "orders")
        await stream.publish(TEA, "own")
        await stream.publish(TEA, "pings")
    assert stream.answers == ["ACKED", "ACKED", "REJECTED"]
    assert await world.scopes() == ["message orders", "own"]


async def ping(order: Order) -> None:
    """Do nothing."""


async def test_a_handler_that_no_policy_holds_for_runs_as_if_the_middleware_were_not_there(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory
    runs: list[str] = []

    @stream.subscriber(ack_policy=AckPolicy.ACK_FIRST)
    async def on_order(order: Order) -> None:
        runs.append(order.sku)

    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert (runs, await world.ids()) == (["tea", "tea"], [])


async def test_of_a_subscriber_s_handlers_the_one_that_takes_the_message_has_its_policy(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory
    subscriber = stream.subscriber()

    subscriber(deduplicated(BY_SKU)(add), filter=lambda message: message.headers.get("kind") == "order")
    subscriber(deduplicated(Deduplicated(scope="others"))(add))
    async with stream.running():
        await stream.publish(TEA, kind="order")
        await stream.publish(TEA, kind="other", deduplication_id="1")
    assert await world.scopes() == ["message orders", "others"]


async def test_a_broker_and_its_router_may_both_have_the_middleware(world: World) -> None:
    stream = stream_of(KINDS["rabbitmq"], world)
    router = RabbitRouter(middlewares=[DeduplicatingMiddleware(world.dedup)])
    router.subscriber("orders", ack_policy=AckPolicy.NACK_ON_ERROR)(deduplicated(BY_SKU)(add))
    stream.broker.include_router(router)
    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert (stream.answers, await world.orders()) == (["ACKED", "ACKED"], ["tea"])


async def test_two_middlewares_with_different_policies_are_refused(world: World) -> None:
    stream = stream_of(KINDS["rabbitmq"], world, BY_SKU)
    router = RabbitRouter(middlewares=[DeduplicatingMiddleware(world.dedup, Deduplicated(required=False))])
    router.subscriber("orders", ack_policy=AckPolicy.NACK_ON_ERROR)(add)
    stream.broker.include_router(router)
    async with stream.running():
        with pytest.raises(ConfigurationError, match="two DeduplicatingMiddlewares"):
            await stream.publish(TEA)
    assert (stream.answers, await world.orders(), await world.ids()) == (["NACKED"], [], [])


async def test_a_message_that_a_handler_publishes_is_under_its_own_policies(world: World) -> None:
    """In memory, its handler runs inside of the other one, and inside of its context."""
    stream = stream_of(KINDS["rabbitmq"], world, BY_SKU)

    @stream.subscriber("orders")
    async def on_order(order: Order, session: MessageSession) -> None:
        await add(order, session)
        await stream.publish(order, "invoices")

    stream.subscriber("invoices")(add)
    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert await world.scopes() == ["message invoices", "message orders"]
    assert await world.orders() == ["tea", "tea"]


async def test_a_delivery_s_id_and_a_logical_id_go_together(rabbitmq_in_memory: Stream, world: World) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(Deduplicated(source="delivery"), BY_SKU)(add))
    async with stream.running():
        for message_id in ("m1", "m1", "m2"):
            await stream.broker.publish(TEA, "orders", message_id=message_id)
    assert (await world.orders(), await world.ids()) == (["tea"], ["m1", "tea"])


# What handlers get


async def test_dependencies_and_handlers_share_the_session_that_the_claim_is_in(
    kind: Kind, world: World
) -> None:
    seen: list[Any] = []

    async def customer(session: MessageSession) -> AsyncSession:
        return session

    stream = stream_of(kind, world, BY_SKU)

    @stream.subscriber()
    async def on_order(
        order: Order,
        session: MessageSession,
        claim: MessageClaim,
        theirs: Annotated[AsyncSession, Depends(customer, cast=False)],
        message: Annotated[Any, Context("message")],
    ) -> None:
        seen.extend((claim.logical_id, claim.session is session is theirs, message.headers["origin"]))
        await add(order, session)

    async with stream.running():
        await stream.publish(TEA, origin="till 3")
    assert seen == ["tea", True, "till 3"]


async def test_a_synchronous_handler_gets_them_too(rabbitmq_in_memory: Stream) -> None:
    stream = rabbitmq_in_memory
    seen: list[str] = []

    @stream.subscriber()
    @deduplicated(BY_SKU)
    def on_order(order: Order, claim: MessageClaim) -> None:
        seen.append(f"{order.sku} {claim.logical_id}")

    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert seen == ["tea tea"]


class Ordering:
    """A handler that is an object."""

    async def __call__(self, order: Order, session: MessageSession) -> None:
        await add(order, session)

    __call__.__annotations__.update(order=Order, session=MessageSession)  # FastStream reads no text here


async def test_an_object_may_be_a_handler_and_is_awaited(rabbitmq_in_memory: Stream, world: World) -> None:
    # Taken for a synchronous one, it would be claimed and acknowledged, and never run.
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(BY_SKU)(Ordering()))
    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert (stream.answers, await world.orders()) == (["ACKED", "ACKED"], ["tea"])


async def test_a_handler_in_a_thread_is_waited_for_when_its_consumer_is_cancelled(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    # case B3: a thread cannot be cancelled, and its id must not be given to another while it works
    stream, thread = rabbitmq_in_memory, Thread()

    @stream.subscriber()
    @deduplicated(BY_SKU)
    def on_order(order: Order, claim: MessageClaim) -> None:  # noqa: ARG001 - asked for
        thread.work()

    async with stream.running():
        consumer = asyncio.create_task(stream.publish(TEA))
        assert not await thread.released_too_early(world, consumer)


async def test_the_claim_rides_the_app_s_own_session(rabbitmq_in_memory: Stream, world: World) -> None:
    stream = rabbitmq_in_memory
    policy = Deduplicated(source="body", member="sku", session=session_of(world))
    stream.subscriber()(deduplicated(policy)(add))
    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert (stream.answers, await world.orders()) == (["ACKED", "ACKED"], ["tea"])


async def test_an_optional_id_that_is_missing_claims_nothing(
    rabbitmq_in_memory: Stream, world: World
) -> None:
    stream = rabbitmq_in_memory
    claims: list[object] = []

    @stream.subscriber()
    @deduplicated(Deduplicated(required=False))
    async def on_order(order: Order, session: MessageSession, claim: MessageClaim) -> None:
        claims.append(claim)
        await add(order, session)

    async with stream.running():
        await stream.publish(TEA)
    assert (claims, await world.orders(), await world.ids()) == ([None], ["tea"], [])


async def test_without_a_policy_there_is_no_session_to_get(rabbitmq_in_memory: Stream) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(add)
    async with stream.running():
        with pytest.raises(ConfigurationError, match="no policy holds for this handler"):
            await stream.publish(TEA)


async def test_a_handler_that_never_uses_the_claim_s_transaction_is_warned_of_once(
    rabbitmq_in_memory: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(BY_SKU)(ping))
    async with stream.running():
        for sku in ("tea", "cocoa"):
            await stream.publish(Order(sku=sku))
    assert [record.levelno for record in caplog.records if "never uses" in record.message] == [
        logging.WARNING
    ]


@pytest.mark.parametrize(
    "options", [{"store": "memory"}, {"lease": timedelta(minutes=1)}], ids=["memory", "lease"]
)
async def test_who_claims_in_memory_or_by_lease_is_not_warned_of_transactions(
    rabbitmq_in_memory: Stream, world: World, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(Deduplicated("body", "sku", **options))(ping))
    async with stream.running():
        for _ in range(2):
            await stream.publish(TEA)
    assert (stream.answers, heard(world, EventKind.DUPLICATE)) == (["ACKED", "ACKED"], 1)
    assert "never uses" not in caplog.text


# What is refused


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("kafka", {"ack_policy": AckPolicy.ACK_FIRST}),
        ("rabbitmq", {"ack_policy": AckPolicy.ACK_FIRST}),
        ("rabbitmq", {"ack_policy": AckPolicy.MANUAL}),
        ("jetstream", {"ack_policy": AckPolicy.MANUAL}),
        ("redis", {"stream": "orders"}),
    ],
)
async def test_a_subscriber_that_does_not_acknowledge_after_the_commit_is_stopped_loudly(
    kind: str, options: dict[str, Any], world: World, caplog: pytest.LogCaptureFixture
) -> None:
    stream = stream_of(KINDS[kind], world, BY_SKU)
    stream.subscriber(**options)(add)
    async with stream.running():
        with pytest.raises(ConfigurationError, match="does not acknowledge after COMMIT"):
            await stream.publish(TEA)
    assert [record.levelno for record in caplog.records if "stopped" in record.message] == [logging.ERROR]
    assert await world.orders() == []


@pytest.mark.parametrize("ack_policy", [JetStreamAckPolicy.ALL, JetStreamAckPolicy.NONE])
async def test_a_consumer_of_jetstream_s_that_does_not_acknowledge_each_message_by_itself_is_stopped(
    world: World, ack_policy: JetStreamAckPolicy
) -> None:
    stream = stream_of(KINDS["jetstream"], world, BY_SKU)
    stream.subscriber(config=ConsumerConfig(ack_policy=ack_policy))(add)
    async with stream.running():
        with pytest.raises(ConfigurationError, match=f"its ack_policy is {ack_policy.value}"):
            await stream.publish(TEA)
    assert await world.orders() == []


async def test_kafka_s_default_is_to_acknowledge_first_and_is_refused(world: World) -> None:
    stream = stream_of(KINDS["kafka"], world, BY_SKU)
    stream.broker.subscriber("orders", group_id="shop")(add)
    async with stream.running():
        with pytest.raises(ConfigurationError, match="NACK_ON_ERROR"):
            await stream.publish(TEA)


async def test_a_batch_is_refused_for_it_has_no_id_of_its_own(world: World) -> None:
    stream = stream_of(KINDS["redis"], world, BY_SKU)

    @stream.subscriber(stream=StreamSub("orders", group="shop", consumer="1", batch=True))
    async def on_orders(orders: list[Order]) -> None:
        raise AssertionError(orders)

    async with stream.running():
        with pytest.raises(ConfigurationError, match="batches"):
            await stream.publish(TEA)
    assert stream.answers == ["NACKED"]


def test_a_policy_that_messages_cannot_keep_is_refused_where_it_is_given(world: World) -> None:
    policy = Deduplicated(source="path", member="sku")
    with pytest.raises(ConfigurationError, match="a message has no path"):
        deduplicated(policy)
    with pytest.raises(ConfigurationError, match="a message has no path"):
        DeduplicatingMiddleware(world.dedup, policy)
    with pytest.raises(ConfigurationError, match="store='memory' keeps an id for"):
        DeduplicatingMiddleware(world.dedup, Deduplicated(store="memory", window=timedelta(days=1)))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ([], "a message has no path"),
        ([Deduplicated(store="memory", window=timedelta(days=1))], "keeps an id for"),
    ],
    ids=["required", "its own"],
)
async def test_what_is_found_out_at_the_first_message_stops_the_subscriber(
    rabbitmq_in_memory: Stream, world: World, own: list[Deduplicated], message: str
) -> None:
    world.dedup.require(lambda _: True, Deduplicated("path", "sku"))
    stream = rabbitmq_in_memory
    stream.subscriber()(deduplicated(*own)(add) if own else add)
    async with stream.running():
        with pytest.raises(ConfigurationError, match=message):
            await stream.publish(TEA)
    assert (stream.answers, await world.orders()) == (["NACKED"], [])


def test_the_decorator_wants_a_policy_and_the_function_itself(rabbitmq_in_memory: Stream) -> None:
    with pytest.raises(ConfigurationError, match="takes a policy"):
        deduplicated()
    with pytest.raises(ConfigurationError, match=r"below @broker\.subscriber"):
        deduplicated(BY_SKU)(rabbitmq_in_memory.subscriber()(add))


def test_a_pause_is_longer_than_nothing(world: World) -> None:
    with pytest.raises(ConfigurationError, match="pause"):
        DeduplicatingMiddleware(world.dedup, pause=PAUSE * 0)
