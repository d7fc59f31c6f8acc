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
framework and no broker: the two protocols of `fastapi_dedup.store` are all that it needs.
"""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claim, Claimed, Duplicate, Fate, InFlight, scope_text
from fastapi_dedup.errors import (
    InvalidLogicalIdError,
    MissingLogicalIdError,
    PayloadTooLargeError,
    StoreUnavailableError,
)
from fastapi_dedup.guard import Seen
from fastapi_dedup.held import Held
from fastapi_dedup.hooks import Event, EventKind, tell
from fastapi_dedup.refusals import KINDS, SEEN, Refusal, closed_without_commit, error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from datetime import timedelta

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.flights import Flight, Flights
    from fastapi_dedup.guard import Attempt, GenerationalGuard
    from fastapi_dedup.hooks import Hook
    from fastapi_dedup.store import Enclosing, Store, Transaction

__all__ = ["Delivery", "settled"]

logger = logging.getLogger("fastapi_dedup")


class Delivery:
    """One arrival of an intent (or of several: a request may claim more than one id).

    Args:
        store: Where claims live.
        own: The transaction that is ours to commit and roll back; it may never be opened.
        flights: The ids that this process has in flight.
        hooks: Who hears of events.
        guard: What answers for ids that this process has seen, before `store` is asked; None asks always.

    Attributes:
        own: The transaction that is ours.
        refusal: Why an id was refused; then no other id of this delivery may stay claimed.
        failed: Whether the delivery has failed or was refused.
    """

    def __init__(
        self,
        store: Store[Any],
        own: Enclosing,
        *,
        flights: Flights,
        hooks: Sequence[Hook],
        guard: GenerationalGuard | None = None,
    ) -> None:
        self.own = own
        self._guard = guard
        self._store = store
        self._flights = flights
        self._hooks = hooks
        self._held: dict[bytes, Held] = {}
        self.failed = False
        self._succeeding = False
        self.refusal: Refusal | None = None

    # 1. claim

    async def claim(
        self,
        intent: Intent,
        transaction: Transaction,
        *,
        wait: timedelta | None = None,
        store: Store[Any] | None = None,
    ) -> Claim | Refusal:
        """Claim an id; the same id met twice in one delivery is one claim.

        Args:
            intent: What is to be done once.
            transaction: The one that the handler's work is in: `own`, or a borrowed one.
            wait: How long to wait for the outcome of a twin in flight; None does not wait.
            store: Where to claim, if not in the delivery's store.

        Raises:
            StoreUnavailableError: Nobody knows whether the work is done, so it must not run.
        """
        if (held := self._held.get(intent.key)) is not None:
            return held.claim
        store = self._store if store is None else store
        try:
            outcome = await self._take(intent, transaction, store, waits=wait is not None)
            if wait is not None and isinstance(outcome, InFlight) and not outcome.abandoned:
                outcome = await self._wait(intent, transaction, store, wait)
        except StoreUnavailableError as error:
            self.unavailable(intent, error)
            raise
        if isinstance(outcome, Claimed):
            return self._held[intent.key].claim
        self.refusal = outcome
        self._refuse(intent, outcome, store.refusals_logged_at)
        return outcome

    async def _take(
        self, intent: Intent, transaction: Transaction, store: Store[Any], *, waits: bool = False
    ) -> Outcome:
        if self._guard is None or not store.durable:
            ahead = self._flights.ahead(intent) if waits and store.durable else None
            return ahead or await self._ask(intent, transaction, store, None)
        with self._guard.attempt(intent.key, fingerprint=intent.fingerprint) as attempt:
            if attempt.seen is Seen.IN_FLIGHT:
                return self._flights.seen_from(intent)
            if attempt.seen is not Seen.NEW:
                return SEEN[attempt.seen]
            outcome = await self._ask(intent, transaction, store, attempt)
            if isinstance(outcome, Claimed):
                attempt.keep()
            return outcome

    async def _ask(
        self, intent: Intent, transaction: Transaction, store: Store[Any], attempt: Attempt | None
    ) -> Outcome:
        flight = self._flights.depart(intent)
        if flight is None and not store.sees_in_flight:
            # A neighbour is at it, and the store would make us queue behind it: a look must do.
            return await store.look(intent, transaction) or self._flights.seen_from(intent)
        try:
            outcome = await store.claim(intent, transaction)
        except BaseException:
            self._flights.land(flight)
            raise
        if isinstance(outcome, Claimed):
            held = Held.of(intent, outcome.receipt, store, transaction)
            transaction.watch(self._hold(held, flight, attempt))
            self._tell(EventKind.CLAIMED, intent)
            return outcome
        self._flights.land(flight)
        return self._flights.seen_from(intent) if outcome == InFlight() else outcome

    async def _wait(
        self, intent: Intent, transaction: Transaction, store: Store[Any], wait: timedelta
    ) -> Outcome:
        """Wait without a connection until the twin's outcome is known, or time is up."""
        outcome: Outcome = InFlight()
        deadline = time.monotonic() + wait.total_seconds()
        with self._flights.line(intent) as place:
            while (left := deadline - time.monotonic()) > 0:
                if not await transaction.step_aside():
                    logger.warning(
                        "cannot wait for logical id %r in scope %r: its session was used before the claim, "
                        "and waiting would keep its connection from others; answering at once",
                        intent.logical_id,
                        scope_text(intent.scope),
                    )
                    break
                if not await place.turn(at_most=left):
                    break
                outcome = await self._take(intent, transaction, store, waits=True)
                place.told = not isinstance(outcome, InFlight) or outcome.abandoned
                if place.told:
                    break
        return outcome

    def _hold(self, held: Held, flight: Flight | None, attempt: Attempt | None) -> Callable[[Fate], None]:
        """Hold a claim that the store has given, and return what is to be told of its transaction's end."""
        intent = held.intent
        self._held[intent.key] = held
        flight = flight or self._flights.overtake(intent)
        flight.held = True

        def decided(fate: Fate) -> None:
            if fate is Fate.UNSEEN:  # from here on it is the database that answers for the id
                self._flights.land(flight)
                if attempt is not None:
                    attempt.release()
                return
            held.fate = fate
            held.kept = fate is Fate.COMMITTED and self._succeeding
            if fate is Fate.OPEN:  # taken anew before a COMMIT, after the handler's ROLLBACK
                return
            self._flights.land(flight)
            if (
                attempt is not None
                and fate is Fate.COMMITTED
                and held.transaction.outermost
                and not held.given_back
            ):
                attempt.complete(window=intent.window)
            elif attempt is not None:
                attempt.release()
            if not held.given_back:
                self._tell(EventKind.COMMITTED if fate is Fate.COMMITTED else EventKind.RELEASED, intent)

        return decided

    # 3. settle

    async def worked(self) -> None:
        """Do what comes after the work and before the app's session ends, and with it maybe the claim.

        Raises:
            ClaimLostError: A claim is gone, and no event would have told before the COMMIT.
        """
        for held in self._held.values():
            if held.intent.from_end and held.fate is Fate.OPEN:
                await held.store.renew(held.intent, held.receipt, held.transaction)
        for transaction in self._transactions:
            await transaction.confirm()

    async def succeed(self) -> None:
        """Commit what is ours. A claim that the handler rolled back mid-way is taken anew before.

        Raises:
            DuplicateError: The claim was rolled back mid-way, and another delivery has done the work.
            ClaimInFlightError: The same, and another delivery is doing it.
            ClaimLostError: A borrowed session was closed without COMMIT.
            Exception: Whatever COMMIT raised, unchanged: the app's constraints are the app's.
        """
        for transaction in self._transactions:
            if transaction.in_hand:
                await transaction.confirm()
        for held in list(self._held.values()):
            if held.fate is Fate.ROLLED_BACK and not held.given_back:
                held.transaction.forget()  # else its next COMMIT would take the claim anew as well
                outcome = await self._take(held.intent, held.transaction, held.store)
                if not isinstance(outcome, Claimed):
                    self.refusal = outcome
                    self._refuse(held.intent, outcome, held.store.refusals_logged_at)
                    raise error_of(held.intent, outcome)
        # Not shielded: a COMMIT that is cut in half is durable, claim and work, or neither is.
        self._succeeding = True
        await self.own.commit()
        await self._commit_others(durable=True)
        await self._commit_others(durable=False)  # last: claims in memory remember what is committed

    async def _commit_others(self, *, durable: bool) -> None:
        for held in self._held.values():
            if held.store.durable is durable and held.transaction is not self.own:
                await held.transaction.commit()
        if self.lost:
            raise closed_without_commit()

    async def fail(self) -> None:
        """Undo: roll back what is ours, and give the ids back. Never raises, so that nothing is masked."""
        self.failed = True
        for held in self._held.values():
            held.transaction.forget()
        await uncancelled(self._undo())

    async def finish(self) -> None:
        """Release what could not be released before, once all of the caller's own has unwound.

        A borrowed session that is still at work keeps its connection, so the release waits for its end. What
        was done in our own transaction after the success is committed.
        """
        for held in self._held.values():
            if held.fate is not Fate.COMMITTED:
                held.transaction.forget()
        for transaction in self._transactions:
            await transaction.leave()
        if self.failed or not self._succeeding:  # who never responded has failed
            self.failed = True
            await uncancelled(self._undo())
            for held in self._held.values():
                self._give_back_when_idle(held)
            return
        for held in self._held.values():
            if held.fate is Fate.OPEN and held.transaction is not self.own:
                await held.transaction.commit()
        if not self.own.idle:  # something went on after the success was told
            await uncancelled(self._end_own())

    @property
    def _transactions(self) -> list[Transaction]:
        return list(dict.fromkeys(held.transaction for held in self._held.values()))

    @property
    def undecided(self) -> list[Transaction]:
        """The transactions that still have the fate of a claim in the database in their hands."""
        held = self._held.values()
        return [each.transaction for each in held if each.fate is Fate.OPEN and each.store.durable]

    @property
    def lost(self) -> bool:
        """Whether a claim is gone, though nobody has said that the delivery failed."""
        gone = {Fate.ROLLED_BACK, Fate.CLOSED}
        return not self.failed and any(
            held.fate in gone and not held.given_back for held in self._held.values()
        )

    @property
    def unsettled(self) -> bool:
        """Whether a borrowed transaction still has a claim's fate in its hands."""
        return any(
            held.fate is Fate.OPEN or (self.failed and held.fate is Fate.COMMITTED and held.to_give_back)
            for held in self._held.values()
        )

    async def _end_own(self) -> None:
        try:
            await self.own.commit()
        finally:
            await self.own.rollback()

    async def _undo(self) -> None:
        try:
            await self.own.rollback()
        except Exception:
            logger.exception("the rollback failed; the database ends the transaction with the connection")
        for held in self._held.values():
            if held.transaction is not self.own:
                await held.transaction.rollback()
            if held.to_give_back:
                await self._give_back(held)

    def _give_back_when_idle(self, held: Held) -> None:
        if held.to_give_back and not held.transaction.idle:
            held.transaction.watch(lambda _: self._flights.background(self._give_back_later(held)))

    async def _give_back_later(self, held: Held) -> None:
        await self._give_back(held)
        self._give_back_when_idle(held)

    async def _give_back(self, held: Held) -> None:
        """Withdraw a claim from a transaction that is still open, or release one that was committed."""
        if held.fate is Fate.OPEN and not held.transaction.in_hand:
            return  # finish() learns what became of it
        try:
            if held.fate is Fate.OPEN:
                await held.store.withdraw(held.intent, held.receipt, held.transaction)
            elif held.transaction.idle:
                await held.store.release(held.intent, held.receipt)
                if self._guard is not None:
                    self._guard.forget(held.intent.key)
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

    def unavailable(self, intent: Intent, error: StoreUnavailableError) -> None:
        """Take note that nobody knows whether an intent's work is done."""
        logger.info(
            "refused logical id %r in scope %r: %s", intent.logical_id, scope_text(intent.scope), error
        )
        self._tell(EventKind.UNAVAILABLE, intent)

    def _refuse(self, intent: Intent, refusal: Refusal, level: int) -> None:
        age = refusal.age if isinstance(refusal, Duplicate) else None
        kind = KINDS[type(refusal)]
        abandoned = isinstance(refusal, InFlight) and refusal.abandoned
        logger.log(
            logging.WARNING if abandoned else level,
            "refused logical id %r in scope %r: %s, age %s%s",
            intent.logical_id,
            scope_text(intent.scope),
            kind.value,
            age if age is not None else "unknown",
            "; its owner is gone, and on_abandoned='block' leaves it to you to release it"
            if abandoned
            else "",
        )
        self._tell(kind, intent, age)

    def _tell(self, kind: EventKind, intent: Intent, age: timedelta | None = None) -> None:
        if self._hooks:
            tell(self._hooks, Event(kind, intent.logical_id, scope_text(intent.scope), age))


@asynccontextmanager
async def settled(delivery: Delivery) -> AsyncIterator[None]:
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
    if delivery.lost:
        raise closed_without_commit()
