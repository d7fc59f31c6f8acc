"""Many processes claim the same ids in Redis, and owners die at the one moment that nothing can cover."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.apps.forked import Forked
from tests.apps.orders import serve
from tests.crash.places import place
from tests.crash.test_sigkill import KILLED, retry
from tests.live import Caller, call, until
from tests.races.crowd import crowd
from tests.redis import workers
from tests.redis.worlds import client_of, new_prefix
from tests.redis_servers import PrivateRedis

PROCESSES, IDS, COPIES = 8, 50, 10
QUICK_IDS = 10
ROUNDS = 20

pytestmark = pytest.mark.xdist_group("crowded")


async def race(url: str, prefix: str, ids: int) -> int:
    """Run a race, print its counts, and return by how many winners it was wrong."""
    outcomes = await crowd(PROCESSES, workers.claim, url, prefix, ids, COPIES)
    print(f"{url.partition(':')[0]}: {dict(outcomes)}")  # noqa: T201
    assert outcomes["ran"] + outcomes["duplicate"] == PROCESSES * ids * COPIES
    return outcomes["ran"] - ids


async def test_8_processes_that_claim_10_ids_10_times_each_have_one_winner_for_each(
    url: str, prefix: str
) -> None:
    assert await race(url, prefix, QUICK_IDS) == 0


@pytest.mark.soak
async def test_20_races_for_50_ids_have_one_winner_for_each(url: str, prefix: str) -> None:
    wrong = [await race(url, f"{prefix}{number}:", IDS) for number in range(ROUNDS)]
    print(f"{ROUNDS} rounds, {sum(map(abs, wrong))} disagreements")  # noqa: T201
    assert wrong == [0] * ROUNDS


async def test_a_server_that_forgets_its_scripts_during_a_race_changes_nothing(mortal: PrivateRedis) -> None:
    racing = asyncio.create_task(race(mortal.url, new_prefix(), QUICK_IDS))
    flushes = 0
    async with client_of(mortal.url) as client:
        while not racing.done():
            await client.script_flush()
            flushes += 1
            await asyncio.wait([racing], timeout=0.01)
    assert await racing == 0
    assert flushes > 1


async def die_right_after_commit(server: Forked, sku: str) -> None:
    """Have the process die when its work is committed, and its claim is not completed yet."""
    caller = await Caller.connect(server.url)
    with pytest.raises(ConnectionError):
        await caller.call("POST", "/leased", {"sku": sku}, {"Kill-At": "right after COMMIT"})
    caller.hang_up()
    assert await server.ended() == KILLED
    server.start()


@pytest.mark.parametrize(("on_abandoned", "rows"), [("retry", 2), ("block", 1)])
async def test_work_whose_owner_dies_between_commit_and_completion_is_repeated_unless_it_must_not(
    on_abandoned: str, rows: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What the page on Redis warns of: a second step cannot be one with the first."""
    async with place("sqlite with redis", request, tmp_path, on_abandoned=on_abandoned) as (settings, ledger):
        server = Forked(serve, settings)
        server.start()
        try:
            await call(server.url, "GET", "/ping")
            await die_right_after_commit(server, "tea")
            assert await ledger.holds("tea") == (1, 1)
            if on_abandoned == "retry":
                assert (await retry(server.url, "/leased", "tea")).status == 201
            else:

                async def is_abandoned() -> bool:
                    reply = await call(server.url, "POST", "/leased", {"sku": "tea"})
                    assert reply.problem == "in-flight"
                    return bool(reply.json().get("abandoned"))

                await until(is_abandoned)
            assert await ledger.holds("tea") == (rows, 1)
        finally:
            server.close()


async def test_the_table_of_claims_covers_that_moment(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    async with place("sqlite", request, tmp_path) as (settings, ledger):
        server = Forked(serve, settings)
        server.start()
        try:
            await call(server.url, "GET", "/ping")
            await die_right_after_commit(server, "tea")
            assert (await retry(server.url, "/leased", "tea")).problem == "duplicate"
            assert await ledger.holds("tea") == (1, 1)
        finally:
            server.close()
