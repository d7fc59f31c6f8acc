"""FastStream's middleware on a real Redis: what is not acknowledged stays pending in its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.redis import RedisBroker, StreamSub
from sqlalchemy import text

from fastapi_dedup import Dedup, Deduplicated
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession
from fastapi_dedup.policy import Policy
from tests.messaging.shop import PAUSE, fail
from tests.recipes.conftest import Shop


@pytest.fixture
async def dedup(shop: Shop) -> AsyncIterator[Dedup]:  # noqa: ARG001 - its folder is where shop.db is
    """Yield a runtime on the shop's database."""
    async with Dedup("sqlite+aiosqlite:///shop.db", create_table=True) as opened:
        yield opened
        await opened.engine.dispose()


def consumer(url: str, name: str, dedup: Dedup, policy: Policy) -> RedisBroker:
    """Return a consumer of new entries, and of those that stayed pending for a while."""
    broker = RedisBroker(url, middlewares=[DeduplicatingMiddleware(dedup, policy, pause=PAUSE)])

    async def on_order(order_id: str, session: MessageSession) -> None:
        await session.execute(text("insert into orders values (:order_id)"), {"order_id": order_id})

    for worker, idle in (("new", None), ("pending", 100)):
        stream = StreamSub(name, group="workers", consumer=worker, min_idle_time=idle, polling_interval=50)
        broker.subscriber(stream=stream, ack_policy=AckPolicy.NACK_ON_ERROR)(on_order)
    return broker


async def test_duplicates_are_acknowledged_and_what_is_in_flight_stays_pending(  # cases G3 and G4
    redis: Any, redis_url: str, name: str, shop: Shop, dedup: Dedup
) -> None:
    async def settled() -> bool:
        (group,) = await redis.xinfo_groups(name)
        return int(group["lag"]) == 0 and int(group["pending"]) == 0

    async def pending() -> bool:
        return int((await redis.xpending(name, "workers"))["pending"]) > 0

    async with consumer(redis_url, name, dedup, Deduplicated()) as broker:
        await broker.start()
        with pytest.raises(RuntimeError):
            async with dedup.claim("A-17", scope=("message", f"{name}/workers")):
                await broker.publish("A-17", stream=name, headers={"deduplication-id": "A-17"})
                await shop.until(pending)
                await fail()
        for _ in range(2):
            await broker.publish("A-17", stream=name, headers={"deduplication-id": "A-17"})
        await shop.until(lambda: shop.orders == ["A-17"])
        await shop.until(settled)
    assert (shop.orders, shop.ids) == (["A-17"], ["A-17"])
    await redis.delete(name)


async def test_a_delivery_s_id_is_the_entry_s(
    redis: Any, redis_url: str, name: str, shop: Shop, dedup: Dedup
) -> None:
    async with consumer(redis_url, name, dedup, Deduplicated(source="delivery")) as broker:
        await broker.start()
        entry_id: Any = await broker.publish("A-17", stream=name)
        await shop.until(lambda: shop.orders == ["A-17"])
    assert shop.ids == [entry_id.decode()]
    await redis.delete(name)
