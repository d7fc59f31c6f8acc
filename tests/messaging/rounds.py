"""Rounds of chaos: consumers are killed and hang up at random; what must be true when all is drained."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup import Dedup
from tests.databases import count, orders_table
from tests.live import until
from tests.messaging.brokers import SOON, Broker, Topic
from tests.messaging.workers import Crew, Job

ENDPOINTS, PROCESSES = 3, 4
COPIES, OTHERS, POISON = 50, 30, 6
NIGHTLY = "nightly-rebuild|2026-11-30T03:00:00+00:00"


async def publish(broker: Broker, topic: Topic) -> None:
    """Publish one order many times, others once, and some that have no legal id, in a random order."""
    orders = [(NIGHTLY, NIGHTLY)] * COPIES + [(f"order-{number}",) * 2 for number in range(OTHERS)]
    poison = [(f"poison-{number}", "x" * 256 if number % 2 else "") for number in range(POISON)]
    publications = orders + poison
    random.shuffle(publications)
    for body, logical_id in publications:
        await broker.publish(topic, body.encode(), deduplication_id=logical_id)
        await asyncio.sleep(0.005)


async def play(number: int, broker: Broker, database: str, folder: Path) -> None:
    """Play so many rounds, and print the counts of each.

    In every other round the endpoints share one scope, so that an order is done once in all; in the rest it
    is done once at each.
    """
    broker.ack_wait = SOON
    total: Counter[str] = Counter()
    for each in range(number):
        scope = "orders" if each % 2 == 0 else None
        async with orders_table(database) as engine:
            counts = await play_one(broker, engine, folder, scope)
        total += counts
        tell(f"{broker.kind}, round {each + 1}, scope {scope or 'per endpoint'}", counts)
    tell(f"{broker.kind}, {number} rounds", total)


def tell(what: str, counts: Counter[str]) -> None:
    """Print counts."""
    print(f"{what}: {', '.join(f'{name} {number}' for name, number in counts.items())}")  # noqa: T201


async def play_one(broker: Broker, engine: AsyncEngine, folder: Path, scope: str | None) -> Counter[str]:
    """Play one round, check what must be true after it, and return its counts."""
    await Dedup(engine).create_table()
    topic = await broker.topic(ENDPOINTS)
    database = engine.url.render_as_string(hide_password=False)
    job = Job(broker.kind, broker.url, database, topic, scope, folder / topic.name)
    job.journal.touch()
    crew = Crew(job, PROCESSES)
    try:
        publishing = asyncio.create_task(publish(broker, topic))
        places = 1 if scope else ENDPOINTS
        while not publishing.done() or await count(engine, "orders") < places * (1 + OTHERS):
            await some_work(job)
            await asyncio.to_thread(crew.disturb)
        await publishing
        await drain(broker, topic, crew)
    finally:
        await crew.stop()
    await check(broker, topic, engine, places)
    return counts(job, crew)


async def some_work(job: Job) -> None:
    """Wait until the workers have got on a little, for kills faster than starts would stop all work."""
    before = job.events().total()
    for enough, patience in ((1, 2.0), (random.randint(20, 80), 0.5)):  # noqa: S311 - no secret

        async def got_on(wanted: int = before + enough) -> bool:
            return job.events().total() >= wanted

        with suppress(TimeoutError):
            await asyncio.wait_for(until(got_on), patience)


async def drain(broker: Broker, topic: Topic, crew: Crew) -> None:
    """Let the workers work in peace until no message is left, delivered or not."""
    async with asyncio.timeout(60):
        while True:
            crew.restore()
            await until(partial(delivered, broker, topic))
            await crew.stop()
            if not any([await broker.left(endpoint) for endpoint in topic.endpoints]):
                return


async def delivered(broker: Broker, topic: Topic) -> bool:
    """Tell whether nothing waits for a consumer."""
    return not any([await broker.waiting(endpoint) for endpoint in topic.endpoints])


async def check(broker: Broker, topic: Topic, engine: AsyncEngine, places: int) -> None:
    """Check that every order was done once, that none was lost, and that only the poison is dead."""
    async with engine.connect() as connection:
        rows = Counter((await connection.exec_driver_sql("select sku from orders")).scalars())
    assert rows == dict.fromkeys([NIGHTLY, *(f"order-{number}" for number in range(OTHERS))], places)
    assert await count(engine, "dedup_claims") == rows.total()
    letters = Counter(letter.body.decode() for letter in await broker.dead(topic))
    assert letters == {f"poison-{number}": ENDPOINTS for number in range(POISON)}


def counts(job: Job, crew: Crew) -> Counter[str]:
    """Return the counts of a round, for people."""
    events = job.events()
    assert events["duplicate"] > 0
    return Counter(
        {
            "published": COPIES + OTHERS + POISON,
            "to be delivered": (COPIES + OTHERS + POISON) * ENDPOINTS,
            "killed": crew.killed,
            "hung up": crew.hung_up,
            **{kind: events[kind] for kind in ("claimed", "committed", "duplicate", "in_flight")},
            "poison": events["missing"] + events["invalid"],
        }
    )
