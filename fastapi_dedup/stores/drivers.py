"""Connections of drivers themselves, without SQLAlchemy: asyncpg's, and psycopg's asynchronous ones.

The claim runs on the caller's own connection, in the transaction that is open there. But no driver tells of
COMMIT and ROLLBACK, so what became of a claim is found out by asking:

1. When the handler's work is done, before its session ends (`confirm`): is the claim still there? A ROLLBACK
   in between is noticed here, and the claim taken anew.
2. When the delivery is at its end (`leave`): did that transaction commit? A pool may have lent the connection
   to somebody else by then, so the question goes over the store's own engine, by the transaction's number.

What is weaker than in a session: who commits in the middle of the handler, after a ROLLBACK of its own,
commits without the claim, and is told so only afterwards. And where a block of `dedup.claim` ends before the
COMMIT, nobody hears of it: waiters of this process look by themselves, and no event says "committed".

No driver is imported before a connection of its own is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from sqlalchemy import exc
from sqlalchemy.dialects.postgresql import asyncpg, psycopg
from sqlalchemy.util import await_only, greenlet_spawn

from fastapi_dedup.cancellation import uncancelled, undone_if_cancelled
from fastapi_dedup.claims import Fate
from fastapi_dedup.errors import ClaimLostError, ConfigurationError, StoreUnavailableError
from fastapi_dedup.stores.failures import ABORTED, store_errors
from fastapi_dedup.stores.homes import IDENTITY, Home
from fastapi_dedup.stores.riding import (
    ROLLED_BACK_BY_THE_DATABASE,
    TAKEN_SINCE,
    Carried,
    RidingTransaction,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection, Dialect, TextClause

__all__ = ["DriverConnection", "DriverTransaction", "driver_of", "is_drivers"]

logger = logging.getLogger("fastapi_dedup")

T = TypeVar("T")

_NUMBER = "SELECT txid_current_if_assigned() AS number"


class _Rows:
    """What came of a statement.

    Attributes:
        rowcount: How many rows it gave or touched.
    """

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        return self._rows

    def one(self) -> Any:
        (row,) = self._rows
        return row

    def one_or_none(self) -> Any:
        return self.one() if self._rows else None

    def scalar_one(self) -> Any:
        (value,) = vars(self.one()).values()
        return value


class _Driver(Protocol):
    """A connection of a driver's, as far as a claim needs it."""

    dialect: Dialect

    def must_be_in_a_transaction(self) -> None:
        """Refuse a connection on which nothing could undo a claim.

        Raises:
            ConfigurationError: It commits every statement at once.
        """

    def in_transaction(self) -> bool:
        """Tell whether a transaction seems to be open; who has the connection now may be another."""

    async def fetch(self, sql: str, values: Any) -> _Rows:
        """Run a statement, and return its rows."""


class _Asyncpg:
    """A `Connection` of asyncpg's, or one that its pool has lent out."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.dialect = _asyncpg()

    def must_be_in_a_transaction(self) -> None:
        if not self._connection.is_in_transaction():
            msg = (
                "no transaction is open on the asyncpg connection, so nothing could undo the claim: open one "
                "before, with `async with connection.transaction()`"
            )
            raise ConfigurationError(msg)

    def in_transaction(self) -> bool:
        try:
            return bool(self._connection.is_in_transaction())
        except Exception:  # noqa: BLE001 - asyncpg's InterfaceError: it was given back to its pool
            return False

    async def fetch(self, sql: str, values: Any) -> _Rows:
        if _gives_rows(sql):
            rows = await self._connection.fetch(sql, *values)
            return _Rows([SimpleNamespace(**dict(row)) for row in rows], len(rows))
        count = (await self._connection.execute(sql, *values)).rpartition(" ")[2]
        return _Rows([], int(count) if count.isdecimal() else -1)


class _Psycopg:
    """An `AsyncConnection` of psycopg's."""

    def __init__(self, connection: Any) -> None:
        from psycopg import AsyncCursor  # noqa: PLC0415 - the app's cursor_factory may want other placeholders

        self._connection = connection
        self._cursor = partial(AsyncCursor, connection, row_factory=_named)
        self.dialect = _psycopg()

    def must_be_in_a_transaction(self) -> None:
        if self._connection.autocommit and not self.in_transaction():
            msg = (
                "the psycopg connection is in autocommit mode and no transaction is open, so nothing could "
                "undo the claim: open one before, with `async with connection.transaction()`"
            )
            raise ConfigurationError(msg)

    def in_transaction(self) -> bool:
        idle = 0
        return not self._connection.closed and self._connection.info.transaction_status != idle

    async def fetch(self, sql: str, values: Any) -> _Rows:
        async with self._cursor() as cursor:
            await cursor.execute(sql, values)
            return _Rows(await cursor.fetchall() if cursor.description else [], cursor.rowcount)


