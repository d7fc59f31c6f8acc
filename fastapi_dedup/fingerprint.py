"""Fingerprints: the digest of a payload, to tell a retry from a re-used id. Pure functions, no I/O."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from typing import Any

__all__ = ["of_fields", "of_payload"]

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


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(query: bytes, body: bytes) -> bytes:
    sha = hashlib.sha256(len(query).to_bytes(8, "big"))
    sha.update(query)
    sha.update(body)
    return sha.digest()
