"""The options of a policy, validated once, where it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

from fastapi_dedup.claims import positive
from fastapi_dedup.errors import ConfigurationError

__all__ = ["Endpoint", "NamedSource", "Policy", "Source", "failure_status"]

NamedSource: TypeAlias = Literal["header", "body", "path", "query", "form", "delivery", "anything"]
Source: TypeAlias = NamedSource | Callable[..., Any]

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, section 5.6.2
_NEEDS_MEMBER = frozenset({"body", "path", "query", "form"})


def failure_status(status: int) -> bool:
    """Tell whether a returned HTTP status means that the work was not done.

    Errors (400 and up) do. So do 307 and 308, which ask for the same request at another address
    (RFC 9110, sections 15.4.8 and 15.4.9); a 303 after a form post is a success.
    """
    return status >= 400 or status in {307, 308}  # noqa: PLR2004 - the numbers are the rule


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where deliveries arrive, as the predicates of `Dedup.require` see it.

    Attributes:
        kind: `"http"` for a route, `"message"` for a message handler.
        name: The route's path, or the handler's name.
        function: The function that does the work.
        methods: A route's HTTP methods, in capitals; empty for message handlers.
    """

    kind: Literal["http", "message"]
    name: str
    function: Callable[..., Any]
    methods: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Policy:
    """One immutable policy: which id an intent has, and how its duplicates are answered.

    Args:
        source: Where the id is: `"header"`, `"body"`, `"path"`, `"query"`, `"form"`, `"delivery"` (the
            broker's own id of the message, for message handlers), `"anything"` (the door's natural
            place: the header over HTTP; for messages the header, else the identity of the message's
            type) or a callable, plain or async, that takes the request or message and returns the id.
        member: The header, parameter or field that holds the id; a dotted path inside a body; or several
            of them, composed so that no two compositions meet. Names are those on the wire. Default
            for headers: `Idempotency-Key` over HTTP, `deduplication-id` for messages. Required for
            body, path, query and form.
        required: Whether a missing id is refused. With False a delivery without an id runs
            undeduplicated and costs no query.
        window: How long the id is honoured, from the claim. None takes the runtime's.
        scope: The namespace that the id is unique in. None is the door's own: method and path over HTTP,
            the queue or subject for messages.
            A string is a namespace of your own, shared by whoever names it. A callable (or, over
            HTTP, a `Depends(...)`) returns a principal, such as a user or tenant, which joins the
            door's own scope. A tuple of strings and callables is taken exactly as it stands.
        duplicate_status: How HTTP answers a duplicate: any status from 200 to 599. Problem details
            for 4xx and 5xx, a small JSON document for the others, no body with 204, 205 and 304.
        in_flight: How a duplicate of unfinished work is answered: `"reject"` at once, or `"wait"` for its
            outcome.
        wait_timeout: How long `"wait"` waits before it answers like `"reject"`.
        session: The dependency that gives the handler's own session: a callable, a `Depends(...)` or an
            `Annotated` alias. None is `RequestSession`.
        lease: Claims in a short transaction of its own and keeps the claim alive while the handler runs,
            instead of riding the handler's transaction: for handlers that are slow, or that do what no
            ROLLBACK undoes. The duration is how long the claim survives an owner that has died. None, the
            default, rides.
        on_abandoned: For leased claims: what becomes of an id whose owner died. `"retry"`, the default, lets
            the next delivery run when the lease is over; `"block"` keeps the id in flight until the window
            ends or an operator releases it, for effects that must not be repeated.
        replay: Not in this release: only False.
        fingerprint: Whether the payload must be the same for a retry. None compares it where an HTTP
            header carries the id, apart from the payload; True and False force it, and a callable
            takes the request or message and returns what to compare: bytes, text, or what has members.
        failed: Tells whether a returned status means failure, which frees the id.
        store: `"durable"` claims in the database. `"memory"` claims in a guard of this process: best effort,
            lost at restart, unknown to sibling processes, and without a query.
        keep_after_handling: For `source="delivery"`: how long a message's id is kept after it was handled.
            Default 5 minutes.
        identity: For `source="delivery"`: whether a message that fans out to several queues is one
            delivery per queue (`"id_and_destination"`, the default) or one in all (`"id"`).
        methods: The HTTP methods that the policy applies to; on others it does nothing, so that a
            router's policy leaves its GET routes alone.

    Raises:
        ConfigurationError: An option, or a combination of them, cannot be kept.
    """

    source: Source = "header"
    member: str | Iterable[str] | None = None
    _: KW_ONLY
    required: bool = True
    window: timedelta | None = None
    scope: Any = None
    duplicate_status: int = 409
    in_flight: Literal["reject", "wait"] = "reject"
    wait_timeout: timedelta = timedelta(seconds=10)
    session: Any = None
    lease: timedelta | None = None
    on_abandoned: Literal["retry", "block"] = "retry"
    replay: bool = False
    fingerprint: bool | Callable[..., Any] | None = None
    failed: Callable[[int], bool] = failure_status
    store: Literal["durable", "memory"] = "durable"
    keep_after_handling: timedelta = timedelta(minutes=5)
    identity: Literal["id", "id_and_destination"] = "id_and_destination"
    methods: Iterable[str] = ("POST", "PUT", "PATCH", "DELETE")

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "member", _members(self.source, self.member))
        set_(self, "scope", _scope(self.scope))
        if isinstance(self.methods, str) or not isinstance(self.methods, Iterable):
            msg = f"methods must be a list of method names, not {self.methods!r}"
            raise ConfigurationError(msg)
        set_(self, "methods", frozenset(map(_method, self.methods)))
        _validate(self)
        set_(self, "_hash", _hash_of(self))

    def __hash__(self) -> int:
        """Return a hash made once: FastAPI asks for it several times per request."""
        made: int = self.__dict__["_hash"]
        return made

    @property
    def members(self) -> tuple[str, ...]:
        """The members as a tuple; empty where none is given."""
        return self.member  # type: ignore[return-value]  # __post_init__ made it a tuple

    @property
    def applies_to(self) -> frozenset[str]:
        """The HTTP methods that the policy applies to, in capitals."""
        return self.methods  # type: ignore[return-value]  # __post_init__ made it a frozenset

    @property
    def rides(self) -> bool:
        """Whether its claims are in the transaction of the handler's work."""
        return self.store == "durable" and self.lease is None

    @property
    def patience(self) -> timedelta | None:
        """How long a duplicate waits for the outcome of unfinished work; None where it does not wait."""
        return self.wait_timeout if self.in_flight == "wait" else None

    def headers(self, default: str) -> tuple[str, ...]:
        """Return the headers that carry the id: the members, else the door's own header.

        Args:
            default: The door's own header.
        """
        return self.members or (default,)