def _gives_rows(sql: str) -> bool:
    """Tell whether a statement of ours gives rows: asyncpg has one method for those, and one for others."""
    return sql.split(maxsplit=1)[0] in {"SELECT", "WITH"} or "RETURNING" in sql


def _named(cursor: Any) -> Callable[[Sequence[Any]], SimpleNamespace]:
    names = [column.name for column in cursor.description or ()]
    return lambda values: SimpleNamespace(**dict(zip(names, values, strict=True)))


@cache
def _asyncpg() -> Dialect:
    return asyncpg.dialect()  # type: ignore[no-untyped-call]


@cache
def _psycopg() -> Dialect:
    return psycopg.dialect()  # type: ignore[no-untyped-call]


_DRIVERS: Mapping[tuple[str, str], type[_Asyncpg | _Psycopg]] = {
    ("asyncpg", "Connection"): _Asyncpg,
    ("asyncpg", "PoolConnectionProxy"): _Asyncpg,
    ("psycopg", "AsyncConnection"): _Psycopg,
}


def is_drivers(kind: type) -> bool:
    """Tell whether a class is that of a driver's connections which a claim can ride."""
    return _kind_of(kind) is not None


def driver_of(connection: Any) -> _Driver | None:
    """Return a driver's connection in our terms; None where it is none that a claim can ride."""
    kind = _kind_of(type(connection))
    return None if kind is None else kind(connection)


