"""Letting a settlement reach its end although the task that asked for it is cancelled."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CancelScope

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["uncancelled", "undone_if_cancelled"]

logger = logging.getLogger("fastapi_dedup")

T = TypeVar("T")


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end whatever happens to the caller; a cancellation met meanwhile goes on afterwards.

    A COMMIT or ROLLBACK that is cut in half leaves its connection, and thus the claim, in limbo. The work
    runs as a task of its own, so asyncio's cancel() does not reach it; the shielded scope keeps anyio's
    level-triggered cancellation, which Starlette uses, from interrupting the wait again and again.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as error:
                if task.cancelled():
                    raise
                cancelled = error
            except BaseException:  # noqa: BLE001 - task.result() raises it below
                break
    if cancelled is not None:
        if not task.cancelled() and task.exception() is not None:
            raise cancelled from task.exception()
        raise cancelled
    return task.result()


async def undone_if_cancelled(
    work: Coroutine[Any, Any, T], undo: Callable[[], Coroutine[Any, Any, object]] | None
) -> T:
    """Run work to its end; where the caller was cancelled meanwhile, undo it, for nobody will know of it."""
    done: list[T] = []

    async def run() -> None:
        done.append(await work)

    try:
        await uncancelled(run())
    except asyncio.CancelledError:
        if done and undo is not None:
            await uncancelled(_undone(undo))
        raise
    return done[0]


async def _undone(undo: Callable[[], Coroutine[Any, Any, object]]) -> None:
    try:
        await undo()
    except Exception:
        logger.warning("could not undo what a cancelled delivery has done", exc_info=True)
