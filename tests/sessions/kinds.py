"""Every kind of session and connection that a claim can ride, with one set of hands for all of them.

The hands' methods are coroutines. Those of a blocking kind never wait, so that a `def` handler can drive the
very body that an `async def` handler awaits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from contextvars import ContextVar
from typing import Any, ClassVar, TypeAlias, TypeVar

import asyncpg
import psycopg
import psycopg_pool
import sqlmodel
import sqlmodel.ext.asyncio.session
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from tests.http.world import World

T = TypeVar("T")
Work: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]

ADD = "insert into orders (sku) values ({})"
CLAIMS = "select count(*) from dedup_claims"
STUMBLE = "select * from no_such_table"
LOSE = {
    "mysql": "update orders set note = 'mine' where sku = 'there'",
    "postgresql": STUMBLE,
    "sqlite": "insert or rollback into orders (sku) values (null)",
}

REQUEST: ContextVar[object] = ContextVar("request", default=None)
"""Which request this is, for sessions that are scoped by it."""


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, as a blocking kind's are."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    msg = "a blocking kind of session waited"
    raise AssertionError(msg)


class Kind(ABC):
    """A kind of session, opened on a world's database.

    Attributes:
        annotation: What a handler's parameter is annotated with.
        blocking: Whether its methods block.
        backends: The databases that it works on.
        announces: Whether it announces COMMIT and ROLLBACK.
        gives_back: Whether a session that nothing was done in holds no connection.
        alike: The kind that differs in name only, as far as a transaction goes.
    """

    alike: ClassVar[str | None] = None

    annotation: ClassVar[Any]
    blocking: ClassVar[bool] = False
    backends: ClassVar[tuple[str, ...]] = ("asyncpg", "sqlite")
    announces: ClassVar[bool] = True
    gives_back: ClassVar[bool] = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.stack = AsyncExitStack()

    async def prepare(self) -> None:  # noqa: B027 - most are made of the engine
        """Make what sessions are made of."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Any]:
        """Yield a session; what it has not committed is rolled back in the end."""

    @abstractmethod
    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        """Run a statement, in which `{}` stands for a value, and return the first value that it gives."""

    @abstractmethod
    async def commit(self, session: Any) -> None: ...

    @abstractmethod
    async def rollback(self, session: Any) -> None:
        """Roll back, and be ready for more."""

    async def begin(self, session: Any) -> None:  # noqa: B027
        """Begin after a COMMIT, where nothing else does."""

    async def isolate(self, session: Any, level: str) -> None:
        """Set the isolation level of a transaction in which nothing has happened yet."""
        await self.run(session, f"set transaction isolation level {level}")

    async def savepoint(self, session: Any) -> Any:
        return await session.begin_nested()

    async def undo(self, savepoint: Any) -> None:
        """Roll back to a savepoint."""
        await savepoint.rollback()

    async def release(self, savepoint: Any) -> None:
        await savepoint.commit()

    async def add(self, session: Any, sku: str) -> None:
        """Do the business: one row in `orders`."""
        await self.run(session, ADD, sku)

    async def claims(self, session: Any) -> int:
        """Return how many claims the session sees."""
        return int(await self.run(session, CLAIMS))

    async def stumble(self, session: Any) -> None:
        """Run a statement that fails, and take no notice."""
        with suppress(DBAPIError, asyncpg.PostgresError, psycopg.Error):
            await self.run(session, STUMBLE)

    async def snapshot(self, session: Any) -> None:
        """See, where that costs the transaction on `lose`, nothing that others commit from now on."""
        if self.world.engine.dialect.name == "mysql":
            await self.run(session, "set innodb_snapshot_isolation = on")
            await self.run(session, "select count(*) from orders")

    async def lose(self, session: Any) -> None:
        """Have a statement fail so that the database undoes the whole transaction, and take no notice.

        On MariaDB, another must have changed a row of `orders` behind the transaction's snapshot.
        """
        with suppress(DBAPIError, asyncpg.PostgresError, psycopg.Error):
            await self.run(session, LOSE[self.world.engine.dialect.name])

    # as a dependency

    def dependency(
        self,
        *,
        commits: bool = True,
        nested: bool = False,
        first: Work | None = None,
        on_error: Work | None = None,
    ) -> Callable[..., Any]:
        """Return the dependency that most apps have: commits at its end, rolls back on an error.

        Args:
            commits: Whether it does; else the handler must.
            nested: Whether the handler works in a savepoint.
            first: What is done in the session before the claim.
            on_error: What is done instead of a rollback.
        """
        options: dict[str, Any] = {"commits": commits, "nested": nested, "first": first, "on_error": on_error}

        async def get_session() -> AsyncIterator[Any]:
            async with self.open() as session, self._settled(session, **options):
                yield session

        def get_blocking_session() -> Iterator[Any]:
            manager = self.open()
            session = drive(manager.__aenter__())
            settled = self._settled(session, **options)
            try:
                drive(settled.__aenter__())
                try:
                    yield session
                except BaseException as error:
                    drive(settled.__aexit__(type(error), error, error.__traceback__))
                    raise
                drive(settled.__aexit__(None, None, None))
            finally:
                drive(manager.__aexit__(None, None, None))

        return get_blocking_session if self.blocking else get_session

    @asynccontextmanager
    async def _settled(
        self, session: Any, *, commits: bool, nested: bool, first: Work | None, on_error: Work | None
    ) -> AsyncIterator[None]:
        if first is not None:
            await first(session)
        savepoint = await self.savepoint(session) if nested else None
        try:
            yield
        except BaseException:
            if on_error is not None:
                await on_error(session)
            elif savepoint is not None:
                await self.undo(savepoint)
                await self.commit(session)
            else:
                await self.rollback(session)
            raise
        if savepoint is not None:
            await self.release(savepoint)
        if commits:
            try:
                await self.commit(session)
            except BaseException:
                await self.rollback(session)
                raise


