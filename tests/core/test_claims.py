"""Digests and windows: pure functions, to the last bit and the last microsecond."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastapi_dedup
from fastapi_dedup.claims import (
    Duplicate,
    InFlight,
    Intent,
    Lease,
    Mismatch,
    digest,
    positive,
    scope_text,
    verdict,
)
from fastapi_dedup.errors import ConfigurationError

ONE, TWO = b"1" * 32, b"2" * 32
NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
TICK = timedelta(microseconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.tuples(st.lists(texts, max_size=3).map(tuple), texts)


@given(names, names)
def test_two_ids_have_one_digest_only_if_they_are_the_same(
    one: tuple[tuple[str, ...], str], two: tuple[tuple[str, ...], str]
) -> None:
    # case F9
    assert (digest(*one) == digest(*two)) == (one == two)
    assert len(digest(*one)) == 32


def test_no_part_of_a_scope_can_reach_into_the_next() -> None:
    splits = [(("ab", "c"), "d"), (("a", "bc"), "d"), (("a", "b"), "cd"), (("abc",), "d"), ((), "abcd")]
    assert len({digest(*split) for split in splits}) == len(splits)
    assert scope_text(("POST", "/orders")) == "POST /orders"


def test_an_id_has_the_same_digest_in_every_process_and_release() -> None:
    # case G8: and changing it would un-claim everything that is claimed
    script = f"""
import sys, types
parent = sys.modules["fastapi_dedup"] = types.ModuleType("fastapi_dedup")
parent.__path__ = [{str(Path(fastapi_dedup.__file__).parent)!r}]
from fastapi_dedup.claims import digest
print(digest(("POST", "/o"), "ab").hex())
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {digest(("POST", "/o"), "ab").hex()}


def test_an_intent_knows_its_key_and_cannot_be_changed() -> None:
    wanted = Intent(("tests",), "news")
    assert wanted.key == digest(("tests",), "news")
    with pytest.raises(AttributeError):
        wanted.logical_id = "other"  # type: ignore[misc]


def answer_to(
    wanted: Intent,
    *,
    now: datetime,
    fingerprint: bytes | None = None,
    leased_until: datetime | None = None,
) -> Duplicate | InFlight | Mismatch | None:
    return verdict(
        wanted,
        claimed_at=NOON,
        expires_at=NOON + HOUR,
        leased_until=leased_until,
        fingerprint=fingerprint,
        now=now,
    )


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (NOON, Duplicate(NOON, NOON + HOUR, timedelta(0))),
        (NOON + HOUR - TICK, Duplicate(NOON, NOON + HOUR, HOUR - TICK)),
        (NOON + HOUR, None),
        (NOON + HOUR + TICK, None),
    ],
)
def test_a_claim_counts_up_to_the_last_tick_of_its_window(now: datetime, expected: Duplicate | None) -> None:
    # case E4
    assert answer_to(Intent(("tests",), "news"), now=now) == expected


@pytest.mark.parametrize(
    ("first", "second", "matches"),
    [(None, None, True), (ONE, None, True), (None, ONE, True), (ONE, ONE, True), (ONE, TWO, False)],
)
def test_payloads_are_compared_where_both_are_known(
    first: bytes | None, second: bytes | None, matches: bool
) -> None:
    # case D3
    wanted = Intent(("tests",), "news", HOUR, second)
    found = answer_to(wanted, now=NOON, fingerprint=first)
    assert isinstance(found, Duplicate if matches else Mismatch)


def test_an_expired_claim_for_another_payload_is_absent() -> None:
    wanted = Intent(("tests",), "news", HOUR, TWO)
    assert answer_to(wanted, now=NOON + HOUR, fingerprint=ONE) is None


def test_a_fingerprint_is_as_wide_as_its_column_and_one_that_is_stays_as_it_is() -> None:
    intents = [Intent(("tests",), "news", fingerprint=each) for each in (b"", b"1", ONE, ONE + b"1")]
    brought = [each.fingerprint for each in intents]
    assert [len(each or b"") for each in brought] == [32] * 4
    assert len({*brought}) == 4
    assert brought[2] == ONE


@pytest.mark.parametrize(
    ("now", "abandoned"),
    [(NOON + TICK, False), (NOON + MINUTE - TICK, False), (NOON + MINUTE, True), (NOON + HOUR - TICK, True)],
)
def test_a_claim_whose_work_is_not_done_is_in_flight_and_abandoned_when_its_lease_is_over(
    now: datetime, abandoned: bool
) -> None:
    found = answer_to(Intent(("tests",), "news"), now=now, leased_until=NOON + MINUTE)
    assert found == InFlight(abandoned=abandoned)


def test_another_payload_is_a_mismatch_before_the_work_is_done_too() -> None:
    wanted = Intent(("tests",), "news", HOUR, b"2")
    found = answer_to(wanted, now=NOON, fingerprint=b"1", leased_until=NOON + MINUTE)
    assert found == Mismatch()


@pytest.mark.parametrize(
    ("lease", "term"),
    [
        (None, HOUR),
        (Lease(MINUTE), MINUTE),
        (Lease(MINUTE, "block"), HOUR),
        (Lease(2 * HOUR, "block"), 2 * HOUR),
    ],
)
def test_a_claim_counts_at_first_for_as_long_as_its_owner_may_stay_silent(
    lease: Lease | None, term: timedelta
) -> None:
    assert Intent(("tests",), "news", HOUR, lease=lease).term == term


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(seconds=-1), 60, 60.0, "60", None, True])
def test_a_window_that_is_no_duration_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        positive("window", wrong)  # type: ignore[arg-type]


def test_a_window_is_returned_as_it_is() -> None:
    assert positive("window", TICK) is TICK
