"""The FastAPI door: `Depends(Deduplicated(...))`, and `RequestSession`.

A policy is the dependency. It claims and returns; it does not wait for the handler, for the transaction's end
settles the claim. FastAPI runs it after every other dependency of the route (`http.routes` sees to that at
start-up), so that who may not call learns nothing about ids.
"""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from fastapi import Depends
from fastapi.params import Depends as DependsMarker
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.datastructures import FormData
from starlette.requests import HTTPConnection, Request

from fastapi_dedup.claims import Claim
from fastapi_dedup.errors import (
    ConfigurationError,
    DedupError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    PayloadTooLargeError,
)
from fastapi_dedup.http.exchange import OWN, Exchange, exchange_of
from fastapi_dedup.http.reading import DEFAULT_HEADER, fingerprint_of, logical_id_of, scope_of
from fastapi_dedup.policy import Policy

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = ["DEFAULT_MAX_BODY", "Deduplicated", "RequestSession", "claim_request", "request_session"]

DEFAULT_MAX_BODY = 1024 * 1024


async def request_session(connection: HTTPConnection) -> AsyncSession:
    """Return the session of the request's own transaction, the one that a riding claim is in.

    It commits when the response starts with a success, and rolls back otherwise.

    Raises:
        ConfigurationError: No `DedupMiddleware` is around, or this is no HTTP request.
    """
    exchange = exchange_of(connection.scope)
    _attend(connection.scope, exchange, borrows=False)
    return exchange.session()


RequestSession = Annotated[AsyncSession, Depends(request_session)]


class Deduplicated(Policy):
    """One immutable policy, used as `Depends(Deduplicated(...))` on a route, a router or the app.

        @app.post("/orders", dependencies=[Depends(Deduplicated(source="body", member="sku"))])
        async def create_order(order: CreateOrder, session: RequestSession): ...

    As a parameter, `claim: Annotated[Claim, Depends(Deduplicated(...))]` gives the handler its `Claim`, or
    None where an optional id is missing. The options are `fastapi_dedup.policy.Policy`'s.
    """

    def __post_init__(self) -> None:
        """Validate the options, and tell FastAPI which dependencies the policy needs.

        Raises:
            ConfigurationError: An option cannot be kept.
        """
        for name in ("session", "scope"):
            if (marker := depends_of(getattr(self, name))) is not None:  # out of its Annotated alias
                object.__setattr__(self, name, marker)
        super().__post_init__()
        parameters = [_parameter("connection", HTTPConnection)]
        session = _session_marker(self.session)
        if session is not None and session.dependency is not request_session:
            parameters.append(_parameter("session", Annotated[Any, session]))
        if not (self.scope is None or isinstance(self.scope, str | tuple) or callable(self.scope)):
            parameters.append(_parameter("principal", Annotated[Any, _principal_marker(self.scope)]))
        object.__setattr__(self, "__signature__", inspect.Signature(parameters))

        optional = self.source == "header" and not self.required and len(self.headers(DEFAULT_HEADER)) == 1
        header = self.headers(DEFAULT_HEADER)[0].lower().encode() if optional else None
        object.__setattr__(self, "_optional_header", header)

    async def __call__(
        self, connection: HTTPConnection, session: Any = OWN, principal: Any = None
    ) -> Claim | None:
        """Claim the request's logical id. FastAPI calls this.

        Args:
            connection: The request.
            session: What `session=` gave.
            principal: What `scope=` gave, where that is a dependency.
        """
        if not isinstance(connection, Request) or connection.method not in self.applies_to:
            return None
        header: bytes | None = self.__dict__["_optional_header"]
        if header is not None and header not in [name for name, _ in connection.scope["headers"]]:
            return None
        return await claim_request(self, connection, session=session, principal=principal)


async def claim_request(
    policy: Policy,
    request: Request,
    *,
    session: Any = OWN,
    principal: Any = None,
) -> Claim | None:
    """Claim a request's logical id under a policy; None where an optional id is missing, without a query.

    Raises:
        DedupError: The request is refused.
    """
    exchange = exchange_of(request.scope)
    _attend(request.scope, exchange, borrows=session is not OWN)
    try:
        return await _claim(policy, request, exchange, session, principal)
    except DedupError as error:
        exchange.refusal = error
        if isinstance(error, MissingLogicalIdError | InvalidLogicalIdError | PayloadTooLargeError):
            exchange.delivery.unidentified(error)
        raise


def _attend(scope: Scope, exchange: Exchange, *, borrows: bool) -> None:
    """Have the exchange see what leaves the route: it could not tell an HTTPException from a status else."""
    if not exchange.attends and isinstance(stack := scope.get("fastapi_inner_astack"), AsyncExitStack):
        exchange.attends = True
        stack.push(exchange.unwind)
    if borrows and isinstance(stack := scope.get("fastapi_function_astack"), AsyncExitStack):
        stack.push_async_exit(exchange.worked)  # before the exit of the app's session, whatever its scope is


async def _claim(
    policy: Policy, request: Request, exchange: Exchange, session: Any, principal: Any
) -> Claim | None:
    unparsed = getattr(request, "_form", None) is None
    logical_id = await logical_id_of(policy, request, limit=exchange.max_body)
    if unparsed and isinstance(form := getattr(request, "_form", None), FormData):
        exchange.forms.append(form)
    if logical_id is None:
        return None
    scope = await scope_of(policy, request, principal)
    fingerprint = await fingerprint_of(policy, request, limit=exchange.max_body)
    intent = exchange.dedup.intent(logical_id, scope=scope, window=policy.window, fingerprint=fingerprint)
    return await exchange.claim(policy, intent, session)


def depends_of(given: Any) -> DependsMarker | None:
    """Return the `Depends(...)` in a marker or an `Annotated` alias; None where there is none."""
    if isinstance(given, DependsMarker):
        return given
    if get_origin(given) is Annotated:
        for metadata in get_args(given)[1:]:
            if isinstance(metadata, DependsMarker):
                return metadata
    return None


def _session_marker(given: Any) -> DependsMarker | None:
    marker = depends_of(given)
    if given is None or marker is not None:
        return marker
    if not callable(given) or get_origin(given) is Annotated:
        msg = f"session must be a dependency: a callable, Depends(...) or an Annotated alias, not {given!r}"
        raise ConfigurationError(msg)
    made: DependsMarker = Depends(given)
    return made


def _principal_marker(given: Any) -> DependsMarker:
    marker = depends_of(given)
    if marker is None:
        msg = f"scope must be a name, a tuple of parts, a callable or Depends(...), not {given!r}"
        raise ConfigurationError(msg)
    return marker


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)
