"""Work of synchronous sessions, in worker threads: the event loop waits for no database."""

from __future__ import annotations

from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar

from fastapi_dedup.cancellation import undone_if_cancelled
from fastapi_dedup.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sqlalchemy import Connection, Engine

__all__ = ["entered_in_thread", "in_thread", "must_be_blocking"]

T = TypeVar("T")

_AT_ONCE = 40
"""As many threads may wait for a connection as anyio gives to everybody else."""

_limiter: RunVar[CapacityLimiter] = RunVar("fastapi_dedup.limiter")


def must_be_blocking(bind: Engine | Connection, given: str, instead: str) -> None:
    """Refuse what only looks synchronous.

    Raises:
        ConfigurationError: Its engine is an asynchronous one.
    """
    if bind.dialect.is_async:
        msg = f"{given} works in SQLAlchemy's greenlets only: give the claim {instead}"
        raise ConfigurationError(msg)


async def in_thread(work: Callable[[], T], *, connected: bool, undo: Callable[[], object] | None = None) -> T:
    """Run blocking work in a worker thread, to its end whatever happens to the caller.

    The threads are not those of `def` handlers: a claim that waits for a connection in one of those would
    keep it from a handler that holds one, and neither would get on. Nor does who holds a connection wait for
    those who wait for one.

    Args:
        work: What to do.
        connected: Whether it has its connection already.
        undo: What takes the work back where the caller was cancelled meanwhile.
    """
    limiter = CapacityLimiter(1) if connected else _those_who_wait()
    return await undone_if_cancelled(
        to_thread.run_sync(work, limiter=limiter),
        None if undo is None else lambda: to_thread.run_sync(undo, limiter=CapacityLimiter(1)),
    )


@asynccontextmanager
async def entered_in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a blocking context manager, such as a `Session`, in worker threads."""
    entered = await in_thread(
        manager.__enter__, connected=False, undo=partial(manager.__exit__, None, None, None)
    )
    try:
        yield entered
    except BaseException as error:
        leave = partial(manager.__exit__, type(error), error, error.__traceback__)
        if not await in_thread(leave, connected=True):
            raise
    else:
        await in_thread(partial(manager.__exit__, None, None, None), connected=True)


def _those_who_wait() -> CapacityLimiter:
    try:
        return _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(_AT_ONCE)
        _limiter.set(limiter)
        return limiter
