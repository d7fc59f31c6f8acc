"""NATS JetStream, through nats-py: a callback for push and pull consumers, and the publisher's stamp.

    @consumer(dedup, Deduplicated(source="body", member="order_id"), dead_letter="dead.orders")
    async def on_order(message: Msg, session: AsyncSession) -> None: ...

    await jetstream.subscribe("orders", "workers", cb=on_order, manual_ack=True)     # push
    for message in await subscription.fetch(1): await on_order(message)              # pull

    await jetstream.publish("orders", payload, headers=stamped(dedup.identities.of(order)))

JetStream delivers a message again while its first delivery is still being handled, if that takes longer than
the consumer's `ack_wait`. Both are one message to it: to acknowledge or terminate the copy would settle the
original, whose work may still fail. So a copy in flight is only ever put off (`nak` with a delay), and a
handler that runs or waits sends heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import positive
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identities import DEDUPLICATION_HEADER, NATS_MESSAGE_ID, nats_headers_for
from fastapi_dedup.messaging.acknowledge import Answer, Judge, OnError, Verdict, telling, unanswerable
from fastapi_dedup.messaging.envelope import Envelope, with_stamp
from fastapi_dedup.messaging.extras import driver

with driver("nats", extra="nats"):
    from nats.aio.msg import Msg
    from nats.js.api import AckPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["consumer", "stamped"]

logger = logging.getLogger("fastapi_dedup")


def consumer(
    dedup: Dedup,
    *policies: Policy,
    endpoint: str | None = None,
    dead_letter: str | None = None,
    on_error: OnError = "requeue",
    pause: timedelta = timedelta(seconds=1),
    heartbeat: timedelta = timedelta(seconds=10),
) -> Callable[[Callable[..., Any]], Callable[[Msg], Awaitable[None]]]:
    """Wrap a handler into a callback that claims, runs, commits and then acknowledges.

    The handler is called with nats-py's message, and with the session and the claim if it has parameters
    annotated as `AsyncSession` and `Claim`. It cannot acknowledge: that is done after COMMIT. Subscribe
    with `manual_ack=True`. The consumer's `ack_policy` must be explicit, as it is by default: others are
    refused at their first message, with a `ConfigurationError`.

    A message that is to come again is put off by the server (`nak` with a delay), and every such delivery
    counts for the consumer's `max_deliver`.

    Args:
        dedup: The runtime.
        *policies: The policies, in the order of their claims. None takes what `Dedup.require` asks.
        endpoint: The name of this consumer in the default scope: the same id at two endpoints is two
            pieces of work. None is stream and consumer, which is right for durable ones; name the
            endpoint of a consumer that NATS gives a new name at every start.
        dead_letter: The subject, of a stream, that messages without a legal id are published to before
            they are terminated. None only terminates them: they stay in their stream, undelivered.
        on_error: What becomes of a message whose handler raised: `"requeue"`, or `"reject"` to the
            dead-letter subject.
        pause: How long a message is put off, on average; while the database is down up to 30 seconds.
            Default one second.
        heartbeat: How often the server is told that a message is still being handled. Default 10
            seconds: a third of JetStream's `ack_wait`. Give a third of yours.

    Raises:
        ConfigurationError: A policy or an option cannot be kept.
    """
    every = positive("heartbeat", heartbeat).total_seconds()

    def decorate(function: Callable[..., Any]) -> Callable[[Msg], Awaitable[None]]:
        judge = Judge(dedup.handler(*policies, endpoint=endpoint)(function), on_error=on_error, pause=pause)
        known: set[tuple[str, str]] = set()

        @wraps(function)
        async def on_message(message: Msg) -> None:
            origin = message.metadata
            envelope = Envelope(
                message.data,
                message.headers or {},
                f"{origin.stream}:{origin.sequence.stream}",
                endpoint or f"{origin.stream}/{origin.consumer}",
                message,
            )
            async with _heartbeats(envelope, every):
                if (origin.stream, origin.consumer) not in known:
                    await _check(message, every)
                    known.add((origin.stream, origin.consumer))
                with unanswerable(message, "ack", "ack_sync", "nak", "term"):
                    verdict = await judge(envelope)
            with telling(envelope):
                await _tell(envelope, verdict, dead_letter)

        return on_message

    return decorate


async def _check(message: Msg, heartbeat: float) -> None:
    """Refuse a consumer whose messages are settled without us, or along with later ones.

    One that delivers again before the first heartbeat is warned of.

    Raises:
        ConfigurationError: Its `ack_policy` is not explicit.
    """
    origin = message.metadata
    stream = message._client.jetstream(domain=origin.domain or None)  # noqa: SLF001 - nothing public knows it
    try:
        config = (await stream.consumer_info(origin.stream, origin.consumer)).config
    except Exception as error:  # noqa: BLE001 - it may not be allowed to ask, and need not be
        logger.debug("could not ask how %s/%s acknowledges: %r", origin.stream, origin.consumer, error)
        return
    if config.ack_policy != AckPolicy.EXPLICIT:  # it comes as text
        msg = (
            f"{origin.stream}/{origin.consumer} does not acknowledge each message by itself (its ack_policy "
            f"is {config.ack_policy}), so one whose work fails, or is in flight elsewhere, would be lost: "
            "make the consumer with ack_policy=AckPolicy.EXPLICIT, which is the default"
        )
        logger.error("a message was not handled: %s", msg)
        raise ConfigurationError(msg)
    if config.ack_wait is not None and config.ack_wait <= heartbeat:
        logger.warning(
            "%s/%s delivers again what it hears nothing of for %s seconds, and a handler's first heartbeat "
            "comes after %s: give consumer(...) a heartbeat= of a third of ack_wait",
            origin.stream,
            origin.consumer,
            config.ack_wait,
            heartbeat,
        )


@asynccontextmanager
async def _heartbeats(envelope: Envelope, every: float) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(every)
            with telling(envelope):
                await envelope.message.in_progress()

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


async def _tell(envelope: Envelope, verdict: Verdict, dead_letter: str | None) -> None:
    message: Msg = envelope.message
    if verdict.answer is Answer.DONE:
        await message.ack()
    elif verdict.answer is Answer.AGAIN or not await _dead_lettered(envelope, verdict.reason, dead_letter):
        await message.nak(verdict.pause)
    else:
        await message.term()


async def _dead_lettered(envelope: Envelope, reason: str, subject: str | None) -> bool:
    """Publish a dead message where it can be found, and tell whether it may be terminated."""
    if subject is None:
        return True
    given = envelope.message.headers or {}
    # What steers JetStream is for the original's publication. Its own message id would even make the
    # dead-letter stream drop the copy; this one makes it drop what a crash before `term` publishes again.
    headers = {
        **{name: value for name, value in given.items() if not name.lower().startswith("nats-")},
        NATS_MESSAGE_ID: f"dead-letter|{envelope.destination}|{envelope.delivery_id}",
        "dead-letter-reason": reason,
        "dead-letter-subject": envelope.message.subject,
        "dead-letter-delivery": str(envelope.delivery_id),
        "dead-letter-endpoint": envelope.destination,
    }
    try:
        # A message knows its connection, and nothing public of it does.
        await envelope.message._client.jetstream().publish(subject, envelope.body, headers=headers)  # noqa: SLF001
    except Exception:
        logger.exception("could not dead-letter %s to %r", envelope.title, subject)
        return False
    return True


def stamped(
    logical_id: object, headers: Mapping[str, str] | None = None, *, native: bool = True
) -> dict[str, str]:
    """Return headers to publish a message with: its logical id in `deduplication-id` and `Nats-Msg-Id`.

    Args:
        logical_id: The id, such as `dedup.identities.of(order)`; None or blank stamps nothing.
        headers: The message's other headers; an id that is among them already is kept, and counts.
        native: Whether JetStream is to drop duplicates too, before any consumer sees them. It tells them
            apart by `Nats-Msg-Id` within one stream, whatever their subjects, for `duplicate_window`.

    Raises:
        InvalidLogicalIdError: It is no legal id, or NATS would change it.
    """
    given = headers or {}
    present = next(
        (value for name, value in given.items() if name.lower() == DEDUPLICATION_HEADER), logical_id
    )
    return with_stamp(given, nats_headers_for(present, native=native))
