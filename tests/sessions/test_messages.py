"""Message handlers: the session comes from the policy, the caller or the annotation, whatever kind it is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import asyncpg
import pytest
import sqlmodel
import sqlmodel.ext.asyncio.session
from fastapi import Depends
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from fastapi_dedup import Claim, ConfigurationError, Dedup, Deduplicated
from fastapi_dedup.errors import ClaimLostError
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.handler import Result
from tests.http.world import World
from tests.sessions.conftest import kind_on, name_of
from tests.sessions.kinds import CASES, DIFFERENT, MARIADB, REQUEST, ASession, Kind, drive

ORDER = Envelope({"sku": "tea"}, headers={"deduplication-id": "1"})


@pytest.fixture(params=CASES + MARIADB, ids=name_of)
async def every_kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """Yield every kind of session."""
    async with kind_on(request.param, request, tmp_path) as opened:
        REQUEST.set(object())
        yield opened


@pytest.fixture(params=DIFFERENT, ids=name_of)
async def kind(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Kind]:
    """Yield every kind of session whose transactions differ."""
    async with kind_on(request.param, request, tmp_path) as opened:
        REQUEST.set(object())
        yield opened


async def found(kind: Kind) -> tuple[list[str], list[str]]:
    return await kind.world.orders(), await kind.world.ids()


def handler_of(kind: Kind, **policy: Any) -> Any:
    """Return a handler that asks for its session by annotation; a blocking kind's runs in a thread."""
    annotation = kind.annotation

    async def work(message: dict[str, str], session: Any) -> None:
        await kind.add(session, message["sku"])
        if message.get("then") == "fail":
            raise ZeroDivisionError
        if message.get("then") == "roll back":
            await kind.rollback(session)
            await kind.add(session, "after")

    if kind.blocking:

        def handle_in_thread(message: dict[str, str], session: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            drive(work(message, session))

        handle_in_thread.__annotations__["session"] = annotation
        return kind.world.dedup.handler(Deduplicated(**policy))(handle_in_thread)

    async def handle(message: dict[str, str], session: Any) -> None:
        await work(message, session)

    handle.__annotations__["session"] = annotation
    return kind.world.dedup.handler(Deduplicated(**policy))(handle)


def message(**body: str) -> Envelope:
    return Envelope({"sku": "tea", **body}, headers={"deduplication-id": "1"})


async def test_the_policys_session_is_what_the_handler_gets(every_kind: Kind) -> None:
    kind = every_kind
    handle = handler_of(kind, session=kind.dependency())
    with pytest.raises(ZeroDivisionError):
        await handle(message(then="fail"))
    assert await found(kind) == ([], [])
    assert await handle(message()) is Result.HANDLED
    assert await found(kind) == (["tea"], ["1"])
    assert await handle(message()) is Result.DUPLICATE
    told = [each.kind for each in kind.world.events]
    assert told == [
        EventKind.CLAIMED,
        EventKind.RELEASED,
        EventKind.CLAIMED,
        EventKind.COMMITTED,
        EventKind.DUPLICATE,
    ]


async def test_a_policy_names_the_session_as_for_a_route(kind: Kind) -> None:
    handle = handler_of(kind, session=Annotated[Any, Depends(kind.dependency())])
    assert await handle(message()) is Result.HANDLED
    assert await handle(message()) is Result.DUPLICATE


async def test_a_handler_that_rolls_back_midway_keeps_its_claim(kind: Kind) -> None:
    handle = handler_of(kind, session=kind.dependency())
    assert await handle(message(then="roll back")) is Result.HANDLED
    assert await found(kind) == (["after"], ["1"])


async def test_a_session_that_nobody_commits_is_no_success(kind: Kind) -> None:
    handle = handler_of(kind, session=kind.dependency(commits=False))
    for _ in range(2):
        with pytest.raises(ClaimLostError):
            await handle(message())
    assert await found(kind) == ([], [])


async def test_a_session_that_commits_in_spite_of_a_failure_does_not_keep_the_id(kind: Kind) -> None:
    # case A3
    handle = handler_of(kind, session=kind.dependency(on_error=kind.commit))
    with pytest.raises(ZeroDivisionError):
        await handle(message(then="fail"))
    await kind.world.dedup._flights.drain()
    assert await found(kind) == (["tea"], [])
    assert await handle(message()) is Result.HANDLED


async def test_the_callers_session_stays_the_callers(kind: Kind) -> None:
    handle = handler_of(kind)
    async with kind.open() as session:
        assert await handle(message(), session=session) is Result.HANDLED
        assert await found(kind) == ([], [])
        await kind.commit(session)
    assert await found(kind) == (["tea"], ["1"])


async def test_the_window_of_a_delivery_is_counted_from_the_end_of_the_work(kind: Kind) -> None:
    inbox = Deduplicated("delivery", session=kind.dependency())

    async def work(_: Any, session: Any) -> None:
        await kind.add(session, "tea")

    def work_in_thread(_: Any, session: Any) -> None:
        drive(kind.add(session, "tea"))

    function = work_in_thread if kind.blocking else work
    function.__annotations__["session"] = kind.annotation
    handle = kind.world.dedup.handler(inbox)(function)
    delivered = Envelope({}, delivery_id="m-1", destination="orders")
    assert await handle(delivered) is Result.HANDLED
    assert await handle(delivered) is Result.DUPLICATE


# What is opened where nobody gives a session


async def test_a_connection_of_the_runtimes_engine_is_opened(postgres: World) -> None:
    async def handle(order: dict[str, str], connection: AsyncConnection, claim: Claim) -> None:
        assert claim.session is connection
        await connection.execute(text("insert into orders (sku) values (:sku)"), order)
        if order.get("then") == "fail":
            raise ZeroDivisionError

    wrapped = postgres.dedup.handler(Deduplicated())(handle)
    with pytest.raises(ZeroDivisionError):
        await wrapped(message(then="fail"))
    assert await wrapped(message()) is Result.HANDLED
    assert await wrapped(message()) is Result.DUPLICATE
    assert (await postgres.orders(), await postgres.ids()) == (["tea"], ["1"])


async def test_a_session_of_the_runtimes_own_class_is_opened(postgres: World) -> None:
    sqlmodels = sqlmodel.ext.asyncio.session.AsyncSession
    dedup = Dedup(async_sessionmaker(postgres.engine, class_=sqlmodels), reap_every=None)

    async def handle(order: dict[str, str], session: sqlmodels) -> None:  # type: ignore[valid-type]
        await session.exec(text("insert into orders (sku) values (:sku)"), params=order)  # type: ignore[attr-defined]

    handle.__annotations__["session"] = sqlmodels
    assert await dedup.handler(Deduplicated())(handle)(message()) is Result.HANDLED
    assert await postgres.orders() == ["tea"]


@pytest.mark.parametrize(
    "annotation",
    [Session, sqlmodel.Session, sqlmodel.ext.asyncio.session.AsyncSession, Connection, asyncpg.Connection],
    ids=lambda each: f"{each.__module__}.{each.__name__}",
)
async def test_what_nobody_opens_is_refused(postgres: World, annotation: Any) -> None:
    async def handle(_: Any, session: Any) -> None:  # noqa: ARG001
        raise AssertionError

    handle.__annotations__["session"] = annotation
    wrapped = postgres.dedup.handler(Deduplicated())(handle)
    with pytest.raises(ConfigurationError, match=r"name what does with Deduplicated\(session=\.\.\.\)"):
        await wrapped(message())
    assert await postgres.ids() == []


async def test_a_session_may_be_optional_in_the_annotation(postgres: World) -> None:
    async def handle(order: dict[str, str], session: AsyncSession | None = None) -> None:
        assert session is not None
        await session.execute(text("insert into orders (sku) values (:sku)"), order)

    assert await postgres.dedup.handler(Deduplicated())(handle)(message()) is Result.HANDLED


# What a policy's session= may be


@pytest.fixture
async def sync(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ASession]:
    async with kind_on(("Session", "asyncpg"), request, tmp_path) as opened:
        assert isinstance(opened, ASession)
        yield opened


def sources(kind: ASession) -> dict[str, Any]:
    def generator() -> Iterator[Session]:
        with kind.sessions() as session, session.begin():
            yield session

    @contextmanager
    def manager() -> Iterator[Session]:
        with kind.sessions.begin() as session:
            yield session

    return {
        "a generator": generator,
        "a context manager": manager,
        "a sessionmaker's begin": kind.sessions.begin,
    }


@pytest.mark.parametrize("source", ["a generator", "a context manager", "a sessionmaker's begin"])
async def test_a_blocking_session_may_come_from(sync: ASession, source: str) -> None:
    handle = handler_of(sync, session=sources(sync)[source])
    with pytest.raises(ZeroDivisionError):
        await handle(message(then="fail"))
    assert await handle(message()) is Result.HANDLED
    assert await handle(message()) is Result.DUPLICATE
    assert await found(sync) == (["tea"], ["1"])


async def test_a_handler_in_a_thread_is_waited_for_when_its_consumer_is_cancelled(sync: ASession) -> None:
    # case B3: a thread cannot be cancelled, and its session must not be closed under its hands
    working, go_on = threading.Event(), threading.Event()
    ended: list[bool] = []

    def handle(order: dict[str, str], session: Session) -> None:
        session.execute(text("insert into orders (sku) values (:sku)"), order)
        working.set()
        go_on.wait(10)
        session.execute(text("insert into orders (sku) values (:sku)"), order)
        ended.append(True)

    wrapped = sync.world.dedup.handler(Deduplicated(session=sources(sync)["a generator"]))(handle)
    task = asyncio.create_task(wrapped(message()))
    assert await asyncio.to_thread(working.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert await found(sync) == ([], [])
