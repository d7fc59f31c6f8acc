"""One request and its response, as the doors share it: the delivery, and when its response may leave.

The middleware opens an `Exchange` per request and puts it into the ASGI scope; the dependency finds it there
and claims through it. It decides nothing about duplicates (the core does), only about the order of COMMIT and
response: no success leaves before the transactions that carry its claims are durable.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import Claim
from fastapi_dedup.errors import ClaimLostError, ConfigurationError
from fastapi_dedup.policy import failure_status
from fastapi_dedup.refusals import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncSession
    from starlette.datastructures import FormData
    from starlette.types import Message, Scope, Send

    from fastapi_dedup.claims import Intent
    from fastapi_dedup.errors import DedupError
    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["OWN", "Exchange", "exchange_of"]

logger = logging.getLogger("fastapi_dedup")

_KEY = "fastapi_dedup"
OWN = object()
"""Instead of a session of the app's: the request's own."""
_SERVER_ERROR = 500
_HELD_BYTES = 1024 * 1024
"""How much of a response that comes in chunks is held back until a borrowed transaction ends."""


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange that the middleware opened for this request.

    Raises:
        ConfigurationError: There is none.
    """
    exchange = scope.get(_KEY)
    if not isinstance(exchange, Exchange):
        msg = (
            "no DedupMiddleware is around this app, or this is no HTTP request: "
            "write app.add_middleware(DedupMiddleware)"
        )
        raise ConfigurationError(msg)
    return exchange


