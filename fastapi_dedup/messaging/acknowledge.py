"""From what came of a message to what its broker is told: one table for every broker library.

    what came of it                                      the broker is told
    HANDLED, DUPLICATE                                   DONE: never deliver it again
    IN_FLIGHT                                            AGAIN, after a pause: the work may still fail
    no legal id, or an id that was used for another      DEAD: a retry changes nothing
    payload
    the store is down, or its table is missing           AGAIN, after a pause that grows with the outage
    the handler raised                                   AGAIN after a pause, or DEAD: `on_error` says
    cancelled                                            nothing: the broker delivers it again by itself

Pauses are jittered, so that copies which came together do not come back together, and so that no message
goes round as fast as the broker can.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, get_args

from fastapi_dedup.claims import positive
from fastapi_dedup.errors import (
    ClaimInFlightError,
    ConfigurationError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.messaging.handler import Result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from fastapi_dedup.messaging.envelope import Envelope
    from fastapi_dedup.messaging.handler import MessageHandler

__all__ = ["Answer", "Judge", "OnError", "Pauses", "Verdict", "telling", "unanswerable"]

logger = logging.getLogger("fastapi_dedup")

OnError: TypeAlias = Literal["requeue", "reject"]

_LONGEST_PAUSE = 30.0


class Answer(enum.Enum):
    """What a broker is told about a message."""

    DONE = "done"
    AGAIN = "again"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a broker is told about a message, and what goes with it.

    Attributes:
        answer: What it is told.
        pause: After how many seconds the message is to come again, if it is.
        reason: Why it is dead; "" for the others.
    """

    answer: Answer
    pause: float
    reason: str = ""


_ANSWERS = {
    Result.HANDLED: Answer.DONE,
    Result.DUPLICATE: Answer.DONE,
    Result.IN_FLIGHT: Answer.AGAIN,
}


class Pauses:
    """How long messages rest before they come again. One for each consumer.

    Args:
        pause: How long, on average, while nothing is out of order.

    Raises:
        ConfigurationError: That is no time.
    """

    def __init__(self, pause: timedelta) -> None:
        self._pause = positive("pause", pause).total_seconds()
        self._down_since: float | None = None

    def usual(self) -> float:
        """Return for how many seconds a message rests where the database has answered: its outage is over."""
        self._down_since = None
        return _jittered(self._pause)

    def outage(self) -> float:
        """Return as many seconds again as the outage has lasted: pauses double, however many messages ask.

        Brokers count deliveries, and give up: a limit that outlasts an outage must not be used up by asking.
        """
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
        return _jittered(min(max(self._pause, now - self._down_since), _LONGEST_PAUSE))


class Judge:
    """Handles messages, and says what their broker is to be told. One for each consumer.

    Args:
        handler: The wrapped handler.
        on_error: What becomes of a message whose handler raised: `"requeue"` or `"reject"`.
        pause: How long a message rests, on average, before it comes again.

    Raises:
        ConfigurationError: An option cannot be kept.
    """

    def __init__(self, handler: MessageHandler, *, on_error: OnError, pause: timedelta) -> None:
        if on_error not in get_args(OnError):
            msg = f"on_error must be 'requeue' or 'reject', not {on_error!r}"
            raise ConfigurationError(msg)
        self._handler = handler
        self._on_error = Answer.AGAIN if on_error == "requeue" else Answer.DEAD
        self._pauses = Pauses(pause)

    async def __call__(self, envelope: Envelope) -> Verdict:
        """Handle a message. What goes wrong is logged, and part of the verdict; only cancellation raises."""
        title = envelope.title
        try:
            result = await self._handler(envelope)
        except (StoreUnavailableError, ConfigurationError) as error:
            level = logging.WARNING if isinstance(error, StoreUnavailableError) else logging.ERROR
            logger.log(level, "%s was not handled and comes again: %s", title, error)
            return Verdict(Answer.AGAIN, self._pauses.outage())
        except (MissingLogicalIdError, InvalidLogicalIdError, FingerprintMismatchError) as error:
            logger.warning("dead-lettered %s: %s", title, error)
            verdict = self._verdict(Answer.DEAD, str(error))
        except ClaimInFlightError:
            verdict = self._verdict(Answer.AGAIN)
        except Exception as error:
            logger.exception("the handler failed on %s: %s", title, self._on_error.value)
            verdict = self._verdict(self._on_error, f"the handler raised {type(error).__name__}")
        else:
            verdict = self._verdict(_ANSWERS[result])
        return verdict

    def _verdict(self, answer: Answer, reason: str = "") -> Verdict:
        return Verdict(answer, self._pauses.usual(), reason)


def _jittered(pause: float) -> float:
    return pause * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret


@contextmanager
def unanswerable(message: Any, *answers: str) -> Iterator[None]:
    """Keep a handler from answering its message's broker by itself, for that is done after COMMIT.

    An acknowledgement before the COMMIT loses the message if the work fails; and a message that was given
    back by a handler that then returns would be called a duplicate when it comes again. A message does not
    tell afterwards which of the two it was, so neither is let through.

    Args:
        message: The broker library's message.
        *answers: The names of the methods that tell the broker.
    """
    kind: Any = type(message)
    message.__class__ = _unanswerable(kind, answers)
    try:
        yield
    finally:
        message.__class__ = kind


@cache
def _unanswerable(kind: Any, answers: tuple[str, ...]) -> type:
    async def refuse(*_: object, **__: object) -> NoReturn:
        msg = (
            "a handler does not acknowledge its message: consumer(...) does, after COMMIT. To have it again, "
            "raise an error; on_error says whether it is requeued or dead-lettered"
        )
        raise ConfigurationError(msg)

    return type(kind.__name__, (kind,), {"__slots__": (), **dict.fromkeys(answers, refuse)})


@contextmanager
def telling(envelope: Envelope) -> Iterator[None]:
    """Log it if the broker cannot be told: it delivers the message again, and a done one is recognised."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each library has its own errors for a lost connection
        logger.warning(
            "could not tell the broker about %s, which it will therefore deliver again: %r",
            envelope.title,
            error,
        )
