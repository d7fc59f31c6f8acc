"""Ids of several members: legible, and never two that meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from fastapi_dedup import InvalidLogicalIdError, MissingLogicalIdError
from fastapi_dedup.identity import compose, lookup, resolve

PARTS = st.lists(st.text("ab|\\ ", min_size=1, max_size=6), min_size=1, max_size=4)


@given(PARTS, PARTS)
@example(["a|b"], ["a", "b"])
@example(["a\\", "b"], ["a\\|b"])
@example(["a", "|b"], ["a|", "b"])
@example(["\\|"], ["\\", ""])
def test_two_lists_of_as_many_parts_never_meet(first: list[str], second: list[str]) -> None:
    # One policy always has the same number of members.
    if len(first) == len(second) and first != second:
        assert compose(first) != compose(second)


@given(
    st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=4),
    st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=4),
)
def test_lists_of_several_parts_never_meet_whatever_their_number(first: list[str], second: list[str]) -> None:
    assert (compose(first) == compose(second)) is (first == second)


def test_a_composition_is_legible_and_one_part_stands_as_it_is() -> None:
    assert compose(["nightly", "2026-11-30"]) == "nightly|2026-11-30"
    assert compose(["a|b\\"]) == "a|b\\"
    assert compose(["a|b", "c\\d"]) == "a\\|b|c\\\\d"


def test_every_member_is_needed_where_the_id_is_required() -> None:
    assert resolve({"a": "1", "b": "2"}, required=True) == "1|2"
    for parts in ({"a": None, "b": "2"}, {"a": None, "b": None}):
        with pytest.raises(MissingLogicalIdError) as raised:
            resolve(parts, required=True)
        assert raised.value.field == "a"


def test_an_optional_id_is_whole_or_absent() -> None:
    assert resolve({"a": None}, required=False) is None
    assert resolve({"a": None, "b": None}, required=False) is None
    with pytest.raises(MissingLogicalIdError) as raised:
        resolve({"a": "1", "b": None}, required=False)
    assert raised.value.field == "b"


def test_a_composition_has_the_same_limit_as_any_id() -> None:
    # case C7
    assert resolve({"a": "x" * 127, "b": "y" * 127}, required=True) is not None
    with pytest.raises(InvalidLogicalIdError, match="a, b is not a legal logical id: it has 256 characters"):
        resolve({"a": "x" * 128, "b": "y" * 127}, required=True)
    with pytest.raises(InvalidLogicalIdError):
        resolve({"a": "|" * 127, "b": "y" * 127}, required=True)


class Address(BaseModel):
    zip_code: str


@dataclass
class Customer:
    address: Address
    names: tuple[str, ...]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", 1),
        ("b.c", [{"d": 2}, 3]),
        ("b.c.0.d", 2),
        ("b.c.1", 3),
        ("b.c.2", None),
        ("b.c.-1", None),
        ("b.c.x", None),
        ("b.c.0.d.e", None),
        ("customer.address.zip_code", "1010"),
        ("customer.names.1", "b"),
        ("customer.nothing", None),
        ("text.0", None),
        ("none.x.y", None),
        ("missing", None),
        ("dotted.key", None),
    ],
)
def test_a_dotted_path_walks_through_whatever_holds_members(path: str, found: object) -> None:
    payload = {
        "a": 1,
        "b": {"c": [{"d": 2}, 3]},
        "customer": Customer(Address(zip_code="1010"), ("a", "b")),
        "text": "text",
        "none": None,
        "dotted.key": 4,
    }
    assert lookup(payload, path) == found


@pytest.mark.parametrize("payload", [None, 7, "text", b"bytes", [], {}, True])
def test_a_path_that_ends_early_finds_nothing(payload: object) -> None:
    assert lookup(payload, "a.b.c") is None


@pytest.mark.parametrize("path", ["__class__", "__class__.__name__", "keys", "title", "real"])
@pytest.mark.parametrize("payload", [{}, {"a": 1}, [], "text", 7, [1, 2]])
def test_json_has_no_members_but_its_own(payload: object, path: str) -> None:
    # A body is what the client says: only what it holds may be an id, never what Python makes of it.
    assert lookup(payload, path) is None


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text("ab1"), inner),
    ),
    st.text("ab1.²٣", min_size=1),
)
def test_a_path_into_any_json_never_raises(payload: Any, path: str) -> None:
    lookup(payload, path)
