"""One policy object on an HTTP route and on a queue: an order that comes by both commits once.

No `from __future__ import annotations`: FastAPI could not resolve what the endpoints' annotations name.
"""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated, RequestSession
from fastapi_dedup.hooks import EventKind
from tests.http.world import Order, World, add, talk
from tests.messaging.brokers import SOON, Broker, Topic
from tests.messaging.shop import PAUSE, body_of, heard, until_heard

ONE_POLICY = Deduplicated(source="body", member="sku", scope="orders", fingerprint=True)
TEA = {"sku": "tea", "note": "hot"}


def app_of(world: World) -> FastAPI:
    app = world.app()

    @app.post("/orders", status_code=201, dependencies=[Depends(ONE_POLICY)])
    async def create_order(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    return app


async def consume_orders(broker: Broker, world: World, topic: Topic) -> None:
    async def on_order(message: Any, session: AsyncSession) -> None:
        await add(session, json.loads(body_of(message))["sku"])

    await broker.consume(topic.endpoint, world.dedup, ONE_POLICY, function=on_order, pause=PAUSE)


@pytest.mark.parametrize("first", ["HTTP", "queue"])
async def test_an_order_that_comes_by_http_and_by_queue_commits_once(
    broker: Broker, world: World, first: str
) -> None:
    topic = await broker.topic()
    await consume_orders(broker, world, topic)
    async with talk(app_of(world)) as client:
        if first == "HTTP":
            assert (await client.post("/orders", json=TEA)).status_code == 201
        await broker.publish(topic, TEA)
        await until_heard(world, EventKind.DUPLICATE if first == "HTTP" else EventKind.COMMITTED)
        assert (await client.post("/orders", json=TEA)).status_code == 409
    assert await broker.drained(topic)
    assert (await world.orders(), await world.scopes()) == (["tea"], ["orders"])
    assert await broker.dead(topic) == []


async def test_another_order_under_the_same_id_is_refused_by_either_door(
    broker: Broker, world: World
) -> None:
    topic, cold = await broker.topic(), {**TEA, "note": "cold"}
    await consume_orders(broker, world, topic)
    async with talk(app_of(world)) as client:
        assert (await client.post("/orders", json=TEA)).status_code == 201
        await broker.publish(topic, cold)
        (letter,) = await broker.dead_letters(topic, 1)
        assert json.loads(letter.body) == cold
        assert (await client.post("/orders", json=cold)).status_code == 422
    assert await broker.drained(topic)
    assert await world.orders() == ["tea"]


async def test_orders_that_come_by_both_at_once_commit_once(broker: Broker, world: World) -> None:
    broker.ack_wait = SOON  # a consumer that hangs up may have messages that it has not looked at
    topic = await broker.topic()
    await consume_orders(broker, world, topic)
    async with talk(app_of(world)) as client:
        answers, _ = await asyncio.gather(
            asyncio.gather(*(client.post("/orders", json=TEA) for _ in range(20))),
            asyncio.gather(*(broker.publish(topic, TEA) for _ in range(20))),
        )
    await broker.drain(topic, partial(consume_orders, broker, world, topic))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert (await world.orders(), heard(world, EventKind.COMMITTED)) == (["tea"], 1)