def _kind_of(kind: type) -> type[_Asyncpg | _Psycopg] | None:
    named = ((each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__)
    return next((_DRIVERS[name] for name in named if name in _DRIVERS), None)


class DriverConnection:
    """As much of SQLAlchemy's `Connection` as PostgreSQL's statements need, in a greenlet."""

    def __init__(self, driver: _Driver) -> None:
        self.dialect = driver.dialect
        self._driver = driver

    def exec_driver_sql(self, sql: str, values: Any = ()) -> _Rows:
        """Run a statement in the driver's own style."""
        try:
            return await_only(self._driver.fetch(sql, values))
        except Exception as error:
            raise exc.DBAPIError(sql, None, error) from error

    def get_execution_options(self) -> Mapping[str, Any]:
        """Return none: a driver's connection has no options that SQLAlchemy knows of."""
        return {}

    def get_isolation_level(self) -> str:
        """Return the isolation level of the transaction, in capitals."""
        level: str = self.exec_driver_sql(
            "SELECT current_setting('transaction_isolation') AS level"
        ).scalar_one()
        return level.upper()

    def execute(self, statement: TextClause, values: Mapping[str, Any]) -> _Rows:
        """Run a statement in SQLAlchemy's style."""
        compiled = statement.compile(dialect=self.dialect)
        order = getattr(compiled, "positiontup", None)
        return self.exec_driver_sql(
            str(compiled), dict(values) if order is None else [values[name] for name in order]
        )

    @contextmanager
    def begin_nested(self) -> Iterator[None]:
        """Open a savepoint."""
        self.exec_driver_sql("SAVEPOINT fastapi_dedup")
        try:
            yield
        except BaseException:
            self.exec_driver_sql("ROLLBACK TO SAVEPOINT fastapi_dedup")
            raise
        self.exec_driver_sql("RELEASE SAVEPOINT fastapi_dedup")


def _number(connection: Connection) -> int | None:
    """Return the number of the transaction that is open; None while it has written nothing."""
    return cast("int | None", connection.exec_driver_sql(_NUMBER).scalar_one())


@dataclass(slots=True, eq=False)
class _Awaited:
    """Who waits to hear what becomes of a transaction: for a claim in it, or for work that it has to do."""

    decided: Callable[[Fate], None]
    claim: Carried | None = None
    work: Callable[[Connection], None] | None = None


class DriverTransaction(RidingTransaction):
    """The transaction that is open on a driver's connection: it ends where the app says.

    Args:
        driver: The connection.
        given: The connection as the app knows it.
        home: Where the claims live.
        lent: Whether it is given back as soon as the handler's work is done, so that it must be left alone.
    """

    def __init__(self, driver: _Driver, given: Any, home: Home, *, lent: bool) -> None:
        super().__init__(home)
        self.in_hand = not lent
        self._driver = driver
        self._given = given
        self._number: int | None = None
        self._only_read = False
        self._awaited: list[_Awaited] = []
        self._over = False
        self._left = False

    @property
    def session(self) -> Any:
        """The app's connection."""
        return self._given

    @property
    def idle(self) -> bool:
        """Whether its transaction is over, as far as that is known."""
        return self._left or not self._driver.in_transaction()

    async def run(
        self, work: Callable[[Connection], T], *, undo: Callable[[Connection], object] | None = None
    ) -> T:
        """Run SQL on the connection, in its transaction."""
        self._driver.must_be_in_a_transaction()
        with store_errors():
            await self._must_be_home()
            undone = None if undo is None else partial(self._run, undo)
            return await undone_if_cancelled(self._run(work), undone)

    async def _run(self, work: Callable[[Connection], T]) -> T:
        connection = cast("Connection", DriverConnection(self._driver))
        return await greenlet_spawn(work, connection)

    async def _must_be_home(self) -> None:
        if not self._home.knows(self._given):
            here = (await self._driver.fetch(IDENTITY, ())).one()
            await self._home.must_lead_here(here.system, here.database, self._given)

    async def must_lead_home(self) -> None:
        """Refuse a connection to another database, where asking it begins no transaction."""
        if self._driver.in_transaction():
            with store_errors():
                await self._must_be_home()

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when it is found out what became of the claim."""
        self._awaited.append(_Awaited(decided, claim=self._carried))

    def before_commit(self, work: Callable[[Connection], None], decided: Callable[[Fate], None]) -> None:
        """Do work when the handler is done, and call back when it is found out what became of it."""
        self._awaited.append(_Awaited(decided, work=work))

    def forget(self) -> None:
        """Take no lost claim anew any more: the delivery is over."""
        self._over = True

    async def step_aside(self) -> bool:
        """Keep the connection: it is the app's."""
        return False

    async def confirm(self) -> None:
        """See to it that the claims are there, before the app commits.

        Raises:
            ClaimLostError: A claim is gone, and cannot be taken anew.
        """
        if not self._driver.in_transaction():
            if not await self._ask():
                msg = "the handler has ended the transaction of its claim without COMMIT"
                raise ClaimLostError(msg)
            return
        for awaited in list(self._awaited):
            if awaited.work is not None:
                await self._do(awaited.work)
            elif awaited.claim is not None:
                await self._confirm(awaited, awaited.claim)
        if self._number is None:  # for those who ask for no claim of theirs in it
            self._number = await self._run(_number)
            self._only_read = self._number is None

    async def _do(self, work: Callable[[Connection], None]) -> None:
        try:
            await self.run(work)
            self._number = await self._run(_number)
        except StoreUnavailableError as error:
            if getattr(getattr(error.__cause__, "orig", error.__cause__), "sqlstate", None) != ABORTED:
                raise
            raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE) from error

    async def _confirm(self, awaited: _Awaited, claim: Carried) -> None:
        try:
            held = await self._run(claim.holds)
            self._number = await self._run(_number)
        except exc.DBAPIError as error:
            raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE) from error
        if held and self._number is None:  # this transaction has written nothing, so an earlier one did
            self._tell(awaited, Fate.COMMITTED)
        elif not held:
            with store_errors():
                taken = not self._over and claim.retake is not None and await self._run(claim.retake)
                self._number = await self._run(_number)
            if not taken:
                raise ClaimLostError(TAKEN_SINCE)
            awaited.decided(Fate.OPEN)

    async def commit(self) -> None:
        """Leave it to the app, and find out what became of the claims where it has ended the transaction."""
        if not self._driver.in_transaction():
            with suppress(StoreUnavailableError):  # leave() asks again
                await self._ask()

    async def rollback(self) -> None:
        """Leave it to the app, and find out whether it has committed before it failed."""
        if self.in_hand:
            with suppress(StoreUnavailableError):  # then the claim is withdrawn, if it can be
                await self._ask(undone=not self._driver.in_transaction())

    async def leave(self) -> None:
        """Find out what became of the claims, now that all of the app's own has unwound.

        What is still open was not committed: who gives a connection back has waited for its COMMIT before.
        """
        if not (self.in_hand and self._driver.in_transaction()):
            try:
                await uncancelled(self._ask())  # a cancelled delivery's claims need an end as well
            except StoreUnavailableError:
                logger.exception("cannot find out what became of a claim, so no success is told")
            finally:
                self._left = True
                self._tell_all(Fate.CLOSED)
        self._tell_all(Fate.UNSEEN)

    async def _ask(self, *, undone: bool = True) -> bool:
        """Ask the database, over the store's own engine, and return whether no claim was undone.

        Args:
            undone: Whether what is not there has been undone; else its transaction may be open.
        """
        kept = True
        for awaited in list(self._awaited):
            claim = awaited.claim
            keys = claim.keys() if claim is not None else ()
            sought = (next(iter(keys)), claim.token) if claim is not None and keys else None
            stands = (claim is None and self._only_read) or await self._home.stands(self._number, sought)
            if stands or (undone and stands is False):
                self._tell(awaited, Fate.COMMITTED if stands else Fate.ROLLED_BACK)
            kept = kept and (stands is not False or claim is None)
        return kept

    def _tell_all(self, fate: Fate) -> None:
        for awaited in list(self._awaited):
            self._tell(awaited, fate)

    def _tell(self, awaited: _Awaited, fate: Fate) -> None:
        self._awaited.remove(awaited)
        awaited.decided(fate)
