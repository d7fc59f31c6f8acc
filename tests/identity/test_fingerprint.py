"""Fingerprints: equal for a retry, different for another payload."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastapi_dedup.fingerprint import of_fields, of_payload

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
