"""The answer to a refusal: a pure function of the error."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastapi_dedup import errors
from fastapi_dedup.http.problems import KINDS, answer_to

CLAIMED = datetime(2026, 11, 30, 3, tzinfo=UTC)


def duplicate(logical_id: str = "k") -> errors.DuplicateError:
    return errors.DuplicateError(
        logical_id, "s", claimed_at=CLAIMED, expires_at=CLAIMED + timedelta(1), age=timedelta(minutes=1)
    )


ERRORS: list[tuple[errors.DedupError, int, str]] = [
    (errors.MissingLogicalIdError("header.K"), 400, "missing-logical-id"),
    (errors.InvalidLogicalIdError("header.K", "why"), 400, "invalid-logical-id"),
    (duplicate(), 409, "duplicate"),
    (errors.ClaimInFlightError("k", "s"), 409, "in-flight"),
    (errors.PayloadTooLargeError(7), 413, "payload-too-large"),
    (errors.FingerprintMismatchError("k", "s"), 422, "fingerprint-mismatch"),
    (errors.StoreUnavailableError("down"), 503, "store-unavailable"),
]


@pytest.mark.parametrize(("error", "status", "slug"), ERRORS, ids=[slug for *_, slug in ERRORS])
def test_every_refusal_is_a_problem_with_a_stable_type(
    error: errors.DedupError, status: int, slug: str
) -> None:
    answer = answer_to(error)
    assert answer is not None
    headers = dict(answer.headers)
    assert (answer.status, headers[b"content-type"]) == (status, b"application/problem+json")
    assert headers[b"content-length"] == str(len(answer.body)).encode()
    document = json.loads(answer.body)
    assert document["type"] == f"https://fastapi-dedup.readthedocs.io/en/stable/reference/problems/#{slug}"
    assert document["status"] == status
    assert document["title"] == KINDS[type(error)].title
    assert document["detail"]
    assert (b"retry-after" in headers) is (slug in {"in-flight", "store-unavailable"})
    assert all(name == name.lower() for name in headers)


def test_what_is_the_servers_own_fault_is_no_answer_to_the_client() -> None:
    assert answer_to(errors.ConfigurationError("secret set-up")) is None
    assert answer_to(errors.DedupError("something new")) is None


def test_a_subclass_of_a_refusal_is_that_refusal() -> None:
    # An app may refine our errors, from a callable source say.
    class TooOldError(errors.InvalidLogicalIdError):
        pass

    answer = answer_to(TooOldError("header.K", "too old"))
    assert answer is not None
    assert answer.status == 400


def test_particulars_name_the_field_or_the_id() -> None:
    documents = {slug: json.loads(getattr(answer_to(error), "body", b"{}")) for error, _, slug in ERRORS[:3]}
    assert documents["missing-logical-id"]["field"] == "header.K"
    assert documents["invalid-logical-id"]["field"] == "header.K"
    assert documents["duplicate"]["logical_id"] == "k"
    assert documents["duplicate"]["claimed_at"] == "2026-11-30T03:00:00+00:00"


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_bodiless_status_has_neither_body_nor_type(status: int) -> None:
    answer = answer_to(duplicate(), duplicate_status=status)
    assert answer is not None
    assert (answer.status, answer.body) == (status, b"")
    assert b"content-type" not in dict(answer.headers)


@given(st.integers(200, 599), st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5))
def test_any_status_of_a_duplicate_says_that_it_was_one(status: int, logical_id: str) -> None:
    error = duplicate(logical_id)
    answer = answer_to(error, duplicate_status=status)
    assert answer is not None
    assert answer.status == status
    if status in {204, 205, 304}:
        return
    document = json.loads(answer.body)
    assert document["logical_id"] == logical_id
    if status < 400:
        assert document["duplicate"] is True
        assert dict(answer.headers)[b"content-type"] == b"application/json"
    else:
        assert document["type"].endswith("#duplicate")
        assert document["status"] == status


@pytest.mark.parametrize("error", [error for error, _, slug in ERRORS if slug != "duplicate"], ids=str)
def test_the_status_of_duplicates_is_for_duplicates_alone(error: errors.DedupError) -> None:
    assert answer_to(error, duplicate_status=200) == answer_to(error)


def test_every_kind_has_a_slug_of_its_own() -> None:
    assert len({kind.slug for kind in KINDS.values()}) == len(KINDS)
    refusals = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.DedupError)
    }
    not_told = {errors.DedupError, errors.ConfigurationError, errors._RefusalError}
    assert {each.__name__ for each in refusals - not_told - {*KINDS}} <= {"ClaimLostError"}
