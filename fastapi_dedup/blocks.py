"""The plain doors: `async with` blocks around one id or many, for jobs, scripts, routes and consumers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from fastapi_dedup.batch_delivery import BatchDelivery, claimed_batch
from fastapi_dedup.claims import Claim, positive
from fastapi_dedup.core import settled
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identity import named, required
from fastapi_dedup.policy import Policy
from fastapi_dedup.refusals import error_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from fastapi_dedup.batches import Batch
    from fastapi_dedup.claims import Intent
    from fastapi_dedup.core import Delivery
    from fastapi_dedup.store import Enclosing, Store, Transaction

__all__ = ["Blocks", "Scope"]

T = TypeVar("T")
D = TypeVar("D", bound="Delivery")

Scope: TypeAlias = str | tuple[str, ...]
"""A namespace of ids: a name, or the parts of it."""


class _Runtime(Protocol):
    """What a block needs of the runtime."""

    def intent(
        self,
        logical_id: str,
        *,
        scope: Scope,
        window: timedelta | None = None,
        fingerprint: bytes | None = None,
    ) -> Intent:
        """Return what a delivery wants done once."""

    def borrow(self, session: Any) -> Enclosing:
        """Return the transaction of a session or connection of the app's."""

    def place(
        self, policy: Policy, intent: Intent, transaction: Enclosing, delivery: Delivery
    ) -> tuple[Intent, Transaction, Store[Any] | None]:
        """Say where a policy's claim goes."""

    def delivery(self) -> Delivery:
        """Return a new delivery, with a transaction of its own."""

    def _delivery_of(self, kind: type[D]) -> D:
        """Return a new delivery of a kind."""


class Blocks:
    """The blocks of a runtime."""

    @asynccontextmanager
    async def claim(
        self: _Runtime,
        logical_id: str,
        *,
        scope: Scope,
        session: Any = None,
        window: timedelta | None = None,
        fingerprint: bytes | None = None,
        in_flight: Literal["reject", "wait"] = "reject",
        wait_timeout: timedelta = timedelta(seconds=10),
        lease: timedelta | None = None,
        on_abandoned: Literal["retry", "block"] = "retry",
    ) -> AsyncIterator[Claim]:
        """Claim an id around a block of work: the primitive, for jobs and scripts.

            async with dedup.claim("nightly|2026-11-30", scope="rebuild") as claim:
                await rebuild(claim.session)

        Without `session` the block works in `claim.session`, which is committed together with the claim
        when the block ends, and rolled back when it raises. With `session` the claim rides that session's
        transaction, which stays yours to commit; if the block raises, the claim is withdrawn from it.

        Args:
            logical_id: The id.
            scope: The namespace that it is unique in: a name, or a tuple of parts.
            session: The session or connection to ride, of any kind that `session=` of a policy may give; None
                opens one.
            window: How long the id is honoured; None takes the runtime's.
            fingerprint: Digest of the payload, of any length; None leaves the payload out of it.
            in_flight: `"reject"` a twin of unfinished work at once, or `"wait"` for its outcome.
            wait_timeout: How long to wait.
            lease: Claims in a short transaction of its own and keeps the claim alive while the block runs;
                the COMMIT of the block's session completes it. The duration is how long the claim survives an
                owner that has died. None rides the session's transaction.
            on_abandoned: What becomes of a leased id whose owner died: the next delivery runs (`"retry"`), or
                it stays in flight until the window ends or `release` frees it (`"block"`).

        Yields:
            The claim.

        Raises:
            DuplicateError: The work is done.
            ClaimInFlightError: The work is under way.
            FingerprintMismatchError: The id was claimed for another payload.
            MissingLogicalIdError: The id is blank, or a part of the scope is.
            InvalidLogicalIdError: The id is no legal one.
            ConfigurationError: An option cannot be kept.
            StoreUnavailableError: The database did not answer.
            ClaimLostError: The lease ran out, and another delivery has taken the id: nothing is committed.
        """
        legal_id = required(logical_id, field="logical_id")
        policy = Policy(
            window=window,
            in_flight=in_flight,
            wait_timeout=wait_timeout,
            lease=lease,
            on_abandoned=on_abandoned,
        )
        intent = self.intent(legal_id, scope=named(scope), window=window, fingerprint=fingerprint)
        delivery = self.delivery()
        transaction = delivery.own if session is None else self.borrow(session)
        intent, place, store = self.place(policy, intent, transaction, delivery)
        async with settled(delivery):
            outcome = await delivery.claim(intent, place, wait=policy.patience, store=store)
            if not isinstance(outcome, Claim):
                raise error_of(intent, outcome)
            yield outcome

    @asynccontextmanager
    async def claim_many(
        self: _Runtime,
        items: Iterable[T],
        *,
        scope: Scope,
        logical_id: Callable[[T], Any] | None = None,
        fingerprint: Callable[[T], bytes | None] | None = None,
        session: Any = None,
        window: timedelta | None = None,
    ) -> AsyncIterator[Batch[T]]:
        """Claim many ids at once around a block of work, in as few statements as the database allows.

            async with dedup.claim_many(events, logical_id=lambda event: event.id, scope="webhooks") as batch:
                for event in batch.new:
                    batch.session.add(Payment(event=event.id))

        The batch is refused as a whole only where nobody knows what is done. Otherwise it tells new ids from
        duplicates, from those in flight, and from repeats inside the batch. The claims share one transaction,
        as with `claim`: together or not at all. An empty batch costs no query.

        Args:
            items: The ids; with `logical_id`, anything that has one.
            scope: The namespace that the ids are unique in: a name, or a tuple of parts.
            logical_id: Returns the id of an item. None takes the items themselves.
            fingerprint: Returns the digest of an item's payload. None leaves the payloads out of it.
            session: The session or connection to ride, which stays yours to commit; None opens one.
            window: How long the ids are honoured; None takes the runtime's.

        Yields:
            The batch.

        Raises:
            MissingLogicalIdError: An id is blank; `field` says which item's, such as `items[3]`. Or a part of
                the scope is.
            InvalidLogicalIdError: An id is no legal one; `field` says which item's.
            ConfigurationError: An option cannot be kept; or `items` is one text, no list of them.
            StoreUnavailableError: The database did not answer.
        """
        if window is not None:
            positive("window", window)
        if isinstance(items, str | bytes):
            msg = f"items must be many, such as a list of ids, not the one {items!r}"
            raise ConfigurationError(msg)
        namespace = named(scope)
        wanted = []
        for number, item in enumerate(items):
            legal_id = required(item if logical_id is None else logical_id(item), field=f"items[{number}]")
            digest = None if fingerprint is None else fingerprint(item)
            wanted.append((item, self.intent(legal_id, scope=namespace, window=window, fingerprint=digest)))
        delivery = self._delivery_of(BatchDelivery)
        transaction = delivery.own if session is None else self.borrow(session)
        async with claimed_batch(delivery, wanted, transaction) as batch:
            yield batch
