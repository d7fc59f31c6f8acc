"""A world to run a scenario in: a database, runtimes on it, and the tests' own eyes and hands in it.

The scenarios of the suite speak to a `World` only. What they say about claims holds for every store; what
they say about sessions, savepoints and statements holds for every SQL store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

from sqlalchemy import Connection, String, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fastapi_dedup import Claim, ClaimInFlightError, Dedup, DuplicateError
from fastapi_dedup.claims import Intent, Lease, Receipt
from fastapi_dedup.refusals import Refusal
from fastapi_dedup.store import Leases
from fastapi_dedup.stores.sql import SqlStore
from fastapi_dedup.stores.transactions import SessionTransaction
from tests.databases import count, engine_on, orders_table, reconnect
from tests.stores.hands import HANDS, Hands
from tests.stores.promises import Backend

HOUR = timedelta(hours=1)
SOON = 10.0
"""Seconds after which something that should happen at once is taken to be stuck."""


def intent(
    logical_id: str,
    *,
    scope: str = "tests",
    window: timedelta = HOUR,
    fingerprint: bytes | None = None,
    lease: Lease | None = None,
) -> Intent:
    """Return an intent in the tests' scope."""
    return Intent((scope,), logical_id, window, fingerprint, lease=lease)


class Base(DeclarativeBase):
    """The app's tables."""


