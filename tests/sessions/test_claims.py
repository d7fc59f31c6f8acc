"""`dedup.claim(..., session=...)`: whatever the session is, claim and work share its fate."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from fastapi_dedup import Claim, ClaimInFlightError, DuplicateError
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.hooks import EventKind
from tests.http.world import World, eventually
from tests.sessions.kinds import ADD, REQUEST, Kind

SOON = 10.0


class HandlerError(Exception):
    """What a handler raises."""


@asynccontextmanager
async def claiming(kind: Kind, logical_id: str = "news", **options: Any) -> AsyncIterator[Any]:
    """Claim around a block, in a session of the app's, which is committed where the block succeeds."""
    async with kind.open() as session:
        async with kind.world.dedup.claim(logical_id, scope="tests", session=session, **options):
            yield session
        await kind.commit(session)


async def outcome(kind: Kind, logical_id: str = "news", **options: Any) -> type:
    """Claim in a request of its own, commit it, and return what it was: the claim, or why there was none."""

    async def request() -> type:
        REQUEST.set(object())
        try:
            async with claiming(kind, logical_id, **options):
                pass
        except (DuplicateError, ClaimInFlightError) as refusal:
            return type(refusal)
        return Claim

    return await asyncio.create_task(request())


async def found(kind: Kind) -> tuple[list[str], list[str]]:
    """Return the work and the claims that are committed."""
    return await kind.world.orders(), await kind.world.ids()


async def test_claim_and_work_are_committed_together(every_kind: Kind) -> None:
    kind = every_kind
    async with kind.open() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session) as claim:
            assert claim.session is session
            assert await kind.claims(session) == 1
            await kind.add(session, "news")
            assert await found(kind) == ([], [])
        await kind.commit(session)
    assert await found(kind) == (["news"], ["news"])
    assert await outcome(kind) is DuplicateError


async def test_claim_and_work_are_rolled_back_together(every_kind: Kind) -> None:
    kind = every_kind
    for _ in range(2):
        async with kind.open() as session:
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                await kind.add(session, "lost")
            await kind.rollback(session)
    assert await found(kind) == ([], [])
    assert await outcome(kind) is Claim


async def test_a_session_that_is_closed_without_commit_frees_the_id(kind: Kind) -> None:
    async with kind.open() as session, kind.world.dedup.claim("news", scope="tests", session=session):
        await kind.add(session, "lost")
    assert await found(kind) == ([], [])
    assert await outcome(kind) is Claim


async def test_a_block_that_raises_has_its_claim_withdrawn_and_the_rest_stays_the_apps(kind: Kind) -> None:
    # case E2
    async with kind.open() as session:
        await kind.add(session, "before")
        with pytest.raises(HandlerError):
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                raise HandlerError
        await kind.commit(session)  # the app tolerates the failure
    assert await found(kind) == (["before"], [])
    assert await outcome(kind) is Claim


async def test_a_refusal_leaves_the_transaction_usable(every_kind: Kind) -> None:
    kind = every_kind
    # case F5
    assert await outcome(kind) is Claim
    async with kind.open() as session:
        await kind.add(session, "before")
        with pytest.raises(DuplicateError):
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        await kind.add(session, "after")
        await kind.commit(session)
    assert await kind.world.orders() == ["before", "after"]


async def test_a_twin_in_flight_is_told_so_at_once(every_kind: Kind) -> None:
    kind = every_kind
    # case F1
    async with kind.open() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session), asyncio.timeout(SOON):
            assert await outcome(kind) is ClaimInFlightError
        await kind.rollback(session)
    assert await outcome(kind) is Claim


async def test_a_block_that_committed_midway_and_then_failed_has_its_claim_released(kind: Kind) -> None:
    # cases A3, E2
    with pytest.raises(HandlerError):
        async with claiming(kind) as session:
            await kind.add(session, "first half")
            await kind.commit(session)
            raise HandlerError
    assert await kind.world.orders() == ["first half"]

    async def freed() -> bool:
        return await outcome(kind) is Claim

    await eventually(freed)


async def test_a_commit_midway_settles_the_claim_and_the_rest_is_the_apps(kind: Kind) -> None:
    async with claiming(kind) as session:
        await kind.add(session, "first half")
        await kind.commit(session)
        assert await outcome(kind) is DuplicateError
        await kind.add(session, "second half")
    assert await found(kind) == (["first half", "second half"], ["news"])


