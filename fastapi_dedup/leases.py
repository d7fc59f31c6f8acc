"""Leased claims: for handlers that are slow, or whose effects no transaction can undo.

    claim      in a short transaction, committed at once: the row says who owns it and until when
    beat       while the handler works, its owner extends the lease; no connection is held in between
    complete   inside the handler's own COMMIT where it has one in the same database, else right after it
    release    on failure; where the owner died, the lease runs out

Every step is fenced by the claim's token: whoever lost the lease to another delivery can neither complete,
extend nor release it, and the COMMIT that would have completed it is refused. Where leases live apart from
the handler's database, its COMMIT asks for the lease before, and the claim is completed after: a crash in
between leaves the work done, and the claim to run out.

Like `core`, this module knows no database: `fastapi_dedup.store.Leases` is what it needs of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi_dedup.beside import BesideTransaction
from fastapi_dedup.cancellation import uncancelled
from fastapi_dedup.claims import Claimed, Fate, scope_text
from fastapi_dedup.errors import ClaimLostError, StoreUnavailableError

if TYPE_CHECKING:
    from fastapi_dedup.claims import Intent, Lease, Outcome, Receipt
    from fastapi_dedup.flights import Flights
    from fastapi_dedup.store import Enclosing, Leases

__all__ = ["LeasedStore", "LeasedTransaction"]

logger = logging.getLogger("fastapi_dedup")


class LeasedTransaction(BesideTransaction):
    """The life of a leased claim, which is longer than that of any transaction.

    Args:
        around: The transaction that the handler may work in. Where it is in use, its COMMIT completes the
            claim; its ROLLBACK leaves the claim alone.
        lease: The lease.
        flights: Runs what must wait for the end of the handler's transaction, or of an outage.
    """

    def __init__(self, around: Enclosing, lease: Lease, *, flights: Flights) -> None:
        super().__init__(around)
        self.lease = lease
        self._flights = flights
        self._owned: tuple[Leases, Intent, Receipt] | None = None
        self._sure_until = 0.0
        self._beating: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._completing = False
        self._in_doubt = False
        self._committed = False
        self._succeeded = False
        self._failed = False
        self._last_beat = False

    def own(self, leases: Leases, intent: Intent, receipt: Receipt, *, sure_until: float) -> None:
        """Keep a claim alive from now on, and have the handler's COMMIT complete it.

        Args:
            leases: Where it lives.
            intent: What it is for.
            receipt: Its receipt.
            sure_until: Until when it is ours if nobody is heard of, by the clock of `time.monotonic`.
        """
        self._owned = leases, intent, receipt
        self._sure_until = sure_until
        self._around.before_commit(self._complete_in, self._around_ended)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def must_reach(self, leases: Leases) -> None:
        """Refuse a handler's transaction whose COMMIT could not complete a claim.

        Args:
            leases: Where the claim is to live.

        Raises:
            ConfigurationError: It is on another database.
        """
        if leases.completes_in_transactions:
            await self._around.must_lead_home()

    async def step_aside(self) -> bool:
        """Say whether a duplicate may wait: not with a connection in its hands."""
        return await self._around.step_aside()

    async def commit(self) -> None:
        """Complete the claim, unless the handler's transaction is open: then its COMMIT does.

        Raises:
            ClaimLostError: Another delivery has taken the lease over.
            StoreUnavailableError: The store of riding claims did not answer. Nobody knows whether the claim
                is complete.
        """
        self._last_beat = self._succeeded  # the second call comes when all of the app's own has unwound
        self._succeeded = True
        if self._following is not None:
            await uncancelled(_end_of(self._following))
        elif self._owned is not None and self._around.idle:
            await uncancelled(self._complete(*self._owned))

    async def rollback(self) -> None:
        """Release the claim, unless it is settled. Never raises: the lease runs out anyway.

        While the handler's transaction is open it may have the claim's row locked, or on SQLite the whole
        file; so the release comes after its end.
        """
        self._failed = True
        if self._following is not None:
            await _end_of(self._following)
        elif self._around.idle:
            await self._release()

    async def _release(self) -> None:
        if self._owned is None:
            return
        leases, intent, receipt = self._owned
        if not (self._succeeded and self.lease.on_abandoned == "block"):  # else its effects may be out
            try:
                # A COMMIT whose answer was lost may be done all the same, and then the claim is complete.
                if not self._in_doubt or await leases.extend(intent, receipt):
                    await leases.release(intent, receipt)
            except Exception:
                logger.exception(
                    "could not release logical id %r in scope %r: it is in flight until its lease runs out",
                    *_name(intent),
                )
        self._end(Fate.CLOSED)

    # Completing

    async def _complete(self, leases: Leases, intent: Intent, receipt: Receipt) -> None:
        self._completing = True
        completed = True
        try:
            completed = await leases.complete(intent, receipt)
        except Exception:
            if leases.completes_in_transactions and not self._committed:
                raise
            logger.warning(
                "the work of logical id %r in scope %r is done, and its claim could not be completed: trying "
                "again. If that is in vain, the work may be repeated when the lease is over",
                *_name(intent),
                exc_info=True,
            )
            self._flights.meanwhile(self._complete_later(leases, intent, receipt))
        if not completed and not self._committed:
            self._end(Fate.CLOSED)
            raise _lost(intent)
        if not completed:
            _tell_of_a_loss(intent)
        self._end(Fate.COMMITTED)

    async def _complete_later(self, leases: Leases, intent: Intent, receipt: Receipt) -> None:
        """Complete the claim of work that is done as soon as the store answers again."""
        until = time.monotonic() + intent.window.total_seconds()
        while time.monotonic() < until:
            await asyncio.sleep(self.lease.beat.total_seconds())
            if self._failed:  # meanwhile, and it is given back
                return
            try:
                completed = await leases.complete(intent, receipt)
            except Exception as error:  # noqa: BLE001 - it is told already, and the next beat may get through
                logger.debug("could not complete the claim of logical id %r: %r", intent.logical_id, error)
                continue
            if not completed:
                _tell_of_a_loss(intent)
            return

    def _complete_in(self, connection: Any) -> None:
        """Complete the claim in the handler's transaction, which is about to commit."""
        if self._owned is None or self._failed:
            return
        leases, intent, receipt = self._owned
        asked = time.monotonic()
        try:
            completed = leases.complete_in(connection, intent, receipt)
        except StoreUnavailableError:
            # By our own clock it may be sure all the same, for long enough to commit.
            margin = self.lease.beat.total_seconds()
            if leases.completes_in_transactions or time.monotonic() + margin >= self._sure_until:
                raise
            completed = None
        else:
            self._sure_until = asked + self.lease.length.total_seconds()
        if completed is False:
            raise _lost(intent)
        self._completing = completed is True  # else what follows the COMMIT does

    def _around_ended(self, fate: Fate) -> None:
        completing, self._completing = self._completing, False
        completed = completing and fate is Fate.COMMITTED
        self._in_doubt |= completing and not completed
        if completed:
            self._end(Fate.COMMITTED)
        elif self._failed:
            self._flights.background(self._release())
        elif fate is Fate.COMMITTED and self._owned is not None and self._following is None:
            self._committed = True
            self._following = self._flights.begin(self._complete(*self._owned))

    # Beating

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
        asked = time.monotonic()
        try:
            async with asyncio.timeout(at_most):
                extended = await leases.extend(intent, receipt)
        except Exception:  # whatever it was, the next beat may get through
            logger.warning(
                "could not extend the lease of logical id %r in scope %r", *_name(intent), exc_info=True
            )
            return None
        if not extended and not self._completing and self._owned is not None:
            logger.warning(
                "the lease of logical id %r in scope %r was lost to another delivery while the handler ran: "
                "what it does from now on is not committed",
                *_name(intent),
            )
            return False
        self._sure_until = asked + self.lease.length.total_seconds()
        return True

    def _end(self, fate: Fate) -> None:
        self._owned = None
        if self._beating is not None:
            self._beating.cancel()
        self._around.forget()
        super()._end(fate)


