"""The values of the trade: an intent, the claim on it, and what came of trying to take it.

Everything here is frozen and pure. Nothing knows a database, a web framework or a clock.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from fastapi_dedup.errors import ConfigurationError

__all__ = [
    "DEFAULT_WINDOW",
    "Claim",
    "Claimed",
    "Duplicate",
    "Fate",
    "InFlight",
    "Intent",
    "Lease",
    "Mismatch",
    "Outcome",
    "Receipt",
    "digest",
    "positive",
    "scope_text",
    "verdict",
]

DEFAULT_WINDOW = timedelta(hours=24)
_DIGEST = hashlib.sha256().digest_size
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def digest(scope: tuple[str, ...], logical_id: str) -> bytes:
    """Return the 32-byte key of a logical id in its scope.

    Every part is length-prefixed, so no two (scope, id) pairs meet whatever characters they hold, and
    the result is compared as bytes, so no collation, padding or length limit of a database merges two.
    """
    sha = hashlib.sha256()
    for part in (*scope, logical_id):
        raw = part.encode("utf-8", "surrogatepass")
        sha.update(len(raw).to_bytes(8, "big"))
        sha.update(raw)
    return sha.digest()


def scope_text(scope: tuple[str, ...]) -> str:
    """Return the legible form of a scope, for logs and for the eyes of an operator.

    A path may hold what no column of text takes, such as NUL: that is escaped. The key is made of the parts.
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], " ".join(scope))


def _sized(fingerprint: bytes) -> bytes:
    """Return a digest as long as ours: columns are that wide, and MySQL's would fill up a shorter one."""
    if not isinstance(fingerprint, bytes):
        msg = f"fingerprint must be bytes, such as a digest of the payload, not {type(fingerprint).__name__}"
        raise ConfigurationError(msg)
    return fingerprint if len(fingerprint) == _DIGEST else hashlib.sha256(fingerprint).digest()


def positive(name: str, value: timedelta) -> timedelta:
    """Return a duration that is a positive `timedelta`, or say which option is not one."""
    if not isinstance(value, timedelta):
        msg = f"{name} must be a timedelta, not {type(value).__name__}: write timedelta(seconds=...)"
        raise ConfigurationError(msg)
    if value <= timedelta(0):
        msg = f"{name} must be longer than zero, not {value}"
        raise ConfigurationError(msg)
    return value


@dataclass(frozen=True, slots=True)
class Lease:
    """How a claim outlives the transaction that made it.

    Attributes:
        length: How long the claim survives an owner that has died. A living one extends it in time.
        on_abandoned: What becomes of an id whose owner died: `"retry"` lets the next delivery run, `"block"`
            keeps it taken until the window ends or an operator releases it.
    """

    length: timedelta
    on_abandoned: Literal["retry", "block"] = "retry"

    @property
    def beat(self) -> timedelta:
        """How often the owner extends it: two beats may be missed."""
        return self.length / 3


@dataclass(frozen=True, slots=True)
class Intent:
    """What one delivery wants done once.

    Attributes:
        scope: The namespace that the id is unique in, part by part.
        logical_id: The id.
        window: How long the id is honoured, counted by the store's clock from the claim.
        fingerprint: Digest of the payload, brought to 32 bytes; None leaves the payload out of it.
        from_end: Whether the window is counted anew from the end of the work.
        lease: How the claim is held outside the handler's transaction; None rides in it.
        realm: Tells the claims of one store from those of another that the same process uses; "" in bytes
            for the durable one.
        key: Digest of scope and id: what the store's unique key is on.
    """

    scope: tuple[str, ...]
    logical_id: str
    window: timedelta = DEFAULT_WINDOW
    fingerprint: bytes | None = None
    from_end: bool = False
    lease: Lease | None = None
    realm: bytes = b""
    key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.realm + digest(self.scope, self.logical_id))
        if self.fingerprint is not None:
            object.__setattr__(self, "fingerprint", _sized(self.fingerprint))

    @property
    def term(self) -> timedelta:
        """How long the claim counts as it is first made: an owner that dies must not keep it for longer."""
        if self.lease is None:
            return self.window
        return (
            self.lease.length if self.lease.on_abandoned == "retry" else max(self.window, self.lease.length)
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim that this delivery holds.

    Attributes:
        logical_id: The id that was claimed.
        scope: The scope, in its legible form.
        claimed_at: When, by the store's clock (UTC).
        expires_at: When the window ends (UTC).
    """

    logical_id: str
    scope: str
    claimed_at: datetime
    expires_at: datetime
    _transaction: HasSession = field(repr=False, compare=False)

    @property
    def session(self) -> Any:
        """The session (or connection) whose transaction the claim is in."""
        return self._transaction.session


class HasSession(Protocol):
    """A transaction, as far as a claim shows it to a handler."""

    @property
    def session(self) -> Any:
        """The session or connection that the handler works with."""


class Receipt(NamedTuple):
    """What a store hands out for a claim: its times, and the token that alone may release it."""

    token: bytes
    claimed_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Claimed:
    """The id is ours: run."""

    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The id's work is done. The times are None where that is known from memory."""

    claimed_at: datetime | None = None
    expires_at: datetime | None = None
    age: timedelta | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """The id is claimed, and its work has not ended: not yet, never done.

    Attributes:
        abandoned: Whether its owner let its lease run out, and its work must not be repeated unasked.
    """

    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The id was claimed for another payload."""


Outcome: TypeAlias = Claimed | Duplicate | InFlight | Mismatch


def verdict(
    intent: Intent,
    *,
    claimed_at: datetime,
    expires_at: datetime,
    leased_until: datetime | None,
    fingerprint: bytes | None,
    now: datetime,
) -> Duplicate | InFlight | Mismatch | None:
    """Return what a committed claim answers an intent; None where its window is over: it counts as absent.

    Args:
        intent: What is asked for.
        claimed_at: When the committed claim was made.
        expires_at: When it stops counting: at that very moment it is over. For a settled claim this is
            the window's end, for a leased one the lease's (unless its work must not be repeated).
        leased_until: When the lease of a claim ends whose work is not done; None where it is done.
        fingerprint: The payload that it was made for.
        now: The time, by the clock that also wrote `expires_at`.
    """
    if expires_at <= now:
        return None
    if None not in (fingerprint, intent.fingerprint) and fingerprint != intent.fingerprint:
        return Mismatch()
    if leased_until is not None:
        return InFlight(abandoned=leased_until <= now)
    return Duplicate(claimed_at, expires_at, now - claimed_at)


class Fate(enum.Enum):
    """What became of the transaction that a claim rides in.

    ROLLED_BACK leaves its session at work: what it commits next must have the claim again. CLOSED ends it.
    UNSEEN is what only the database will know: the transaction goes on, and nobody will tell of its end.
    """

    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    CLOSED = "closed"
    UNSEEN = "unseen"
