"""The ids that a process has in flight, and how the waiting are woken."""

from __future__ import annotations

import asyncio
import gc

import pytest

from fastapi_dedup.claims import InFlight, Mismatch
from fastapi_dedup.flights import Flight, Flights
from tests.core.doubles import intent


async def test_one_of_two_neighbours_departs() -> None:
    flights = Flights()
    first = flights.depart(intent())
    assert first is not None
    assert flights.depart(intent()) is None
    assert flights.depart(intent("other")) is not None
    flights.land(first)
    assert flights.depart(intent()) is not None


async def test_landing_twice_or_not_at_all_is_harmless() -> None:
    flights = Flights()
    flights.land(None)
    first = flights.depart(intent())
    flights.land(first)
    second = flights.depart(intent())
    flights.land(first)  # late: the id is the second's now
    assert flights.depart(intent()) is None
    flights.land(second)


async def test_who_overtakes_keeps_the_id_when_the_overtaken_lands() -> None:
    flights = Flights()
    overtaken = flights.depart(intent())
    overtaker = flights.overtake(intent())
    flights.land(overtaken)
    assert flights.depart(intent()) is None
    flights.land(overtaker)
    assert flights.depart(intent()) is not None


async def test_nothing_is_remembered_of_what_has_landed() -> None:
    # case G6
    flights = Flights()
    for number in range(10_000):
        flights.land(flights.depart(intent(str(number))))
    assert not flights._flights


async def test_a_flight_lives_no_longer_than_its_owner() -> None:
    flights = Flights()
    flight: Flight | None = held(flights)
    assert flights.depart(intent()) is None
    flight = None  # noqa: F841 - the owner's transaction is lost, and nobody has told of its end
    gc.collect()
    assert not flights._flights
    assert flights.depart(intent()) is not None


async def test_a_neighbour_is_a_mismatch_only_when_it_holds_the_id_for_another_payload() -> None:
    flights = Flights()
    assert flights.seen_from(intent(fingerprint=b"2")) == InFlight()
    flight = flights.depart(intent(fingerprint=b"1"))
    assert flight is not None
    assert flights.seen_from(intent(fingerprint=b"2")) == InFlight()
    flight.held = True
    assert flights.seen_from(intent(fingerprint=b"2")) == Mismatch()
    assert flights.seen_from(intent(fingerprint=b"1")) == InFlight()
    assert flights.seen_from(intent()) == InFlight()


# Waiting in line


class Line:
    """Some who wait for one id, in the order in which they came, and who has been told to look."""

    def __init__(self, flights: Flights, number: int, at_most: float = 60) -> None:
        self.flights = flights
        self.looks: list[int] = []
        self.outcomes: list[str] = []
        self.look = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._wait(place, at_most)) for place in range(number)]

    async def _wait(self, number: int, at_most: float) -> None:
        with self.flights.line(intent()) as place:
            while True:
                await place.turn(at_most=at_most)
                self.looks.append(number)
                await self.look.acquire()
                outcome = self.outcomes.pop(0)
                place.told = outcome == "an outcome"
                if outcome != "not yet":
                    return

    async def answer(self, *outcomes: str) -> None:
        """Let so many looks be answered: `an outcome`, `not yet`, or `time is up`."""
        self.outcomes += outcomes
        for _ in outcomes:
            self.look.release()
        await settle()

    async def looked(self, times: int) -> None:
        """Wait until those in line have looked so many times, which takes a pause or two."""
        async with asyncio.timeout(5):
            while len(self.looks) < times:  # noqa: ASYNC110 - the pauses are what is waited for
                await asyncio.sleep(0.005)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def held(flights: Flights) -> Flight:
    flight = flights.overtake(intent())
    flight.held = True
    return flight


async def test_when_a_neighbour_lands_the_first_in_line_looks_and_nobody_else() -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 100)
    await settle()
    assert line.looks == []
    flights.land(flight)
    await settle()
    assert line.looks == [0]
    for task in line.tasks:
        task.cancel()


