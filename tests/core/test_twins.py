"""Twins in one process, without a database: who is told what, and who waits for whom."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import timedelta

import pytest

from fastapi_dedup.claims import Claim, Duplicate, InFlight, Lease, Mismatch
from tests.core.doubles import DONE, HOUR, UNDER_WAY, Scene, intent


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_store_that_cannot_see_twins_is_only_asked_for_what_is_committed() -> None:
    # else the twin would queue for the writer's lock
    scene = Scene(sees_in_flight=False)
    first, second = scene.delivery(), scene.delivery()
    await first.claim(intent(), first.own)
    assert await second.claim(intent(), second.own) == InFlight()
    assert scene.journal == ["claim news", "look news"]
    scene.store.looks = [DONE]
    assert await second.claim(intent(), second.own) == DONE


async def test_a_store_that_sees_twins_decides_even_against_this_process(scene: Scene) -> None:
    # a connection that died has freed the id, though its owner has not noticed yet
    first, second = scene.delivery(), scene.delivery()
    await first.claim(intent(), first.own)
    assert isinstance(await second.claim(intent(), second.own), Claim)
    await first.fail()
    assert scene.is_in_flight(intent())  # the second's flight, and not the first's, which has landed
    await second.succeed()
    assert not scene.is_in_flight(intent())


@pytest.mark.parametrize("sees_in_flight", [True, False])
async def test_a_twin_with_another_payload_is_told_so(sees_in_flight: bool) -> None:
    # case D3
    scene = Scene(sees_in_flight)
    first, second = scene.delivery(), scene.delivery()
    await first.claim(intent(fingerprint=b"1"), first.own)
    if sees_in_flight:
        scene.store.answers = [UNDER_WAY, UNDER_WAY]
    assert await second.claim(intent(fingerprint=b"2"), second.own) == Mismatch()
    assert await second.claim(intent(fingerprint=b"1"), second.own) == InFlight()


async def test_a_twin_that_only_asks_yet_is_no_mismatch() -> None:
    # it may still be refused: its payload says nothing about the id
    scene = Scene(sees_in_flight=False)
    first, second = scene.delivery(), scene.delivery()
    asking = asyncio.create_task(first.claim(intent(fingerprint=b"1"), first.own))
    await asyncio.sleep(0)
    assert await second.claim(intent(fingerprint=b"2"), second.own) == InFlight()
    await asking


# Waiting


async def waiting(scene: Scene, seconds: float = 5) -> Claim | Duplicate | InFlight | Mismatch:
    delivery = scene.delivery()
    return await delivery.claim(intent(), delivery.own, wait=timedelta(seconds=seconds))


@pytest.mark.parametrize("sees_in_flight", [True, False])
async def test_who_waits_runs_when_the_first_has_failed(sees_in_flight: bool) -> None:
    scene = Scene(sees_in_flight)
    first = scene.delivery()
    await first.claim(intent(), first.own)
    waiter = asyncio.create_task(waiting(scene))
    await scene.waits.wait()
    await asyncio.sleep(0.05)
    assert not waiter.done()
    await first.fail()
    async with asyncio.timeout(2):
        assert isinstance(await waiter, Claim)


@pytest.mark.parametrize("sees_in_flight", [True, False])
async def test_who_waits_is_a_duplicate_when_the_first_has_succeeded(sees_in_flight: bool) -> None:
    scene = Scene(sees_in_flight)
    first = scene.delivery()
    await first.claim(intent(), first.own)
    scene.store.answers = [DONE]
    waiter = asyncio.create_task(waiting(scene))
    await scene.waits.wait()
    await first.succeed()
    async with asyncio.timeout(2):
        assert await waiter == DONE


async def test_who_waits_in_vain_is_told_that_the_first_is_still_in_flight(scene: Scene) -> None:
    first = scene.delivery()
    await first.claim(intent(), first.own)
    async with asyncio.timeout(2):
        assert await waiting(scene, 0.1) == InFlight()
    assert scene.told == ["claimed", "in_flight"]
    assert scene.journal == ["claim news", "step aside"], "who waits for a neighbour asks nothing meanwhile"


async def test_when_time_is_up_nobody_looks_once_more(scene: Scene) -> None:
    scene.store.answers = [UNDER_WAY] * 99
    async with asyncio.timeout(2):
        assert await asyncio.gather(*[waiting(scene, 0.1) for _ in range(9)]) == [InFlight()] * 9
    looks = scene.journal.count("claim news") - 9
    assert looks <= 4, "those of the first in line, in pauses that grow"


async def test_who_waits_for_another_process_looks_again_and_again(scene: Scene) -> None:
    scene.store.answers = [UNDER_WAY, UNDER_WAY, UNDER_WAY, DONE]
    async with asyncio.timeout(5):
        assert await waiting(scene) == DONE
    assert scene.journal == ["claim news", *["step aside", "claim news"] * 3]


async def test_work_that_was_abandoned_is_told_at_once_to_who_would_wait_for_it(scene: Scene) -> None:
    scene.store.answers = [InFlight(abandoned=True)]
    assert await waiting(scene) == InFlight(abandoned=True)
    assert scene.journal == ["claim news"]


async def test_who_would_wait_asks_the_store_while_a_neighbour_only_asks_it(scene: Scene) -> None:
    # which says nothing about the id yet: its work may be done
    first, second = scene.delivery(), scene.delivery()
    second.own.may_step_aside = False
    scene.store.answers = [DONE, DONE]
    asking = asyncio.create_task(first.claim(intent(), first.own))
    await asyncio.sleep(0)
    assert await second.claim(intent(), second.own, wait=HOUR) == DONE
    await asking


async def test_who_would_wait_for_a_lease_asks_the_store_though_a_neighbour_holds_it(scene: Scene) -> None:
    # the neighbour may have lost it to another process, which has done the work
    leased = replace(intent(), lease=Lease(HOUR))
    first, second = scene.delivery(), scene.delivery()
    await first.claim(leased, first.own)
    scene.store.answers = [DONE]
    assert await second.claim(leased, second.own, wait=timedelta(seconds=1)) == DONE


async def test_who_cannot_wait_without_a_connection_is_answered_at_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.store.answers = [UNDER_WAY]
    delivery = scene.delivery()
    delivery.own.may_step_aside = False
    async with asyncio.timeout(2):
        outcome = await delivery.claim(intent(), delivery.own, wait=timedelta(seconds=60))
    assert outcome == InFlight()
    assert "cannot wait" in caplog.text
    assert [record.levelno for record in caplog.records if "cannot wait" in record.getMessage()] == [
        logging.WARNING
    ]


async def test_of_many_who_wait_one_runs_and_the_others_go_on_waiting(scene: Scene) -> None:
    scene = Scene(sees_in_flight=False)
    first = scene.delivery()
    await first.claim(intent(), first.own)
    winners: list[Claim] = []

    async def one() -> object:
        delivery = scene.delivery()
        outcome = await delivery.claim(intent(), delivery.own, wait=timedelta(seconds=5))
        if isinstance(outcome, Claim):
            winners.append(outcome)
            await asyncio.sleep(0.05)
            scene.store.looks = [DONE] * 99
            scene.store.answers = [DONE] * 99
            await delivery.succeed()
        return type(outcome)

    waiters = [asyncio.create_task(one()) for _ in range(20)]
    await asyncio.sleep(0.05)
    await first.fail()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*waiters)
    assert len(winners) == 1
    assert outcomes.count(Duplicate) == 19
