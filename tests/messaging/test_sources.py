"""Where a message's logical id comes from, and what it is unique in: without a broker."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pytest

from fastapi_dedup import (
    ConfigurationError,
    Deduplicated,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
)
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.identities import DeduplicationIdentity
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.handler import Result
from fastapi_dedup.policy import Policy
from tests.http.world import Statements, World
from tests.messaging.shop import heard
from tests.publishing.kinds import KINDS, PLAIN

HANDLED, DUPLICATE = Result.HANDLED, Result.DUPLICATE


class Handler:
    """A handler under some policies, which counts its runs."""

    def __init__(self, world: World, *policies: Policy, endpoint: str = "orders") -> None:
        self.runs = 0
        self.received: list[Any] = []
        self.deliver = world.dedup.handler(*policies, endpoint=endpoint)(self._run)

    async def _run(self, message: Any) -> None:
        self.runs += 1
        self.received.append(message)


@dataclass
class Message:
    """A broker library's message."""

    body: Any = b""
    headers: Any = dataclasses.field(default_factory=dict)


# The header


@pytest.mark.parametrize("name", ["deduplication-id", "Deduplication-Id"])
@pytest.mark.parametrize("value", ["A-17", b"A-17"])
async def test_the_header_is_the_default(world: World, name: str, value: object) -> None:
    handler = Handler(world, Deduplicated())
    sent, again = Message(headers={name: value}), Envelope(b"", {name: value})
    assert [await handler.deliver(sent), await handler.deliver(again)] == [HANDLED, DUPLICATE]
    assert (handler.received, await world.ids()) == ([sent], ["A-17"])


async def test_another_header_or_several_can_be_named(world: World) -> None:
    handler = Handler(world, Deduplicated(member=("tenant", "order")))
    for order in ("1", "1", "2"):
        await handler.deliver(Envelope(b"", {"Tenant": "t", "order": order}))
    assert (handler.runs, await world.ids()) == (2, ["t|1", "t|2"])


@pytest.mark.parametrize(
    "headers",
    [
        {b"Deduplication-Id": b"1"},
        {"traceparent": b"\xff", 7: None, "deduplication-id": "1"},
        [("other", b"2"), ("Deduplication-Id", b"1"), ("deduplication-id", "1")],
        (),
    ],
    ids=["bytes", "beside others", "pairs", "none"],
)
@pytest.mark.parametrize("enveloped", [True, False])
async def test_headers_are_whatever_the_library_has(world: World, headers: Any, enveloped: bool) -> None:
    # Kafka's libraries have pairs, and redis-py has bytes: to see no id in them would dead-letter everything.
    handler = Handler(world, Deduplicated(required=False))
    message = Message(headers=headers)
    sent = Envelope(b"", headers, message=message) if enveloped else message
    again = DUPLICATE if headers else HANDLED
    assert [await handler.deliver(sent), await handler.deliver(sent)] == [HANDLED, again]


async def test_a_header_that_is_repeated_with_another_value_is_no_legal_id(world: World) -> None:
    handler = Handler(world, Deduplicated())
    with pytest.raises(InvalidLogicalIdError, match="repeated with different values"):
        await handler.deliver(Message(headers=[("deduplication-id", b"1"), ("Deduplication-Id", b"2")]))


@pytest.mark.parametrize("headers", [{}, None, "text", ["deduplication-id", "1"]])
async def test_a_message_without_headers_has_no_id_in_them(world: World, headers: Any) -> None:
    handler = Handler(world, Deduplicated())
    with pytest.raises(MissingLogicalIdError, match=r"header\.deduplication-id has none"):
        await handler.deliver(Message(headers=headers))


