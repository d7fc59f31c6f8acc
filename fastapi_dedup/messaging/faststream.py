"""FastStream: a middleware that consumes, and one that publishes, for every broker that FastStream has.

broker = RabbitBroker(
    middlewares=[DeduplicatingMiddleware(dedup), StampingMiddleware(dedup.identities)],
)

@broker.subscriber("orders")
@deduplicated(Deduplicated(source="body", member="order_id"))
async def on_order(order: OrderPlaced, session: MessageSession) -> None: ...

what came of it                                      FastStream is told
handled                                              nothing: it acknowledges, after our COMMIT
duplicate                                            `AckMessage`; the handler is not run
in flight                                            `NackMessage`, after a pause
the store is down, or has no table                   the same; the pause grows with the outage
no legal id, or an id that was used for another      `RejectMessage`
payload
the handler raised                                   what it raised: the subscriber's `ack_policy` decides
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar, cast

from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claim
from fastapi_dedup.errors import (
    ConfigurationError,
    DedupError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
)
from fastapi_dedup.identities import DEDUPLICATION_HEADER, headers_for
from fastapi_dedup.messaging.acknowledge import Pauses
from fastapi_dedup.messaging.envelope import Envelope, with_stamp
from fastapi_dedup.messaging.extras import driver
from fastapi_dedup.messaging.handler import Result, check, check_function, handle, is_async
from fastapi_dedup.messaging.origins import delivery_id_of, endpoint_of, function_of
from fastapi_dedup.policy import Endpoint

with driver("faststream", extra="faststream"):
    from faststream import AckPolicy, BaseMiddleware, Context, Depends
    from faststream.exceptions import AckMessage, HandlerException, NackMessage, RejectMessage
    from faststream.message import AckStatus, SourceType, StreamMessage

    from fastapi_dedup.messaging.faststream_acks import check_subscriber, comes_again, stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from faststream import ContextRepo
    from faststream.response import PublishCommand

    from fastapi_dedup.identities import Identities
    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["DeduplicatingMiddleware", "MessageClaim", "MessageSession", "StampingMiddleware", "deduplicated"]

logger = logging.getLogger("fastapi_dedup")

_KEY: Final = "fastapi_dedup"
_POLICIES: Final = "__fastapi_dedup_policies__"
_Handler = TypeVar("_Handler", bound="Callable[..., Any]")


# What handlers get


@dataclass(slots=True)
class _Held:
    """What the middleware has for the handler that it runs."""

    message: StreamMessage[Any]
    policies: tuple[Policy, ...]
    session: AsyncSession
    claim: Claim | None
    used: bool = False


def _held(held: Annotated[_Held | None, Context(_KEY, default=None)]) -> _Held:
    if held is None:
        msg = (
            "no policy holds for this handler, so there is no claim and no session: give it "
            "@deduplicated(...), or the broker a DeduplicatingMiddleware with policies"
        )
        raise ConfigurationError(msg)
    held.used = True
    return held


def _session(held: Annotated[_Held, Depends(_held, cast=False)]) -> AsyncSession:
    return held.session


def _claim(held: Annotated[_Held, Depends(_held, cast=False)]) -> Claim | None:
    return held.claim


MessageSession = Annotated[AsyncSession, Depends(_session, cast=False)]
"""The session of the message's transaction, the one that the claim is in: for handlers and dependencies."""

MessageClaim = Annotated[Claim, Depends(_claim, cast=False)]
"""The message's claim; None where every policy's id is optional and missing."""


