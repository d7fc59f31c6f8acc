"""`dedup.handler`: what comes of a message, as values and errors, and what handlers get. Without a broker.

No `from __future__ import annotations` here: handlers inside of tests could not name what is local to them.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, Optional

import pytest
from fastapi import Depends
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker

from fastapi_dedup import (
    Claim,
    ConfigurationError,
    Dedup,
    Deduplicated,
    DuplicateError,
    StoreUnavailableError,
)
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.faststream import deduplicated as on_faststream
from fastapi_dedup.messaging.handler import Result
from fastapi_dedup.messaging.taskiq import deduplicated as on_taskiq
from fastapi_dedup.policy import Endpoint, Policy
from tests.http.world import Statements, World, add, session_of
from tests.messaging.proxy import Proxy
from tests.messaging.shop import fail, heard

HANDLED, DUPLICATE, IN_FLIGHT = Result.HANDLED, Result.DUPLICATE, Result.IN_FLIGHT
BY_SKU = Deduplicated("body", "sku", scope="orders")
TEA = {"sku": "tea"}


class Shop:
    """A handler that orders; what else its next runs do is up to the test."""

    def __init__(self, world: World, *policies: Deduplicated) -> None:
        self.runs = 0
        self.mishaps: list[Any] = []
        self.handle = world.dedup.handler(*(policies or (BY_SKU,)))(self._order)

    async def _order(self, message: dict[str, str], session: AsyncSession) -> None:
        self.runs += 1
        await add(session, message["sku"])
        if self.mishaps:
            await self.mishaps.pop(0)()


# Outcomes are values


async def test_what_is_handled_and_what_is_a_duplicate_are_values(world: World) -> None:
    shop = Shop(world)
    assert [await shop.handle(TEA), await shop.handle(TEA)] == [HANDLED, DUPLICATE]
    assert (shop.runs, await world.orders(), await world.ids()) == (1, ["tea"], ["tea"])


@pytest.mark.parametrize("fails", [True, False])
async def test_a_copy_in_flight_is_a_value_too_and_runs_later_if_the_original_fails(
    world: World, fails: bool
) -> None:  # case G4, and F1
    shop, entered, ending = Shop(world), asyncio.Event(), asyncio.Event()

    async def end() -> None:
        entered.set()
        await ending.wait()
        if fails:
            await fail()

    shop.mishaps.append(end)
    original = asyncio.create_task(shop.handle(TEA))
    await entered.wait()
    assert await shop.handle(TEA) is IN_FLIGHT
    ending.set()
    await asyncio.wait([original])
    assert isinstance(original.exception(), RuntimeError) is fails
    assert await shop.handle(TEA) is (HANDLED if fails else DUPLICATE)
    assert await world.orders() == ["tea"]


async def test_of_many_at_once_one_is_handled(world: World) -> None:
    shop = Shop(world)
    results = await asyncio.gather(*(shop.handle(TEA) for _ in range(20)))
    assert results.count(HANDLED) == 1
    assert set(results) <= {HANDLED, DUPLICATE, IN_FLIGHT}
    assert (shop.runs, await world.orders()) == (1, ["tea"])


async def test_copies_that_wait_all_learn_the_outcome(world: World) -> None:
    shop = Shop(world, Deduplicated("body", "sku", in_flight="wait"))
    shop.mishaps.append(fail)
    results = await asyncio.gather(*(shop.handle(TEA) for _ in range(20)), return_exceptions=True)
    assert [type(each) for each in results].count(RuntimeError) == 1
    assert (results.count(HANDLED), results.count(DUPLICATE)) == (1, 18)
    assert (shop.runs, await world.orders()) == (2, ["tea"])


async def test_a_copy_waits_for_no_longer_than_it_may_and_then_is_in_flight(world: World) -> None:
    patient = Deduplicated(
        "body", "sku", scope="orders", in_flight="wait", wait_timeout=timedelta(seconds=0.2)
    )
    shop = Shop(world, patient)
    async with world.dedup.claim("tea", scope="orders"):
        assert await shop.handle(TEA) is IN_FLIGHT
    assert (await shop.handle(TEA), shop.runs) == (DUPLICATE, 0)


# Errors are errors


async def test_what_a_handler_raises_comes_through_and_frees_the_id(world: World) -> None:
    # wolverine.md row 15: with the original error and its traceback
    shop = Shop(world)
    shop.mishaps.extend([fail, fail])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="as the test wished") as raised:
            await shop.handle(TEA)
        assert raised.traceback[-1].name == "fail"
        assert (await world.orders(), await world.ids()) == ([], [])
    assert await shop.handle(TEA) is HANDLED
    assert (shop.runs, heard(world, EventKind.RELEASED)) == (3, 2)


async def test_a_handler_that_is_cancelled_frees_the_id(world: World) -> None:
    shop, entered = Shop(world), asyncio.Event()

    async def hang() -> None:
        entered.set()
        await asyncio.Event().wait()

    shop.mishaps.append(hang)
    handling = asyncio.create_task(shop.handle(TEA))
    await entered.wait()
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    assert (await world.orders(), await world.ids()) == ([], [])
    assert await shop.handle(TEA) is HANDLED


async def test_while_the_store_is_down_nothing_runs_and_nothing_is_called_a_duplicate(
    proxied: World, database_proxy: Proxy
) -> None:  # DESIGN.md §4.9
    shop = Shop(proxied)
    assert await shop.handle(TEA) is HANDLED
    database_proxy.go_down()
    for sku in ("tea", "cocoa"):
        with pytest.raises(StoreUnavailableError):
            await shop.handle({"sku": sku})
    assert (shop.runs, heard(proxied, EventKind.UNAVAILABLE), heard(proxied, EventKind.DUPLICATE)) == (
        1,
        2,
        0,
    )
    database_proxy.come_back()
    assert [await shop.handle(TEA), await shop.handle({"sku": "cocoa"})] == [DUPLICATE, HANDLED]


@pytest.mark.parametrize("kind", ["by annotation", "a context manager", "a generator", "a coroutine"])
async def test_a_session_that_cannot_be_opened_is_a_store_that_is_down_and_no_failure_of_the_handler(
    proxied: World, database_proxy: Proxy, kind: str
) -> None:
    # With on_error="reject" an outage would dead-letter what was never tried.
    engine, runs = proxied.dedup.engine, []

    async def generator() -> AsyncIterator[AsyncConnection]:
        async with engine.begin() as connection:
            yield connection

    async def coroutine() -> AsyncConnection:
        return await engine.connect()

    sources = {"a context manager": engine.begin, "a generator": generator, "a coroutine": coroutine}

    @proxied.dedup.handler(Deduplicated("body", "sku", scope="orders", session=sources.get(kind)))
    async def on_order(message: dict[str, str], connection: AsyncConnection) -> None:  # noqa: ARG001 - asked for
        runs.append(message)

    database_proxy.go_down()
    with pytest.raises(StoreUnavailableError, match="session could not be opened") as caught:
        await on_order(TEA)
    assert caught.value.__cause__ is not None
    assert (runs, heard(proxied, EventKind.UNAVAILABLE)) == ([], 1)


async def test_what_a_session_s_own_code_raises_is_no_outage(world: World) -> None:
    async def generator() -> AsyncIterator[AsyncSession]:
        msg = "no tenant"
        raise LookupError(msg)
        yield

    handler = world.dedup.handler(Deduplicated("body", "sku", session=generator))(with_suffix)
    with pytest.raises(LookupError, match="no tenant"):
        await handler(TEA)


async def test_a_duplicate_that_the_handler_itself_meets_is_its_own_error(world: World) -> None:
    @world.dedup.handler(BY_SKU)
    async def on_order(message: dict[str, str], session: AsyncSession) -> None:
        await add(session, message["sku"])
        async with world.dedup.claim("1", scope="invoices"):
            pass

    async with world.dedup.claim("1", scope="invoices"):
        pass
    with pytest.raises(DuplicateError, match="invoices"):
        await on_order(TEA)
    assert (await world.orders(), await world.scopes()) == ([], ["invoices"])


async def test_of_two_policies_a_refused_one_leaves_the_other_s_id_free(world: World) -> None:
    shop = Shop(world, Deduplicated("body", "request"), BY_SKU)
    results = [await shop.handle({"request": request, "sku": "tea"}) for request in ("1", "2")]
    assert results == [HANDLED, DUPLICATE]
    assert await world.ids() == ["1", "tea"]
    assert await shop.handle({"request": "2", "sku": "cocoa"}) is HANDLED


# wolverine.md row 2
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, timedelta(hours=24)),
        ({"window": timedelta(hours=1)}, timedelta(hours=1)),
        ({"source": "delivery"}, timedelta(minutes=5)),
        ({"source": "delivery", "keep_after_handling": timedelta(hours=2)}, timedelta(hours=2)),
    ],
    ids=["the runtime's", "the policy's", "the inbox's", "the policy's for the inbox"],
)
async def test_the_window_is_stored_with_the_claim(
    world: World, options: dict[str, Any], kept: timedelta
) -> None:
    @world.dedup.handler(Deduplicated(**options))
    async def on_order(message: Any, session: AsyncSession) -> None: ...

    assert await on_order(Envelope(b"", {"deduplication-id": "1"}, "m1")) is HANDLED
    (stored,) = await world.column("select expires_at - claimed_at from dedup_claims")
    assert kept <= stored < kept + timedelta(seconds=15)


# The session that the claim is in


async def test_the_handler_s_session_is_the_claim_s(world: World) -> None:
    seen: list[Any] = []

    @world.dedup.handler(BY_SKU)
    async def on_order(message: dict[str, str], claim: Claim, session: AsyncSession) -> None:
        seen.extend((claim.logical_id, claim.scope, claim.session is session))
        await add(session, message["sku"])
        seen.append((await world.orders(), await world.ids()))  # on another connection: nothing yet

    await on_order(TEA)
    assert seen == ["tea", "orders", True, ([], [])]
    assert (await world.orders(), await world.ids()) == (["tea"], ["tea"])


@pytest.mark.parametrize("annotation", [AsyncSession | None, Optional[AsyncSession], "AsyncSession"])  # noqa: UP045
async def test_the_session_s_parameter_is_known_by_its_annotation(world: World, annotation: Any) -> None:
    async def on_order(message: dict[str, str], mine: Any = None) -> None:
        await add(mine, message["sku"])

    on_order.__annotations__["mine"] = annotation
    assert await world.dedup.handler(BY_SKU)(on_order)(TEA) is HANDLED
    assert await world.orders() == ["tea"]


class Subclass(AsyncSession):
    """A session of the app's own kind."""


