"""Claim, run, settle, for many ids at once: `core` for a batch."""

from __future__ import annotations

import logging
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi_dedup.batches import Batch, BatchOutcome, Entry
from fastapi_dedup.claims import Claim, Claimed, Duplicate, Fate, InFlight, Mismatch
from fastapi_dedup.core import Delivery, settled
from fastapi_dedup.errors import StoreUnavailableError
from fastapi_dedup.guard import Seen
from fastapi_dedup.held import Held
from fastapi_dedup.hooks import EventKind
from fastapi_dedup.refusals import SEEN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.flights import Flight
    from fastapi_dedup.guard import Attempt
    from fastapi_dedup.refusals import Refusal
    from fastapi_dedup.store import BatchStore, Transaction

__all__ = ["BatchDelivery", "claimed_batch"]

logger = logging.getLogger("fastapi_dedup")

T = TypeVar("T")

_OUTCOMES = {
    Claim: BatchOutcome.NEW,
    Duplicate: BatchOutcome.DUPLICATE,
    InFlight: BatchOutcome.IN_FLIGHT,
    Mismatch: BatchOutcome.MISMATCH,
}


@asynccontextmanager
async def claimed_batch(
    delivery: BatchDelivery, wanted: Sequence[tuple[T, Intent]], transaction: Transaction
) -> AsyncIterator[Batch[T]]:
    """Claim, run and settle a batch.

    Args:
        delivery: The delivery.
        wanted: The items, each with its intent; all of one scope and window.
        transaction: The one that the work is in.
    """
    first: dict[bytes, Intent] = {}
    for _, intent in wanted:
        first.setdefault(intent.key, intent)
    async with settled(delivery):
        found = await delivery.claim_many(list(first.values()), transaction)
        batch = Batch(_entries(delivery, wanted, first, found), transaction)
        yield batch
        released = batch._end()  # noqa: SLF001 - a batch is ours as long as its block is open
        await delivery.withdraw([intent for intent in first.values() if intent.logical_id in released])


def _entries(
    delivery: BatchDelivery,
    wanted: Sequence[tuple[T, Intent]],
    first: Mapping[bytes, Intent],
    found: Mapping[bytes, Claim | Refusal],
) -> Iterator[Entry[T]]:
    for item, intent in wanted:
        answer = found[intent.key]
        outcome = _OUTCOMES[type(answer)]
        original = first[intent.key]
        if intent is not original:
            outcome, answer = _of_a_copy(intent, original, answer)
            delivery.repeated(intent, answer)
        match answer:
            case Claim(claimed_at=claimed_at, expires_at=expires_at):
                yield Entry(item, intent.logical_id, outcome, claimed_at, expires_at)
            case Duplicate(claimed_at, expires_at, age):
                yield Entry(item, intent.logical_id, outcome, claimed_at, expires_at, age)
            case _:
                yield Entry(item, intent.logical_id, outcome)


def _of_a_copy(
    copy: Intent, original: Intent, answer: Claim | Refusal
) -> tuple[BatchOutcome, Claim | Refusal]:
    """Return what is to be said of an id that stood in the batch before: what was said then."""
    if None not in (copy.fingerprint, original.fingerprint) and copy.fingerprint != original.fingerprint:
        return BatchOutcome.MISMATCH, Mismatch()
    if isinstance(answer, Claim):
        return BatchOutcome.REPEAT, answer
    return _OUTCOMES[type(answer)], answer


