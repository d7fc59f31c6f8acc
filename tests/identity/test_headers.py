"""The id that a header carries: bare or quoted, once or repeated."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastapi_dedup import InvalidLogicalIdError
from fastapi_dedup.identity import from_field_values, from_header

VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
PRINTABLE = " " + VISIBLE


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read(*values: str) -> str | None:
    return from_header(values, field="header.Idempotency-Key")


@given(st.text(VISIBLE.replace('"', ""), min_size=1, max_size=255))
@example("\\")
@example("a,b;c=d")
def test_the_quoted_and_the_bare_form_are_one_id(text: str) -> None:
    # case C4
    assert read(text) == read(quoted(text)) == text


@given(st.text(PRINTABLE, min_size=1, max_size=255).filter(str.strip))
def test_a_quoted_form_may_hold_every_printable_character(text: str) -> None:
    # case C4
    assert read(quoted(text)) == text


@given(st.text(VISIBLE, min_size=1, max_size=100).filter(str.strip), st.text(" \t"), st.text(" \t"))
def test_white_space_around_a_header_does_not_count(text: str, before: str, after: str) -> None:
    # case C4
    assert read(before + quoted(text) + after) == text


@pytest.mark.parametrize("values", [(), ("",), (" ",), ("\t ",), ('""',), ('" "',), ("", "")])
def test_an_empty_header_is_missing(values: tuple[str, ...]) -> None:
    # case C1
    assert read(*values) is None


@pytest.mark.parametrize(
    "value",
    [
        '"',
        '"abc',
        'abc"',
        'a"b',
        '"a"b',
        '"a""b"',
        '"a" "b"',
        '"a";v=1',
        '"a\\b"',
        '"a\\',
        '"a\\"',
        "é",
        '"é"',
        "Ã©",
        "a\tb",
        '"a\tb"',
        "a\x00b",
        "a\x7fb",
        "\xa0",
    ],
)
def test_what_is_neither_form_is_refused(value: str) -> None:
    # case C4
    # case C5
    with pytest.raises(InvalidLogicalIdError) as raised:
        read(value)
    assert raised.value.field == "header.Idempotency-Key"


@given(st.text(max_size=20))
@example("\udcff")
def test_whatever_comes_is_an_id_missing_or_refused(text: str) -> None:
    # case C5
    try:
        found = read(text)
    except InvalidLogicalIdError:
        return
    assert found is None or (found.strip() and found.isascii() and found.isprintable())


def test_equal_repeats_are_one_and_different_ones_are_refused() -> None:
    # case C3
    assert read("a", "a", "a") == "a"
    for values in [("a", "b"), ("a", "A"), ("a", "")]:
        with pytest.raises(InvalidLogicalIdError, match="repeated with different values"):
            read(*values)
    assert read("a, b") == "a, b"
    assert read("a,a") == "a,a"


def test_the_fields_of_a_query_or_form_follow_the_same_rule() -> None:
    # case C3
    assert from_field_values(["a", "a"], field="query.n") == "a"
    assert from_field_values([], field="query.n") is None
    assert from_field_values(["", " "], field="query.n") is None
    for values in (["a", "b"], ["a", ""], ["a", " a"]):
        with pytest.raises(InvalidLogicalIdError, match=r"query\.n .*repeated with different values"):
            from_field_values(values, field="query.n")
    with pytest.raises(InvalidLogicalIdError):
        from_field_values([object()], field="form.file")


@given(st.text(string.printable, min_size=1, max_size=300))
def test_a_field_is_no_header_and_is_never_unquoted(text: str) -> None:
    try:
        found = from_field_values([text], field="query.n")
    except InvalidLogicalIdError:
        return
    assert found is None or found == text
