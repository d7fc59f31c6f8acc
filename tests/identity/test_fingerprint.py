"""Fingerprints: equal for a retry, different for another payload."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from collections import UserDict
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.fingerprint import of_chosen, of_fields, of_message, of_payload

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def shuffled(value: Any) -> Any:
    """Return JSON that means the same, with every object's members the other way round."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(each) for each in value] if isinstance(value, list) else value


@given(JSON)
def test_order_of_members_and_white_space_do_not_count(value: Any) -> None:
    # case C8
    plain = of_payload(json.dumps(value).encode(), content_type="application/json")
    for other in (
        json.dumps(shuffled(value), indent=2).encode(),
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        json.dumps(value, separators=(",", ":")).encode(),
    ):
        assert of_payload(other, content_type="application/json; charset=utf-8") == plain


@given(JSON, JSON)
def test_what_means_something_else_is_another_payload(first: Any, second: Any) -> None:
    # case C8
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    prints = [
        of_payload(json.dumps(each).encode(), content_type="application/json") for each in (first, second)
    ]
    assert (prints[0] == prints[1]) is same


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "Application/JSON", "application/ld+json; v=1"]
)
def test_json_is_known_by_its_media_type(content_type: str) -> None:
    assert of_payload(b'{"a": 1}', content_type=content_type) == of_payload(
        b'{"a":1}', content_type=content_type
    )


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream", "application/jsonx"])
def test_everything_else_is_compared_byte_by_byte(content_type: str) -> None:
    assert of_payload(b'{"a": 1}', content_type=content_type) != of_payload(
        b'{"a":1}', content_type=content_type
    )


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_query_and_body_never_meet_however_they_are_split(query: bytes, body: bytes) -> None:
    whole = of_payload(body, content_type="text/plain", query=query)
    for at in range(len(body)):
        other = of_payload(body[at + 1 :], content_type="text/plain", query=query + body[: at + 1])
        assert other != whole


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000, b"nul", b'{"a":}'])
def test_what_is_no_json_after_all_is_compared_by_its_bytes(body: bytes) -> None:
    prints = {of_payload(each, content_type="application/json") for each in (body, body, body + b" ?")}
    assert len(prints) == 2
    assert all(len(each) == 32 for each in prints)


def test_numbers_and_their_texts_differ_and_so_do_null_and_absence() -> None:
    # case C8
    bodies = [b'{"a":1}', b'{"a":"1"}', b'{"a":null}', b"{}", b'{"a":true}', b'{"a":1.5}', b'{"a":[1]}']
    assert len({of_payload(each, content_type="application/json") for each in bodies}) == len(bodies)


def test_long_numbers_are_not_rounded_into_one() -> None:
    # A number beyond the 53 bits of a double is exact in the body, and so it is here.
    bodies = [b'{"id": 9007199254740993}', b'{"id": 9007199254740992}', b'{"id": 9007199254740992.0}']
    assert len({of_payload(each, content_type="application/json") for each in bodies}) == len(bodies)


def test_the_fields_of_a_form_are_compared_in_order() -> None:
    fields = [("a", "1"), ("b", "2")]
    assert of_fields(fields) == of_fields([*fields])
    assert of_fields(fields) != of_fields(fields[::-1])
    assert of_fields(fields) != of_fields([("a", "1b"), ("", "2")])
    assert of_fields(fields, query=b"x") != of_fields(fields)
    assert of_fields([("a", "\ud800")]) != of_fields([("a", "\ud801")])


# Messages, which are no bytes any more once a library has read them


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Model(pydantic.BaseModel):
    sku: Any


@dataclass
class Data:
    sku: Any
    seen: list[str] = field(default_factory=list)


@attrs.define
class Attrs:
    sku: Any


class Struct(msgspec.Struct):
    sku: Any


class Tuple(NamedTuple):
    sku: Any


class Plain:
    def __init__(self, sku: Any) -> None:
        self.sku = sku

    def __repr__(self) -> str:
        return "an order"


KINDS = [Model, Data, Attrs, Struct, Tuple, Plain, lambda sku: {"sku": sku}, lambda sku: UserDict(sku=sku)]
WORDS = [
    ("tea", "Tea"),
    (1, "1"),
    (Decimal("1.10"), Decimal("1.20")),
    (datetime(2026, 11, 30, 3, tzinfo=UTC), datetime(2026, 11, 30, 4, tzinfo=UTC)),
    (date(2026, 11, 30), date(2026, 12, 1)),
    (timedelta(seconds=1), timedelta(seconds=2)),
    (UUID(int=1), UUID(int=2)),
    (b"\xff", b"\xfe"),
    ({"a", "b"}, {"a", "c"}),
    (Size.SMALL, Size.LARGE),
    (pydantic.SecretStr("one"), pydantic.SecretStr("two")),
    ([Plain("a")], [Plain("b")]),
]


@pytest.mark.parametrize("make", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("one", "other"), WORDS, ids=lambda word: type(word).__name__)
def test_messages_differ_where_a_member_does(make: Any, one: Any, other: Any) -> None:
    # case D3
    assert of_message(make(sku=one)) == of_message(make(sku=one)) != of_message(make(sku=other))
    assert of_chosen(make(sku=one)) == of_chosen(make(sku=one)) != of_chosen(make(sku=other))


@given(JSON)
def test_a_message_has_the_fingerprint_of_the_request_with_its_body(value: Any) -> None:
    raw = json.dumps(value).encode()
    sent = of_payload(raw, content_type="application/json")
    assert of_message(raw) == of_message(bytearray(raw)) == of_message(memoryview(raw)) == sent
    assert of_message(raw.decode()) == sent
    if not isinstance(value, str):  # a message that is text is read like a body
        assert of_message(value) == sent


def test_a_member_that_was_not_sent_is_no_member() -> None:
    unsent = Struct(sku=msgspec.UNSET)
    assert of_message(unsent) == of_message(msgspec.json.encode(unsent)) != of_message(Struct(sku="UNSET"))


def test_a_message_that_is_no_json_is_compared_by_its_bytes() -> None:
    assert of_message(b"tea") == of_message("tea") == of_message(memoryview(b"tea")) != of_message(b"Tea")


def test_what_a_callable_chose_is_compared_as_it_is() -> None:
    assert of_chosen("tea") == of_chosen(b"tea") != of_chosen(b"Tea")
    assert of_chosen({"a": 1, "b": 2}) == of_chosen({"b": 2, "a": 1}) != of_chosen({"a": 2, "b": 1})
    others: list[object] = [None, 1, 2, "", [], {}]
    assert len({of_chosen(each) for each in others}) == len(others)


def test_the_order_of_a_set_does_not_count_in_any_process() -> None:
    tell = "from fastapi_dedup.fingerprint import of_message; print(of_message({'sku': set('abcdef')}).hex())"
    told = subprocess.run(
        [sys.executable, "-c", tell],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == of_message({"sku": set("fedcba")}).hex()


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no fingerprint can be made of a object"):
        of_message({"sku": object()})
