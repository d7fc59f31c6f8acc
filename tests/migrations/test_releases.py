"""Two releases beside each other: the table is expanded first, and what is old goes on working."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import MetaData, Table, text
from sqlalchemy.ext.asyncio import AsyncEngine

from fastapi_dedup import ClaimInFlightError, ConfigurationError, Dedup, DuplicateError
from fastapi_dedup.tables import claims_table
from tests.migrations.alembic_app import AlembicApp, operations
from tests.migrations.releases import BEFORE_LEASES, RELEASES, Release

HOUR = timedelta(hours=1)

every_release = pytest.mark.parametrize("release", RELEASES, ids=lambda release: str(release.name))


async def execute(engine: AsyncEngine, statements: Iterable[str]) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


def today() -> Table:
    return claims_table(MetaData())


def now(engine: AsyncEngine) -> datetime:
    """Return the time as the table keeps it."""
    moment = datetime.now(UTC)
    return moment if engine.dialect.name == "postgresql" else moment.replace(tzinfo=None)


async def outcome(dedup: Dedup, logical_id: str) -> type:
    """Claim an id, and return what came of it: the error that it was refused with, or `Dedup`."""
    try:
        async with dedup.claim(logical_id, scope="tests"):
            return Dedup
    except (DuplicateError, ClaimInFlightError) as refused:
        return type(refused)


# Expand: the new table under old code


@every_release
def test_whatever_was_added_since_may_be_null(release: Release) -> None:
    added = [each for each in today().columns if each.name not in release.columns]
    assert all(each.nullable or each.server_default is not None for each in added)
    assert {*release.columns} <= {each.name for each in today().columns}, "nothing is taken away in one step"


@every_release
async def test_the_statements_of_an_earlier_release_work_on_todays_table(
    engine: AsyncEngine, release: Release
) -> None:
    dedup = Dedup(engine, create_table=True, reap_every=None)
    await dedup.create_table()
    at = now(engine)
    intent = dedup.intent("old", scope="tests")
    values = {
        "key": intent.key,
        "scope": "tests",
        "logical_id": "old",
        "token": b"t" * 16,
        "fingerprint": None,
        "claimed_at": at,
        "expires_at": at + HOUR,
    }
    async with engine.begin() as connection:
        await connection.execute(release.insert(values))
    async with dedup:
        assert await outcome(dedup, "old") is DuplicateError, "today's code honours it"
        assert await outcome(dedup, "new") is Dedup
    async with engine.begin() as connection:
        new = dedup.intent("new", scope="tests").key
        assert (await connection.execute(release.look(new))).one().logical_id == "new", "and it ours"
        renewed = values | {"token": b"u" * 16, "expires_at": at + 2 * HOUR}
        late = at + 3 * HOUR
        assert (await connection.execute(release.take_over(intent.key, late, renewed))).rowcount == 1
        assert (await connection.execute(release.reap(at + 2.5 * HOUR))).rowcount == 1
        assert (await connection.execute(release.look(new))).one().logical_id == "new"


async def test_an_old_process_takes_a_leased_claim_for_done(engine: AsyncEngine) -> None:
    # It does not know `leased_until`. So the how-to says: use lease= when no old process runs any more.
    async with (
        Dedup(engine, create_table=True, reap_every=None) as dedup,
        dedup.claim("slow", scope="tests", lease=timedelta(seconds=30)),
        engine.connect() as connection,
    ):
        key = dedup.intent("slow", scope="tests").key
        row = (await connection.execute(BEFORE_LEASES.look(key))).one()
        assert "leased_until" not in row._fields
        assert await outcome(dedup, "slow") is ClaimInFlightError


# Code before the table: refused by name


@every_release
@pytest.mark.parametrize("create_table", [None, True])
async def test_an_old_table_is_refused_at_start_up_with_the_column_and_the_fix(
    engine: AsyncEngine, release: Release, create_table: bool | None
) -> None:
    await execute(engine, release.ddl[engine.dialect.name])
    with pytest.raises(ConfigurationError) as refused:
        await Dedup(engine, create_table=create_table, reap_every=None).start()
    message = str(refused.value)
    lacking = {each.name for each in today().columns} - {*release.columns}
    assert all(name in message for name in lacking)
    assert "ALTER TABLE dedup_claims ADD" in message
    assert "migration" in message


@every_release
async def test_the_statements_of_that_message_are_the_fix(engine: AsyncEngine, release: Release) -> None:
    await execute(engine, release.ddl[engine.dialect.name])
    with pytest.raises(ConfigurationError) as refused:
        await Dedup(engine, reap_every=None).start()
    await execute(engine, str(refused.value).splitlines()[1:])
    async with Dedup(engine, reap_every=None) as dedup:
        assert await outcome(dedup, "new") is Dedup
        assert await outcome(dedup, "new") is DuplicateError


async def test_a_column_of_the_apps_own_does_no_harm(engine: AsyncEngine) -> None:
    await Dedup(engine).create_table()
    await execute(engine, ["alter table dedup_claims add column note text"])
    async with Dedup(engine, reap_every=None) as dedup:
        assert await outcome(dedup, "new") is Dedup


# Expand, deploy, and only then use what is new


@every_release
async def test_alembic_expands_an_old_table_and_its_claims_go_on_counting(
    url: str, engine: AsyncEngine, release: Release, tmp_path: Path
) -> None:
    await execute(engine, release.ddl[engine.dialect.name])
    at = now(engine)
    dedup = Dedup(engine, reap_every=None)
    values = {
        "key": dedup.intent("old", scope="tests").key,
        "scope": "tests",
        "logical_id": "old",
        "token": b"t" * 16,
        "fingerprint": None,
        "claimed_at": at,
        "expires_at": at + HOUR,
    }
    async with engine.begin() as connection:
        await connection.execute(release.insert(values))
    metadata = MetaData()
    claims_table(metadata)
    app = AlembicApp(tmp_path, url, metadata)
    assert set(operations(await app.autogenerate("expand"))) <= {"add_column", "alter_column"}
    await app.upgrade()
    await app.check()
    async with dedup:
        assert await outcome(dedup, "old") is DuplicateError
        async with dedup.claim("slow", scope="tests", lease=timedelta(seconds=30)):
            assert await outcome(dedup, "slow") is ClaimInFlightError
