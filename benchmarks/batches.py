"""What a batch is worth: 1,000 ids in one `claim_many`, against 1,000 single claims.

Run it from the repository: `python -m benchmarks.batches`. It takes the PostgreSQL and MariaDB that the tests
take, a database of its own on each, and SQLite in a temporary file. One process; the contestants take turns
within every round, on fresh ids in the same table, so that whatever else the machine does hits them alike.
Times are wall time, from the first claim to the last COMMIT. Ratios are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fastapi_dedup import Dedup, DuplicateError
from tests.servers import (
    MARIADB,
    POSTGRES,
    MissingServerError,
    driver_url,
    mariadb_database,
    postgres_database,
    running,
)

ROUNDS = 7
SIZE = 1000
AT_ONCE = 10
"""How many single claims are under way at a time, where they are not one after the other."""

Contestant = Callable[[Dedup, list[str]], Awaitable[None]]


async def one_batch(dedup: Dedup, ids: list[str]) -> None:
    """Claim all ids in one go."""
    async with dedup.claim_many(ids, scope="benchmark"):
        pass


async def singles_in_one_transaction(dedup: Dedup, ids: list[str]) -> None:
    """Claim the ids one by one in one transaction, as a consumer did before there were batches."""
    async with AsyncSession(dedup.engine) as session:
        for each in ids:
            with suppress(DuplicateError):
                async with dedup.claim(each, scope="benchmark", session=session):
                    pass
        await session.commit()


async def singles_at_once(dedup: Dedup, ids: list[str]) -> None:
    """Claim the ids one by one in transactions of their own, some at a time."""
    left = iter(ids)

    async def worker() -> None:
        for each in left:
            with suppress(DuplicateError):
                async with dedup.claim(each, scope="benchmark"):
                    pass

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


CONTESTANTS: dict[str, Contestant] = {
    "claim_many": one_batch,
    "1,000 claims, one transaction": singles_in_one_transaction,
    f"1,000 claims, {AT_ONCE} at a time": singles_at_once,
}


@dataclass
class Turn:
    """What one turn of a contestant took."""

    seconds: float
    statements: int


class Counter:
    """Counts an engine's statements."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.count = 0
        event.listen(engine.sync_engine, "before_cursor_execute", self._hear)

    def _hear(self, *_: object) -> None:
        self.count += 1


async def compare(name: str, url: str) -> None:
    """Print what each contestant took for new ids, and for ids that are duplicates."""
    engine = create_async_engine(url, pool_size=AT_ONCE)
    counter = Counter(engine)
    dedup = Dedup(engine, create_table=True, reap_every=None)
    await dedup.start()

    async def turn(contestant: Contestant, ids: list[str]) -> Turn:
        counter.count, start = 0, time.perf_counter()
        await contestant(dedup, ids)
        return Turn(time.perf_counter() - start, counter.count)

    def fresh(of: str) -> list[str]:
        return [f"{of} {number}" for number in range(SIZE)]

    for each, run in CONTESTANTS.items():
        await turn(run, fresh(f"warm {each}"))
    new = [
        {each: await turn(run, fresh(f"{number} {each}")) for each, run in CONTESTANTS.items()}
        for number in range(ROUNDS)
    ]
    known = [
        {each: await turn(run, fresh(f"{number} {each}")) for each, run in CONTESTANTS.items()}
        for number in range(ROUNDS)
    ]
    print(f"\n{name}: {ROUNDS} rounds of {SIZE:,} ids")
    for what, rounds in (("new ids", new), ("duplicates", known)):
        print(f"  {what}")
        for each in CONTESTANTS:
            seconds = statistics.median(row[each].seconds for row in rounds)
            ratio = statistics.median(row[each].seconds / row["claim_many"].seconds for row in rounds)
            print(
                f"    {each:<30} {seconds * 1000:8.1f} ms  {rounds[-1][each].statements:6,} statements  "
                f"{ratio:6.1f} times a batch"
            )
    await dedup.stop()
    await engine.dispose()


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    """Yield the URL of an empty database on each server that is there."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["SQLite, aiosqlite"] = f"sqlite+aiosqlite:///{Path(folder) / 'claims.db'}"
        with running(POSTGRES) as postgres, postgres_database(postgres.url) as url:
            found[f"PostgreSQL {postgres.version}, asyncpg"] = driver_url(url, "asyncpg")
            try:
                with running(MARIADB) as mariadb, mariadb_database(mariadb.url) as other:
                    address = make_url(other).set(drivername="mysql+asyncmy")
                    found[f"MariaDB {mariadb.version}, asyncmy"] = address.render_as_string(
                        hide_password=False
                    )
                    yield found
            except MissingServerError as missing:
                print(missing)
                yield found


def main() -> None:
    """Compare on every database that is there."""
    with databases() as found:
        for name, url in found.items():
            asyncio.run(compare(name, url))


if __name__ == "__main__":
    main()
