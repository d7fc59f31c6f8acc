"""What the tests of leases in Redis stand on: servers of all kinds, and keys that are theirs alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from fastapi_dedup.stores.redis import RedisLeases
from tests.redis.worlds import client_of, new_prefix
from tests.redis_servers import PrivateRedis, private_redis
from tests.servers import MissingServerError, UnreachableError, give_up

KINDS = ("redis_url", "redis_cluster_url")


@pytest.fixture(params=KINDS, ids=["single", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Return the URL of one server, and of a cluster."""
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def prefix(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Yield a prefix of the test's own; its keys are deleted in the end."""
    name = new_prefix()
    yield name
    if "url" in request.fixturenames:
        async with client_of(request.getfixturevalue("url")) as client:
            async for key in client.scan_iter(match=f"{name}*"):
                await client.delete(key)


@pytest.fixture
def mortal() -> Iterator[PrivateRedis]:
    """Yield a server that the test may kill; what it has acknowledged is on its disk."""
    try:
        with private_redis("--appendonly", "yes", "--appendfsync", "always") as server:
            yield server
    except UnreachableError as error:
        give_up(MissingServerError(str(error), "Redis"))


@pytest.fixture
async def leases_on() -> AsyncIterator[Callable[..., RedisLeases]]:
    """Yield what makes leases, which are disposed of in the end."""
    async with AsyncExitStack() as stack:

        def make(url: str, **options: object) -> RedisLeases:
            made = RedisLeases(url, **options)  # type: ignore[arg-type]
            stack.push_async_callback(made.dispose)
            return made

        yield make
