"""`Deduplicated(store="memory")`: the guard as the whole store, over HTTP and for messages.

No `from __future__ import annotations`: FastAPI could not resolve what the endpoints' annotations name.
"""

import asyncio
import gc
import logging
import multiprocessing
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import (
    Claim,
    ConfigurationError,
    Dedup,
    Deduplicated,
    DedupMiddleware,
    StoreUnavailableError,
)
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.guard import GenerationalGuard, GuardEvent
from fastapi_dedup.hooks import Event
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware
from fastapi_dedup.messaging.handler import Result
from tests.guard.conftest import WINDOW, Guarded
from tests.guard.doors import SCOPE, Clock, Endpoint, Queries, endpoint, undone
from tests.http.world import KEY, StartUpError, World, add, client, eventually, lifespan
from tests.live import call, live

NOWHERE = "postgresql+asyncpg://nobody@127.0.0.1:1/nothing"
"""A database that nobody has; whoever asks it is refused at once."""

Handled = dict[str, str]

both = pytest.mark.parametrize("door", ["http", "message"])


class Memory:
    """A runtime without a database, and the guards that it has made for its policies."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.told: Counter[GuardEvent] = Counter()
        self.guards: list[GenerationalGuard] = []
        self.max_tracked = 100_000
        self.dedup = Dedup(NOWHERE, reap_every=None, hooks=[self.events.append], memory=self.guard)

    def guard(self) -> GenerationalGuard:
        made = GenerationalGuard(
            WINDOW, self.max_tracked, clock=self.clock, on_event=lambda each: self.told.update([each])
        )
        self.guards.append(made)
        return made

    def kinds(self) -> list[str]:
        kinds = [each.kind.value for each in self.events]
        self.events.clear()
        return kinds


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Yield a runtime without a database; afterwards nothing may still be in flight for its guards."""
    made = Memory()
    yield made
    if any(guard.snapshot().in_flight for guard in made.guards):
        gc.collect()  # a lost attempt gives its mark back when it is collected
    assert [guard.snapshot().in_flight for guard in made.guards] == [0] * len(made.guards)


def behind(door: str, memory: Memory, **options: Any) -> Any:
    """Return an endpoint that needs no database."""
    return endpoint(door, memory.dedup, works=False, store="memory", **options)


async def fail(_: AsyncSession) -> None:
    msg = "the handler failed, as the test wished"
    raise RuntimeError(msg)


async def raise_404(_: AsyncSession) -> None:
    raise HTTPException(404)


async def return_500(_: AsyncSession) -> int:
    return 500


# Duplicates and twins. The database is out of reach, so whoever asked it would be refused.


@both
async def test_a_duplicate_is_refused_without_a_database_and_told_at_debug(
    door: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind(door, memory) as shop:
        assert await shop.deliver("1") == "ran"
        caplog.clear()  # of what start-up had to say
        caplog.set_level(logging.DEBUG, "fastapi_dedup")
        assert [await shop.deliver("1") for _ in range(3)] == ["duplicate"] * 3
        assert await shop.deliver("2") == "ran"
    assert shop.runs == 2
    told = [record for record in caplog.records if record.name == "fastapi_dedup"]
    assert {record.levelno for record in told} == {logging.DEBUG}
    assert "refused logical id '1' in scope 'orders': duplicate" in told[0].message
    assert memory.kinds() == ["claimed", "committed", *["duplicate"] * 3, "claimed", "committed"]


async def test_over_http_a_duplicate_is_409_and_a_twin_in_flight_409_with_retry_after(memory: Memory) -> None:
    gate = Endpoint().gate()
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=memory.dedup)

    @app.post("/orders", dependencies=[Depends(Deduplicated(store="memory"))])
    async def create() -> None:
        await gate.wait()

    async with client(app) as speaking:

        async def post() -> tuple[int, bool]:
            answer = await speaking.post("/orders", json={"sku": "a"}, headers={KEY: "1"})
            return answer.status_code, "retry-after" in answer.headers

        first = asyncio.create_task(post())
        await gate.reached.wait()
        assert await post() == (409, True)
        gate.open()
        assert await first == (200, False)
        assert await post() == (409, False)


