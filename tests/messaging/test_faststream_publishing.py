"""FastStream's publishing middleware, in memory: which id is stamped, and what is left alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from faststream import Context
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.nats import NatsBroker
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from faststream.response import Response
from pydantic import BaseModel

from fastapi_dedup import InvalidLogicalIdError
from fastapi_dedup.identities import DeduplicationIdentity, Identities
from fastapi_dedup.messaging.faststream import StampingMiddleware
from tests.messaging.streams import KINDS, Kind

Headers = Annotated[Any, Context("message.headers")]

pytestmark = pytest.mark.filterwarnings("ignore:the JetStream Push consumer:RuntimeWarning")


class Placed(BaseModel):
    """A message with an identity of its own."""

    sku: Annotated[str, DeduplicationIdentity()]
    ticket: str = ""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Return each kind of broker in turn."""
    return KINDS[request.param]


async def published(
    kind: Kind, identities: Identities, body: object, headers: Mapping[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Publish, and return the ids that arrive: those of the headers that are ours or NATS'."""
    arrived: dict[str, Any] = {}
    broker = kind.broker(middlewares=[StampingMiddleware(identities, **options)])
    topics = ("orders",) if "topic" in kind.publish("orders") else ()

    async def on_order(headers: Headers) -> None:
        arrived.update(headers)

    broker.subscriber(*topics, **kind.subscribe("orders"))(on_order)
    async with kind.in_memory(broker):
        await broker.publish(body, **kind.publish("orders"), headers=headers)
    return {
        name: value for name, value in arrived.items() if name.lower() in {"deduplication-id", "nats-msg-id"}
    }


def stamp(kind: Kind, logical_id: str) -> dict[str, str]:
    """Return what a stamp consists of."""
    native = {"Nats-Msg-Id": logical_id} if kind.broker is NatsBroker else {}
    return {"deduplication-id": logical_id, **native}


async def test_a_message_is_stamped_with_what_its_type_says(kind: Kind) -> None:
    assert await published(kind, Identities(), Placed(sku="tea")) == stamp(kind, "tea")


async def test_a_rule_wins_over_the_type(kind: Kind) -> None:
    identities = Identities()
    identities.by_member_named("ticket")
    assert await published(kind, identities, Placed(sku="tea", ticket="T-1")) == stamp(kind, "T-1")
    assert await published(kind, identities, Placed(sku="tea")) == {}


async def test_a_header_wins_over_both_and_is_never_overwritten(kind: Kind) -> None:
    identities = Identities()
    identities.by_message(Placed, lambda _: "rule")
    given = {"deduplication-id": "mine"}
    assert await published(kind, identities, Placed(sku="tea"), given) == stamp(kind, "mine")
    opted_out = {"deduplication-id": ""}
    assert await published(kind, identities, Placed(sku="tea"), opted_out) == opted_out
    assert given == {"deduplication-id": "mine"}


async def test_a_message_without_an_identity_has_no_stamp(kind: Kind) -> None:
    assert await published(kind, Identities(), {"sku": "tea"}) == {}


async def test_jetstream_s_own_field_can_be_left_out() -> None:
    jetstream = KINDS["jetstream"]
    stamped = await published(jetstream, Identities(), Placed(sku="tea"), native=False)
    assert stamped == {"deduplication-id": "tea"}
    given = {"Nats-Msg-Id": "m1"}
    assert await published(jetstream, Identities(), Placed(sku="tea"), given) == {
        "Nats-Msg-Id": "m1",
        "deduplication-id": "tea",
    }


async def test_an_id_that_no_consumer_would_take_is_not_published(kind: Kind) -> None:
    with pytest.raises(InvalidLogicalIdError):
        await published(kind, Identities(), Placed(sku="9" * 256))


# case G8
async def test_no_id_leaks_into_the_next_message_or_into_the_caller_s_headers(kind: Kind) -> None:
    shared = {"origin": "till 3"}
    assert await published(kind, Identities(), Placed(sku="tea"), shared) == stamp(kind, "tea")
    assert await published(kind, Identities(), {"sku": "cocoa"}, shared) == {}
    assert shared == {"origin": "till 3"}


# case G8
async def test_a_reply_has_the_identity_of_its_own_type_and_not_that_of_the_message() -> None:
    arrived: list[str | None] = []
    broker = RabbitBroker(middlewares=[StampingMiddleware(Identities())])

    @broker.subscriber("orders")
    @broker.publisher("replies")
    async def on_order(sku: str) -> Any:
        return (
            Placed(sku=f"{sku}, ordered") if sku == "tea" else Response("sold out", headers={"why": "stock"})
        )

    @broker.subscriber("replies")
    async def on_reply(headers: Headers) -> None:
        arrived.append(headers.get("deduplication-id"))

    async with TestRabbitBroker(broker):
        for sku in ("tea", "cocoa"):
            await broker.publish(sku, "orders", headers={"deduplication-id": "1"})
    assert arrived == ["tea, ordered", None]


@pytest.mark.parametrize(
    ("bodies", "told"), [([Placed(sku="tea"), Placed(sku="cocoa")], True), (["a", "b"], False)]
)
async def test_the_messages_of_a_batch_share_their_headers_so_none_is_stamped(
    bodies: list[Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    arrived: list[str | None] = []
    broker = KafkaBroker(middlewares=[StampingMiddleware(Identities())])

    @broker.subscriber("orders", group_id="shop")
    async def on_order(headers: Headers) -> None:
        arrived.append(headers.get("deduplication-id"))

    async with TestKafkaBroker(broker):
        await broker.publish_batch(*bodies, topic="orders")
        await broker.publish_batch(Placed(sku="alone"), topic="orders")
    assert arrived == [None, None, "alone"]
    assert ("batch for orders is published without ids" in caplog.text) == told


@pytest.mark.parametrize(("logical_id", "told"), [("1", True), ("", False)])
async def test_a_batch_under_one_id_is_warned_of_for_all_but_one_would_be_duplicates(
    logical_id: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker = KafkaBroker(middlewares=[StampingMiddleware(Identities())])
    async with TestKafkaBroker(broker):
        headers = {"Deduplication-Id": logical_id}
        await broker.publish_batch(Placed(sku="tea"), Placed(sku="cocoa"), topic="orders", headers=headers)
    assert ("under one id" in caplog.text) == told
    assert "without ids" not in caplog.text
