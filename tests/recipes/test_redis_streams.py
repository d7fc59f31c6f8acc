"""The page on Redis Streams, word for word, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Dedup, Deduplicated
from tests.messaging.shop import fail
from tests.messaging.test_pages import page
from tests.recipes.conftest import Shop, at_work

IDLE = timedelta(seconds=0.1)
"""How long an entry is left alone before it is claimed; the page says 30 seconds."""


@dataclass
class Stream:
    """What the page defines, on a stream of the test's own."""

    redis: Any
    name: str
    defined: dict[str, Any]

    async def publish(self, *orders: str) -> None:
        for order in orders:
            await self.defined["publish"](self.redis, self.defined["OrderPlaced"](order))

    def workers(self, number: int = 1) -> Any:
        """Return a block in which so many workers consume."""
        return at_work(*(self.defined["consume"](self.redis, f"worker {each}") for each in range(number)))

    def handle(self, wrap: Callable[[Any], Any]) -> None:
        """Wrap the page's handler."""
        dedup: Dedup = self.defined["dedup"]
        inner = self.defined["on_order"].__wrapped__
        handler = dedup.handler(Deduplicated())(wrap(inner))
        self.defined["judge"]._handler = handler

    async def pending(self) -> int:
        return int((await self.redis.xpending(self.name, "workers"))["pending"])

    async def settled(self) -> bool:
        """Tell whether each entry was delivered and acknowledged."""
        (group,) = await self.redis.xinfo_groups(self.name)
        return int(group["lag"]) == 0 and int(group["pending"]) == 0

    async def dead(self) -> list[dict[str, str]]:
        return [fields for _, fields in await self.redis.xrange(f"{self.name}.dead")]


@pytest.fixture
async def stream(redis: Any, name: str, shop: Shop) -> AsyncIterator[Stream]:  # noqa: ARG001 - its folder
    defined = page("consume-from-redis-streams.md", {"orders": name, "orders.dead": f"{name}.dead"})
    defined["IDLE"] = IDLE
    async with defined["dedup"]:
        yield Stream(redis, name, defined)
        await defined["dedup"].engine.dispose()
    await redis.delete(name, f"{name}.dead")


async def test_entries_that_are_published_twice_run_once_and_are_all_acknowledged(  # case G3
    stream: Stream, shop: Shop
) -> None:
    await stream.publish("A-17", "A-17", "A-18", "A-17")
    async with stream.workers(3):
        await shop.until(lambda: len(shop.orders) == 2)
        await shop.until(stream.settled)
    assert sorted(shop.orders) == sorted(shop.ids) == ["A-17", "A-18"]
    assert await stream.dead() == []


async def test_an_entry_without_an_id_is_in_the_dead_stream_at_once(stream: Stream, shop: Shop) -> None:
    await stream.publish("", "A-18")
    async with stream.workers():
        await shop.until(lambda: shop.orders == ["A-18"])
        await shop.until(stream.settled)
    (letter,) = await stream.dead()
    assert letter["order"] == '{"order_id": ""}'
    assert "deduplication-id has none" in letter["reason"]


async def test_an_entry_that_is_claimed_while_it_is_handled_is_not_acknowledged_and_runs_if_that_fails(
    stream: Stream, shop: Shop
) -> None:  # case G4
    entered, fails = asyncio.Event(), asyncio.Event()

    def fails_once(inner: Any) -> Any:
        async def on_order(fields: dict[str, str], session: AsyncSession) -> None:
            await inner(fields, session)
            if not fails.is_set():
                entered.set()
                await fails.wait()
                await fail()

        return on_order

    stream.handle(fails_once)
    await stream.publish("A-17")
    async with stream.workers(2):
        await entered.wait()

        async def delivered_again() -> bool:
            (entry,) = await stream.redis.xpending_range(stream.name, "workers", "-", "+", 1)
            return int(entry["times_delivered"]) > 2

        await shop.until(delivered_again)
        assert (await stream.pending(), shop.orders) == (1, [])
        fails.set()
        await shop.until(lambda: shop.orders == ["A-17"])
        await shop.until(stream.settled)
    assert shop.orders == ["A-17"]


async def test_an_entry_whose_worker_died_is_claimed_by_another(stream: Stream, shop: Shop) -> None:
    await stream.publish("A-17")
    await stream.redis.xgroup_create(stream.name, "workers", id="0")
    await stream.redis.xreadgroup("workers", "the dead one", {stream.name: ">"})
    async with stream.workers():
        await shop.until(lambda: shop.orders == ["A-17"])
        await shop.until(stream.settled)


async def test_a_lost_acknowledgement_is_made_up_for_when_the_entry_is_claimed(  # case G3
    stream: Stream, shop: Shop
) -> None:
    await stream.publish("A-17")
    await stream.redis.xgroup_create(stream.name, "workers", id="0")
    answer = await stream.redis.xreadgroup("workers", "the dead one", {stream.name: ">"})
    ((_, ((entry_id, fields),)),) = answer if isinstance(answer, list) else answer.items()
    envelope = stream.defined["Envelope"](fields, fields, entry_id, f"{stream.name}/workers")
    await stream.defined["judge"](envelope)  # and dies before XACK
    assert (shop.orders, await stream.pending()) == (["A-17"], 1)
    async with stream.workers():
        await shop.until(stream.settled)
    assert shop.orders == ["A-17"]


async def test_a_handler_that_raises_is_tried_again(stream: Stream, shop: Shop) -> None:
    mishaps = [fail, fail]

    def fails_twice(inner: Any) -> Any:
        async def on_order(fields: dict[str, str], session: AsyncSession) -> None:
            await inner(fields, session)
            if mishaps:
                await mishaps.pop()()

        return on_order

    stream.handle(fails_twice)
    await stream.publish("A-17")
    async with stream.workers():
        await shop.until(lambda: shop.orders == ["A-17"])
        await shop.until(stream.settled)
    assert mishaps == []