# A member of the body


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_member_of_the_body_whatever_type_the_message_has(world: World, kind: Any) -> None:
    made = kind.type_of(sku=PLAIN)
    handler = Handler(world, Deduplicated("body", "sku"))
    assert await handler.deliver(made(sku="tea")) is HANDLED
    assert await handler.deliver(made(sku="tea")) is DUPLICATE
    with pytest.raises(MissingLogicalIdError, match=r"body\.sku has none"):
        await handler.deliver(made(sku=None))
    assert (handler.runs, await world.ids()) == (1, ["tea"])


@pytest.mark.parametrize("encode", [str, str.encode, lambda raw: bytearray(raw.encode())])
@pytest.mark.parametrize("enveloped", [True, False])
async def test_a_body_that_is_still_text_is_read_as_json(
    world: World, encode: Callable[[str], Any], enveloped: bool
) -> None:
    handler = Handler(world, Deduplicated("body", ("order.sku", "order.lines.0")))
    body = encode(json.dumps({"order": {"sku": "tea", "lines": [7]}}))
    for _ in range(2):
        await handler.deliver(Envelope(body) if enveloped else body)
    assert (handler.runs, await world.ids()) == (1, ["tea|7"])


@pytest.mark.parametrize(
    "body", [b"{no JSON", "tea", b"\xff", b"[" * 100_000], ids=["broken", "text", "no UTF-8", "too deep"]
)
async def test_a_body_that_is_no_json_has_no_legal_id(world: World, body: object) -> None:
    handler = Handler(world, Deduplicated("body", "sku", required=False))
    with pytest.raises(InvalidLogicalIdError, match="it is not JSON"):
        await handler.deliver(body)
    assert (handler.runs, heard(world, EventKind.INVALID)) == (0, 1)


# "anything", a callable, the delivery


@dataclass
class Placed:
    """A message that knows its identity."""

    sku: Annotated[str, DeduplicationIdentity()]


async def test_anything_is_the_header_else_what_the_message_s_type_says(world: World) -> None:
    handler = Handler(world, Deduplicated("anything"))
    assert await handler.deliver(Envelope(Placed("tea"), {"deduplication-id": "mine"})) is HANDLED
    assert await handler.deliver(Envelope(Placed("tea"))) is HANDLED
    assert await handler.deliver(Placed("tea")) is DUPLICATE
    with pytest.raises(MissingLogicalIdError):
        await handler.deliver(Envelope({"sku": "tea"}))
    assert await world.ids() == ["mine", "tea"]


async def test_anything_follows_the_publisher_s_rules_too(world: World) -> None:
    world.dedup.identities.by_member_named("sku")
    world.dedup.identities.by_message(Placed, lambda placed: f"order of {placed.sku}")
    handler = Handler(world, Deduplicated("anything"))
    for body in (b'{"sku": "tea"}', {"sku": "cocoa"}, b"no JSON"):
        if body == b"no JSON":
            with pytest.raises(MissingLogicalIdError):
                await handler.deliver(Envelope(body))
        else:
            assert await handler.deliver(Envelope(body)) is HANDLED
    assert await world.ids() == ["cocoa", "tea"]


@pytest.mark.parametrize(
    "body", [{"sku": [1]}, b'{"sku": [1]}', '{"sku": "\\ud800"}'], ids=["dict", "bytes", "text"]
)
async def test_an_illegal_id_of_the_message_s_own_is_not_taken_for_none(world: World, body: object) -> None:
    world.dedup.identities.by_member_named("sku")
    handler = Handler(world, Deduplicated("anything", required=False))
    with pytest.raises(InvalidLogicalIdError, match="sku"):
        await handler.deliver(Envelope(body))
    assert handler.runs == 0


# wolverine.md row 13
async def test_deriving_never_enforces_what_the_policy_does_not_ask_for(world: World) -> None:
    handler = Handler(world, Deduplicated(required=False))
    assert [await handler.deliver(Placed("tea")) for _ in range(2)] == [HANDLED, HANDLED]
    assert await world.ids() == []


