"""The heart without a database: what is asked of the store, in which order, and what everybody is told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from fastapi_dedup.claims import Claim, Duplicate, Fate, InFlight, Intent, Mismatch
from fastapi_dedup.core import Delivery, settled
from fastapi_dedup.errors import (
    ClaimInFlightError,
    DuplicateError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    StoreUnavailableError,
)
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.refusals import error_of
from tests.core.doubles import DONE, HOUR, NOON, UNDER_WAY, Scene, intent


@pytest.fixture
def scene() -> Scene:
    return Scene()


class HandlerError(Exception):
    """What a handler raises."""


# Claim and settle


async def test_a_success_claims_commits_and_tells_in_this_order(scene: Scene) -> None:
    delivery = scene.delivery()
    claim = await delivery.claim(intent(), delivery.own)
    assert isinstance(claim, Claim)
    assert (claim.logical_id, claim.scope) == ("news", "tests")
    assert (claim.claimed_at, claim.expires_at) == (NOON, NOON + HOUR)
    assert claim.session is delivery.own
    assert scene.told == ["claimed"]
    await delivery.succeed()
    await delivery.finish()
    assert scene.journal == ["claim news", "commit"]
    assert scene.events == [
        Event(EventKind.CLAIMED, "news", "tests"),
        Event(EventKind.COMMITTED, "news", "tests"),
    ]


async def test_a_hook_that_ends_the_program_leaves_nothing_in_flight(scene: Scene) -> None:
    class EndOfProgram(BaseException):
        """What no hook's failure is: it is not caught."""

    def end(_: Event) -> None:
        raise EndOfProgram

    own = scene.transaction()
    delivery = Delivery(scene.store, own, flights=scene.flights, hooks=[end])
    with pytest.raises(EndOfProgram):
        await delivery.claim(intent(), own)
    with pytest.raises(EndOfProgram):
        await delivery.fail()
    assert not scene.is_in_flight(intent())


async def test_a_failure_rolls_back_what_is_ours_and_needs_no_release(scene: Scene) -> None:
    delivery = scene.delivery()
    await delivery.claim(intent(), delivery.own)
    await delivery.fail()
    await delivery.finish()
    assert scene.journal[:2] == ["claim news", "rollback"]
    assert not [entry for entry in scene.journal if entry.startswith(("release", "withdraw", "commit"))]
    assert scene.told == ["claimed", "released"]


async def test_a_claim_in_a_borrowed_transaction_is_left_to_the_app_to_commit(scene: Scene) -> None:
    delivery, borrowed = scene.delivery(), scene.transaction(ours=False)
    await delivery.claim(intent(), borrowed)
    await delivery.succeed()
    assert delivery.unsettled
    borrowed.end(Fate.COMMITTED)
    await delivery.finish()
    assert not delivery.unsettled
    assert not [entry for entry in scene.journal if entry.startswith(("release", "withdraw"))]
    assert scene.told == ["claimed", "committed"]


async def test_a_claim_in_an_open_borrowed_transaction_is_withdrawn_from_it(scene: Scene) -> None:
    delivery, borrowed = scene.delivery(), scene.transaction(ours=False)
    await delivery.claim(intent(), borrowed)
    await delivery.fail()
    assert "withdraw news 1" in scene.journal
    borrowed.end(Fate.COMMITTED)  # the app tolerates the failure, and commits the rest
    await delivery.finish()
    assert not [entry for entry in scene.journal if entry.startswith("release")]
    assert scene.told == ["claimed", "released"]  # nobody is told that a withdrawn claim was committed


async def test_a_claim_that_was_committed_midway_is_released_on_failure(scene: Scene) -> None:
    delivery = scene.delivery()
    await delivery.claim(intent(), delivery.own)
    delivery.own.end(Fate.COMMITTED)
    await delivery.fail()
    await delivery.fail()
    await delivery.finish()
    assert [entry for entry in scene.journal if entry.startswith("release")] == ["release news 1"]
    assert scene.told == ["claimed", "committed", "released"]


async def test_a_release_waits_until_the_borrowed_transaction_has_given_its_connection_back(
    scene: Scene,
) -> None:
    delivery, borrowed = scene.delivery(), scene.transaction(ours=False)
    await delivery.claim(intent(), borrowed)
    borrowed.end(Fate.COMMITTED)
    borrowed.idle = False  # the handler has gone on, in a transaction of its own
    await delivery.fail()
    assert "release news 1" not in scene.journal
    assert delivery.unsettled
    borrowed.idle = True
    await delivery.finish()
    assert "release news 1" in scene.journal
    assert not delivery.unsettled


async def test_a_release_waits_for_a_borrowed_transaction_that_outlives_the_delivery(scene: Scene) -> None:
    delivery, borrowed = scene.delivery(), scene.transaction(ours=False)
    await delivery.claim(intent(), borrowed)
    borrowed.end(Fate.COMMITTED)
    borrowed.idle = False
    await delivery.fail()
    await delivery.finish()
    assert "release news 1" not in scene.journal
    borrowed.end(Fate.CLOSED)
    await scene.flights.drain()
    assert "release news 1" in scene.journal


