"""What every kind of transaction that a claim can ride in has in common.

A claim's fate is bound to the end of its transaction, not to where our code happens to unwind. Who hears of
that end differs: SQLAlchemy's `Session` and `Connection` announce it, drivers do not. What is to be done
about it differs little, and is here: a `Book` per session or connection holds a `Watch` per claim.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import exc

from fastapi_dedup.claims import Fate
from fastapi_dedup.errors import ClaimLostError, StoreUnavailableError
from fastapi_dedup.stores.failures import store_errors
from fastapi_dedup.stores.undone import has_failed, is_undone

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from fastapi_dedup.stores.homes import Home

__all__ = [
    "ROLLED_BACK_BY_THE_DATABASE",
    "TAKEN_SINCE",
    "Book",
    "Carried",
    "Errand",
    "RidingTransaction",
    "Watch",
    "on_this_loop",
]

ROLLED_BACK_BY_THE_DATABASE = (
    "a statement failed in the handler's transaction, and the database rolled the transaction back"
)

TAKEN_SINCE = "the claim was rolled back with its transaction, and another delivery has taken the id since"

T = TypeVar("T")
Around: TypeAlias = frozenset[object]


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A claim that rides, as far as a transaction must know it.

    Attributes:
        token: The claim's token.
        keys: Returns the keys of what is claimed under it, and was not withdrawn since.
        holds: Returns whether the claim is still there, by the connection's own view.
        retake: Takes the claim anew, and returns whether it could; None when the delivery is over.
    """

    token: bytes
    keys: Callable[[], AbstractSet[bytes]]
    holds: Callable[[Connection], bool]
    retake: Callable[[Connection], bool] | None


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """What is to be done when a transaction ends, and before it commits.

    Attributes:
        owner: The transaction of the delivery that watches.
        around: The innermost transaction when it began to, and those around it.
        connect: Returns the connection that the claim is on.
        decided: Whom to tell what became of it.
        claim: The claim that must not be missing when it commits; None where nothing rides.
    """

    owner: RidingTransaction
    around: Around
    connect: Callable[[], Connection]
    decided: Callable[[Fate], None]
    claim: Carried | None

    @property
    def goes_on(self) -> bool:
        """Whether the claim is to be taken anew where a ROLLBACK took it along."""
        return self.claim is not None and self.claim.retake is not None


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """What a claim that does not ride has to do before each COMMIT. No ROLLBACK ends it.

    Attributes:
        owner: The transaction of the delivery.
        connect: Returns the connection to do it on.
        work: What to do.
        decided: Whom to tell of every end.
    """

    owner: RidingTransaction
    connect: Callable[[], Connection]
    work: Callable[[Connection], None]
    decided: Callable[[Fate], None]


class Book:
    """What is to be seen to in one session or connection.

    These are the claims that ride in it, those that its last ROLLBACK took along, and the errands of others.
    """

    def __init__(self) -> None:
        self._riding: list[Watch] = []
        self._lost: list[Watch] = []
        self._errands: list[Errand] = []

    def enter(self, watch: Watch) -> None:
        """Watch a transaction that is open now."""
        self._riding.append(watch)

    def charge(self, errand: Errand) -> None:
        """Do something before each COMMIT."""
        self._errands.append(errand)

    def forget(self, owner: RidingTransaction) -> None:
        """Take none of the owner's lost claims anew any more, and run no errand: its delivery is over."""
        self._errands = [errand for errand in self._errands if errand.owner is not owner]
        self._lost = [watch for watch in self._lost if watch.owner is not owner]
        self._riding = [_forgotten(watch) if watch.owner is owner else watch for watch in self._riding]

    def before_commit(self, around: Callable[[], Around]) -> None:
        """See to it that nothing is committed whose claim is not.

        Args:
            around: Returns the transactions that are open once a claim was taken anew.

        Raises:
            ClaimLostError: The claim is gone, so the COMMIT is refused.
        """
        lost, self._lost = self._lost, []
        for watch in lost:
            _take_anew(watch)
            watch.decided(Fate.OPEN)
            self._riding.append(replace(watch, around=around()))
        seen_to: list[Watch | Errand] = [*self._riding, *self._errands]
        connections = {id(each): each for each in (one.connect() for one in seen_to)}
        failed = [connection for connection in connections.values() if has_failed(connection)]
        if failed:
            _must_hold(self._riding)
        if self._errands and any(is_undone(connection) for connection in failed):
            raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE)
        for errand in self._errands:
            _run(errand, failed=bool(failed))

    def committed(self) -> None:
        """Tell that all of it is durable."""
        errands, self._errands = self._errands, []
        self._tell(self._riding, Fate.COMMITTED)
        for errand in errands:
            errand.decided(Fate.COMMITTED)

    def rolled_back(self, transaction: object) -> None:
        """Tell that a transaction or savepoint, and all within it, is undone."""
        ended = [watch for watch in self._riding if transaction in watch.around]
        self._lost += [watch for watch in ended if watch.goes_on]
        self._tell(ended, Fate.ROLLED_BACK)

    def ended(self) -> None:
        """Tell that the outermost transaction has ended: what is left of it was not committed."""
        self._tell(self._riding, Fate.CLOSED)
        for errand in list(self._errands):
            errand.decided(Fate.ROLLED_BACK)

    def _tell(self, ended: list[Watch], fate: Fate) -> None:
        self._riding = [watch for watch in self._riding if watch not in ended]
        for watch in ended:
            watch.decided(fate)


