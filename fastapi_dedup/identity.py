"""Where a logical id comes from, and what a legal one is. Pure functions, no I/O.

The rules, in one place:

- None, "", blanks, JSON null and msgspec's UNSET are *missing*. `"None"` and `"0"` are ids like any other.
- Strings, integers, UUIDs, enums, dates and decimals are ids; booleans, floats, lists and objects are not.
- Nothing is folded: case, accents, trailing blanks and Unicode normal forms stay apart.
- An id has at most 255 characters, no control characters and no lone surrogates.
- A header's id is visible ASCII. The quoted form of the IETF draft and the bare form are the same id.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import re
import uuid
from collections.abc import Mapping, Sequence

from fastapi_dedup.errors import ConfigurationError, InvalidLogicalIdError, MissingLogicalIdError

__all__ = [
    "MAX_LENGTH",
    "compose",
    "from_field_values",
    "from_header",
    "legal",
    "lookup",
    "named",
    "parts_of",
    "principal",
    "required",
    "resolve",
    "unsent",
]

MAX_LENGTH = 255
"""How many characters an id may have: what Stripe allows, and fits one AMQP short string of ASCII."""

_MOST_BITS = MAX_LENGTH * 4  # more than so many digits need
_SEPARATOR = "|"
_LEAVES = (str, bytes, int, float, decimal.Decimal, dt.date, dt.time, uuid.UUID, enum.Enum, type(None))
_ILLEGAL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# RFC 8941, section 3.3.3: a quoted string of printable ASCII in which only \" and \\ are escapes.
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
_ESCAPE = re.compile(r'\\(["\\])')
_BARE = re.compile(r"[\x20-\x21\x23-\x7e]+")


def legal(value: object, *, field: str) -> str | None:
    """Return a value as a logical id, or None where it is missing.

    Args:
        value: What was found.
        field: Where it was found, for the error.

    Raises:
        InvalidLogicalIdError: The value is there and cannot be an id.
    """
    if value is None or unsent(value):
        return None
    text = _text(value, field)
    if not text.strip():
        return None
    if len(text) > MAX_LENGTH:
        raise InvalidLogicalIdError(field, f"it has {len(text)} characters, and {MAX_LENGTH} are allowed")
    if _ILLEGAL.search(text):
        raise InvalidLogicalIdError(field, "it holds a control character or a lone surrogate")
    return text


def unsent(value: object) -> bool:
    """Tell whether a value is msgspec's word for a field that was not sent, without importing msgspec."""
    return type(value).__name__ == "UnsetType"


def required(value: object, *, field: str) -> str:
    """Return a value as a logical id.

    Raises:
        MissingLogicalIdError: The value is missing.
        InvalidLogicalIdError: The value is there and cannot be an id.
    """
    text = legal(value, field=field)
    if text is None:
        raise MissingLogicalIdError(field)
    return text


def _text(value: object, field: str) -> str:
    if isinstance(value, enum.Enum):
        return _text(value.value, field)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or not isinstance(
        value, int | uuid.UUID | decimal.Decimal | dt.datetime | dt.date
    ):
        raise InvalidLogicalIdError(field, f"a value of type {type(value).__name__} cannot be an id")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python refuses to write very long ones
        raise InvalidLogicalIdError(field, f"it has more than {MAX_LENGTH} digits")
    return value.isoformat() if isinstance(value, dt.date) else str(value)


def principal(value: object) -> str:
    """Return what a scope's callable returned, as a part of the scope.

    Raises:
        MissingLogicalIdError: It returned nothing: an anonymous caller must not share a scope.
        ConfigurationError: It returned what can be no part of a scope, which no caller can mend.
    """
    try:
        part = legal(value, field="scope")
    except InvalidLogicalIdError as error:
        if isinstance(value, str):
            raise
        msg = f"a scope's callable returned a {type(value).__name__}: return a string or an integer"
        raise ConfigurationError(msg) from error
    if part is None:
        raise MissingLogicalIdError("scope")
    return part


