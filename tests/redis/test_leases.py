"""`RedisLeases` on one server and on a cluster, through every kind of client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

from fastapi_dedup.claims import Claimed, Duplicate, InFlight, Lease, Mismatch
from fastapi_dedup.errors import ConfigurationError, StoreUnavailableError
from fastapi_dedup.stores.redis import RedisLeases
from tests.live import until
from tests.messaging.proxy import proxy
from tests.redis.worlds import client_of, rows_in
from tests.redis_servers import PrivateRedis, private_cluster, private_redis
from tests.stores.worlds import HOUR, intent

LONG = Lease(HOUR)
NEWS = intent("news", lease=LONG)
BRIEF = timedelta(milliseconds=200)
Make = Callable[..., RedisLeases]


async def play(leases: RedisLeases) -> None:
    """Play the life of a claim, from its first moment to its last."""
    first = replace(NEWS, fingerprint=b"1" * 32)
    assert await leases.look(first) is None
    taken = await leases.take(first)
    assert isinstance(taken, Claimed)
    receipt = taken.receipt
    assert receipt.expires_at - receipt.claimed_at == HOUR
    stranger = receipt._replace(token=os.urandom(16))
    assert await leases.take(NEWS) == InFlight()
    assert await leases.look(NEWS) == InFlight()
    assert await leases.take(replace(NEWS, fingerprint=b"2" * 32)) == Mismatch()
    assert await leases.extend(first, receipt)
    assert not await leases.extend(first, stranger)
    assert not await leases.complete(first, stranger)
    assert not await leases.release(first, stranger)
    assert await leases.complete(first, receipt)
    assert not await leases.extend(first, receipt)
    done = await leases.take(NEWS)
    assert isinstance(done, Duplicate)
    assert (done.claimed_at, done.expires_at) == (receipt.claimed_at, receipt.claimed_at + HOUR)
    assert done.age is not None
    assert timedelta(0) < done.age < timedelta(minutes=1)
    assert isinstance(await leases.look(replace(NEWS, fingerprint=b"1" * 32)), Duplicate)
    assert await leases.release(first, receipt)
    assert not await leases.release(first, None)
    assert isinstance(await leases.take(NEWS), Claimed)
    assert await leases.release(NEWS, None)


# clients


@pytest.mark.parametrize(
    "options", [{}, {"decode_responses": True}, {"protocol": 2}, {"protocol": 3, "decode_responses": True}]
)
async def test_every_client_of_redis_asyncio_will_do(url: str, prefix: str, options: dict[str, Any]) -> None:
    async with client_of(url, **options) as client:
        leases = RedisLeases(client, prefix=prefix)
        await play(leases)
        await leases.dispose()
        await client.set(f"{prefix}still open", "yes")


async def test_a_client_of_the_apps_stays_the_apps_to_close(prefix: str) -> None:
    closed: list[str] = []

    class Client(Redis):
        async def aclose(self, close_connection_pool: bool | None = None) -> None:
            closed.append("closed")
            await super().aclose(close_connection_pool)

    client = Client()
    await RedisLeases(client, prefix=prefix).dispose()
    assert closed == []
    await client.aclose()


async def test_a_url_will_do_too(url: str, prefix: str, leases_on: Make) -> None:
    leases = leases_on(url, prefix=prefix)
    await play(leases)
    await leases.dispose()
    await play(leases)  # it may be used again


@asynccontextmanager
async def sentinel_of(server: PrivateRedis, folder: Path) -> AsyncIterator[Sentinel]:
    """Run a sentinel that watches a server."""
    file = folder / "sentinel.conf"
    file.write_text(f"sentinel monitor shop 127.0.0.1 {server.port} 1\n")
    watcher = PrivateRedis(folder, sentinel=file)
    try:
        watcher.start()
        yield Sentinel([("127.0.0.1", watcher.port)])  # type: ignore[no-untyped-call]
    finally:
        watcher.kill()


async def test_a_client_that_a_sentinel_gives_will_do(
    mortal: PrivateRedis, prefix: str, tmp_path: Path
) -> None:
    async with sentinel_of(mortal, tmp_path) as sentinel:
        client = sentinel.master_for("shop")
        await play(RedisLeases(client, prefix=prefix))
        await client.aclose()
        for watching in sentinel.sentinels:
            await watching.aclose()


@pytest.mark.parametrize("wrong", [redis.Redis(), 3, None, b"redis://localhost"])
def test_what_is_no_client_of_redis_asyncio_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"takes a URL or a client of redis\.asyncio"):
        RedisLeases(wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("postgresql://me:secret@localhost/db", "RedisLeases takes a URL with redis://"),
        ("redis://me:secret@localhost:port", "redis-py makes no client of 'redis://localhost:port'"),
    ],
)
def test_a_url_that_is_none_is_refused_without_its_password(wrong: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        RedisLeases(wrong)
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"prefix": None}, "prefix must be"), ({"timeout": 5}, "timeout must be a timedelta")],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        RedisLeases("redis://localhost", **options)


def test_without_redis_py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'fastapi-dedup\[redis\]'"):
        RedisLeases("redis://localhost")


def test_it_names_its_server_and_not_its_password() -> None:
    leases = RedisLeases("redis://me:secret@localhost:6380/1?password=secret", prefix="shop:")
    assert repr(leases) == "RedisLeases('redis://localhost:6380/1', prefix='shop:')"
    assert repr(RedisLeases(Redis())) == "RedisLeases('Redis', prefix='dedup:')"


# what is stored


async def test_a_claim_is_one_hash_that_people_can_read(url: str, prefix: str, leases_on: Make) -> None:
    wanted = replace(intent("Größe 1", scope="POST /orders", fingerprint=b"1" * 32), lease=LONG)
    taken = await leases_on(url, prefix=prefix).take(wanted)
    assert isinstance(taken, Claimed)
    async with client_of(url, decode_responses=True) as client:
        fields = await client.hgetall(f"{prefix}{wanted.key.hex()}")
        (row,) = await rows_in(client, prefix)
    assert fields["scope"] == "POST /orders"
    assert fields["logical_id"] == "Größe 1"
    assert row.receipt == taken.receipt
    assert (row.fingerprint, row.leased_until) == (wanted.fingerprint, taken.receipt.expires_at)


@pytest.mark.parametrize("window", [HOUR * 2, timedelta(minutes=1)], ids=["window", "lease"])
async def test_the_server_is_told_when_a_claim_is_to_go(
    url: str, prefix: str, leases_on: Make, window: timedelta
) -> None:
    """For as long as the window or the lease lasts: a late owner may complete what nobody took over."""
    leases = leases_on(url, prefix=prefix)
    wanted = intent("news", window=window, lease=LONG)
    taken = await leases.take(wanted)
    assert isinstance(taken, Claimed)

    async def goes_after() -> timedelta:
        async with client_of(url, decode_responses=True) as client:
            at = await client.pexpiretime(f"{prefix}{wanted.key.hex()}")
        return timedelta(milliseconds=at) - timedelta(seconds=taken.receipt.claimed_at.timestamp())

    tick = timedelta(milliseconds=1.1)
    kept = max(HOUR, window)
    assert timedelta(0) <= await goes_after() - kept < tick
    assert await leases.extend(wanted, taken.receipt)
    assert timedelta(0) <= await goes_after() - kept < timedelta(minutes=1)
    assert await leases.complete(wanted, taken.receipt)
    assert timedelta(0) <= await goes_after() - window < tick


async def test_the_server_deletes_a_claim_whose_window_is_over(
    url: str, prefix: str, leases_on: Make
) -> None:
    leases = leases_on(url, prefix=prefix)
    done = intent("done", window=BRIEF, lease=Lease(BRIEF))
    abandoned = intent("abandoned", window=BRIEF, lease=Lease(BRIEF))
    blocking = intent("blocking", window=BRIEF, lease=Lease(BRIEF, "block"))
    for wanted in (done, abandoned, blocking):
        taken = await leases.take(wanted)
        assert isinstance(taken, Claimed)
        if wanted is done:
            assert await leases.complete(wanted, taken.receipt)

    async def are_gone() -> bool:
        async with client_of(url) as client:
            return [key async for key in client.scan_iter(match=f"{prefix}*")] == []

    await until(are_gone)
    for wanted in (done, abandoned, blocking):
        assert await leases.look(wanted) is None


async def test_a_window_that_ends_before_the_work_leaves_nothing_behind(
    url: str, prefix: str, leases_on: Make
) -> None:
    leases = leases_on(url, prefix=prefix)
    wanted = replace(intent("news", window=timedelta(microseconds=1)), lease=LONG)
    taken = await leases.take(wanted)
    assert isinstance(taken, Claimed)
    assert await leases.complete(wanted, taken.receipt)
    assert await leases.look(wanted) is None
    async with client_of(url) as client:
        assert await rows_in(client, prefix) == []


async def test_a_window_from_the_end_of_the_work_is_counted_from_there(
    url: str, prefix: str, leases_on: Make
) -> None:
    leases = leases_on(url, prefix=prefix)
    wanted = replace(NEWS, from_end=True)
    taken = await leases.take(wanted)
    assert isinstance(taken, Claimed)
    assert await leases.complete(wanted, taken.receipt)
    done = await leases.look(wanted)
    assert isinstance(done, Duplicate)
    assert done.expires_at is not None
    assert done.expires_at > taken.receipt.claimed_at + HOUR


async def test_keys_of_different_prefixes_do_not_meet(url: str, prefix: str, leases_on: Make) -> None:
    for number in range(2):
        outcome = await leases_on(url, prefix=f"{prefix}{number}:").take(NEWS)
        assert isinstance(outcome, Claimed)


# races, and answers that are lost


async def test_one_of_many_takers_wins(url: str, prefix: str, leases_on: Make) -> None:
    leases = leases_on(url, prefix=prefix)
    for number in range(20):
        wanted = intent(f"news {number}", lease=LONG)
        outcomes = await asyncio.gather(*(leases.take(wanted) for _ in range(20)))
        assert [type(outcome) for outcome in outcomes].count(Claimed) == 1
        assert outcomes.count(InFlight()) == 19


async def test_a_claim_whose_answer_was_lost_is_ours_when_the_client_asks_again(
    mortal: PrivateRedis, prefix: str, leases_on: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = leases_on(mortal.url, prefix=prefix)
    monkeypatch.setattr(os, "urandom", lambda length: b"\1" * length)
    first = await leases.take(NEWS)
    again = await leases.take(NEWS)
    assert isinstance(first, Claimed)
    assert again == first


@pytest.mark.parametrize(("on_abandoned", "left"), [("block", None), ("retry", InFlight())])
async def test_a_claim_whose_answer_never_comes_blocks_nothing_for_longer_than_its_lease(
    url: str, prefix: str, leases_on: Make, on_abandoned: Any, left: InFlight | None
) -> None:
    leases = leases_on(url, prefix=prefix)
    wanted = intent("news", lease=Lease(HOUR, on_abandoned))
    evaluate = leases._evaluate

    async def lose_the_answer(*values: Any) -> None:
        leases._evaluate = evaluate  # type: ignore[method-assign]
        await evaluate(*values)
        raise TimeoutError

    leases._evaluate = lose_the_answer  # type: ignore[method-assign, assignment]
    with pytest.raises(StoreUnavailableError):
        await leases.take(wanted)
    assert await leases.look(wanted) == left


async def test_a_connection_that_died_in_the_pool_costs_nothing(
    mortal: PrivateRedis, prefix: str, leases_on: Make
) -> None:
    async with proxy("127.0.0.1", mortal.port) as between:
        leases = leases_on(f"redis://127.0.0.1:{between.port}", prefix=prefix)
        taken = await leases.take(NEWS)
        assert isinstance(taken, Claimed)
        between.cut()
        assert await leases.extend(NEWS, taken.receipt)


async def test_scripts_that_the_server_has_forgotten_are_sent_anew(
    mortal: PrivateRedis, prefix: str, leases_on: Make
) -> None:
    leases = leases_on(mortal.url, prefix=prefix)
    with mortal.client() as client:
        evaluate = leases._evaluate

        async def flush_before(*values: Any) -> Any:
            client.script_flush()
            return await evaluate(*values)

        leases._evaluate = flush_before  # type: ignore[method-assign, assignment]
        await play(leases)
        calls = client.info("commandstats")
    assert isinstance(calls, dict)
    assert calls["cmdstat_eval"]["calls"] == calls["cmdstat_evalsha"]["calls"] > 10


# what a server may say


@pytest.fixture
def nothing_there(mortal: PrivateRedis) -> str:
    mortal.kill()
    return mortal.url


async def expect_unavailable(leases: RedisLeases, cause: type[BaseException] | str) -> None:
    """See that a claim cannot be had, and why."""
    with pytest.raises(StoreUnavailableError) as refused:
        await leases.take(NEWS)
    error = refused.value.__cause__
    if isinstance(cause, str):
        assert cause in str(error)
    else:
        assert isinstance(error, cause)


async def test_a_server_that_is_down_is_unavailable(nothing_there: str, leases_on: Make) -> None:
    await expect_unavailable(leases_on(nothing_there), redis.ConnectionError)


async def test_a_cluster_that_is_down_is_unavailable(nothing_there: str, leases_on: Make) -> None:
    leases = leases_on(nothing_there.replace("redis://", "redis+cluster://"))
    await expect_unavailable(leases, redis.exceptions.RedisClusterException)


async def test_a_cluster_that_loses_a_master_is_unavailable_until_it_is_back(leases_on: Make) -> None:
    with private_cluster() as nodes:
        leases = leases_on(f"redis+cluster://127.0.0.1:{nodes[0].port}", timeout=timedelta(seconds=1))
        wanted = [intent(f"news {number}", lease=LONG) for number in range(10)]
        for each in wanted:
            assert isinstance(await leases.take(each), Claimed)
        nodes[1].kill()
        outcomes = await asyncio.gather(*map(leases.look, wanted), return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {InFlight, StoreUnavailableError}
        nodes[1].start()

        async def is_back() -> bool:
            outcomes = await asyncio.gather(*map(leases.take, wanted), return_exceptions=True)
            return not any(isinstance(outcome, StoreUnavailableError) for outcome in outcomes)

        await until(is_back)


async def test_a_server_that_never_answers_is_unavailable_in_time(leases_on: Make) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    leases = leases_on(f"redis://127.0.0.1:{port}", timeout=timedelta(seconds=0.2))
    async with asyncio.timeout(5):
        await expect_unavailable(leases, TimeoutError)
    server.close()


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--maxmemory", "1"), redis.exceptions.OutOfMemoryError),
        (("--requirepass", "secret"), redis.RedisError),
        (("--cluster-enabled", "yes"), redis.exceptions.ClusterDownError),
        (("--rename-command", "EVALSHA", ""), "unknown command"),
    ],
)
async def test_a_server_that_refuses_is_unavailable(
    options: tuple[str, ...], cause: type[BaseException] | str, leases_on: Make
) -> None:
    with private_redis(*options) as server:
        await expect_unavailable(leases_on(server.url), cause)


async def test_a_replica_is_unavailable(mortal: PrivateRedis, leases_on: Make) -> None:
    with private_redis("--replicaof", "127.0.0.1", str(mortal.port)) as replica:
        await expect_unavailable(leases_on(replica.url), redis.exceptions.ReadOnlyError)


async def test_a_key_of_somebody_elses_is_no_claim_and_is_left_alone(
    url: str, prefix: str, leases_on: Make
) -> None:
    leases = leases_on(url, prefix=prefix)
    async with client_of(url, decode_responses=True) as client:
        key = f"{prefix}{NEWS.key.hex()}"
        await client.set(key, "theirs")
        for step in (leases.take(NEWS), leases.look(NEWS), leases.release(NEWS, None)):
            with pytest.raises(ConfigurationError, match=r"holds something else than a claim: .* prefix="):
                await step
        assert await client.get(key) == "theirs"


# start-up


async def warnings_of(leases: RedisLeases, caplog: pytest.LogCaptureFixture) -> list[str]:
    await leases.check()
    return [record.getMessage() for record in caplog.records]


async def test_a_server_that_evicts_nothing_is_no_cause_for_a_warning(
    url: str, leases_on: Make, caplog: pytest.LogCaptureFixture
) -> None:
    assert await warnings_of(leases_on(url), caplog) == []


async def test_a_server_that_may_evict_claims_is(leases_on: Make, caplog: pytest.LogCaptureFixture) -> None:
    with private_redis("--maxmemory-policy", "allkeys-lru") as server:
        (warning,) = await warnings_of(leases_on(server.url), caplog)
    assert "has the maxmemory-policy allkeys-lru: set it to noeviction" in warning


async def test_a_server_that_does_not_tell_is_too(
    mortal: PrivateRedis, leases_on: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with mortal.client() as client:
        client.acl_setuser("app", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
    leases = leases_on(mortal.url.replace("//", "//app:any@"))
    (warning,) = await warnings_of(leases, caplog)
    assert "does not tell its maxmemory-policy" in warning
    await play(leases)


async def test_a_server_that_is_down_at_start_up_is_told_and_no_error(
    nothing_there: str, leases_on: Make, caplog: pytest.LogCaptureFixture
) -> None:
    (warning,) = await warnings_of(leases_on(nothing_there), caplog)
    assert "does not answer; claims are refused until it does" in warning


async def test_a_client_that_would_lose_its_cluster_for_good_is_too(
    redis_cluster_url: str,
    leases_on: Make,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis, "__version__", "7.1.1")
    (warning,) = await warnings_of(leases_on(redis_cluster_url), caplog)
    assert "redis-py 7.1.1 does not find a cluster again" in warning
