"""SQLAlchemy sessions as transactions of the core: what a claim rides in, and how its fate is learned.

Listeners on SQLAlchemy's `Session` class tell when a transaction or savepoint ends. They are on the class
because adding them to every session would cost more than the claim; a session without claims pays for one
dictionary look-up.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm import SessionTransaction as OrmTransaction

from fastapi_dedup.stores.commits import commits_of, is_outermost
from fastapi_dedup.stores.failures import store_errors
from fastapi_dedup.stores.riding import Book, Errand, RidingTransaction, Watch, on_this_loop
from fastapi_dedup.stores.threads import in_thread, must_be_blocking
from fastapi_dedup.stores.undone import note_failures

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from fastapi_dedup.claims import Fate
    from fastapi_dedup.stores.homes import Home

__all__ = ["BorrowedSession", "OwnTransaction", "SessionTransaction", "SyncSession"]

T = TypeVar("T")
_BOOK = "fastapi_dedup.book"


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    book: Book | None = session.info.get(_BOOK)
    if book is not None and session.get_nested_transaction() is None:
        book.before_commit(partial(_around, session))


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    book: Book | None = session.info.get(_BOOK)
    if book is not None and session.get_nested_transaction() is None:  # else only a savepoint was released
        book.committed()


@event.listens_for(Session, "after_rollback")
def _rolled_back(session: Session) -> None:
    book: Book | None = session.info.get(_BOOK)
    if book is not None:
        book.rolled_back(session.get_nested_transaction() or session.get_transaction())


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: OrmTransaction) -> None:
    book: Book | None = session.info.get(_BOOK)
    if book is not None and transaction.parent is None:
        book.ended()


def _around(session: Session) -> frozenset[object]:
    around: set[object] = set()
    innermost = session.get_nested_transaction() or session.get_transaction()
    while innermost is not None:
        around.add(innermost)
        innermost = innermost.parent
    return frozenset(around)


class SessionTransaction(RidingTransaction):
    """The transaction of a SQLAlchemy session, synchronous or not."""

    _alone: bool | None = None

    def _sync(self) -> Session:
        """Return the synchronous session, without counting as a handler's use."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether it holds no connection just now."""
        return not self._sync().in_transaction()

    @property
    def outermost(self) -> bool:
        """Whether its COMMIT is the database's: not in a session inside somebody else's transaction."""
        return is_outermost(self._sync())

    @property
    def commits(self) -> int:
        """How often the session has committed since this was first asked."""
        return commits_of(self._sync())

    def _connection(self) -> Connection:
        session = self._sync()
        return session.connection(bind_arguments={"bind": self._home.bind_of(session)})

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the innermost transaction open now (or one around it) ends."""
        session = self._sync()
        watch = Watch(self, _around(session), self._connection, on_this_loop(decided), self._carried)
        session.info.setdefault(_BOOK, Book()).enter(watch)

    async def must_lead_home(self) -> None:
        """Refuse a session on another database."""
        with store_errors():
            self._home.must_be_at(self._home.bind_of(self._sync()).engine)

    def before_commit(self, work: Callable[[Connection], None], decided: Callable[[Fate], None]) -> None:
        """Do work before each COMMIT, and call back at every end of a transaction."""
        session = self._sync()
        note_failures(self._home.bind_of(session).engine)
        errand = Errand(self, self._connection, work, on_this_loop(decided))
        session.info.setdefault(_BOOK, Book()).charge(errand)

    def forget(self) -> None:
        """Take no lost claim anew any more, and do no work before a COMMIT: the delivery is over."""
        self._carried = None
        if (book := self._sync().info.get(_BOOK)) is not None:
            book.forget(self)

    async def step_aside(self) -> bool:
        """Give the connection back; False where that would cost the app something."""
        # A rollback expires every object that the session has loaded, so only an unused one may end.
        session = self._sync()
        if self._carried is not None:  # another claim of the same delivery, which would be lost
            return False
        if self._alone is None:  # answered from memory, so nothing in the session is ours
            return not session.in_transaction()
        if not self._alone or session.identity_map:
            return False
        await self._let_go()
        return True

    async def _let_go(self) -> None:
        raise NotImplementedError


class _AsyncTransaction(SessionTransaction):
    """The transaction of an `AsyncSession`."""

    def _session(self) -> AsyncSession:
        raise NotImplementedError

    def _sync(self) -> Session:
        return self._session().sync_session

    async def run(
        self,
        work: Callable[[Connection], T],
        *,
        undo: Callable[[Connection], object] | None = None,  # noqa: ARG002 - cancelled, the statement is cut
    ) -> T:
        """Run synchronous SQL on the connection of the session's transaction.

        A cancelled statement is cut, and SQLAlchemy closes its connection: there is nothing to undo.
        """
        session = self._session()
        self._alone = not session.in_transaction()
        with store_errors():
            return await session.run_sync(lambda _: work(self._connection()))

    async def _let_go(self) -> None:
        await self._session().rollback()


class BorrowedSession(_AsyncTransaction):
    """An `AsyncSession` of the app's: it commits and rolls back where the app says.

    Args:
        session: The session.
        given: What the app knows it by, such as an `async_scoped_session`.
        home: Where the claims live.
    """

    def __init__(self, session: AsyncSession, given: Any, home: Home) -> None:
        super().__init__(home)
        self._borrowed = session
        self._given = given

    def _session(self) -> AsyncSession:
        return self._borrowed

    @property
    def session(self) -> Any:
        """The app's session."""
        return self._given


