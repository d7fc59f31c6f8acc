"""The brokers and databases that the message tests run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from fastapi_dedup import Dedup
from fastapi_dedup.hooks import Event
from tests.databases import orders_table, url_of
from tests.http.world import World
from tests.messaging.brokers import BROKERS, Broker, JetStream, RabbitMQ
from tests.messaging.proxy import Proxy, proxy


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Yield a PostgreSQL database, and a runtime on it."""
    events: list[Event] = []
    async with orders_table(url_of("asyncpg", request, tmp_path)) as engine:
        dedup = Dedup(engine, reap_every=None, hooks=[events.append])
        await dedup.create_table()
        yield World(engine, dedup, events)


@pytest.fixture
async def database_proxy(world: World) -> AsyncIterator[Proxy]:
    """Yield a proxy between the runtime of `proxied` and its database."""
    async with proxy(world.engine.url.host or "127.0.0.1", world.engine.url.port or 5432) as opened:
        yield opened


@pytest.fixture
async def proxied(world: World, database_proxy: Proxy) -> AsyncIterator[World]:
    """Yield the world's database, and a runtime that reaches it through the proxy."""
    engine = create_async_engine(world.engine.url.set(host="127.0.0.1", port=database_proxy.port))
    events: list[Event] = []
    yield World(world.engine, Dedup(engine, reap_every=None, hooks=[events.append]), events)
    await engine.dispose()


@pytest.fixture(params=BROKERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind of broker in turn."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def broker_url(kind: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of the kind's server."""
    url: str = request.getfixturevalue({"rabbitmq": "rabbitmq_url", "jetstream": "nats_url"}[kind])
    return url


@pytest.fixture
async def broker_proxy(broker_url: str) -> AsyncIterator[Proxy]:
    """Yield a proxy between the broker and its consumers."""
    url = make_url(broker_url)
    async with proxy(
        url.host or "127.0.0.1", url.port or {"amqp": 5672, "nats": 4222}[url.drivername]
    ) as opened:
        yield opened


@pytest.fixture
async def broker(kind: str, broker_url: str, broker_proxy: Proxy) -> AsyncIterator[Broker]:
    """Yield each broker in turn; consumers reach it through the proxy."""
    through = urlsplit(broker_url)
    login, _, _ = through.netloc.rpartition("@")
    netloc = f"{login}@127.0.0.1:{broker_proxy.port}" if login else f"127.0.0.1:{broker_proxy.port}"
    opened = BROKERS[kind](broker_url, through._replace(netloc=netloc).geturl())
    yield opened
    await opened.close()


@pytest.fixture
async def rabbitmq(rabbitmq_url: str) -> AsyncIterator[RabbitMQ]:
    """Yield RabbitMQ."""
    opened = RabbitMQ(rabbitmq_url)
    yield opened
    await opened.close()


@pytest.fixture
async def jetstream(nats_url: str) -> AsyncIterator[JetStream]:
    """Yield JetStream."""
    opened = JetStream(nats_url)
    yield opened
    await opened.close()