@both
async def test_a_twin_in_flight_is_in_flight_and_never_done(door: str, memory: Memory) -> None:
    async with behind(door, memory) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        memory.clock.advance(10 * WINDOW.total_seconds())  # however long the handler takes
        assert await shop.deliver("1") == "in-flight"
        gate.open()
        assert await first == "ran"
        assert await shop.deliver("1") == "duplicate"


@both
@pytest.mark.parametrize("fails", [True, False])
async def test_a_twin_that_waits_learns_the_outcome(door: str, memory: Memory, fails: bool) -> None:
    async with behind(door, memory, in_flight="wait") as shop:
        gate = shop.gate()
        wait = shop.mishaps.pop()

        async def wait_and_end(session: AsyncSession) -> None:
            await wait(session)
            if fails:
                await fail(session)

        shop.mishaps.append(wait_and_end)
        first = shop.delivering("1")
        await gate.reached.wait()
        second = shop.delivering("1")

        async def refused_once() -> bool:
            return memory.guards[0].snapshot().suppressed > 0

        await eventually(refused_once)
        gate.open()
        assert (await first, await second) == (("failed", "ran") if fails else ("ran", "duplicate"))


@both
async def test_of_fifty_at_once_one_runs(door: str, memory: Memory) -> None:
    async with behind(door, memory) as shop:

        async def breathe(_: AsyncSession) -> None:
            await asyncio.sleep(0)

        shop.mishaps += [breathe] * 50
        outcomes = Counter(await asyncio.gather(*(shop.deliver("1") for _ in range(50))))
    assert (shop.runs, outcomes["ran"]) == (1, 1)
    assert outcomes["duplicate"] + outcomes["in-flight"] == 49


# What fails runs again


@pytest.mark.parametrize(
    ("door", "mishap"),
    [("http", fail), ("http", raise_404), ("http", return_500), ("message", fail)],
)
async def test_a_failure_releases_the_id_and_is_told_once(door: str, mishap: Any, memory: Memory) -> None:
    async with behind(door, memory) as shop:
        shop.mishaps.append(mishap)
        assert await shop.deliver("1") == "failed"
        assert memory.kinds() == ["claimed", "released"]
        assert await shop.deliver("1") == "ran"
        assert await shop.deliver("1") == "duplicate"


@both
async def test_a_cancellation_releases_the_id(door: str, memory: Memory) -> None:
    async with behind(door, memory) as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert memory.kinds() == ["claimed", "released"]
        assert await shop.deliver("1") == "ran"


async def test_an_app_that_never_responds_has_failed(memory: Memory) -> None:
    deaf = True

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        if not deaf:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

    policy = Deduplicated(store="memory", methods=["POST"])
    middleware = DedupMiddleware(app, dedup=memory.dedup, policy=policy)
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "root_path": ""}
    headers = [(KEY.lower().encode(), b"1")]

    async def ask() -> list[int]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: Any) -> None:
            sent.append(message)

        await middleware({**scope, "headers": headers}, receive, send)
        return [message["status"] for message in sent if "status" in message]

    assert await ask() == []
    deaf = False
    assert [await ask(), await ask()] == [[200], [409]]


# What is an id


@both
async def test_another_payload_under_the_id_of_finished_work_is_a_mismatch(door: str, memory: Memory) -> None:
    # case D3
    async with behind(door, memory) as shop:
        assert await shop.deliver("1", "tea") == "ran"
        assert await shop.deliver("1", "cocoa") == "fingerprint-mismatch"
        assert await shop.deliver("1", "tea") == "duplicate"
    assert shop.runs == 1


