"""Leased claims beside a session of the app's: its COMMIT completes them, whatever kind it is."""

from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from fastapi import HTTPException
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from tests.http.world import KEY, client, eventually
from tests.sessions.conftest import kind_on, name_of
from tests.sessions.kinds import DIFFERENT, MARIADB
from tests.sessions.routes import Shop

LEASE = timedelta(seconds=30)


@pytest.fixture(params=DIFFERENT + MARIADB, ids=name_of)
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """Yield every kind of session whose transactions differ."""
    async with kind_on(request.param, request, tmp_path) as kind:
        yield Shop(kind, "def" if kind.blocking else "async def")


async def leased(shop: Shop) -> list[bool]:
    """Return for each claim whether it is leased still."""
    return [
        each is not None for each in await shop.kind.world.column("select leased_until from dedup_claims")
    ]


async def elsewhere(shop: Shop, statement: str, **values: object) -> None:
    """Run a statement in a transaction of its own."""
    async with shop.kind.world.engine.begin() as connection:
        await connection.execute(text(statement), values)


@pytest.mark.parametrize("exits", [None, "function"])
async def test_the_commit_of_the_session_completes_the_claim(shop: Shop, exits: Any) -> None:
    seen: list[list[bool]] = []

    async def look() -> None:
        seen.append(await leased(shop))

    async def create(session: Any, sku: str) -> None:
        await shop.meanwhile(look)
        await shop.kind.add(session, sku)

    async with client(shop.app(create, exits=exits, lease=LEASE)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert seen == [[True]]
    assert await leased(shop) == [False]
    assert await shop.kind.world.orders() == ["a"]


async def test_a_failure_releases_the_claim(shop: Shop) -> None:
    tries: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)
        tries.append(sku)
        if len(tries) == 1:
            raise HTTPException(400)

    async with client(shop.app(create, lease=LEASE)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 400

        async def free() -> bool:
            return await shop.kind.world.ids() == []

        await eventually(free)
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
    assert await shop.kind.world.orders() == ["a"]


async def test_a_lease_that_was_lost_makes_the_commit_fail(shop: Shop) -> None:
    async def steal() -> None:
        await elsewhere(shop, "update dedup_claims set token = :token", token=b"x" * 16)

    async def create(session: Any, sku: str) -> None:
        await shop.meanwhile(steal)
        await shop.kind.add(session, sku)

    async with client(shop.app(create, lease=LEASE)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
    assert await shop.kind.world.orders() == []
    assert await shop.kind.world.ids() == ["k"]


async def test_work_that_the_database_has_undone_is_not_done(shop: Shop) -> None:
    kind = shop.kind
    await elsewhere(shop, "insert into orders (sku) values ('there')")

    async def change() -> None:
        await elsewhere(shop, "update orders set note = 'theirs'")

    async def create(session: Any, sku: str) -> None:
        if sku == "undone":
            await kind.snapshot(session)
            await shop.meanwhile(change)
            await kind.add(session, sku)
            await kind.lose(session)
        with suppress(DBAPIError, asyncpg.PostgresError, psycopg.Error):
            await kind.add(session, "the rest")

    async with client(shop.app(create, lease=LEASE)) as c:
        assert (await c.post("/orders/undone", headers={KEY: "k"})).status_code == 500

        async def free() -> bool:
            return await kind.world.ids() == []

        await eventually(free)
        assert await kind.world.orders() == ["there"]
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
    assert await kind.world.orders() == ["there", "the rest"]
