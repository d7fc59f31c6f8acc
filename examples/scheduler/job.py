"""The nightly job, as its agents and its worker know it.

What the job is, and for which night, is its logical id: `nightly-rebuild|2026-11-30T03:00:00+00:00`. When the
message was published, by whom and how often is no part of it.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, time, timedelta

from faststream.rabbit import RabbitQueue
from pydantic import AwareDatetime, BaseModel, field_validator

from fastapi_dedup.identities import deduplication_identity

NIGHTLY = "nightly-rebuild"
AT = time(3, tzinfo=UTC)
QUEUE = RabbitQueue(os.environ.get("JOBS_QUEUE", "jobs"), durable=True)
RABBITMQ_URL = os.environ.get("RABBITMQ_URL", "amqp://guest:guest@127.0.0.1:5672/")


@deduplication_identity("name", "due")
class Job(BaseModel):
    """A job, and the time that it is due at: in UTC, so that agents in two time zones name the same night.

    A time that does not say its zone is none: each agent would take it for its own.
    """

    name: str
    due: AwareDatetime

    @field_validator("due")
    @classmethod
    def _in_utc(cls, due: datetime) -> datetime:
        return due.astimezone(UTC)


def next_run(now: datetime) -> Job:
    """Return the next night's job. The time is the plan's, not the clock's: two agents agree on it."""
    tonight = datetime.combine(now.astimezone(UTC).date(), AT)
    return Job(name=NIGHTLY, due=tonight if now <= tonight else tonight + timedelta(days=1))