def deduplicated(*policies: Policy) -> Callable[[_Handler], _Handler]:
    """Give a handler policies of its own, which win over those of the middleware.

    Args:
        *policies: The policies, in the order of their claims.

    Raises:
        ConfigurationError: There is none, one cannot be kept for messages, or the decorator stands above
            `@broker.subscriber(...)` instead of below it.
    """
    if not policies:
        msg = "deduplicated() takes a policy: deduplicated(Deduplicated(...))"
        raise ConfigurationError(msg)
    check(policies)

    def decorate(function: _Handler) -> _Handler:
        if hasattr(function, "call_wrapped"):
            msg = "write @deduplicated below @broker.subscriber(...), right above the function"
            raise ConfigurationError(msg)
        check_function(function)
        # A wrapper, for the same function may be subscribed elsewhere with other policies.
        if is_async(function):

            @wraps(function)
            async def handler(*args: Any, **kwargs: Any) -> Any:
                return await function(*args, **kwargs)
        else:

            @wraps(function)
            def handler(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

        setattr(handler, _POLICIES, policies)
        return cast("_Handler", handler)

    return decorate


# Consuming


class DeduplicatingMiddleware:
    """Claims a message's ids, runs its handler in their transaction, and acknowledges after the COMMIT.

    It goes into the `middlewares` of a broker, or of routers that have policies of their own. Put what must
    surround the transaction before it, and what belongs inside behind it.

    A handler's policies are its own, by `deduplicated`; else the middleware's; else the one that
    `Dedup.require` asks of it. A handler for which there is none runs as if the middleware were not there.

    Args:
        dedup: The runtime.
        *policies: The policies of all the handlers that have none of their own, in the order of their claims.
        pause: How long a message rests, on average, before it is given back to the broker; while the
            database is down up to 30 seconds. Default half a second. JetStream does the resting itself.

    Raises:
        ConfigurationError: A policy or an option cannot be kept.
    """

    def __init__(self, dedup: Dedup, *policies: Policy, pause: timedelta = timedelta(seconds=0.5)) -> None:
        check(policies, dedup)
        self._dedup = dedup
        self._policies = policies
        self._pauses = Pauses(pause)
        self._known: dict[tuple[Callable[..., Any], str], tuple[Policy, ...]] = {}
        self._warned: set[str] = set()

    def __call__(self, message: Any, /, *, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        """Return the middleware for one message: what FastStream calls."""
        return _Consuming(message, context=context, door=self)

    async def consume(
        self, call_next: Callable[[Any], Awaitable[Any]], message: StreamMessage[Any], context: ContextRepo
    ) -> Any:
        """Handle one message; `call_next` is the rest of the middlewares and the handler."""
        subscriber = context.get_local("handler_")
        if message.source_type is SourceType.RESPONSE or subscriber is None:
            return await call_next(message)
        function = await function_of(subscriber, message)
        endpoint = endpoint_of(subscriber, message, function)
        try:
            policies = self._policies_of(function, endpoint)
        except ConfigurationError as error:
            await stop(message, str(error))
        around: _Held | None = context.get_local(_KEY)
        nested = around is not None and around.message is message
        if not policies or (around is not None and nested and around.policies == policies):
            return await call_next(message)  # no policy; or the router has this middleware too
        await check_subscriber(subscriber, message, endpoint, nested=nested)
        return await self._handle(endpoint, _Run(call_next, message, context, policies, function))

    async def _handle(self, endpoint: str, run: _Run) -> Any:
        message, policies = run.message, run.policies
        body = await _body_of(message)
        envelope = Envelope(body, message.headers, delivery_id_of(message), endpoint, message)
        try:
            result = await handle(self._dedup, policies, envelope, run)
        except Exception as error:
            if isinstance(error, DedupError) and error is not run.error:
                return await self._refuse(envelope, error)
            self._pauses.usual()
            raise
        pause = self._pauses.usual()
        if result is Result.DUPLICATE:
            raise AckMessage
        if result is Result.IN_FLIGHT:
            return await self._give_back(envelope, pause)
        if not run.used and any(policy.rides for policy in policies):
            self._warn_unused(policies, endpoint)
        if run.error is not None:
            raise run.error
        return run.result

    def _policies_of(self, function: Callable[..., Any], endpoint: str) -> tuple[Policy, ...]:
        if (known := self._known.get((function, endpoint))) is not None:
            return known
        policies: tuple[Policy, ...] = getattr(function, _POLICIES, ()) or self._policies
        if not policies:
            required = self._dedup.required_of(Endpoint("message", endpoint, function))
            policies = () if required is None else (required,)
        check(policies, self._dedup)
        self._known[function, endpoint] = policies
        return policies

    async def _refuse(self, envelope: Envelope, error: DedupError) -> NoReturn:
        """Answer for a message that was not handled, though nothing is wrong with its handler."""
        if isinstance(error, MissingLogicalIdError | InvalidLogicalIdError | FingerprintMismatchError):
            logger.warning("rejected %s: %s", envelope.title, error)
            raise RejectMessage from error
        level = logging.ERROR if isinstance(error, ConfigurationError) else logging.WARNING
        logger.log(level, "%s was not handled: %s", envelope.title, error)
        await self._give_back(envelope, self._pauses.outage())

    async def _give_back(self, envelope: Envelope, pause: float) -> NoReturn:
        """Give a message back to its broker after a pause: its work may still fail, or was not tried."""
        message: StreamMessage[Any] = envelope.message
        if not comes_again(message):
            logger.warning("%s is lost, for its broker cannot deliver it again", envelope.title)
            raise NackMessage
        if hasattr(message.raw_message, "nak"):
            raise NackMessage(delay=pause)
        await asyncio.sleep(pause)
        raise NackMessage

    def _warn_unused(self, policies: tuple[Policy, ...], endpoint: str) -> None:
        if endpoint not in self._warned and all(policy.session is None for policy in policies):
            self._warned.add(endpoint)
            logger.warning(
                "the handler of %s has a claim in a transaction that it never uses, so a crash between the "
                "two commits doubles or loses work. Give it a parameter annotated as MessageSession, or name "
                "its session with Deduplicated(session=...); where it has none, use lease=",
                endpoint,
            )


class _Consuming(BaseMiddleware[Any, Any]):
    def __init__(self, message: Any, /, *, context: ContextRepo, door: DeduplicatingMiddleware) -> None:
        super().__init__(message, context=context)
        self._door = door

    async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
        return await self._door.consume(call_next, msg, self.context)

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,  # noqa: ARG002 - the protocol
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,  # noqa: ARG002 - the protocol
    ) -> bool | None:
        """Keep our answers to ourselves where there is nothing to acknowledge, for nobody else takes them."""
        subscriber = self.context.get_local("handler_")
        unheard = getattr(subscriber, "ack_policy", None) is AckPolicy.MANUAL
        return unheard and isinstance(exc_val, HandlerException)


class _Run:
    """The handler's work on one message, and what came of it.

    Attributes:
        message: The message.
        policies: The policies that it is under.
        result: What the handler returned.
        error: What it raised.
        used: Whether it has asked for the session or the claim.
    """

    def __init__(
        self,
        call_next: Callable[[Any], Awaitable[Any]],
        message: StreamMessage[Any],
        context: ContextRepo,
        policies: tuple[Policy, ...],
        function: Callable[..., Any],
    ) -> None:
        self.message = message
        self.policies = policies
        self._in_thread = not is_async(function)
        self._call_next = call_next
        self._context = context
        self.result: Any = None
        self.error: Exception | None = None
        self.used = False

    async def __call__(self, session: AsyncSession, claim: Claim | None) -> None:
        held = _Held(self.message, self.policies, session, claim)
        try:
            with self._context.scope(_KEY, held):
                # A thread cannot be cancelled: its session must not be closed while it works.
                self.result = await (uncancelled(self._rest()) if self._in_thread else self._rest())
            _heed(self.message.committed)
        except AckMessage as done:  # the message will not come again, so its work must be committed
            self.error = done
        except Exception as error:
            self.error = error
            raise
        finally:
            self.used = held.used

    async def _rest(self) -> Any:
        return await self._call_next(self.message)


async def _body_of(message: StreamMessage[Any]) -> Any:
    """Return a message's body as FastStream decodes it; as it was sent, where that cannot be decoded."""
    try:
        return await message.decode()
    except ValueError:  # no JSON, or no UTF-8: then no id is in it either, and a retry changes nothing
        return message.body


def _heed(answer: AckStatus | None) -> None:
    """Take a message that its handler has refused by hand for a failure: when it comes again, it must run."""
    if answer is AckStatus.NACKED:
        raise NackMessage
    if answer is AckStatus.REJECTED:  # it may come again too, if only as a dead letter
        raise RejectMessage


# Publishing


class StampingMiddleware:
    """Stamps what is published with its logical id, in the header `deduplication-id`.

    An id that the message has already is kept. Else it is what the rules and the message's type say; without
    an id nothing is stamped. Messages of one batch share their headers, so they get no stamp.

    Args:
        identities: The publisher's rules: `dedup.identities`.
        native: Whether the broker's own field is stamped too: `Nats-Msg-Id`, by which JetStream drops
            duplicates before any consumer sees them.
    """

    def __init__(self, identities: Identities, *, native: bool = True) -> None:
        self._identities = identities
        self._native = native

    def __call__(self, message: Any, /, *, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        """Return the middleware for one message: what FastStream calls."""
        return _Stamping(message, context=context, door=self)

    def stamp(self, command: PublishCommand) -> None:
        """Stamp a message that is about to be published.

        Raises:
            InvalidLogicalIdError: Its id is no legal one.
        """
        explicit = [value for name, value in command.headers.items() if name.lower() == DEDUPLICATION_HEADER]
        if len(bodies := command.batch_bodies) > 1:
            shared = "a batch for %s is published %s: its messages share their headers"
            if any(explicit):
                what = "under one id, so that all but one of them will be taken for duplicates"
                logger.warning(shared, command.destination, what)
            elif not explicit and any(self._identities.of(body) is not None for body in bodies):
                logger.warning(shared, command.destination, "without ids")
            return
        logical_id = None if explicit else self._identities.of(command.body)
        if type(command).__module__.startswith("faststream.nats."):
            from fastapi_dedup.messaging.nats import stamped  # noqa: PLC0415 - its driver is there on NATS only

            command.headers = stamped(logical_id, command.headers, native=self._native)
        else:
            command.headers = with_stamp(command.headers, headers_for(logical_id))


class _Stamping(BaseMiddleware[Any, Any]):
    def __init__(self, message: Any, /, *, context: ContextRepo, door: StampingMiddleware) -> None:
        super().__init__(message, context=context)
        self._door = door

    async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: PublishCommand) -> Any:
        self._door.stamp(cmd)
        return await call_next(cmd)