class Order(Base):
    """A row of the app's work, as `tests.databases.orders_table` makes it."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(String(300))
    note: Mapped[str | None]


@dataclass(frozen=True)
class Row:
    """A committed row of the table of claims."""

    key: bytes
    scope: str
    logical_id: str
    token: bytes
    fingerprint: bytes | None
    claimed_at: datetime
    expires_at: datetime
    leased_until: datetime | None

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.token, self.claimed_at, self.expires_at)


class Attempt:
    """One delivery, with a transaction of its own on a connection of its own."""

    def __init__(self, dedup: Dedup) -> None:
        self.dedup = dedup
        self.delivery = dedup.delivery()

    @property
    def transaction(self) -> SessionTransaction:
        return cast("SessionTransaction", self.delivery.own)

    @property
    def session(self) -> AsyncSession:
        session: AsyncSession = self.delivery.own.session
        return session

    async def claim(self, wanted: Intent) -> Claim | Refusal:
        return await self.delivery.claim(wanted, self.transaction)

    async def work(self, sku: str) -> None:
        self.session.add(Order(sku=sku))
        await self.session.flush()

    async def run(self, wanted: Intent) -> Claim | Refusal:
        """Claim, do the work that a claim allows, and commit it."""
        outcome = await self.claim(wanted)
        if isinstance(outcome, Claim):
            await self.work(wanted.logical_id)
            await self.delivery.succeed()
        return outcome


@dataclass
class World:
    """A database with the table of claims and one of the app's, `orders`.

    Attributes:
        backend: What it is, and what it promises.
        url: Its URL.
        engine: The tests' own engine, which no runtime uses.
        dedup: The runtime that is tested.
    """

    backend: Backend
    url: str
    engine: AsyncEngine
    _stack: AsyncExitStack
    _clock: StoppedClock | None = None
    _zone: str | None = None
    dedup: Dedup = field(init=False)
    altered: bool = False
    """Whether the test has changed what tables there are."""

    @property
    def hands(self) -> Hands:
        return HANDS[self.engine.dialect.name]

    # runtimes

    def runtime(self, **options: Any) -> Dedup:
        """Return another runtime, which knows of the first no more than another process's would."""
        engine = options.pop("engine", None)
        if engine is None and self.backend.app_engine:
            engine = engine_on(self.url)
        if engine is not None:
            self._stack.push_async_callback(engine.dispose)
        options.setdefault("reap_every", None)
        dedup = Dedup(engine or self.url, **self.backend.options, **options)
        self._stack.push_async_callback(dedup.stop)
        if self._clock is not None:
            self._clock.join(dedup.engine)
            self._clock.join(self.store(dedup).leases._engine)
        if self._zone is not None:
            self._set_own_zone(dedup.engine, self._zone)
        return dedup

    def _set_own_zone(self, engine: AsyncEngine, zone: str) -> None:
        @event.listens_for(engine.sync_engine, "connect")
        def _(connection: Any, _record: object) -> None:
            cursor = connection.cursor()
            cursor.execute(str(self.hands.set_own_zone).format(zone=zone))
            cursor.close()

    def store(self, dedup: Dedup | None = None) -> SqlStore:
        return cast("SqlStore", (dedup or self.dedup)._store)

    def leases(self, dedup: Dedup | None = None) -> Leases:
        return (dedup or self.dedup)._backing.leases

    def engines(self) -> list[AsyncEngine]:
        """Return the engines of the runtime."""
        return [self.dedup.engine, self.store().leases._engine]

    @asynccontextmanager
    async def attempt(self, dedup: Dedup | None = None) -> AsyncIterator[Attempt]:
        """Open a delivery; what it has not settled at the end is rolled back."""
        attempt = Attempt(dedup or self.dedup)
        try:
            yield attempt
        finally:
            await attempt.delivery.finish()

    async def run(self, wanted: Intent, dedup: Dedup | None = None) -> Claim | Refusal:
        """Make one attempt from claim to COMMIT."""
        async with self.attempt(dedup) as attempt:
            return await attempt.run(wanted)

    async def claimed(self, wanted: Intent) -> Claim:
        """Do the work of an intent that is free."""
        outcome = await self.run(wanted)
        assert isinstance(outcome, Claim), outcome
        return outcome

    def session(self, **options: Any) -> AsyncSession:
        """Return a session of the app's, on the runtime's engine."""
        return AsyncSession(self.dedup.engine, expire_on_commit=False, **options)

    async def claim_in(self, session: AsyncSession, logical_id: str = "news") -> object:
        """Claim in a session of the app's, and leave the claim in it; return what kind of outcome it was."""
        try:
            async with self.dedup.claim(logical_id, scope="tests", session=session) as claim:
                pass
        except (DuplicateError, ClaimInFlightError) as refusal:
            return type(refusal)
        return type(claim)

    async def crash(self, session: AsyncSession) -> None:
        """Cut the session's connection, as a killed process would."""
        connection = await session.connection()
        if self.hands.backend is None:
            await connection.invalidate()  # closes the file without a word to the transaction
            return
        await self.kill(int(await connection.scalar(text(self.hands.backend)) or 0))

    async def kill(self, backend: int) -> None:
        """End the process of the server that serves a connection, and wait for its end."""
        async with self.engine.connect() as other:
            await other.execute(text(self.hands.kill), {"backend": backend})

            async def has_ended() -> bool:
                await other.rollback()  # PostgreSQL looks once in a transaction
                return not await other.scalar(text(self.hands.lives), {"backend": backend})

            await until(has_ended)

    async def undo(self, session: AsyncSession) -> None:
        """Have a statement fail in a session so that the database undoes its transaction, and ignore that."""
        if self.hands.undo is None:
            await self._deadlock(session)
            return
        with suppress(DBAPIError):
            await session.execute(text(self.hands.undo))

    async def _deadlock(self, session: AsyncSession) -> None:
        await self.execute("insert into orders (id, sku) values (-1, 'a'), (-2, 'b')")
        update = text("update orders set note = 'x' where id = :id")
        async with AsyncSession(self.engine) as other, asyncio.timeout(SOON):
            await other.execute(update, {"id": -2})
            # more rows than the session's transaction has changed: InnoDB sacrifices the smaller one
            await other.execute(text("insert into orders (sku) select 'z' from seq_1_to_200"))
            await session.execute(update, {"id": -1})
            waiting = asyncio.create_task(other.execute(update, {"id": -1}))
            with suppress(DBAPIError):
                await session.execute(update, {"id": -2})
            await waiting
        await self.execute("delete from orders where id < 0")

    async def hold_up(self, session: AsyncSession) -> None:
        """Make every claim elsewhere wait until the session's transaction ends."""
        await (await session.connection()).exec_driver_sql(self.hands.hold_up)

    # what is there

    async def rows(self) -> list[Row]:
        """Return the committed claims, the oldest first."""
        names = ", ".join([self.hands.key, *list(Row.__dataclass_fields__)[1:]])
        query = text(f"select {names} from dedup_claims order by claimed_at, logical_id")
        async with self.engine.connect() as connection:
            found = (await connection.execute(query)).mappings().all()
        return [Row(**{**row, **{name: _time(row[name]) for name in _TIMES if row[name]}}) for row in found]

    async def row(self, wanted: Intent) -> Row | None:
        """Return the committed claim of an intent."""
        return next((row for row in await self.rows() if row.key == wanted.key), None)

    async def orders(self) -> list[str]:
        """Return the app's committed work, in order."""
        async with self.engine.connect() as connection:
            return [*await connection.scalars(text("select sku from orders order by sku"))]

    async def count(self, table: str = "dedup_claims", where: str = "1 = 1") -> int:
        return await count(self.engine, table, where)

    async def execute(self, statement: str, **values: object) -> None:
        """Run a statement in a transaction of its own."""
        self.altered |= statement.split(maxsplit=1)[0] in {"alter", "create", "drop"}
        async with self.engine.begin() as connection:
            await connection.execute(text(statement), values)

    async def expire(self, wanted: Intent) -> None:
        """Move a committed claim into the past, so that its window has just ended."""
        expire = f"update dedup_claims set {self.hands.expire} where {self.hands.key} = :key"
        await self.execute(expire, key=wanted.key)

    async def fill(self, expired: int, live: int = 0) -> None:
        """Put claims into the table that have expired, and some that have not."""
        await self.execute(self.hands.fill, expired=expired, total=expired + live)

    @asynccontextmanager
    async def zone(self, zone: str) -> AsyncIterator[str]:
        """Give the connections of new runtimes a time zone, where they have one, and yield its name there."""
        if self.hands.set_own_zone is not None:  # by its offset: the names are not installed everywhere
            offset = datetime.now(ZoneInfo(zone)).strftime("%z")
            self._zone = f"{offset[:3]}:{offset[3:]}"
            yield self._zone
            return
        if self.hands.set_zone is None:
            yield zone
            return
        database = self.engine.url.database
        await self.execute(self.hands.set_zone.format(database=database, zone=zone))
        reconnect(self.url)
        try:
            yield zone
        finally:
            await self.execute(self.hands.reset_zone.format(database=database))
            reconnect(self.url)

    async def at(self, moment: datetime) -> None:
        """Make the database's clock stand at a moment. Only in a world whose clock is stopped."""
        assert self._clock is not None
        await self._clock.stand_at(moment)