async def test_work_after_a_rollback_midway_is_claimed_anew(kind: Kind) -> None:
    async with claiming(kind) as session:
        await kind.add(session, "first try")
        await kind.rollback(session)
        await kind.add(session, "news")
    assert await found(kind) == (["news"], ["news"])
    assert await outcome(kind) is DuplicateError


async def test_work_after_a_rollback_midway_is_refused_where_another_has_done_it(kind: Kind) -> None:
    async def rolls_back(session: Any) -> None:
        await kind.rollback(session)
        assert await outcome(kind) is Claim
        await kind.add(session, "mine")

    with pytest.raises((DuplicateError, ClaimLostError)):
        async with claiming(kind) as session:
            await rolls_back(session)
    assert await found(kind) == ([], ["news"])


async def test_a_claim_in_a_savepoint_that_is_rolled_back_is_free(kind: Kind) -> None:
    # case F7
    async with kind.open() as session:
        savepoint = await kind.savepoint(session)
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            await kind.add(session, "undone")
        await kind.undo(savepoint)
        await kind.add(session, "kept")
        await kind.commit(session)
    assert await found(kind) == (["kept"], [])
    assert await outcome(kind) is Claim


@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_a_claim_in_a_released_savepoint_shares_the_fate_of_the_transaction_around(
    kind: Kind, ending: str
) -> None:
    # case F7: SQLite commits the first savepoint of a transaction that has not begun
    async with kind.open() as session:
        savepoint = await kind.savepoint(session)
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            await kind.add(session, "news")
        await kind.release(savepoint)
        await getattr(kind, ending)(session)
    kept = ["news"] if ending == "commit" else []
    assert await found(kind) == (kept, kept)


async def test_a_savepoint_inside_the_block_does_not_touch_the_claim(kind: Kind) -> None:
    # case F7
    async with claiming(kind) as session:
        await kind.add(session, "kept")
        savepoint = await kind.savepoint(session)
        await kind.add(session, "undone")
        await kind.undo(savepoint)
    assert await found(kind) == (["kept"], ["news"])
    assert await outcome(kind) is DuplicateError


async def test_a_savepoint_around_the_claim_that_is_rolled_back_inside_the_block_has_it_taken_anew(
    kind: Kind,
) -> None:
    async with kind.open() as session:
        await kind.add(session, "before")
        savepoint = await kind.savepoint(session)
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            await kind.add(session, "undone")
            await kind.undo(savepoint)
            await kind.add(session, "kept")
        await kind.commit(session)
    assert await found(kind) == (["before", "kept"], ["news"])


async def test_a_failed_statement_that_the_block_swallows_never_makes_a_success_without_a_claim(
    kind: Kind,
) -> None:
    # PostgreSQL answers the COMMIT of an aborted transaction with a ROLLBACK, and calls it no error.
    succeeded = True
    try:
        async with claiming(kind) as session:
            await kind.add(session, "news")
            await kind.stumble(session)
    except Exception:  # noqa: BLE001 - whatever it is, it is no success
        succeeded = False
    assert await found(kind) == ((["news"], ["news"]) if succeeded else ([], []))
    assert await outcome(kind) is (DuplicateError if succeeded else Claim)


async def test_a_statement_that_fails_in_a_savepoint_of_its_own_spoils_nothing(kind: Kind) -> None:
    async with claiming(kind) as session:
        await kind.add(session, "news")
        savepoint = await kind.savepoint(session)
        await kind.stumble(session)
        await kind.undo(savepoint)
    assert await found(kind) == (["news"], ["news"])


async def test_one_session_may_carry_claim_after_claim(kind: Kind) -> None:
    async with kind.open() as session:
        for number, ending in enumerate(("commit", "rollback", "commit")):
            async with kind.world.dedup.claim(str(number), scope="tests", session=session):
                await kind.add(session, str(number))
            await getattr(kind, ending)(session)
            if ending == "commit":
                await kind.begin(session)
    assert await found(kind) == (["0", "2"], ["0", "2"])


async def test_several_claims_may_ride_one_transaction(kind: Kind) -> None:
    async with kind.open() as session:
        for name in ("a", "b"):
            async with kind.world.dedup.claim(name, scope="tests", session=session):
                await kind.add(session, name)
        with pytest.raises(HandlerError):
            async with kind.world.dedup.claim("c", scope="tests", session=session):
                raise HandlerError
        await kind.commit(session)
    assert await found(kind) == (["a", "b"], ["a", "b"])


