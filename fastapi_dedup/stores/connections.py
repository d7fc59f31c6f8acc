"""SQLAlchemy Core connections as transactions of the core.

A connection announces BEGIN, COMMIT and ROLLBACK before it sends them. So before a COMMIT the claims are
looked after as in a session; that it succeeded is seen afterwards, for its transaction has ended and no error
was reported. Listeners are put on an engine when the first claim rides one of its connections.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Engine, NestedTransaction, TwoPhaseTransaction, event

from fastapi_dedup.claims import Fate
from fastapi_dedup.errors import ClaimLostError, ConfigurationError
from fastapi_dedup.stores.engines import root_of
from fastapi_dedup.stores.failures import store_errors
from fastapi_dedup.stores.riding import Book, Errand, RidingTransaction, Watch, on_this_loop
from fastapi_dedup.stores.threads import in_thread, must_be_blocking
from fastapi_dedup.stores.undone import note_failures

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, RootTransaction
    from sqlalchemy.engine import ExceptionContext
    from sqlalchemy.ext.asyncio import AsyncConnection

    from fastapi_dedup.stores.homes import Home

__all__ = ["AsyncCoreConnection", "CoreConnection"]

T = TypeVar("T")
_BOOK = "fastapi_dedup_book"
_SOON = 0.005
"""How long to wait before looking again whether a COMMIT has ended, in seconds."""


class ConnectionBook(Book):
    """The claims that ride in one connection.

    Attributes:
        home: Whether the connection has gone back to its pool.
        commits: How often it has committed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.home = False
        self.commits = 0
        self._committing: RootTransaction | None = None
        self._at_home: list[Callable[[Fate], None]] = []
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # the loop and the thread of the handler may look at the same time

    def when_home(self, call: Callable[[Fate], None]) -> None:
        """Call back when the connection goes back to its pool."""
        self._at_home.append(call)

    def sends_commit(self, transaction: RootTransaction | None) -> None:
        """Take note that COMMIT is about to be sent, and look soon what became of it."""
        self._committing = transaction
        with suppress(RuntimeError):  # the loop is closed: nobody is there to hear
            self._loop.call_soon_threadsafe(self._look)

    def failed(self) -> bool:
        """Take note of an error, and return whether it was COMMIT's, which undoes all."""
        with self._lock:
            transaction = self._committing
            if transaction is None or not transaction.is_active:
                return False
            self._committing = None
        self.rolled_back(transaction)
        self.ended()
        return True

    def settle(self) -> None:
        """Tell of a COMMIT that has ended, if one has."""
        with self._lock:
            if self._committing is None or self._committing.is_active:
                return
            self._committing = None
            self.commits += 1
        self.committed()

    def goes_home(self) -> None:
        """Tell that the connection goes back to its pool."""
        self.home = True
        self.settle()
        self.ended()
        called, self._at_home = self._at_home, []
        for call in called:
            call(Fate.CLOSED)

    def _look(self) -> None:
        self.settle()
        if self._committing is not None:
            self._loop.call_later(_SOON, self._look)


def _book_of(connection: Connection) -> ConnectionBook | None:
    # Among the execution options, and not in `info`, which an invalidated connection forgets.
    book: ConnectionBook | None = connection.get_execution_options().get(_BOOK)
    return book


def _listen(engine: Engine) -> None:
    """Hear of the transactions of an engine's connections."""
    if event.contains(engine, "commit", _before_commit):
        return
    event.listen(engine, "begin", _begins)
    event.listen(engine, "commit", _before_commit)
    event.listen(engine, "rollback", _rolls_back)
    event.listen(engine, "rollback_savepoint", _rolls_back_savepoint)
    event.listen(engine, "handle_error", _failed)
    event.listen(engine, "checkin", _goes_home)


def _begins(connection: Connection) -> None:
    if (book := _book_of(connection)) is not None:
        book.settle()


def _before_commit(connection: Connection) -> None:
    if (book := _book_of(connection)) is None:
        return
    transaction = connection.get_transaction()
    try:
        book.before_commit(partial(_around, connection))
    except BaseException:
        _roll_back(connection)
        book.rolled_back(transaction)
        book.ended()
        raise
    book.sends_commit(transaction)


def _rolls_back(connection: Connection) -> None:
    if (book := _book_of(connection)) is not None:
        book.settle()
        book.rolled_back(connection.get_transaction())
        book.ended()


def _rolls_back_savepoint(connection: Connection, name: str, _: None) -> None:
    if (book := _book_of(connection)) is not None:
        savepoint = connection.get_nested_transaction()
        while savepoint is not None and savepoint._savepoint != name:  # noqa: SLF001 - it has no public name
            savepoint = _outside(savepoint)
        book.rolled_back(savepoint)


def _failed(context: ExceptionContext) -> None:
    connection = context.connection
    if connection is not None and (book := _book_of(connection)) is not None and book.failed():
        _roll_back(connection)


def _roll_back(connection: Connection) -> None:
    """Roll back what is not committed: SQLAlchemy takes it for ended, and would give it back to the pool."""
    with suppress(Exception):  # the connection is broken, and the transaction with it
        connection.connection.rollback()


def _goes_home(_: Any, record: Any) -> None:
    book: ConnectionBook | None = record.info.pop(_BOOK, None)
    if book is not None:
        book.goes_home()


