"""Leased claims: for handlers that are slow, or whose effects no transaction can undo.

    claim      in a short transaction, committed at once: the row says who owns it and until when
    beat       while the handler works, its owner extends the lease; no connection is held in between
    complete   inside the handler's own COMMIT where it has one, else in a short transaction
    release    on failure; where the owner died, the lease runs out

Every step is fenced by the claim's token: whoever lost the lease to another delivery can neither complete,
extend nor release it, and the COMMIT that would have completed it is refused.

Like `core`, this module knows no database: `fastapi_dedup.store.Leases` is what it needs of one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claimed, Fate, scope_text
from fastapi_dedup.errors import ClaimLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi_dedup.claims import Intent, Lease, Outcome, Receipt
    from fastapi_dedup.store import Enclosing, Leases

__all__ = ["LeasedStore", "LeasedTransaction"]

logger = logging.getLogger("fastapi_dedup")


class LeasedTransaction:
    """The life of a leased claim, which is longer than that of any transaction.

    Args:
        around: The transaction that the handler may work in. Where it is in use, its COMMIT completes the
            claim; its ROLLBACK leaves the claim alone.
        lease: The lease.
        background: Runs what must wait for the end of the handler's transaction.
    """

    idle = True

    def __init__(
        self, around: Enclosing, lease: Lease, *, background: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self.lease = lease
        self._around = around
        self._background = background
        self._owned: tuple[Leases, Intent, Receipt] | None = None
        self._decided: list[Callable[[Fate], None]] = []
        self._beating: asyncio.Task[None] | None = None
        self._completing = False
        self._succeeded = False
        self._failed = False
        self._last_beat = False

    @property
    def session(self) -> Any:
        """The session that the handler works with."""
        return self._around.session

    @property
    def used(self) -> bool:
        """Whether a handler works in it."""
        return self._around.used

    @property
    def outermost(self) -> bool:
        """Whether the handler's COMMIT, which may complete the claim, is the database's."""
        return self._around.outermost

    @property
    def in_hand(self) -> bool:
        """Whether the handler's transaction is surely its own still."""
        return self._around.in_hand

    def own(self, leases: Leases, intent: Intent, receipt: Receipt) -> None:
        """Keep a claim alive from now on, and have the handler's COMMIT complete it."""
        self._owned = leases, intent, receipt
        if leases.completes_in_transactions:
            self._around.before_commit(self._complete_in, self._around_ended)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back once, when the claim is completed or released."""
        self._decided.append(decided)

    def forget(self) -> None:
        """There is nothing to take anew: a ROLLBACK of the handler's leaves the claim alone."""

    async def step_aside(self) -> bool:
        """Say whether a duplicate may wait: not with a connection in its hands."""
        return await self._around.step_aside()

    async def confirm(self) -> None:
        """Have the handler's transaction complete the claim, where no event will ask before its COMMIT."""
        await self._around.confirm()

    async def leave(self) -> None:
        """Find out what became of the handler's transaction, where no event tells."""
        await self._around.leave()

    async def commit(self) -> None:
        """Complete the claim, unless the handler's transaction is open: then its COMMIT does.

        Raises:
            ClaimLostError: Another delivery has taken the lease over.
            StoreUnavailableError: The store did not answer. Nobody knows whether the claim is complete.
        """
        self._last_beat = self._succeeded  # the second call comes when all of the app's own has unwound
        self._succeeded = True
        if self._owned is not None and self._around.idle:
            await uncancelled(self._complete(*self._owned))

    async def rollback(self) -> None:
        """Release the claim, unless it is settled. Never raises: the lease runs out anyway.

        While the handler's transaction is open it may have the claim's row locked, or on SQLite the whole
        file; so the release comes after its end.
        """
        self._failed = True
        if self._around.idle:
            await self._release()

    async def _release(self) -> None:
        if self._owned is None:
            return
        leases, intent, receipt = self._owned
        if not (self._succeeded and self.lease.on_abandoned == "block"):  # else its effects may be out
            try:
                await leases.release(intent, receipt)
            except Exception:
                logger.exception(
                    "could not release logical id %r in scope %r: it is in flight until its lease runs out",
                    intent.logical_id,
                    scope_text(intent.scope),
                )
        self._end(Fate.CLOSED)

    async def _complete(self, leases: Leases, intent: Intent, receipt: Receipt) -> None:
        self._completing = True
        if not await leases.complete(intent, receipt):
            self._end(Fate.CLOSED)
            raise _lost(intent)
        self._end(Fate.COMMITTED)

    def _complete_in(self, connection: Any) -> None:
        """Complete the claim in the handler's transaction, which is about to commit."""
        if self._owned is None or self._failed:
            return
        leases, intent, receipt = self._owned
        completed = leases.complete_in(connection, intent, receipt)
        if completed is False:
            raise _lost(intent)
        self._completing = completed is True  # else commit() does, right after

    def _around_ended(self, fate: Fate) -> None:
        completed, self._completing = self._completing and fate is Fate.COMMITTED, False
        if completed:
            self._end(Fate.COMMITTED)
        elif self._failed:
            self._background(self._release())

    async def _beat(self) -> None:
        beat = pause = self.lease.beat.total_seconds()
        while self._owned is not None and not self._last_beat:
            await asyncio.sleep(pause)
            if self._owned is None:
                return
            extended = await self._extend(*self._owned, at_most=beat)
            if extended is False:
                return
            pause = beat if extended else beat / 4  # it may yet get through before the lease is over

    async def _extend(
        self, leases: Leases, intent: Intent, receipt: Receipt, *, at_most: float
    ) -> bool | None:
        """Extend the lease; False where it is lost, None where nobody knows."""
        name = intent.logical_id, scope_text(intent.scope)
        try:
            async with asyncio.timeout(at_most):
                extended = await leases.extend(intent, receipt)
        except Exception:  # whatever it was, the next beat may get through
            logger.warning("could not extend the lease of logical id %r in scope %r", *name, exc_info=True)
            return None
        if not extended and not self._completing and self._owned is not None:
            logger.warning(
                "the lease of logical id %r in scope %r was lost to another delivery while the handler ran: "
                "what it does from now on is not committed",
                *name,
            )
            return False
        return True

    def _end(self, fate: Fate) -> None:
        self._owned = None
        if self._beating is not None:
            self._beating.cancel()
        self._around.forget()
        decided, self._decided = self._decided, []
        for each in decided:
            each(fate)