def _forgotten(watch: Watch) -> Watch:
    return watch if watch.claim is None else replace(watch, claim=replace(watch.claim, retake=None))


def _take_anew(watch: Watch) -> None:
    claim = watch.claim
    with store_errors():
        taken = claim is not None and claim.retake is not None and claim.retake(watch.connect())
    if not taken:
        raise ClaimLostError(TAKEN_SINCE)


def _must_hold(watches: list[Watch]) -> None:
    try:
        held = all(watch.claim is None or watch.claim.holds(watch.connect()) for watch in watches)
    except exc.SQLAlchemyError as error:
        raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE) from error
    if not held:
        raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE)


def _run(errand: Errand, *, failed: bool) -> None:
    try:
        with store_errors():
            errand.work(errand.connect())
    except StoreUnavailableError as error:
        if not failed:
            raise
        raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE) from error


def on_this_loop(decided: Callable[[Fate], None]) -> Callable[[Fate], None]:
    """Return a callable that tells a delivery on its own event loop, whichever thread it is called in.

    A synchronous session commits in the thread of its handler. The loop runs what it is handed in order, so
    it has heard before it learns that the thread's work is done.
    """
    loop = asyncio.get_running_loop()

    def tell(fate: Fate) -> None:
        if asyncio._get_running_loop() is loop:  # noqa: SLF001 - documented for libraries: None, no exception
            decided(fate)
        else:
            with suppress(RuntimeError):  # the loop is closed: nobody is there to hear
                loop.call_soon_threadsafe(decided, fate)

    return tell


class RidingTransaction(ABC):
    """A transaction that claims ride in: ours, or the app's.

    Args:
        home: Where the claims live.

    Attributes:
        used: Whether a handler works in it.
        withdrawn: The keys of claims that were deleted in it again: nobody is to miss them, nor to take them
            anew.
        in_hand: Whether its connection is surely the handler's still, so that a claim can be withdrawn in it.
    """

    used: bool = True
    in_hand: bool = True
    _carried: Carried | None = None

    def __init__(self, home: Home) -> None:
        self._home = home
        self.withdrawn: set[bytes] = set()

    @property
    @abstractmethod
    def session(self) -> Any:
        """The session or connection, for a handler to work with."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether it holds no connection just now."""

    @property
    def outermost(self) -> bool:
        """Whether its COMMIT is the database's."""
        return True

    @property
    def commits(self) -> int:
        """How often it has committed since this was first asked, as far as anybody is told."""
        return 0

    @abstractmethod
    async def run(
        self, work: Callable[[Connection], T], *, undo: Callable[[Connection], object] | None = None
    ) -> T:
        """Run synchronous SQL on the connection of the transaction.

        Args:
            work: What to do.
            undo: What takes it back where the caller is cancelled, and the work is done all the same.

        Raises:
            StoreUnavailableError: The database did not answer, or refused.
            ConfigurationError: The table of claims is not in that database, or a claim cannot ride there.
        """

    def carry(self, claim: Carried) -> None:
        """Take note of the claim that was just made."""
        self._carried = claim

    @abstractmethod
    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back when the innermost transaction open now (or one around it) ends."""

    @abstractmethod
    async def must_lead_home(self) -> None:
        """Refuse a session from which the claims cannot be reached, as far as is known before its use.

        Raises:
            ConfigurationError: It is one.
        """

    @abstractmethod
    def before_commit(self, work: Callable[[Connection], None], decided: Callable[[Fate], None]) -> None:
        """Do work on the connection before each COMMIT, and call back at every end of a transaction."""

    @abstractmethod
    def forget(self) -> None:
        """Take no lost claim anew any more, and do no work before a COMMIT: the delivery is over."""

    @abstractmethod
    async def step_aside(self) -> bool:
        """Give the connection back; False where that would cost the app something."""

    # Hooks, for which most kinds have no use

    async def confirm(self) -> None:  # noqa: B027
        """See to it that the claims are there, where no event will ask before the app's COMMIT."""

    async def commit(self) -> None:  # noqa: B027
        """Leave it to the app, unless it is ours."""

    async def rollback(self) -> None:  # noqa: B027
        """Leave it to the app, unless it is ours."""

    async def leave(self) -> None:  # noqa: B027
        """Find out what became of the claims, where no event tells: all of the app's own has unwound."""
