"""Leased claims in Redis: one hash per claim, one script per step, and an expiry that the server keeps.

    from fastapi_dedup.stores.redis import RedisLeases

    dedup = Dedup("postgresql+asyncpg://…", leases=RedisLeases("redis://…"))   # riding claims in the database
    dedup = Dedup("redis://…")                                              # leased claims only

Redis cannot take part in the handler's transaction. The COMMIT asks it for the lease just before, and the
claim is completed just after; a crash in between leaves the work done and the claim to run out. It also
forgets what a failover had not copied yet. The table of claims is the stronger choice.

Every script reads the server's own clock and touches one key, so a cluster will do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from sqlalchemy import Select, literal_column, select
from sqlalchemy.exc import DBAPIError, MissingGreenlet
from sqlalchemy.util import await_only

from fastapi_dedup.claims import Claimed, Receipt, positive, scope_text, verdict
from fastapi_dedup.errors import ClaimLostError, ConfigurationError, StoreUnavailableError
from fastapi_dedup.stores.riding import ROLLED_BACK_BY_THE_DATABASE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from redis.asyncio import Redis, RedisCluster

    from fastapi_dedup.claims import Duplicate, InFlight, Intent, Mismatch, Outcome

    Client: TypeAlias = Redis | RedisCluster

__all__ = ["RedisLeases", "is_redis_url"]

logger = logging.getLogger("fastapi_dedup")

_SCHEMES = frozenset({"redis", "rediss", "unix"})
_CLUSTER = "+cluster"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FINDS_CLUSTERS_AGAIN = (7, 2)

_NOTHING: Select[Any] = select(literal_column("1"))

_FOREIGN = "foreign"
"""What a script returns whose key is no hash: the one error that HMGET has."""

# Lua's numbers are doubles: they hold microseconds since 1970 to the digit until the year 2255, if they are
# written out with %.0f. A field that is not there is false.
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
"""
_FOUND = f"""
local found = redis.pcall(
    'HMGET', KEYS[1], 'token', 'claimed_at', 'expires_at', 'leased_until', 'fingerprint')
if found.err then
    return '{_FOREIGN}'
end
local token, claimed_at, expires_at, leased_until, fingerprint = unpack(found)
claimed_at, expires_at, leased_until = tonumber(claimed_at), tonumber(expires_at), tonumber(leased_until)
local function digits(number)
    return string.format('%.0f', number)
end
local function expire_at(moment)
    redis.call('PEXPIREAT', KEYS[1], digits(math.ceil(moment / 1000)))
end
"""

# A client that lost its connection asks again: a claim of the same token is the one that it has asked for.
# A lease that has run out is kept for the rest of the window, for a late owner whom nobody has robbed.
_TAKE = f"""{_NOW}{_FOUND}
local mine, term, lease, window, payload, scope, logical_id = unpack(ARGV)
local ours = token == mine
if not token or expires_at <= now then
    ours, claimed_at, expires_at, leased_until, fingerprint = true, now, now + term, now + lease, payload
    if token then
        redis.call('DEL', KEYS[1])
    end
    redis.call('HSET', KEYS[1], 'token', mine, 'scope', scope, 'logical_id', logical_id,
        'fingerprint', fingerprint, 'claimed_at', digits(claimed_at), 'expires_at', digits(expires_at),
        'leased_until', digits(leased_until))
    expire_at(math.max(expires_at, claimed_at + window))
end
return {{ours and 1 or 0, now, claimed_at, expires_at, leased_until or -1, fingerprint}}
"""

_LOOK = f"""{_NOW}{_FOUND}
return token and {{0, now, claimed_at, expires_at, leased_until or -1, fingerprint}}
"""

_EXTEND = f"""{_NOW}{_FOUND}
local mine, lease, window = unpack(ARGV)
if token ~= mine or not leased_until then
    return 0
end
leased_until = now + lease
expires_at = math.max(expires_at, leased_until)
redis.call('HSET', KEYS[1], 'expires_at', digits(expires_at), 'leased_until', digits(leased_until))
expire_at(math.max(expires_at, claimed_at + window))
return 1
"""