async def test_a_callable_takes_what_the_handler_takes(world: World) -> None:
    async def later(message: Message) -> object:
        return message.headers["n"]

    def now(message: Message) -> object:
        return message.headers["n"]

    for source in (now, later):
        handler = Handler(world, Deduplicated(source, scope=source.__name__))
        sent = Message(headers={"n": 1})
        assert [await handler.deliver(sent) for _ in range(2)] == [HANDLED, DUPLICATE]
    assert await world.ids() == ["1", "1"]


async def test_the_delivery_is_what_the_broker_calls_it(world: World) -> None:
    handler = Handler(world, Deduplicated("delivery"))
    for delivery_id in ("m1", "m1", "m2"):
        await handler.deliver(Envelope(b"", {"deduplication-id": "1"}, delivery_id, "orders"))
    with pytest.raises(MissingLogicalIdError, match="the delivery's id has none"):
        await handler.deliver(Envelope(b"", destination="orders"))
    assert (handler.runs, await world.ids()) == (2, ["m1", "m2"])


# What is missing or illegal


# case C1
@pytest.mark.parametrize("nothing", [None, "", " ", "\t ", msgspec.UNSET], ids=repr)
@pytest.mark.parametrize("source", ["header", "body", "callable", "delivery"])
async def test_a_required_id_that_is_missing_is_refused_and_an_optional_one_costs_no_query(
    world: World, source: str, nothing: Any
) -> None:
    sources: dict[str, Any] = {
        "header": {},
        "body": {"source": "body", "member": "sku"},
        "callable": {"source": lambda _: nothing},
        "delivery": {"source": "delivery"},
    }
    headers = {} if nothing is None else {"deduplication-id": nothing}
    message = Envelope({"sku": nothing}, headers, delivery_id=nothing)
    statements = Statements(world.engine)
    required, optional = (
        Handler(world, Deduplicated(**sources[source], required=required)) for required in (True, False)
    )
    with pytest.raises(MissingLogicalIdError):
        await required.deliver(message)
    assert [await optional.deliver(message) for _ in range(2)] == [HANDLED, HANDLED]
    assert (required.runs, optional.runs, heard(world, EventKind.MISSING)) == (0, 2, 1)
    assert statements == []


# case C1
async def test_words_for_nothing_are_ids_like_any_other(world: World) -> None:
    handler = Handler(world, Deduplicated("body", "sku"))
    words = ["None", "null", "0", 0]
    results = [await handler.deliver({"sku": word}) for word in words]
    assert results == [HANDLED, HANDLED, HANDLED, DUPLICATE]
    assert await world.ids() == ["0", "None", "null"]


@pytest.mark.parametrize("illegal", ["9" * 256, "a\nb", 1.5, True, ["a"], {"a": 1}, "\ud800"], ids=repr)
@pytest.mark.parametrize("policy", [Deduplicated(), Deduplicated("body", "sku")], ids=["header", "body"])
async def test_an_id_that_is_no_legal_one_is_refused_before_any_query(
    world: World, policy: Deduplicated, illegal: Any
) -> None:
    handler, statements = Handler(world, policy), Statements(world.engine)
    with pytest.raises(InvalidLogicalIdError):
        await handler.deliver(Envelope({"sku": illegal}, {"deduplication-id": illegal}))
    assert (handler.runs, heard(world, EventKind.INVALID), statements) == (0, 1, [])


async def test_ids_are_told_apart_to_the_last_character(world: World) -> None:  # case F9
    handler = Handler(world, Deduplicated("body", "sku"))
    for sku in ("Ab", "ab", "ab ", "áb", "a\u0301b"):
        assert await handler.deliver({"sku": sku}) is HANDLED
    assert handler.runs == 5


# Scopes


