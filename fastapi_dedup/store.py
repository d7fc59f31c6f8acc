"""What the core needs of a database: a store of claims, and the transactions that they ride in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastapi_dedup.claims import Fate, Intent, Outcome, Receipt

__all__ = ["BatchStore", "Enclosing", "Leases", "Store", "Transaction"]


class Transaction(Protocol):
    """The transaction that claims ride in: ours to end, or borrowed from the app."""

    @property
    def session(self) -> Any:
        """The session or connection that the handler works with."""

    @property
    def used(self) -> bool:
        """Whether a handler works in it."""

    @property
    def idle(self) -> bool:
        """Whether it holds no connection just now."""

    @property
    def outermost(self) -> bool:
        """Whether its COMMIT is the database's: not so for a session inside somebody else's transaction."""

    @property
    def in_hand(self) -> bool:
        """Whether its connection is surely the handler's still, so that a claim can be withdrawn in it."""

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back once, when the innermost transaction open now (or one around it) ends."""

    def forget(self) -> None:
        """Take no lost claim anew any more: the delivery is over."""

    async def step_aside(self) -> bool:
        """Give the connection back while a duplicate waits; False where others have used it already."""

    async def confirm(self) -> None:
        """See to it that the claims are there, where no event will ask before the app's COMMIT."""

    async def commit(self) -> None:
        """Commit it if it is ours; a borrowed one commits where the app says."""

    async def rollback(self) -> None:
        """Roll it back if it is ours, and let go of its connection."""

    async def leave(self) -> None:
        """Find out what became of the claims where no event tells: all of the app's own has unwound."""


class Enclosing(Transaction, Protocol):
    """The transaction of a handler's work, which a claim that does not ride in it can follow."""

    @property
    def commits(self) -> int:
        """How often its session has committed since this was first asked."""

    async def must_lead_home(self) -> None:
        """Refuse a session from which the claims cannot be reached, as far as is known before its use."""

    def before_commit(self, work: Callable[[Any], None], decided: Callable[[Fate], None]) -> None:
        """Do work on the transaction's connection before each COMMIT, which fails if the work raises.

        `decided` hears of every end: of a COMMIT once and last; ROLLED_BACK leaves the work in place.
        """


Tx_contra = TypeVar("Tx_contra", bound=Transaction, contravariant=True)


class Store(Protocol[Tx_contra]):
    """Where claims live. Everything it raises is a `DedupError`, with the driver's error as its cause."""

    sees_in_flight: bool
    """Whether `claim` sees an unfinished twin without waiting for it."""

    durable: bool
    """Whether its claims outlive the process: then a guard may stand in front of it."""

    refusals_logged_at: int
    """The level of the log lines that tell of refused deliveries."""

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


class BatchStore(Store[Tx_contra], Protocol[Tx_contra]):
    """A store that can do for many ids at once what `Store` does for one."""

    async def claim_many(self, intents: Sequence[Intent], transaction: Tx_contra) -> dict[bytes, Outcome]:
        """Take ids that differ, under one token, and return what came of each by its key.

        All are of one scope and window. `Transaction.watch` must be called once, for all that were claimed.
        """

    async def withdraw_many(
        self, intents: Sequence[Intent], receipt: Receipt, transaction: Tx_contra
    ) -> None:
        """Delete claims of one batch inside the transaction that made them."""

    async def release_many(self, intents: Sequence[Intent], receipt: Receipt) -> None:
        """Delete committed claims of one batch in a transaction of its own."""


@runtime_checkable
class Leases(Protocol):
    """Where leased claims live. Every method is one short transaction; errors are as `Store`'s."""

    completes_in_transactions: bool
    """Whether the handler's own COMMIT can complete a claim.

    Else completing is a step of its own after the work, and where the store does not answer then, the work
    is done all the same.
    """

    realm: bytes
    """What its claims' intents have as `realm`: b"" where riding claims live in the same place."""

    async def check(self) -> None:
        """Say at start-up, in the log, what stands in the way of the promises."""

    async def take(self, intent: Intent) -> Outcome:
        """Take the id for the length of the intent's lease, or say why not."""

    async def look(self, intent: Intent) -> Outcome | None:
        """Return what a claim answers; None where there is none, or its lease has run out."""

    async def extend(self, intent: Intent, receipt: Receipt) -> bool:
        """Count the lease anew from now; False where it is the receipt's no more."""

    async def complete(self, intent: Intent, receipt: Receipt) -> bool:
        """Say that the work is done; False where the claim is the receipt's no more."""

    def complete_in(self, connection: Any, intent: Intent, receipt: Receipt) -> bool | None:
        """Complete on the connection of the handler's transaction, which is about to commit.

        None where that transaction cannot: then nothing has been done, but the lease is the receipt's and
        has been extended, so that it outlasts the COMMIT.
        """

    async def release(self, intent: Intent, receipt: Receipt | None) -> bool:
        """Delete the claim, if it still is the receipt's; None instead of a receipt: whoever's."""

    async def dispose(self) -> None:
        """Close what it has opened. It may be used again."""