def _lost(intent: Intent) -> ClaimLostError:
    msg = (
        f"the lease of logical id {intent.logical_id!r} in scope {scope_text(intent.scope)!r} ran out, and "
        "another delivery has taken the id over: nothing was committed. A longer lease= gives the owner "
        "more time to be heard of"
    )
    return ClaimLostError(msg)


class LeasedStore:
    """Leases as a store of the core.

    Args:
        leases: Where they live.
    """

    sees_in_flight = True
    durable = True
    refusals_logged_at = logging.INFO

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    async def claim(self, intent: Intent, transaction: LeasedTransaction) -> Outcome:
        """Take the id in a transaction of its own, or say why not."""
        taken: list[Outcome] = []

        async def take() -> None:
            taken.append(await self._leases.take(intent))

        try:
            await uncancelled(take())
        except asyncio.CancelledError:
            if taken and isinstance(taken[0], Claimed):
                await uncancelled(self._leases.release(intent, taken[0].receipt))
            raise
        match taken[0]:
            case Claimed(receipt):
                transaction.own(self._leases, intent, receipt)
                # The row says until when it counts without its owner; to the owner it counts for the window.
                receipt = receipt._replace(expires_at=receipt.claimed_at + intent.window)
                return replace(taken[0], receipt=receipt)
            case outcome:
                return outcome

    async def look(self, intent: Intent, _: LeasedTransaction) -> Outcome | None:
        """Return what a claim answers; None where there is none."""
        return await self._leases.look(intent)

    async def renew(self, intent: Intent, receipt: Receipt, transaction: LeasedTransaction) -> None:
        """Completing counts the window from the end of the work as it is."""

    async def withdraw(self, _: Intent, __: Receipt, transaction: LeasedTransaction) -> None:
        """Release the claim."""
        await transaction.rollback()

    async def release(self, intent: Intent, receipt: Receipt) -> bool:
        """Give back a claim that was completed before its delivery failed."""
        return await self._leases.release(intent, receipt)