class Callable:
    """A handler that is an object."""

    async def __call__(self, message: dict[str, str], session: AsyncSession) -> None:
        await add(session, message["sku"])

    async def method(self, message: dict[str, str], session: Subclass, suffix: str = "") -> None:
        await add(session, message["sku"] + suffix)


@pytest.mark.parametrize(
    ("function", "ordered"),
    [
        (Callable(), "tea"),
        (Callable().method, "tea"),
        (partial(Callable().method, suffix="pot"), "teapot"),
    ],
    ids=["an object", "a method", "a partial"],
)
async def test_a_handler_is_whatever_can_be_called(world: World, function: Any, ordered: str) -> None:
    dedup = Dedup(async_sessionmaker(world.engine, class_=Subclass), reap_every=None)
    handler = dedup.handler(BY_SKU, endpoint="orders")(function)
    assert [await handler(TEA), await handler(TEA)] == [HANDLED, DUPLICATE]
    assert await world.orders() == [ordered]


async def with_suffix(message: dict[str, str], session: AsyncSession, suffix: str = "") -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (with_suffix, "with_suffix"),
        (partial(partial(with_suffix, suffix="pot")), "with_suffix"),
        (Callable(), "Callable"),
        (partial(Callable()), "Callable"),
        (Callable().__call__, "Callable.__call__"),
    ],
    ids=["a function", "partials", "an object", "an object's partial", "a method"],
)
async def test_the_default_scope_is_the_same_in_every_process_whatever_is_called(
    world: World, function: Any, name: str
) -> None:
    # The repr of partials and objects holds an address: a scope of that name knows nothing after a restart.
    await world.dedup.handler(Deduplicated("body", "sku"))(function)(TEA)
    assert await world.scopes() == [f"message {__name__}.{name}"]


