"""Owners of leased claims are killed, slow, or asleep for too long: claim and work agree all the same."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fastapi_dedup import Dedup
from fastapi_dedup.claims import Duplicate
from tests.apps.forked import Forked
from tests.apps.gate import Gate, Visitor, gate
from tests.apps.orders import serve
from tests.crash.places import place
from tests.crash.test_sigkill import KILLED, mortal, retry
from tests.live import Caller, Reply, call, until
from tests.races.shop import Ledger

BACKENDS = ("asyncpg", "asyncmy", "sqlite")
PLACES = (*BACKENDS, "sqlite with redis", pytest.param("asyncpg with redis-cluster", marks=pytest.mark.soak))
ROUNDS, QUICK_ROUNDS = 20, 4
RIVALS = 4
PATIENT = 3.0
"""A lease, in seconds, that a busy machine's event loop does not sleep through."""
PATHS = ("/leased", "/leased-by-handler")


async def kill_and_retry(server: Forked, ledger: Ledger, path: str, point: str, rounds: int) -> None:
    """Kill the owner at a point so many times, and count where claim, work and rivals' answers disagree."""
    done = point == "after_commit"
    disagreements: list[str] = []
    for number in range(rounds):
        sku = f"{path}-{point}-{number}"
        caller = await Caller.connect(server.url)
        with pytest.raises(ConnectionError):
            await caller.call("POST", path, {"sku": sku}, {"Kill-At": point})
        caller.hang_up()
        assert await server.ended() == KILLED
        if (seen := await ledger.holds(sku)) != (int(done), 1):
            disagreements.append(f"{sku}: (rows, claims) = {seen} after the kill")
        server.start()
        replies = await asyncio.gather(*(retry(server.url, path, sku) for _ in range(RIVALS)))
        answers = Counter(reply.problem or str(reply.status) for reply in replies)
        expected = Counter({"duplicate": RIVALS}) if done else Counter({"201": 1, "duplicate": RIVALS - 1})
        if answers != expected or await ledger.holds(sku) != (1, 1):
            disagreements.append(f"{sku}: {await ledger.holds(sku)}, the rivals were told {dict(answers)}")
    print(f"{path}, killed {point}: {rounds} rounds, {len(disagreements)} disagreements")  # noqa: T201
    assert disagreements == []


