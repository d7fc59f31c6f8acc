"""What start-up does with an app's routes: inspect every policy, and put each claim where it belongs.

FastAPI tells a dependency nothing about the route that it is on, so this is where a route and its policies
are seen together. Four things come of it, for every route:

1. its claims run after all of its other dependencies, so that authentication answers first;
2. a policy that cannot be kept there is refused, with the route's name and the fix;
3. the middleware's own policy joins, unless the route has one on the same header;
4. OpenAPI shows it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import fastapi.routing
from fastapi import Depends, FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_parameterless_sub_dependant
from starlette.routing import Host, Mount, Route

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.http.bound import Bound, policies_of
from fastapi_dedup.http.checks import (
    Found,
    is_claim,
    refuse_request_session,
    refuse_what_cannot_be_kept,
    tree,
    unused_session,
)
from fastapi_dedup.http.dependency import Deduplicated
from fastapi_dedup.http.openapi import amend_operation
from fastapi_dedup.http.reading import DEFAULT_HEADER
from fastapi_dedup.policy import Endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from starlette.types import ASGIApp

    from fastapi_dedup.policy import Policy

__all__ = ["Inspected", "inspect_app"]


logger = logging.getLogger("fastapi_dedup")


class Inspected(NamedTuple):
    """What came of an inspection.

    Attributes:
        version: Changes when the app's routes do.
        routed: Whether the app has routes that can be inspected; without, it is some other ASGI app.
    """

    version: object
    routed: bool


def version_of(app: Any) -> object:
    """Return what changes when routes are added to an app or to a router that it includes."""
    router = getattr(app, "router", app)
    counted = getattr(router, "_get_routes_version", None)  # FastAPI since it includes routers lazily
    return counted() if counted is not None else len(getattr(router, "routes", ()))


def inspect_app(
    app: Any,
    own_policy: Deduplicated | None,
    claiming: Callable[[ASGIApp], ASGIApp],
    *,
    required_of: Callable[[Endpoint], Policy | None],
    prepare: Callable[[Policy], object],
    has_database: bool,
    warn_once: Callable[[str, str], bool],
) -> Inspected:
    """Inspect an app's routes, and prepare them. Doing it again does no harm.

    Args:
        app: The app inside the middleware.
        own_policy: The middleware's own policy, if it deduplicates by header.
        claiming: Wraps a plain ASGI endpoint so that the middleware's policy claims before it runs.
        required_of: Returns the policy that is required of an endpoint which has none of its own.
        prepare: Sees to what a policy needs, and refuses one that the runtime cannot keep.
        has_database: Whether the runtime has sessions to give.
        warn_once: Tells whether a warning of a kind about a route is to be logged: the first time only.

    Raises:
        ConfigurationError: A policy cannot be kept on its route.
    """
    routes = getattr(app, "routes", None)
    if routes is None:
        return Inspected(None, routed=False)
    for found in _fastapi_routes(routes):
        _prepare(found, own_policy, required_of, warn_once)
        _prepare_policies(found, prepare)
        if not has_database:
            refuse_request_session(found)
    if own_policy is not None:
        _wrap_plain_routes(routes, claiming)
    for each in _fastapi_apps(app):
        _document(each)
    return Inspected(version_of(app), routed=True)


# Walking


def _contexts(routes: Sequence[Any]) -> Iterator[Any]:
    walk = getattr(fastapi.routing, "iter_route_contexts", None)  # FastAPI since it includes routers lazily
    return iter(routes) if walk is None else walk(routes)


def _fastapi_routes(routes: Sequence[Any]) -> Iterator[Found]:
    for context in _contexts(routes):
        methods = getattr(context, "methods", None)  # a websocket's route has none
        if methods and isinstance(dependant := getattr(context, "dependant", None), Dependant):
            yield Found(context.path_format, frozenset(methods), dependant)
        elif (inner := _mounted(context)) is not None:
            yield from _fastapi_routes(inner.routes)


def _mounted(context: Any) -> Any:
    """Return the mounted app whose routes can be seen, through its middlewares; None where there is none."""
    route = _served_by(context)
    return routed(route.app) if isinstance(route, Mount | Host) else None


def routed(app: Any) -> Any:
    """Return the app with routes that an ASGI app is, or wraps; None where there is none."""
    while app is not None and not hasattr(app, "routes"):
        app = getattr(app, "app", None)
    return app


def _served_by(context: Any) -> Any:
    """Return the route that serves a request; an included router's are copies with its prefix."""
    effective = getattr(context, "_effective_route", context)
    copied = getattr(effective, "starlette_route", None)
    return copied if copied is not None else getattr(effective, "original_route", effective)


def _fastapi_apps(app: Any) -> Iterator[FastAPI]:
    if isinstance(app, FastAPI):
        yield app
    for context in _contexts(app.routes):
        if (inner := _mounted(context)) is not None:
            yield from _fastapi_apps(inner)


# Preparing