async def _end_of(task: asyncio.Task[None]) -> None:
    """Wait for a task, and leave what it raises to itself."""
    await asyncio.wait([task])


def _name(intent: Intent) -> tuple[str, str]:
    return intent.logical_id, scope_text(intent.scope)


def _lost(intent: Intent) -> ClaimLostError:
    msg = (
        f"the lease of logical id {intent.logical_id!r} in scope {scope_text(intent.scope)!r} ran out, and "
        "another delivery has taken the id over: nothing was committed. A longer lease= gives the owner "
        "more time to be heard of"
    )
    return ClaimLostError(msg)


def _tell_of_a_loss(intent: Intent) -> None:
    logger.error(
        "the work of logical id %r in scope %r is done, and its claim was gone before it could be completed: "
        "another delivery may do the work again",
        *_name(intent),
    )


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

    def here(self, intent: Intent) -> Intent:
        """Return an intent as one in this store."""
        return replace(intent, realm=self._leases.realm)

    async def claim(self, intent: Intent, transaction: LeasedTransaction) -> Outcome:
        """Take the id in a transaction of its own, or say why not."""
        await transaction.must_reach(self._leases)
        taken: list[Outcome] = []
        asked = time.monotonic()

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
                sure_until = asked + transaction.lease.length.total_seconds()
                transaction.own(self._leases, intent, receipt, sure_until=sure_until)
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

    async def release(self, intent: Intent, receipt: Receipt | None) -> bool:
        """Give back a claim that was completed before its delivery failed; None: whoever's."""
        return await self._leases.release(intent, receipt)
