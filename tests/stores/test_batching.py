"""Batches beside the other ways to claim, and what happens where the database cannot follow."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import pytest
from sqlalchemy import Connection, MetaData
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.exc import DBAPIError

from fastapi_dedup import Dedup, StoreUnavailableError
from fastapi_dedup.batches import BatchOutcome
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.batches.one_by_one import OneByOne
from fastapi_dedup.stores.batches.postgresql import PostgreSQLBatches
from fastapi_dedup.stores.dialects.postgresql import PostgreSQL
from fastapi_dedup.tables import claims_table
from tests.stores.worlds import Order, World, intent

NEW, REPEAT, DUPLICATE, IN_FLIGHT, MISMATCH = BatchOutcome


@pytest.fixture(params=["at once", "one by one"])
def way(request: pytest.FixtureRequest, world: World) -> str:
    """Have batches claimed in the database's own way, or in the one that serves every database."""
    store = world.store()
    if request.param == "one by one":
        store._batches._batches = OneByOne(store._dialect)
    return str(request.param)


@pytest.mark.usefixtures("way")
async def test_both_ways_say_the_same_of_every_id(world: World) -> None:
    digest = {"done": b"1" * 32, "reused": b"1" * 32}
    for each in ("done", "reused", "expired"):
        await world.claimed(intent(each, fingerprint=digest.get(each)))
    await world.expire(intent("expired"))
    digest["reused"] = b"2" * 32
    ids = ["done", "new", "reused", "expired", "new"]
    async with world.dedup.claim_many(ids, scope="tests", fingerprint=digest.get) as batch:
        assert [entry.outcome for entry in batch] == [DUPLICATE, NEW, MISMATCH, NEW, REPEAT]
        batch.session.add_all([Order(sku=f"{each} again") for each in batch.new])
        batch.release("expired")
    assert await world.orders() == ["done", "expired", "expired again", "new again", "reused"]
    assert sorted(row.logical_id for row in await world.rows()) == ["done", "new", "reused"]


@pytest.mark.usefixtures("way")
async def test_both_ways_give_a_batch_back_that_was_committed_before_it_failed(world: World) -> None:
    with pytest.raises(RuntimeError):
        async with world.dedup.claim_many(["p", "q"], scope="tests") as batch:
            await batch.session.commit()
            raise RuntimeError
    assert await world.count() == 0


@pytest.mark.usefixtures("way")
async def test_both_ways_take_a_batch_anew_after_the_handlers_rollback(world: World) -> None:
    async with world.session() as session:
        async with world.dedup.claim_many(["p", "q"], scope="tests", session=session):
            await session.rollback()
            session.add(Order(sku="after"))
        await session.commit()
    assert (await world.count(), await world.orders()) == (2, ["after"])


@pytest.mark.parametrize("on_abandoned", ["retry", "block"])
async def test_a_leased_claim_is_in_flight_for_a_batch_as_long_as_its_owner_lives(
    world: World, on_abandoned: str
) -> None:
    lease = timedelta(seconds=30)
    async with world.dedup.claim("slow", scope="tests", lease=lease, on_abandoned=on_abandoned):  # type: ignore[arg-type]
        for dedup in (world.dedup, world.runtime()):
            async with dedup.claim_many(["slow", "quick"], scope="tests") as batch:
                batch.release("quick")
                assert [entry.outcome for entry in batch] == [IN_FLIGHT, NEW]
    async with world.dedup.claim_many(["slow", "quick"], scope="tests") as batch:
        assert [entry.outcome for entry in batch] == [DUPLICATE, NEW]


async def test_a_lease_that_has_run_out_is_taken_over_by_a_batch_for_the_whole_window(world: World) -> None:
    await world.claimed(intent("slow"))
    await world.execute(f"update dedup_claims set leased_until = expires_at, {world.hands.expire}")
    async with world.dedup.claim_many(["slow"], scope="tests") as batch:
        assert batch.new == ("slow",)
    (row,) = await world.rows()
    assert row.expires_at - row.claimed_at == world.dedup.window
    async with world.dedup.claim_many(["slow"], scope="tests") as again:
        assert again.duplicates == ("slow",), "it is settled: no lease is left on it"


# What a server's own limits do


class Refusing:
    """A connection whose server has no room for another lock."""

    def execute(self, *_: object) -> None:
        error = Exception("out of shared memory")
        error.sqlstate = "53200"  # type: ignore[attr-defined]
        raise DBAPIError("", None, error)


def test_a_server_without_room_for_the_locks_is_named_with_the_ways_out() -> None:
    # Not on a real server: who fills its table of locks takes them from everybody.
    dialect = PGDialect_asyncpg()  # type: ignore[no-untyped-call]
    batches = PostgreSQLBatches(PostgreSQL(claims_table(MetaData()), dialect))
    with pytest.raises(StoreUnavailableError, match="max_locks_per_transaction") as raised:
        batches.claim(cast("Connection", Refusing()), [intent("p"), intent("q")], b"t" * 16)
    assert "2 more claims" in str(raised.value)
    assert isinstance(raised.value.__cause__, DBAPIError)


async def test_a_session_that_cannot_carry_a_claim_carries_no_batch(world: World) -> None:
    with pytest.raises(ConfigurationError, match="cannot ride"):
        async with world.dedup.claim_many(["p"], scope="tests", session="no session"):
            raise AssertionError


@pytest.mark.parametrize("text", ["order-1", b"order-1"])
async def test_one_text_is_no_batch_of_its_letters(text: str | bytes) -> None:
    with pytest.raises(ConfigurationError, match="items must be many"):
        async with Dedup("postgresql+asyncpg://nowhere/nothing").claim_many(text, scope="tests"):
            raise AssertionError
