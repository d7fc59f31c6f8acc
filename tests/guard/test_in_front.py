"""`Dedup(guard=...)`: the guard in front of the database, through every door, on SQLite and PostgreSQL."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    ClaimInFlightError,
    Dedup,
    Deduplicated,
    DedupMiddleware,
    DuplicateError,
    RequestSession,
    StoreUnavailableError,
)
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import EventKind
from tests.guard.conftest import WINDOW, Guarded
from tests.guard.doors import SCOPE, Endpoint, Queries, endpoint, undone
from tests.http.world import KEY, add, client, lifespan, problem
from tests.live import until

by_message = pytest.mark.parametrize("door", ["message"])
"""For what the door has no part in."""


async def fail(_: AsyncSession) -> None:
    msg = "the handler failed, as the test wished"
    raise RuntimeError(msg)


async def raise_404(_: AsyncSession) -> None:
    raise HTTPException(404)


async def return_404(_: AsyncSession) -> int:
    return 404


async def fail_at_commit(session: AsyncSession) -> None:
    @event.listens_for(session.sync_session, "before_commit")
    def _(_: object) -> None:
        msg = "the COMMIT failed, as the test wished"
        raise RuntimeError(msg)


async def commit_and_fail(session: AsyncSession) -> None:
    await session.commit()
    await fail(session)


async def roll_back(session: AsyncSession) -> None:
    await session.rollback()


async def costs_nothing(world: Guarded, deliver: Callable[[], Awaitable[str]]) -> str:
    """Return what came of a delivery that asked the database nothing."""
    queries = Queries(world.engine)
    outcome = await deliver()
    assert queries == []
    return outcome


async def expire(world: Guarded) -> None:
    """Let the window of every claim be over, by the database's clock."""
    async with world.engine.begin() as connection:
        await connection.execute(text("update dedup_claims set expires_at = claimed_at"))


# Duplicates of what was committed


