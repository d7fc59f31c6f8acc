"""Which logical id a message has, on the publisher's side, Pure, no I/O.

A type says its identity once, by a marker (`Annotated[str, DeduplicationIdentity()]`) or a class decorator
(`@deduplication_identity("sku")`), and an app states rules over types in `Identities`. What comes first in
this list decides:

1. the id that is given at the call;
2. the rules that apply to the message's type, in the order of their registration;
3. the type's own marker or decorator.

Who decides, decides alone: None or "" there means that the message has no id, and nobody below is asked.
Deriving never enforces: whether an id is required is the consumer's policy.

Pydantic, msgspec and attrs are known by what their classes carry, and never imported.
"""

from __future__ import annotations

import enum
import inspect
import sys
import typing
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

from fastapi_dedup.declared import (
    DECLARED,
    DeduplicationIdentity,
    checked_names,
    checked_type,
    deduplication_identity,
    marks_of,
    own_members,
    unannotated,
)
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identity import compose, legal
from fastapi_dedup.stamping import (
    DEDUPLICATION_HEADER,
    NATS_MESSAGE_ID,
    headers_for,
    nats_headers_for,
    sqs_arguments_for,
    sqs_deduplication_id,
)

__all__ = [
    "DEDUPLICATION_HEADER",
    "NATS_MESSAGE_ID",
    "UNSET",
    "DeduplicationIdentity",
    "Identities",
    "deduplication_identity",
    "headers_for",
    "nats_headers_for",
    "sqs_arguments_for",
    "sqs_deduplication_id",
]


class _Unset(enum.Enum):
    UNSET = "unset"


UNSET: Final = _Unset.UNSET
"""Nothing is said about the id. None and "" do say something: that there is none."""

_Derive: TypeAlias = Callable[[Any], str | _Unset | None]
_Rule: TypeAlias = Callable[[type], _Derive | None]


class Identities:
    """The rules that an app has over its message types, and the order in which it and they decide.

    One instance lives at `dedup.identities`. Register at start-up: a rule that is registered later applies
    from then on.
    """

    def __init__(self) -> None:
        self._rules: tuple[_Rule, ...] = ()
        # What applies to a type is found out once; a type that nobody else keeps may go.
        self._plans: weakref.WeakKeyDictionary[type, tuple[_Derive, ...]] = weakref.WeakKeyDictionary()

    def by_message(self, kind: type, derive: Callable[[Any], object]) -> None:
        """Derive the ids of a type's messages, its subclasses' included.

        Args:
            kind: A class. An ABC stands for its implementers, and so does a Protocol: for the classes that
                inherit from it, or have all of its members (runtime-checkable or not).
            derive: Takes a message and returns its id; None or "" if it has none. What it raises goes
                through to the publisher.

        Raises:
            ConfigurationError: `kind` is no class, or is a TypedDict, whose messages are plain dicts when
                the program runs; or `derive` is async or does not take one argument.
        """
        checked_type("by_message", kind)
        if issubclass(kind, dict) and hasattr(kind, "__total__"):
            msg = f"by_message: messages of {kind.__qualname__} are plain dicts; use by_member_named(...)"
            raise ConfigurationError(msg)
        self._register(partial(_by_type, partial(_implements, kind), _checked_callable("by_message", derive)))

    def by_predicate(self, predicate: Callable[[type], bool], derive: Callable[[Any], object]) -> None:
        """Derive the ids of the messages whose type a predicate picks.

        Args:
            predicate: Takes a message's type, once per type, and tells whether the rule applies.
            derive: As in `by_message`.

        Raises:
            ConfigurationError: The predicate is a class, or one of the two is async or does not take one
                argument.
        """
        if isinstance(predicate, type):
            msg = f"by_predicate takes a predicate over types: for {predicate.__qualname__} use by_message"
            raise ConfigurationError(msg)
        _checked_callable("by_predicate", predicate)
        self._register(partial(_by_type, predicate, _checked_callable("by_predicate", derive)))

    def by_member_named(self, *names: str) -> None:
        """Take the id from the first of these members that a message's type has.

        A member that is there and is None or "" means that the message has no id: the names after it are
        not asked. A mapping's members are its keys.

        Args:
            names: Names of fields, properties or keys. At least one.

        Raises:
            ConfigurationError: There is no name, a name is blank, or one is given twice.
        """
        self._register(partial(_by_member_named, checked_names("by_member_named", names)))

    def of(self, message: Any, explicit: Any = UNSET, *, as_type: type | None = None) -> str | None:
        """Return a message's logical id, or None where it has none.

        Args:
            message: The message.
            explicit: The id that is given at the call. None or "" opts the message out; `UNSET`, the
                default, leaves it to the rules and the type.
            as_type: The type whose identity counts. None is the message's own. Give the TypedDict of a
                message that is a dict.

        Raises:
            InvalidLogicalIdError: There is an id, and it is no legal one.
            ConfigurationError: The type is declared wrongly (see `check`).
        """
        plan = self._plan(type(message) if as_type is None else checked_type("as_type", as_type))
        if explicit is not UNSET:
            return legal(explicit, field="logical_id")
        for derive in plan:
            logical_id = derive(message)
            if not isinstance(logical_id, _Unset):
                return logical_id
        return None

    def check(self, *kinds: type) -> None:
        """Find out now what is wrong with message types, instead of at their first message.

        Raises:
            ConfigurationError: A type marks two fields; marks what is no whole field; is marked and
                decorated; its decorator names what is no member of it; or it is no class.
        """
        for kind in kinds:
            self._plan(checked_type("check", kind))

    def _register(self, rule: _Rule) -> None:
        # In this order, and the plans replaced rather than cleared: a thread that is just making a plan
        # from the old rules puts it into the old plans.
        self._rules = (*self._rules, rule)
        self._plans = weakref.WeakKeyDictionary()

    def _plan(self, kind: type) -> tuple[_Derive, ...]:
        plans = self._plans
        plan = plans.get(kind)
        if plan is None:
            applied = [rule(kind) for rule in (*self._rules, _by_own_members)]
            plan = plans[kind] = tuple([derive for derive in applied if derive is not None])
        return plan


