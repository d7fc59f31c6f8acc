"""What start-up refuses: policies that cannot be kept on the route they are on, each with its fix."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args, get_origin

import fastapi.dependencies.models
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.http.bound import policies_of
from fastapi_dedup.http.dependency import depends_of, request_session
from fastapi_dedup.stores.leases_only import no_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastapi_dedup.http.dependency import Deduplicated

__all__ = [
    "Found",
    "is_claim",
    "refuse_request_session",
    "refuse_what_cannot_be_kept",
    "tree",
    "unused_session",
]


class Found(NamedTuple):
    """A FastAPI route, whichever release of FastAPI it comes from."""

    path: str
    methods: frozenset[str]
    dependant: Dependant

    @property
    def name(self) -> str:
        """The route's name in messages."""
        return f"{'/'.join(sorted(self.methods))} {self.path}"

    def claims(self) -> list[tuple[Dependant, Deduplicated]]:
        """Return the policies of the route, wherever they are in its tree of dependencies."""
        return [(each, policy) for each in tree(self.dependant) for policy in policies_of(each.call)]


def tree(dependant: Dependant) -> Iterator[Dependant]:
    """Yield every dependency below one."""
    for each in dependant.dependencies:
        yield each
        yield from tree(each)


def is_claim(dependant: Dependant) -> bool:
    """Tell whether a dependency is a policy."""
    return bool(policies_of(dependant.call))


def refuse_what_cannot_be_kept(found: Found, policy: Deduplicated) -> None:
    """Refuse a policy that would not do on its route what it says.

    Raises:
        ConfigurationError: It would not; the message names the route and the fix.
    """
    _refuse_what_never_applies(found, policy)
    if policy.source == "path":
        _refuse_unknown_parameters(found, policy)
    if policy.source == "body":
        _refuse_unknown_fields(found, policy)
    if policy.session is not None:
        _refuse_two_sessions(found, policy)


def _refuse_what_never_applies(found: Found, policy: Deduplicated) -> None:
    if policy.source == "delivery":
        msg = f"{found.name}: source='delivery' is a broker's id of a message, and a request has none"
        raise ConfigurationError(msg)
    unsafe = found.methods - {"GET", "HEAD", "OPTIONS", "TRACE"}
    if unsafe and not unsafe & policy.applies_to:
        msg = (
            f"{found.name}: its policy applies to {', '.join(sorted(policy.applies_to))} only, so it never "
            f"does anything here: add the route's method to Deduplicated(methods=...)"
        )
        raise ConfigurationError(msg)


# Members: a mistyped one would find nothing for ever, and silently so where the id is optional.


def _refuse_unknown_parameters(found: Found, policy: Deduplicated) -> None:
    dependants = (found.dependant, *tree(found.dependant))
    known = {field.alias for each in dependants for field in each.path_params}
    known |= {part[1:-1].partition(":")[0] for part in found.path.split("/") if part.startswith("{")}
    for member in policy.members:
        if member not in known:
            among = f"its path parameters ({', '.join(sorted(known)) or 'there are none'})"
            _refuse_member(found, member, among)


def _refuse_unknown_fields(found: Found, policy: Deduplicated) -> None:
    bodies = found.dependant.body_params
    embedded = len(bodies) > 1 or any(getattr(field.field_info, "embed", None) for field in bodies)
    if not bodies:
        return
    for member in policy.members:
        first, *rest = member.split(".")
        if embedded:
            tops = {field.alias: field.field_info.annotation for field in bodies}
            if first not in tops:
                _refuse_member(found, member, f"the request body's fields ({', '.join(sorted(tops))})")
            inside: Any = tops[first]
        else:
            inside, rest = bodies[0].field_info.annotation, [first, *rest]
        for step in rest:
            names = _names_in(inside, step)
            if names is None:
                break
            if step not in names:
                _refuse_member(found, member, f"the request body's fields ({', '.join(sorted(names))})")
            inside = names[step]


def _refuse_member(found: Found, member: str, among: str) -> None:
    msg = f"{found.name}: member={member!r} is not among {among}: name it as it is spelled on the wire"
    raise ConfigurationError(msg)