# Sessions


class AnAsyncSession(Kind):
    annotation: ClassVar[Any] = AsyncSession

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with AsyncSession(self.world.engine, expire_on_commit=False) as session:
            yield session

    async def isolate(self, session: Any, level: str) -> None:
        await session.connection(execution_options={"isolation_level": level})

    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        result = await session.execute(text(statement.format(":value")), {"value": value} if value else {})
        return result.scalar() if result.returns_rows else None

    async def commit(self, session: Any) -> None:
        await session.commit()

    async def rollback(self, session: Any) -> None:
        await session.rollback()


class MySession(AsyncSession):
    """A subclass of the app's."""


class ASubclass(AnAsyncSession):
    alike: ClassVar[str | None] = "AsyncSession"
    annotation: ClassVar[Any] = MySession

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with MySession(self.world.engine, expire_on_commit=False) as session:
            yield session


class AnAsyncScopedSession(AnAsyncSession):
    alike: ClassVar[str | None] = "AsyncSession"
    annotation: ClassVar[Any] = async_scoped_session

    async def prepare(self) -> None:
        self.scoped = async_scoped_session(
            async_sessionmaker(self.world.engine, expire_on_commit=False), scopefunc=asyncio.current_task
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        session = self.scoped()
        try:
            yield self.scoped
        finally:
            await session.close()


class SQLModelsAsyncSession(AnAsyncSession):
    alike: ClassVar[str | None] = "AsyncSession"
    annotation: ClassVar[Any] = sqlmodel.ext.asyncio.session.AsyncSession

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with sqlmodel.ext.asyncio.session.AsyncSession(self.world.engine) as session:
            yield session

    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        result = await session.exec(
            text(statement.format(":value")), params={"value": value} if value else {}
        )
        return result.scalar() if result.returns_rows else None


class ASession(Kind):
    """A synchronous session, on an engine of the app's that `Dedup` does not know."""

    annotation: ClassVar[Any] = Session
    blocking: ClassVar[bool] = True
    driver: ClassVar[str] = "psycopg"

    async def prepare(self) -> None:
        self.engine = create_engine(sync_url(self.world.engine.url, self.driver))
        self.stack.callback(self.engine.dispose)
        self.world.dedup.adopt(self.engine)
        self.sessions = sessionmaker(self.engine, expire_on_commit=False)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        with self.sessions() as session:
            yield session

    async def isolate(self, session: Any, level: str) -> None:
        session.connection(execution_options={"isolation_level": level})

    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        result = session.execute(text(statement.format(":value")), {"value": value} if value else {})
        return result.scalar() if result.returns_rows else None

    async def commit(self, session: Any) -> None:
        session.commit()

    async def rollback(self, session: Any) -> None:
        session.rollback()

    async def savepoint(self, session: Any) -> Any:
        return session.begin_nested()

    async def undo(self, savepoint: Any) -> None:
        savepoint.rollback()

    async def release(self, savepoint: Any) -> None:
        savepoint.commit()


class ASessionOfPsycopg2(ASession):
    alike: ClassVar[str | None] = "Session"
    backends: ClassVar[tuple[str, ...]] = ("asyncpg",)
    driver: ClassVar[str] = "psycopg2"


class AScopedSession(ASession):
    """One session per request: a middleware says which request it is."""

    alike: ClassVar[str | None] = "Session"
    annotation: ClassVar[Any] = scoped_session

    async def prepare(self) -> None:
        await super().prepare()
        self.scoped = scoped_session(self.sessions, scopefunc=REQUEST.get)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        session = self.scoped()
        try:
            yield self.scoped
        finally:
            session.close()


class SQLModelsSession(ASession):
    alike: ClassVar[str | None] = "Session"
    annotation: ClassVar[Any] = sqlmodel.Session

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        with sqlmodel.Session(self.engine) as session:
            yield session


# SQLAlchemy's connections


class AnAsyncConnection(AnAsyncSession):
    annotation: ClassVar[Any] = AsyncConnection
    gives_back: ClassVar[bool] = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with self.world.engine.connect() as connection:
            yield connection

    async def isolate(self, session: Any, level: str) -> None:
        await session.execution_options(isolation_level=level)


class AConnection(ASession):
    gives_back: ClassVar[bool] = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        with self.engine.connect() as connection:
            yield connection

    async def isolate(self, session: Any, level: str) -> None:
        session.execution_options(isolation_level=level)


# Drivers' connections


class AsyncpgsConnection(Kind):
    alike: ClassVar[str | None] = "asyncpg's pool"
    annotation: ClassVar[Any] = asyncpg.Connection
    backends: ClassVar[tuple[str, ...]] = ("asyncpg",)
    announces: ClassVar[bool] = False
    gives_back: ClassVar[bool] = False

    @property
    def url(self) -> str:
        return self.world.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self.url)
        try:
            await self.begin(connection)
            yield connection
        finally:
            await connection.close()

    async def begin(self, session: Any) -> None:
        await session.execute("begin")

    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        return await session.fetchval(statement.format("$1"), *([value] if value else []))

    async def commit(self, session: Any) -> None:
        await session.execute("commit")

    async def rollback(self, session: Any) -> None:
        await session.execute("rollback")
        await self.begin(session)

    async def savepoint(self, session: Any) -> Any:
        await session.execute("savepoint inner_one")
        return session

    async def undo(self, savepoint: Any) -> None:
        await savepoint.execute("rollback to inner_one")

    async def release(self, savepoint: Any) -> None:
        await savepoint.execute("release inner_one")