def _by_type(applies: Callable[[type], bool], derive: Callable[[Any], object], kind: type) -> _Derive | None:
    if not applies(kind):
        return None
    field = f"the id of {kind.__qualname__}"
    return lambda message: legal(derive(message), field=field)


def _implements(base: type, kind: type) -> bool:
    if not getattr(base, "_is_protocol", False):
        return issubclass(kind, base)
    if sys.version_info >= (3, 13):
        wanted = typing.get_protocol_members(base)
    else:
        wanted = typing._get_protocol_attrs(base)  # type: ignore[attr-defined]  # noqa: SLF001
    # Everything has all the members of a protocol without any: that one is for its subclasses only.
    return base in kind.__mro__ or (bool(wanted) and set(wanted) <= {*dir(kind), *_data_members(kind)})


def _by_member_named(names: tuple[str, ...], kind: type) -> _Derive | None:
    if issubclass(kind, Mapping):
        return lambda message: next((_member(name, message) for name in names if name in message), UNSET)
    members = _data_members(kind)
    return next((partial(_member, name) for name in names if name in members), None)


def _data_members(kind: type) -> set[str]:
    return {*marks_of(kind), *unannotated(kind)}


def _by_own_members(kind: type) -> _Derive | None:
    members = own_members(kind, getattr(kind, DECLARED, ()))
    return partial(_composed, members) if members else None


def _composed(members: tuple[str, ...], message: Any) -> str | None:
    parts = [_member(name, message) for name in members]
    present = [part for part in parts if part is not None]
    return legal(compose(present), field=", ".join(members)) if len(present) == len(parts) else None


def _member(name: str, message: Any) -> str | None:
    if isinstance(message, Mapping):
        return legal(message.get(name), field=name)
    kind = type(message).__qualname__
    try:
        value = getattr(message, name)
    except AttributeError as error:
        msg = f"{kind} declares {name}, and this message does not have it: {error}"
        raise ConfigurationError(msg) from error
    return legal(value, field=f"{kind}.{name}")


def _checked_callable(taker: str, given: Any) -> Any:
    try:
        inspect.signature(given).bind(object())
        fits = True
    except TypeError:
        fits = False
    except ValueError:  # a builtin that does not tell
        fits = True
    if not fits or inspect.iscoroutinefunction(given) or inspect.iscoroutinefunction(given.__call__):
        msg = f"{taker} takes a callable of one argument that is not async, not {given!r}"
        raise ConfigurationError(msg)
    return given