def _names_in(annotation: Any, step: str) -> Mapping[str, Any] | None:
    """Return what a step of a dotted path may be called inside a type; None where that cannot be said."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _names_in(get_args(annotation)[0], step)
    if origin in {Union, types.UnionType}:
        others = [each for each in get_args(annotation) if each is not type(None)]
        return _names_in(others[0], step) if len(others) == 1 else None
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {step: get_args(annotation)[0]} if step.isdecimal() and get_args(annotation) else {}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _wire_names(annotation)
    return None


def _wire_names(model: type[BaseModel]) -> Mapping[str, Any] | None:
    if model.model_config.get("extra") == "allow":
        return None
    names: dict[str, Any] = {}
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, field in model.model_fields.items():
        alias = field.validation_alias or field.alias
        if alias is not None and not isinstance(alias, str):
            return None  # AliasPath and AliasChoices: too many shapes to judge
        names[alias or name] = field.annotation
        if by_name:
            names[name] = field.annotation
    return names


# Sessions


def _refuse_two_sessions(found: Found, policy: Deduplicated) -> None:
    """Refuse a claim whose session is another one than the handler's, though both come of one callable.

    FastAPI caches a dependency by its callable *and* its scope, so `Depends(get_session)` and
    `Depends(get_session, scope="function")` on one route are two sessions, and thus two transactions.
    """
    call = _session_call(policy)
    claims = [claim for claim, each in found.claims() if each == policy]
    ours = [sub for claim in claims for sub in tree(claim) if sub.call == call]
    theirs = [sub for sub in tree(found.dependant) if sub.call == call and not _is_in(sub, ours)]
    name = _name_of(call)
    differing = [each for each in theirs if any(_cached_as(each) != _cached_as(our) for our in ours)]
    if call is not request_session and differing:
        wanted = differing[0]
        scope = f', scope="{wanted.scope}"' if wanted.scope else ""
        fix = f"session=Depends({name}{scope})" if wanted.use_cache else f"a {name} without use_cache=False"
        msg = (
            f"{found.name}: the claim and the handler would use two different sessions of {name}, and so two "
            f"transactions, because FastAPI caches dependencies by callable and scope: write "
            f"Deduplicated({fix}), so that both name it alike"
        )
        raise ConfigurationError(msg)


def refuse_request_session(found: Found) -> None:
    """Refuse `RequestSession` on a route of a runtime without a database.

    Raises:
        ConfigurationError: The route, or a dependency of it, takes it.
    """
    if any(each.call is request_session for each in tree(found.dependant)):
        msg = f"{found.name}: {no_database('RequestSession')}"
        raise ConfigurationError(msg)


def unused_session(found: Found, policy: Deduplicated) -> str | None:
    """Return the name of the app's session that a claim rides and the handler never uses; None if it does."""
    call = _session_call(policy)
    if call is None:
        return None
    claims = [claim for claim, each in found.claims() if each == policy]
    ours = [sub for claim in claims for sub in tree(claim)]
    used = any(sub.call == call and not _is_in(sub, ours) for sub in tree(found.dependant))
    return None if used or any(claim.name for claim in claims) else _name_of(call)


def _session_call(policy: Deduplicated) -> Any:
    marker = depends_of(policy.session)
    return policy.session if marker is None else marker.dependency


def _name_of(call: Any) -> str:
    return getattr(call, "__name__", repr(call))


def _is_in(dependant: Dependant, dependants: list[Dependant]) -> bool:
    return any(each is dependant for each in dependants)


def _cached_as(dependant: Dependant) -> tuple[object, ...]:
    """Return what tells two dependencies of one callable apart in FastAPI's cache."""
    never_cached = None if dependant.use_cache else object()
    key_of = getattr(fastapi.dependencies.models, "_get_cache_key", None)  # since FastAPI's models have slots
    if key_of is not None:
        return never_cached, key_of(dependant=dependant)
    if (key := getattr(dependant, "cache_key", None)) is not None:
        return never_cached, key
    call = dependant.call
    generates = any(
        inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
        for each in (call, getattr(call, "__call__", None))  # noqa: B004 - looked at, not called
    )
    return never_cached, dependant.scope or ("request" if generates else None)