@both
async def test_another_payload_under_an_id_in_flight_is_a_mismatch(door: str, memory: Memory) -> None:
    # case D3
    async with behind(door, memory) as shop:
        gate = shop.gate()
        first = shop.delivering("1", "tea")
        await gate.reached.wait()
        assert await shop.deliver("1", "cocoa") == "fingerprint-mismatch"
        assert await shop.deliver("1", "tea") == "in-flight"
        gate.open()
        assert await first == "ran"
    assert shop.runs == 1


@both
async def test_without_a_fingerprint_the_payload_does_not_matter(door: str, memory: Memory) -> None:
    async with behind(door, memory, fingerprint=False) as shop:
        assert await shop.deliver("1", "tea") == "ran"
        assert await shop.deliver("1", "cocoa") == "duplicate"


async def test_a_message_that_fans_out_runs_at_both_queues(memory: Memory) -> None:
    # case G1
    runs: list[bytes] = []

    @memory.dedup.handler(Deduplicated("delivery", store="memory", keep_after_handling=WINDOW))
    async def on_message(message: bytes) -> None:
        runs.append(message)

    for queue in ("invoices", "stock"):
        message = Envelope(b"", delivery_id="m-1", destination=queue)
        assert [await on_message(message), await on_message(message)] == [Result.HANDLED, Result.DUPLICATE]
    assert len(runs) == 2


# Whose guard it is


@both
async def test_the_guard_is_the_policys_and_survives_a_consumer_that_is_built_anew(
    door: str, memory: Memory
) -> None:
    for outcome in ("ran", "duplicate", "duplicate"):
        async with behind(door, memory) as shop:  # each with a policy of its own, all equal
            assert await shop.deliver("1") == outcome
    assert len(memory.guards) == 1


@both
async def test_a_flood_under_one_policy_evicts_no_id_of_another(door: str, memory: Memory) -> None:
    memory.max_tracked = 4
    async with behind(door, memory) as shop, behind(door, memory, scope="returns") as returns:
        assert await shop.deliver("1") == "ran"
        for number in range(20):
            assert await returns.deliver(str(number)) == "ran"
        assert await shop.deliver("1") == "duplicate"
        assert await returns.deliver("0") == "ran"  # its own flood it has to bear itself
    assert memory.told[GuardEvent.ROTATED_EARLY] > 0
    assert memory.told[GuardEvent.SUPPRESSED] == 1
    assert [guard.snapshot().tracked <= 4 for guard in memory.guards] == [True, True]


async def test_the_middlewares_own_policy_has_one_memory_whatever_a_route_leaves_to_it(
    memory: Memory,
) -> None:
    app = FastAPI()
    policy = Deduplicated(scope=SCOPE, store="memory", methods=("POST", "PATCH"))
    app.add_middleware(DedupMiddleware, dedup=memory.dedup, policy=policy)
    app.post("/orders")(lambda: None)
    app.patch("/orders")(lambda: None)
    app.api_route("/returns", methods=["POST", "PATCH"])(lambda: None)
    async with client(app) as speaking:
        answers = [
            await speaking.request(method, path, headers={KEY: "1"})
            for path in ("/orders", "/returns")
            for method in ("POST", "PATCH")
        ]
    assert [answer.status_code for answer in answers] == [200, 409, 409, 409]


async def test_two_runtimes_do_not_share_a_guard() -> None:
    for memory in (Memory(), Memory()):
        async with behind("message", memory) as shop:
            assert await shop.deliver("1") == "ran"


@both
async def test_the_guard_in_front_of_the_database_knows_nothing_of_it(door: str, world: Guarded) -> None:
    async with endpoint(door, world.dedup, works=False, store="memory") as shop:
        await shop.deliver("1")
        world.clock.advance(WINDOW.total_seconds())
        assert await shop.deliver("1") == "duplicate"
    snapshot = world.guard.snapshot()
    assert (snapshot.tracked, snapshot.suppressed) == (0, 0)


