"""What a refused delivery is called: as an outcome, as an event and as an error. Pure."""

from __future__ import annotations

from typing import TypeAlias

from fastapi_dedup.claims import Duplicate, InFlight, Intent, Mismatch, scope_text
from fastapi_dedup.errors import (
    ClaimInFlightError,
    ClaimLostError,
    DedupError,
    DuplicateError,
    FingerprintMismatchError,
)
from fastapi_dedup.guard import Seen
from fastapi_dedup.hooks import EventKind

__all__ = ["KINDS", "SEEN", "Refusal", "closed_without_commit", "error_of"]

Refusal: TypeAlias = Duplicate | InFlight | Mismatch

KINDS = {
    Duplicate: EventKind.DUPLICATE,
    InFlight: EventKind.IN_FLIGHT,
    Mismatch: EventKind.MISMATCH,
}

SEEN: dict[Seen, Refusal] = {
    Seen.IN_FLIGHT: InFlight(),
    Seen.PROCESSED: Duplicate(),
    Seen.MISMATCH: Mismatch(),
}
"""What a guard's word means to a delivery; it knows no times."""


def error_of(intent: Intent, refusal: Refusal) -> DedupError:
    """Return the error that a refusal is, for the doors that cannot return a value instead of running."""
    where = (intent.logical_id, scope_text(intent.scope))
    match refusal:
        case Duplicate(claimed_at, expires_at, age):
            return DuplicateError(*where, claimed_at=claimed_at, expires_at=expires_at, age=age)
        case InFlight(abandoned):
            return ClaimInFlightError(*where, abandoned=abandoned)
        case Mismatch():
            return FingerprintMismatchError(*where)


def closed_without_commit() -> ClaimLostError:
    """Return the error that a success is whose session has ended without COMMIT."""
    msg = "the session of the claim was closed without COMMIT, so its work is lost: commit it before"
    return ClaimLostError(msg)
