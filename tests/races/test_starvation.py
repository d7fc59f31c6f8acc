"""Duplicates of slow work neither wait for it nor keep a connection from anybody else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.apps.orders import Settings
from tests.databases import BACKENDS, mariadb, orders_table, url_of
from tests.live import Caller, Reply, process
from tests.races.shop import Ledger

COPIES = 200
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of many copies at once; times are in seconds, by the clock that every process shares.

    Attributes:
        created: The answers of those that ran.
        refused: The answers of those that did not.
        pinged: The answers of an unrelated endpoint on the same pool, which was asked meanwhile.
        last_refusal: When the last refusal was there.
        pings_meanwhile: How many pings were answered before that.
        pace: How long the machine takes just now to answer as many pings at once.
    """

    created: list[Reply]
    refused: list[Reply]
    pinged: list[Reply]
    last_refusal: float
    pings_meanwhile: int
    pace: float

    @property
    def entered(self) -> float:
        """When the one that ran came into its handler."""
        return float(self.created[0].json()["entered"])

    @property
    def left(self) -> float:
        """When it was about to leave it."""
        return float(self.created[0].json()["left"])


async def send_copies(url: str, sku: str) -> Round:
    """Send all copies at once, and ask an unrelated endpoint again and again meanwhile."""

    async def copy(caller: Caller) -> tuple[Reply, float]:
        reply = await caller.call("POST", "/slow?seconds=2", {"sku": sku}, {"Idempotency-Key": sku})
        return reply, time.monotonic()

    callers = [await Caller.connect(url) for _ in range(COPIES)]
    pinger = await Caller.connect(url)
    for _ in range(2):  # the first time opens the pool's connections
        began = time.monotonic()
        await asyncio.gather(*(caller.call("GET", "/ping") for caller in callers))
        pace = time.monotonic() - began

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
        pace=pace,
    )


# case F2, DESIGN.md §4.5
@pytest.mark.parametrize("backend", [*BACKENDS, *mariadb()])
async def test_200_copies_of_a_2_s_handler_get_their_answers_within_a_second_on_a_pool_of_5(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    settings = Settings(url=url_of(backend, request, tmp_path), pool_size=5)
    async with orders_table(settings.url) as engine:
        ledger = Ledger(engine=engine)
        with process("tests.apps.orders:app", environ=settings.environ()) as server:
            # A copy that waits for the handler, or for a connection that a copy holds, waits in every round;
            # a machine that is busy with something else slows down one, and its pings with it.
            for number in range(ROUNDS):
                sku = f"K{number}"
                seen = await send_copies(server.url, sku)

                assert len(seen.created) == 1
                assert len(seen.refused) == COPIES - 1
                assert {reply.status for reply in seen.refused} == {409}
                assert {reply.status for reply in seen.pinged} == {200}
                assert await ledger.holds(sku) == (1, 1)

                took, limit = seen.last_refusal - seen.entered, max(1.0, 2 * seen.pace)
                print(f"{backend}: the last 409 came after {took:.3f} s of at most {limit:.3f} s")  # noqa: T201
                if took < limit and seen.last_refusal < seen.left:
                    break
            else:
                pytest.fail(f"in {ROUNDS} rounds, the last 409 never came in time: {took} s of {limit} s")

        assert {reply.problem for reply in seen.refused} == {"in-flight"}
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in seen.refused)
        assert seen.pings_meanwhile >= 1
