"""Refusals as RFC 9457 problem details: one pure mapping from error to answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi_dedup.errors import (
    ClaimInFlightError,
    DedupError,
    DuplicateError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    PayloadTooLargeError,
    StoreUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KINDS", "MEDIA_TYPE", "Answer", "Kind", "answer_to"]

MEDIA_TYPE = "application/problem+json"
_PAGE = "https://fastapi-dedup.readthedocs.io/en/stable/reference/problems/"
_RETRY_AFTER = "1"
"""Seconds. Nobody knows when unfinished work ends, and the next try costs one look."""
_BODILESS = frozenset({204, 205, 304})  # RFC 9110, sections 15.3.5, 15.3.6 and 15.4.5


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of refusal.

    Attributes:
        slug: The anchor on the docs page that the `type` URI resolves to. It never changes.
        status: The HTTP status; a policy's `duplicate_status` replaces a duplicate's.
        title: The same for every occurrence, as RFC 9457 asks.
        retry: Whether the answer carries `Retry-After`.
    """

    slug: str
    status: int
    title: str
    retry: bool = False

    @property
    def type(self) -> str:
        """The stable `type` URI."""
        return f"{_PAGE}#{self.slug}"


KINDS: Mapping[type[DedupError], Kind] = {
    MissingLogicalIdError: Kind("missing-logical-id", 400, "A logical id is required"),
    InvalidLogicalIdError: Kind("invalid-logical-id", 400, "The logical id is not legal"),
    DuplicateError: Kind("duplicate", 409, "The work is already done"),
    ClaimInFlightError: Kind("in-flight", 409, "The work is still in flight", retry=True),
    PayloadTooLargeError: Kind("payload-too-large", 413, "The payload is too large to compare"),
    FingerprintMismatchError: Kind(
        "fingerprint-mismatch", 422, "The logical id was used for another payload"
    ),
    StoreUnavailableError: Kind("store-unavailable", 503, "Duplicates cannot be recognised", retry=True),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, ready to be sent."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def answer_to(error: DedupError, *, duplicate_status: int = 409) -> Answer | None:
    """Return the response to a refusal; None where the error is the server's own fault.

    Args:
        error: The refusal.
        duplicate_status: The policy's status for duplicates. Below 400 the body is a small JSON document
            that says it was a duplicate, for nothing is wrong then; with 204, 205 and 304 there is no body.
    """
    kind = next((KINDS[each] for each in type(error).__mro__ if each in KINDS), None)
    if kind is None:
        return None
    status = duplicate_status if isinstance(error, DuplicateError) else kind.status
    if status in _BODILESS:
        return Answer(status, (), b"")
    document: dict[str, Any] = {
        "type": kind.type,
        "title": kind.title,
        "status": status,
        "detail": str(error),
    }
    media_type = MEDIA_TYPE
    if isinstance(error, DuplicateError) and status < 400:  # noqa: PLR2004 - success and redirection
        document = {"duplicate": True}
        media_type = "application/json"
    document |= _particulars(error)
    body = json.dumps(document).encode()
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", str(len(body)).encode()),
    ]
    if kind.retry and not getattr(error, "abandoned", False):  # nothing happens until somebody decides
        headers.append((b"retry-after", _RETRY_AFTER.encode()))
    return Answer(status, tuple(headers), body)


def _particulars(error: DedupError) -> dict[str, Any]:
    match error:
        case MissingLogicalIdError(field=field) | InvalidLogicalIdError(field=field):
            return {"field": field}
        case DuplicateError(claimed_at=at) if at is not None:
            return {"logical_id": error.logical_id, "claimed_at": at.isoformat()}
        case ClaimInFlightError(abandoned=True):
            return {"logical_id": error.logical_id, "abandoned": True}
        case DuplicateError() | ClaimInFlightError() | FingerprintMismatchError():
            return {"logical_id": error.logical_id}
    return {}
