"""The message door: `dedup.handler(policy)` wraps a handler with the core that HTTP has.

What came of a message is a value, so that a broker module can turn it into an acknowledgement:

    HANDLED     ack, after COMMIT
    DUPLICATE   ack: the work is done
    IN_FLIGHT   never ack: the work may still fail; deliver again later

What went wrong is an error: a missing or illegal id (dead-letter it), a store that is down (deliver again),
or whatever the handler raised (the broker's own retry policy).
"""

from __future__ import annotations

import enum
import inspect
import logging
from copy import copy
from functools import cached_property, partial, update_wrapper
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from sqlalchemy.ext.asyncio import AsyncConnection

from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claim, Duplicate, Mismatch
from fastapi_dedup.core import settled
from fastapi_dedup.errors import (
    ClaimInFlightError,
    ConfigurationError,
    DuplicateError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
)
from fastapi_dedup.messaging.envelope import (
    Envelope,
    check_policy,
    envelope_of,
    fingerprint_of,
    id_of,
    name_of,
    scope_of,
)
from fastapi_dedup.messaging.sessions import (
    SessionUnavailableError,
    check_factory,
    factory_of,
    opened,
    parameters_of,
)
from fastapi_dedup.policy import Endpoint
from fastapi_dedup.refusals import error_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fastapi_dedup.claims import Intent
    from fastapi_dedup.core import Delivery
    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["MessageHandler", "Result", "check", "check_function", "handle", "is_async", "run"]

logger = logging.getLogger("fastapi_dedup")


