"""The plain door to batches: an `async with` block, for routes, consumers and jobs alike."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi_dedup.batch_delivery import BatchDelivery, claimed_batch
from fastapi_dedup.claims import positive
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identity import required

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from datetime import timedelta

    from fastapi_dedup.batches import Batch
    from fastapi_dedup.claims import Intent
    from fastapi_dedup.core import Delivery
    from fastapi_dedup.store import Transaction

__all__ = ["Blocks"]

T = TypeVar("T")
D = TypeVar("D", bound="Delivery")


class _Runtime(Protocol):
    """What a block needs of the runtime."""

    def intent(
        self,
        logical_id: str,
        *,
        scope: str | tuple[str, ...],
        window: timedelta | None = None,
        fingerprint: bytes | None = None,
    ) -> Intent:
        """Return what a delivery wants done once."""

    def borrow(self, session: Any) -> Transaction:
        """Return the transaction of a session or connection of the app's."""

    def _delivery_of(self, kind: type[D]) -> D:
        """Return a new delivery of a kind."""


class Blocks:
    """The blocks of a runtime."""

    @asynccontextmanager
    async def claim_many(
        self: _Runtime,
        items: Iterable[T],
        *,
        scope: str | tuple[str, ...],
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
            ConfigurationError: `items` is one text, whose letters would be claimed.
            MissingLogicalIdError: An id is blank; `field` says which item's, such as `items[3]`.
            InvalidLogicalIdError: An id is no legal one; `field` says which item's.
            StoreUnavailableError: The database did not answer.
        """
        if window is not None:
            positive("window", window)
        if isinstance(items, str | bytes):
            msg = f"items must be many, such as a list of ids, not the one {items!r}"
            raise ConfigurationError(msg)
        wanted = []
        for number, item in enumerate(items):
            legal_id = required(item if logical_id is None else logical_id(item), field=f"items[{number}]")
            digest = None if fingerprint is None else fingerprint(item)
            wanted.append((item, self.intent(legal_id, scope=scope, window=window, fingerprint=digest)))
        delivery = self._delivery_of(BatchDelivery)
        transaction = delivery.own if session is None else self.borrow(session)
        async with claimed_batch(delivery, wanted, transaction) as batch:
            yield batch
