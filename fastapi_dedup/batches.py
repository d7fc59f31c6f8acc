"""Batches: many ids claimed at once, and told apart.

One POST of a webhook carries 500 events, one poll of a consumer as many records. They are claimed in one go
and share one transaction, so their claims share its fate: together or not at all. But some of them are new,
and others are not, so a batch is not refused: it says of each item what its id was found to be.

Nothing here waits for a twin in flight. A batch that waited would hold its other claims meanwhile, and two
such batches could wait for each other. What is in flight comes again: see `Batch.unfinished`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi_dedup.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime, timedelta

    from fastapi_dedup.store import Transaction

__all__ = ["Batch", "BatchOutcome", "Entry"]

T = TypeVar("T")


class BatchOutcome(enum.Enum):
    """What the id of an item was found to be.

    Attributes:
        NEW: Claimed for this batch: do its work.
        REPEAT: A new id that stands earlier in this batch: its work is that item's, and shares its fate.
        DUPLICATE: Its work is done, inside the window.
        IN_FLIGHT: Another delivery is at it: "not yet", never "done".
        MISMATCH: The id was claimed for another payload, before or earlier in this batch.
    """

    NEW = "new"
    REPEAT = "repeat"
    DUPLICATE = "duplicate"
    IN_FLIGHT = "in_flight"
    MISMATCH = "mismatch"


_OURS = frozenset({BatchOutcome.NEW, BatchOutcome.REPEAT})


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One item of a batch, and what its id was found to be.

    Attributes:
        item: The item, as it was given.
        logical_id: Its id.
        outcome: What the id was found to be.
        claimed_at: When the claim was made: this batch's for new ids and their repeats, the first delivery's
            for duplicates. None where it is not known, as for what is in flight.
        expires_at: When that claim's window ends; None like `claimed_at`.
        age: How old a duplicate's claim is; None for all others, and where a guard answered.
    """

    item: T
    logical_id: str
    outcome: BatchOutcome
    claimed_at: datetime | None = None
    expires_at: datetime | None = None
    age: timedelta | None = None


class Batch(Generic[T]):
    """The items of a batch, in the order in which they were given, sorted by what became of their ids.

    Iterate over it for every `Entry`; the attributes hold the items themselves.

    Attributes:
        new: To be worked on, each once.
        repeats: Copies of new items, later in the batch.
        duplicates: Done before.
        in_flight: Under way elsewhere.
        mismatches: Their ids were used for other payloads.
    """

    def __init__(self, entries: Iterable[Entry[T]], transaction: Transaction) -> None:
        self._entries = tuple(entries)
        self._transaction = transaction
        self._released: set[str] = set()
        self._over = False
        self.new = self._items(BatchOutcome.NEW)
        self.repeats = self._items(BatchOutcome.REPEAT)
        self.duplicates = self._items(BatchOutcome.DUPLICATE)
        self.in_flight = self._items(BatchOutcome.IN_FLIGHT)
        self.mismatches = self._items(BatchOutcome.MISMATCH)

    def __repr__(self) -> str:
        """Count the items by outcome."""
        counts = ", ".join(f"{len(self._items(each))} {each.value}" for each in BatchOutcome)
        return f"<Batch: {counts}>"

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        """Iterate over the entries."""
        return iter(self._entries)

    @property
    def session(self) -> Any:
        """The session (or connection) whose transaction the claims are in."""
        return self._transaction.session

    @property
    def unfinished(self) -> tuple[T, ...]:
        """The items that must come again: in flight, or released, with the repeats of what was released.

        All others are done as soon as the transaction has committed, but for mismatches, which a retry does
        not mend.
        """
        return tuple(
            entry.item
            for entry in self._entries
            if entry.outcome is BatchOutcome.IN_FLIGHT
            or (entry.outcome in _OURS and entry.logical_id in self._released)
        )

    def release(self, item: T) -> None:
        """Give the id of a new item back, so that a retry runs: its work failed, and the others' did not.

        The claim is deleted at the end of the block, in the same transaction. Undo the item's own work first:
        roll back to a savepoint around it.

        Args:
            item: One of `new`; the very object, or one that is equal to it.

        Raises:
            ConfigurationError: It is none of `new`, or the batch has ended.
        """
        if self._over:
            msg = "the batch has ended, and its claims with it: call release() inside the block"
            raise ConfigurationError(msg)
        for entry in self._entries:
            if entry.outcome is BatchOutcome.NEW and (entry.item is item or entry.item == item):
                self._released.add(entry.logical_id)
                return
        msg = f"only what is in batch.new can be released, and {item!r} is not"
        raise ConfigurationError(msg)

    def _end(self) -> frozenset[str]:
        """Take no release any more, and return the ids of those that were asked for."""
        self._over = True
        return frozenset(self._released)

    def _items(self, outcome: BatchOutcome) -> tuple[T, ...]:
        return tuple(entry.item for entry in self._entries if entry.outcome is outcome)
