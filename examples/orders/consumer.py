"""The shop's orders from a queue: partners send theirs in bulk, and some send one over HTTP as well.

    python -m examples.orders.consumer

It works in the database of `app.py`, under the same policy: an order that comes both ways commits once.
RABBITMQ_URL names the broker, and ORDERS_QUEUE the queue; what is no order goes to the queue `….dead`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from faststream import AckPolicy, FastStream
from faststream.exceptions import RejectMessage
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from examples.orders.app import CreateOrder, SoldOutError, create_tables, dedup, one_order, place
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession

NAME = os.environ.get("ORDERS_QUEUE", "orders")
QUEUE = RabbitQueue(
    NAME,
    queue_type=QueueType.QUORUM,
    durable=True,
    arguments={
        "x-delivery-limit": 20,  # then RabbitMQ gives up on it, as on what is rejected
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": f"{NAME}.dead",
    },
)

broker = RabbitBroker(
    os.environ.get("RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672/"),
    default_channel=Channel(prefetch_count=5),  # as many as the pool has connections
    middlewares=[DeduplicatingMiddleware(dedup, one_order)],
)


@broker.subscriber(QUEUE, ack_policy=AckPolicy.NACK_ON_ERROR)
async def on_order(order: CreateOrder, session: MessageSession) -> None:
    """Take an order. It is acknowledged when order, stock and claim are committed."""
    try:
        await place(order, session)
    except SoldOutError as error:
        raise RejectMessage from error  # nobody waits for an answer: a person looks at the dead letters


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    """Create the tables and the dead-letter queue before the first order comes."""
    async with dedup:
        await create_tables()
        await broker.connect()
        await broker.declare_queue(RabbitQueue(f"{NAME}.dead", durable=True))
        yield


app = FastStream(broker, lifespan=lifespan)

if __name__ == "__main__":
    asyncio.run(app.run())