def _members(source: Source, member: str | Iterable[str] | None) -> tuple[str, ...]:
    if member == ():  # from a policy that is varied with dataclasses.replace()
        member = None
    if callable(source):
        if member is not None:
            msg = "a callable source returns the whole id: leave member out, or compose in the callable"
            raise ConfigurationError(msg)
        return ()
    if source not in get_args(NamedSource):
        msg = f"source must be one of {', '.join(get_args(NamedSource))} or a callable, not {source!r}"
        raise ConfigurationError(msg)
    if member is None:
        if source in _NEEDS_MEMBER:
            msg = f"source={source!r} needs member=: the name of the field that holds the id"
            raise ConfigurationError(msg)
        return ()
    if source == "delivery":
        msg = "source='delivery' is the broker's own id of the message: leave member out"
        raise ConfigurationError(msg)
    members = (member,) if isinstance(member, str) else tuple(member)
    _check_names(source, members)
    return members


def _check_names(source: Source, members: tuple[str, ...]) -> None:
    for name in members:
        if not isinstance(name, str) or not name.strip() or (source == "body" and "" in name.split(".")):
            msg = f"member {name!r} is no name: give a field name such as 'sku' or a dotted path 'order.sku'"
            raise ConfigurationError(msg)
        if source in {"header", "anything"} and not _TOKEN.fullmatch(name):
            msg = f"member {name!r} is no header name (RFC 9110, section 5.6.2)"
            raise ConfigurationError(msg)
    if not members or len(set(members)) != len(members):
        msg = f"member must name one field, or several different ones, not {members!r}"
        raise ConfigurationError(msg)


def _scope(scope: Any) -> Any:
    parts = tuple(scope) if isinstance(scope, list | tuple) else (scope,)
    if scope is not None and not parts:
        msg = "scope must not be empty: leave it out for the door's own scope"
        raise ConfigurationError(msg)
    for part in parts:
        if isinstance(part, str) and not part.strip():
            msg = "scope must not be blank: name the namespace, or leave scope out"
            raise ConfigurationError(msg)
        if isinstance(scope, list | tuple) and not (isinstance(part, str) or callable(part)):
            msg = f"the parts of a scope are names and callables, not {part!r}"
            raise ConfigurationError(msg)
    return parts if isinstance(scope, list | tuple) else scope


