"""Crowds of claimants in processes of their own, which all start at the same moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from fastapi_dedup import ClaimInFlightError, Dedup, DuplicateError, StoreUnavailableError
from tests.apps.forked import forking
from tests.live import Caller

Work = Callable[..., Awaitable[Counter[str]]]


async def crowd(size: int, work: Work, *arguments: Any) -> Counter[str]:
    """Do work in so many processes at once, and return what came of it, summed up."""
    return await asyncio.to_thread(_gather_crowd, size, work, arguments)


def _gather_crowd(size: int, work: Work, arguments: tuple[Any, ...]) -> Counter[str]:
    context = forking()
    barrier, results = context.Barrier(size), context.SimpleQueue()
    members = [
        context.Process(target=_member, args=(barrier, results, work, arguments), daemon=True)
        for _ in range(size)
    ]
    for member in members:
        member.start()
    total: Counter[str] = Counter()
    for _ in members:
        outcome = results.get()
        if isinstance(outcome, BaseException):
            raise outcome
        total += outcome
    for member in members:
        member.join()
    results.close()
    return total


def _member(barrier: Barrier, results: SimpleQueue[Any], work: Work, arguments: tuple[Any, ...]) -> None:
    """Do one process's part."""
    try:
        barrier.wait(60)
        results.put(asyncio.run(_run(work, arguments)))
    except Exception as error:  # noqa: BLE001 - raised again where the results are added up
        results.put(RuntimeError(repr(error)))


async def _run(work: Work, arguments: tuple[Any, ...]) -> Counter[str]:
    return await work(*arguments)


async def order(url: str, ids: int, copies: int) -> Counter[str]:
    """Order every id so many times over HTTP, each copy until its answer is final; count the answers.

    All members go through the ids in the same order, so that the copies of one id meet.
    """
    left = [f"K{number}" for number in range(ids) for _ in range(copies)]
    left.reverse()
    answers: Counter[str] = Counter()

    async def customer() -> None:
        caller = await Caller.connect(url)
        while left:
            sku = left.pop()
            reply = await caller.call("POST", "/orders", {"sku": sku})
            while reply.problem in {"in-flight", "store-unavailable"}:
                answers[reply.problem] += 1
                reply = await caller.call("POST", "/orders", {"sku": sku})
            answers[reply.problem or str(reply.status)] += 1
        caller.hang_up()

    await asyncio.gather(*(customer() for _ in range(copies)))
    return answers


async def claim(database: str, ids: int, copies: int) -> Counter[str]:
    """Claim every id so many times with `dedup.claim`, each copy until its outcome is final; count those."""
    engine = create_async_engine(database, pool_size=5, max_overflow=0, pool_timeout=300)  # 500 wait for it
    dedup = Dedup(engine)
    outcomes: Counter[str] = Counter()

    async def deliver(logical_id: str) -> None:
        while True:
            try:
                async with dedup.claim(logical_id, scope="crowd") as held:
                    await held.session.execute(
                        text("insert into orders (sku) values (:sku)"), {"sku": logical_id}
                    )
            except ClaimInFlightError:
                outcomes["in-flight"] += 1
            except StoreUnavailableError:
                outcomes["store-unavailable"] += 1
            except DuplicateError:
                outcomes["duplicate"] += 1
                return
            else:
                outcomes["201"] += 1
                return

    for number in range(ids):
        await asyncio.gather(*(deliver(f"K{number}") for _ in range(copies)))
    await engine.dispose()
    return outcomes