# case E3
@pytest.mark.parametrize("point", ["after_claim", "after_write", "after_commit"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_claim_of_a_killed_owner_is_taken_over_by_one_after_its_lease(
    backend: str, path: str, point: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_and_retry(server, ledger, path, point, QUICK_ROUNDS if path == "/leased" else 2)


# case E3
@pytest.mark.soak
@pytest.mark.parametrize("point", ["after_claim", "after_write", "after_commit"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("backend", PLACES)
async def test_claim_and_work_agree_after_20_killed_owners_one_after_the_other(
    backend: str, path: str, point: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        await kill_and_retry(server, ledger, path, point, ROUNDS)


# case E3
@pytest.mark.parametrize("backend", PLACES)
async def test_each_of_20_claims_of_a_killed_owner_is_taken_over_by_one_of_its_rivals(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with claimed(backend, request, tmp_path) as scene:
        scene.owner.kill()
        assert await scene.owner.ended() == KILLED
        rivals = [
            asyncio.create_task(retry(scene.rival.url, "/leased", sku))
            for sku in scene.at_gate
            for _ in range(RIVALS)
        ]
        for _ in scene.at_gate:
            await (await scene.gate.visitor()).answer("go")
        told = Counter(reply.problem or str(reply.status) for reply in await asyncio.gather(*rivals))
        assert told == {"201": ROUNDS, "duplicate": ROUNDS * (RIVALS - 1)}
        assert await scene.ledger.holds_in_all() == (ROUNDS, ROUNDS)
        await asyncio.gather(*scene.answers, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Two servers on one database, and handlers of the first that wait at the gate.

    Attributes:
        owner: The server whose handlers have claimed.
        rival: The server that the copies are sent to.
        at_gate: The handlers, by sku.
        answers: What the owner's clients are told in the end.
    """

    owner: Forked
    rival: Forked
    gate: Gate
    ledger: Ledger
    at_gate: dict[str, Visitor]
    answers: list[asyncio.Task[Reply]]

    async def copy(self, sku: str) -> Reply:
        return await call(self.rival.url, "POST", "/leased", {"sku": sku})

    async def told(self) -> Counter[str]:
        replies = await asyncio.gather(*self.answers)
        return Counter(reply.problem or str(reply.status) for reply in replies)


@asynccontextmanager
async def claimed(backend: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Scene]:
    """Have handlers of one server claim `ROUNDS` orders, and wait at the gate."""
    async with (
        gate() as opened,
        place(backend, request, folder, gate=opened.port, lease=PATIENT) as (settings, ledger),
    ):
        owner, rival = Forked(serve, settings), Forked(serve, settings)
        try:
            for server in (owner, rival):
                server.start()
                await call(server.url, "GET", "/ping")
            answers = [
                asyncio.create_task(call(owner.url, "POST", "/leased", {"sku": f"slow-{number}"}))
                for number in range(ROUNDS)
            ]
            visitors = [await opened.visitor() for _ in answers]
            at_gate = {visitor.sku: visitor for visitor in visitors}
            yield Scene(
                owner=owner,
                rival=rival,
                gate=opened,
                ledger=ledger,
                at_gate=at_gate,
                answers=answers,
            )
        finally:
            owner.close()
            rival.close()


# case E3
@pytest.mark.parametrize("backend", PLACES)
async def test_a_live_owner_is_never_robbed_for_as_long_as_its_handler_takes(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with claimed(backend, request, tmp_path) as scene:
        seen: dict[str, set[object]] = {sku: set() for sku in scene.at_gate}
        answers: Counter[str] = Counter()
        while min(map(len, seen.values())) < 7:  # two whole leases and more
            for sku, until_when in (await scene.ledger.leases()).items():
                seen[sku].add(until_when)
            copies = await asyncio.gather(*map(scene.copy, scene.at_gate))
            answers.update(reply.problem or str(reply.status) for reply in copies)
        print(f"{backend}: while {ROUNDS} handlers were slow, copies were told {dict(answers)}")  # noqa: T201
        assert set(answers) == {"in-flight"}
        for visitor in scene.at_gate.values():
            await visitor.answer("go")
        assert await scene.told() == {"201": ROUNDS}
        copies = await asyncio.gather(*map(scene.copy, scene.at_gate))
        assert {reply.problem for reply in copies} == {"duplicate"}
        assert await scene.ledger.holds_in_all() == (ROUNDS, ROUNDS)


# case E3
@pytest.mark.parametrize("backend", PLACES)
async def test_an_owner_that_slept_for_longer_than_its_lease_commits_nothing(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with claimed(backend, request, tmp_path) as scene:
        scene.owner.kill(signal.SIGSTOP)
        thieves = [
            asyncio.create_task(retry(scene.rival.url, "/leased", sku))  # until it is let in
            for sku in scene.at_gate
        ]
        for _ in thieves:
            await (await scene.gate.visitor()).answer("go")
        assert {reply.status for reply in await asyncio.gather(*thieves)} == {201}

        scene.owner.kill(signal.SIGCONT)
        for visitor in scene.at_gate.values():
            await visitor.answer("go")
        assert await scene.told() == {"500": ROUNDS}
        assert await scene.ledger.holds_in_all() == (ROUNDS, ROUNDS)


# cases E3, E4
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_row_left_by_a_dead_owner_is_reaped_or_taken_over_and_never_both(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with mortal(backend, request, tmp_path) as (server, ledger):
        sweeper = Dedup(ledger.engine, reap_every=None)
        for number in range(2):
            sku = f"reaped-{number}"
            caller = await Caller.connect(server.url)
            with pytest.raises(ConnectionError):
                await caller.call("POST", "/leased", {"sku": sku}, {"Kill-At": "after_claim"})
            caller.hang_up()
            assert await server.ended() == KILLED
            server.start()
            reply, _ = await asyncio.gather(retry(server.url, "/leased", sku), _sweep(sweeper))
            assert reply.status == 201
            assert await ledger.holds(sku) == (1, 1)
            intent = sweeper.intent(sku, scope=("POST", "/leased"))
            assert isinstance(await sweeper._store.leases.look(intent), Duplicate)
        await sweeper.stop()


async def _sweep(dedup: Dedup) -> None:
    sweeps = 0

    async def enough() -> bool:
        nonlocal sweeps
        await dedup.reap()
        sweeps += 1
        return sweeps >= 50

    await until(enough)