def _method(name: Any) -> str:
    if not isinstance(name, str) or not _TOKEN.fullmatch(name):
        msg = f"methods must be names of HTTP methods, such as 'POST', not {name!r}"
        raise ConfigurationError(msg)
    return name.upper()


def _hashable(option: Any) -> Any:
    """Return an option so that it can be hashed: older FastAPI's `Depends(...)` cannot."""
    if hasattr(option, "dependency") and hasattr(option, "use_cache"):
        return option.dependency, option.use_cache, getattr(option, "scope", None)
    return option


def _hash_of(policy: Policy) -> int:
    """Hash every option."""
    try:
        return hash(tuple(_hashable(getattr(policy, each.name)) for each in fields(policy)))
    except TypeError as error:
        msg = f"every option of a policy must be hashable, for FastAPI keys its cache on it: {error}"
        raise ConfigurationError(msg) from error


def _validate(policy: Policy) -> None:
    if policy.window is not None:
        positive("window", policy.window)
    positive("wait_timeout", policy.wait_timeout)
    _check_switches(policy)
    positive("keep_after_handling", policy.keep_after_handling)
    if policy.store not in ("durable", "memory"):
        msg = f"store must be 'durable' or 'memory', not {policy.store!r}"
        raise ConfigurationError(msg)
    if policy.identity not in ("id", "id_and_destination"):
        msg = f"identity must be 'id' or 'id_and_destination', not {policy.identity!r}"
        raise ConfigurationError(msg)
    status = policy.duplicate_status
    if isinstance(status, bool) or not isinstance(status, int) or not 200 <= status <= 599:  # noqa: PLR2004
        msg = f"duplicate_status must be a final HTTP status from 200 to 599, not {status!r}"
        raise ConfigurationError(msg)
    if policy.in_flight not in ("reject", "wait"):
        msg = f"in_flight must be 'reject' or 'wait', not {policy.in_flight!r}"
        raise ConfigurationError(msg)
    _check_lease(policy)
    _check_delivery(policy)
    _refuse_what_is_not_here_yet(policy)
    if not callable(policy.failed):
        msg = f"failed must be a callable that takes a status, not {policy.failed!r}"
        raise ConfigurationError(msg)
    if not policy.methods:
        msg = "methods must not be empty: a policy that applies to nothing protects nothing"
        raise ConfigurationError(msg)


def _check_lease(policy: Policy) -> None:
    if policy.on_abandoned not in ("retry", "block"):
        msg = f"on_abandoned must be 'retry' or 'block', not {policy.on_abandoned!r}"
        raise ConfigurationError(msg)
    if policy.lease is None:
        if policy.on_abandoned != "retry":
            msg = "on_abandoned is about leased claims, and a riding one is never abandoned: give lease= too"
            raise ConfigurationError(msg)
        return
    positive("lease", policy.lease)
    if policy.store == "memory":
        msg = "store='memory' has no leases: nothing in it outlives the process. Leave lease or store out"
        raise ConfigurationError(msg)


def _check_delivery(policy: Policy) -> None:
    """Refuse options that would do nothing: a delivery's id has a window and a scope of its own."""
    defaults = {each.name: each.default for each in fields(policy)}
    if policy.source == "delivery":
        mistaken = {
            "window": "source='delivery' counts from the work's end: give keep_after_handling, not window",
            "scope": "source='delivery' has a scope of its own, which identity= chooses: leave scope out",
        }
    else:
        mistaken = {
            "keep_after_handling": "keep_after_handling is about source='delivery': give window= instead",
            "identity": "identity is about source='delivery': give scope= instead",
        }
    for name, msg in mistaken.items():
        if getattr(policy, name) != defaults[name]:
            raise ConfigurationError(msg)


def _refuse_what_is_not_here_yet(policy: Policy) -> None:
    if policy.replay:
        msg = "replay is not in this release: leave it out, and answer duplicates with duplicate_status"
        raise ConfigurationError(msg)


def _check_switches(policy: Policy) -> None:
    if not isinstance(policy.required, bool):
        msg = f"required must be True or False, not {policy.required!r}"
        raise ConfigurationError(msg)
    if not (
        policy.fingerprint is None or isinstance(policy.fingerprint, bool) or callable(policy.fingerprint)
    ):
        msg = f"fingerprint must be None, True, False or a callable, not {policy.fingerprint!r}"
        raise ConfigurationError(msg)
