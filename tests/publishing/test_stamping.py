"""How an id travels with a message: pure rules, one per broker that has its own."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastapi_dedup.errors import InvalidLogicalIdError
from fastapi_dedup.identities import (
    headers_for,
    nats_headers_for,
    sqs_arguments_for,
    sqs_deduplication_id,
)

STAMPS = [headers_for, nats_headers_for, sqs_arguments_for]


def test_the_header_is_the_same_on_every_broker() -> None:
    assert headers_for("nightly|2026-11-30") == {"deduplication-id": "nightly|2026-11-30"}


@pytest.mark.parametrize("stamp", STAMPS)
@pytest.mark.parametrize("missing", [None, "", " "])
def test_a_message_without_an_id_is_not_stamped(stamp: Any, missing: str | None) -> None:
    assert stamp(missing) == {}


@pytest.mark.parametrize("stamp", STAMPS)
@pytest.mark.parametrize("illegal", ["x" * 256, "a\r\nInjected: b", "\x00", "\ud800", True])
def test_an_illegal_id_is_not_stamped_but_refused(stamp: Any, illegal: object) -> None:
    with pytest.raises(InvalidLogicalIdError):
        stamp(illegal)


@pytest.mark.parametrize("stamp", STAMPS)
def test_every_stamp_is_a_new_one(stamp: Any) -> None:
    first = stamp("a")
    first["more"] = "of the caller's"

    assert "more" not in stamp("a")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=255).filter(str.strip))
def test_an_id_survives_the_round_trip_through_headers(logical_id: str) -> None:
    stored = json.loads(json.dumps(headers_for(logical_id)))

    assert stored["deduplication-id"] == logical_id


def test_two_publishes_of_one_id_are_two_rows_of_an_outbox() -> None:
    # The logical id is no identity of the message: an outbox keeps an id of its own for each.
    outbox = sqlite3.connect(":memory:")
    outbox.execute("create table outbox (message_id text primary key, headers text not null)")
    for _ in range(2):
        row = (str(uuid.uuid4()), json.dumps(headers_for("nightly")))
        outbox.execute("insert into outbox values (?, ?)", row)
    stored = [json.loads(headers) for (headers,) in outbox.execute("select headers from outbox")]
    outbox.close()

    assert stored == [{"deduplication-id": "nightly"}] * 2


# NATS


def test_jetstream_is_told_too_unless_it_is_not_to_be() -> None:
    assert nats_headers_for("a") == {"deduplication-id": "a", "Nats-Msg-Id": "a"}
    assert nats_headers_for("a", native=False) == {"deduplication-id": "a"}


@pytest.mark.parametrize("blank", [" a", "a ", "a\u3000"])
def test_blanks_that_nats_would_cut_off_are_refused(blank: str) -> None:
    with pytest.raises(InvalidLogicalIdError, match="NATS cuts blanks off"):
        nats_headers_for(blank)
    assert headers_for(blank) == {"deduplication-id": blank}


# SQS

EVERY_LEGAL_CHARACTER = "".join(map(chr, range(0x21, 0x7F)))


@pytest.mark.parametrize(
    "legal", ["a", "x" * 128, EVERY_LEGAL_CHARACTER, "nightly|2026-11-30T03:00:00+00:00"]
)
def test_sqs_takes_short_visible_ascii_as_it_is(legal: str) -> None:
    assert sqs_deduplication_id(legal) == legal


@pytest.mark.parametrize("too_much", ["x" * 129, "x" * 255, "a b", "é", "a\u00a0", "注文"])
def test_anything_else_is_a_digest_for_sqs(too_much: str) -> None:
    assert sqs_deduplication_id(too_much) == hashlib.sha256(too_much.encode()).hexdigest()


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=255))
def test_what_sqs_gets_is_always_legal_there(logical_id: str) -> None:
    assert re.fullmatch(
        r"[a-zA-Z0-9!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]{1,128}", sqs_deduplication_id(logical_id)
    )


def test_sqs_gets_the_id_as_an_attribute_and_as_its_own_field() -> None:
    long = "x" * 200
    attributes = {"deduplication-id": {"DataType": "String", "StringValue": long}}

    assert sqs_arguments_for(long, native=False) == {"MessageAttributes": attributes}
    assert sqs_arguments_for(long) == {
        "MessageAttributes": attributes,
        "MessageDeduplicationId": hashlib.sha256(long.encode()).hexdigest(),
    }


def test_a_pubsub_attribute_takes_the_longest_id() -> None:
    (value,) = headers_for("😀" * 255).values()

    assert len(value.encode()) <= 1024
