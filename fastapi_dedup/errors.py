"""What can go wrong, as one tree.

DedupError
├── ConfigurationError          the set-up cannot keep its promises; the message says how to mend it
├── StoreUnavailableError       the database did not answer, so nobody knows: never "run anyway"
├── ClaimLostError              the claim was gone before its COMMIT, so nothing was committed
├── MissingLogicalIdError       a required logical id is absent, blank or null
├── InvalidLogicalIdError       a logical id is there, but is no legal one
├── PayloadTooLargeError        the payload outgrew what may be read to compute a fingerprint
├── DuplicateError              the id's work is done, inside the window
├── ClaimInFlightError          the id is claimed and its work has not ended: "not yet", never "done"
└── FingerprintMismatchError    the id was claimed for another payload

Drivers and SQLAlchemy never speak to a caller directly: their exception is the `__cause__` of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime, timedelta

__all__ = [
    "ClaimInFlightError",
    "ClaimLostError",
    "ConfigurationError",
    "DedupError",
    "DuplicateError",
    "FingerprintMismatchError",
    "InvalidLogicalIdError",
    "MissingLogicalIdError",
    "PayloadTooLargeError",
    "StoreUnavailableError",
]


class DedupError(Exception):
    """Base of everything that fastapi_dedup raises."""


class ConfigurationError(DedupError):
    """The set-up cannot keep its promises. The message names the place and the fix."""


class StoreUnavailableError(DedupError):
    """The store did not answer, so the work was not run. Try again later."""


class ClaimLostError(DedupError):
    """The claim was gone before its COMMIT, so the COMMIT was refused: the work is not done."""


class MissingLogicalIdError(DedupError):
    """A required logical id is missing: absent, empty, blank or null.

    Attributes:
        field: Where the id was looked for, such as `header.Idempotency-Key` or `body.sku`.
    """

    def __init__(self, field: str) -> None:
        super().__init__(f"a logical id is required, and {field} has none")
        self.field = field


class InvalidLogicalIdError(DedupError):
    """A logical id was given and is not a legal one.

    Attributes:
        field: Where the id was read from.
        reason: What is wrong with it, without the value itself.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} is not a legal logical id: {reason}")
        self.field = field
        self.reason = reason


class PayloadTooLargeError(DedupError):
    """The payload is larger than what may be read to compute its fingerprint.

    Attributes:
        limit: The limit, in bytes.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(f"the payload is larger than the {limit} bytes that a fingerprint may read")
        self.limit = limit


class _RefusalError(DedupError):
    """A delivery that was refused because of another delivery of the same intent."""

    _sentence = "the logical id {logical_id!r} in scope {scope!r} was refused"

    def __init__(self, logical_id: str, scope: str) -> None:
        super().__init__(self._sentence.format(logical_id=logical_id, scope=scope))
        self.logical_id = logical_id
        self.scope = scope


class DuplicateError(_RefusalError):
    """The id's work is done, inside the window.

    Attributes:
        logical_id: The id.
        scope: The scope that the id is unique in.
        claimed_at: When the first delivery claimed it, by the store's clock; None where a guard answered.
        expires_at: When the window ends; None like `claimed_at`.
        age: How long ago it was claimed; None like `claimed_at`.
    """

    _sentence = "the work of logical id {logical_id!r} in scope {scope!r} is already done"

    def __init__(
        self,
        logical_id: str,
        scope: str,
        *,
        claimed_at: datetime | None = None,
        expires_at: datetime | None = None,
        age: timedelta | None = None,
    ) -> None:
        super().__init__(logical_id, scope)
        self.claimed_at = claimed_at
        self.expires_at = expires_at
        self.age = age


class ClaimInFlightError(_RefusalError):
    """The id is claimed, and its work has not ended yet: try again later.

    Attributes:
        logical_id: The id.
        scope: The scope that the id is unique in.
        abandoned: Whether its owner has died, and `on_abandoned="block"` leaves it to an operator whether the
            work may run again.
    """

    _sentence = "the work of logical id {logical_id!r} in scope {scope!r} is still in flight"

    def __init__(self, logical_id: str, scope: str, *, abandoned: bool = False) -> None:
        super().__init__(logical_id, scope)
        self.abandoned = abandoned


class FingerprintMismatchError(_RefusalError):
    """The id was claimed for another payload: this is a re-used id, not a retry."""

    _sentence = "logical id {logical_id!r} in scope {scope!r} was claimed for another payload"
