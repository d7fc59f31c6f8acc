"""An agent that publishes the next night's job. Run as many as you like, and as often.

python -m examples.scheduler.agent
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from faststream.rabbit import RabbitBroker

from examples.scheduler.job import QUEUE, RABBITMQ_URL, Job, next_run
from fastapi_dedup.identities import Identities
from fastapi_dedup.messaging.faststream import StampingMiddleware


async def publish(job: Job) -> None:
    """Publish a job. Its stamp is what its type says: name and time."""
    async with RabbitBroker(RABBITMQ_URL, middlewares=[StampingMiddleware(Identities())]) as broker:
        await broker.declare_queue(QUEUE)
        await broker.publish(job, QUEUE, persist=True)


if __name__ == "__main__":
    asyncio.run(publish(next_run(datetime.now(UTC))))