def _around(connection: Connection) -> frozenset[object]:
    around: set[object] = {connection.get_transaction()}
    savepoint = connection.get_nested_transaction()
    while savepoint is not None:
        around.add(savepoint)
        savepoint = _outside(savepoint)
    return frozenset(around)


def _outside(savepoint: NestedTransaction) -> NestedTransaction | None:
    return savepoint._previous_nested  # noqa: SLF001 - there is no public way outwards


class _ConnectionTransaction(RidingTransaction):
    """The transaction of a connection of the app's: it commits and rolls back where the app says."""

    def _sync(self) -> Connection:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether the pool has it: until then, it is a connection that others cannot have."""
        connection = self._sync()
        book = _book_of(connection)
        return connection.closed or (book is not None and book.home)

    @property
    def commits(self) -> int:
        """How often the connection has committed since this was first asked."""
        book = self._book()
        book.settle()
        return book.commits

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the innermost transaction open now (or one around it) ends."""
        connection = self._sync()
        decided = on_this_loop(decided)
        if connection.in_transaction():
            watch = Watch(self, _around(connection), self._sync, decided, self._carried)
            self._book().enter(watch)
        else:
            self._book().when_home(decided)

    async def must_lead_home(self) -> None:
        """Refuse a connection to another database."""
        self._home.must_be_at(self._sync().engine)

    def before_commit(self, work: Callable[[Connection], None], decided: Callable[[Fate], None]) -> None:
        """Do work before each COMMIT, and call back at every end of a transaction."""
        note_failures(self._sync().engine)
        self._book().charge(Errand(self, self._sync, work, on_this_loop(decided)))

    def _book(self) -> ConnectionBook:
        connection = self._sync()
        book = _book_of(connection)
        if book is None:
            _listen(root_of(connection.engine))
            book = ConnectionBook()
            connection.execution_options(**{_BOOK: book})
            connection.info[_BOOK] = book
        return book

    def forget(self) -> None:
        """Take no lost claim anew any more, and do no work before a COMMIT: the delivery is over."""
        self._carried = None
        if (book := _book_of(self._sync())) is not None:
            book.forget(self)

    async def step_aside(self) -> bool:
        """Keep the connection: it is the app's, from its `connect()` to its `close()`."""
        return False

    async def commit(self) -> None:
        """Leave it to the app, and find out whether it has sent a COMMIT that succeeded."""
        if (book := _book_of(self._sync())) is not None:
            book.settle()

    async def rollback(self) -> None:
        """Leave it to the app, and find out the same: what it has committed cannot be withdrawn."""
        await self.commit()

    async def leave(self) -> None:
        """Find out the same, now that all of the app's own has unwound."""
        await self.commit()

    def _ridable(self) -> Connection:
        connection = self._sync()
        if connection.closed:
            msg = "the connection of the claim is closed, and what was not committed on it is lost"
            raise ClaimLostError(msg)
        if isinstance(connection.get_transaction(), TwoPhaseTransaction):
            msg = "a claim cannot ride a two-phase transaction of a connection: use begin(), or a Session"
            raise ConfigurationError(msg)
        return connection


class AsyncCoreConnection(_ConnectionTransaction):
    """The transaction of an `AsyncConnection`."""

    def __init__(self, connection: AsyncConnection, home: Home) -> None:
        super().__init__(home)
        opened = connection.sync_connection
        if opened is None:
            msg = "the AsyncConnection is not open: use `async with engine.connect() as connection`"
            raise ConfigurationError(msg)
        self._given = connection
        self._connection = opened

    def _sync(self) -> Connection:
        return self._connection

    @property
    def session(self) -> AsyncConnection:
        """The app's connection."""
        return self._given

    async def run(
        self,
        work: Callable[[Connection], T],
        *,
        undo: Callable[[Connection], object] | None = None,  # noqa: ARG002 - cancelled, the statement is cut
    ) -> T:
        """Run synchronous SQL on the connection.

        A cancelled statement is cut, and SQLAlchemy closes its connection: there is nothing to undo.
        """
        self._ridable()
        with store_errors():
            return await self._given.run_sync(work)


class CoreConnection(_ConnectionTransaction):
    """The transaction of a synchronous `Connection`. Claims are made in worker threads."""

    def __init__(self, connection: Connection, home: Home) -> None:
        super().__init__(home)
        self._given = connection

    def _sync(self) -> Connection:
        return self._given

    @property
    def session(self) -> Connection:
        """The app's connection."""
        return self._given

    async def run(
        self, work: Callable[[Connection], T], *, undo: Callable[[Connection], object] | None = None
    ) -> T:
        """Run SQL on the connection, in a worker thread."""
        connection = self._ridable()
        self._must_be_blocking()
        with store_errors():
            return await in_thread(
                partial(work, connection),
                connected=True,
                undo=None if undo is None else partial(undo, connection),
            )

    async def must_lead_home(self) -> None:
        """Refuse a connection to another database, or of an asynchronous engine."""
        await super().must_lead_home()
        self._must_be_blocking()

    def _must_be_blocking(self) -> None:
        must_be_blocking(self._given, "a Connection of an asynchronous engine", "its AsyncConnection")