def parts_of(scope: object) -> tuple[str, ...]:
    """Return the parts of a scope that somebody wrote down.

    Raises:
        ConfigurationError: It is neither a name nor a tuple of names.
    """
    parts = (scope,) if isinstance(scope, str) else scope
    if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
        msg = f"scope must be a name or a tuple of names, not {scope!r}"
        raise ConfigurationError(msg)
    return parts


def named(scope: object) -> tuple[str, ...]:
    """Return the parts of a scope that somebody wrote down to claim in.

    Raises:
        MissingLogicalIdError: A part is blank: whoever has no name must not share a scope.
        ConfigurationError: It is neither a name nor a tuple of names.
    """
    parts = parts_of(scope)
    if not all(part.strip() for part in parts):
        raise MissingLogicalIdError("scope")
    return parts


def from_header(values: Sequence[str], *, field: str) -> str | None:
    """Return the id that a header carries, or None where it is missing.

    Identical repeats of a header are one; different ones are an error, for servers and proxies disagree on
    which of them counts. A comma is part of the id: the header is no list.

    Args:
        values: Every value of the header, in order, decoded as latin-1.
        field: The header, for the error.

    Raises:
        InvalidLogicalIdError: The header is repeated with different values, is not visible ASCII, or is
            quoted wrongly (draft-ietf-httpapi-idempotency-key-header, RFC 8941 section 3.3.3).
    """
    distinct = set(values)
    if len(distinct) > 1:
        raise InvalidLogicalIdError(field, "it is repeated with different values")
    raw = distinct.pop().strip(" \t") if distinct else ""
    if not raw:
        return None
    if raw.startswith('"'):
        quoted = _QUOTED.fullmatch(raw)
        if quoted is None:
            raise InvalidLogicalIdError(field, "its quotes do not make a structured-field string (RFC 8941)")
        raw = _ESCAPE.sub(r"\1", quoted.group(1))
    elif not _BARE.fullmatch(raw):
        raise InvalidLogicalIdError(field, "an unquoted value must be visible ASCII without double quotes")
    return legal(raw, field=field)


def from_field_values(values: Sequence[object], *, field: str) -> str | None:
    """Return the id that a repeatable field (query, form) carries; different repeats are an error."""
    ids = {legal(value, field=field) for value in values}
    if len(ids) > 1:
        raise InvalidLogicalIdError(field, "it is repeated with different values")
    return ids.pop() if ids else None


def lookup(payload: object, path: str) -> object:
    """Return what a dotted path leads to in mappings, sequences and objects; None where it ends early."""
    found = payload
    for step in path.split("."):
        if isinstance(found, Mapping):
            found = found.get(step)
        elif step in getattr(type(found), "_fields", ()):  # a named tuple's
            found = getattr(found, step)
        elif isinstance(found, Sequence) and not isinstance(found, str | bytes):
            found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        elif isinstance(found, _LEAVES):
            found = None
        else:
            found = getattr(found, step, None)
    return found


def compose(parts: Sequence[str]) -> str:
    """Join the parts of an id legibly, and so that no two lists of parts ever meet.

    >>> compose(["nightly-rebuild", "2026-11-30T03:00:00+00:00"])
    'nightly-rebuild|2026-11-30T03:00:00+00:00'
    """
    if len(parts) == 1:
        return parts[0]
    escaped = (part.replace("\\", "\\\\").replace(_SEPARATOR, "\\" + _SEPARATOR) for part in parts)
    return _SEPARATOR.join(escaped)


def resolve(parts: Mapping[str, str | None], *, required: bool) -> str | None:
    """Return the composed id of a policy's members, or None where an optional id is missing.

    Args:
        parts: The id that each field gave, in the policy's order.
        required: Whether a missing id is an error.

    Raises:
        MissingLogicalIdError: The id is required and missing; or it is there in part, for an id that
            silently lost a member would be another id.
        InvalidLogicalIdError: The composed id is too long.
    """
    missing = [field for field, part in parts.items() if part is None]
    if missing and (required or len(missing) < len(parts)):
        raise MissingLogicalIdError(missing[0])
    if missing:
        return None
    return legal(compose([part for part in parts.values() if part is not None]), field=", ".join(parts))
