"""SQLAlchemy sessions as transactions of the core: what a claim rides in, and how its fate is learned.

A claim's fate is bound to the end of its transaction, not to where our code happens to unwind: three
listeners on SQLAlchemy's `Session` class tell when a transaction or savepoint ends. They are on the class
because adding them to every session would cost more than the claim; a session without claims pays for one
dictionary look-up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.orm import SessionTransaction as OrmTransaction

from fastapi_dedup.claims import Fate
from fastapi_dedup.errors import ClaimLostError, ConfigurationError, DedupError, StoreUnavailableError
from fastapi_dedup.stores.codes import Kind, kind
from fastapi_dedup.stores.commits import commits_of, is_outermost

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

__all__ = [
    "BorrowedTransaction",
    "OwnTransaction",
    "SessionTransaction",
    "note_failures",
    "store_errors",
]

T = TypeVar("T")
_WATCHES = "fastapi_dedup.watches"
_LOST = "fastapi_dedup.lost"
_FAILED = "fastapi_dedup.statement_failed"
_ROLLED_BACK_BY_THE_DATABASE = (
    "a statement failed in the handler's transaction, and the database rolled the transaction back"
)
_DRIVERS = {"aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg", "pymysql", "sqlite3"}


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what SQLAlchemy and drivers raise into our errors, with theirs as the cause."""
    try:
        yield
    except DedupError:
        raise
    except exc.DBAPIError as error:
        if kind(error) is Kind.MISSING_TABLE:
            msg = (
                "the table of claims is missing in the database that the claim rides in: create it with "
                "Dedup(..., create_table=True), await dedup.create_table(), or a migration"
            )
            raise ConfigurationError(msg) from error
        msg = f"the database refused the claim ({type(error.orig).__name__})"
        raise StoreUnavailableError(msg) from error
    except Exception as error:
        ours = isinstance(error, exc.SQLAlchemyError | OSError)
        # SQLAlchemy 2.0 does not wrap what drivers raise while they connect.
        if not ours and type(error).__module__.partition(".")[0] not in _DRIVERS:
            raise
        msg = f"the database did not answer ({type(error).__name__})"
        raise StoreUnavailableError(msg) from error


class _Watch(NamedTuple):
    """What is to be done when the transaction of a claim ends, and before it commits.

    Attributes:
        owner: The transaction of the delivery that made the claim.
        around: The innermost transaction at the time of the claim, and those around it.
        decided: Whom to tell what became of it.
        holds: Returns whether the claim is still there, by the connection's own view.
        retake: Takes the claim anew, and returns whether it could; None when the delivery is over.
        work: For a leased claim, which no ROLLBACK ends: what its COMMIT has to do before.
    """

    owner: SessionTransaction
    around: frozenset[OrmTransaction]
    decided: Callable[[Fate], None]
    holds: Callable[[Connection], bool]
    retake: Callable[[Connection], bool] | None
    work: Callable[[Connection], None] | None = None


def note_failures(engine: Engine) -> None:
    """Note on each connection that a statement failed: its transaction may be over, though nobody said so.

    PostgreSQL answers the COMMIT of an aborted transaction with ROLLBACK, and no driver calls that an error;
    MySQL rolls the whole transaction back on a deadlock, and lets the next statement begin a new one. An app
    that swallows the error would be told of a success.
    """

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        if context.connection is not None and not context.connection.invalidated:
            context.connection.info[_FAILED] = True

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.info.pop(_FAILED, None)  # what failed before was in a transaction before


@event.listens_for(Session, "before_commit")
def _before_commit(session: Session) -> None:
    """See to it that nothing is committed whose claim is not.

    Raises:
        ClaimLostError: The claim is gone, so the COMMIT is refused.
    """
    if session.get_nested_transaction() is not None:
        return
    lost: list[_Watch] = session.info.pop(_LOST, [])
    for watch in lost:
        _retake(session, watch)
    watches: list[_Watch] | None = session.info.get(_WATCHES)
    if watches:
        failed = session.connection().info.pop(_FAILED, False)
        if failed:
            _must_hold(session.connection(), watches)
        _work(session.connection(), [watch for watch in watches if watch.work is not None], failed=failed)


