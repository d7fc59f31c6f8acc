"""Batches: what is said of each id, in as few statements as the database allows, and without a deadlock."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from fastapi_dedup import (
    ConfigurationError,
    Dedup,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.batches import Batch, BatchOutcome
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.stores.batches.one_by_one import OneByOne
from tests.databases import engine_on
from tests.stores.promises import Promise
from tests.stores.worlds import HOUR, SOON, Order, World, intent, statements

NEW, REPEAT, DUPLICATE, IN_FLIGHT, MISMATCH = BatchOutcome


@asynccontextmanager
async def batch_of(
    world: World, ids: Sequence[Any], dedup: Dedup | None = None, **options: Any
) -> AsyncIterator[Batch[Any]]:
    """Claim ids as a batch, and do the work of the new ones."""
    options.setdefault("scope", "tests")
    async with (dedup or world.dedup).claim_many(ids, **options) as batch:
        if not options.get("logical_id"):
            batch.session.add_all([Order(sku=item) for item in batch.new])
        yield batch


async def run(world: World, ids: Sequence[Any], dedup: Dedup | None = None, **options: Any) -> Batch[Any]:
    """Claim ids as a batch, do the work of the new ones, and commit it."""
    async with batch_of(world, ids, dedup, **options) as batch:
        pass
    return batch


def outcomes(batch: Batch[Any]) -> list[BatchOutcome]:
    return [entry.outcome for entry in batch]


def payloads(**digests: int) -> Any:
    """Return what tells an id's payload by a number."""
    return lambda logical_id: bytes([digests[logical_id]]) * 32


# What is said of each id


async def test_new_ids_are_claimed_and_their_work_is_committed_with_them(world: World) -> None:
    batch = await run(world, ["q", "p", "r"])
    assert batch.new == ("q", "p", "r"), "in the order in which they were given"
    assert len(batch) == 3
    assert await world.orders() == ["p", "q", "r"]
    claims = {row.logical_id: row for row in await world.rows()}
    assert claims.keys() == {"p", "q", "r"}
    for entry in batch:
        row = claims[entry.logical_id]
        assert (entry.outcome, entry.claimed_at, entry.expires_at) == (NEW, row.claimed_at, row.expires_at)
        assert entry.age is None
        assert row.key == intent(entry.logical_id).key


async def test_ids_that_were_claimed_before_are_duplicates_and_the_others_run(world: World) -> None:
    first = await world.claimed(intent("p"))
    batch = await run(world, ["o", "p", "q"])
    assert outcomes(batch) == [NEW, DUPLICATE, NEW]
    assert (batch.new, batch.duplicates) == (("o", "q"), ("p",))
    _, duplicate, _ = batch
    assert (duplicate.claimed_at, duplicate.expires_at) == (first.claimed_at, first.expires_at)
    assert duplicate.age is not None
    assert timedelta(0) <= duplicate.age < timedelta(seconds=SOON)
    assert await world.orders() == ["o", "p", "q"]


async def test_a_batch_is_a_duplicate_of_a_batch(world: World) -> None:
    await run(world, ["p", "q"])
    for dedup in (world.dedup, world.runtime()):
        batch = await run(world, ["q", "p"], dedup)
        assert (batch.new, batch.duplicates) == ((), ("q", "p"))
    assert await world.orders() == ["p", "q"]


async def test_single_claims_and_batches_see_each_other(world: World) -> None:
    await run(world, ["p"])
    assert type(await world.run(intent("p"))).__name__ == "Duplicate"
    async with batch_of(world, ["q"]), asyncio.timeout(SOON):
        assert type(await world.run(intent("q"))).__name__ == "InFlight"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
async def test_an_id_in_flight_is_told_at_once_and_the_others_run(world: World, where: str) -> None:
    # case F2
    needed = Promise.WRITES_SIDE_BY_SIDE if where == "here" else Promise.SEES_TWINS_ELSEWHERE
    if needed not in world.backend:
        return  # the batch waits for the other's end, and then finds the id free or done
    async with world.attempt() as other, asyncio.timeout(SOON):
        await other.claim(intent("p"))
        dedup = world.dedup if where == "here" else world.runtime()
        batch = await run(world, ["o", "p", "q"], dedup)
        assert outcomes(batch) == [NEW, IN_FLIGHT, NEW]
        assert batch.in_flight == batch.unfinished == ("p",)
        await other.delivery.fail()
        assert (await run(world, batch.unfinished, dedup)).new == ("p",)
    assert await world.orders() == ["o", "p", "q"]