@both
async def test_a_database_in_reach_is_asked_nothing_either(door: str, world: Guarded) -> None:
    async with endpoint(door, world.dedup, works=False, store="memory") as shop:
        queries = Queries(world.engine)
        assert [await shop.deliver("1"), await shop.deliver("1")] == ["ran", "duplicate"]
        assert queries == []


async def test_a_claim_in_memory_is_not_the_databases_claim_on_the_same_id(world: World) -> None:
    seen = []

    @world.dedup.handler(
        Deduplicated("header", KEY, scope=SCOPE, store="memory"), Deduplicated("header", KEY, scope=SCOPE)
    )
    async def on_order(message: Handled) -> None:
        seen.append(message["sku"])

    message = Envelope({"sku": "tea"}, {KEY: "1"})
    assert [await on_order(message), await on_order(message)] == [Result.HANDLED, Result.DUPLICATE]
    assert (seen, await world.ids()) == (["tea"], ["1"])
    async with world.engine.begin() as connection:
        await connection.execute(text("delete from dedup_claims"))
    assert await on_order(message) is Result.DUPLICATE  # which memory alone knows


# How long


@both
async def test_an_id_is_kept_for_the_guards_window_at_the_most(door: str, memory: Memory) -> None:
    async with behind(door, memory) as shop:
        await shop.deliver("1")
        memory.clock.advance(WINDOW.total_seconds() - 0.001)
        assert await shop.deliver("1") == "duplicate"
        memory.clock.advance(0.001)
        assert await shop.deliver("1") == "ran"


@both
async def test_a_policys_own_window_may_be_shorter(door: str, memory: Memory) -> None:
    async with (
        behind(door, memory, window=timedelta(seconds=20)) as shop,
        behind(door, memory, scope="returns") as returns,
    ):
        for each in (shop, returns):
            await each.deliver("1")
        memory.clock.advance(19.999)
        assert await shop.deliver("1") == "duplicate"
        memory.clock.advance(0.001)
        assert [await shop.deliver("1"), await returns.deliver("1")] == ["ran", "duplicate"]


async def test_the_claim_tells_its_window_and_has_the_handlers_session(memory: Memory) -> None:
    seen: list[tuple[str, timedelta, bool]] = []
    policy = Deduplicated("header", KEY, store="memory", window=timedelta(seconds=20))

    @memory.dedup.handler(policy)
    async def on_order(message: Handled, session: AsyncSession, claim: Claim) -> None:
        seen.append((message["sku"], claim.expires_at - claim.claimed_at, claim.session is session))

    await on_order(Envelope({"sku": "tea"}, {KEY: "1"}))
    assert seen == [("tea", timedelta(seconds=20), True)]


LONGER = timedelta(hours=24)


async def test_a_longer_window_than_the_guards_is_refused_when_the_app_starts(memory: Memory) -> None:
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=memory.dedup)

    @app.post("/orders", dependencies=[Depends(Deduplicated(store="memory", window=LONGER))])
    async def create() -> None: ...

    with pytest.raises(StartUpError) as refused:
        async with lifespan(app):
            pass
    assert str(refused.value).startswith("POST /orders: store='memory' keeps an id for 0:01:00 at the most")
    assert all(part in str(refused.value) for part in ("window is 1 day, 0:00:00", "Dedup(memory=lambda:"))


async def test_so_it_is_where_it_is_required_or_the_middlewares_own(memory: Memory) -> None:
    policy = Deduplicated(store="memory", window=LONGER)
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=memory.dedup)
    memory.dedup.require(lambda endpoint: endpoint.kind == "http", policy)
    app.post("/orders")(lambda: None)
    with pytest.raises(StartUpError, match="keeps an id for 0:01:00"):
        async with lifespan(app):
            pass
    with pytest.raises(ConfigurationError, match="keeps an id for 0:01:00"):
        DedupMiddleware(app, dedup=memory.dedup, policy=policy)