def _retake(session: Session, watch: _Watch) -> None:
    with store_errors():
        taken = watch.retake is not None and watch.retake(session.connection())
    if not taken:
        msg = "the claim was rolled back with its transaction, and another delivery has taken the id since"
        raise ClaimLostError(msg)
    watch.decided(Fate.OPEN)
    session.info.setdefault(_WATCHES, []).append(watch._replace(around=_around(session)))


def _work(connection: Connection, watches: list[_Watch], *, failed: bool) -> None:
    try:
        with store_errors():
            for watch in watches:
                assert watch.work is not None  # noqa: S101 - for mypy: the caller has looked
                watch.work(connection)
    except StoreUnavailableError as error:
        if not failed:
            raise
        raise ClaimLostError(_ROLLED_BACK_BY_THE_DATABASE) from error


def _must_hold(connection: Connection, watches: list[_Watch]) -> None:
    try:
        held = all(watch.holds(connection) for watch in watches)
    except exc.DBAPIError as error:
        raise ClaimLostError(_ROLLED_BACK_BY_THE_DATABASE) from error
    if not held:
        raise ClaimLostError(_ROLLED_BACK_BY_THE_DATABASE)


@event.listens_for(Session, "after_commit")
def _committed(session: Session) -> None:
    watches: list[_Watch] | None = session.info.get(_WATCHES)
    if watches and session.get_nested_transaction() is None:  # else only a savepoint was released
        _tell(session, watches, Fate.COMMITTED)


@event.listens_for(Session, "after_rollback")
def _rolled_back(session: Session) -> None:
    watches: list[_Watch] | None = session.info.get(_WATCHES)
    if watches:
        rolled_back = session.get_nested_transaction() or session.get_transaction()
        ended = [watch for watch in watches if rolled_back in watch.around]
        session.info.setdefault(_LOST, []).extend(watch for watch in ended if watch.retake is not None)
        _tell(session, ended, Fate.ROLLED_BACK)


@event.listens_for(Session, "after_transaction_end")
def _ended(session: Session, transaction: OrmTransaction) -> None:
    watches: list[_Watch] | None = session.info.get(_WATCHES)
    if watches and transaction.parent is None:
        _tell(session, [watch for watch in watches if watch.work is None], Fate.CLOSED)
        for watch in session.info[_WATCHES]:
            watch.decided(Fate.ROLLED_BACK)


def _tell(session: Session, ended: list[_Watch], fate: Fate) -> None:
    session.info[_WATCHES] = [watch for watch in session.info[_WATCHES] if watch not in ended]
    for watch in ended:
        watch.decided(fate)


def _around(session: Session) -> frozenset[OrmTransaction]:
    around = set()
    innermost = session.get_nested_transaction() or session.get_transaction()
    while innermost is not None:
        around.add(innermost)
        innermost = innermost.parent
    return frozenset(around)


def _always(_: Connection) -> bool:
    return True