async def test_a_release_that_finds_the_next_transaction_open_waits_for_its_end_too(scene: Scene) -> None:
    delivery = scene.delivery()
    borrowed = scene.transaction(ours=False)
    await delivery.claim(intent(), borrowed)
    borrowed.end(Fate.COMMITTED)
    borrowed.idle = False  # the app goes on with the session
    await delivery.fail()
    await delivery.finish()
    borrowed.end(Fate.COMMITTED)
    borrowed.idle = False  # and on, before anybody could release
    await scene.flights.drain()
    assert "release news 1" not in scene.journal
    borrowed.end(Fate.COMMITTED)
    await scene.flights.drain()
    assert scene.journal[-1] == "release news 1"


async def test_a_claim_committed_by_success_is_never_released(scene: Scene) -> None:
    # case E2: whatever comes after COMMIT, the work is done
    delivery = scene.delivery()
    await delivery.claim(intent(), delivery.own)
    await delivery.succeed()
    await delivery.fail()
    await delivery.finish()
    assert not [entry for entry in scene.journal if entry.startswith(("release", "withdraw"))]
    assert scene.told == ["claimed", "committed"]


async def test_a_cancellation_right_after_commit_does_not_release_the_claim(scene: Scene) -> None:
    own = scene.transaction()
    delivery = scene.delivery(own)

    class LateError(asyncio.CancelledError):
        """A cancellation that the driver notices after COMMIT."""

    plain = own.commit

    async def commit() -> None:
        await plain()
        raise LateError

    own.commit = commit  # type: ignore[method-assign]
    with pytest.raises(LateError):
        async with settled(delivery):
            await delivery.claim(intent(), own)
    assert not [entry for entry in scene.journal if entry.startswith(("release", "withdraw"))]


async def test_a_commit_that_fails_is_raised_as_it_came_and_frees_the_id(scene: Scene) -> None:
    # case A2
    delivery = scene.delivery()
    delivery.own.commit_error = HandlerError()
    with pytest.raises(HandlerError) as raised:
        async with settled(delivery):
            await delivery.claim(intent(), delivery.own)
    assert raised.value is delivery.own.commit_error
    assert scene.told == ["claimed", "released"]
    assert not scene.is_in_flight(intent())