_TIMES = ("claimed_at", "expires_at", "leased_until")


def _time(stored: datetime | str) -> datetime:
    moment = datetime.fromisoformat(stored) if isinstance(stored, str) else stored
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class StoppedClock:
    """Replaces the clock of a database by one that the test moves: there is no other way to hit a tick.

    On PostgreSQL a schema that is searched before `pg_catalog` shadows the functions of the clock, on MariaDB
    each connection may be told the time, and on SQLite a function of our own replaces `strftime`.
    """

    def __init__(self, engine: AsyncEngine, url: str) -> None:
        self._engine = engine
        self._url = url
        self._hands = HANDS[engine.dialect.name]
        self._moment = datetime.now(UTC)

    async def install(self) -> None:
        await self._run(self._hands.stop_clock)

    async def remove(self) -> None:
        await self._run(self._hands.start_clock)

    async def stand_at(self, moment: datetime) -> None:
        self._moment = moment.astimezone(UTC)
        if self._hands.stop_clock:
            async with self._engine.begin() as connection:
                await connection.execute(text("update stopped.clock set at = :at"), {"at": moment})

    def join(self, engine: AsyncEngine) -> None:
        """Make the connections of an engine go by this clock."""
        if self._hands.stop_clock:
            return  # the database sees to it
        if self._hands.set_clock is not None:
            event.listen(engine.sync_engine, "before_cursor_execute", self._set)
            return

        @event.listens_for(engine.sync_engine, "connect")
        def _(connection: Any, _record: object) -> None:
            connection.create_function("strftime", -1, self._strftime)

    def _set(self, connection: Connection, cursor: Any, *_: object) -> None:
        if connection.info.get("told") != self._moment:
            connection.info["told"] = self._moment
            seconds = (self._moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(seconds=1)
            cursor.execute(str(self._hands.set_clock).format(seconds=f"{seconds:.6f}"))

    def _strftime(self, shape: str, moment: str, shift: str | None = "+0 seconds") -> str | None:
        assert shape == "%Y-%m-%d %H:%M:%f"
        if shift is None:
            return None
        number, unit = shift.split()
        assert unit == "seconds"
        then = (self._moment if moment == "now" else _time(moment)) + timedelta(seconds=float(number))
        return f"{then:%Y-%m-%d %H:%M:%S}.{then.microsecond // 1000:03}"

    async def _run(self, statements: tuple[str, ...]) -> None:
        async with self._engine.begin() as connection:
            for statement in statements:
                await connection.execute(text(statement.format(database=self._engine.url.database)))
        reconnect(self._url)


@asynccontextmanager
async def world_of(
    backend: Backend,
    url: str,
    *,
    pristine: set[str],
    stopped_clock: bool = False,
    make: Callable[..., World] = World,
) -> AsyncIterator[World]:
    """Yield a world in which nothing has happened yet.

    Args:
        backend: The backend.
        url: Its database.
        pristine: The tables that worlds before this one have left as they were made: they are used again, for
            making new ones on a server costs more than most tests do.
        stopped_clock: Whether the database's clock stands where the test puts it.
        make: Makes the world.
    """
    async with AsyncExitStack() as stack:
        engine = engine_on(url)
        stack.push_async_callback(engine.dispose)
        reused = await _tables(engine) in pristine
        if reused:
            async with engine.begin() as connection:
                await connection.execute(text("delete from orders"))
                await connection.execute(text("delete from dedup_claims"))
        else:
            async with orders_table(url):
                pass
        clock = StoppedClock(engine, url) if stopped_clock else None
        if clock is not None:
            await clock.install()
            stack.push_async_callback(clock.remove)
        world = make(backend, url, engine, stack, clock)
        world.dedup = world.runtime()
        if not reused:
            await world.dedup.create_table()
        if tables := await _tables(engine):
            pristine.add(tables)
        yield world
        if world.altered:
            pristine.discard(tables)


async def _tables(engine: AsyncEngine) -> str:
    """Return what tells our tables from others of their names; "" where that is not known."""
    query = HANDS[engine.dialect.name].tables
    if query is None:
        return ""
    async with engine.connect() as connection:
        return str(await connection.scalar(text(query)))


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that nobody tells us of."""
    async with asyncio.timeout(SOON):
        while not await is_so():  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0.01)


@dataclass
class Statements:
    """What was sent to the database, in order, and how many rows each touched."""

    sent: list[str] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)


@contextmanager
def statements(engine: AsyncEngine) -> Iterator[Statements]:
    """Listen to what an engine sends to its database."""
    heard = Statements()

    def listen(
        _connection: Connection, cursor: Any, statement: str, _values: object, _context: object, _many: object
    ) -> None:
        statement = " ".join(statement.split())
        heard.sent.append(
            re.sub(r"^SET STATEMENT \w+ = \w+ FOR ", "", statement)
        )  # MariaDB: for that one only
        heard.touched.append(cursor.rowcount)

    event.listen(engine.sync_engine, "after_cursor_execute", listen)
    try:
        yield heard
    finally:
        event.remove(engine.sync_engine, "after_cursor_execute", listen)
