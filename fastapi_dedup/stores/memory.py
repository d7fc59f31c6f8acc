"""The guard as a whole store: duplicates are suppressed in this process, at best effort, without a database.

What it remembers is lost with the process, and siblings do not know of it. See `fastapi_dedup.guard`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from fastapi_dedup.beside import BesideTransaction
from fastapi_dedup.claims import Claimed, Fate, Receipt
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.guard import GenerationalGuard, Seen
from fastapi_dedup.refusals import SEEN
from fastapi_dedup.stores.startup import has_siblings

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from fastapi_dedup.claims import Intent, Outcome
    from fastapi_dedup.core import Delivery
    from fastapi_dedup.policy import Policy
    from fastapi_dedup.store import Enclosing, Transaction

__all__ = ["Memories", "MemoryStore", "MemoryTransaction", "window_of"]

logger = logging.getLogger("fastapi_dedup")

_ANY = ("POST",)
"""Instead of a policy's methods: which requests it is for makes no difference to what is remembered."""


class MemoryTransaction(BesideTransaction):
    """What a claim in memory waits for: the success of its delivery, and then every COMMIT of its work.

    Args:
        around: The transaction that the handler works in. The claim asks nothing of it; but where it has not
            committed since the claim, and is still open when the delivery has succeeded, its end decides.
        delivery: The delivery. Its other claims may ride other transactions, whose ends decide as well.
    """

    def __init__(self, around: Enclosing, delivery: Delivery) -> None:
        super().__init__(around)
        self._delivery = delivery
        self._commits = around.commits

    async def step_aside(self) -> bool:
        """Say whether a duplicate may wait: not with a connection in its hands."""
        return self._around.idle

    async def commit(self) -> None:
        """Remember what was claimed, as soon as all of the work is durable."""
        # Who has committed the work may go on in a transaction that only reads.
        committed = self._around.idle or self._around.commits > self._commits
        open_ = {*self._delivery.undecided, *(() if committed else (self._around,))}
        if not open_:
            self._end(Fate.COMMITTED)

        def ended(each: Transaction, fate: Fate) -> None:
            open_.discard(each)
            if fate is not Fate.COMMITTED or not open_:
                self._end(fate)

        for each in tuple(open_):
            each.watch(partial(ended, each))

    async def rollback(self) -> None:
        """Let what was claimed run again."""
        self._end(Fate.CLOSED)


class MemoryStore:
    """Claims in a `GenerationalGuard`.

    Args:
        guard: The guard.
    """

    sees_in_flight = True
    durable = False
    refusals_logged_at = logging.DEBUG

    def __init__(self, guard: GenerationalGuard) -> None:
        self._guard = guard
        self._realm = os.urandom(8)

    def here(self, intent: Intent) -> Intent:
        """Return an intent as one in this store: a claim of the same id in another store is another claim."""
        return replace(intent, realm=self._realm)

    async def claim(self, intent: Intent, transaction: Transaction) -> Outcome:
        """Take the id, or say why not."""
        attempt = self._guard.attempt(intent.key, fingerprint=intent.fingerprint)
        if attempt.seen is not Seen.NEW:
            return SEEN[attempt.seen]

        def decided(fate: Fate) -> None:
            if fate is Fate.COMMITTED and transaction.outermost:
                attempt.complete()
            else:
                attempt.release()

        transaction.watch(decided)
        now = datetime.now(UTC)
        return Claimed(Receipt(b"", now, now + self._guard.window))

    async def look(self, intent: Intent, _: Transaction) -> Outcome | None:
        """Return what a remembered id answers; None where it is unknown."""
        return SEEN.get(self._guard.look(intent.key, fingerprint=intent.fingerprint))

    async def renew(self, intent: Intent, receipt: Receipt, transaction: Transaction) -> None:
        """A guard counts from the end of the work as it is."""

    async def withdraw(self, _: Intent, __: Receipt, transaction: Transaction) -> None:
        """Let the id run again."""
        await transaction.rollback()

    async def release(self, intent: Intent, _: Receipt) -> bool:
        """Let the id run again."""
        return self.forget(intent)

    def forget(self, intent: Intent) -> bool:
        """Let an id run again whatever its payload was, and tell whether it was remembered."""
        return self._guard.forget(self.here(intent).key)


class Memories:
    """The stores of policies with `store="memory"`: a guard for each, which outlives consumers.

    Args:
        make: Makes a guard.

    Raises:
        ConfigurationError: It cannot be called.
    """

    def __init__(self, make: Callable[[], GenerationalGuard]) -> None:
        if not callable(make):
            raise _no_maker(make)
        self._make = make
        self._stores: dict[Policy, MemoryStore] = {}
        self._inert: set[timedelta] = set()

    def of(self, policy: Policy) -> MemoryStore:
        """Return a policy's store; policies that are equal, but for the methods they apply to, have the same.

        So the middleware's own, which it varies by the methods that a route leaves to it, has one memory.

        Raises:
            ConfigurationError: The policy's window is longer than the guard keeps anything, or what was
                made is no guard.
        """
        if (store := self._stores.get(policy)) is None:
            whole = replace(policy, methods=_ANY)
            store = self._stores[policy] = self._stores.get(whole) or self._made(whole)
        return store

    def _made(self, policy: Policy) -> MemoryStore:
        guard, asked = self._make(), window_of(policy)
        if not isinstance(guard, GenerationalGuard):
            raise _no_maker(guard)
        if asked is not None and asked > guard.window:
            option = "keep_after_handling" if policy.source == "delivery" else "window"
            msg = (
                f"store='memory' keeps an id for {guard.window} at the most, and the policy's {option} is "
                f"{asked}: shorten it, use the durable store, or give "
                "Dedup(memory=lambda: GenerationalGuard(window=...))"
            )
            raise ConfigurationError(msg)
        if not self._stores and has_siblings():
            logger.warning(
                "store='memory' in a process that looks like one of several workers: siblings do not know "
                "what it has seen, so each of them may run a duplicate"
            )
        store = self._stores[policy] = MemoryStore(guard if asked is None else guard.with_window(asked))
        return store

    def forget(self, intent: Intent) -> bool:
        """Let an id run again under every policy, and tell whether it was remembered."""
        remembered = [store.forget(intent) for store in {*self._stores.values()}]
        return any(remembered)

    def warn_if_inert(self, front: GenerationalGuard, window: timedelta) -> None:
        """Warn, once, of a window that the guard in front of the database can do nothing for."""
        if window <= front.window / 2 and window not in self._inert:
            self._inert.add(window)
            logger.warning(
                "the guard remembers no id of a policy whose window is %s, for it might outlive the claim: "
                "their duplicates ask the database. Give the guard a window of less than that, instead of %s",
                window,
                front.window,
            )


def _no_maker(given: object) -> ConfigurationError:
    msg = f"memory= takes a callable that makes a GenerationalGuard for each policy, and this is {given!r}"
    return ConfigurationError(msg)


def window_of(policy: Policy) -> timedelta | None:
    """Return how long a policy asks for its ids to be kept; None where it leaves that to the runtime."""
    return policy.keep_after_handling if policy.source == "delivery" else policy.window