class SyncSession(SessionTransaction):
    """A synchronous `Session` of the app's. Claims are made in worker threads, as in a `def` handler.

    Args:
        session: The session.
        given: What the app knows it by, such as a `scoped_session`.
        home: Where the claims live.
    """

    def __init__(self, session: Session, given: Any, home: Home) -> None:
        super().__init__(home)
        self._borrowed = session
        self._given = given

    def _sync(self) -> Session:
        return self._borrowed

    @property
    def session(self) -> Any:
        """The app's session."""
        return self._given

    async def run(
        self, work: Callable[[Connection], T], *, undo: Callable[[Connection], object] | None = None
    ) -> T:
        """Run SQL on the connection of the session's transaction, in a worker thread."""
        self._alone = not self._borrowed.in_transaction()
        with store_errors():
            self._must_be_blocking()
            return await in_thread(
                lambda: work(self._connection()),
                connected=not self._alone,
                undo=None if undo is None else lambda: undo(self._connection()),
            )

    async def must_lead_home(self) -> None:
        """Refuse a session on another database, or on an asynchronous engine."""
        await super().must_lead_home()
        self._must_be_blocking()

    def _must_be_blocking(self) -> None:
        must_be_blocking(
            self._home.bind_of(self._borrowed),
            "a synchronous Session on an asynchronous engine",
            "its AsyncSession, or the Session an engine made with create_engine()",
        )

    async def _let_go(self) -> None:
        await in_thread(self._borrowed.rollback, connected=True)


class OwnTransaction(_AsyncTransaction):
    """A transaction of ours, opened when it is needed."""

    def __init__(self, open_session: Callable[[], AsyncSession], home: Home) -> None:
        super().__init__(home)
        self.used = False
        self._open_session = open_session
        self._opened: AsyncSession | None = None

    def _session(self) -> AsyncSession:
        if self._opened is None:
            self._opened = self._open_session()
        return self._opened

    @property
    def session(self) -> AsyncSession:
        """The session, for a handler to work with; its first statement takes a connection."""
        self.used = True
        return self._session()

    @property
    def idle(self) -> bool:
        """Whether no connection is held."""
        return self._opened is None or super().idle

    @property
    def outermost(self) -> bool:
        """Whether its COMMIT is the database's: it is, and no session need be opened to know that."""
        return True

    @property
    def commits(self) -> int:
        """How often its session has committed, which is of no interest: it is ours to commit."""
        return 0

    async def must_lead_home(self) -> None:
        """It does: it is ours."""

    def forget(self) -> None:
        """Take no lost claim anew any more: the delivery is over."""
        if self._opened is not None:
            super().forget()

    async def commit(self) -> None:
        """Commit; a failure is raised as it came."""
        if self._opened is not None and self._opened.in_transaction():  # else there is nothing in it
            await self._opened.commit()

    async def rollback(self) -> None:
        """Roll back and let go of the connection."""
        if self._opened is not None:
            try:
                await self._opened.rollback()  # close() alone keeps a transaction whose COMMIT failed
            finally:
                await self._opened.close()
