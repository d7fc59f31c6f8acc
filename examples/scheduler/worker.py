"""The worker: it runs each night's job once, however many copies of its message there are.

python -m examples.scheduler.worker
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta

from faststream import AckPolicy, FastStream
from faststream.rabbit import Channel, RabbitBroker
from sqlalchemy import DateTime
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from examples.scheduler.job import QUEUE, RABBITMQ_URL, Job
from fastapi_dedup import Dedup, Deduplicated
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession

dedup = Dedup(create_table=True)

# An agent may publish a night's job the day before, and a worker may be down for a while.
ONCE_A_NIGHT = Deduplicated(scope="jobs", window=timedelta(days=7))

broker = RabbitBroker(
    RABBITMQ_URL,
    default_channel=Channel(prefetch_count=1),  # one job at a time: a copy waits in the queue for its twin
    middlewares=[DeduplicatingMiddleware(dedup, ONCE_A_NIGHT)],
)


class Base(DeclarativeBase):
    """The worker's tables."""


class Rebuild(Base):
    """A rebuild that was done. Nothing here is unique but `id`: the claim lets it commit once."""

    __tablename__ = "rebuilds"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    due: Mapped[datetime] = mapped_column(DateTime(timezone=True))


@broker.subscriber(QUEUE, ack_policy=AckPolicy.NACK_ON_ERROR)
async def run(job: Job, session: MessageSession) -> None:
    """Run a job. If it fails, its id is free again, and the message comes again."""
    session.add(Rebuild(name=job.name, due=job.due))


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    """Create the tables before the first job comes."""
    async with dedup:
        async with dedup.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield


app = FastStream(broker, lifespan=lifespan)

if __name__ == "__main__":
    asyncio.run(app.run())