def _prepare(
    found: Found,
    own_policy: Deduplicated | None,
    required_of: Callable[[Endpoint], Policy | None],
    warn_once: Callable[[str, str], bool],
) -> None:
    root = found.dependant
    _drop_overruled(found)
    policies = [policy for _, policy in found.claims()]
    if not any(policy != own_policy for policy in policies):
        root.dependencies += _required(found, required_of)
    for policy in [policy for _, policy in found.claims() if policy != own_policy]:
        refuse_what_cannot_be_kept(found, policy)
        if (session := unused_session(found, policy)) is not None and warn_once("session", found.name):
            logger.warning(
                "%s has a claim in a session of %s that its handler never uses, so a crash between the "
                "two commits doubles or loses work. Let the handler depend on %s, or take the claim's own "
                "session",
                found.name,
                session,
                session,
            )
    own = None
    if own_policy is not None and own_policy.applies_to & found.methods:
        own = _what_is_left(own_policy, found, [policy for _, policy in found.claims()])
    host = None if own is None else _host_of(root)
    if own is not None and host is None:
        root.dependencies.append(_sub_dependant(own, found))
    # In front of the handler: first who answers for the caller, then who claims on the way, then the claims.
    root.dependencies.sort(
        key=lambda each: is_claim(each) + any(is_claim(sub) for sub in (each, *tree(each)))
    )
    checked = [each for each in (root, *tree(root)) if _takes_parameters(each)]
    for claim in filter(is_claim, tree(root)):
        bound = claim.call if isinstance(claim.call, Bound) else Bound(*policies_of(claim.call))
        claim.call = bound
        bound.checked = checked
        if claim is host:
            bound.also = own


def _host_of(root: Dependant) -> Dependant | None:
    """Return the claim that the middleware's own policy can go with: one that FastAPI calls in any case.

    It does not call a claim whose policy it has met before, in a dependency of another dependency.
    """
    met = [
        policy
        for each in root.dependencies
        if not is_claim(each)
        for sub in tree(each)
        for policy in policies_of(sub.call)
    ]
    claims = (each for each in root.dependencies if is_claim(each))
    return next((each for each in claims if policies_of(each.call)[0] not in met), None)


def _prepare_policies(found: Found, prepare: Callable[[Policy], object]) -> None:
    for _, policy in found.claims():
        try:
            prepare(policy)
        except ConfigurationError as error:
            msg = f"{found.name}: {error}"
            raise ConfigurationError(msg) from error


def _sub_dependant(policy: Deduplicated, found: Found) -> Dependant:
    return get_parameterless_sub_dependant(depends=Depends(policy), path=found.path)


def _required(found: Found, required_of: Callable[[Endpoint], Policy | None]) -> list[Dependant]:
    function = found.dependant.call
    policy = None if function is None else required_of(Endpoint("http", found.path, function, found.methods))
    if policy is None:
        return []
    if not isinstance(policy, Deduplicated):
        msg = f"{found.name}: what require() asks of a route must be a Deduplicated(...), not {policy!r}"
        raise ConfigurationError(msg)
    return [_sub_dependant(policy, found)]


def _drop_overruled(found: Found) -> None:
    """Drop policies, for the methods of those nearer to the handler that have their header too.

    One request, one claim per id.
    """
    dependencies = found.dependant.dependencies
    claims = [each for each in dependencies if is_claim(each)]
    for position, claim in enumerate(claims):
        policy, *_ = policies_of(claim.call)
        nearer = [each for other in claims[position + 1 :] for each in policies_of(other.call)]
        left = policy if claim.name is not None else _what_is_left(policy, found, nearer)
        if left is None:
            dependencies.remove(claim)
        elif left is not policy:
            claim.call = left


def _what_is_left(policy: Deduplicated, found: Found, others: Iterable[Deduplicated]) -> Deduplicated | None:
    """Return a policy for the methods of a route that no other covers on its header; None if none is left."""
    covered: frozenset[str] = frozenset()
    for each in others:
        if _same_header(policy, each):
            covered |= each.applies_to
    if not covered & policy.applies_to:
        return policy
    left = (policy.applies_to & found.methods) - covered
    return replace(policy, methods=left) if left else None


def _same_header(first: Any, second: Any) -> bool:
    headers = {"header", "anything"}
    return first.source in headers and second.source in headers and _headers(first) == _headers(second)


def _headers(policy: Deduplicated) -> list[str]:
    return [name.lower() for name in policy.headers(DEFAULT_HEADER)]


def _takes_parameters(dependant: Dependant) -> bool:
    return bool(
        dependant.header_params or dependant.cookie_params or dependant.query_params or dependant.path_params
    )


# Plain ASGI endpoints


def _wrap_plain_routes(routes: Sequence[Any], claiming: Callable[[ASGIApp], ASGIApp]) -> None:
    """Let the middleware's policy claim just before a plain Starlette route or a mounted app runs.

    That is inside of the route's or mount's own middleware, which may have to answer for the caller first.
    """
    for context in _contexts(routes):
        route = _served_by(context)
        if (inner := _mounted(context)) is not None:
            _wrap_plain_routes(inner.routes, claiming)
        elif isinstance(route, Mount | Host) or _is_plain(route):
            holder = _innermost(route)
            holder.app = claiming(holder.app)


def _is_plain(route: Any) -> bool:
    return isinstance(route, Route) and not isinstance(getattr(route, "dependant", None), Dependant)


def _innermost(route: Any) -> Any:
    """Return what holds the innermost app: the route itself, or the last of its middlewares."""
    holder = route
    while callable(getattr(holder.app, "app", None)):
        holder = holder.app
    return holder


# OpenAPI


def _document(app: FastAPI) -> None:
    if getattr(app.openapi, "__name__", "") == _OPENAPI:
        return
    make = app.openapi

    def openapi_with_dedup() -> dict[str, Any]:
        document = make()
        for found in _fastapi_routes(app.routes):
            for method in found.methods:
                operation = document.get("paths", {}).get(found.path, {}).get(method.lower())
                if operation is not None:
                    _amend(operation, found, method)
        return document

    app.openapi = openapi_with_dedup  # type: ignore[method-assign]  # how FastAPI's docs extend it
    app.openapi_schema = None


_OPENAPI = "openapi_with_dedup"


def _amend(operation: dict[str, Any], found: Found, method: str) -> None:
    for _, policy in found.claims():
        if method in policy.applies_to:
            amend_operation(operation, policy)