async def test_a_batch_of_what_a_neighbour_has_in_flight_never_waits_for_it(world: World) -> None:
    async with world.attempt() as other, asyncio.timeout(SOON):
        await other.claim(intent("p"))
        async with world.dedup.claim_many(["p"], scope="tests") as batch:
            assert outcomes(batch) == [IN_FLIGHT]
        await other.delivery.succeed()
    assert outcomes(await run(world, ["p"])) == [DUPLICATE]


async def test_a_repeat_inside_the_batch_is_told_from_the_first_copy(world: World) -> None:
    await world.claimed(intent("done"))
    batch = await run(world, ["p", "done", "p", "q", "done", "p"])
    assert outcomes(batch) == [NEW, DUPLICATE, REPEAT, NEW, DUPLICATE, REPEAT]
    assert (batch.new, batch.repeats, batch.duplicates) == (("p", "q"), ("p", "p"), ("done", "done"))
    first, _, repeat, *_ = batch
    assert (repeat.claimed_at, repeat.expires_at) == (first.claimed_at, first.expires_at)
    assert await world.orders() == ["done", "p", "q"]


async def test_a_repeat_of_what_is_in_flight_is_in_flight(world: World) -> None:
    async with world.attempt() as other, asyncio.timeout(SOON):
        await other.claim(intent("p"))
        async with world.dedup.claim_many(["p", "p"], scope="tests") as batch:
            assert outcomes(batch) == [IN_FLIGHT, IN_FLIGHT]
            assert batch.unfinished == ("p", "p")
        await other.delivery.fail()


async def test_another_payload_under_a_known_id_is_a_mismatch(world: World) -> None:
    # case D3
    await run(world, ["p", "q"], fingerprint=payloads(p=1, q=1))
    batch = await run(world, ["p", "q", "r"], fingerprint=payloads(p=1, q=2, r=1))
    assert outcomes(batch) == [DUPLICATE, MISMATCH, NEW]
    assert batch.mismatches == ("q",)
    assert batch.unfinished == (), "a retry mends no mismatch"


async def test_a_repeat_with_another_payload_is_a_mismatch(world: World) -> None:
    items = [("p", b"1"), ("p", b"2"), ("p", b"1")]
    async with world.dedup.claim_many(
        items, scope="tests", logical_id=lambda item: item[0], fingerprint=lambda item: item[1] * 32
    ) as batch:
        assert outcomes(batch) == [NEW, MISMATCH, REPEAT]
        assert (batch.new, batch.mismatches, batch.repeats) == ((items[0],), (items[1],), (items[2],))


async def test_items_are_whatever_has_an_id(world: World) -> None:
    items = [{"id": 7, "sku": "tea"}, {"id": 8, "sku": "milk"}, {"id": 7, "sku": "tea"}]
    async with world.dedup.claim_many(items, scope="tests", logical_id=lambda item: item["id"]) as batch:
        assert batch.new == (items[0], items[1])
        assert [entry.logical_id for entry in batch] == ["7", "8", "7"]
        assert repr(batch) == "<Batch: 2 new, 1 repeat, 0 duplicate, 0 in_flight, 0 mismatch>"


async def test_ids_are_exact(world: World) -> None:
    # case F9
    ids = ["Ab", "ab", "ab ", "\u00e1b", "a\u0301b", "tea \U0001f375", 'a\\b"c', "%s {table} :key", "x" * 255]
    assert (await run(world, ids)).new == tuple(ids)
    assert sorted(row.logical_id for row in await world.rows()) == sorted(ids)
    assert (await run(world, ids)).duplicates == tuple(ids)


async def test_the_same_id_in_another_scope_is_another_id(world: World) -> None:
    await run(world, ["p"])
    assert (await run(world, ["p"], scope=("webhooks", "7"))).new == ("p",)
    assert {row.scope for row in await world.rows()} == {"tests", "webhooks 7"}


# Windows


async def test_the_window_of_a_batch_is_that_of_its_claims(world: World) -> None:
    await run(world, ["p"], window=2 * HOUR)
    await run(world, ["q"])
    windows = {row.logical_id: row.expires_at - row.claimed_at for row in await world.rows()}
    assert windows == {"p": 2 * HOUR, "q": world.dedup.window}


