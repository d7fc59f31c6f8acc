"""taskiq: the decorator and the stamping middleware, on its in-memory broker, which has a real receiver."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from taskiq import (
    AckableMessage,
    Context,
    InMemoryBroker,
    SimpleRetryMiddleware,
    TaskiqDepends,
    TaskiqMessage,
    TaskiqResult,
)

from fastapi_dedup import (
    Claim,
    ConfigurationError,
    Deduplicated,
    InvalidLogicalIdError,
    MissingLogicalIdError,
)
from fastapi_dedup.errors import FingerprintMismatchError
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.identities import DeduplicationIdentity, Identities, deduplication_identity
from fastapi_dedup.messaging.taskiq import OUTCOME_LABEL, StampingMiddleware, deduplicated
from fastapi_dedup.policy import Policy
from tests.http.world import World, add, session_of
from tests.live import until
from tests.messaging.shop import PAUSE, Clock, Thread, fail, heard, until_heard

BY_SKU = Deduplicated(source="body", member="sku")


class Shop:
    """A broker with one task, which orders.

    Attributes:
        runs: How often the task was entered.
        mishaps: What happens at the end of the next runs.
    """

    def __init__(self, world: World, *policies: Policy, broker: InMemoryBroker | None = None) -> None:
        self.broker = broker or InMemoryBroker()
        self.runs = 0
        self.mishaps: list[Any] = []

        @self.broker.task("order")
        @deduplicated(world.dedup, *policies, pause=PAUSE)
        async def order(sku: str, session: AsyncSession) -> str:
            self.runs += 1
            await add(session, sku)
            if self.mishaps:
                await self.mishaps.pop(0)()
            return f"ordered {sku}"

        self._order: Any = order

    async def order(self, sku: str, task_id: str | None = None, **labels: str) -> TaskiqResult[Any]:
        """Kick the task, and wait for its result; `_` in the labels' names stands for `-`."""
        kicker = self._order.kicker().with_labels(
            **{name.replace("_", "-"): value for name, value in labels.items()}
        )
        task = await (kicker.with_task_id(task_id) if task_id else kicker).kiq(sku)
        result: TaskiqResult[Any] = await task.wait_result(check_interval=0.01, timeout=30)
        return result


# What becomes of a task


async def test_a_task_that_is_kicked_twice_is_run_once_and_both_succeed(world: World) -> None:
    shop = Shop(world, BY_SKU)
    first, second = await shop.order("tea"), await shop.order("tea")
    assert (first.return_value, first.labels) == ("ordered tea", {})
    assert (second.return_value, second.is_err) == (None, False)
    assert second.labels == {OUTCOME_LABEL: "duplicate"}
    assert (await world.orders(), await world.scopes(), shop.runs) == (["tea"], ["message order"], 1)


async def test_a_message_that_is_delivered_twice_keeps_the_task_s_own_result(world: World) -> None:
    shop = Shop(world, BY_SKU)
    await shop.order("tea", task_id="t1")
    await shop.order("tea", task_id="t1")
    await shop.broker.wait_all()
    assert heard(world, EventKind.DUPLICATE) == 1
    kept = await shop.broker.result_backend.get_result("t1")
    assert (kept.return_value, shop.runs) == ("ordered tea", 1)


async def test_a_copy_in_flight_is_kicked_anew_and_runs_if_the_original_fails(
    world: World,
) -> None:  # case G4
    shop = Shop(world, Deduplicated(scope="orders"))
    with pytest.raises(RuntimeError):
        async with world.dedup.claim("1", scope="orders"):
            kicked = await shop._order.kicker().with_labels(**{"deduplication-id": "1"}).kiq("tea")
            await until_heard(world, EventKind.IN_FLIGHT, 2)
            assert not await kicked.is_ready()
            await fail()
    result = await kicked.wait_result(check_interval=0.01, timeout=30)
    assert result.return_value == "ordered tea"
    assert (await world.orders(), shop.runs) == (["tea"], 1)


async def test_a_copy_in_flight_whose_original_succeeds_is_a_duplicate_in_the_end(world: World) -> None:
    shop = Shop(world, Deduplicated(scope="orders"))
    async with world.dedup.claim("1", scope="orders"):
        kicked = await shop._order.kicker().with_labels(**{"deduplication-id": "1"}).kiq("tea")
        await until_heard(world, EventKind.IN_FLIGHT)
    result = await kicked.wait_result(check_interval=0.01, timeout=30)
    assert (result.labels[OUTCOME_LABEL], result.is_err, shop.runs) == ("duplicate", False, 0)


