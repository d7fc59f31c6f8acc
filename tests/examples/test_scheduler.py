"""The nightly job that two agents publish commits once: two processes of agents, a worker, real RabbitMQ."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from examples.scheduler.job import Job, next_run
from fastapi_dedup.identities import Identities
from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from tests.examples.test_orders import ROOT
from tests.live import until
from tests.messaging.brokers import RabbitMQ
from tests.servers import driver_url, postgres_database

NIGHT = datetime(2026, 11, 30, 3, tzinfo=UTC)
TOKYO = timezone(timedelta(hours=9))


def id_of(job: Job) -> str | None:
    """Return a job's logical id."""
    return Identities().of(job)


def test_the_id_names_the_job_and_its_night() -> None:
    assert id_of(next_run(NIGHT)) == "nightly-rebuild|2026-11-30T03:00:00+00:00"


@pytest.mark.parametrize("before", [timedelta(0), timedelta(seconds=1), timedelta(hours=23, minutes=59)])
@pytest.mark.parametrize("zone", [UTC, TOKYO])
def test_agents_agree_on_the_night_whenever_and_wherever_they_publish(
    before: timedelta, zone: timezone
) -> None:
    assert id_of(next_run((NIGHT - before).astimezone(zone))) == id_of(Job(name="nightly-rebuild", due=NIGHT))


def test_the_next_night_is_another_job() -> None:
    assert id_of(next_run(NIGHT + timedelta(seconds=1))) == "nightly-rebuild|2026-12-01T03:00:00+00:00"


@pytest.mark.parametrize("due", [None, "2026-11-30T03:00:00"], ids=["no time", "no zone"])
def test_a_job_without_a_time_that_all_agents_agree_on_is_none(due: str | None) -> None:
    with pytest.raises(ValidationError):
        Job.model_validate({"name": "nightly-rebuild", "due": due})


@dataclass
class Night:
    """A queue and a database of their own, and the processes that work with them."""

    environ: Mapping[str, str]
    engine: AsyncEngine
    rabbitmq: RabbitMQ
    queue: str

    async def agent(self) -> None:
        """Run an agent to its end."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.scheduler.agent"), cwd=ROOT, env=self.environ
        )
        assert await process.wait() == 0

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """Run a worker, and let it finish what it is at."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.scheduler.worker"), cwd=ROOT, env=self.environ, stderr=DEVNULL
        )
        try:
            yield
            process.terminate()
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()

    async def ran(self) -> bool:
        """Tell whether a job was run."""
        async with self.engine.connect() as connection:
            made = await connection.scalar(text("select to_regclass('rebuilds') is not null"))
            return bool(made and await connection.scalar(text("select count(*) from rebuilds")))

    async def drained(self) -> bool:
        """Tell whether nothing waits for a worker."""
        channel = await self.rabbitmq.channel()
        queue = await channel.declare_queue(self.queue, durable=True)
        return queue.declaration_result.message_count == 0


@pytest.fixture
async def night(postgres_url: str, rabbitmq_url: str) -> AsyncIterator[Night]:
    rabbitmq = RabbitMQ(rabbitmq_url)
    queue = f"jobs-{secrets.token_hex(4)}"
    with postgres_database(postgres_url) as database:
        url = driver_url(database, "asyncpg")
        environ = {
            **os.environ,
            DATABASE_URL_VARIABLE: url,
            "RABBITMQ_URL": rabbitmq_url,
            "JOBS_QUEUE": queue,
        }
        engine = create_async_engine(url)
        yield Night(environ, engine, rabbitmq, queue)
        await engine.dispose()
    await (await rabbitmq.channel()).queue_delete(queue)
    await rabbitmq.close()


async def test_the_job_that_two_agents_publish_commits_once(night: Night) -> None:
    await asyncio.gather(night.agent(), night.agent())
    while not await night.drained():  # until no copy is left that met its twin in flight
        async with night.worker():
            await until(night.ran)
            await until(night.drained)
    expected = next_run(datetime.now(UTC))
    async with night.engine.connect() as connection:
        rows = [tuple(row) for row in await connection.execute(text("select name, due from rebuilds"))]
        ids = [*await connection.scalars(text("select logical_id from dedup_claims"))]
    assert rows == [("nightly-rebuild", expected.due)]
    assert ids == [id_of(expected)]
