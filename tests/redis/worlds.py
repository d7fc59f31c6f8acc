"""A world whose leased claims are in Redis, and whose work is in a database."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis, RedisCluster
from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup import Claim, Dedup
from fastapi_dedup.claims import Intent
from fastapi_dedup.policy import Policy
from fastapi_dedup.refusals import Refusal
from fastapi_dedup.stores import redis as module
from fastapi_dedup.stores.redis import RedisLeases
from tests.stores.worlds import HOUR, Attempt, Row, World

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def new_prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"dedup-test-{secrets.token_hex(6)}:"


class StoppedLeases(RedisLeases):
    """Leases that go by the test's clock: the server's own cannot be stopped, and there is no other way to
    hit a tick."""

    now: datetime | None = None

    async def _evaluate(self, script: str, key: str, *values: str | bytes | int) -> Any:
        if self.now is not None:
            now = (self.now - EPOCH) // timedelta(microseconds=1)
            script = script.replace(module._NOW, f"\nlocal now = {now}\n")
        return await super()._evaluate(script, key, *values)


@asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[Redis | RedisCluster]:
    """Yield a client of the tests' own."""
    kind: type[Redis | RedisCluster] = RedisCluster if "+cluster" in url else Redis
    client = kind.from_url(url.replace("+cluster", ""), **options)
    try:
        yield client
    finally:
        await client.aclose()


async def rows_in(client: Redis | RedisCluster, prefix: str) -> list[Row]:
    """Return the claims under a prefix, the oldest first."""
    names = [str(name) async for name in client.scan_iter(match=f"{prefix}*", count=1000)]
    found: list[tuple[str, dict[str, str]]] = [
        (name.removeprefix(prefix), await _hash(client, name)) for name in names
    ]
    rows = [
        Row(
            key=bytes.fromhex(key),
            scope=fields["scope"],
            logical_id=fields["logical_id"],
            token=bytes.fromhex(fields["token"]),
            fingerprint=bytes.fromhex(fields["fingerprint"]) or None,
            claimed_at=_moment(fields["claimed_at"]),
            expires_at=_moment(fields["expires_at"]),
            leased_until=_moment(fields["leased_until"]) if "leased_until" in fields else None,
        )
        for key, fields in found
        if fields  # else it has expired meanwhile
    ]
    return sorted(rows, key=lambda row: (row.claimed_at, row.logical_id))


async def _hash(client: Redis | RedisCluster, name: str) -> dict[str, str]:
    return {str(field): str(value) for field, value in (await client.hgetall(name)).items()}


def _moment(microseconds: str) -> datetime:
    return EPOCH + timedelta(microseconds=int(microseconds))


class LeasedAttempt(Attempt):
    """One delivery whose claim is leased: nothing can ride in Redis."""

    async def claim(self, wanted: Intent) -> Claim | Refusal:
        policy = Policy(lease=HOUR)
        intent, transaction, store = self.dedup.place(policy, wanted, self.transaction, self.delivery)
        return await self.delivery.claim(intent, transaction, store=store)


@dataclass
class RedisWorld(World):
    """A database for the work, and a place in Redis for the claims.

    Attributes:
        redis: Its URL.
        prefix: What its keys start with.
    """

    redis: str = field(kw_only=True)
    prefix: str = field(kw_only=True, default_factory=new_prefix)
    _moment: datetime | None = None
    _made: list[StoppedLeases] = field(default_factory=list)

    def runtime(self, **options: Any) -> Dedup:
        leases = StoppedLeases(self.redis, prefix=self.prefix)
        leases.now = self._moment
        if not self._made:
            self._stack.push_async_callback(self._clear)
        self._made.append(leases)
        return super().runtime(leases=leases, **options)

    async def _clear(self) -> None:
        async with client_of(self.redis) as client:
            async for name in client.scan_iter(match=f"{self.prefix}*"):
                await client.delete(name)

    @asynccontextmanager
    async def attempt(self, dedup: Dedup | None = None) -> AsyncIterator[Attempt]:
        attempt = LeasedAttempt(dedup or self.dedup)
        try:
            yield attempt
        finally:
            await attempt.delivery.finish()

    def engines(self) -> list[AsyncEngine]:
        return [self.dedup.engine]

    async def rows(self) -> list[Row]:
        async with client_of(self.redis, decode_responses=True) as client:
            return await rows_in(client, self.prefix)

    async def count(self, table: str = "dedup_claims", where: str = "1 = 1") -> int:
        return len(await self.rows()) if table == "dedup_claims" else await super().count(table, where)

    async def at(self, moment: datetime) -> None:
        self._moment = moment
        for leases in self._made:
            leases.now = moment
