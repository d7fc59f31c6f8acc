"""FastStream's acknowledgements: what can come again, and which subscribers would lose messages.

Whether a subscriber can keep our promises is known when its first message is there, not before: FastStream
settles its options when the broker starts. One that cannot is stopped, and its message given back.
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from faststream import AckPolicy
from faststream.exceptions import StopConsume
from faststream.message import StreamMessage

from fastapi_dedup.errors import ConfigurationError

__all__ = ["RefusedError", "check_subscriber", "comes_again", "stop"]

logger = logging.getLogger("fastapi_dedup")


class RefusedError(ConfigurationError, StopConsume):
    """A subscriber cannot keep what is promised, so it stops at its first message."""

    def __str__(self) -> str:
        return str(self.args[0])


async def check_subscriber(
    subscriber: Any, message: StreamMessage[Any], endpoint: str, *, nested: bool
) -> None:
    """Refuse what would lose messages or run them twice.

    Args:
        subscriber: FastStream's subscriber.
        message: The message that it got.
        endpoint: The name of the place where it arrived.
        nested: Whether another middleware of ours is at work on the message, under other policies.

    Raises:
        ConfigurationError: Messages come in batches, are not acknowledged after COMMIT, or are under other
            policies already.
    """
    if nested:
        msg = (
            f"{endpoint} is under two DeduplicatingMiddlewares with different policies, and so in two "
            "transactions: give the policies to the broker's, the router's, or the handler itself"
        )
    elif message.batch_headers:
        msg = f"{endpoint} gets messages in batches, which have no id of their own: subscribe without batch"
    elif not _acknowledged_after(subscriber.ack_policy, message):
        msg = (
            f"{endpoint} does not acknowledge after COMMIT (ack_policy is {subscriber.ack_policy.name}), so "
            "a message whose work fails, or is in flight elsewhere, would be lost: subscribe with "
            "ack_policy=AckPolicy.NACK_ON_ERROR, and to Kafka and Redis streams in a group"
        )
    elif (jetstream := _jetstream_policy(subscriber)) not in {None, "explicit"}:
        msg = (
            f"the consumer of {endpoint} does not acknowledge each message by itself (its ack_policy is "
            f"{jetstream}), so one whose work fails, or is in flight elsewhere, would be lost: "
            "leave ack_policy out of its ConsumerConfig"
        )
    else:
        return
    await stop(message, msg)


async def stop(message: StreamMessage[Any], why: str) -> NoReturn:
    """Stop a message's subscriber, loudly, and give the message back.

    Raises:
        ConfigurationError: Always.
    """
    logger.error("stopped consuming: %s", why)
    await message.nack()
    raise RefusedError(why)


def _acknowledged_after(policy: AckPolicy, message: StreamMessage[Any]) -> bool:
    if policy is AckPolicy.MANUAL:  # which is also the policy where there is nothing to acknowledge
        return not comes_again(message)
    return policy is not AckPolicy.ACK_FIRST


def _jetstream_policy(subscriber: Any) -> str | None:
    """Return JetStream's own policy of acknowledgement, which is not FastStream's; None elsewhere."""
    policy = subscriber.config.ack_policy if hasattr(subscriber, "stream") else None
    return None if policy is None else str(policy.value)


def comes_again(message: StreamMessage[Any]) -> bool:
    """Tell whether a message's broker waits for its acknowledgement: not so lists, channels and core NATS."""
    settled = getattr(message.raw_message, "_ackd", False)
    return type(message).ack is not StreamMessage.ack and not settled
