"""Duplicates of slow work neither wait for it nor keep a connection from anybody else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.apps.orders import Settings
from tests.databases import BACKENDS, orders_table, url_of
from tests.live import Caller, Reply, process
from tests.races.shop import Ledger

COPIES = 200
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of many copies at once; times are by the clock that every process shares."""

    created: list[Reply]
    refused: list[Reply]
    pinged: list[Reply]
    last_refusal: float
    pings_meanwhile: int

    @property
    def entered(self) -> float:
        """When the one that ran came into its handler."""
        return float(self.created[0].json()["entered"])

    @property
    def left(self) -> float:
        """When it was about to leave it."""
        return float(self.created[0].json()["left"])


async def send_copies(url: str, sku: str) -> Round:
    """Send all copies at once, and ask an unrelated endpoint on the same pool again and again meanwhile."""

    async def copy(caller: Caller) -> tuple[Reply, float]:
        reply = await caller.call("POST", "/slow?seconds=2", {"sku": sku}, {"Idempotency-Key": sku})
        return reply, time.monotonic()

    callers = [await Caller.connect(url) for _ in range(COPIES)]
    pinger = await Caller.connect(url)
    copies = [asyncio.create_task(copy(caller)) for caller in callers]
    pings = []
    while not all(copy.done() for copy in copies):
        pings.append((await pinger.call("GET", "/ping"), time.monotonic()))
        await asyncio.sleep(0.01)
    for caller in (*callers, pinger):
        caller.hang_up()
    answers = [copy.result() for copy in copies]
    created = [reply for reply, _ in answers if reply.status == 201]
    refused = [(reply, at) for reply, at in answers if reply.status != 201]
    last_refusal = max(at for _, at in refused)
    return Round(
        created=created,
        refused=[reply for reply, _ in refused],
        pinged=[reply for reply, _ in pings],
        last_refusal=last_refusal,
        pings_meanwhile=sum(at < last_refusal for _, at in pings),
    )


# case F2, DESIGN.md §4.5
@pytest.mark.parametrize("backend", BACKENDS)
async def test_200_copies_of_a_2_s_handler_get_their_answers_within_a_second_on_a_pool_of_5(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings = Settings(url=url_of(backend, request, tmp_path), pool_size=5)
    async with orders_table(settings.url) as engine:
        ledger = Ledger(engine=engine)
        slowest: list[float] = []
        with process("tests.apps.orders:app", environ=settings.environ()) as server:
            # A copy that waits for the handler or for a connection comes after 2 s in every round; a machine
            # that is busy otherwise may slow one round down.
            while len(slowest) < ROUNDS and min(slowest, default=1.0) >= 1.0:
                sku = f"K{len(slowest)}"
                seen = await send_copies(server.url, sku)

                assert len(seen.created) == 1
                assert len(seen.refused) == COPIES - 1
                assert {(reply.status, reply.problem) for reply in seen.refused} == {(409, "in-flight")}
                assert all(int(reply.headers["retry-after"]) >= 1 for reply in seen.refused)
                assert seen.last_refusal < seen.left
                assert {reply.status for reply in seen.pinged} == {200}
                assert seen.pings_meanwhile >= 1
                assert await ledger.holds(sku) == (1, 1)
                slowest.append(seen.last_refusal - seen.entered)
        print(f"{backend}: from the first handler's entry to the last 409: {slowest} s")  # noqa: T201
        assert min(slowest) < 1.0
