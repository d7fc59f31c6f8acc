"""What is a legal id, what is missing, and what is neither."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import string
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastapi_dedup import InvalidLogicalIdError
from fastapi_dedup.identity import MAX_LENGTH, legal


class Colour(enum.Enum):
    RED = "red"
    NONE = ""
    ODD = 1.5


class Level(enum.IntEnum):
    HIGH = 3


class Name(enum.StrEnum):
    ANN = "ann"


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "".join(self)


@pytest.mark.parametrize(
    "value", [None, "", " ", "   ", "\t", "\n", " \r\n ", "\u00a0", "\u2003", Colour.NONE]
)
def test_nothing_and_blanks_are_missing(value: object) -> None:
    # case C1
    assert legal(value, field="f") is None


@pytest.mark.parametrize("value", ["None", "null", "0", "false", "[]", "undefined", "nan"])
def test_words_for_nothing_are_ids(value: str) -> None:
    # case C1
    assert legal(value, field="f") == value


@pytest.mark.parametrize(
    ("value", "logical_id"),
    [
        ("abc", "abc"),
        (" abc ", " abc "),
        (0, "0"),
        (-7, "-7"),
        (10**30, "1" + "0" * 30),
        (uuid.UUID("5f0c8a1e-7a3d-4c2b-9d1e-0123456789ab"), "5f0c8a1e-7a3d-4c2b-9d1e-0123456789ab"),
        (Colour.RED, "red"),
        (Level.HIGH, "3"),
        (Name.ANN, "ann"),
        (dt.date(2026, 11, 30), "2026-11-30"),
        (dt.datetime(2026, 11, 30, 3, tzinfo=dt.UTC), "2026-11-30T03:00:00+00:00"),
        (decimal.Decimal("1.50"), "1.50"),
        (Text("text"), "text"),
    ],
    ids=repr,
)
def test_an_id_is_written_as_people_write_it(value: object, logical_id: str) -> None:
    written = legal(value, field="f")
    assert written == logical_id
    assert type(written) is str


@pytest.mark.parametrize(
    "value",
    [True, False, 1.5, 0.0, [], ["a"], {}, {"a": 1}, ("a",), b"abc", object(), Colour.ODD, dt.time(3), 1j],
)
def test_what_has_no_one_text_is_no_id(value: object) -> None:
    with pytest.raises(InvalidLogicalIdError) as raised:
        legal(value, field="body.sku")
    assert raised.value.field == "body.sku"
    assert "cannot be an id" in raised.value.reason


def test_an_id_is_as_long_as_is_allowed_and_no_longer() -> None:
    # case C7
    assert legal("x" * MAX_LENGTH, field="f") == "x" * 255
    assert legal("🦊" * MAX_LENGTH, field="f") == "🦊" * 255
    with pytest.raises(InvalidLogicalIdError, match="it has 256 characters, and 255 are allowed"):
        legal("x" * 256, field="f")
    with pytest.raises(InvalidLogicalIdError):
        legal(10**255, field="f")


@pytest.mark.parametrize("digits", [256, 307, 308, 5000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_is_as_long_as_text_may_be(digits: int, sign: int) -> None:
    assert legal(10**254, field="f") == str(10**254)
    with pytest.raises(InvalidLogicalIdError, match="255"):
        legal(sign * 10 ** (digits - 1), field="f")


def test_an_error_never_shows_the_value() -> None:
    for value in ("secret" * 100, "secret\x00", ["secret"]):
        with pytest.raises(InvalidLogicalIdError) as raised:
            legal(value, field="f")
        assert "secret" not in str(raised.value)


@given(st.text(min_size=1).filter(str.strip), st.characters(categories=["Cs", "Cc"]), st.text())
def test_no_id_holds_a_surrogate_or_a_control_character(before: str, bad: str, after: str) -> None:
    # case C5
    with pytest.raises(InvalidLogicalIdError):
        legal((before + bad + after)[:400], field="f") if len(before) < 400 else legal(
            bad + before, field="f"
        )


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=255).filter(str.strip))
def test_every_other_text_is_an_id_and_nothing_is_folded(text: str) -> None:
    # case C5
    # case F9
    written = legal(text, field="f")
    assert written == text
    assert written.encode().decode() == text


@given(st.text(string.whitespace + "\u00a0\u2028\u3000"))
def test_every_blank_is_missing(text: str) -> None:
    # case C1
    assert legal(text, field="f") is None


@given(
    st.integers()
    | st.uuids()
    | st.dates()
    | st.datetimes()
    | st.decimals(allow_nan=False, allow_infinity=False)
)
def test_equal_values_have_equal_ids_and_others_have_others(value: Any) -> None:
    text = str(value) if not isinstance(value, dt.date) else value.isoformat()
    assert len(text) > 255 or legal(value, field="f") == text
