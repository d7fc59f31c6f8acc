"""Reading a request: its logical id, its scope and its fingerprint, as a policy says."""

from __future__ import annotations

import hashlib
import inspect
from typing import TYPE_CHECKING, Any

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.requests import Request

from fastapi_dedup import fingerprint
from fastapi_dedup.errors import InvalidLogicalIdError, PayloadTooLargeError
from fastapi_dedup.identity import from_field_values, from_header, legal, lookup, resolve
from fastapi_dedup.identity import principal as part_of

if TYPE_CHECKING:
    from starlette.types import Scope

    from fastapi_dedup.policy import Policy

__all__ = [
    "DEFAULT_HEADER",
    "compares_payload",
    "endpoint",
    "fingerprint_of",
    "id_from_headers",
    "logical_id_of",
    "scope_of",
]

DEFAULT_HEADER = "Idempotency-Key"
"""HTTP's own header for the id: draft-ietf-httpapi-idempotency-key-header."""


async def logical_id_of(policy: Policy, request: Request, *, limit: int) -> str | None:
    """Return the request's logical id, or None where an optional one is missing.

    Args:
        policy: The policy.
        request: The request. Its body stays readable for the handler.
        limit: How many bytes of a body may be read that nobody has read yet.

    Raises:
        PayloadTooLargeError: The body is larger.
        MissingLogicalIdError: It is required.
        InvalidLogicalIdError: It is there and is no legal id.
    """
    if callable(policy.source):
        found = await _called(policy.source, request)
        return resolve({"the id": legal(found, field="the id")}, required=policy.required)
    match policy.source:
        case "header" | "anything":
            return id_from_headers(policy, request.headers)
        case "path":
            values = request.path_params
            parts = {f"path.{name}": legal(values.get(name), field=f"path.{name}") for name in policy.members}
        case "query":
            query = request.query_params
            parts = {
                f"query.{name}": from_field_values(query.getlist(name), field=f"query.{name}")
                for name in policy.members
            }
        case "form":
            if getattr(request, "_form", None) is None:
                await _body(request, limit)  # else the parser would use it up, and the handler find nothing
            form = await request.form()
            parts = {
                f"form.{name}": from_field_values(form.getlist(name), field=f"form.{name}")
                for name in policy.members
            }
        case _:
            body = await _json(request, limit)
            parts = {
                f"body.{name}": legal(lookup(body, name), field=f"body.{name}") for name in policy.members
            }
    return resolve(parts, required=policy.required)


def id_from_headers(policy: Policy, headers: Headers) -> str | None:
    """Return the id that a request's headers carry, or None where an optional one is missing."""
    parts = {
        f"header.{name}": from_header(headers.getlist(name), field=f"header.{name}")
        for name in policy.headers(DEFAULT_HEADER)
    }
    return resolve(parts, required=policy.required)


def endpoint(scope: Scope) -> tuple[str, ...]:
    """Return HTTP's own scope: method and path, values included, so /orders/1 is not /orders/2."""
    return scope["method"], scope["path"]


async def scope_of(policy: Policy, request: Request, principal: Any) -> tuple[str, ...]:
    """Return the parts of the scope that the id is unique in.

    Args:
        policy: The policy.
        request: The request.
        principal: What the policy's `Depends(...)` scope returned; None where it has none.

    Raises:
        MissingLogicalIdError: A callable returned nothing, for an anonymous caller must not share a scope.
    """
    match policy.scope:
        case None:
            return endpoint(request.scope)
        case str() as name:
            return (name,)
        case tuple() as parts:
            return tuple([await _part(part, request) for part in parts])
        case call if callable(call):
            return (*endpoint(request.scope), await _part(call, request))
        case _:
            return (*endpoint(request.scope), part_of(principal))


async def _part(part: Any, request: Request) -> str:
    return part if isinstance(part, str) else part_of(await _called(part, request))


def compares_payload(policy: Policy) -> bool:
    """Tell whether a retry must bring the same payload: by default where a header carries the id."""
    if policy.fingerprint is None:
        return policy.source in {"header", "anything"}
    return bool(policy.fingerprint)


async def fingerprint_of(policy: Policy, request: Request, *, limit: int) -> bytes | None:
    """Return the fingerprint of the request's payload; None where the policy leaves the payload out of it.

    Args:
        policy: The policy.
        request: The request. Its body stays readable for the handler.
        limit: How many bytes of a body may be read that nobody has read yet.

    Raises:
        PayloadTooLargeError: The body is larger.
    """
    if not compares_payload(policy):
        return None
    if callable(policy.fingerprint):
        return fingerprint.of_chosen(await _called(policy.fingerprint, request))
    query: bytes = request.scope.get("query_string", b"")
    form = getattr(request, "_form", None)  # the framework has parsed it, so its bytes are gone
    if isinstance(form, FormData):
        return fingerprint.of_fields([await _field(*item) for item in form.multi_items()], query=query)
    body = await _body(request, limit)
    return fingerprint.of_payload(body, content_type=request.headers.get("content-type", ""), query=query)


async def _field(name: str, value: str | UploadFile) -> tuple[str, str]:
    if isinstance(value, str):
        return name, value
    sha = hashlib.sha256()
    while chunk := await value.read(64 * 1024):
        sha.update(chunk)
    await value.seek(0)
    return name, f"{value.filename} {sha.hexdigest()}"


async def _body(request: Request, limit: int) -> bytes:
    if not hasattr(request, "_body"):
        size, chunks = 0, []
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise PayloadTooLargeError(limit)
            chunks.append(chunk)
        request._body = b"".join(chunks)  # noqa: SLF001 - where Starlette looks when the handler asks for it
    return await request.body()


async def _json(request: Request, limit: int) -> Any:
    await _body(request, limit)
    try:
        return await request.json()
    except (ValueError, RecursionError) as error:
        raise InvalidLogicalIdError("body", "it is not JSON") from error


async def _called(call: Any, request: Request) -> Any:
    value = call(request)
    return await value if inspect.isawaitable(value) else value
