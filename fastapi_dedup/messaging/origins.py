"""Where a FastStream message comes from: what its handler, its place and its delivery are called.

FastStream has one message type for all of its brokers, and no common name for these three. What is read here
are the attributes of its subscribers and of the brokers' own messages; no driver is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi_dedup.messaging.envelope import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["delivery_id_of", "endpoint_of", "function_of"]


async def function_of(subscriber: Any, message: Any) -> Callable[..., Any]:
    """Return the handler that FastStream has chosen for a message: the first whose filter lets it in."""
    calls = list(subscriber.calls)
    chosen = calls[0]
    for call in calls[1:]:
        if await chosen.filter(message):
            break
        chosen = call
    function: Callable[..., Any] = chosen.handler._original_call  # noqa: SLF001 - it has no public name
    return function


def endpoint_of(subscriber: Any, message: Any, function: Callable[..., Any]) -> str:
    """Return the name of the place where a message arrives.

    That is a queue; or a topic, subject, channel or stream with the group that shares its messages. Where no
    group does, every subscriber gets each of them: then the handler's name tells subscribers apart.
    """
    if hasattr(subscriber, "exchange"):  # RabbitMQ
        prefix = subscriber.routing().removesuffix(subscriber.queue.routing())  # the router's
        return f"{prefix}{subscriber.queue.name}"
    if hasattr(subscriber, "list_sub"):  # a Redis list
        return str(subscriber.list_sub.name)
    address, group = _address_and_group(subscriber, message.raw_message)
    return f"{address}/{group or name_of(inspect.unwrap(function))}"


def _address_and_group(subscriber: Any, raw: Any) -> tuple[str, str | None]:
    if hasattr(subscriber, "stream_sub"):  # a Redis stream
        return subscriber.stream_sub.name, subscriber.stream_sub.group
    if hasattr(subscriber, "channel"):  # a Redis channel
        return subscriber.channel.name, None
    if hasattr(subscriber, "group_id"):  # Kafka
        first = raw[0] if isinstance(raw, list | tuple) else raw
        return _value(first.topic), subscriber.group_id
    if hasattr(subscriber, "stream"):  # JetStream; without a durable name, the queue becomes that
        durable = subscriber.config.durable_name or subscriber.queue
        stream = subscriber.stream.name
        return stream if durable else f"{stream}/{subscriber.subject.template}", durable
    if hasattr(subscriber, "subject"):  # NATS
        return subscriber.subject.template, getattr(subscriber, "queue", None)
    return getattr(subscriber, "topic", ""), None  # MQTT


def delivery_id_of(message: Any) -> str | None:
    """Return the broker's own id of a message, the same for each of its deliveries; None if it has none.

    `StreamMessage.message_id` is not that: where the broker has none, FastStream makes one per delivery.
    """
    raw = message.raw_message
    if isinstance(raw, Mapping):  # Redis
        given = next((each.decode() for each in raw.get("message_ids", ())), None)
    elif hasattr(raw, "offset"):  # Kafka
        given = ":".join(str(_value(part)) for part in (raw.topic, raw.partition, raw.offset))
    elif getattr(raw, "reply", "").startswith("$JS.ACK."):  # JetStream
        given = f"{raw.metadata.stream}:{raw.metadata.sequence.stream}"
    else:  # RabbitMQ
        given = getattr(raw, "message_id", None)
    delivery_id: str | None = given or message.headers.get("message_id")
    return delivery_id


def _value(attribute: Any) -> Any:
    """Return what a message of Kafka's says: aiokafka has attributes where confluent-kafka has methods."""
    return attribute() if callable(attribute) else attribute
