"""Batches on a real MariaDB: what InnoDB's locks and named locks make of many ids at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fastapi_dedup import Dedup
from fastapi_dedup.batches import Batch, BatchOutcome
from tests.databases import mariadb
from tests.servers import mariadb_database
from tests.stores.worlds import statements

NEW, REPEAT, DUPLICATE, IN_FLIGHT, MISMATCH = BatchOutcome
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


@pytest.fixture(params=mariadb())
async def engine(request: pytest.FixtureRequest, mariadb_url: str) -> AsyncIterator[AsyncEngine]:
    url = make_url(mariadb_url).set(drivername=f"mysql+{request.param}")
    made = create_async_engine(url, pool_size=30)
    async with made.begin() as connection:
        await connection.execute(text("drop table if exists orders, dedup_claims"))
        await connection.execute(text("create table orders (id int auto_increment primary key, sku text)"))
    yield made
    await made.dispose()


@pytest.fixture
async def dedup(engine: AsyncEngine) -> AsyncIterator[Dedup]:
    async with Dedup(engine, create_table=True, reap_every=None) as made:
        yield made


async def claim(dedup: Dedup, ids: Sequence[str], **options: Any) -> Batch[str]:
    """Claim ids as a batch, and order what is new."""
    async with dedup.claim_many(ids, scope="orders", **options) as batch:
        if batch.new:
            skus = [{"sku": each} for each in batch.new]
            await batch.session.execute(text("insert into orders (sku) values (:sku)"), skus)
    return batch


async def rows(engine: AsyncEngine, table: str) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(text(f"select count(*) from {table}")) or 0)


async def expire(engine: AsyncEngine, *ids: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text("update dedup_claims set expires_at = utc_timestamp(6) where logical_id in :ids"),
            {"ids": ids},
        )


@pytest.mark.usefixtures("dedup")
@pytest.mark.parametrize("level", LEVELS)
async def test_200_pairs_of_batches_in_opposite_orders_never_deadlock(
    engine: AsyncEngine, level: str
) -> None:
    # case F6: who is rolled back because of a deadlock is told that the store is unavailable
    pairs = 200
    strict = Dedup(engine.execution_options(isolation_level=level), reap_every=None)
    async with asyncio.timeout(100):
        batches = await asyncio.gather(
            *(
                claim(strict, order)
                for number in range(pairs)
                for order in ((f"p{number}", f"q{number}"), (f"q{number}", f"p{number}"))
            )
        )
    found = Counter(entry.outcome for batch in batches for entry in batch)
    assert found[NEW] == 2 * pairs
    assert {*found} <= {NEW, DUPLICATE, IN_FLIGHT}
    assert (await rows(engine, "orders"), await rows(engine, "dedup_claims")) == (2 * pairs, 2 * pairs)
    await strict.stop()


@pytest.mark.parametrize("level", LEVELS)
async def test_batches_of_new_known_and_expired_ids_never_deadlock(
    engine: AsyncEngine, dedup: Dedup, level: str
) -> None:
    # case F6: at the stricter levels, who meets an expired row also locks the gap before it
    turns = range(8)
    known = [f"known {number}" for number in turns]
    old = {turn: [f"old {turn} {number}" for number in range(50)] for turn in turns}
    await claim(dedup, known + [each for some in old.values() for each in some])
    await expire(engine, *(each for some in old.values() for each in some))
    strict = Dedup(engine.execution_options(isolation_level=level), reap_every=None)

    async def deliver(turn: int) -> Batch[str]:
        ids = [*(f"new {turn} {number}" for number in range(50)), *old[turn], *known[turn:]]
        return await claim(strict, ids if turn % 2 else ids[::-1])

    async with asyncio.timeout(100):
        batches = await asyncio.gather(*(deliver(turn) for turn in turns))
    for turn, batch in enumerate(batches):
        assert len(batch.new) == 100
        assert set(old[turn]) <= set(batch.new)
        assert set(batch.duplicates) | set(batch.in_flight) == set(known[turn:])
    await strict.stop()


@pytest.mark.parametrize("level", LEVELS)
async def test_a_twin_in_flight_is_not_waited_for_at_any_isolation_level(
    engine: AsyncEngine, dedup: Dedup, level: str
) -> None:
    # case F2: SERIALIZABLE turns plain reads into ones that wait
    strict = Dedup(engine.execution_options(isolation_level=level), reap_every=None)
    async with dedup.claim_many(["p", "q"], scope="orders"):
        async with asyncio.timeout(10):  # innodb_lock_wait_timeout is 50 s
            batch = await claim(strict, ["o", "p", "q", "r"])
        assert [entry.outcome for entry in batch] == [NEW, IN_FLIGHT, IN_FLIGHT, NEW]
    await strict.stop()


@pytest.mark.parametrize("level", LEVELS)
async def test_ids_that_were_committed_behind_the_snapshot_are_refused_and_the_others_run(
    engine: AsyncEngine, dedup: Dedup, level: str
) -> None:
    # case F3
    await claim(dedup, ["expired", "renewed"])
    await expire(engine, "expired", "renewed")
    async with AsyncSession(engine.execution_options(isolation_level=level)) as session:
        await session.execute(text("select count(*) from dedup_claims where scope = 'none'"))
        if level != "SERIALIZABLE":  # where that SELECT has locked the table for writers
            await claim(dedup, ["hidden", "renewed"])
        batch = await claim(dedup, ["free", "hidden", "expired", "renewed"], session=session)
        await session.commit()
    hidden = NEW if level == "SERIALIZABLE" else DUPLICATE
    assert [entry.outcome for entry in batch] == [NEW, hidden, NEW, hidden]


async def test_a_batch_that_lost_a_race_takes_what_is_left(engine: AsyncEngine, dedup: Dedup) -> None:
    # Between the look and the INSERT, which then meets a row: here, because the snapshot is older.
    async with AsyncSession(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        await session.execute(text("select * from orders"))
        await claim(dedup, ["q"])
        with statements(engine) as heard:
            batch = await claim(dedup, ["p", "q", "r"], session=session)
        await session.commit()
    assert [entry.outcome for entry in batch] == [NEW, DUPLICATE, NEW]
    assert [sent.split()[0] for sent in heard.sent if "dedup_claims" in sent][:3] == [
        "SELECT",
        "INSERT",
        "SELECT",
    ]
    assert (await rows(engine, "orders"), await rows(engine, "dedup_claims")) == (3, 3)


async def test_every_named_lock_of_a_large_batch_is_given_back(engine: AsyncEngine, dedup: Dedup) -> None:
    ids = [f"K{number}" for number in range(2500)]
    one = create_async_engine(engine.url, pool_size=1, max_overflow=0)
    pooled = Dedup(one, reap_every=None)
    with pytest.raises(RuntimeError):
        async with pooled.claim_many(ids, scope="orders") as batch:
            assert batch.new == tuple(ids)
            raise RuntimeError
    async with one.connect() as connection:  # the very connection that has held them
        assert await connection.scalar(text("select release_all_locks()")) == 0
    async with dedup.claim_many(ids, scope="orders") as batch:
        assert batch.new == tuple(ids)
    assert await rows(engine, "dedup_claims") == 2500
    await one.dispose()


async def test_a_withdrawn_batch_leaves_the_apps_transaction_without_claims(
    engine: AsyncEngine, dedup: Dedup
) -> None:
    ids = [f"K{number}" for number in range(50)]
    async with AsyncSession(engine) as session:
        with statements(engine) as heard, pytest.raises(RuntimeError):
            async with dedup.claim_many(ids, scope="orders", session=session):
                raise RuntimeError
        assert [sent.split()[0] for sent in heard.sent] == ["SELECT", "INSERT", "DELETE"]
        await session.execute(text("insert into orders (sku) values ('kept')"))
        await session.commit()
    assert (await rows(engine, "orders"), await rows(engine, "dedup_claims")) == (1, 0)


async def test_a_batch_never_reads_the_whole_table(engine: AsyncEngine, dedup: Dedup) -> None:
    # It would wait for the claim in flight: innodb_lock_wait_timeout is 50 s.
    async with engine.begin() as connection:
        await connection.execute(
            text("""
                insert into dedup_claims (`key`, scope, logical_id, token, claimed_at, expires_at)
                select unhex(sha2(seq, 256)), 'other', seq, '', utc_timestamp(6), utc_timestamp(6)
                  from seq_1_to_20000
            """)
        )
    ids = [f"K{number}" for number in range(500)]
    await claim(dedup, ids)
    await expire(engine, *ids[:250])
    async with (
        dedup.claim_many(["in flight"], scope="other"),
        asyncio.timeout(10),
        dedup.claim_many(ids, scope="orders") as batch,
    ):
        assert len(batch.new) == len(batch.duplicates) == 250
        batch.release(ids[0])
    assert await rows(engine, "dedup_claims") == 20_000 + 500


async def test_what_is_in_flight_in_one_database_is_free_in_another_of_the_same_server(
    engine: AsyncEngine, dedup: Dedup, mariadb_url: str
) -> None:
    # Named locks are the whole server's.
    with mariadb_database(mariadb_url) as other_url:
        other = create_async_engine(make_url(other_url).set(drivername=engine.url.drivername))
        async with Dedup(other, create_table=True, reap_every=None) as elsewhere:
            async with dedup.claim("p", scope="orders"), elsewhere.claim("p", scope="orders"):
                pass
            async with (
                dedup.claim_many(["q"], scope="orders") as one,
                elsewhere.claim_many(["q"], scope="orders") as another,
            ):
                assert one.new == another.new == ("q",)
        await other.dispose()
