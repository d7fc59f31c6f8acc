"""The ids that a process has in flight, and how the waiting are woken."""

from __future__ import annotations

import asyncio
import time

from fastapi_dedup.claims import InFlight, Mismatch
from fastapi_dedup.flights import Flights
from tests.core.doubles import intent


def test_one_of_two_neighbours_departs() -> None:
    flights = Flights()
    first = flights.depart(intent())
    assert first is not None
    assert flights.depart(intent()) is None
    assert flights.depart(intent("other")) is not None
    flights.land(first)
    assert flights.depart(intent()) is not None


def test_landing_twice_or_not_at_all_is_harmless() -> None:
    flights = Flights()
    flights.land(None)
    first = flights.depart(intent())
    flights.land(first)
    second = flights.depart(intent())
    flights.land(first)  # late: the id is the second's now
    assert flights.depart(intent()) is None
    flights.land(second)


def test_who_overtakes_keeps_the_id_when_the_overtaken_lands() -> None:
    flights = Flights()
    overtaken = flights.depart(intent())
    overtaker = flights.overtake(intent())
    flights.land(overtaken)
    assert flights.depart(intent()) is None
    flights.land(overtaker)
    assert flights.depart(intent()) is not None


def test_nothing_is_remembered_of_what_has_landed() -> None:
    # case G6
    flights = Flights()
    for number in range(10_000):
        flights.land(flights.depart(intent(str(number))))
    assert flights._flights == {}


def test_a_neighbour_is_a_mismatch_only_when_it_holds_the_id_for_another_payload() -> None:
    flights = Flights()
    assert flights.seen_from(intent(fingerprint=b"2")) == InFlight()
    flight = flights.depart(intent(fingerprint=b"1"))
    assert flight is not None
    assert flights.seen_from(intent(fingerprint=b"2")) == InFlight()
    flight.held = True
    assert flights.seen_from(intent(fingerprint=b"2")) == Mismatch()
    assert flights.seen_from(intent(fingerprint=b"1")) == InFlight()
    assert flights.seen_from(intent()) == InFlight()


async def test_who_waits_for_a_neighbour_is_woken_by_its_landing() -> None:
    flights = Flights()
    flight = flights.depart(intent())
    assert flight is not None
    flight.held = True
    waiters = [asyncio.create_task(flights.landing(intent(), pause=60, at_most=60)) for _ in range(100)]
    await asyncio.sleep(0)
    flights.land(flight)
    async with asyncio.timeout(1):
        await asyncio.gather(*waiters)


async def test_a_wait_ends_at_the_latest_when_it_was_told_to() -> None:
    flights = Flights()
    flight = flights.depart(intent())
    assert flight is not None
    for held, pause, at_most in ((True, 60.0, 0.02), (False, 0.02, 60.0)):
        flight.held = held  # a flight that only asks for the id may be refused: look again soon
        began = time.monotonic()
        await flights.landing(intent(), pause=pause, at_most=at_most)
        assert time.monotonic() - began < 5
    await flights.landing(intent("elsewhere"), pause=0.02, at_most=60)


async def test_a_wait_that_is_cancelled_wakes_nobody_else() -> None:
    flights = Flights()
    flight = flights.depart(intent())
    assert flight is not None
    flight.held = True
    one, two = (asyncio.create_task(flights.landing(intent(), pause=60, at_most=60)) for _ in range(2))
    await asyncio.sleep(0)
    one.cancel()
    await asyncio.wait([one])
    assert one.cancelled()
    assert not two.done()
    flights.land(flight)
    await two


async def test_what_is_left_to_do_in_the_background_can_be_waited_for() -> None:
    flights = Flights()
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0.01)
        done.append(number)
        if number == 1:
            flights.background(work(2))

    flights.background(work(1))
    await flights.drain()
    assert done == [1, 2]
    await flights.drain()