async def test_what_a_block_raises_is_never_hidden_by_a_settlement_that_fails(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    # case E2
    delivery = scene.delivery()
    scene.store.release_error = StoreUnavailableError("the database is down")
    await delivery.claim(intent(), delivery.own)
    delivery.own.end(Fate.COMMITTED)
    with pytest.raises(HandlerError) as raised:
        async with settled(delivery):
            raise HandlerError
    assert raised.value.__context__ is None
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    message = record.getMessage()
    assert "'news'" in message
    assert "'tests'" in message
    assert str(NOON + HOUR) in message
    assert record.exc_info is not None


async def test_a_rollback_that_fails_is_logged_and_the_failure_goes_on(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = scene.delivery()
    delivery.own.rollback_error = OSError("the connection is gone")
    await delivery.claim(intent(), delivery.own)
    with pytest.raises(HandlerError):
        async with settled(delivery):
            raise HandlerError
    assert "the rollback failed" in caplog.text


async def test_one_release_that_fails_does_not_keep_the_others(scene: Scene) -> None:
    delivery = scene.delivery()
    borrowed = [scene.transaction(ours=False) for _ in range(2)]
    for name, transaction in zip("pq", borrowed, strict=True):
        await delivery.claim(intent(name), transaction)
    borrowed[0].end(Fate.COMMITTED)
    scene.store.release_error = StoreUnavailableError("down")
    await delivery.fail()
    assert "withdraw q 2" in scene.journal


async def test_a_rollback_midway_makes_a_success_claim_anew_before_it_commits(scene: Scene) -> None:
    delivery = scene.delivery()
    await delivery.claim(intent(), delivery.own)
    delivery.own.end(Fate.ROLLED_BACK)
    await delivery.succeed()
    assert scene.journal == ["claim news", "claim news", "commit"]
    assert scene.told[-2:] == ["claimed", "committed"]


@pytest.mark.parametrize(
    ("answer", "error", "event"),
    [
        (DONE, DuplicateError, "duplicate"),
        (UNDER_WAY, ClaimInFlightError, "in_flight"),
        (Mismatch(), FingerprintMismatchError, "mismatch"),
    ],
)
async def test_a_rollback_midway_is_a_refusal_where_the_id_was_taken_meanwhile(
    scene: Scene, answer: Duplicate | InFlight | Mismatch, error: type[Exception], event: str
) -> None:
    delivery = scene.delivery()
    await delivery.claim(intent(), delivery.own)
    delivery.own.end(Fate.ROLLED_BACK)
    scene.store.answers = [answer]
    with pytest.raises(error):
        async with settled(delivery):
            pass
    assert "commit" not in scene.journal
    assert scene.told[-1] == event


async def test_the_same_id_met_twice_is_one_claim(scene: Scene) -> None:
    delivery = scene.delivery()
    first = await delivery.claim(intent(), delivery.own)
    assert await delivery.claim(intent(fingerprint=b"other"), scene.transaction(ours=False)) is first
    assert scene.journal == ["claim news"]
    assert scene.told == ["claimed"]


async def test_a_window_from_the_end_is_renewed_before_commit_and_other_windows_are_not(
    scene: Scene,
) -> None:
    delivery = scene.delivery()
    await delivery.claim(intent("from the start"), delivery.own)
    await delivery.claim(Intent(("tests",), "from the end", HOUR, None, from_end=True), delivery.own)
    await delivery.worked()
    await delivery.succeed()
    assert [entry for entry in scene.journal if entry.startswith("renew")] == ["renew from the end 2"]
    assert scene.journal[-1] == "commit"


async def test_a_delivery_that_claimed_nothing_settles_without_a_store(scene: Scene) -> None:
    async with settled(scene.delivery()):
        pass
    assert scene.journal in ([], ["commit"])


async def test_a_door_that_has_failed_its_delivery_itself_is_not_committed(scene: Scene) -> None:
    delivery = scene.delivery()
    async with settled(delivery):
        await delivery.claim(intent(), delivery.own)
        await delivery.fail()
    assert "commit" not in scene.journal


# Refusals


@pytest.mark.parametrize(
    ("answer", "event"),
    [(DONE, "duplicate"), (UNDER_WAY, "in_flight"), (Mismatch(), "mismatch")],
)
async def test_a_refusal_is_returned_logged_at_info_and_told(
    scene: Scene, caplog: pytest.LogCaptureFixture, answer: Duplicate | InFlight | Mismatch, event: str
) -> None:
    # DESIGN 4.13: with id, scope and age
    scene.store.answers = [answer]
    delivery = scene.delivery()
    with caplog.at_level(logging.INFO, "fastapi_dedup"):
        assert await delivery.claim(intent(), delivery.own) == answer
    age = answer.age if isinstance(answer, Duplicate) else None
    assert scene.events == [Event(EventKind(event), "news", "tests", age)]
    [record] = caplog.records
    assert record.levelno == logging.INFO
    for part in ("'news'", "'tests'", event, str(age or "unknown")):
        assert part in record.getMessage()
    assert not scene.is_in_flight(intent())


def test_a_refusal_as_an_error_says_what_the_refusal_said() -> None:
    duplicate = error_of(intent(), DONE)
    assert isinstance(duplicate, DuplicateError)
    assert (duplicate.claimed_at, duplicate.expires_at, duplicate.age) == (NOON, NOON + HOUR, DONE.age)
    assert (duplicate.logical_id, duplicate.scope) == ("news", "tests")
    assert isinstance(error_of(intent(), UNDER_WAY), ClaimInFlightError)
    assert isinstance(error_of(intent(), Mismatch()), FingerprintMismatchError)


async def test_a_store_that_is_down_is_told_and_its_error_goes_on(scene: Scene) -> None:
    error = StoreUnavailableError("down")
    scene.store.answers = [error]
    delivery = scene.delivery()
    with pytest.raises(StoreUnavailableError) as raised:
        await delivery.claim(intent(), delivery.own)
    assert raised.value is error
    assert scene.told == ["unavailable"]
    assert not scene.is_in_flight(intent())


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), RuntimeError(), asyncio.CancelledError()])
async def test_a_claim_that_raised_leaves_the_next_one_a_free_id(error: BaseException) -> None:
    for sees_in_flight in (True, False):
        scene = Scene(sees_in_flight)
        scene.store.answers = [error]
        delivery = scene.delivery()
        with pytest.raises(type(error)):
            await delivery.claim(intent(), delivery.own)
        await delivery.fail()
        again = scene.delivery()
        assert isinstance(await again.claim(intent(), again.own), Claim)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MissingLogicalIdError("body.sku"), EventKind.MISSING),
        (InvalidLogicalIdError("body.sku", "it is a list"), EventKind.INVALID),
    ],
)
def test_a_delivery_without_a_legal_id_is_logged_and_told(
    scene: Scene,
    caplog: pytest.LogCaptureFixture,
    error: MissingLogicalIdError | InvalidLogicalIdError,
    kind: EventKind,
) -> None:
    with caplog.at_level(logging.INFO, "fastapi_dedup"):
        scene.delivery().unidentified(error)
    assert scene.events == [Event(kind)]
    assert "body.sku" in caplog.text


async def test_a_hook_that_raises_is_logged_and_changes_nothing(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Event) -> None:
        raise HandlerError

    delivery = scene.delivery()
    delivery._hooks = [broken, scene.events.append]
    await delivery.claim(intent(), delivery.own)
    await delivery.succeed()
    assert scene.told == ["claimed", "committed"]
    assert not scene.is_in_flight(intent())
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all("broken" in record.getMessage() for record in errors)