class BatchDelivery(Delivery):
    """A delivery of many intents, of which those that are refused leave the others alone."""

    @property
    def _many(self) -> BatchStore[Any]:
        return self._store  # type: ignore[return-value]  # as every durable store is

    async def claim_many(
        self, intents: Sequence[Intent], transaction: Transaction
    ) -> dict[bytes, Claim | Refusal]:
        """Claim ids that differ, and return what came of each, by its key. No ids, no query.

        Args:
            intents: What is to be done once each; all of one scope and window.
            transaction: The one that the work is in: `own`, or a borrowed one.

        Raises:
            StoreUnavailableError: Nobody knows what is done, so nothing must run.
        """
        if not intents:
            return {}
        try:
            outcomes = await self._take_many(intents, transaction)
        except StoreUnavailableError as error:
            for intent in intents:
                self.unavailable(intent, error)
            raise
        found: dict[bytes, Claim | Refusal] = {}
        for intent in intents:
            outcome = outcomes[intent.key]
            if isinstance(outcome, Claimed):
                found[intent.key] = self._held[intent.key].claim
            else:
                found[intent.key] = outcome
                self._refuse(intent, outcome, self._store.refusals_logged_at)
        return found

    def repeated(self, intent: Intent, answer: Claim | Refusal) -> None:
        """Take note of an id that stood in the batch before."""
        if not isinstance(answer, Claim):
            self._refuse(intent, answer, self._store.refusals_logged_at)
            return
        logger.log(
            self._store.refusals_logged_at,
            "refused logical id %r in scope %r: a repeat inside its batch, age 0:00:00",
            intent.logical_id,
            answer.scope,
        )
        self._tell(EventKind.REPEAT, intent)

    async def withdraw(self, intents: Sequence[Intent]) -> None:
        """Delete claims in the transaction that made them, before it commits.

        Raises:
            StoreUnavailableError: The database did not answer: then none of the claims may be committed.
        """
        batch = [self._held[intent.key] for intent in intents]
        if not batch:
            return
        first = batch[0]
        await self._many.withdraw_many(intents, first.receipt, first.transaction)
        if first.fate is Fate.COMMITTED:  # the handler has committed mid-way
            self._forget(intents)
        self._given_back(batch)

    async def _take_many(self, intents: Sequence[Intent], transaction: Transaction) -> dict[bytes, Outcome]:
        """Take what the guard does not know: the ids that are new to it are in flight for it meanwhile."""
        if self._guard is None:
            return await self._ask_many(intents, transaction, {})
        outcomes: dict[bytes, Outcome] = {}
        attempts: dict[bytes, Attempt] = {}
        with ExitStack() as stack:
            for intent in intents:
                attempt = self._guard.attempt(intent.key, fingerprint=intent.fingerprint)
                stack.enter_context(attempt)
                if attempt.seen is Seen.NEW:
                    attempts[intent.key] = attempt
                elif attempt.seen is Seen.IN_FLIGHT:
                    outcomes[intent.key] = self._flights.seen_from(intent)
                else:
                    outcomes[intent.key] = SEEN[attempt.seen]
            unknown = [intent for intent in intents if intent.key in attempts]
            outcomes |= await self._ask_many(unknown, transaction, attempts)
            for key, attempt in attempts.items():
                if isinstance(outcomes[key], Claimed):
                    attempt.keep()
        return outcomes

    async def _ask_many(
        self, intents: Sequence[Intent], transaction: Transaction, attempts: Mapping[bytes, Attempt]
    ) -> dict[bytes, Outcome]:
        flights = {intent.key: self._flights.depart(intent) for intent in intents}
        outcomes: dict[bytes, Outcome] = {}
        try:
            if not self._many.sees_in_flight:
                # Neighbours are at some, and the store would make us queue behind them: a look must do.
                behind = [intent for intent in intents if flights[intent.key] is None]
                for intent in behind:
                    seen = await self._many.look(intent, transaction)
                    outcomes[intent.key] = seen or self._flights.seen_from(intent)
            asked = [intent for intent in intents if intent.key not in outcomes]
            if asked:
                outcomes |= await self._many.claim_many(asked, transaction)
        except BaseException:
            for flight in flights.values():
                self._flights.land(flight)
            raise
        self._hold_many(intents, outcomes, transaction, flights, attempts)
        return outcomes

    def _hold_many(
        self,
        intents: Iterable[Intent],
        outcomes: dict[bytes, Outcome],
        transaction: Transaction,
        flights: Mapping[bytes, Flight | None],
        attempts: Mapping[bytes, Attempt],
    ) -> None:
        """Hold what the store has given, and land the rest."""
        ends: dict[bytes, Callable[[Fate], None]] = {}
        for intent in intents:
            outcome, flight = outcomes[intent.key], flights[intent.key]
            if isinstance(outcome, Claimed):
                held = Held.of(intent, outcome.receipt, self._many, transaction)
                ends[intent.key] = self._hold(held, flight, attempts.get(intent.key))
                continue
            self._flights.land(flight)
            if outcome == InFlight():
                outcomes[intent.key] = self._flights.seen_from(intent)

        def decided(fate: Fate) -> None:
            for end in ends.values():
                end(fate)

        if ends:
            transaction.watch(decided)
        for key in ends:
            self._tell(EventKind.CLAIMED, self._held[key].intent)

    async def _give_back(self, held: Held) -> None:
        """Give back the whole batch at once: its claims were made together, so they share one fate."""
        token = held.receipt.token
        batch = [each for each in self._held.values() if each.to_give_back and each.receipt.token == token]
        intents = [each.intent for each in batch]
        if not batch:  # given back with another one
            return
        try:
            if held.fate is Fate.OPEN:
                await self._many.withdraw_many(intents, held.receipt, held.transaction)
            elif held.transaction.idle:
                await self._many.release_many(intents, held.receipt)
                self._forget(intents)
            else:
                return  # it would take a second connection: finish() comes when this one is given back
        except Exception as error:
            if held.fate is Fate.OPEN:  # most likely, the transaction is past saving, and so are its claims
                logger.debug("could not withdraw a batch of %d: %s", len(batch), error)
                return
            logger.exception(
                "could not give back a batch of %d in scope %r, logical id %r among them: retries may be "
                "refused until %s",
                len(batch),
                held.claim.scope,
                held.intent.logical_id,
                held.claim.expires_at,
            )
            for each in batch:
                each.given_back = True
        else:
            self._given_back(batch)

    def _forget(self, intents: Iterable[Intent]) -> None:
        if self._guard is not None:
            for intent in intents:
                self._guard.forget(intent.key)

    def _given_back(self, batch: Iterable[Held]) -> None:
        for held in batch:
            held.given_back = True
            self._tell(EventKind.RELEASED, held.intent)
