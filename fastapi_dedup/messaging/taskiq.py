"""taskiq: a decorator by which a task's work is done once, and a middleware that stamps what is kicked.

On the worker's side, and on the client's:

    @broker.task
    @deduplicated(dedup, Deduplicated(source="body", member="order_id"))
    async def place(order_id: str, session: AsyncSession) -> None: ...

    broker.add_middlewares(StampingMiddleware(dedup.identities))

It is a decorator, for no hook of taskiq's middlewares can skip a task: what `pre_execute` raises leaves the
message unacknowledged and its result unset. A task that is entered and returns at once has both.

    what came of it                                      taskiq is told
    handled                                              the task's own result, after our COMMIT
    duplicate                                            a success: see `deduplicated`
    in flight                                            kick it anew after a pause, keep no result
    the store is down, or has no table                   the same; the pause grows with the outage
    no legal id, or an id that was used for another      the error, which is not retried
    payload
    the task raised                                      what it raised; the id is free again
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_type_hints

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
from fastapi_dedup.messaging.handler import Result, check_function, run

with driver("taskiq", extra="taskiq"):
    from taskiq import Context, NoResultError, TaskiqDepends, TaskiqMessage, TaskiqMiddleware
    from taskiq.receiver.params_parser import parse_params

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from fastapi_dedup.identities import Identities
    from fastapi_dedup.policy import Policy
    from fastapi_dedup.runtime import Dedup

__all__ = ["OUTCOME_LABEL", "StampingMiddleware", "deduplicated"]

logger = logging.getLogger("fastapi_dedup")

OUTCOME_LABEL: Final = "deduplication"
"""The label that says `"duplicate"` in the result of a task that was not run because its work is done."""

_CONTEXT: Final = "fastapi_dedup_context"


def deduplicated(
    dedup: Dedup, *policies: Policy, pause: timedelta = timedelta(seconds=0.5)
) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Wrap a task's function so that its work is done once. Write it below `@broker.task`.

    `source="header"` is the label `deduplication-id`, `"body"` the task's arguments by name (`"order_id"`, or
    `"order.id"`), `"delivery"` the `task_id`. The default scope is the task's name.

    A parameter that is annotated as `AsyncSession` gets the session that the claim is in, one annotated as
    `Claim` the claim; leave them out of the call. A synchronous function runs in a worker thread.

    A duplicate is a success. If its `task_id` has a result already (the broker delivered the message twice),
    that is kept; else (it was kicked twice, or the worker died before the result was stored) the result is
    None, and has the label `deduplication` with the value `"duplicate"`.

    Args:
        dedup: The runtime.
        *policies: The policies, in the order of their claims. None takes what `Dedup.require` asks.
        pause: How long a task rests, on average, before it is kicked anew; while the database is down up to
            30 seconds. Default half a second.

    Raises:
        ConfigurationError: A policy or an option cannot be kept.
    """
    pauses = Pauses(pause)

    def decorate(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        check_function(function)

        @wraps(function)
        async def do(_: TaskiqMessage, work: _Work, *args: Any, **kwargs: Any) -> None:
            await work.do(function, *args, **kwargs)

        # Partials and objects have no annotations of their own to be copied; their signatures tell.
        signature = inspect.signature(function, eval_str=True)
        do.__annotations__ = hints = _hints_of(signature)
        handler = dedup.handler(*policies)(do)

        @wraps(function)
        async def task(*args: Any, **kwargs: Any) -> Any:
            context = kwargs.pop(_CONTEXT, None)
            if not isinstance(context, Context):
                msg = f"{function.__qualname__} has an id only as a task: call it with kiq()"
                raise ConfigurationError(msg)
            message = context.message
            arguments = signature.bind_partial(*message.args, **message.kwargs).arguments
            envelope = Envelope(arguments, message.labels, message.task_id, message.task_name, message)
            work = _Work()
            try:
                result = await handler(envelope, work, *args, **kwargs)
            except Exception as error:
                if isinstance(error, DedupError) and error is not work.error:
                    return await _refuse(context, error, pauses)
                pauses.usual()
                raise
            seconds = pauses.usual()
            if result is Result.DUPLICATE:
                return await _skip(context)
            if result is Result.IN_FLIGHT:
                return await _kick_anew(context, seconds)
            return work.returned

        task.__annotations__ = {**hints, _CONTEXT: Context}
        _take_context(task, signature)
        return task

    return decorate


def _hints_of(signature: inspect.Signature) -> dict[str, Any]:
    return {
        name: each.annotation
        for name, each in signature.parameters.items()
        if each.annotation is not each.empty
    }


def _take_context(task: Any, signature: inspect.Signature) -> None:
    """Have taskiq inject its context into a wrapped function, beside what the function itself takes."""
    parameters = list(signature.parameters.values())
    last = len(parameters) - any(each.kind is each.VAR_KEYWORD for each in parameters)
    context = inspect.Parameter(
        _CONTEXT, inspect.Parameter.KEYWORD_ONLY, default=TaskiqDepends(), annotation=Context
    )
    task.__signature__ = signature.replace(parameters=[*parameters[:last], context, *parameters[last:]])


@dataclass(slots=True)
class _Work:
    """A task's work, and what came of it.

    Attributes:
        returned: What the function returned.
        error: What it raised.
    """

    returned: Any = None
    error: Exception | None = None

    async def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run the function."""
        try:
            self.returned = await run(function, *args, **kwargs)
        except Exception as error:
            self.error = error
            raise


async def _refuse(context: Context, error: DedupError, pauses: Pauses) -> NoReturn:
    """Answer for a task that was not run, though nothing is wrong with its function."""
    title = f"task {context.message.task_id!r} of {context.message.task_name}"
    if isinstance(error, MissingLogicalIdError | InvalidLogicalIdError | FingerprintMismatchError):
        logger.warning("refused %s: %s", title, error)
        context.message.labels["retry_on_error"] = False  # a retry changes nothing
        raise error
    level = logging.ERROR if isinstance(error, ConfigurationError) else logging.WARNING
    logger.log(level, "%s was not run and comes again: %s", title, error)
    await _kick_anew(context, pauses.outage())


async def _kick_anew(context: Context, pause: float) -> NoReturn:
    await asyncio.sleep(pause)
    await context.requeue()
    raise NoResultError  # as requeue() has done


async def _skip(context: Context) -> None:
    context.message.labels[OUTCOME_LABEL] = "duplicate"
    if await context.broker.result_backend.is_result_ready(context.message.task_id):
        raise NoResultError


class StampingMiddleware(TaskiqMiddleware):
    """Stamps what is kicked with its logical id, in the label `deduplication-id`.

    A label that is there already is kept. Else it is what the rules and types say of the task's arguments, in
    their order; the first that has an id gives it. taskiq sends models as dicts, so their types are those of
    the task's parameters; rules about members see all arguments together too, by their names.

    Args:
        identities: The publisher's rules: `dedup.identities`.
    """

    def __init__(self, identities: Identities) -> None:
        super().__init__()
        self._identities = identities

    def pre_send(self, message: TaskiqMessage) -> TaskiqMessage:
        """Stamp a message that is about to be sent.

        Raises:
            InvalidLogicalIdError: Its id is no legal one.
        """
        if DEDUPLICATION_HEADER not in message.labels:
            ids = (self._identities.of(each) for each in self._messages_in(message))
            logical_id = next((each for each in ids if each is not None), None)
            message.labels = with_stamp(message.labels, headers_for(logical_id))
        return message

    def _messages_in(self, message: TaskiqMessage) -> Iterator[Any]:
        """Yield what may have an identity: the arguments, and all of them by their names."""
        task = self.broker.find_task(message.task_name)
        if task is None:
            yield from (*message.args, *message.kwargs.values(), message.kwargs)
            return
        typed = TaskiqMessage.model_construct(**{**dict(message), "args": deepcopy(message.args)})
        typed.kwargs = deepcopy(message.kwargs)
        signature = inspect.signature(task.original_func)
        parse_params(signature, get_type_hints(task.original_func), typed)
        yield from (*typed.args, *typed.kwargs.values())
        yield signature.bind_partial(*typed.args, **typed.kwargs).arguments