@pytest.mark.parametrize(
    ("scope", "stored"),
    [
        (None, "message orders"),
        ("shop", "shop"),
        (lambda message: message.headers["tenant"], "message orders t1"),
        (["shop", lambda message: message.headers["tenant"]], "shop t1"),
    ],
    ids=["the place", "a name", "a tenant", "parts"],
)
async def test_the_scope_is_the_place_a_name_or_joined_by_a_principal(
    world: World, scope: Any, stored: str
) -> None:
    handler = Handler(world, Deduplicated(scope=scope))
    sent = Message(headers={"deduplication-id": "1", "tenant": "t1"})
    assert [await handler.deliver(sent) for _ in range(2)] == [HANDLED, DUPLICATE]
    assert await world.scopes() == [stored]


# case D1
async def test_two_tenants_have_the_same_id_to_themselves_and_none_is_anonymous(world: World) -> None:
    async def tenant(message: Message) -> object:
        return message.headers.get("tenant")

    handler = Handler(world, Deduplicated(scope=tenant))
    for headers in ({"tenant": "t1"}, {"tenant": "t2"}):
        assert await handler.deliver(Message(headers={"deduplication-id": "1", **headers})) is HANDLED
    with pytest.raises(MissingLogicalIdError, match="scope"):
        await handler.deliver(Message(headers={"deduplication-id": "1"}))
    assert handler.runs == 2


async def test_where_a_message_arrived_wins_over_the_handler_s_name(world: World) -> None:
    handler = Handler(world, Deduplicated())
    for destination in ("eu", "us", ""):
        assert await handler.deliver(Envelope(b"", {"deduplication-id": "1"}, None, destination)) is HANDLED
    assert await world.scopes() == ["message eu", "message orders", "message us"]


async def test_without_a_name_the_scope_is_the_function_s(world: World) -> None:
    async def on_order(message: dict[str, str]) -> None: ...

    await world.dedup.handler(Deduplicated("body", "sku"))(on_order)({"sku": "tea"})
    assert await world.scopes() == [f"message {__name__}.{on_order.__qualname__}"]


# Payloads


# case D3
@pytest.mark.parametrize("in_flight", [True, False])
async def test_an_id_that_was_used_for_another_payload_is_refused(world: World, in_flight: bool) -> None:
    def order(price: str) -> dict[str, object]:
        return {"sku": "tea", "price": Decimal(price)}

    handler = Handler(world, Deduplicated("body", "sku", fingerprint=True))

    async def refuse() -> None:
        with pytest.raises(FingerprintMismatchError):
            await handler.deliver(order("1.20"))

    @world.dedup.handler(Deduplicated("body", "sku", fingerprint=True), endpoint="orders")
    async def refuse_within(message: dict[str, object]) -> None:  # noqa: ARG001
        await refuse()

    await (refuse_within if in_flight else handler.deliver)(order("1.10"))
    await refuse()
    assert await handler.deliver(order("1.10")) is DUPLICATE
    assert heard(world, EventKind.MISMATCH) == 1 + in_flight


async def test_a_callable_says_what_is_compared(world: World) -> None:
    policy = Deduplicated("body", "sku", fingerprint=lambda message: message["price"])
    handler = Handler(world, policy)
    assert await handler.deliver({"sku": "tea", "price": 1, "sent": "now"}) is HANDLED
    assert await handler.deliver({"sku": "tea", "price": 1, "sent": "later"}) is DUPLICATE
    with pytest.raises(FingerprintMismatchError):
        await handler.deliver({"sku": "tea", "price": 2})


async def test_by_default_the_payload_is_not_compared(world: World) -> None:  # wolverine.md §3, handlers
    handler = Handler(world, Deduplicated())
    for body in (b"tea", b"cocoa"):
        await handler.deliver(Envelope(body, {"deduplication-id": "1"}))
    assert handler.runs == 1


# What messages do not have


@pytest.mark.parametrize("source", ["path", "query", "form"])
async def test_a_source_that_messages_do_not_have_is_refused_where_the_handler_is_made(
    world: World, source: Any
) -> None:
    with pytest.raises(ConfigurationError, match=f"a message has no {source}"):
        Handler(world, Deduplicated(source, "sku"))
