"""Claim, run, settle: what every door drives. Read this first.

A *delivery* is one arrival of an intent. Its life, whichever door it came through:

    outcome = await delivery.claim(intent, transaction)   # 1. claim, inside the handler's transaction
    ...                        # 2. run: the door runs the handler if the outcome is a Claim
    await delivery.succeed()   # 3. settle: commit what is ours (claim and work in one COMMIT), or
    await delivery.fail()      #    roll back what is ours, withdraw or release the rest;
    await delivery.finish()    #    when everything of the caller's has unwound: release what is left

Where a door is one block of code (`dedup.claim`, message handlers), `settled` makes these calls; over HTTP
the middleware does, for only it sees when the response starts.

The database decides who wins; the store knows how to ask it. This module knows no database, no web
framework and no broker: the two protocols below are all that it needs.
"""

from __future__ import annotations

import logging
import random
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claim, Claimed, Duplicate, Fate, InFlight, Mismatch, scope_text
from fastapi_dedup.errors import (
    ClaimInFlightError,
    DedupError,
    DuplicateError,
    FingerprintMismatchError,
    InvalidLogicalIdError,
    MissingLogicalIdError,
    PayloadTooLargeError,
    StoreUnavailableError,
)
from fastapi_dedup.hooks import Event, EventKind, tell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from datetime import timedelta

    from fastapi_dedup.claims import Intent, Outcome, Receipt
    from fastapi_dedup.flights import Flight, Flights
    from fastapi_dedup.hooks import Hook

__all__ = ["Delivery", "Refusal", "Store", "Transaction", "error_of", "settled"]

logger = logging.getLogger("fastapi_dedup")

Refusal: TypeAlias = Duplicate | InFlight | Mismatch


class Transaction(Protocol):
    """The transaction that claims ride in: ours to end, or borrowed from the app."""

    @property
    def session(self) -> Any:
        """The session or connection that the handler works with."""

    @property
    def idle(self) -> bool:
        """Whether it holds no connection just now."""

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back once, when the innermost transaction open now (or one around it) ends."""

    def forget(self) -> None:
        """Take no lost claim anew any more: the delivery is over."""

    async def step_aside(self) -> bool:
        """Give the connection back while a duplicate waits; False where others have used it already."""

    async def commit(self) -> None:
        """Commit it if it is ours; a borrowed one commits where the app says."""

    async def rollback(self) -> None:
        """Roll it back if it is ours, and let go of its connection."""


Tx = TypeVar("Tx", bound=Transaction)
Tx_contra = TypeVar("Tx_contra", bound=Transaction, contravariant=True)


class Store(Protocol[Tx_contra]):
    """Where claims live. Everything it raises is a `DedupError`, with the driver's error as its cause."""

    sees_in_flight: bool
    """Whether `claim` sees an unfinished twin without waiting for it."""

    async def claim(self, intent: Intent, transaction: Tx_contra) -> Outcome:
        """Take the id inside the transaction, or say why not, and leave the transaction usable."""

    async def look(self, intent: Intent, transaction: Tx_contra) -> Outcome | None:
        """Return what a committed, unexpired claim answers; None where there is none. Takes no lock."""

    async def renew(self, intent: Intent, receipt: Receipt, transaction: Tx_contra) -> None:
        """Count a claim's window anew from now, inside the transaction that made it."""

    async def withdraw(self, intent: Intent, receipt: Receipt, transaction: Tx_contra) -> None:
        """Delete a claim inside the transaction that made it."""

    async def release(self, intent: Intent, receipt: Receipt) -> bool:
        """Delete a committed claim in a transaction of its own, if it still is the receipt's."""


@dataclass(slots=True, eq=False)
class _Held(Generic[Tx]):
    """A claim that this delivery holds, and what became of it."""

    intent: Intent
    receipt: Receipt
    claim: Claim
    transaction: Tx
    fate: Fate = Fate.OPEN
    given_back: bool = False
    kept: bool = False
    """Whether it was committed because the delivery had succeeded: then nothing may take it back."""

    @property
    def to_give_back(self) -> bool:
        """Whether a failure has left it standing."""
        return self.fate in {Fate.OPEN, Fate.COMMITTED} and not (self.given_back or self.kept)