async def test_an_outcome_that_the_first_has_learnt_is_news_to_all_the_others() -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 100)
    await settle()
    flights.land(flight)
    await settle()
    await line.answer("an outcome")
    assert sorted(line.looks) == [*range(100)]
    await line.answer(*["an outcome"] * 99)
    await asyncio.gather(*line.tasks)
    assert flights._lines == {}


async def test_who_is_first_and_takes_the_id_leaves_the_others_in_line() -> None:
    # case F1, and of 100 who wait, one asks the database when the owner has failed
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 100)
    await settle()
    for runner in range(3):
        flights.land(flight)
        await settle()
        assert line.looks == [*range(runner + 1)]
        flight = held(flights)  # the look has given it the id
        await line.answer("an outcome")
    assert line.looks == [0, 1, 2]
    flights.land(flight)
    await settle()
    await line.answer("an outcome")
    assert sorted(line.looks) == [*range(100)]
    await line.answer(*["an outcome"] * 99)
    await asyncio.gather(*line.tasks)


async def test_for_another_process_only_the_first_looks_again_and_again() -> None:
    flights = Flights()
    line = Line(flights, 50)
    for look in range(1, 4):
        await line.looked(look)
        await line.answer("not yet")
    await line.looked(4)
    assert line.looks == [0, 0, 0, 0]
    await line.answer("an outcome")
    await line.answer(*["an outcome"] * 49)
    await asyncio.gather(*line.tasks)


async def test_the_pauses_between_looks_for_another_process_grow_up_to_half_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("fastapi_dedup.flights.asyncio.sleep", sleep)
    monkeypatch.setattr("fastapi_dedup.flights.random.uniform", lambda *_: 1.0)
    with Flights().line(intent()) as place:
        for _ in range(8):
            assert await place.turn(at_most=60)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("how", ["its time is up", "it is cancelled"])
async def test_when_the_first_leaves_without_an_outcome_the_next_takes_its_place(how: str) -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 3)
    await settle()
    if how == "it is cancelled":
        line.tasks[0].cancel()
        await settle()
        assert line.looks == []
        flights.land(flight)
        await settle()
        assert line.looks == [1]
    else:
        flights.land(flight)
        await settle()
        flight = held(flights)
        await line.answer("time is up")
        assert line.looks == [0]
        flights.land(flight)
        await settle()
        assert line.looks == [0, 1]
    await line.answer("an outcome")
    await line.answer("an outcome")
    await asyncio.wait(line.tasks)
    assert flights._lines == {}


async def test_who_leaves_from_within_the_line_changes_nothing_for_the_others() -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 3)
    await settle()
    line.tasks[1].cancel()
    await settle()
    assert line.looks == []
    flights.land(flight)
    await settle()
    assert line.looks == [0]
    await line.answer("an outcome", "an outcome")
    await asyncio.wait(line.tasks)
    assert line.looks == [0, 2]


@pytest.mark.parametrize("where", ["here", "in a thread"])
async def test_who_waits_for_an_owner_that_is_lost_looks(where: str) -> None:
    flights = Flights()
    owner = [held(flights)]
    line = Line(flights, 1)
    await settle()
    assert line.looks == []
    if where == "here":
        owner.clear()
    else:
        asyncio.get_running_loop().set_debug(True)  # which refuses what is not to be done in a thread
        await asyncio.to_thread(owner.clear)
    gc.collect()
    await line.looked(1)
    await line.answer("an outcome")
    await asyncio.gather(*line.tasks)


async def test_a_wait_ends_at_the_latest_when_it_was_told_to() -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 2, at_most=0.02)
    await line.looked(2)
    await line.answer("time is up", "time is up")
    await asyncio.gather(*line.tasks)
    flights.land(flight)
    assert flights._lines == {}


async def test_lines_for_different_ids_know_nothing_of_each_other() -> None:
    flights = Flights()
    flight = held(flights)
    line = Line(flights, 1)
    with flights.line(intent("other")) as place:
        await place.turn(at_most=60)  # in flight elsewhere: a pause, and a look
    assert line.looks == []
    flights.land(flight)
    await settle()
    await line.answer("an outcome")
    await asyncio.gather(*line.tasks)


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
