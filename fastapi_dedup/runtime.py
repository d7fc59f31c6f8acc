"""`Dedup`: wires database, window, reaper and hooks, and opens deliveries for every door."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup.blocks import Blocks, Scope
from fastapi_dedup.claims import DEFAULT_WINDOW, Intent, Lease, positive
from fastapi_dedup.core import Delivery
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.flights import Flights
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.identities import Identities
from fastapi_dedup.identity import parts_of
from fastapi_dedup.leases import LeasedStore, LeasedTransaction
from fastapi_dedup.messaging.handler import MessageHandler
from fastapi_dedup.policy import Policy
from fastapi_dedup.reaper import Reaper
from fastapi_dedup.stores.backing import backing_of
from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from fastapi_dedup.stores.leases_only import no_riding
from fastapi_dedup.stores.memory import Memories, MemoryTransaction, window_of
from fastapi_dedup.tables import DEFAULT_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

    from sqlalchemy import Engine

    from fastapi_dedup.hooks import Hook
    from fastapi_dedup.policy import Endpoint
    from fastapi_dedup.store import Enclosing, Leases, Store, Transaction
    from fastapi_dedup.stores.backing import Bind
    from fastapi_dedup.stores.riding import RidingTransaction

__all__ = ["Dedup"]

logger = logging.getLogger("fastapi_dedup")

D = TypeVar("D", bound=Delivery)


class Dedup(Blocks):
    """The runtime: where claims live, how long they count, and who hears of them.

    One `Dedup` serves one database, or one Redis. `DedupMiddleware` starts and stops it with the app; scripts
    and workers write `async with dedup:`, or just use it, for the first claim needs no more than the table.

    Args:
        bind: The database: a URL, an `AsyncEngine` or an `async_sessionmaker`. Give the engine or
            sessionmaker of your handlers, and claims share their pool. None reads the environment
            variable `FASTAPI_DEDUP_DATABASE_URL`, else uses SQLite in the file `fastapi_dedup.db` in
            the working directory. A URL of Redis, or a `RedisLeases`, does without a database: then every
            claim needs a `lease=`.
        window: How long ids are honoured unless a policy says otherwise. Default 24 hours. The end of the
            window is stored with each claim, so changing this changes no earlier claim.
        create_table: Whether to create the table of claims at start-up. None creates it on the embedded
            default only; elsewhere a missing table is an error at start-up.
        table: The name of the table. Default `dedup_claims`.
        schema: The schema that the table is in. None is the connection's default.
        dialect: The statements of claims. None takes those that are made for the database, and the generic
            ones where there are none; `"generic"` takes those anyway, and thus promises less.
        reap_every: How long the reaper pauses between sweeps. None never sweeps: run `await dedup.reap()`
            from a job of your own. Default 5 minutes.
        reap_batch: The most claims that one reaping statement deletes. Default 1000.
        hooks: Callables that are told every `fastapi_dedup.hooks.Event`.
        guard: A guard in front of the database: it refuses duplicates of what this process has in flight or
            has seen committed without a query, for at most its window and never beyond the claim's.
            None, the default, asks the database every time.
        memory: Makes the guard that is the whole store of a policy with `store="memory"`; one for each
            such policy. Default: `GenerationalGuard`, with its defaults.
        leases: Where leased claims live, such as a `fastapi_dedup.stores.redis.RedisLeases`. None, the
            default, keeps them in the table, where the handler's COMMIT completes them.

    Attributes:
        identities: The publisher's rules: which id a message has by its type.

    Raises:
        ConfigurationError: The options cannot be kept, or the driver is not installed.
    """

    def __init__(
        self,
        bind: Bind = None,
        *,
        window: timedelta = DEFAULT_WINDOW,
        create_table: bool | None = None,
        table: str = DEFAULT_TABLE,
        schema: str | None = None,
        dialect: Literal["generic"] | None = None,
        reap_every: timedelta | None = timedelta(minutes=5),
        reap_batch: int = 1000,
        hooks: Iterable[Hook] = (),
        guard: GenerationalGuard | None = None,
        memory: Callable[[], GenerationalGuard] = GenerationalGuard,
        leases: Leases | None = None,
    ) -> None:
        self.window = positive("window", window)
        if isinstance(reap_batch, bool) or not isinstance(reap_batch, int) or reap_batch < 1:
            msg = f"reap_batch must be a whole number of at least 1, not {reap_batch!r}"
            raise ConfigurationError(msg)
        if guard is not None and not isinstance(guard, GenerationalGuard):
            msg = f"guard= takes a GenerationalGuard(...), not {guard!r}"
            raise ConfigurationError(msg)
        embedded = bind is None and not os.environ.get(DATABASE_URL_VARIABLE)
        self._create_table = embedded if create_table is None else create_table
        self._backing = backing_of(bind, leases, table=table, schema=schema, dialect=dialect)
        self._store = self._backing.store
        self._leased = LeasedStore(self._backing.leases)
        self._hooks = tuple(hooks)
        self._guard = guard
        self._memories = Memories(memory)
        self._required: list[tuple[Callable[[Endpoint], bool], Policy]] = []
        self.identities = Identities()
        self._flights = Flights()
        self._reap_every = reap_every
        self._reaper = Reaper(
            self._store,
            every=timedelta(minutes=5) if reap_every is None else positive("reap_every", reap_every),
            batch=reap_batch,
            hooks=self._hooks,
        )
        self._started = False
        self._starting = asyncio.Lock()

    def __repr__(self) -> str:
        """Name the database, without its password."""
        return f"Dedup({self._backing!r})"

    @property
    def engine(self) -> AsyncEngine:
        """The engine of its database.

        Raises:
            ConfigurationError: It has none.
        """
        return self._backing.engine

    @property
    def has_database(self) -> bool:
        """Whether claims can ride, and `RequestSession` has a session to give."""
        return self._backing.rides

    # Life

    @property
    def started(self) -> bool:
        """Whether `start` has run and `stop` has not."""
        return self._started

    async def start(self) -> None:
        """Create or check the table, check Redis, and start the reaper. Does nothing the second time.

        A database that is down does not keep the app from starting, unless the table is to be created:
        claims answer 503 until it is back.

        Raises:
            ConfigurationError: The table is missing.
            StoreUnavailableError: The table is to be created, and the database did not answer.
        """
        async with self._starting:
            if self._started:
                return
            await self._backing.prepare(create_table=self._create_table)
            if self._reap_every is not None and self._backing.rides:
                self._reaper.start()
            self._started = True

    async def stop(self) -> None:
        """Stop the reaper, and close the pool if this runtime made it. It may be started again."""
        self._started = False
        await self._reaper.stop()
        await self._flights.drain()
        await self._backing.dispose()

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        await self.stop()

    async def create_table(self) -> None:
        """Create the table of claims unless it is there. Any number of processes may do so at once.

        Raises:
            StoreUnavailableError: The database did not answer.
        """
        await self._store.create_table()

    def adopt(self, engine: Engine | AsyncEngine) -> None:
        """Prepare another engine on the same database, such as the synchronous one of your handlers.

        The first claim on an engine does that too. Do it before where that is too late: on SQLite, where the
        first claim would be in a savepoint; or to be told when the app starts that the database is another.

        Raises:
            ConfigurationError: It is on another database, or no claim can ride there.
        """
        self._store.adopt(engine.sync_engine if isinstance(engine, AsyncEngine) else engine)

    async def reap(self) -> int:
        """Delete the expired claims now, in bounded batches, and return how many there were."""
        return await self._reaper.run_once()

    async def release(self, logical_id: str, *, scope: Scope) -> bool:
        """Give an id back that an operator knows to be free to run again.

        Args:
            logical_id: The id.
            scope: Its scope: a name, or the parts of the scope as a tuple such as `("POST", "/orders")`.

        A guard of this process forgets it at once, even where the database does not answer. Those of other
        processes may refuse the id without asking the database until their window is over, which is 5
        minutes by default.

        Returns:
            Whether there was a claim, in the database or in the guard of a policy with `store="memory"`.

        Raises:
            StoreUnavailableError: The database did not answer.
            ConfigurationError: The scope is neither a name nor a tuple of names.
        """
        intent = self.intent(logical_id, scope=parts_of(scope))
        remembered = self._memories.forget(intent)
        leased = self._leased.here(intent)
        try:
            released = await self._store.release(intent, None)
            if leased != intent:  # else the table has them both
                released |= await self._leased.release(leased, None)
            return released or remembered
        finally:  # and not before, when the claim would bring itself back to mind
            if self._guard is not None:
                self._guard.forget(intent.key)
                self._guard.forget(leased.key)

    # Policies

    def require(self, predicate: Callable[[Endpoint], bool], policy: Policy) -> None:
        """Require a policy of every endpoint that a predicate picks: routes and message handlers alike.

        An endpoint with a policy of its own keeps that one. Where several predicates pick an endpoint, the
        first one counts. Routes are looked at when the app starts, handlers when their first message comes.

        Args:
            predicate: Takes a `fastapi_dedup.policy.Endpoint`, and returns whether the policy is its.
            policy: The policy; a `Deduplicated` where routes are to be picked.

        Raises:
            ConfigurationError: The predicate cannot be called, or the policy is none.
        """
        if not callable(predicate) or not isinstance(policy, Policy):
            msg = (
                "require(predicate, policy) takes a callable that picks endpoints, and a Deduplicated(...): "
                f"not {predicate!r} and {policy!r}"
            )
            raise ConfigurationError(msg)
        self._required.append((predicate, policy))

    def required_of(self, endpoint: Endpoint) -> Policy | None:
        """Return the policy that is required of an endpoint; None where there is none."""
        return next((policy for predicate, policy in self._required if predicate(endpoint)), None)

    def handler(
        self, *policies: Policy, endpoint: str | None = None
    ) -> Callable[[Callable[..., Any]], MessageHandler]:
        """Wrap a message handler with the core that routes have.

            @dedup.handler(Deduplicated(source="body", member="order_id"))
            async def on_order(message: dict, session: AsyncSession) -> None: ...

            result = await on_order(message)    # HANDLED, DUPLICATE or IN_FLIGHT

        Args:
            *policies: The policies: one, or a delivery-level one and a logical one. None takes what
                `require` asks of the handler.
            endpoint: The name of the place where the messages arrive. Default: the function's name.

        Raises:
            ConfigurationError: A policy cannot be kept for messages.
        """
        return partial(MessageHandler, self, policies, endpoint=endpoint)

    # Deliveries

    def intent(
        self,
        logical_id: str,
        *,
        scope: Scope,
        window: timedelta | None = None,
        fingerprint: bytes | None = None,
        from_end: bool = False,
    ) -> Intent:
        """Return what a delivery wants done once, with this runtime's window where none is given."""
        parts = (scope,) if isinstance(scope, str) else scope
        return Intent(parts, logical_id, self.window if window is None else window, fingerprint, from_end)

    def delivery(self) -> Delivery:
        """Return a new delivery, with a transaction of its own that opens when it is used."""
        return self._delivery_of(Delivery)

    def _delivery_of(self, kind: type[D]) -> D:
        own = self._backing.transaction()
        return kind(self._store, own, flights=self._flights, hooks=self._hooks, guard=self._guard)

    def borrow(self, session: Any, *, lent: bool = False) -> RidingTransaction:
        """Return the transaction of a session or connection of the app's.

        Args:
            session: The session or connection.
            lent: Whether it may be given back as soon as the handler's work is done.

        Raises:
            ConfigurationError: A claim cannot ride that.
        """
        return self._backing.borrow(session, lent=lent)

    def place(
        self, policy: Policy, intent: Intent, transaction: Enclosing, delivery: Delivery
    ) -> tuple[Intent, Transaction, Store[Any] | None]:
        """Say where a policy's claim goes: the intent, the transaction and the store to claim it with.

        Args:
            policy: The policy.
            intent: What is to be done once.
            transaction: The one that the handler works in.
            delivery: The delivery that is to hold the claim.
        """
        if policy.store == "memory":
            memory = self._memories.of(policy)
            return memory.here(intent), MemoryTransaction(transaction, delivery), memory
        if policy.lease is None:
            return intent, transaction, None
        lease = Lease(policy.lease, policy.on_abandoned)
        held = LeasedTransaction(self._backing.followed(transaction), lease, flights=self._flights)
        return self._leased.here(replace(intent, lease=lease)), held, self._leased

    def prepare(self, policy: Policy) -> None:
        """See to what a policy needs, before its first delivery.

        Raises:
            ConfigurationError: It would ride where there is no database, or its window is longer than the
                guard that is its store keeps anything.
        """
        if policy.rides and not self._backing.rides:
            raise no_riding()
        if policy.store == "memory":
            self._memories.of(policy)
        elif self._guard is not None:
            self._memories.warn_if_inert(self._guard, window_of(policy) or self.window)
