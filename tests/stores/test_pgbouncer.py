"""PostgreSQL behind pgbouncer in transaction mode, where each transaction may meet another server process."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from sqlalchemy import text

from fastapi_dedup import Claim
from fastapi_dedup.claims import Duplicate, InFlight
from tests import databases
from tests.stores.promises import BACKENDS
from tests.stores.worlds import SOON, World, intent

through_pgbouncer = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, id=backend.name)
        for backend in BACKENDS
        if backend.database in databases.PGBOUNCER
    ],
    indirect=True,
)

STRANDED = """
    select count(*) from pg_locks join pg_database on pg_database.oid = pg_locks.database
     where locktype = 'advisory' and datname = current_database()
"""


@through_pgbouncer
async def test_a_hundred_requests_are_answered_and_strand_nothing(world: World) -> None:
    # case F10
    requests, ids = 100, 20
    dedup = world.runtime(engine=databases.engine_on(world.url, pool_size=requests))
    line = asyncio.Barrier(requests)
    processes: Counter[int] = Counter()

    async def request(number: int) -> object:
        async with world.attempt(dedup if number % 2 else world.dedup) as attempt:
            await line.wait()
            outcome = await attempt.run(intent(str(number % ids)))
        async with world.attempt(dedup) as attempt:
            processes[await attempt.session.scalar(text("select pg_backend_pid()")) or 0] += 1
        return type(outcome)

    async with asyncio.timeout(3 * SOON):
        outcomes = await asyncio.gather(*map(request, range(requests)))
    assert outcomes.count(Claim) == ids
    assert {*outcomes} <= {Claim, Duplicate, InFlight}
    assert await world.orders() == sorted(str(number) for number in range(ids))
    assert max(processes.values()) > 1  # more than one client's transactions were in one process
    async with world.engine.connect() as connection:
        assert await connection.scalar(text(STRANDED)) == 0