class Result(enum.Enum):
    """What came of a message."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    IN_FLIGHT = "in_flight"


async def handle(
    dedup: Dedup,
    policies: Sequence[Policy],
    envelope: Envelope,
    work: Callable[[Any, Claim | None], Awaitable[object]],
    *,
    endpoint: str = "",
    session: Any = None,
    opens: Callable[[], Any] | None = None,
) -> Result:
    """Claim, run and settle one message: what every message door calls.

    Args:
        dedup: The runtime.
        policies: The policies, in the order of their claims.
        envelope: The message.
        work: The handler. It gets the session that the claims are in, and the last claim (None where
            every id is optional and missing).
        endpoint: The handler's name, for the scope of messages that do not say where they arrived.
        session: The handler's own session or connection; None takes the policies', else opens one.
        opens: What opens one where neither is given: an asynchronous context manager. None opens an
            `AsyncSession`, in the transaction of the claims.

    Returns:
        What came of it. With `HANDLED`, the transactions that are ours have been committed.

    Raises:
        MissingLogicalIdError: A required id is missing: dead-letter the message, a retry changes nothing.
        InvalidLogicalIdError: The same for an illegal id.
        FingerprintMismatchError: The same for an id that was used for another payload.
        StoreUnavailableError: The store is down; the handler was not run.
        Exception: Whatever the handler raised; its ids are free again.
    """
    delivery = dedup.delivery()
    try:
        intents = [await _intent(dedup, policy, envelope, endpoint) for policy in policies]
    except (MissingLogicalIdError, InvalidLogicalIdError) as error:
        delivery.unidentified(error)
        raise
    try:
        async with settled(delivery), opened(policies, session, opens) as theirs:
            claim = await _claim(dedup, delivery, policies, intents, theirs, lent=session is None)
            if delivery.refusal is None:
                await work(delivery.own.session if theirs is None else theirs, claim)
                await delivery.worked()
    except (DuplicateError, ClaimInFlightError):
        if delivery.refusal is None:  # it is the handler's own
            raise
    except SessionUnavailableError as error:
        for intent in filter(None, intents):
            delivery.unavailable(intent, error)
        raise
    match delivery.refusal:
        case None:
            return Result.HANDLED
        case Duplicate():
            return Result.DUPLICATE
        case _:
            return Result.IN_FLIGHT


async def _claim(
    dedup: Dedup,
    delivery: Delivery,
    policies: Sequence[Policy],
    intents: Sequence[Intent | None],
    session: Any,
    *,
    lent: bool,
) -> Claim | None:
    """Claim every id, and return the last claim; the delivery has failed where one was refused."""
    claim = None
    for policy, intent in zip(policies, intents, strict=True):
        if intent is None:
            continue
        work = delivery.own if session is None else dedup.borrow(session, lent=lent)
        wanted, transaction, store = dedup.place(policy, intent, work, delivery)
        outcome = await delivery.claim(wanted, transaction, wait=policy.patience, store=store)
        if not isinstance(outcome, Claim):
            await delivery.fail()
            if isinstance(outcome, Mismatch):
                raise error_of(intent, outcome)
            return None
        claim = outcome
    return claim


async def _intent(dedup: Dedup, policy: Policy, envelope: Envelope, endpoint: str) -> Intent | None:
    message = envelope.received
    called = await _called(policy.source, message) if callable(policy.source) else None
    logical_id = id_of(policy, envelope, called=called, derive=dedup.identities.of)
    if logical_id is None:
        return None
    parts = policy.scope if isinstance(policy.scope, tuple) else (policy.scope,)
    principals = tuple([await _called(part, message) for part in parts if callable(part)])
    chosen = await _called(policy.fingerprint, message) if callable(policy.fingerprint) else None
    delivered = policy.source == "delivery"
    return dedup.intent(
        logical_id,
        scope=scope_of(policy, envelope, endpoint, principals),
        window=policy.keep_after_handling if delivered else policy.window,
        fingerprint=fingerprint_of(policy, envelope, called=chosen),
        from_end=delivered,
    )


async def _called(call: Any, message: Any) -> Any:
    value = call(message)
    return await value if inspect.isawaitable(value) else value


class MessageHandler:
    """A handler of messages, wrapped: call it with a message, and it returns a `Result`.

    The handler is any function whose first parameter is the message. A synchronous one runs in a worker
    thread. Of its other parameters, one that is annotated as a session or connection (`AsyncSession`,
    `Session`, SQLModel's, `AsyncConnection`, `asyncpg.Connection` and so on) gets the one that the claim is
    in, and one that is annotated as `Claim` the claim; the rest comes from the caller. A caller that gives
    the session itself makes the claim ride that one. Where nobody gives one, an `AsyncSession` or an
    `AsyncConnection` of the runtime's engine is opened; other kinds need the policy's `session=`.

    Args:
        dedup: The runtime.
        policies: The policies, in the order of their claims. Without any, `Dedup.require` decides when the
            first message comes.
        function: The handler.
        endpoint: The name of the place where the messages arrive; part of the default scope where the
            envelope does not say it. Default: the function's module and name.

    Raises:
        ConfigurationError: A policy cannot be kept for messages, or the function is no handler.
    """

    def __init__(
        self, dedup: Dedup, policies: Sequence[Policy], function: Callable[..., Any], *, endpoint: str | None
    ) -> None:
        check(policies, dedup)
        check_function(function)
        self._dedup = dedup
        self._explicit = tuple(policies)
        self._function = function
        self._endpoint = endpoint or name_of(function)
        self._session_name, self._session_kind, self._claim_name = parameters_of(function)
        self._warned: list[str] = []
        update_wrapper(self, function, updated=())  # an object's attributes are not the wrapper's

    def __get__(self, instance: Any, owner: type | None = None) -> MessageHandler:
        """Return the handler of an instance, where the function is a method: the instance fills in `self`."""
        bind = getattr(self._function, "__get__", None)
        if bind is None:
            return self
        bound = copy(self)
        bound._function = bind(instance, owner)  # noqa: SLF001 - it is our own
        return bound

    @cached_property
    def _policies(self) -> tuple[Policy, ...]:
        if self._explicit:
            return self._explicit
        required = self._dedup.required_of(Endpoint("message", self._endpoint, self._function))
        if required is None:
            msg = (
                f"the handler {self._endpoint} has no policy, and nothing is required of it: "
                "write dedup.handler(Deduplicated(...)), or dedup.require(predicate, policy)"
            )
            raise ConfigurationError(msg)
        check((required,), self._dedup)
        return (required,)

    async def __call__(self, message: Any, *args: Any, **kwargs: Any) -> Result:
        """Handle a message: an `Envelope`, or the message itself, whose `headers` are taken if it has any."""
        envelope = envelope_of(message)
        given = kwargs.get(self._session_name) if self._session_name else None
        opens_connection = self._session_kind is not None and issubclass(self._session_kind, AsyncConnection)
        ours = given is None and all(policy.session is None for policy in self._policies)

        async def work(session: Any, claim: Claim | None) -> None:
            if self._session_name:
                if ours:
                    self._must_be_what_is_asked_for(session)
                kwargs[self._session_name] = session
            if self._claim_name:
                kwargs[self._claim_name] = claim
            self._warn_if_unused()
            await run(self._function, envelope.received, *args, **kwargs)

        return await handle(
            self._dedup,
            self._policies,
            envelope,
            work,
            endpoint=self._endpoint,
            session=given,
            opens=self._dedup.engine.begin if opens_connection else None,
        )

    def _must_be_what_is_asked_for(self, session: Any) -> None:
        """Refuse to call the handler with a session of ours where it asks for something else."""
        kind = self._session_kind
        if kind is not None and not isinstance(session, kind):
            msg = (
                f"the handler {self._endpoint} asks for a {kind.__module__}.{kind.__qualname__}, and nobody "
                "opens one: name what does with Deduplicated(session=...)"
            )
            raise ConfigurationError(msg)

    def _warn_if_unused(self) -> None:
        unused = not (self._session_name or self._claim_name)
        riding = any(policy.rides for policy in self._policies)
        if (
            unused
            and riding
            and not self._warned
            and all(policy.session is None for policy in self._policies)
        ):
            self._warned.append(self._endpoint)
            logger.warning(
                "the handler %s has a claim in a transaction that it never uses, so a crash between the two "
                "commits doubles or loses work. Give it a parameter annotated as AsyncSession, or name its "
                "session with Deduplicated(session=...); where it has none, use lease=",
                self._endpoint,
            )


def check(policies: Sequence[Policy], dedup: Dedup | None = None) -> None:
    """Refuse policies that messages cannot keep, alone or together, where they are given to a handler.

    Args:
        policies: The handler's policies.
        dedup: The runtime; None where it is not known yet.

    Raises:
        ConfigurationError: One cannot be kept, or they do not go together.
    """
    for policy in policies:
        check_policy(policy)
        if policy.session is not None:
            check_factory(factory_of(policy.session))
        if dedup is not None:
            dedup.prepare(policy)
    if len({factory_of(policy.session) for policy in policies if policy.session is not None}) > 1:
        msg = "the policies of one handler name different sessions: a handler has one transaction"
        raise ConfigurationError(msg)


def check_function(function: Callable[..., Any]) -> None:
    """Refuse what would be called, and acknowledged, without its work being done.

    Raises:
        ConfigurationError: It is a generator, or a handler that has been wrapped already.
    """
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        msg = f"{name_of(function)} is a generator, and nobody takes what it yields: a handler is a function"
        raise ConfigurationError(msg)
    if isinstance(function, MessageHandler):
        msg = (
            f"{function._endpoint} has policies already, and what comes of it there would be lost here: "  # noqa: SLF001 - our own
            "give all policies to one decorator"
        )
        raise ConfigurationError(msg)


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or an object that is called, is to be awaited and not run in a thread."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a handler's function, a synchronous one in a worker thread, and return what it returns."""
    call = partial(function, *args, **kwargs)
    # A thread cannot be cancelled: its session must not be closed while it works.
    value = call() if is_async(function) else await uncancelled(to_thread.run_sync(call))
    return await value if inspect.isawaitable(value) else value