@pytest.mark.parametrize(
    ("policy", "option"),
    [
        (Deduplicated("header", store="memory", window=LONGER), "window"),
        (Deduplicated("delivery", store="memory", keep_after_handling=LONGER), "keep_after_handling"),
    ],
)
async def test_and_where_a_handler_is_decorated(memory: Memory, policy: Deduplicated, option: str) -> None:
    async def on_order(message: Handled) -> None: ...

    with pytest.raises(ConfigurationError, match=f"the policy's {option} is 1 day"):
        memory.dedup.handler(policy)(on_order)
    with pytest.raises(ConfigurationError, match=f"the policy's {option} is 1 day"):
        DeduplicatingMiddleware(memory.dedup, policy)
    memory.dedup.require(lambda endpoint: endpoint.kind == "message", policy)
    with pytest.raises(ConfigurationError, match=f"the policy's {option} is 1 day"):
        await memory.dedup.handler()(on_order)(Envelope({}, {KEY: "1"}))


@pytest.mark.parametrize("guard", [GenerationalGuard, True, 300])
def test_what_is_no_guard_is_refused_as_the_one_in_front(guard: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"guard= takes a GenerationalGuard\(\.\.\.\), not "):
        Dedup(NOWHERE, guard=guard)


@pytest.mark.parametrize("made", [GenerationalGuard(), None, 5, dict])
def test_what_makes_no_guards_is_refused_as_memory(made: Any) -> None:
    # One guard would be shared by policies whose windows differ, and a flood under one would evict all.
    with pytest.raises(ConfigurationError, match="memory= takes a callable that makes a GenerationalGuard"):
        Dedup(NOWHERE, memory=made).prepare(Deduplicated(store="memory"))


async def test_the_default_guard_keeps_what_the_default_options_ask() -> None:
    dedup = Dedup(NOWHERE)
    assert dedup._memories.of(Deduplicated("delivery", store="memory"))._guard.window == timedelta(minutes=5)
    assert dedup._memories.of(Deduplicated(store="memory"))._guard.window == timedelta(minutes=5)


# When it is remembered


async def test_a_response_does_not_wait_for_its_background_task(memory: Memory) -> None:
    gate = Endpoint().gate()
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=memory.dedup)

    @app.post("/orders", dependencies=[Depends(Deduplicated(store="memory"))])
    async def create(tasks: BackgroundTasks) -> None:
        tasks.add_task(gate.wait)

    async with live(app) as url:
        first = await call(url, "POST", "/orders", {"sku": "a"}, {KEY: "1"})
        await gate.reached.wait()
        second = await call(url, "POST", "/orders", {"sku": "a"}, {KEY: "1"})
        gate.open()
    assert (first.status, second.status, second.problem) == (200, 409, "duplicate")


async def test_a_stream_is_no_reason_to_warn(memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=memory.dedup)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"chunk"
            await asyncio.sleep(0)

    @app.post("/orders", dependencies=[Depends(Deduplicated(store="memory"))])
    async def create() -> StreamingResponse:
        return StreamingResponse(chunks())

    async with client(app) as speaking:
        caplog.clear()
        first = await speaking.post("/orders", json={"sku": "a"}, headers={KEY: "1"})
        second = await speaking.post("/orders", json={"sku": "a"}, headers={KEY: "1"})
    assert (first.content, second.status_code) == (b"chunk" * 3, 409)
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_commit_that_fails_in_the_session_that_the_policy_names_releases_the_id(world: World) -> None:
    async with endpoint("own session", world.dedup, store="memory") as shop:

        async def fail_at_commit(session: AsyncSession) -> None:
            @event.listens_for(session.sync_session, "before_commit")
            def _(_: object) -> None:
                msg = "the COMMIT failed, as the test wished"
                raise RuntimeError(msg)

        shop.mishaps.append(fail_at_commit)
        assert await shop.deliver("1") == "failed"
        assert await shop.deliver("1") == "ran"
        assert await shop.deliver("1") == "duplicate"
    assert await world.orders() == ["tea"]


