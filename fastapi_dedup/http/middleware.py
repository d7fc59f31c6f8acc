"""The ASGI door: hosts the runtime, opens each request's transaction, renders refusals.

Pure ASGI, for any framework. The life of a request:

    scope["type"] == "http"
      → an Exchange is opened and put into the scope
      → the app runs; a policy on the way claims (`http.dependency`), or the middleware's own does, just
        before the endpoint
      → the response starts: an error rolls back, a success commits, and only then does it leave
      → the app returns, and what is left is settled
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from fastapi_dedup.errors import ConfigurationError, DedupError, StoreUnavailableError
from fastapi_dedup.http.dependency import DEFAULT_MAX_BODY, Deduplicated, claim_request
from fastapi_dedup.http.exchange import Exchange
from fastapi_dedup.http.problems import answer_to
from fastapi_dedup.http.reading import DEFAULT_HEADER
from fastapi_dedup.http.routes import inspect_app, routed, version_of
from fastapi_dedup.runtime import Dedup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from fastapi_dedup.http.routes import Inspected

__all__ = ["DedupMiddleware"]

logger = logging.getLogger("fastapi_dedup")


class DedupMiddleware:
    """Pure ASGI middleware: `app.add_middleware(DedupMiddleware, dedup=dedup)`.

    It starts and stops the runtime with the app's lifespan (or with the first request, where a server or a
    mount sends no lifespan), gives every request a transaction (`RequestSession`) that commits when the
    response starts with a success, and renders refusals as RFC 9457 problem details.

    On its own it deduplicates requests that carry `Idempotency-Key`. A route's own policy on the same header
    wins. Add it *before* CORSMiddleware, so that CORS is outside and its headers are on refusals too.

    Args:
        app: The ASGI app.
        dedup: The runtime; None makes one with `Dedup()`.
        header: The header that the middleware deduplicates by, where it is sent. None turns that off and
            leaves hosting.
        methods: The HTTP methods that it deduplicates. Default POST and PATCH.
        max_body: How many bytes of a body may be read to compute a fingerprint, where nobody has read it
            yet; more is 413. Default 1 MiB.
        policy: A whole policy instead of `header` and `methods`.

    Raises:
        ConfigurationError: An option cannot be kept.
    """

    def __init__(
        self,
        app: ASGIApp,
        dedup: Dedup | None = None,
        *,
        header: str | None = DEFAULT_HEADER,
        methods: Iterable[str] = ("POST", "PATCH"),
        max_body: int = DEFAULT_MAX_BODY,
        policy: Deduplicated | None = None,
    ) -> None:
        if isinstance(max_body, bool) or not isinstance(max_body, int) or max_body < 1:
            msg = f"max_body must be a whole number of bytes, not {max_body!r}"
            raise ConfigurationError(msg)
        self.app = app
        self.dedup = Dedup() if dedup is None else dedup
        self._max_body = max_body
        self._policy = policy
        if policy is None and header is not None:
            self._policy = Deduplicated("header", header, required=False, methods=methods)
        if self._policy is not None:
            self._prepare(self._policy)
        self._inspected: Inspected | None = None
        self._warned: set[tuple[str, str]] = set()

    def _prepare(self, policy: Deduplicated) -> None:
        try:
            self.dedup.prepare(policy)
        except ConfigurationError as error:
            msg = (
                f"DedupMiddleware's own policy: {error}. Write DedupMiddleware(policy=Deduplicated(...)), or "
                "header=None where routes and handlers have policies of their own"
            )
            raise ConfigurationError(msg) from error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the app's lifespan; pass everything else through untouched."""
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif scope["type"] == "http" and not Exchange.around(scope, self.dedup):
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # Requests

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.dedup.started:
            await self._start_late()
        self._inspect(scope)
        exchange = Exchange(self.dedup, scope, send, max_body=self._max_body, warn_once=self._warn_once)
        app = self.app if self._inspected.routed else self._claiming(self.app)  # type: ignore[union-attr]
        try:
            await app(scope, receive, exchange.send)
        except BaseException as error:
            commit_error = await exchange.abort()
            if not await self._answer(error, exchange, send):
                if commit_error is not None and commit_error is not error:
                    # A framework wraps what COMMIT raised inside send(), for it thinks it has responded.
                    raise commit_error from None
                raise
        else:
            await exchange.finish()

    async def _answer(self, error: BaseException | None, exchange: Exchange, send: Send) -> bool:
        """Answer a refusal with problem details; False where it is none, or the response has started."""
        if not isinstance(error, DedupError) or exchange.started:
            return False
        answer = answer_to(error, duplicate_status=exchange.duplicate_status)
        if answer is None:
            return False
        await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})
        return True

    async def _start_late(self) -> None:
        if self._warn_once("no lifespan", ""):
            logger.warning(
                "no lifespan reached DedupMiddleware, so its reaper starts with the first request: "
                "add the middleware to the outermost app, and run it on a server that sends lifespan events"
            )
        try:
            await self.dedup.start()
        except StoreUnavailableError:
            logger.exception("the runtime could not start; trying again with the next request")

    def _warn_once(self, kind: str, route: str) -> bool:
        new = (kind, route) not in self._warned
        self._warned.add((kind, route))
        return new

    def _inspect(self, scope: Scope) -> None:
        app: Any = scope.get("app") or routed(self.app)
        if self._inspected is None or (self._inspected.routed and self._inspected.version != version_of(app)):
            self._inspected = inspect_app(
                app,
                self._policy,
                self._claiming,
                required_of=self.dedup.required_of,
                prepare=self.dedup.prepare,
                has_database=self.dedup.has_database,
                warn_once=self._warn_once,
            )

    def _claiming(self, app: ASGIApp) -> ASGIApp:
        """Wrap an ASGI app so that the middleware's own policy claims just before it runs."""
        if self._policy is None or isinstance(app, _Claiming):
            return app
        return _Claiming(app, self._policy)

    # Lifespan

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start after the app has started, and stop before it stops: the app's own state is around ours."""
        failure: ConfigurationError | StoreUnavailableError | None = None

        async def receive_and_stop() -> Message:
            message: Message = {"type": "lifespan.shutdown"} if failure is not None else await receive()
            if message["type"] == "lifespan.shutdown":
                await self.dedup.stop()
            return message

        async def start_and_send(message: Message) -> None:
            nonlocal failure
            if message["type"] == "lifespan.startup.complete":
                try:
                    self._inspect(scope)
                    await self.dedup.start()
                except (ConfigurationError, StoreUnavailableError) as error:
                    failure = error
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
            if failure is None:
                await send(message)

        await self.app(scope, receive_and_stop, start_and_send)
        if failure is not None:
            raise failure


class _Claiming:
    """An ASGI app before which a policy claims."""

    def __init__(self, app: ASGIApp, policy: Deduplicated) -> None:
        self._app = app
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in self._policy.applies_to:
            request = Request(scope, receive)
            await claim_request(self._policy, request)
            receive = _replay(request, receive)
        await self._app(scope, receive, send)


def _replay(request: Request, receive: Receive) -> Receive:
    """Return a receive that gives the app the body that was read for it, and then goes on as before."""
    if not hasattr(request, "_body"):
        return receive
    body: list[bytes] = [request._body]  # noqa: SLF001 - read for the fingerprint by http.reading

    async def receive_again() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        return await receive()

    return receive_again