class Exchange:
    """One request and its response.

    Args:
        dedup: The runtime.
        scope: The request's ASGI scope; the exchange puts itself into it.
        send: Where the response goes.
        max_body: How many bytes of a body a fingerprint may read.
        warn_once: Tells whether a warning about a route is to be logged: the first time only.

    Attributes:
        started: Whether the response has started.
        attends: Whether it is told of what leaves the route.
        refusal: The refusal that the request is to be answered with.
        forms: The forms that policies have parsed, to be closed in the end.
        duplicate_status: How the policy that refused answers duplicates.
    """

    def __init__(
        self,
        dedup: Dedup,
        scope: Scope,
        send: Send,
        *,
        max_body: int,
        warn_once: Callable[[str, str], bool],
    ) -> None:
        self.dedup = dedup
        self.max_body = max_body
        self.delivery = dedup.delivery()
        self.duplicate_status = 409
        self.started = False
        self.attends = False
        self.refusal: DedupError | None = None
        self.forms: list[FormData] = []
        self._scope = scope
        self._send = send
        self._warn_once = warn_once
        self._policies: list[Policy] = []
        self._raised = False
        self._rides_own = False
        self._held_back: list[Message] | None = None
        self._commit_error: BaseException | None = None
        scope[_KEY] = self

    @staticmethod
    def around(scope: Scope, dedup: Dedup) -> bool:
        """Tell whether a middleware further out has opened an exchange of the same runtime already."""
        exchange = scope.get(_KEY)
        return isinstance(exchange, Exchange) and exchange.dedup is dedup

    # Claiming, for the dependency

    def session(self) -> AsyncSession:
        """Return the session of the request's own transaction, for the handler."""
        session: AsyncSession = self.delivery.own.session
        return session

    async def claim(self, policy: Policy, intent: Intent, session: Any) -> Claim:
        """Claim an id under a policy, in the app's session or in the request's own.

        Args:
            policy: The policy.
            intent: What is to be done once.
            session: The app's session, or `OWN`.

        Raises:
            DedupError: The delivery is refused.
        """
        work = self.delivery.own if session is OWN else self.dedup.borrow(session, lent=True)
        intent, transaction, store = self.dedup.place(policy, intent, work, self.delivery)
        self._policies.append(policy)
        outcome = await self.delivery.claim(intent, transaction, wait=policy.patience, store=store)
        if isinstance(outcome, Claim):
            self._rides_own |= transaction is self.delivery.own
            return outcome
        self.duplicate_status = policy.duplicate_status
        raise error_of(intent, outcome)

    def unwind(self, _: object, error: BaseException | None, __: object) -> None:
        """Take note of what leaves the route: an exception is a failure, whatever response it becomes."""
        self._raised |= error is not None

    async def worked(self, _: object, error: BaseException | None, __: object) -> None:
        """Do what comes between the handler's end and its session's."""
        if error is None:
            await self.delivery.worked()

    # Responding, for the middleware

    async def send(self, message: Message) -> None:
        """Pass a message of the response on, once what it says is true."""
        if self._held_back is not None:
            await self._hold_back(message)
        elif message["type"] == "http.response.start":
            await self._start(message)
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        if self._is_failure(message["status"]):
            await self.delivery.fail()
            if message["status"] >= _SERVER_ERROR and self.refusal is None:
                self._warn_of_an_unused_session()
        else:
            try:
                await self.delivery.succeed()
            except BaseException as error:
                self._commit_error = error
                raise
            self._warn_of_an_unused_session()
        if self.refusal is not None and message["status"] == _SERVER_ERROR:
            # Either an answer of the app's own, which then returns; or a framework further in takes the
            # refusal for an accident, and raises it again: then the middleware answers.
            self._held_back = [message]
            return
        if self.delivery.unsettled:
            if _declares_its_length(message):
                self._held_back = [message]
                return
            self._warn_of_a_stream()
        self.started = True
        await self._send(message)

    async def _hold_back(self, message: Message) -> None:
        assert self._held_back is not None  # noqa: S101 - for mypy: send() has looked
        self._held_back.append(message)
        if self.refusal is not None:
            return
        if not self.delivery.unsettled:
            await self._let_go()
        elif message.get("more_body") and self._held_bytes() > _HELD_BYTES:  # a large file, chunk by chunk
            self._warn_of_a_stream()
            await self._let_go()

    def _held_bytes(self) -> int:
        return sum(len(message.get("body", b"")) for message in self._held_back or ())

    async def _let_go(self) -> None:
        messages, self._held_back = self._held_back or [], None
        self.started |= bool(messages)
        for message in messages:
            await self._send(message)

    async def finish(self) -> None:
        """End a request whose app returned: settle the rest, and send what was held back.

        Raises:
            ClaimLostError: A success was held back, and its transaction has ended without COMMIT.
        """
        try:
            await self.delivery.finish()
        finally:
            await self._close_forms()
        if self._held_back is not None:
            if self.delivery.lost:
                msg = (
                    f"{self._name()} returned a success, but the session of its claim ended without COMMIT: "
                    "commit it in the handler, or in the dependency that opened it"
                )
                raise ClaimLostError(msg)
            if self.delivery.unsettled:
                self._warn(
                    "uncommitted",
                    "returned, and the session of its claim is neither committed nor closed: its work and "
                    "its claim are not durable. Commit it, or close it, in the dependency that opened it",
                )
            await self._let_go()

    async def abort(self) -> BaseException | None:
        """End a request whose app raised, and return the error of a failed COMMIT, if that was the reason.

        What raises after a success was told (a stream, a background task) does not undo it.
        """
        self._held_back = None
        if not self.started:
            await self.delivery.fail()
            if self.refusal is None:
                self._warn_of_an_unused_session()
        await self.delivery.finish()
        await self._close_forms()
        return self._commit_error

    async def _close_forms(self) -> None:
        for form in self.forms:
            await form.close()

    def _is_failure(self, status: int) -> bool:
        if self._raised or self.delivery.refusal is not None:  # whatever the app made of it
            return True
        if not self._policies:
            return failure_status(status)
        return any(policy.failed(status) for policy in self._policies)

    def _warn_of_a_stream(self) -> None:
        self._warn(
            "streams",
            "streams its response while the session of its claim is still open: the client may be told of a "
            "success whose COMMIT fails. Commit before the response starts, or use RequestSession",
        )

    def _warn_of_an_unused_session(self) -> None:
        if self._rides_own and not self.delivery.own.used:
            self._warn(
                "unused session",
                "has a claim in a transaction that its handler never used, so a crash between the two "
                "commits doubles or loses work. Let the handler take RequestSession, or name its session "
                "with Deduplicated(session=...); where it has none, use lease=",
            )

    def _warn(self, kind: str, text: str) -> None:
        name = self._name()
        if self._warn_once(kind, name):
            logger.warning("%s %s", name, text)

    def _name(self) -> str:
        return f"{self._scope['method']} {_route_of(self._scope)}"


def _route_of(scope: Scope) -> str:
    """Return the path of the route that serves a request, never the request's own: clients think of those."""
    included = scope.get("fastapi", {}).get("effective_route_context")  # FastAPI since it includes lazily
    for route in (included, scope.get("route")):
        if (path := getattr(route, "path_format", None) or getattr(route, "path", None)) is not None:
            return f"{scope.get('root_path', '')}{path}" if path else "/"
    return f"{scope.get('root_path', '')}/*"


def _declares_its_length(start: Message) -> bool:
    """Tell whether a response is whole before it starts. Streams declare no length."""
    # A response without a body may leave the length out, and no stream has such a status.
    return start["status"] in {204, 205, 304} or any(
        name.lower() == b"content-length" for name, _ in start.get("headers", ())
    )
