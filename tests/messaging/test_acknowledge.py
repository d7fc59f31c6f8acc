"""From what came of a message to what its broker is told: the whole table, without a broker."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from fastapi_dedup import (
    ClaimInFlightError,
    ConfigurationError,
    Dedup,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.messaging import acknowledge
from fastapi_dedup.messaging.acknowledge import Answer, Judge, OnError, telling
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.handler import MessageHandler, Result
from fastapi_dedup.messaging.nats import consumer

SECOND = timedelta(seconds=1)
ENVELOPE = Envelope(b"", delivery_id="m1", destination="orders")


class Handling(MessageHandler):
    """Stands for a wrapped handler of which this or that came."""

    def __init__(self, outcome: Result | BaseException) -> None:
        self.outcome = outcome

    async def __call__(self, message: Any, *args: Any, **kwargs: Any) -> Result:  # noqa: ARG002 - the outcome is set
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def judge(outcome: Result | BaseException, on_error: OnError = "requeue", pause: timedelta = SECOND) -> Judge:
    return Judge(Handling(outcome), on_error=on_error, pause=pause)


@pytest.mark.parametrize(
    ("outcome", "answers"),
    [
        (Result.HANDLED, ("done", "done")),
        (Result.DUPLICATE, ("done", "done")),
        (Result.IN_FLIGHT, ("again", "again")),
        (ClaimInFlightError("1", "orders"), ("again", "again")),
        (MissingLogicalIdError("header.deduplication-id"), ("dead", "dead")),
        (InvalidLogicalIdError("body.sku", "it is a list"), ("dead", "dead")),
        (FingerprintMismatchError("1", "orders"), ("dead", "dead")),
        (StoreUnavailableError("no route"), ("again", "again")),
        (ConfigurationError("no table"), ("again", "again")),
        (ValueError("sold out"), ("again", "dead")),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
async def test_every_outcome_has_its_answer(
    outcome: Result | BaseException, answers: tuple[str, str]
) -> None:
    requeued = await judge(outcome, "requeue")(ENVELOPE)
    rejected = await judge(outcome, "reject")(ENVELOPE)
    assert (requeued.answer.value, rejected.answer.value) == answers


async def test_a_dead_letter_tells_why_without_telling_what_was_in_it() -> None:
    invalid = await judge(InvalidLogicalIdError("body.sku", "it is a list"))(ENVELOPE)
    assert invalid.reason == "body.sku is not a legal logical id: it is a list"
    failed = await judge(ValueError("card 4929 0000 refused"), "reject")(ENVELOPE)
    assert failed.reason == "the handler raised ValueError"


async def test_a_cancelled_handler_is_no_outcome() -> None:
    with pytest.raises(asyncio.CancelledError):
        await judge(asyncio.CancelledError())(ENVELOPE)


@pytest.mark.parametrize(
    ("outcome", "level", "traceback"),
    [
        (MissingLogicalIdError("header.deduplication-id"), logging.WARNING, False),
        (StoreUnavailableError("no route"), logging.WARNING, False),
        (ConfigurationError("no table"), logging.ERROR, False),
        (ValueError("sold out"), logging.ERROR, True),
    ],
    ids=["poison", "store down", "configuration", "failure"],
)
async def test_what_goes_wrong_is_logged_with_the_delivery_and_its_place(
    outcome: Exception, level: int, traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await judge(outcome)(ENVELOPE)
    (told,) = caplog.records
    assert (told.levelno, bool(told.exc_info)) == (level, traceback)
    assert "message 'm1' of orders" in told.message


async def test_a_message_that_its_broker_does_not_name_is_logged_with_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await judge(InvalidLogicalIdError("body", "it is not JSON"))(Envelope(b"secret", destination="orders"))
    assert "dead-lettered a message of orders: body" in caplog.text
    assert "secret" not in caplog.text


async def test_pauses_are_jittered() -> None:
    pauses = {(await judge(Result.IN_FLIGHT)(ENVELOPE)).pause for _ in range(50)}
    assert len(pauses) == 50
    assert all(0.5 <= pause <= 1.5 for pause in pauses)


async def test_pauses_grow_with_an_outage_up_to_a_limit_and_begin_anew_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("fastapi_dedup.messaging.acknowledge.time", clock)
    monkeypatch.setattr(acknowledge, "_jittered", lambda pause: pause)
    down = StoreUnavailableError("no route")
    handling = Handling(down)
    asked = Judge(handling, on_error="requeue", pause=SECOND)

    async def pause_after(seconds: float) -> float:
        nonlocal now
        now += seconds
        return (await asked(ENVELOPE)).pause

    assert [await pause_after(0) for _ in range(10)] == [1] * 10  # ten messages at once are one outage
    assert [await pause_after(s) for s in (1, 1, 2, 4, 8, 16, 1000)] == [1, 2, 4, 8, 16, 30, 30]
    handling.outcome = Result.IN_FLIGHT
    assert await pause_after(5) == 1
    handling.outcome = down
    assert await pause_after(5) == 1


def test_a_broker_that_cannot_be_told_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with telling(ENVELOPE):
        raise ConnectionResetError
    assert "of orders" in caplog.text
    with pytest.raises(asyncio.CancelledError), telling(ENVELOPE):
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"on_error": "retry"}, "on_error"),
        ({"pause": timedelta(0)}, "pause"),
        ({"pause": 1.0}, "pause"),
        ({"heartbeat": timedelta(0)}, "heartbeat"),
    ],
)
def test_an_option_that_cannot_be_kept_is_refused_where_it_is_written(
    options: dict[str, Any], named: str
) -> None:
    async def on_order(message: object) -> None: ...

    with pytest.raises(ConfigurationError, match=named):
        consumer(Dedup("sqlite+aiosqlite:///unused.db"), **options)(on_order)


def test_the_table_has_an_answer_for_every_result() -> None:
    assert set(acknowledge._ANSWERS) == set(Result)
    assert {answer.value for answer in Answer} == {"done", "again", "dead"}