async def test_what_an_object_that_handles_messages_calls_its_own_stays_its_own(world: World) -> None:
    # Its attributes would take the place of the wrapper's: another runtime, another scope, no policies.
    class Consumer(Callable):
        def __init__(self) -> None:
            self._dedup = self._function = self._endpoint = self._policies = self._session_name = "mine"

    handler: Any = world.dedup.handler(Deduplicated("body", "sku"), endpoint="orders")(Consumer())
    assert [await handler(TEA), await handler(TEA)] == [HANDLED, DUPLICATE]
    assert (await world.orders(), await world.scopes()) == (["tea"], ["message orders"])


async def test_a_handler_may_be_a_method_that_is_decorated_in_its_class(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Consumer:
        def __init__(self, suffix: str) -> None:
            self.suffix = suffix

        @world.dedup.handler(BY_SKU)
        async def on_order(self, message: dict[str, str], session: AsyncSession) -> None:
            await add(session, message["sku"] + self.suffix)

        @world.dedup.handler(Deduplicated("body", "sku", scope="pings"))
        async def on_ping(self, message: dict[str, str]) -> None: ...

    consumer = Consumer("pot")
    assert [await consumer.on_order(TEA), await Consumer("cup").on_order(TEA)] == [HANDLED, DUPLICATE]
    assert [await consumer.on_ping(order) for order in (TEA, {"sku": "cocoa"})] == [HANDLED, HANDLED]
    bound, _ = consumer.on_order, Consumer("cup").on_order
    assert await bound({"sku": "coffee"}) is HANDLED
    assert await Consumer("cup").on_order({"sku": "cocoa"}) is HANDLED
    assert sorted(await world.orders()) == ["cocoacup", "coffeepot", "teapot"]
    assert caplog.text.count("never uses") == 1  # and not as often as it is bound


async def test_a_session_that_the_caller_gives_is_the_one_that_is_ridden(world: World) -> None:
    shop = Shop(world)
    async with world.sessions() as session:
        assert await shop.handle(TEA, session=session) is HANDLED
        assert await world.ids() == []  # the caller has not committed
        await session.rollback()
    async with world.sessions.begin() as session:
        assert await shop.handle(TEA, session=session) is HANDLED
    assert (shop.runs, await world.orders(), await world.ids()) == (2, ["tea"], ["tea"])


@pytest.mark.parametrize(
    "kind", ["generator", "context manager", "sessionmaker", "coroutine", "Depends", "Annotated"]
)
async def test_the_policy_s_session_is_the_one_that_is_ridden(world: World, kind: str) -> None:
    opened: list[AsyncSession] = []

    async def coroutine() -> AsyncSession:
        opened.append(world.sessions())
        return opened[-1]

    sources: dict[str, Any] = {
        "generator": session_of(world),
        "context manager": asynccontextmanager(session_of(world)),
        "sessionmaker": world.sessions.begin,
        "coroutine": coroutine,
        "Depends": Depends(session_of(world)),
        "Annotated": Annotated[AsyncSession, Depends(session_of(world))],
    }

    @world.dedup.handler(Deduplicated("body", "sku", session=sources[kind]))
    async def on_order(message: dict[str, str], session: AsyncSession, claim: Claim) -> None:
        assert claim.session is session
        await add(session, message["sku"])
        if kind == "coroutine":  # whoever only makes a session leaves the COMMIT to the handler
            await session.commit()

    assert [await on_order(TEA), await on_order(TEA)] == [HANDLED, DUPLICATE]
    assert (await world.orders(), await world.ids()) == (["tea"], ["tea"])
    for session in opened:
        await session.close()


async def test_a_session_of_the_app_s_that_fails_to_commit_leaves_the_id_free(
    world: World,
) -> None:  # case A2
    failures = [fail]

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with world.sessions.begin() as session:
            yield session
            if failures:
                await failures.pop()()

    shop = Shop(world, Deduplicated("body", "sku", session=get_session))
    with pytest.raises(RuntimeError):
        await shop.handle(TEA)
    assert (await world.orders(), await world.ids()) == ([], [])
    assert await shop.handle(TEA) is HANDLED


async def test_a_handler_that_commits_mid_way_and_fails_has_its_id_released(world: World) -> None:
    # DESIGN.md §4.3
    @world.dedup.handler(BY_SKU)
    async def on_order(message: dict[str, str], session: AsyncSession) -> None:
        await add(session, message["sku"])
        await session.commit()
        await fail()

    for _ in range(2):
        with pytest.raises(RuntimeError):
            await on_order(TEA)
    assert (await world.orders(), await world.ids()) == (["tea", "tea"], [])


# Handlers that are synchronous, take nothing, or never use the transaction


async def test_a_synchronous_handler_runs_in_a_worker_thread(world: World) -> None:
    threads: list[threading.Thread] = []

    @world.dedup.handler(BY_SKU)
    def on_order(message: dict[str, str], claim: Claim) -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise ValueError(message["sku"], claim.logical_id)

    with pytest.raises(ValueError, match="tea"):
        await on_order(TEA)
    assert [await on_order(TEA), await on_order(TEA)] == [HANDLED, DUPLICATE]
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_what_else_a_handler_takes_comes_from_the_caller(world: World) -> None:
    seen: list[object] = []

    @world.dedup.handler(BY_SKU)
    async def on_order(message: dict[str, str], till: int, session: AsyncSession, *, clerk: str = "") -> None:
        seen.extend((message["sku"], till, clerk, session.in_transaction()))

    assert await on_order(TEA, 3, clerk="anna") is HANDLED
    assert seen == ["tea", 3, "anna", True]


async def test_without_an_id_there_is_a_session_and_no_claim(world: World) -> None:
    seen: list[object] = []

    @world.dedup.handler(Deduplicated(required=False))
    async def on_order(message: Any, session: AsyncSession, claim: Claim | None) -> None:
        seen.append(claim)
        await add(session, message)

    assert [await on_order("tea"), await on_order("tea")] == [HANDLED, HANDLED]
    assert (seen, await world.orders()) == ([None, None], ["tea", "tea"])


async def test_a_handler_that_never_uses_the_claim_s_transaction_is_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    @world.dedup.handler(BY_SKU)
    async def on_order(message: dict[str, str]) -> None: ...

    for sku in ("tea", "cocoa"):
        await on_order({"sku": sku})
    (told,) = [record for record in caplog.records if "never uses" in record.message]
    assert (told.levelno, "on_order" in told.message) == (logging.WARNING, True)


async def test_a_wrapped_handler_keeps_its_name_and_its_function(world: World) -> None:
    async def on_order(message: dict[str, str]) -> None:
        """Order."""

    wrapped: Any = world.dedup.handler(BY_SKU)(on_order)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("on_order", "Order.", on_order)


# Policies over many handlers


async def test_a_required_policy_holds_for_handlers_without_one_and_an_explicit_one_wins(
    world: World,
) -> None:  # wolverine.md row 12
    asked: list[Endpoint] = []

    def of_orders(endpoint: Endpoint) -> bool:
        asked.append(endpoint)
        return endpoint.kind == "message" and endpoint.name.startswith("orders")

    world.dedup.require(of_orders, BY_SKU)
    world.dedup.require(lambda _: True, Deduplicated(scope="others"))

    async def function(message: Any) -> None: ...

    orders = world.dedup.handler(endpoint="orders.eu")(function)
    own = world.dedup.handler(Deduplicated("body", "sku", scope="own"), endpoint="orders.us")(function)
    other = world.dedup.handler(endpoint="invoices")(function)
    for _ in range(2):
        await orders(TEA)
        await own(TEA)
        await other(Envelope(TEA, {"deduplication-id": "1"}))
    assert await world.scopes() == ["orders", "others", "own"]
    assert [(each.name, each.function) for each in asked] == [("orders.eu", function), ("invoices", function)]


async def test_a_handler_that_no_policy_holds_for_says_so_at_its_first_message(world: World) -> None:
    # wolverine.md row 14: the first message, for the rule may be registered after the handler
    world.dedup.require(lambda endpoint: endpoint.name == "invoices", BY_SKU)
    statements = Statements(world.engine)

    @world.dedup.handler(endpoint="orders")
    async def on_order(message: dict[str, str]) -> None: ...

    with pytest.raises(ConfigurationError, match="handler orders has no policy"):
        await on_order(TEA)
    assert statements == []
    world.dedup.require(lambda endpoint: endpoint.name == "orders", BY_SKU)
    assert await on_order(TEA) is HANDLED


@pytest.mark.parametrize(
    ("policy", "message"),
    [(Deduplicated("path", "sku"), "a message has no path"), (Deduplicated(scope=Depends(dict)), "for HTTP")],
    ids=["a path", "a dependency as scope"],
)
async def test_a_required_policy_that_messages_cannot_keep_says_so_at_the_first_message(
    world: World, policy: Deduplicated, message: str
) -> None:
    world.dedup.require(lambda _: True, policy)

    @world.dedup.handler()
    async def on_order(_: Any) -> None:
        pytest.fail("it must not run")

    with pytest.raises(ConfigurationError, match=message):
        await on_order(Envelope(TEA, {"deduplication-id": "1"}))


# What is refused where the handler is made


async def _with_a_request(request: Any) -> Any: ...


async def _with_a_dependency(engine: Any = Depends(_with_a_request)) -> Any: ...  # noqa: B008 - FastAPI's way


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([Deduplicated(scope=Depends(_with_a_request))], "scope=Depends"),
        ([Deduplicated(session=_with_a_request)], "takes request"),
        ([Deduplicated(session=Depends(_with_a_dependency))], "takes engine"),
        ([Policy(session="shop.db")], "cannot be called"),
        (
            [Deduplicated(session=SimpleNamespace), Deduplicated("delivery", session=AsyncSession)],
            "different sessions",
        ),
    ],
    ids=["a dependency as scope", "a request", "a dependency's dependency", "text", "two sessions"],
)
def test_policies_that_messages_cannot_keep_are_refused(
    world: World, policies: list[Policy], message: str
) -> None:
    async def on_order(message: object) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        world.dedup.handler(*policies)(on_order)