_COMPLETE = f"""{_NOW}{_FOUND}
local mine, window, from_end = unpack(ARGV)
if token ~= mine then
    return 0
end
expires_at = window + (from_end == '1' and now or claimed_at)
redis.call('HSET', KEYS[1], 'expires_at', digits(expires_at))
redis.call('HDEL', KEYS[1], 'leased_until')
expire_at(expires_at)
return 1
"""

_RELEASE = f"""{_FOUND}
local mine = ARGV[1]
if token and (mine == '' or mine == token) then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


def is_redis_url(bind: object) -> bool:
    """Tell whether something is a URL of Redis: `redis://`, `rediss://`, `unix://` or `redis+cluster://`."""
    return isinstance(bind, str) and bind.partition("://")[0].removesuffix(_CLUSTER) in _SCHEMES


class RedisLeases:
    """Leased claims in Redis, 5 or newer, on one server or a cluster.

    Args:
        client: A URL (`redis://`, `rediss://`, `unix://`; `redis+cluster://`, `rediss+cluster://`), or
            a client of `redis.asyncio`, which stays yours to close: `Redis`, one of a `Sentinel`, or
            `RedisCluster`.
        prefix: What the names of all keys start with. Default `dedup:`.
        timeout: How long a step may take until Redis counts as not answering. Default 5 seconds.

    Raises:
        ConfigurationError: redis-py is not installed, or the client is none of its asynchronous ones.
    """

    completes_in_transactions = False
    realm = b"redis"

    def __init__(
        self, client: str | Client, *, prefix: str = "dedup:", timeout: timedelta = timedelta(seconds=5)
    ) -> None:
        if not isinstance(prefix, str):
            msg = f"prefix must be a string, not {prefix!r}"
            raise ConfigurationError(msg)
        self._timeout = positive("timeout", timeout).total_seconds()
        self._redis = _installed()
        self._prefix = prefix
        self._owns_client = isinstance(client, str)
        self._address = client.__class__.__name__
        if isinstance(client, str):
            parts = urlsplit(client)
            self._address = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
            client = self._connected_to(client)
        if not isinstance(client, self._redis.asyncio.Redis | self._redis.asyncio.RedisCluster):
            msg = (
                f"RedisLeases takes a URL or a client of redis.asyncio, not a {type(client).__module__}."
                f"{type(client).__qualname__}: a synchronous client would block the event loop"
            )
            raise ConfigurationError(msg)
        self._client = client
        self._clustered = isinstance(client, self._redis.asyncio.RedisCluster)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _connected_to(self, url: str) -> Client:
        if not is_redis_url(url):
            schemes = "redis://, rediss://, unix:// or redis+cluster://"
            msg = f"RedisLeases takes a URL with {schemes}, not {self._address!r}"
            raise ConfigurationError(msg)
        scheme, _, rest = url.partition("://")
        kinds = self._redis.asyncio
        options: dict[str, Any] = {"socket_timeout": self._timeout, "socket_connect_timeout": self._timeout}
        client: Client
        try:
            if scheme.endswith(_CLUSTER):
                client = kinds.RedisCluster.from_url(f"{scheme.removesuffix(_CLUSTER)}://{rest}", **options)
            else:
                # Once more at once, for a connection that has died in the pool: an outage is told soon.
                options["retry"] = kinds.retry.Retry(self._redis.backoff.NoBackoff(), 1)
                options["retry_on_error"] = [self._redis.exceptions.ConnectionError]
                client = kinds.Redis.from_url(url, **options)
        except (ValueError, TypeError, self._redis.exceptions.RedisError) as error:
            msg = f"redis-py makes no client of {self._address!r}: {error}"
            raise ConfigurationError(msg) from error
        return client

    def __repr__(self) -> str:
        """Name the server, without its password."""
        return f"RedisLeases({self._address!r}, prefix={self._prefix!r})"

    # At start-up

    async def check(self) -> None:
        """Warn where Redis may evict claims, or does not answer, or would not be found again."""
        if self._clustered and _version_of(self._redis) < _FINDS_CLUSTERS_AGAIN:
            logger.warning(
                "redis-py %s does not find a cluster again that it has lost sight of, until the process is "
                "started anew: take 7.2 or newer",
                self._redis.__version__,
            )
        try:
            policies = await self._eviction_policies()
        except StoreUnavailableError as error:
            if isinstance(error.__cause__, self._redis.exceptions.ResponseError):
                logger.warning(
                    "%r does not tell its maxmemory-policy (%s): see to it that it is noeviction, for a "
                    "claim that is evicted lets a duplicate run",
                    self,
                    error.__cause__,
                )
            else:
                logger.warning("%r does not answer; claims are refused until it does", self, exc_info=True)
            return
        if policies != {"noeviction"}:
            logger.warning(
                "%r has the maxmemory-policy %s: set it to noeviction, for a claim that is evicted lets a "
                "duplicate run",
                self,
                ", ".join(sorted(policies)),
            )

    async def _eviction_policies(self) -> set[str]:
        where = {"target_nodes": self._redis.asyncio.RedisCluster.PRIMARIES} if self._clustered else {}
        told = await self._within_time(lambda: self._client.execute_command("INFO", "memory", **where))
        nodes = [told] if "maxmemory_policy" in told else told.values()
        return {str(node.get("maxmemory_policy", "that it does not name")) for node in nodes}

    async def dispose(self) -> None:
        """Close the client, if it was made here."""
        if self._owns_client:
            await self._client.aclose()

    # Steps

    async def take(self, intent: Intent) -> Outcome:
        """Take the id for the length of the intent's lease, or say why not."""
        self._loop = asyncio.get_running_loop()
        token = os.urandom(16)
        terms = _microseconds(intent.term), _lease_of(intent), _microseconds(intent.window)
        legible = scope_text(intent.scope).encode(), intent.logical_id.encode()
        payload = (intent.fingerprint or b"").hex()
        try:
            row = await self._run(_TAKE, intent, token.hex(), *terms, payload, *legible)
        except StoreUnavailableError:
            if intent.lease is not None and intent.lease.on_abandoned == "block":
                # It may have been taken all the same, and then no lease would free what nobody works on.
                with suppress(StoreUnavailableError):
                    await self._run(_RELEASE, intent, token.hex())
            raise
        if row[0]:
            return Claimed(Receipt(token, _moment(row[2]), _moment(row[3])))
        answer = _answer(intent, row)
        assert answer is not None  # noqa: S101 - for mypy: the script has taken over what counts no more
        return answer

    async def look(self, intent: Intent) -> Outcome | None:
        """Return what a claim answers; None where there is none, or its lease has run out."""
        row = await self._run(_LOOK, intent)
        return None if row is None else _answer(intent, row)

    async def extend(self, intent: Intent, receipt: Receipt) -> bool:
        """Count the lease anew from now; False where it is the receipt's no more."""
        terms = _lease_of(intent), _microseconds(intent.window)
        return bool(await self._run(_EXTEND, intent, receipt.token.hex(), *terms))

    async def complete(self, intent: Intent, receipt: Receipt) -> bool:
        """Say that the work is done; False where the claim is the receipt's no more."""
        window = _microseconds(intent.window)
        return bool(await self._run(_COMPLETE, intent, receipt.token.hex(), window, int(intent.from_end)))

    def complete_in(self, connection: Any, intent: Intent, receipt: Receipt) -> bool | None:
        """Extend the lease, so that it outlasts the COMMIT which is about to come; False where it is lost.

        Raises:
            StoreUnavailableError: Redis did not answer, or could not be asked.
            ClaimLostError: A failed statement has undone what was to be committed, though nobody said so.
        """
        try:
            connection.execute(_NOTHING, {})
        except DBAPIError as error:
            raise ClaimLostError(ROLLED_BACK_BY_THE_DATABASE) from error
        return None if self._wait_for(partial(self.extend, intent, receipt)) else False

    def _wait_for(self, step: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Wait for a step where nothing can be awaited: in a COMMIT.

        A synchronous one in a thread of its own waits for the event loop; in the loop's own thread it cannot.
        """
        try:
            return await_only(step())
        except MissingGreenlet as error:
            loop = self._loop
            if loop is None or loop.is_closed() or _in_a_loop():
                msg = "a synchronous COMMIT in the event loop's own thread cannot ask Redis"
                raise StoreUnavailableError(msg) from error
        try:
            return asyncio.run_coroutine_threadsafe(step(), loop).result(2 * self._timeout)
        except TimeoutError as error:
            msg = "the event loop was too busy to ask Redis"
            raise StoreUnavailableError(msg) from error

    async def release(self, intent: Intent, receipt: Receipt | None) -> bool:
        """Delete the claim, if it still is the receipt's; None instead of a receipt: whoever's."""
        return bool(await self._run(_RELEASE, intent, "" if receipt is None else receipt.token.hex()))

    async def _run(self, script: str, intent: Intent, *values: str | bytes | int) -> Any:
        """Run a script on the one key of an intent."""
        key = f"{self._prefix}{intent.key.removeprefix(self.realm).hex()}"
        answer = await self._within_time(lambda: self._evaluate(script, key, *values))
        if isinstance(answer, str | bytes):  # which alone is no list and no number
            msg = (
                f"the key {key!r} of {self!r} holds something else than a claim: give RedisLeases a prefix= "
                "that nobody else uses"
            )
            raise ConfigurationError(msg)
        return answer

    async def _evaluate(self, script: str, key: str, *values: str | bytes | int) -> Any:
        sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._client.evalsha(sha, 1, key, *values)
        except self._redis.exceptions.NoScriptError:  # new there, or flushed
            return await self._client.eval(script, 1, key, *values)

    async def _within_time(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        with self._errors():
            async with asyncio.timeout(self._timeout):
                if self._clustered:  # many tasks at once may break a client that does not know its nodes yet
                    await self._client.initialize()
                return await ask()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what redis-py raises into our errors, with its own as the cause."""
        errors = self._redis.exceptions
        try:
            yield
        except errors.ResponseError as error:
            msg = f"Redis refused the claim ({error})"
            raise StoreUnavailableError(msg) from error
        except Exception as error:  # the client of a cluster that changes raises whatever happens to it
            msg = f"Redis did not answer ({type(error).__name__})"
            raise StoreUnavailableError(msg) from error


def _installed() -> ModuleType:
    try:
        import redis.asyncio  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        msg = "claims in Redis need redis-py: pip install 'fastapi-dedup[redis]'"
        raise ConfigurationError(msg) from error
    return redis


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _version_of(module: ModuleType) -> tuple[int, ...]:
    return tuple([int(part) for part in module.__version__.split(".")[:2]])


def _lease_of(intent: Intent) -> int:
    assert intent.lease is not None  # noqa: S101 - for mypy: only leased claims come here
    return _microseconds(intent.lease.length)


def _microseconds(duration: timedelta) -> int:
    return duration // _MICROSECOND


def _moment(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


def _answer(intent: Intent, row: list[Any]) -> Duplicate | InFlight | Mismatch | None:
    _, now, claimed_at, expires_at, leased_until, fingerprint = row
    return verdict(
        intent,
        claimed_at=_moment(claimed_at),
        expires_at=_moment(expires_at),
        leased_until=None if leased_until < 0 else _moment(leased_until),
        fingerprint=bytes.fromhex(fingerprint if isinstance(fingerprint, str) else fingerprint.decode())
        or None,
        now=_moment(now),
    )
