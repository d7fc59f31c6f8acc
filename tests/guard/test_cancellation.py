"""A delivery is cancelled at every point where it waits: no mark stays, and only what committed is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from fastapi_dedup.guard import GenerationalGuard
from tests.apps.orders import checked_out
from tests.databases import orders_table, url_of
from tests.guard.doors import DOORS, endpoint
from tests.http.world import World
from tests.live import until
from tests.races.shop import Ledger
from tests.races.test_cancellation_points import WAYS, How, When, cheap_collections


# case B3
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["sqlite", "asyncpg"])
async def test_wherever_a_delivery_is_cancelled_its_mark_is_given_back(
    backend: str, way: tuple[How, When], door: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    cancelled, when = way
    front, memory = GenerationalGuard(), GenerationalGuard()
    async with cheap_collections(), orders_table(url_of(backend, request, tmp_path)) as engine:
        dedup = Dedup(engine, create_table=True, reap_every=None, guard=front, memory=lambda: memory)
        await dedup.create_table()
        world = World(engine, dedup)

        async def is_quiet() -> bool:
            return checked_out(engine) == 0 and await Ledger(engine=engine).is_quiet()

        async with (
            endpoint(door, dedup) as durable,
            endpoint(door, dedup, works=False, store="memory") as remembered,
        ):
            for shop, guard in ((durable, front), (remembered, memory)):
                point, points = 0, 1
                while point < points:
                    logical_id = f"{point}"
                    told: list[str] = []

                    async def deliver() -> None:
                        told.append(await shop.deliver(logical_id))  # noqa: B023 - awaited in this round

                    points = await cancelled(deliver(), point, when)
                    await until(is_quiet)
                    where = f"cancelled at point {point} of {points}, told {told}"
                    assert guard.snapshot().in_flight == 0, where
                    assert dedup._flights._flights == {}, where
                    claimed = logical_id in await world.ids()
                    again = await shop.deliver(logical_id)
                    if guard is front:
                        assert again == ("duplicate" if claimed else "ran"), where
                    else:  # it may have ended, and been cancelled before anybody was told
                        assert again == "duplicate" or told != ["ran"], where
                    assert await shop.deliver(logical_id) == "duplicate", where
                    point += 1
                assert point > 0