async def yielding(message: object) -> AsyncIterator[object]:
    yield message


def yielding_too(message: object) -> Iterator[object]:
    yield message


@pytest.mark.parametrize(
    "decorate",
    [
        lambda dedup: dedup.handler(BY_SKU),
        lambda _: on_faststream(BY_SKU),
        lambda dedup: on_taskiq(dedup, BY_SKU),
    ],
    ids=["handler", "FastStream", "taskiq"],
)
def test_what_would_be_acknowledged_and_never_done_is_no_handler(world: World, decorate: Any) -> None:
    handler = world.dedup.handler(BY_SKU)(with_suffix)
    for function, message in (
        (yielding, "yielding is a generator"),
        (yielding_too, "yielding_too is a generator"),
        (handler, "with_suffix has policies already"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            decorate(world.dedup)(function)


@pytest.mark.parametrize("name", ["AsyncSession", "Claim | None", "sqlalchemy.AsyncSession"])
def test_an_annotation_of_ours_that_only_type_checkers_understand_is_refused(world: World, name: str) -> None:
    async def on_order(message: object, mine: object = None) -> None: ...

    on_order.__annotations__["mine"] = f"TYPE_CHECKING.{name}"
    with pytest.raises(ConfigurationError, match=r"annotation of mine, .* import it at run time"):
        world.dedup.handler(BY_SKU)(on_order)


async def test_other_annotations_that_only_type_checkers_understand_are_left_alone(world: World) -> None:
    async def on_order(message: dict[str, str], session: AsyncSession) -> None:
        await add(session, message["sku"])

    on_order.__annotations__["message"] = "OrderPlaced"
    assert await world.dedup.handler(BY_SKU)(on_order)(TEA) is HANDLED
    assert await world.orders() == ["tea"]


async def test_the_database_decides_and_not_this_process(world: World) -> None:
    """A claim that another process made is a duplicate here, though nobody here has heard of it."""
    async with world.engine.begin() as connection:
        await connection.execute(text("insert into orders (sku) values ('tea')"))
    async with world.dedup.claim("tea", scope="orders"):
        pass
    shop = Shop(World(world.engine, type(world.dedup)(world.engine, reap_every=None)))
    assert (await shop.handle(TEA), shop.runs) == (DUPLICATE, 0)
