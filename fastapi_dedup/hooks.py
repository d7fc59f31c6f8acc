"""Hooks: every event, told to whoever asked for it.

A hook is any callable that takes an `Event`. It runs inline, so it must be quick and must not block;
what it raises is logged and changes nothing.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import timedelta

__all__ = ["Event", "EventKind", "GuardEvent", "GuardSnapshot", "Hook", "tell"]

logger = logging.getLogger("fastapi_dedup")


class EventKind(enum.Enum):
    """What happened."""

    CLAIMED = "claimed"
    COMMITTED = "committed"
    RELEASED = "released"
    DUPLICATE = "duplicate"
    REPEAT = "repeat"
    IN_FLIGHT = "in_flight"
    MISMATCH = "mismatch"
    MISSING = "missing"
    INVALID = "invalid"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"
    REAPED = "reaped"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a logical id, or to the table of claims.

    Attributes:
        kind: What happened.
        logical_id: The id; "" where there is none (missing ids, reaped batches).
        scope: The scope in its legible form; "" like `logical_id`.
        age: How old the first claim is, for duplicates whose claim can be seen.
        count: How many claims were reaped.
    """

    kind: EventKind
    logical_id: str = ""
    scope: str = ""
    age: timedelta | None = None
    count: int = 0


class GuardEvent(enum.Enum):
    """What a guard (`fastapi_dedup.guard`) counts, and tells its own `on_event`.

    Attributes:
        SUPPRESSED: An id was refused, in flight or processed.
        ROTATED: A generation was dropped, for whatever reason.
        ROTATED_EARLY: It was dropped because of the ceiling, before its time; told beside `ROTATED`.
        UNTRACKED: In-flight ids fill the ceiling, so an id ran, or was completed, unknown to the guard.
    """

    SUPPRESSED = "suppressed"
    ROTATED = "rotated"
    ROTATED_EARLY = "rotated_early"
    UNTRACKED = "untracked"


@dataclass(frozen=True, slots=True)
class GuardSnapshot:
    """The guard's counters since it was made, and what it holds at this moment.

    Attributes:
        suppressed: How many ids were refused.
        rotated: How many generations were dropped, early ones included.
        rotated_early: How many of them the ceiling forced out before their time.
        untracked: How many ids ran or were completed unknown to the guard, its ceiling full of in-flight ids.
        processed: How many processed ids are held now.
        in_flight: How many in-flight ids are held now.
    """

    suppressed: int
    rotated: int
    rotated_early: int
    untracked: int
    processed: int
    in_flight: int

    @property
    def tracked(self) -> int:
        """How many ids are held now, which is never more than `max_tracked`."""
        return self.processed + self.in_flight


class Hook(Protocol):
    """Anything that can be called with an event."""

    def __call__(self, event: Event, /) -> object:
        """Take note of the event."""


def tell(hooks: Iterable[Hook], event: Event) -> None:
    """Tell every hook; one that raises is logged and keeps nobody else from hearing."""
    for hook in hooks:
        try:
            hook(event)
        except Exception:
            logger.exception("hook %r failed on %s", hook, event.kind.value)