class AsyncpgsPool(AsyncpgsConnection):
    alike: ClassVar[str | None] = None

    async def prepare(self) -> None:
        self.pool = await self.stack.enter_async_context(
            asyncpg.create_pool(self.url, min_size=1, max_size=8)
        )

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with self.pool.acquire() as connection:
            await self.begin(connection)
            yield connection


class PsycopgsConnection(Kind):
    alike: ClassVar[str | None] = "psycopg's pool"
    annotation: ClassVar[Any] = psycopg.AsyncConnection
    backends: ClassVar[tuple[str, ...]] = ("asyncpg",)
    announces: ClassVar[bool] = False
    gives_back: ClassVar[bool] = False

    @property
    def url(self) -> str:
        return self.world.engine.url.set(drivername="postgresql").render_as_string(hide_password=False)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        connection = await psycopg.AsyncConnection.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()

    async def run(self, session: Any, statement: str, value: str | None = None) -> Any:
        cursor = await session.execute(statement.format("%s"), [value] if value else None)
        row = await cursor.fetchone() if cursor.description else None
        return None if row is None else row[0]

    async def commit(self, session: Any) -> None:
        await session.commit()

    async def rollback(self, session: Any) -> None:
        await session.rollback()

    async def savepoint(self, session: Any) -> Any:
        await session.execute("savepoint inner_one")
        return session

    async def undo(self, savepoint: Any) -> None:
        await savepoint.execute("rollback to inner_one")

    async def release(self, savepoint: Any) -> None:
        await savepoint.execute("release inner_one")


class PsycopgsPool(PsycopgsConnection):
    alike: ClassVar[str | None] = None

    async def prepare(self) -> None:
        pool = psycopg_pool.AsyncConnectionPool(self.url, min_size=1, max_size=8, open=False)
        self.pool = await self.stack.enter_async_context(pool)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        connection = await self.pool.getconn()
        try:
            yield connection
        finally:
            await self.pool.putconn(connection)  # which rolls back what is open


KINDS: dict[str, type[Kind]] = {
    "AsyncSession": AnAsyncSession,
    "a subclass": ASubclass,
    "async_scoped_session": AnAsyncScopedSession,
    "SQLModel's AsyncSession": SQLModelsAsyncSession,
    "Session": ASession,
    "Session on psycopg2": ASessionOfPsycopg2,
    "scoped_session": AScopedSession,
    "SQLModel's Session": SQLModelsSession,
    "AsyncConnection": AnAsyncConnection,
    "Connection": AConnection,
    "asyncpg's connection": AsyncpgsConnection,
    "asyncpg's pool": AsyncpgsPool,
    "psycopg's connection": PsycopgsConnection,
    "psycopg's pool": PsycopgsPool,
}

CASES = [(kind, backend) for kind, made in KINDS.items() for backend in made.backends]
"""Every kind on every database that it works on."""

DIFFERENT = [(kind, backend) for kind, backend in CASES if KINDS[kind].alike is None]
"""Those whose transactions differ."""

MARIADB = [(kind, "asyncmy") for kind in ("Session", "AsyncConnection", "Connection")]


def sync_url(url: URL, driver: str) -> URL:
    """Return the URL of the same database for a blocking driver."""
    names = {"postgresql": f"postgresql+{driver}", "sqlite": "sqlite", "mysql": "mysql+pymysql"}
    return url.set(drivername=names[url.get_backend_name()])
