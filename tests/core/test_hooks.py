"""Hooks hear everything, and break nothing."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from fastapi_dedup.hooks import Event, EventKind, tell

EVENT = Event(EventKind.DUPLICATE, "news", "tests", timedelta(minutes=3))


def test_every_hook_is_told_in_order() -> None:
    told: list[tuple[str, Event]] = []
    tell([lambda event: told.append(("first", event)), lambda event: told.append(("second", event))], EVENT)
    assert told == [("first", EVENT), ("second", EVENT)]


def test_a_hook_that_raises_is_logged_and_the_others_still_hear(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []

    def broken(_: Event) -> None:
        raise ZeroDivisionError

    tell([broken, told.append], EVENT)
    assert told == [EVENT]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "broken" in record.getMessage()
    assert "duplicate" in record.getMessage()
    assert record.exc_info is not None


def test_what_asks_the_program_to_end_is_no_hooks_failure() -> None:
    def interrupted(_: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tell([interrupted], EVENT)


def test_an_event_cannot_be_changed_by_who_hears_it() -> None:
    with pytest.raises(AttributeError):
        EVENT.logical_id = "other"  # type: ignore[misc]
