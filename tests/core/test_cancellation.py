"""A settlement reaches its end although its task is cancelled, and then the cancellation goes on."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from fastapi_dedup.cancellation import uncancelled


class Work:
    """A settlement that a test lets finish when it likes."""

    def __init__(self, result: str | BaseException = "done") -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.ended = False
        self._result = result

    async def __call__(self) -> str:
        self.begun.set()
        await self.may_end.wait()
        self.ended = True
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


async def test_without_a_cancellation_the_result_is_the_works() -> None:
    work = Work()
    work.may_end.set()
    assert await uncancelled(work()) == "done"


async def test_without_a_cancellation_the_error_is_the_works_as_it_came() -> None:
    error = ValueError()
    work = Work(error)
    work.may_end.set()
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - it is compared below
        await uncancelled(work())
    assert raised.value is error


async def test_a_cancelled_task_waits_for_the_end_of_the_work_and_is_cancelled_then() -> None:
    work = Work()
    waiting = asyncio.create_task(uncancelled(work()))
    await work.begun.wait()
    for _ in range(3):  # however often
        waiting.cancel("shutdown")
        await asyncio.sleep(0)
        assert not waiting.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError, match="shutdown"):
        await waiting
    assert work.ended


async def test_a_task_that_was_cancelled_before_still_does_the_work() -> None:
    work = Work()
    work.may_end.set()

    async def cancelled_already() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await uncancelled(work())

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(cancelled_already())
    assert work.ended


async def test_the_error_of_work_that_met_a_cancellation_is_the_cancellations_cause() -> None:
    error = OSError("the connection is gone")
    work = Work(error)
    waiting = asyncio.create_task(uncancelled(work()))
    await work.begun.wait()
    waiting.cancel()
    await asyncio.sleep(0)
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError) as raised:
        await waiting
    assert raised.value.__cause__ is error


async def test_work_that_is_itself_cancelled_does_not_hang_who_waits() -> None:
    work = Work(asyncio.CancelledError())
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await uncancelled(work())


async def test_a_timeout_of_asyncios_is_a_timeout_once_the_work_has_ended() -> None:
    work = Work()

    async def end_later() -> None:
        await work.begun.wait()
        await asyncio.sleep(0.05)
        work.may_end.set()

    ending = asyncio.create_task(end_later())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await uncancelled(work())
    assert work.ended
    await ending


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_cancel_scope_of_anyios_lets_the_work_end_and_then_takes_effect(when: str) -> None:
    # Starlette cancels with these: again at every await, until the scope is left
    work = Work()
    passed = False

    async def cancel_and_end(scope: anyio.CancelScope) -> None:
        await work.begun.wait()
        scope.cancel()
        await asyncio.sleep(0.02)
        work.may_end.set()

    with anyio.CancelScope() as scope:
        ending = asyncio.create_task(cancel_and_end(scope))
        if when == "before":
            scope.cancel()
        await uncancelled(work())
        await anyio.lowlevel.checkpoint()
        passed = True
    assert work.ended
    assert scope.cancelled_caught
    assert not passed
    await ending


async def test_a_scope_that_times_out_interrupts_only_after_the_work() -> None:
    work = Work()

    async def end_later() -> None:
        await asyncio.sleep(0.05)
        work.may_end.set()

    async with anyio.create_task_group() as group:
        group.start_soon(end_later)
        with anyio.move_on_after(0.01) as scope:
            await uncancelled(work())
            await anyio.sleep(5)
    assert work.ended
    assert scope.cancelled_caught
