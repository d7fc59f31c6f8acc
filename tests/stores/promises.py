"""What each backend promises, as data: the suite branches on it, and never skips without saying what holds.

A store that joins adds one line to `BACKENDS` and one kind of `World`; no scenario names a backend.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import timedelta


class Promise(enum.Enum):
    """What not every database can promise. What all of them must keep is no entry: it is simply tested."""

    SEES_TWINS_ELSEWHERE = "an unfinished twin in another process is answered at once"
    """Else the twin waits until the other ends, and is then told the outcome."""

    WRITES_SIDE_BY_SIDE = "claims of different ids do not wait for each other, nor for the reaper"
    """Else there is one writer at a time, and the next one waits for it."""

    SNAPSHOTS = "REPEATABLE READ and SERIALIZABLE: a race lost behind a snapshot is a refusal, no error"
    """Else a transaction that has read an older state cannot write at all: the store is unavailable."""

    ONE_STATEMENT = "a claim costs one statement"

    NAMES_A_MISSING_TABLE = "a missing table is told from a database that is down"
    """Else both are a store that is unavailable."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A database, how we speak to it, and what it promises.

    Attributes:
        name: What the tests call it.
        database: Its name in `tests.databases`.
        app_engine: Whether the engine is the app's, as `create_async_engine(url)` makes it; else `Dedup(url)`
            makes it.
        promises: What it promises.
        tick: The smallest step of its clock.
    """

    name: str
    database: str
    app_engine: bool = False
    promises: frozenset[Promise]
    tick: timedelta

    def __contains__(self, promise: Promise) -> bool:
        return promise in self.promises


BACKENDS = (
    Backend(name="asyncpg", database="asyncpg", promises=frozenset(Promise), tick=timedelta(microseconds=1)),
    Backend(name="psycopg", database="psycopg", promises=frozenset(Promise), tick=timedelta(microseconds=1)),
    Backend(name="sqlite", database="sqlite", promises=frozenset(), tick=timedelta(milliseconds=1)),
    Backend(
        name="sqlite-app-engine",
        database="sqlite",
        app_engine=True,
        promises=frozenset(),
        tick=timedelta(milliseconds=1),
    ),
)