class Delivery(Generic[Tx]):
    """One arrival of an intent (or of several: a request may claim more than one id).

    Args:
        store: Where claims live.
        own: The transaction that is ours to commit and roll back; it may never be opened.
        flights: The ids that this process has in flight.
        hooks: Who hears of events.

    Attributes:
        own: The transaction that is ours.
        refused: Whether an id was refused; then no other id of this delivery may stay claimed.
    """

    def __init__(self, store: Store[Tx], own: Tx, *, flights: Flights, hooks: Sequence[Hook]) -> None:
        self.own = own
        self._store = store
        self._flights = flights
        self._hooks = hooks
        self._held: dict[bytes, _Held[Tx]] = {}
        self._failed = False
        self._succeeding = False
        self.refused = False

    # 1. claim

    async def claim(
        self, intent: Intent, transaction: Tx, *, wait: timedelta | None = None
    ) -> Claim | Refusal:
        """Claim an id; the same id met twice in one delivery is one claim.

        Args:
            intent: What is to be done once.
            transaction: The one that the handler's work is in: `own`, or a borrowed one.
            wait: How long to wait for the outcome of a twin in flight; None does not wait.

        Raises:
            StoreUnavailableError: Nobody knows whether the work is done, so it must not run.
        """
        if (held := self._held.get(intent.key)) is not None:
            return held.claim
        try:
            outcome = await self._take(intent, transaction)
            if wait is not None and isinstance(outcome, InFlight):
                outcome = await self._wait(intent, transaction, wait)
        except StoreUnavailableError as error:
            logger.info(
                "refused logical id %r in scope %r: %s", intent.logical_id, scope_text(intent.scope), error
            )
            self._tell(EventKind.UNAVAILABLE, intent)
            raise
        if isinstance(outcome, Claimed):
            return self._held[intent.key].claim
        self._refuse(intent, outcome)
        return outcome

    async def _take(self, intent: Intent, transaction: Tx) -> Outcome:
        flight = self._flights.depart(intent)
        if flight is None and not self._store.sees_in_flight:
            # A neighbour is at it, and the store would make us queue behind it: a look must do.
            return await self._store.look(intent, transaction) or self._flights.seen_from(intent)
        try:
            outcome = await self._store.claim(intent, transaction)
        except BaseException:
            self._flights.land(flight)
            raise
        if isinstance(outcome, Claimed):
            self._hold(intent, outcome.receipt, transaction, flight or self._flights.overtake(intent))
            return outcome
        self._flights.land(flight)
        return self._flights.seen_from(intent) if isinstance(outcome, InFlight) else outcome

    async def _wait(self, intent: Intent, transaction: Tx, wait: timedelta) -> Outcome:
        """Wait without a connection until the twin's outcome is known, or time is up."""
        outcome: Outcome = InFlight()
        deadline = time.monotonic() + wait.total_seconds()
        for pause in _pauses():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not await transaction.step_aside():
                logger.warning(
                    "cannot wait for logical id %r in scope %r: its session was used before the claim, and "
                    "waiting would keep its connection from others; answering at once",
                    intent.logical_id,
                    scope_text(intent.scope),
                )
                break
            await self._flights.landing(intent, pause=min(pause, left), at_most=left)
            outcome = await self._take(intent, transaction)
            if not isinstance(outcome, InFlight):
                break
        return outcome

    def _hold(self, intent: Intent, receipt: Receipt, transaction: Tx, flight: Flight) -> None:
        claim = Claim(
            intent.logical_id,
            scope_text(intent.scope),
            receipt.claimed_at,
            receipt.expires_at,
            transaction,
        )
        held = self._held[intent.key] = _Held(intent, receipt, claim, transaction)
        flight.held = True
        self._tell(EventKind.CLAIMED, intent)

        def decided(fate: Fate) -> None:
            held.fate = fate
            held.kept = fate is Fate.COMMITTED and self._succeeding
            if fate is Fate.OPEN:  # taken anew before a COMMIT, after the handler's ROLLBACK
                return
            self._flights.land(flight)
            if not held.given_back:
                self._tell(EventKind.COMMITTED if fate is Fate.COMMITTED else EventKind.RELEASED, intent)

        transaction.watch(decided)

    # 3. settle

    async def worked(self) -> None:
        """Count windows anew that are counted from the end of the work, before any transaction commits."""
        for held in self._held.values():
            if held.intent.from_end and held.fate is Fate.OPEN:
                await self._store.renew(held.intent, held.receipt, held.transaction)

    async def succeed(self) -> None:
        """Commit what is ours. A claim that the handler rolled back mid-way is taken anew before.

        Raises:
            DuplicateError: The claim was rolled back mid-way, and another delivery has done the work.
            ClaimInFlightError: The same, and another delivery is doing it.
            Exception: Whatever COMMIT raised, unchanged: the app's constraints are the app's.
        """
        for held in list(self._held.values()):
            if held.fate is Fate.ROLLED_BACK:
                held.transaction.forget()  # else its next COMMIT would take the claim anew as well
                outcome = await self._take(held.intent, held.transaction)
                if not isinstance(outcome, Claimed):
                    self._refuse(held.intent, outcome)
                    raise error_of(held.intent, outcome)
        # Not shielded: a COMMIT that is cut in half is durable, claim and work, or neither is.
        self._succeeding = True
        await self.own.commit()

    async def fail(self) -> None:
        """Undo: roll back what is ours, and give the ids back. Never raises, so that nothing is masked."""
        self._failed = True
        for held in self._held.values():
            held.transaction.forget()
        await uncancelled(self._undo())

    async def finish(self) -> None:
        """Release what could not be released before, once all of the caller's own has unwound.

        A borrowed session that is still at work keeps its connection, so the release waits for its end.
        """
        for held in self._held.values():
            held.transaction.forget()
        if self._failed:
            await uncancelled(self._undo())
            for held in self._held.values():
                if held.to_give_back and not held.transaction.idle:
                    held.transaction.watch(partial(self._give_back_later, held))
        elif not self.own.idle:
            await uncancelled(self.own.rollback())

    @property
    def failed(self) -> bool:
        """Whether the delivery has failed or was refused."""
        return self._failed

    @property
    def unsettled(self) -> bool:
        """Whether a borrowed transaction still has a claim's fate in its hands."""
        return any(
            held.fate is Fate.OPEN or (self._failed and held.fate is Fate.COMMITTED and held.to_give_back)
            for held in self._held.values()
        )

    async def _undo(self) -> None:
        try:
            await self.own.rollback()
        except Exception:
            logger.exception("the rollback failed; the database ends the transaction with the connection")
        for held in self._held.values():
            if held.to_give_back:
                await self._give_back(held)

    def _give_back_later(self, held: _Held[Tx], _: Fate) -> None:
        self._flights.background(self._give_back(held))

    async def _give_back(self, held: _Held[Tx]) -> None:
        """Withdraw a claim from a transaction that is still open, or release one that was committed."""
        try:
            if held.fate is Fate.OPEN:
                await self._store.withdraw(held.intent, held.receipt, held.transaction)
            elif held.transaction.idle:
                await self._store.release(held.intent, held.receipt)
            else:
                return  # it would take a second connection: finish() comes when this one is given back
        except Exception as error:
            if held.fate is Fate.OPEN:  # most likely, the transaction is past saving, and so is its claim
                logger.debug("could not withdraw logical id %r: %s", held.intent.logical_id, error)
                return
            logger.exception(
                "could not give back logical id %r in scope %r: retries may be refused until %s",
                held.intent.logical_id,
                held.claim.scope,
                held.claim.expires_at,
            )
        else:
            self._tell(EventKind.RELEASED, held.intent)
        held.given_back = True

    # telling

    def unidentified(
        self, error: MissingLogicalIdError | InvalidLogicalIdError | PayloadTooLargeError
    ) -> None:
        """Take note that a delivery is refused before it is known which intent it is of."""
        logger.info("refused a delivery: %s", error)
        match error:
            case MissingLogicalIdError():
                kind = EventKind.MISSING
            case InvalidLogicalIdError():
                kind = EventKind.INVALID
            case PayloadTooLargeError():
                kind = EventKind.TOO_LARGE
        tell(self._hooks, Event(kind))

    def _refuse(self, intent: Intent, refusal: Refusal) -> None:
        self.refused = True
        age = refusal.age if isinstance(refusal, Duplicate) else None
        kind = _KINDS[type(refusal)]
        logger.info(
            "refused logical id %r in scope %r: %s, age %s",
            intent.logical_id,
            scope_text(intent.scope),
            kind.value,
            age if age is not None else "unknown",
        )
        self._tell(kind, intent, age)

    def _tell(self, kind: EventKind, intent: Intent, age: timedelta | None = None) -> None:
        if self._hooks:
            tell(self._hooks, Event(kind, intent.logical_id, scope_text(intent.scope), age))


@asynccontextmanager
async def settled(delivery: Delivery[Any]) -> AsyncIterator[None]:
    """Settle a delivery around a block of code: success at its end, failure where it raises or has failed."""
    try:
        yield
        if not delivery.failed:
            await delivery.succeed()
    except BaseException:
        await delivery.fail()
        raise
    finally:
        await delivery.finish()


_KINDS = {
    Duplicate: EventKind.DUPLICATE,
    InFlight: EventKind.IN_FLIGHT,
    Mismatch: EventKind.MISMATCH,
}


def error_of(intent: Intent, refusal: Refusal) -> DedupError:
    """Return the error that a refusal is, for the doors that cannot return a value instead of running."""
    where = (intent.logical_id, scope_text(intent.scope))
    match refusal:
        case Duplicate(claimed_at, expires_at, age):
            return DuplicateError(*where, claimed_at=claimed_at, expires_at=expires_at, age=age)
        case InFlight():
            return ClaimInFlightError(*where)
        case Mismatch():
            return FingerprintMismatchError(*where)


def _pauses() -> Iterator[float]:
    """Yield the waits between two looks at another process's flight: jittered, doubling up to 0.5 s."""
    pause = 0.02
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, not a secret
        pause = min(pause * 2, 0.5)