async def test_expired_claims_are_taken_over(world: World) -> None:
    # case E4
    before = await run(world, ["p", "q"], fingerprint=payloads(p=1, q=1))
    await world.expire(intent("p"))
    batch = await run(world, ["p", "q", "r"], fingerprint=payloads(p=2, q=1, r=3))
    assert outcomes(batch) == [NEW, DUPLICATE, NEW]
    rows = {row.logical_id: row for row in await world.rows()}
    assert rows["p"].fingerprint == bytes([2]) * 32
    assert rows["p"].claimed_at > next(iter(before)).claimed_at  # type: ignore[operator]
    assert rows["p"].token == rows["r"].token != rows["q"].token
    assert len(rows) == 3


async def test_of_many_batches_that_meet_expired_claims_one_takes_each_over(world: World) -> None:
    # case E4
    ids = ["p", "q", "r", "s"]
    await run(world, ids)
    for each in ids:
        await world.expire(intent(each))
    line = asyncio.Barrier(6)
    engine = engine_on(world.url, pool_size=6)
    dedup = world.runtime(engine=engine)

    async def deliver(some: list[str]) -> tuple[str, ...]:
        await line.wait()
        async with dedup.claim_many(some, scope="tests") as batch:
            return batch.new

    async with asyncio.timeout(SOON):
        taken = await asyncio.gather(*(deliver(ids[turn % 4 :] + ids[: turn % 4]) for turn in range(6)))
    assert Counter(each for new in taken for each in new) == dict.fromkeys(ids, 1)


# One winner, and no deadlock


@pytest.mark.parametrize("neighbours", ["one process", "many processes"])
async def test_every_id_of_batches_that_overlap_runs_once(world: World, neighbours: str) -> None:
    ids = [f"K{number}" for number in range(12)]
    batches = [ids[turn:] + ids[:turn] for turn in range(6)]
    runtimes = [world.dedup if neighbours == "one process" else world.runtime() for _ in batches]
    line = asyncio.Barrier(len(batches))

    async def deliver(dedup: Dedup, wanted: list[str]) -> None:
        left: Sequence[str] = wanted
        await line.wait()
        while left:
            left = (await run(world, left, dedup)).unfinished

    async with asyncio.timeout(4 * SOON):
        await asyncio.gather(*(deliver(*each) for each in zip(runtimes, batches, strict=True)))
    assert await world.orders() == sorted(ids)
    assert await world.count() == len(ids)


async def test_200_pairs_of_batches_in_opposite_orders_never_deadlock(world: World) -> None:
    # case F6
    pairs = 200
    query = world.hands.deadlocks
    dedup = world.runtime(engine=engine_on(world.url, pool_size=20, max_overflow=0, pool_timeout=60))
    async with world.engine.connect() as connection:
        before = None if query is None else await connection.scalar(text(query))

    async def deliver(*ids: str) -> Batch[Any]:
        return await run(world, ids, dedup)

    async with asyncio.timeout(60):
        batches = await asyncio.gather(
            *(
                deliver(*order)
                for number in range(pairs)
                for order in ((f"p{number}", f"q{number}"), (f"q{number}", f"p{number}"))
            )
        )
    found = Counter(outcome for batch in batches for outcome in outcomes(batch))
    assert found[NEW] == 2 * pairs
    assert {*found} <= {NEW, DUPLICATE, IN_FLIGHT}
    assert await world.count() == await world.count("orders") == 2 * pairs
    if query is not None:
        async with world.engine.connect() as connection:
            assert await connection.scalar(text(query)) == before


async def test_a_batch_may_follow_another_in_the_same_transaction(world: World) -> None:
    async with world.session() as session, asyncio.timeout(SOON):
        assert (await run(world, ["q", "r"], session=session)).new == ("q", "r")
        assert (await run(world, ["o", "p"], session=session)).new == ("o", "p")
        await session.commit()
    assert await world.count() == 4


# What it costs


AT_ONCE = {"postgresql": ["WITH"], "mysql": ["SELECT", "INSERT"], "sqlite": ["SELECT", "BEGIN", "WITH"]}
"""The first words of the statements that a batch of up to 1,000 new ids costs."""


def at_once(world: World) -> bool:
    """Tell whether a batch costs a few statements, however many ids it has, and not those of each id."""
    return not isinstance(world.store()._batches._batches, OneByOne)


def claiming(sent: list[str]) -> list[str]:
    return [statement for statement in sent if "orders" not in statement]


