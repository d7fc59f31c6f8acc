"""Riding claims on a real MariaDB, through both drivers: what differs from the other databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fastapi_dedup import (
    ClaimInFlightError,
    ConfigurationError,
    Dedup,
    DuplicateError,
    FingerprintMismatchError,
)
from fastapi_dedup.errors import ClaimLostError


@pytest.fixture(params=["asyncmy", "aiomysql"])
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


async def order(session: AsyncSession, sku: str) -> None:
    await session.execute(text("insert into orders (sku) values (:sku)"), {"sku": sku})


async def rows(engine: AsyncEngine, table: str) -> int:
    async with engine.connect() as connection:
        return int(await connection.scalar(text(f"select count(*) from {table}")) or 0)


async def test_of_many_who_claim_at_once_one_runs(engine: AsyncEngine, dedup: Dedup) -> None:
    barrier = asyncio.Barrier(25)
    refused: list[Exception] = []

    async def deliver() -> None:
        await barrier.wait()
        try:
            async with dedup.claim("news", scope="orders") as claim:
                await order(claim.session, "tea")
        except (DuplicateError, ClaimInFlightError) as error:
            refused.append(error)

    await asyncio.gather(*[deliver() for _ in range(25)])
    assert (await rows(engine, "orders"), await rows(engine, "dedup_claims"), len(refused)) == (1, 1, 24)


async def test_a_twin_in_flight_is_seen_without_waiting_for_its_row(dedup: Dedup) -> None:
    async with dedup.claim("news", scope="orders"):
        async with asyncio.timeout(10):  # innodb_lock_wait_timeout is 50 s
            with pytest.raises(ClaimInFlightError):
                async with dedup.claim("news", scope="orders"):
                    pass
    with pytest.raises(DuplicateError) as duplicate:
        async with dedup.claim("news", scope="orders"):
            pass
    assert duplicate.value.age is not None
    assert duplicate.value.age >= timedelta(0)


async def test_a_failure_frees_the_id_and_gives_its_named_lock_back(
    engine: AsyncEngine, dedup: Dedup
) -> None:
    for _ in range(3):
        with pytest.raises(ValueError, match="boom"):
            async with dedup.claim("news", scope="orders") as claim:
                await order(claim.session, "tea")
                msg = "boom"
                raise ValueError(msg)
    async with dedup.claim("news", scope="orders") as claim:
        await order(claim.session, "tea")
    assert await rows(engine, "orders") == 1
    # On another connection, so that a lock which stayed behind in the pool would be in the way.
    async with asyncio.timeout(10), dedup.claim("other", scope="orders"):
        with pytest.raises(DuplicateError):
            async with dedup.claim("news", scope="orders"):
                pass


async def test_ids_are_told_apart_whatever_the_collation(engine: AsyncEngine, dedup: Dedup) -> None:
    # case F9
    ids = ["Ab", "ab", "ab ", "\u00e1b", "a\u0301b"]
    for each in ids:
        async with dedup.claim(each, scope="orders"):
            pass
    async with engine.connect() as connection:
        stored = (await connection.execute(text("select logical_id from dedup_claims"))).scalars().all()
    assert sorted(stored) == sorted(ids)


async def test_an_expired_claim_is_taken_over_by_one(engine: AsyncEngine, dedup: Dedup) -> None:
    # case E4
    async with dedup.claim("news", scope="orders"):
        pass
    async with engine.begin() as connection:
        await connection.execute(text("update dedup_claims set expires_at = utc_timestamp(6)"))
    barrier = asyncio.Barrier(20)

    async def deliver() -> int:
        await barrier.wait()
        try:
            async with dedup.claim("news", scope="orders"):
                return 1
        except (DuplicateError, ClaimInFlightError):
            return 0

    assert sum(await asyncio.gather(*[deliver() for _ in range(20)])) == 1
    assert await rows(engine, "dedup_claims") == 1


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
async def test_a_claim_committed_behind_a_snapshot_is_a_refusal_and_the_transaction_goes_on(
    engine: AsyncEngine, dedup: Dedup, level: str
) -> None:
    # case F3
    strict = engine.execution_options(isolation_level=level)
    async with AsyncSession(strict) as session:
        await session.execute(text("select count(*) from orders"))
        async with dedup.claim("news", scope="orders"):
            pass
        with pytest.raises((DuplicateError, ClaimInFlightError)):
            async with dedup.claim("news", scope="orders", session=session):
                pass
        await order(session, "other work")
        await session.commit()
    assert await rows(engine, "orders") == 1


async def test_opposite_orders_of_two_ids_never_deadlock(dedup: Dedup) -> None:
    # case F6
    async def both(first: str, second: str) -> None:
        try:
            async with (
                dedup.claim(first, scope="orders") as claim,
                dedup.claim(second, scope="orders", session=claim.session),
            ):
                pass
        except (DuplicateError, ClaimInFlightError):
            pass

    for turn in range(40):
        await asyncio.gather(both(f"p{turn}", f"q{turn}"), both(f"q{turn}", f"p{turn}"))


async def test_a_deadlock_that_the_handler_swallows_is_no_success(engine: AsyncEngine, dedup: Dedup) -> None:
    # MariaDB rolls the whole transaction back, and lets the next statement begin a new one.
    async with engine.begin() as connection:
        await connection.execute(text("insert into orders (id, sku) values (1, 'a'), (2, 'b')"))
    update = text("update orders set sku = 'x' where id = :id")
    async with AsyncSession(engine) as other:
        await other.execute(update, {"id": 2})
        # more rows than the claim's transaction has changed: InnoDB sacrifices the smaller one
        await other.execute(text("insert into orders (sku) select 'z' from seq_1_to_200"))
        with pytest.raises(ClaimLostError):
            async with dedup.claim("news", scope="orders") as claim:
                await claim.session.execute(update, {"id": 1})
                waiting = asyncio.create_task(other.execute(update, {"id": 1}))
                try:
                    await claim.session.execute(update, {"id": 2})
                except OperationalError:
                    await order(claim.session, "lost")
                await waiting
        await other.rollback()
    assert await rows(engine, "dedup_claims") == 0


async def test_another_payload_is_a_mismatch(dedup: Dedup) -> None:
    async with dedup.claim("news", scope="orders", fingerprint=b"1" * 32):
        pass
    with pytest.raises(FingerprintMismatchError):
        async with dedup.claim("news", scope="orders", fingerprint=b"2" * 32):
            pass


async def test_the_reaper_deletes_what_is_expired_in_batches(engine: AsyncEngine) -> None:
    # case F12
    async with Dedup(engine, create_table=True, reap_every=None, reap_batch=10) as dedup:
        for turn in range(25):
            async with dedup.claim(f"old {turn}", scope="orders"):
                pass
        async with engine.begin() as connection:
            await connection.execute(text("update dedup_claims set expires_at = utc_timestamp(6)"))
        async with dedup.claim("live", scope="orders"):
            assert await dedup.reap() == 25
    assert await rows(engine, "dedup_claims") == 1


async def test_a_missing_table_is_an_error_that_names_the_fix(engine: AsyncEngine) -> None:
    with pytest.raises(ConfigurationError, match="create_table=True"):
        await Dedup(engine, reap_every=None).start()
