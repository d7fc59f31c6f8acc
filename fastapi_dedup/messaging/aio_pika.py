"""RabbitMQ, through aio-pika: a callback for `queue.consume`, and the publisher's stamp.

On the consumer's side, and on the publisher's:

    @consumer(dedup, Deduplicated(source="body", member="order_id"), queue="orders")
    async def on_order(message: AbstractIncomingMessage, session: AsyncSession) -> None: ...

    await queue.consume(on_order)

    await exchange.publish(stamped(Message(body), dedup.identities.of(order)), routing_key="orders")
"""

from __future__ import annotations

import asyncio
from copy import copy
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identities import headers_for
from fastapi_dedup.messaging.acknowledge import Answer, Judge, OnError, telling, unanswerable
from fastapi_dedup.messaging.envelope import Envelope, with_stamp
from fastapi_dedup.messaging.extras import driver

with driver("aio_pika", extra="aio-pika"):
    from aio_pika import Message
    from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["consumer", "stamped"]


def consumer(
    dedup: Dedup,
    *policies: Policy,
    queue: str | AbstractQueue,
    on_error: OnError = "requeue",
    pause: timedelta = timedelta(seconds=0.5),
) -> Callable[[Callable[..., Any]], Callable[[AbstractIncomingMessage], Awaitable[None]]]:
    """Wrap a handler into a callback that claims, runs, commits and then acknowledges.

    The handler is called with aio-pika's message, and with the session and the claim if it has parameters
    annotated as `AsyncSession` and `Claim`. It cannot acknowledge: that is done after COMMIT.

    A message without a legal id is rejected and not requeued: RabbitMQ takes it to the queue's dead-letter
    exchange, and drops it where the queue has none.

    A message that is to come again is requeued after a pause, during which it takes one of the places
    of `prefetch_count`; the callback itself has returned by then.

    Args:
        dedup: The runtime.
        *policies: The policies, in the order of their claims. None takes what `Dedup.require` asks.
        queue: The queue that is consumed. Its name is part of the default scope: the same id in two
            queues is two pieces of work. (A message does not say which queue it came through.)
        on_error: What becomes of a message whose handler raised: `"requeue"`, or `"reject"` to the
            dead-letter exchange. RabbitMQ counts deliveries, and limits them, in quorum queues only.
        pause: How long a requeued message rests first, on average; while the database is down up to 30
            seconds. Default half a second.

    Raises:
        ConfigurationError: A policy or an option cannot be kept.
    """
    name = queue if isinstance(queue, str) else queue.name

    def decorate(function: Callable[..., Any]) -> Callable[[AbstractIncomingMessage], Awaitable[None]]:
        judge = Judge(dedup.handler(*policies, endpoint=name)(function), on_error=on_error, pause=pause)
        resting: set[asyncio.Task[None]] = set()

        @wraps(function)
        async def on_message(message: AbstractIncomingMessage) -> None:
            if message.processed:
                msg = f"a message of {name} is acknowledged before it is handled: consume with no_ack=False"
                raise ConfigurationError(msg)
            envelope = Envelope(message.body, message.headers, message.message_id, name, message)
            with unanswerable(message, "ack", "nack", "reject"):
                verdict = await judge(envelope)
            if verdict.answer is Answer.AGAIN:
                # In a task of its own: who reads the queue message by message must not rest with this one.
                rest = asyncio.create_task(_requeue(envelope, verdict.pause))
                resting.add(rest)
                rest.add_done_callback(resting.discard)
                return
            with telling(envelope):
                if verdict.answer is Answer.DONE:
                    await message.ack()
                else:
                    await message.reject(requeue=False)

        return on_message

    return decorate


async def _requeue(envelope: Envelope, pause: float) -> None:
    await asyncio.sleep(pause)
    with telling(envelope):
        await envelope.message.nack(requeue=True)


def stamped(message: Message, logical_id: object) -> Message:
    """Return a copy of a message with its logical id in the header `deduplication-id`.

    Args:
        message: The message; an id that it has already is kept.
        logical_id: The id, such as `dedup.identities.of(order)`; None or blank stamps nothing.

    Raises:
        InvalidLogicalIdError: It is no legal id.
    """
    copied = copy(message)
    copied.headers = with_stamp(message.headers, headers_for(logical_id))
    return copied
