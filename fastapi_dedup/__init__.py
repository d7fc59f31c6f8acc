"""The same intent arrives twice, and its work commits once.

The claim of a logical id rides the request's own database transaction: claim and work commit together or
vanish together. Start at `fastapi_dedup.core`.
"""

from fastapi_dedup.claims import Claim
from fastapi_dedup.errors import (
    ClaimInFlightError,
    ClaimLostError,
    ConfigurationError,
    DedupError,
    DuplicateError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.http.dependency import Deduplicated, RequestSession
from fastapi_dedup.http.middleware import DedupMiddleware
from fastapi_dedup.runtime import Dedup

__all__ = [
    "Claim",
    "ClaimInFlightError",
    "ClaimLostError",
    "ConfigurationError",
    "Dedup",
    "DedupError",
    "DedupMiddleware",
    "Deduplicated",
    "DuplicateError",
    "FingerprintMismatchError",
    "InvalidLogicalIdError",
    "MissingLogicalIdError",
    "RequestSession",
    "StoreUnavailableError",
]