async def test_times_are_utc_whatever_the_zone_of_process_and_connection(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case F11
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    zone = {"postgresql": "set local time zone 'Asia/Tokyo'", "mysql": "set time_zone = '+09:00'"}
    window = timedelta(hours=7)
    async with kind.open() as session:
        if (statement := zone.get(kind.world.engine.url.get_backend_name())) is not None:
            await kind.run(session, statement)
        async with kind.world.dedup.claim("news", scope="tests", session=session, window=window) as claim:
            assert claim.claimed_at.tzinfo is claim.expires_at.tzinfo is UTC
            assert abs(claim.claimed_at - datetime.now(UTC)) < timedelta(minutes=1)
            assert claim.expires_at - claim.claimed_at == window
        await kind.commit(session)
    async with kind.open() as session:
        with pytest.raises(DuplicateError) as refusal:
            async with kind.world.dedup.claim("news", scope="tests", session=session):
                raise AssertionError
        await kind.rollback(session)
    assert refusal.value.expires_at == claim.expires_at
    assert refusal.value.age is not None
    assert timedelta(0) <= refusal.value.age < timedelta(minutes=1)
    monkeypatch.undo()
    time.tzset()


async def test_hooks_hear_what_became_of_a_claim(kind: Kind) -> None:
    async with claiming(kind):
        pass
    with pytest.raises(HandlerError):
        async with claiming(kind, "other"):
            raise HandlerError
    told = ["claimed", "committed", "claimed", "released"]
    if not kind.announces:  # the block had ended before the COMMIT, which nobody tells of
        told.remove("committed")

    async def heard() -> bool:
        return [each.kind.value for each in kind.world.events] == told

    await eventually(heard)


async def test_one_of_many_claimants_runs(kind: Kind) -> None:
    line = asyncio.Barrier(6)

    async def deliver() -> type:
        REQUEST.set(object())
        async with kind.open() as session:
            await line.wait()
            try:
                async with kind.world.dedup.claim("news", scope="tests", session=session):
                    await kind.add(session, "news")
            except (DuplicateError, ClaimInFlightError) as refusal:
                return type(refusal)
            await kind.commit(session)
        return Claim

    async with asyncio.timeout(3 * SOON):
        outcomes = await asyncio.gather(*(deliver() for _ in range(6)))
    assert outcomes.count(Claim) == 1
    assert await found(kind) == (["news"], ["news"])


WAITS: dict[str, Any] = {"in_flight": "wait", "wait_timeout": timedelta(seconds=SOON)}


@pytest.mark.parametrize(("ending", "told"), [("commit", DuplicateError), ("rollback", Claim)])
async def test_a_waiting_twin_is_told_the_outcome(kind: Kind, ending: str, told: type) -> None:
    # case F1
    async with kind.open() as session:
        async with kind.world.dedup.claim("news", scope="tests", session=session):
            twin = asyncio.create_task(outcome(kind, **WAITS))
            await eventually(lambda: has_waiters(kind))
        await getattr(kind, ending)(session)
        async with asyncio.timeout(SOON):
            # A connection is held from the first, so who waited would keep it from others.
            assert await twin is (told if kind.gives_back else ClaimInFlightError)


async def has_waiters(kind: Kind) -> bool:
    """Tell whether a twin waits, or has been told that it cannot."""
    flights = kind.world.dedup._flights._flights.values()
    waiters = any(flight.landed._waiters for flight in flights)
    return waiters or any(each.kind is EventKind.IN_FLIGHT for each in kind.world.events)


# A session that nobody ends


async def test_an_id_is_free_again_when_the_session_of_a_failed_claim_is_lost(sqlite: World) -> None:
    # Who never closes a session leaves its end to the collector, and no event tells of that.
    engine = create_engine(sqlite.engine.url.set(drivername="sqlite"))

    async def claim(session: Session, *, fails: bool) -> None:
        async with sqlite.dedup.claim("news", scope="tests", session=session):
            session.execute(text(ADD.format("'news'")))
            if fails:
                raise HandlerError
            session.commit()

    async def lose_a_session() -> weakref.ref[Session]:
        session = Session(engine)
        with suppress(HandlerError):
            await claim(session, fails=True)
        return weakref.ref(session)

    async def is_collected() -> bool:
        gc.collect()
        return lost() is None

    lost = await lose_a_session()
    await eventually(is_collected)  # a worker thread may have it in its hands for another moment
    with Session(engine) as session:
        await claim(session, fails=False)
    assert (await sqlite.orders(), await sqlite.ids()) == (["news"], ["news"])
    engine.dispose()
