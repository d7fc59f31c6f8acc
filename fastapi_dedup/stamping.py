"""How a message's logical id travels: the fields that carry it, broker by broker. Pure, no I/O."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from fastapi_dedup.errors import InvalidLogicalIdError
from fastapi_dedup.identity import legal

__all__ = [
    "DEDUPLICATION_HEADER",
    "NATS_MESSAGE_ID",
    "headers_for",
    "nats_headers_for",
    "sqs_arguments_for",
    "sqs_deduplication_id",
]

DEDUPLICATION_HEADER = "deduplication-id"
"""The header that carries a message's logical id, whatever the broker."""

NATS_MESSAGE_ID = "Nats-Msg-Id"
"""The header that JetStream itself drops duplicates by, inside the stream's own window."""


def headers_for(logical_id: object) -> dict[str, str]:
    """Return the header that carries a logical id: for AMQP, Kafka and Redis, and as Pub/Sub's attribute.

    Args:
        logical_id: The id; None or blank if the message has none, and then there is no header.

    Raises:
        InvalidLogicalIdError: It is no legal id.
    """
    text = legal(logical_id, field="logical_id")
    return {} if text is None else {DEDUPLICATION_HEADER: text}


def nats_headers_for(logical_id: object, *, native: bool = True) -> dict[str, str]:
    """Return the headers that carry a logical id over NATS.

    Args:
        logical_id: The id; None or blank if the message has none.
        native: Whether JetStream is to drop duplicates too, by `Nats-Msg-Id`, before any consumer sees
            them.

    Raises:
        InvalidLogicalIdError: It is no legal id; or it begins or ends with a blank, which NATS clients cut
            off, so that it would arrive as another id.
    """
    headers = headers_for(logical_id)
    text = headers.get(DEDUPLICATION_HEADER, "")
    if text != text.strip():
        raise InvalidLogicalIdError("logical_id", "NATS cuts blanks off at both ends of a header")
    return {**headers, NATS_MESSAGE_ID: text} if native and text else headers


_SQS_LEGAL = re.compile(r"[\x21-\x7e]{1,128}")


def sqs_deduplication_id(logical_id: str) -> str:
    """Return what SQS FIFO queues (and SNS FIFO topics) take as `MessageDeduplicationId`.

    That is the id itself if it has at most 128 characters, all of them letters, digits and punctuation of
    ASCII; else the SHA-256 of its UTF-8, as 64 hexadecimal digits.
    """
    if _SQS_LEGAL.fullmatch(logical_id):
        return logical_id
    return hashlib.sha256(logical_id.encode()).hexdigest()


def sqs_arguments_for(logical_id: object, *, native: bool = True) -> dict[str, Any]:
    """Return the arguments of SQS's `send_message` that carry a logical id.

    Args:
        logical_id: The id; None or blank if the message has none, and then there are no arguments.
        native: Whether the queue is to drop duplicates too, for five minutes. For FIFO queues only: others
            refuse the argument.

    Raises:
        InvalidLogicalIdError: It is no legal id.
    """
    text = headers_for(logical_id).get(DEDUPLICATION_HEADER)
    if text is None:
        return {}
    attributes = {DEDUPLICATION_HEADER: {"DataType": "String", "StringValue": text}}
    own_field = {"MessageDeduplicationId": sqs_deduplication_id(text)} if native else {}
    return {"MessageAttributes": attributes, **own_field}