async def test_a_batch_of_1000_is_one_round_trip_or_as_few_as_the_database_allows(world: World) -> None:
    ids = [f"K{number}" for number in range(1000)]
    with statements(world.dedup.engine) as heard:
        async with world.dedup.claim_many(ids, scope="tests") as batch:
            pass
    assert batch.new == tuple(ids)
    if at_once(world):
        assert [sent.split()[0] for sent in claiming(heard.sent)] == AT_ONCE[world.engine.dialect.name]
    else:
        assert len(heard.sent) >= 1000
    with statements(world.dedup.engine) as heard:
        assert len((await run(world, ids)).duplicates) == 1000
    assert len(heard.sent) == (1 if at_once(world) else 1000)
    assert await world.count() == 1000


async def test_a_larger_batch_is_asked_for_in_statements_of_1000(world: World) -> None:
    size = 2500 if at_once(world) else 100
    ids = [f"K{number}" for number in range(size)]
    with statements(world.dedup.engine) as heard:
        async with world.dedup.claim_many(ids, scope="tests") as batch:
            assert len(batch.new) == size
    assert sum("INSERT INTO dedup_claims" in sent for sent in heard.sent) == (3 if at_once(world) else size)
    assert await world.count() == size


NOTHING: list[str] = []


async def test_an_empty_batch_asks_nothing_of_the_database(world: World) -> None:
    with statements(world.dedup.engine) as heard:
        async with world.dedup.claim_many(NOTHING, scope="tests") as batch:
            assert world.dedup.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # QueuePool's
        assert (len(batch), batch.new, batch.unfinished, [*batch]) == (0, (), (), [])
    assert heard.sent == []


async def test_an_empty_batch_leaves_its_session_for_other_work(world: World) -> None:
    async with world.dedup.claim_many(NOTHING, scope="tests") as batch:
        batch.session.add(Order(sku="other"))
    assert await world.orders() == ["other"]


# What is refused before any query


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("", MissingLogicalIdError),
        (" ", MissingLogicalIdError),
        (None, MissingLogicalIdError),
        ("a\x00b", InvalidLogicalIdError),
        ("x" * 256, InvalidLogicalIdError),
        (True, InvalidLogicalIdError),
    ],
)
async def test_one_id_that_is_none_refuses_the_batch_by_its_number(
    world: World, wrong: object, error: type[Any]
) -> None:
    # case C1
    with statements(world.dedup.engine) as heard:
        with pytest.raises(error) as raised:
            await run(world, ["p", "q", wrong])
        assert raised.value.field == "items[2]"
    assert heard.sent == []


async def test_a_window_that_is_none_is_refused(world: World) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        await run(world, ["p"], window=timedelta(0))


# Nothing vanishes silently


async def test_hooks_and_logs_hear_of_every_id(world: World, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    dedup = world.runtime(hooks=[heard.append])
    await world.claimed(intent("done", fingerprint=b"1" * 32))
    caplog.set_level(logging.INFO)
    items = ["new", "done", "new", "done"]
    async with world.attempt(dedup) as other:
        await other.claim(intent("busy"))
        heard.clear()
        if Promise.WRITES_SIDE_BY_SIDE in world.backend:
            items.append("busy")
        else:
            await other.delivery.fail()
            heard.clear()
        async with dedup.claim_many(items, scope="tests"):
            assert [event.kind for event in heard].count(EventKind.COMMITTED) == 0
        told = Counter((event.kind, event.logical_id) for event in heard)
    expected = {
        (EventKind.CLAIMED, "new"): 1,
        (EventKind.REPEAT, "new"): 1,
        (EventKind.DUPLICATE, "done"): 2,
        (EventKind.COMMITTED, "new"): 1,
    }
    if "busy" in items:
        expected[EventKind.IN_FLIGHT, "busy"] = 1
    assert told == expected
    assert all(event.age is not None for event in heard if event.kind is EventKind.DUPLICATE)
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == len(items) - 1
    assert all("in scope 'tests'" in line and "age" in line for line in refused)


async def test_a_database_that_does_not_answer_refuses_every_id(world: World) -> None:
    heard: list[Event] = []
    dedup = world.runtime(hooks=[heard.append])
    await world.execute("drop table dedup_claims")
    with pytest.raises((StoreUnavailableError, ConfigurationError)) as raised:
        async with dedup.claim_many(["p", "q"], scope="tests"):
            raise AssertionError
    if isinstance(raised.value, StoreUnavailableError):
        assert [event.kind for event in heard] == [EventKind.UNAVAILABLE] * 2
    await dedup.create_table()
    assert (await run(world, ["p", "q"], dedup)).new == ("p", "q"), "nothing is left in flight"
