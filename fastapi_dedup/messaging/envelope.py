"""A message as the core's doors see it, whichever broker brought it; and what its id is. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi_dedup.errors import ConfigurationError, InvalidLogicalIdError
from fastapi_dedup.fingerprint import of_chosen, of_message
from fastapi_dedup.identities import DEDUPLICATION_HEADER
from fastapi_dedup.identity import from_field_values, legal, lookup, resolve
from fastapi_dedup.identity import principal as part_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from fastapi_dedup.policy import Policy

    Headers: TypeAlias = Mapping[Any, Any] | Sequence[tuple[Any, Any]]

__all__ = [
    "Envelope",
    "check_policy",
    "envelope_of",
    "fingerprint_of",
    "id_of",
    "name_of",
    "scope_of",
    "with_stamp",
]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and what surrounds it.

    Attributes:
        body: The message itself: decoded, or bytes, which are read as JSON where a member is asked for.
        headers: Its headers, as a mapping or a list of pairs; names are text or bytes, and are compared
            without regard to case.
        delivery_id: The broker's own id of the message; None where it has none.
        destination: Where it arrived: the queue, subject or topic; "" where that is not known.
        message: The broker library's own object; None where there is none.
    """

    body: Any
    headers: Headers = field(default_factory=dict)
    delivery_id: str | None = None
    destination: str = ""
    message: Any = None

    @property
    def received(self) -> Any:
        """What handlers and the policies' callables get: the broker library's own object, else the body."""
        return self.body if self.message is None else self.message

    @property
    def title(self) -> str:
        """What logs call it: by its delivery's id and its place, and by nothing that it says."""
        which = "a message" if self.delivery_id is None else f"message {self.delivery_id!r}"
        return f"{which} of {self.destination}"


_PAIR = 2


def envelope_of(message: Any) -> Envelope:
    """Return a message as an envelope: an `Envelope` as it is, else with its `headers`, if it has any."""
    if isinstance(message, Envelope):
        return message
    return Envelope(message, _headers_of(message), message=message)


def _headers_of(message: Any) -> Headers:
    found = getattr(message, "headers", None)
    if isinstance(found, Mapping):
        return found
    pairs = found if isinstance(found, list | tuple) else ()
    return pairs if all(isinstance(each, tuple) and len(each) == _PAIR for each in pairs) else ()


def name_of(function: Any) -> str:
    """Return a handler's name, the same in every process.

    An object is called like its class and a partial like its function, for their `repr` holds an address, and
    an id in a scope of that name would be new after every restart.
    """
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def with_stamp(headers: Mapping[str, Any], stamp: Mapping[str, str]) -> dict[str, Any]:
    """Return a copy of a message's headers with a publisher's stamp; what is there already stays as it is."""
    present = {name.lower() for name in headers}
    return {**headers, **{name: value for name, value in stamp.items() if name.lower() not in present}}


def id_of(
    policy: Policy, envelope: Envelope, *, called: object = None, derive: Callable[[Any], str | None]
) -> str | None:
    """Return a message's id under a policy, or None where an optional one is missing.

    Args:
        policy: The policy.
        envelope: The message.
        called: What the policy's callable source returned.
        derive: Returns the identity that the message's type declares.

    Raises:
        MissingLogicalIdError: The id is required.
        InvalidLogicalIdError: It is there and is no legal id.
        ConfigurationError: The source is none that messages have.
    """
    parts: dict[str, str | None]
    match policy.source:
        case "delivery":
            parts = {"the delivery's id": legal(envelope.delivery_id, field="the delivery's id")}
        case "header" | "anything":
            parts = {
                f"header.{name}": _from_header(envelope.headers, name)
                for name in policy.headers(DEDUPLICATION_HEADER)
            }
            if policy.source == "anything" and not any(parts.values()):
                parts = {f"header.{DEDUPLICATION_HEADER}": _derived(envelope.body, derive)}
        case "body":
            body = _decoded(envelope.body)
            parts = {
                f"body.{name}": legal(lookup(body, name), field=f"body.{name}") for name in policy.members
            }
        case source if callable(source):
            parts = {"the id": legal(called, field="the id")}
        case source:
            raise ConfigurationError(_no_such_source(source))
    return resolve(parts, required=policy.required)


def scope_of(
    policy: Policy, envelope: Envelope, endpoint: str, called: tuple[object, ...]
) -> tuple[str, ...]:
    """Return the parts of the scope that a message's id is unique in.

    Args:
        policy: The policy.
        envelope: The message.
        endpoint: The handler's name, where the message does not say where it arrived.
        called: What the callables in the policy's scope returned, in their order.

    Raises:
        MissingLogicalIdError: A callable returned nothing.
    """
    place = envelope.destination or endpoint
    if policy.source == "delivery":
        return ("delivery", place) if policy.identity == "id_and_destination" else ("delivery",)
    principals = iter([part_of(value) for value in called])
    match policy.scope:
        case None:
            return "message", place
        case str() as name:
            return (name,)
        case tuple() as parts:
            return tuple([part if isinstance(part, str) else next(principals) for part in parts])
        case _:
            return "message", place, *principals


def fingerprint_of(policy: Policy, envelope: Envelope, *, called: object = None) -> bytes | None:
    """Return the fingerprint of a message's body; None where the policy leaves it out, as by default.

    Raises:
        ConfigurationError: The body, or what the policy's callable returned, cannot be compared.
    """
    if not policy.fingerprint:
        return None
    return of_chosen(called) if callable(policy.fingerprint) else of_message(envelope.body)


def check_policy(policy: Policy) -> None:
    """Refuse a policy that messages cannot keep, where the handler is made.

    Raises:
        ConfigurationError: Its source or scope exists over HTTP only.
    """
    if policy.source in {"path", "query", "form"}:
        raise ConfigurationError(_no_such_source(policy.source))
    if not (policy.scope is None or isinstance(policy.scope, str | tuple) or callable(policy.scope)):
        msg = "scope=Depends(...) is for HTTP routes: give a name, or a callable that takes the message"
        raise ConfigurationError(msg)


def _no_such_source(source: object) -> str:
    return f"a message has no {source}: use source='header', 'body', 'delivery', 'anything' or a callable"


def _named(headers: Headers) -> Iterator[tuple[str, Any]]:
    """Yield headers by name: a mapping's, or the pairs of Kafka's libraries; redis-py's names are bytes."""
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        yield name.decode("latin-1") if isinstance(name, bytes) else str(name), value


def _from_header(headers: Headers, name: str) -> str | None:
    values = [value for key, value in _named(headers) if key.lower() == name.lower()]
    field = f"header.{name}"
    try:
        texts = [value.decode() if isinstance(value, bytes) else value for value in values]
    except UnicodeDecodeError as error:
        raise InvalidLogicalIdError(field, "it is not UTF-8") from error
    return from_field_values(texts, field=field)


def _derived(body: Any, derive: Callable[[Any], str | None]) -> str | None:
    try:
        message = _decoded(body)
    except InvalidLogicalIdError:
        return None  # no JSON, so no members
    return derive(message)


def _decoded(body: Any) -> Any:
    if not isinstance(body, bytes | bytearray | memoryview | str):
        return body
    try:
        return json.loads(bytes(body) if isinstance(body, memoryview) else body)
    except (ValueError, RecursionError) as error:
        raise InvalidLogicalIdError("body", "it is not JSON") from error
