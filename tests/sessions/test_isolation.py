"""Isolation levels: a race lost behind a snapshot is a refusal, whatever the session is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fastapi_dedup import Claim, ClaimInFlightError, DuplicateError
from tests.sessions.conftest import kind_on, name_of
from tests.sessions.kinds import DIFFERENT, MARIADB, REQUEST, Kind
from tests.sessions.test_claims import SOON, found, outcome

HONEST = {DuplicateError, ClaimInFlightError}
"""What a loser may be told that cannot see the winner: done, or "not yet" and to try again."""

SERVERS = [case for case in DIFFERENT + MARIADB if case[1] != "sqlite"]


@pytest.fixture(params=SERVERS, ids=name_of)
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """Yield every kind of session, where there is more than one isolation level."""
    async with kind_on(request.param, request, tmp_path) as opened:
        yield opened


at_every_level = pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])


@at_every_level
async def test_a_claim_committed_behind_the_snapshot_is_refused_and_the_transaction_goes_on(
    kind: Kind, level: str
) -> None:
    # case F3
    async with kind.open() as session, asyncio.timeout(SOON):
        await kind.isolate(session, level)
        await kind.run(session, "select count(*) from glances")  # takes the snapshot
        assert await outcome(kind) is Claim
        with pytest.raises(tuple(HONEST)):
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        await kind.add(session, "after")
        await kind.commit(session)
    assert await found(kind) == (["after"], ["news"])


@at_every_level
async def test_one_of_many_claimants_runs_at_every_level(kind: Kind, level: str) -> None:
    # case F3
    line = asyncio.Barrier(5)

    async def deliver() -> type:
        REQUEST.set(object())
        async with kind.open() as session:
            await kind.isolate(session, level)
            await kind.run(session, "select count(*) from glances")
            await line.wait()
            try:
                async with kind.world.dedup.claim("news", scope="tests", session=session):
                    await kind.add(session, "news")
            except (DuplicateError, ClaimInFlightError) as refusal:
                return type(refusal)
            await kind.commit(session)
        return Claim

    async with asyncio.timeout(3 * SOON):
        outcomes = await asyncio.gather(*(deliver() for _ in range(5)))
    assert outcomes.count(Claim) == 1
    assert {*outcomes} <= {Claim, *HONEST}
    assert await found(kind) == (["news"], ["news"])