async def test_what_a_task_raises_is_its_result_and_its_id_is_free(world: World) -> None:
    shop = Shop(world, BY_SKU)
    shop.mishaps.append(fail)
    failed = await shop.order("tea")
    assert isinstance(failed.error, RuntimeError)
    assert (await world.orders(), await world.ids()) == ([], [])
    assert (await shop.order("tea")).return_value == "ordered tea"
    assert await world.orders() == ["tea"]


async def test_a_retry_of_taskiq_s_runs(world: World) -> None:
    broker = InMemoryBroker().with_middlewares(SimpleRetryMiddleware(default_retry_label=True))
    shop = Shop(world, BY_SKU, broker=broker)
    shop.mishaps.extend([fail, fail])
    assert (await shop.order("tea")).return_value == "ordered tea"
    assert (await world.orders(), shop.runs) == (["tea"], 3)


@pytest.mark.parametrize(
    ("labels", "error"),
    [({}, MissingLogicalIdError), ({"deduplication_id": "9" * 256}, InvalidLogicalIdError)],
)
async def test_a_task_without_a_legal_id_fails_and_is_not_retried(
    world: World, labels: dict[str, str], error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    broker = InMemoryBroker().with_middlewares(SimpleRetryMiddleware(default_retry_label=True))
    shop = Shop(world, Deduplicated(), broker=broker)
    result = await shop.order("tea", task_id="t1", **labels)
    await broker.wait_all()
    assert isinstance(result.error, error)
    assert "refused task 't1' of order: " in caplog.text
    assert (shop.runs, heard(world, EventKind.MISSING) + heard(world, EventKind.INVALID)) == (0, 1)


async def test_an_id_that_was_used_for_other_arguments_fails(world: World) -> None:
    shop = Shop(world, Deduplicated(fingerprint=True))
    assert not (await shop.order("tea", deduplication_id="1")).is_err
    assert (await shop.order("tea", deduplication_id="1")).labels[OUTCOME_LABEL] == "duplicate"
    assert isinstance((await shop.order("cocoa", deduplication_id="1")).error, FingerprintMismatchError)
    assert await world.orders() == ["tea"]


async def test_while_the_database_is_down_a_task_is_kicked_anew_and_not_run(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(world, BY_SKU)
    async with world.engine.begin() as connection:
        await connection.execute(text("alter table dedup_claims rename to gone"))
    kicked = await shop._order.kiq("tea")

    async def put_off() -> bool:
        return "comes again" in caplog.text

    await until(put_off)
    async with world.engine.begin() as connection:
        await connection.execute(text("alter table gone rename to dedup_claims"))
    result = await kicked.wait_result(check_interval=0.01, timeout=30)
    assert (result.return_value, await world.orders()) == ("ordered tea", ["tea"])
    assert shop.runs == 1


async def test_pauses_grow_with_an_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.engine.begin() as connection:
        await connection.execute(text("alter table dedup_claims rename to gone"))

    class UntilItIsOver(Clock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            if len(self.slept) == 3:
                async with world.engine.begin() as connection:
                    await connection.execute(text("alter table gone rename to dedup_claims"))

    clock = UntilItIsOver(4, 60, 60)
    clock.rule(monkeypatch, "taskiq")
    assert (await Shop(world, BY_SKU).order("tea")).return_value == "ordered tea"
    assert clock.slept == [PAUSE.total_seconds(), 4, 30]


async def test_an_error_of_ours_that_a_task_raises_is_the_task_s(world: World) -> None:
    async def misconfigured() -> None:
        raise ConfigurationError("mine")

    shop = Shop(world, BY_SKU)
    shop.mishaps.append(misconfigured)
    assert str((await shop.order("tea")).error) == "mine"
    assert shop.runs == 1


async def test_a_task_is_acknowledged_after_its_commit_and_a_duplicate_too(world: World) -> None:  # case G3
    shop = Shop(world, BY_SKU)
    told: list[list[str]] = []

    async def ack() -> None:
        told.append(await world.orders())

    await shop._order.kicker().with_task_id("t1").kiq("tea")
    await shop.broker.wait_all()
    message = shop._order.kicker().with_task_id("t2")._prepare_message("cocoa")
    data = shop.broker.formatter.dumps(message).message
    for _ in range(2):
        await shop.broker.receiver.callback(AckableMessage(data=data, ack=ack))
    assert told == [["tea", "cocoa"]] * 2


# Ids and scopes


@pytest.mark.parametrize("by_name", [True, False])
async def test_an_argument_is_the_id_however_it_is_passed(world: World, by_name: bool) -> None:
    shop = Shop(world, BY_SKU)
    kicked = await (shop._order.kiq(sku="tea") if by_name else shop._order.kiq("tea"))
    await kicked.wait_result(check_interval=0.01, timeout=30)
    assert await world.ids() == ["tea"]


async def test_the_task_s_own_id_is_the_delivery_s(world: World) -> None:
    shop = Shop(world, Deduplicated(source="delivery"))
    await shop.order("tea", task_id="t1")
    await shop.order("tea", task_id="t2")
    assert await world.ids() == ["t1", "t2"]


async def test_two_tasks_that_share_a_scope_and_an_id_do_one_piece_of_work(world: World) -> None:
    policy = Deduplicated(source="body", member="sku", scope="orders")
    shop, other = Shop(world, policy), Shop(world, policy)
    await shop.order("tea")
    await other.order("tea")
    assert await world.orders() == ["tea"]


async def test_what_is_required_holds_for_tasks_without_a_policy(world: World) -> None:
    world.dedup.require(lambda endpoint: endpoint.kind == "message", BY_SKU)
    shop = Shop(world)
    for _ in range(2):
        await shop.order("tea")
    assert (await world.ids(), shop.runs) == (["tea"], 1)


# What tasks get


def till() -> str:
    """Say where an order comes from: a dependency of taskiq's."""
    return "till 3"


async def test_a_task_gets_the_session_the_claim_and_its_own_dependencies(world: World) -> None:
    broker = InMemoryBroker()
    seen: list[Any] = []

    @broker.task
    @deduplicated(world.dedup, BY_SKU)
    async def order(
        sku: str,
        session: AsyncSession,
        claim: Claim,
        origin: Annotated[str, TaskiqDepends(till)],
        context: Annotated[Context, TaskiqDepends()],
        **notes: str,
    ) -> None:
        seen.extend((sku, claim.session is session, claim.logical_id, origin, context.message.args, notes))

    kicked = await order.kiq("tea", wrapping="red")
    assert not (await kicked.wait_result(check_interval=0.01, timeout=30)).is_err
    assert seen == ["tea", True, "tea", "till 3", ["tea"], {"wrapping": "red"}]


async def test_the_claim_rides_the_app_s_own_session(world: World) -> None:
    shop = Shop(world, Deduplicated(source="body", member="sku", session=session_of(world)))
    for _ in range(2):
        await shop.order("tea")
    assert (await world.orders(), shop.runs) == (["tea"], 1)


async def test_a_synchronous_task_runs_beside_the_loop(world: World) -> None:
    broker = InMemoryBroker()
    seen: list[str] = []

    @broker.task
    @deduplicated(world.dedup, BY_SKU)
    def order(sku: str, claim: Claim) -> str:
        seen.append(claim.logical_id)
        return f"ordered {sku}"

    kicked: Any = await order.kiq("tea")
    result = await kicked.wait_result(check_interval=0.01, timeout=30)
    assert (result.return_value, seen) == ("ordered tea", ["tea"])


async def ordering(sku: str, session: AsyncSession, suffix: str = "") -> None:
    await add(session, sku + suffix)


class Ordering:
    """A task that is an object."""

    async def __call__(self, sku: str, session: AsyncSession) -> None:
        await ordering(sku, session)


@pytest.mark.parametrize(
    ("function", "ordered"), [(Ordering(), "tea"), (partial(ordering, suffix="pot"), "teapot")]
)
async def test_a_task_may_be_an_object_or_a_partial(world: World, function: Any, ordered: str) -> None:
    broker = InMemoryBroker()
    task: Any = broker.register_task(deduplicated(world.dedup, BY_SKU)(function), task_name="order")
    for _ in range(2):
        await (await task.kiq("tea")).wait_result(check_interval=0.01, timeout=30)
    assert await world.orders() == [ordered]


async def test_a_task_in_a_thread_is_waited_for_when_its_worker_is_stopped(world: World) -> None:
    # case B3: a thread cannot be cancelled, and its id must not be given to another while it works
    broker, thread = InMemoryBroker(), Thread()

    @broker.task
    @deduplicated(world.dedup, BY_SKU)
    def order(sku: str, claim: Claim) -> None:  # noqa: ARG001 - asked for
        thread.work()

    await order.kiq("tea")
    (worker,) = broker._running_tasks
    assert not await thread.released_too_early(world, worker)


async def test_a_task_that_never_uses_the_claim_s_transaction_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    broker = InMemoryBroker()

    @broker.task
    @deduplicated(world.dedup, BY_SKU)
    async def order(sku: str) -> None: ...

    for sku in ("tea", "cocoa"):
        await (await order.kiq(sku)).wait_result(check_interval=0.01, timeout=30)
    assert [record.levelno for record in caplog.records if "never uses" in record.message] == [
        logging.WARNING
    ]


async def test_a_task_that_is_called_like_a_function_says_that_it_has_no_id(world: World) -> None:
    shop = Shop(world, BY_SKU)
    with pytest.raises(ConfigurationError, match=r"kiq\(\)"):
        await shop._order("tea")


async def test_a_policy_that_messages_cannot_keep_is_refused_where_the_task_is_made(world: World) -> None:
    with pytest.raises(ConfigurationError, match="a message has no path"):
        Shop(world, Deduplicated(source="path", member="sku"))


# The client's stamp


class Placed(BaseModel):
    """A message with an identity of its own."""

    sku: Annotated[str, DeduplicationIdentity()]


@deduplication_identity("night")
@dataclass
class Rebuild:
    """Another one, of another kind."""

    night: str


@pytest.fixture
def identities() -> Identities:
    """Return a publisher's rules."""
    return Identities()


async def stamp(identities: Identities, *args: Any, label: str | None = None, **kwargs: Any) -> str | None:
    """Kick a task, and return the id that it arrives with."""
    broker = InMemoryBroker().with_middlewares(StampingMiddleware(identities))
    labels: list[dict[str, Any]] = []

    @broker.task
    async def work(
        first: Placed | Rebuild | str = "",  # noqa: ARG001
        placed: Placed | None = None,  # noqa: ARG001
        sku: str = "",  # noqa: ARG001
        context: Context = TaskiqDepends(),  # noqa: B008 - taskiq's way
    ) -> None:
        labels.append(context.message.labels)

    kicker = work.kicker()
    if label is not None:
        kicker = kicker.with_labels(**{"deduplication-id": label})
    await (await kicker.kiq(*args, **kwargs)).wait_result(check_interval=0.01, timeout=30)
    return labels[0].get("deduplication-id")


@pytest.mark.parametrize(
    ("argument", "logical_id"),
    [(Placed(sku="tea"), "tea"), (Rebuild("2026-11-30"), "2026-11-30"), ("tea", None)],
)
async def test_a_task_is_stamped_with_what_the_types_of_its_arguments_say(
    identities: Identities, argument: Any, logical_id: str | None
) -> None:
    assert await stamp(identities, argument) == logical_id


async def test_the_first_argument_that_has_an_identity_gives_it(identities: Identities) -> None:
    assert await stamp(identities, "tea", placed=Placed(sku="cocoa")) == "cocoa"
    assert await stamp(identities, Rebuild("2026-11-30"), Placed(sku="cocoa")) == "2026-11-30"


async def test_a_rule_about_members_sees_the_arguments_by_their_names(identities: Identities) -> None:
    identities.by_member_named("sku")
    assert await stamp(identities, sku="tea") == "tea"


async def test_a_rule_about_a_type_wins_over_the_type(identities: Identities) -> None:
    identities.by_message(Placed, lambda placed: f"order of {placed.sku}")
    assert await stamp(identities, Placed(sku="tea")) == "order of tea"


@pytest.mark.parametrize("label", ["mine", ""])
async def test_a_label_wins_over_everything_and_is_never_overwritten(
    identities: Identities, label: str
) -> None:
    assert await stamp(identities, Placed(sku="tea"), label=label) == label


async def test_an_id_that_no_worker_would_take_is_not_kicked(identities: Identities) -> None:
    with pytest.raises(InvalidLogicalIdError):
        await stamp(identities, Placed(sku="9" * 256))


async def test_a_client_that_does_not_know_the_task_stamps_by_the_rules_about_members(
    identities: Identities,
) -> None:
    identities.by_member_named("sku")
    middleware = StampingMiddleware(identities)
    middleware.set_broker(InMemoryBroker())
    kicked = TaskiqMessage(task_id="t1", task_name="elsewhere", labels={}, args=[{"sku": "tea"}], kwargs={})
    assert middleware.pre_send(kicked).labels == {"deduplication-id": "tea"}


# case G8
async def test_no_id_leaks_into_the_next_call_of_the_same_kicker(identities: Identities) -> None:
    broker = InMemoryBroker().with_middlewares(StampingMiddleware(identities))
    arrived: list[str | None] = []

    @broker.task
    async def work(
        placed: Placed | str,  # noqa: ARG001
        context: Context = TaskiqDepends(),  # noqa: B008 - taskiq's way
    ) -> None:
        arrived.append(context.message.labels.get("deduplication-id"))

    kicker = work.kicker()
    for argument in (Placed(sku="tea"), "no identity"):
        await (await kicker.kiq(argument)).wait_result(check_interval=0.01, timeout=30)
    assert arrived == ["tea", None]
