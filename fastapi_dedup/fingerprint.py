"""Fingerprints: the digest of a payload, to tell a retry from a re-used id. Pure functions, no I/O."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import enum
import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identity import unsent

__all__ = ["of_chosen", "of_fields", "of_message", "of_payload"]

_BOUNDARY = re.compile(r'^multipart/.*;\s*boundary="?([^";]+)"?', re.IGNORECASE)


def of_payload(body: bytes, *, content_type: str = "", query: bytes = b"") -> bytes:
    """Return the fingerprint of a request's payload.

    JSON is compared by meaning: the order of an object's members and the white space do not count, the
    order of an array does, and `1` differs from `"1"`. Everything else is compared byte by byte, but for
    the boundary of a multipart body, which clients draw anew for every retry.

    Args:
        body: The body as it was sent.
        content_type: The body's media type.
        query: The raw query string, which is part of the payload.
    """
    if (boundary := _BOUNDARY.search(content_type)) is not None:
        body = body.replace(boundary.group(1).encode("latin-1", "replace"), b"boundary")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in {"", "application/json"} or media_type.endswith("+json"):
        with suppress(ValueError, RecursionError):  # not JSON after all: its bytes are there to compare
            body = _canonical(json.loads(body))
    return _digest(query, body)


def of_fields(fields: list[tuple[str, str]], *, query: bytes = b"") -> bytes:
    """Return the fingerprint of a form, whose encoding may differ between two honest retries."""
    return _digest(query, _canonical(fields))


def of_message(body: Any) -> bytes:
    """Return the fingerprint of a message: the same as of a request with that body.

    Args:
        body: Its body: bytes or text, as they were sent; or what a library made of them, such as a dict or
            model. Those are compared by their members.

    Raises:
        ConfigurationError: Two such bodies cannot be told apart.
    """
    if isinstance(body, str):
        body = body.encode("utf-8", "surrogatepass")
    if isinstance(body, bytes | bytearray | memoryview):
        return of_payload(bytes(body))
    return _digest(b"", _canonical(_plain(body)))


def of_chosen(value: Any) -> bytes:
    """Return the fingerprint of what a policy's callable returned: bytes, text or anything with members.

    Raises:
        ConfigurationError: Two such values cannot be told apart.
    """
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    return hashlib.sha256(value if isinstance(value, bytes) else _canonical(_plain(value))).digest()


def _plain(value: Any) -> Any:
    """Return a value in JSON's own words, the same in every process."""
    match value:
        case enum.Enum():
            plain = _plain(value.value)
        case None | str() | int() | float():
            plain = value
        case bytes() | bytearray() | memoryview():
            plain = base64.b64encode(value).decode()
        case Mapping():
            plain = {str(_plain(key)): _plain(each) for key, each in value.items()}
        case list() | tuple():
            plain = [_plain(each) for each in value]
        case set() | frozenset():
            plain = sorted((_plain(each) for each in value), key=_canonical)
        case dt.date() | dt.time() | dt.timedelta() | decimal.Decimal() | uuid.UUID():
            plain = str(value)
        case _:
            plain = _plain(_members_or_text(value))
    return plain


def _members_or_text(value: Any) -> dict[str, Any] | str:
    """Return an object's members; the text of one that has none, for its text may hide what they say.

    Pydantic, msgspec and attrs are known by what their classes carry, and never imported.
    """
    kind = type(value)
    names = _fields(kind)
    members: dict[str, Any] | None = getattr(value, "__dict__", None)
    has_text = any("__str__" in vars(base) or "__repr__" in vars(base) for base in kind.__mro__[:-1])
    if hasattr(value, "model_dump"):
        members = value.model_dump()
    elif names is not None:
        members = {name: member for name in names if not unsent(member := getattr(value, name))}
    elif not members and has_text:
        return str(value)
    if members is None:
        msg = f"no fingerprint can be made of a {kind.__qualname__}: give a callable as fingerprint="
        raise ConfigurationError(msg)
    return members


def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a dataclass, attrs class or msgspec struct; None of another type."""
    if dataclasses.is_dataclass(kind):
        return tuple([each.name for each in dataclasses.fields(kind)])
    if hasattr(kind, "__attrs_attrs__"):
        return tuple([each.name for each in kind.__attrs_attrs__])
    names: tuple[str, ...] | None = getattr(kind, "__struct_fields__", None)
    return names


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(query: bytes, body: bytes) -> bytes:
    sha = hashlib.sha256(len(query).to_bytes(8, "big"))
    sha.update(query)
    sha.update(body)
    return sha.digest()