class SessionTransaction(ABC):
    """The transaction of an `AsyncSession`: ours, or borrowed from the app.

    Attributes:
        used: Whether a handler works in it.
    """

    used: bool
    _alone: bool | None = None
    _carried: tuple[Callable[[Connection], bool], Callable[[Connection], bool] | None] = (_always, None)

    @abstractmethod
    def _session(self) -> AsyncSession:
        """Return the session, without counting as a handler's use."""

    @property
    @abstractmethod
    def session(self) -> AsyncSession:
        """The session, for a handler to work with."""

    @abstractmethod
    async def commit(self) -> None:
        """Commit it if it is ours."""

    @abstractmethod
    async def rollback(self) -> None:
        """Roll it back if it is ours."""

    @property
    def idle(self) -> bool:
        """Whether it holds no connection just now."""
        return not self._session().in_transaction()

    @cached_property
    def withdrawn(self) -> set[bytes]:
        """The keys of claims that were deleted in it again: nobody is to miss them, nor to take them anew."""
        return set()

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run synchronous SQL on the connection of the session's transaction.

        Raises:
            StoreUnavailableError: The database did not answer, or refused.
            ConfigurationError: The table of claims is not in that database.
        """
        session = self._session()
        self._alone = not session.in_transaction()

        with store_errors():
            return await session.run_sync(lambda sync: work(sync.connection()))

    @property
    def outermost(self) -> bool:
        """Whether its COMMIT is the database's: not in a session inside somebody else's transaction."""
        return is_outermost(self._session().sync_session)

    @property
    def commits(self) -> int:
        """How often the session has committed since this was first asked."""
        return commits_of(self._session().sync_session)

    def carry(self, holds: Callable[[Connection], bool], retake: Callable[[Connection], bool]) -> None:
        """Say how the claim that was just made can be looked for, and taken anew, before a COMMIT."""
        self._carried = (holds, retake)

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the innermost transaction open now (or one around it) ends."""
        session = self._session().sync_session
        holds, retake = self._carried
        watch = _Watch(self, _around(session), decided, holds, retake)
        session.info.setdefault(_WATCHES, []).append(watch)

    def before_commit(self, work: Callable[[Connection], None], decided: Callable[[Fate], None]) -> None:
        """Do work before each COMMIT, and call back at every end of a transaction."""
        watch = _Watch(self, frozenset(), decided, _always, None, work)
        self._session().info.setdefault(_WATCHES, []).append(watch)

    def forget(self) -> None:
        """Take no lost claim anew any more, and do no work before a COMMIT: the delivery is over."""
        info = self._session().info
        info[_LOST] = [watch for watch in info.get(_LOST, ()) if watch.owner is not self]
        info[_WATCHES] = [
            watch._replace(retake=None) if watch.owner is self else watch
            for watch in info.get(_WATCHES, ())
            if watch.owner is not self or watch.work is None
        ]

    async def step_aside(self) -> bool:
        """Give the connection back; False where that would cost the app something."""
        # A rollback expires every object that the session has loaded, so only an unused one may end.
        session = self._session()
        if self._alone is None:  # answered from memory, so nothing in the session is ours
            return not session.in_transaction()
        if not self._alone or session.sync_session.identity_map:
            return False
        await session.rollback()
        return True


class BorrowedTransaction(SessionTransaction):
    """A transaction of the app's: it commits and rolls back where the app says."""

    used = True

    def __init__(self, session: AsyncSession) -> None:
        if not isinstance(session, AsyncSession):
            msg = (
                f"a claim cannot ride a {type(session).__module__}.{type(session).__name__}: "
                "session= must give a sqlalchemy.ext.asyncio.AsyncSession"
            )
            raise ConfigurationError(msg)
        self._given = session

    def _session(self) -> AsyncSession:
        return self._given

    @property
    def session(self) -> AsyncSession:
        """The app's session."""
        return self._given

    async def commit(self) -> None:
        """Leave it to the app."""

    async def rollback(self) -> None:
        """Leave it to the app."""


class OwnTransaction(SessionTransaction):
    """A transaction of ours, opened when it is needed."""

    outermost = True
    commits = 0

    def __init__(self, open_session: Callable[[], AsyncSession]) -> None:
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

    def forget(self) -> None:
        """Take no lost claim anew any more: the delivery is over."""
        if self._opened is not None:
            super().forget()

    async def commit(self) -> None:
        """Commit; a failure is raised as it came."""
        if self._opened is not None:
            await self._opened.commit()

    async def rollback(self) -> None:
        """Roll back and let go of the connection."""
        if self._opened is not None:
            try:
                await self._opened.rollback()  # close() alone keeps a transaction whose COMMIT failed
            finally:
                await self._opened.close()
