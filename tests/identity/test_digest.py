"""The key: a digest that no two (scope, id) pairs share, and what a committed claim answers."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastapi_dedup import ConfigurationError
from fastapi_dedup.claims import Duplicate, Intent, Mismatch, digest, positive, scope_text, verdict

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCOPES = st.lists(TEXTS, max_size=3).map(tuple)


@given(SCOPES, TEXTS, SCOPES, TEXTS)
@example(("a", "b"), "c", ("a",), "bc")
@example(("ab",), "c", ("a",), "bc")
@example((), "a", ("",), "a")
@example(("a",), "", ("a", ""), "")
def test_keys_are_equal_where_scope_and_id_are_and_nowhere_else(
    scope: tuple[str, ...], logical_id: str, other_scope: tuple[str, ...], other_id: str
) -> None:
    same = (scope, logical_id) == (other_scope, other_id)
    assert (digest(scope, logical_id) == digest(other_scope, other_id)) is same


@given(st.text("ab", max_size=8), st.data())
def test_no_split_of_one_text_into_scope_and_id_meets_another(text: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(text)))
    second = data.draw(st.integers(0, len(text)))
    keys = {digest((text[:at],), text[at:]) for at in (first, second)}
    assert len(keys) == len({first, second})


def test_a_key_has_32_bytes_and_is_the_same_in_every_process() -> None:
    # case G8
    key = digest(("POST", "/orders"), "é")
    assert len(key) == 32
    code = "from fastapi_dedup.claims import digest; print(digest(('POST', '/orders'), '\\xe9').hex())"
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == key.hex()


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "A"), ("a", "a "), ("é", "e\u0301"), ("ß", "ss"), ("ｱ", "ア"), ("1", "①")],
)
def test_nothing_is_folded(first: str, second: str) -> None:
    # case F9
    assert digest(("s",), first) != digest(("s",), second)


def test_an_intent_knows_its_key() -> None:
    intent = Intent(("POST", "/orders"), "k")
    assert intent.key == digest(("POST", "/orders"), "k")
    assert intent == Intent(("POST", "/orders"), "k")
    assert intent != Intent(("POST", "/orders"), "k", fingerprint=b"x")
    assert scope_text(intent.scope) == "POST /orders"


@pytest.mark.parametrize("value", [1, 1.5, "1", None])
def test_a_duration_is_a_timedelta(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"window must be a timedelta, not .*timedelta\(seconds="):
        positive("window", value)


@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1)])
def test_a_duration_is_longer_than_zero(value: timedelta) -> None:
    with pytest.raises(ConfigurationError, match="window must be longer than zero"):
        positive("window", value)
    assert positive("window", timedelta(microseconds=1)) == timedelta(microseconds=1)


CLAIMED = datetime(2026, 11, 30, 3, tzinfo=UTC)
EXPIRES = CLAIMED + timedelta(hours=1)


def answer(now: datetime, *, held: bytes | None = None, brings: bytes | None = None) -> Any:
    intent = Intent(("s",), "k", fingerprint=brings)
    return verdict(
        intent, claimed_at=CLAIMED, expires_at=EXPIRES, leased_until=None, fingerprint=held, now=now
    )


def test_inside_the_window_a_claim_answers_and_from_its_end_on_it_counts_as_absent() -> None:
    # case E4
    assert answer(CLAIMED) == Duplicate(CLAIMED, EXPIRES, timedelta(0))
    last = EXPIRES - timedelta(microseconds=1)
    assert answer(last) == Duplicate(CLAIMED, EXPIRES, last - CLAIMED)
    assert answer(EXPIRES) is None
    assert answer(EXPIRES + timedelta(days=1)) is None
    # A clock that has stepped back makes a claim younger, never absent.
    assert isinstance(answer(CLAIMED - timedelta(minutes=1)), Duplicate)


def test_another_payload_is_told_only_where_both_are_known() -> None:
    # case D3
    one, other = b"a" * 32, b"b" * 32
    assert answer(CLAIMED, held=one, brings=other) == Mismatch()
    for held, brings in [(one, one), (None, other), (one, None), (None, None)]:
        assert isinstance(answer(CLAIMED, held=held, brings=brings), Duplicate)
    assert answer(EXPIRES, held=one, brings=other) is None
