"""What OpenAPI says of a route's policies: the header that carries the id, and the refusals.

The request body's schema stays as it was. The document is amended when it is made, so routes that are added
later, and an `app.openapi` of your own, are served too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi_dedup.errors import (
    ClaimInFlightError,
    DuplicateError,
    FingerprintMismatchError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.http.problems import KINDS, MEDIA_TYPE
from fastapi_dedup.http.reading import DEFAULT_HEADER, compares_payload
from fastapi_dedup.identity import MAX_LENGTH

if TYPE_CHECKING:
    from fastapi_dedup.errors import DedupError
    from fastapi_dedup.policy import Policy

__all__ = ["amend_operation"]

_PROBLEM: dict[str, Any] = {
    "type": "object",
    "title": "Problem details (RFC 9457)",
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
    "required": ["type", "title", "status", "detail"],
}
_DUPLICATE: dict[str, Any] = {
    "type": "object",
    "properties": {"duplicate": {"const": True}, "logical_id": {"type": "string"}},
    "required": ["duplicate", "logical_id"],
}


def amend_operation(operation: dict[str, Any], policy: Policy) -> None:
    """Add a policy's header and refusals to an operation; what the app says itself stays."""
    if policy.source in {"header", "anything"}:
        parameters = operation.setdefault("parameters", [])
        taken = {(each.get("in"), str(each.get("name", "")).lower()) for each in parameters}
        for name in policy.headers(DEFAULT_HEADER):
            if ("header", name.lower()) not in taken:
                parameters.append(_header(name, required=policy.required))
    responses = operation.setdefault("responses", {})
    for status, response in _responses(policy).items():
        responses.setdefault(str(status), response)


def _header(name: str, *, required: bool) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "required": required,
        "description": "The logical id: the same for every retry of one intent, bare or in double quotes.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_LENGTH},
    }


def _responses(policy: Policy) -> dict[int, dict[str, Any]]:
    kinds: list[type[DedupError]] = [MissingLogicalIdError, ClaimInFlightError, StoreUnavailableError]
    if compares_payload(policy):
        kinds.append(FingerprintMismatchError)
    responses = {KINDS[kind].status: _problem(KINDS[kind].title) for kind in kinds}
    duplicate, status = KINDS[DuplicateError].title, policy.duplicate_status
    if status == KINDS[ClaimInFlightError].status:
        responses[status] = _problem(f"{duplicate}, or it is still in flight")
    elif status >= 400:  # noqa: PLR2004 - an error status
        responses[status] = _problem(duplicate)
    else:
        responses[status] = {"description": duplicate}
        if status not in {204, 205, 304}:
            responses[status]["content"] = {"application/json": {"schema": _DUPLICATE}}
    responses[409].setdefault("headers", {})["Retry-After"] = {
        "description": "Seconds until a retry is worthwhile, when the work is still in flight.",
        "schema": {"type": "integer"},
    }
    return dict(sorted(responses.items()))


def _problem(description: str) -> dict[str, Any]:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": _PROBLEM}}}