async def test_a_commit_of_the_requests_own_session_that_fails_releases_the_id(world: World) -> None:
    async with endpoint("http", world.dedup, store="memory") as shop:

        async def break_the_session(session: AsyncSession) -> None:
            event.listen(session.sync_session, "before_commit", lambda _: 1 / 0)

        shop.mishaps.append(break_the_session)
        assert await shop.deliver("1") == "failed"
        assert [await shop.deliver("1"), await shop.deliver("1")] == ["ran", "duplicate"]
    assert await world.orders() == ["tea"]


async def test_in_a_session_of_the_callers_it_is_remembered_when_the_caller_commits(world: World) -> None:
    @world.dedup.handler(Deduplicated("header", KEY, store="memory"))
    async def on_order(message: Handled, session: AsyncSession) -> None:
        await add(session, message["sku"])

    message = Envelope({"sku": "tea"}, {KEY: "1"})
    for commits, twin in ((False, Result.IN_FLIGHT), (True, Result.IN_FLIGHT)):
        async with world.sessions() as session:
            assert await on_order(message, session=session) is Result.HANDLED
            assert await on_order(message) is twin
            await (session.commit() if commits else session.rollback())
    assert await on_order(message) is Result.DUPLICATE
    assert await world.orders() == ["tea"]


async def test_a_handler_that_commits_and_reads_on_is_remembered_though_nobody_commits_the_reading(
    world: World,
) -> None:
    async def begin_anew_commit_and_read(session: AsyncSession) -> None:
        await session.commit()
        await session.scalar(text("select count(*) from orders"))

    @world.dedup.handler(Deduplicated("header", KEY, store="memory"))
    async def on_order(message: Handled, session: AsyncSession) -> None:
        await add(session, message["sku"])
        await begin_anew_commit_and_read(session)

    message = Envelope({"sku": "tea"}, {KEY: "1"})
    for expected in (Result.HANDLED, Result.DUPLICATE):
        async with world.sessions() as session:
            assert await on_order(message, session=session) is expected
    async with endpoint("own session", world.dedup, store="memory") as shop:
        shop.mishaps.append(begin_anew_commit_and_read)
        assert [await shop.deliver("1"), await shop.deliver("1")] == ["ran", "duplicate"]
    assert await world.orders() == ["tea", "tea"]


async def test_a_claim_in_memory_is_not_remembered_where_the_databases_claim_beside_it_is_lost(
    world: World,
) -> None:
    closes = [True]

    @world.dedup.handler(Deduplicated("header", "X-Id", store="memory"), Deduplicated("header", KEY))
    async def on_order(message: Handled, session: AsyncSession) -> None:
        await add(session, message["sku"])
        if closes and closes.pop():
            await session.close()

    message = Envelope({"sku": "tea"}, {KEY: "1", "X-Id": "1"})
    async with world.sessions() as session:
        with pytest.raises(ClaimLostError):
            await on_order(message, session=session)
        assert await on_order(message, session=session) is Result.HANDLED
        await session.commit()
        assert await on_order(message, session=session) is Result.DUPLICATE
    assert await world.orders() == ["tea"]