async def test_duplicates_of_a_committed_id_are_answered_without_any_query(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        assert await shop.deliver("1") == "ran"
        queries = Queries(world.engine)
        assert [await shop.deliver("1") for _ in range(5)] == ["duplicate"] * 5
        assert queries == []
    assert (shop.runs, await world.orders(), await world.ids()) == (1, ["tea"], ["1"])
    assert world.guard.snapshot().suppressed == 5


@by_message
async def test_they_are_told_at_info_and_to_the_hooks_without_an_age(
    world: Guarded, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1")
        world.events.clear()
        caplog.set_level(logging.DEBUG, "fastapi_dedup")
        await shop.deliver("1")
    assert [(each.kind, each.logical_id, each.age) for each in world.events] == [
        (EventKind.DUPLICATE, "1", None)
    ]
    (told,) = [record for record in caplog.records if record.name == "fastapi_dedup"]
    assert told.levelno == logging.INFO
    assert all(part in told.message for part in ("'1'", f"'{SCOPE}'", "duplicate", "age unknown"))


async def test_a_job_s_duplicate_has_no_times(world: Guarded) -> None:
    async with world.dedup.claim("night", scope="jobs"):
        pass
    queries = Queries(world.engine)
    with pytest.raises(DuplicateError) as refused:
        async with world.dedup.claim("night", scope="jobs"):
            pass
    assert queries == []
    assert (refused.value.claimed_at, refused.value.expires_at, refused.value.age) == (None, None, None)


async def test_without_a_guard_every_duplicate_asks_the_database(world: Guarded, door: str) -> None:
    dedup = Dedup(world.engine, reap_every=None)
    async with endpoint(door, dedup) as shop:
        assert await shop.deliver("1") == "ran"
        for _ in range(2):
            queries = Queries(world.engine)
            assert await shop.deliver("1") == "duplicate"
            assert queries[0] == "a connection"
            assert len([each for each in queries if "dedup_claims" in each]) == 1
    assert world.guard.snapshot().tracked == 0


@by_message
async def test_the_same_id_in_another_scope_is_another_id(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop, endpoint(door, world.dedup, scope="returns") as returns:
        assert [await shop.deliver("1"), await returns.deliver("1")] == ["ran", "ran"]
        assert [await shop.deliver("1"), await returns.deliver("1")] == ["duplicate", "duplicate"]
    assert await world.scopes() == ["orders", "returns"]


@by_message
async def test_what_another_process_has_committed_is_asked_for_and_not_remembered(
    world: Guarded, door: str
) -> None:
    async with endpoint(door, Dedup(world.engine, reap_every=None)) as elsewhere:
        await elsewhere.deliver("1")
    async with endpoint(door, world.dedup) as shop:
        assert await shop.deliver("1") == "duplicate"
        assert world.guard.snapshot().tracked == 0


# Twins in flight


async def test_a_twin_in_flight_is_refused_without_a_query_and_is_not_told_done(
    world: Guarded, door: str
) -> None:
    async with endpoint(door, world.dedup) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "in-flight"
        gate.open()
        assert await first == "ran"
        assert await shop.deliver("1") == "duplicate"


async def test_a_twin_that_waits_for_a_success_asks_nothing(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup, in_flight="wait") as shop:
        first, second, queries = await waiting(world, shop)
        assert (await first, await second) == ("ran", "duplicate")
        assert queries == []
    assert shop.runs == 1


async def test_a_twin_that_waits_for_a_failure_runs(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup, in_flight="wait") as shop:
        first, second, _ = await waiting(world, shop, fail)
        assert (await first, await second) == ("failed", "ran")
    assert await world.orders() == ["tea"]


async def test_a_twin_does_not_wait_with_work_of_the_apps_in_its_hands(
    world: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    # To wait, it would have to roll that work back, or to keep its connection from others.
    async with world.sessions() as session:
        await session.scalar(text("select count(*) from orders"))
        async with world.dedup.claim("1", scope="jobs"):
            with pytest.raises(ClaimInFlightError):
                async with world.dedup.claim("1", scope="jobs", session=session, in_flight="wait"):
                    pass
        assert session.in_transaction()
    assert "cannot wait for logical id '1'" in caplog.text


@pytest.mark.parametrize("world", ["asyncpg"], indirect=True)  # SQLite has one writer
@pytest.mark.parametrize("lease", [None, timedelta(seconds=30)], ids=["riding", "leased"])
async def test_nor_with_another_claim_of_its_own_in_its_hands(
    world: Guarded, lease: timedelta | None
) -> None:
    # To wait, it would have to roll that claim back, and a twin of it would run meanwhile.
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=world.dedup, header=None)
    patient = Deduplicated(
        "header", KEY, scope="jobs", in_flight="wait", wait_timeout=timedelta(hours=1), lease=lease
    )

    @app.post("/orders", dependencies=[Depends(Deduplicated("header", "X-Id")), Depends(patient)])
    async def create(session: RequestSession) -> None: ...

    async with client(app) as speaking, world.dedup.claim("1", scope="jobs", lease=lease), asyncio.timeout(5):
        refused = await speaking.post("/orders", headers={KEY: "1", "X-Id": "2"})
    assert problem(refused) == "in-flight"


async def waiting(
    world: Guarded, shop: Endpoint, end: Any = None
) -> tuple[asyncio.Task[str], asyncio.Task[str], Queries]:
    """Return two twins of which the second waits for the first, and what was asked for since."""
    gate = shop.gate()
    if end is not None:
        wait = shop.mishaps.pop()

        async def wait_and_end(session: AsyncSession) -> None:
            await wait(session)
            await end(session)

        shop.mishaps.append(wait_and_end)
    first = shop.delivering("1")
    await gate.reached.wait()
    queries = Queries(world.engine)
    second = shop.delivering("1")

    async def refused_once() -> bool:
        return world.guard.snapshot().suppressed > 0

    await until(refused_once)
    gate.open()
    return first, second, queries


# Another payload: case D3


async def test_another_payload_under_the_id_of_finished_work_is_a_mismatch(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        assert await shop.deliver("1", "tea") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1", "cocoa")) == "fingerprint-mismatch"
        assert await costs_nothing(world, lambda: shop.deliver("1", "tea")) == "duplicate"
    assert await world.orders() == ["tea"]


@by_message
async def test_another_payload_under_an_id_in_flight_is_a_mismatch(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        gate = shop.gate()
        first = shop.delivering("1", "tea")
        await gate.reached.wait()
        assert await costs_nothing(world, lambda: shop.deliver("1", "cocoa")) == "fingerprint-mismatch"
        assert await costs_nothing(world, lambda: shop.deliver("1", "tea")) == "in-flight"
        gate.open()
        assert await first == "ran"
    assert await world.orders() == ["tea"]


# What did not commit is forgotten


@pytest.mark.parametrize(
    ("door", "mishap"),
    [
        ("http", fail),
        ("http", raise_404),
        ("http", return_404),
        ("http", fail_at_commit),
        ("own session", fail),
        ("own session", return_404),
        ("own session", fail_at_commit),
        ("message", fail),
        ("message", fail_at_commit),
    ],
)
async def test_a_failure_is_forgotten_and_the_id_runs_again(world: Guarded, door: str, mishap: Any) -> None:
    async with endpoint(door, world.dedup) as shop:
        shop.mishaps.append(mishap)
        assert await shop.deliver("1") == "failed"
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert (shop.runs, await world.ids()) == (2, ["1"])


async def test_a_cancelled_delivery_is_forgotten_and_the_id_runs_again(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "ran"
    assert await world.orders() == ["tea"]


async def test_a_handler_that_commits_mid_way_and_then_fails_runs_again(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        shop.mishaps.append(commit_and_fail)
        assert await shop.deliver("1") == "failed"
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert await world.orders() == ["tea", "tea"]  # what it had committed itself, nobody can undo


@pytest.mark.parametrize("door", ["http", "message"])
async def test_a_handler_that_rolls_back_mid_way_and_then_succeeds_has_claimed_its_id(
    world: Guarded, door: str
) -> None:
    async with endpoint(door, world.dedup) as shop:
        shop.mishaps.append(roll_back)
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert await world.ids() == ["1"]


@by_message
async def test_an_id_whose_claim_got_no_answer_is_forgotten(
    world: Guarded, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(*_: object) -> None:
        raise StoreUnavailableError

    async with endpoint(door, world.dedup) as shop:
        with monkeypatch.context() as patch:
            patch.setattr(world.dedup._store, "claim", no_answer)
            assert await shop.deliver("1") == "store-unavailable"
            assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "ran"
    assert await world.orders() == ["tea"]


async def test_a_commit_into_a_transaction_of_the_callers_is_not_remembered(world: Guarded) -> None:
    for _ in range(2):
        async with undone(world.engine) as session:
            async with world.dedup.claim("1", scope="jobs", session=session):
                await add(session, "tea")
            await session.commit()
            assert world.guard.snapshot().tracked == 0
    assert (await world.orders(), await world.ids()) == ([], [])


async def test_a_commit_in_a_savepoint_of_the_sessions_own_is_none(world: Guarded) -> None:
    async with world.sessions() as session:
        async with session.begin_nested(), world.dedup.claim("1", scope="jobs", session=session):
            await add(session, "tea")
        assert world.guard.snapshot().processed == 0
        await session.rollback()
    async with world.dedup.claim("1", scope="jobs"):
        pass
    assert (await world.orders(), world.guard.snapshot().processed) == ([], 1)


# Leased claims


LEASE = timedelta(seconds=30)


async def test_a_leased_claim_is_remembered_when_it_is_complete(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup, lease=LEASE) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        assert world.guard.snapshot().processed == 0  # though the claim is committed
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "in-flight"
        gate.open()
        assert await first == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert await world.orders() == ["tea"]


@pytest.mark.parametrize(
    ("door", "mishap"),
    [("http", fail), ("http", return_404), ("own session", fail_at_commit), ("message", fail)],
)
async def test_a_leased_claim_that_is_released_is_forgotten(world: Guarded, door: str, mishap: Any) -> None:
    async with endpoint(door, world.dedup, lease=LEASE) as shop:
        shop.mishaps.append(mishap)
        assert await shop.deliver("1") == "failed"
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert await world.orders() == ["tea"]


# Never beyond the claim


@by_message
async def test_an_id_is_not_remembered_for_longer_than_the_guards_window(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1")
        world.clock.advance(WINDOW.total_seconds() - 0.001)
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
        world.clock.advance(0.001)
        queries = Queries(world.engine)
        assert await shop.deliver("1") == "duplicate"  # for the claim holds for 24 hours
        assert queries


@by_message
@pytest.mark.parametrize(("begun", "remembered"), [(0, False), (14.999, False), (15, True), (29.999, True)])
async def test_an_id_is_never_refused_from_memory_beyond_its_claims_end(
    world: Guarded, door: str, begun: float, remembered: bool
) -> None:
    # What lands in the guard's first half window may be remembered until its window of 60 s is over.
    window = timedelta(seconds=45)
    async with endpoint(door, world.dedup, window=window) as shop:
        world.clock.advance(begun)
        assert await shop.deliver("1") == "ran"
        assert world.guard.snapshot().processed == remembered
        await expire(world)
        if remembered:
            world.clock.advance(WINDOW.total_seconds() - begun - 0.001)
            assert await shop.deliver("1") == "duplicate"
            world.clock.advance(0.001)
        assert world.clock.now - 1_000 <= begun + window.total_seconds()
        assert await shop.deliver("1") == "ran"
    assert shop.runs == 2


@by_message
async def test_the_time_that_the_handler_takes_is_the_claims_own(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup, window=timedelta(seconds=70)) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        world.clock.advance(45)  # it would be remembered until 120 s after the beginning
        gate.open()
        assert await first == "ran"
        assert world.guard.snapshot().tracked == 0


@by_message
async def test_a_claim_after_the_window_is_remembered_like_the_first(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1")
        await expire(world)
        world.clock.advance(WINDOW.total_seconds())
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"
    assert (shop.runs, await world.ids()) == (2, ["1"])


# Where it would be inert


@pytest.mark.parametrize(
    ("seconds", "warns"), [(1, True), (30, True), (30.001, False), (60, False), (None, False)]
)
async def test_a_window_that_the_guard_can_do_nothing_for_is_warned_of_at_start_up_once(
    world: Guarded, seconds: float | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    window = None if seconds is None else timedelta(seconds=seconds)
    app = world.app()
    for path in ("/orders", "/returns"):
        policy = Deduplicated("path", "sku", window=window)
        app.post(path + "/{sku}", dependencies=[Depends(policy)])(lambda: None)
    world.dedup.handler(Deduplicated(window=window))(lambda message: message)
    async with lifespan(app):
        pass
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["remembers no id of a policy whose window" in message for message in warned] == [True] * warns


async def test_so_are_the_runtimes_own_window_and_a_deliverys(
    world: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    dedup = Dedup(world.engine, window=timedelta(seconds=29), guard=world.guard)
    dedup.prepare(Deduplicated())
    dedup.prepare(Deduplicated("delivery", keep_after_handling=timedelta(seconds=28)))
    dedup.prepare(Deduplicated("delivery"))
    assert [record.args for record in caplog.records] == [
        (timedelta(seconds=29), WINDOW),
        (timedelta(seconds=28), WINDOW),
    ]


# A release by an operator


async def test_a_release_is_honoured_at_once_and_costs_no_other_id_its_memory(
    world: Guarded, door: str
) -> None:
    async with endpoint(door, world.dedup) as shop:
        for logical_id in ("1", "2"):
            await shop.deliver(logical_id)
        assert await world.dedup.release("1", scope=SCOPE)
        assert await costs_nothing(world, lambda: shop.deliver("2")) == "duplicate"
        assert await shop.deliver("1") == "ran"
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "duplicate"


@by_message
async def test_after_a_release_another_payload_runs_under_the_id(world: Guarded, door: str) -> None:
    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1", "tea")
        await world.dedup.release("1", scope=SCOPE)
        assert await shop.deliver("1", "cocoa") == "ran"
        assert await shop.deliver("1", "tea") == "fingerprint-mismatch"


@by_message
async def test_a_claim_whose_commit_is_under_way_during_a_release_is_not_remembered(
    world: Guarded, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The release deletes the claim after its COMMIT, and before this process hears of that COMMIT.
    async with endpoint(door, world.dedup) as shop:

        async def no_claim_yet(*_: object) -> bool:
            return False

        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        with monkeypatch.context() as patch:
            patch.setattr(world.dedup._store, "release", no_claim_yet)  # SQLite would wait for the writer
            assert not await world.dedup.release("1", scope=SCOPE)
        assert await costs_nothing(world, lambda: shop.deliver("1")) == "in-flight"
        gate.open()
        assert await first == "ran"
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "duplicate"


@by_message
async def test_a_release_that_gets_no_answer_is_forgotten_all_the_same(
    world: Guarded, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether the claim was deleted is not known: then the database is to be asked.
    async def no_answer(*_: object) -> bool:
        raise StoreUnavailableError

    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1")
        with monkeypatch.context() as patch:
            patch.setattr(world.dedup._store, "release", no_answer)
            with pytest.raises(StoreUnavailableError):
                await world.dedup.release("1", scope=SCOPE)
        assert world.guard.snapshot().tracked == 0
        assert await shop.deliver("1") == "duplicate"


@by_message
async def test_another_processs_release_is_honoured_when_the_guards_window_is_over(
    world: Guarded, door: str
) -> None:
    elsewhere = Dedup(world.engine, reap_every=None, guard=GenerationalGuard())
    async with endpoint(door, world.dedup) as shop:
        await shop.deliver("1")
        assert await elsewhere.release("1", scope=SCOPE)
        world.clock.advance(WINDOW.total_seconds() - 0.001)
        assert await shop.deliver("1") == "duplicate"
        world.clock.advance(0.001)
        assert await shop.deliver("1") == "ran"