async def test_nor_where_another_sessions_commit_fails_that_a_claim_of_the_same_request_rides(
    world: World,
) -> None:
    fails = [True]

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions() as session:
            yield session
            if fails and fails.pop():
                event.listen(session.sync_session, "before_commit", lambda _: 1 / 0)
            await session.commit()

    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=world.dedup, header=None)
    policies = [
        Depends(Deduplicated("header", "X-Id", store="memory")),
        Depends(Deduplicated("header", KEY, session=get_session)),
    ]

    @app.post("/orders", dependencies=policies)
    async def create(session: Annotated[AsyncSession, Depends(get_session)]) -> None:
        await add(session, "tea")

    async with client(app) as speaking:
        answers = [await speaking.post("/orders", headers={KEY: "1", "X-Id": "1"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 200, 409]
    assert await world.orders() == ["tea"]


async def test_what_is_committed_into_a_transaction_of_the_callers_is_not_remembered(world: World) -> None:
    @world.dedup.handler(Deduplicated("header", KEY, store="memory"))
    async def on_order(message: Handled, session: AsyncSession) -> None:
        await add(session, message["sku"])
        await session.commit()

    message = Envelope({"sku": "tea"}, {KEY: "1"})
    for _ in range(2):
        async with undone(world.engine) as session:
            assert await on_order(message, session=session) is Result.HANDLED


# By hand


@both
async def test_a_release_forgets_the_id_and_no_other(door: str, world: Guarded) -> None:
    async with endpoint(door, world.dedup, works=False, store="memory") as shop:
        for logical_id in ("1", "2"):
            await shop.deliver(logical_id)
        assert await world.dedup.release("1", scope=SCOPE)
        assert not await world.dedup.release("1", scope=SCOPE)
        assert [await shop.deliver("1"), await shop.deliver("2")] == ["ran", "duplicate"]


@both
async def test_a_release_does_so_even_where_no_database_answers(door: str, memory: Memory) -> None:
    async with behind(door, memory) as shop:
        await shop.deliver("1")
        with pytest.raises(StoreUnavailableError):
            await memory.dedup.release("1", scope=SCOPE)
        assert await shop.deliver("1") == "ran"


@both
async def test_an_id_in_flight_stays_so_when_it_is_released(door: str, world: Guarded) -> None:
    async with endpoint(door, world.dedup, works=False, store="memory") as shop:
        gate = shop.gate()
        first = shop.delivering("1")
        await gate.reached.wait()
        assert not await world.dedup.release("1", scope=SCOPE)
        assert await shop.deliver("1") == "in-flight"
        gate.open()
        assert [await first, await shop.deliver("1")] == ["ran", "ran"]


# Start-up


async def test_a_database_that_does_not_answer_is_a_warning_at_start_up(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    async with behind("http", memory) as shop:
        assert await shop.deliver("1") == "ran"
    (warned,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "does not answer; claims are refused until it does" in warned.message


async def test_a_database_without_the_table_of_claims_is_an_error_at_start_up(tmp_path: Any) -> None:
    # DESIGN.md §3: the runtime cannot know that nobody will claim in it.
    dedup = Dedup(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}", reap_every=None)
    with pytest.raises(StartUpError, match=r"create it with Dedup\(\.\.\., create_table=True\)"):
        async with endpoint("http", dedup, works=False, store="memory"):
            pass


async def test_a_handler_that_takes_no_session_is_no_reason_to_warn(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    @memory.dedup.handler(Deduplicated("header", KEY, store="memory"))
    async def on_order(message: Handled) -> None: ...

    assert await on_order(Envelope({}, {KEY: "1"})) is Result.HANDLED
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


# Siblings


@pytest.mark.parametrize(
    ("variable", "value", "warns"),
    [
        ("WEB_CONCURRENCY", "4", True),
        ("SERVER_SOFTWARE", "gunicorn/23.0.0", True),
        ("WEB_CONCURRENCY", "1", False),
        ("WEB_CONCURRENCY", "", False),
        ("SERVER_SOFTWARE", "uvicorn", False),
    ],
)
async def test_several_workers_are_warned_of_their_siblings_once(
    variable: str, value: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, value)
    dedup = Dedup(NOWHERE)
    for scope in ("orders", "returns"):
        dedup.prepare(Deduplicated(store="memory", scope=scope))
    assert ["siblings do not know" in record.message for record in caplog.records] == [True] * warns


def warned_in_a_child(results: Any) -> None:
    """Make a memory in a process that `multiprocessing` has started, as uvicorn's workers are."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fastapi_dedup").addHandler(handler)
    Dedup(NOWHERE).prepare(Deduplicated(store="memory"))
    results.put(records)


def test_so_is_a_process_that_another_python_has_started() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=warned_in_a_child, args=(results,))
    child.start()
    (record,) = results.get(timeout=60)
    child.join()
    assert "siblings do not know" in record
