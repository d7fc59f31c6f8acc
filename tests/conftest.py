"""What every test can ask for, and what the run says about its servers at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pgbouncer import PGBOUNCER, pgbouncer_before
from tests.redis_servers import REDIS, REDIS_CLUSTER
from tests.servers import (
    MARIADB,
    NATS,
    POSTGRES,
    RABBITMQ,
    SERVERS,
    Found,
    MissingServerError,
    Server,
    give_up,
    mariadb_database,
    postgres_database,
    running,
)

# What became of each server that a test asked for, by its fixture's name, and how many tests used it.
_FATES = pytest.StashKey[dict[str, str]]()
_USES = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FATES] = {}
    config.stash[_USES] = Counter()


@contextmanager
def _noted(server: Server, config: pytest.Config) -> Iterator[Found]:
    """Find a server for the whole run, and note for the summary what came of it."""
    fates = config.stash[_FATES]
    try:
        with running(server) as found:
            fates[server.fixture] = f"{server.name} {found.version} at {found.where}"
            yield found
    except MissingServerError as missing:
        fates[server.fixture] = str(missing)
        give_up(missing)


@pytest.fixture(scope="session")
def postgres_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the plain `postgresql://` URL of an empty database, made for this run and dropped after it."""
    with _noted(POSTGRES, pytestconfig) as found, postgres_database(found.url) as url:
        yield url


@pytest.fixture(scope="session")
def pgbouncer_url(pytestconfig: pytest.Config, postgres_url: str) -> Iterator[str]:
    """Yield the plain `postgresql://` URL of the same database through a pgbouncer in transaction mode."""
    ours = replace(PGBOUNCER, start_private=partial(pgbouncer_before, postgres_url))
    with _noted(ours, pytestconfig) as found:
        yield found.url


@pytest.fixture(scope="session")
def mariadb_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the plain `mysql://` URL of an empty database, made for this run and dropped after it."""
    with _noted(MARIADB, pytestconfig) as found, mariadb_database(found.url) as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the URL of a RabbitMQ that others use too: name queues anew, and delete them."""
    with _noted(RABBITMQ, pytestconfig) as found:
        yield found.url


@pytest.fixture(scope="session")
def nats_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the URL of a NATS server that others use too: name streams anew, and delete them."""
    with _noted(NATS, pytestconfig) as found:
        yield found.url


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the URL of a Redis that others use too: name keys anew, and delete them."""
    with _noted(REDIS, pytestconfig) as found:
        yield found.url


@pytest.fixture(scope="session")
def redis_cluster_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """Yield the URL of a cluster of three masters: name keys anew, and delete them."""
    with _noted(REDIS_CLUSTER, pytestconfig) as found:
        yield found.url


@pytest.fixture(autouse=True)
def _count_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Count who used which server, those asked for by `request.getfixturevalue` included."""
    yield
    servers = (*SERVERS, PGBOUNCER, REDIS, REDIS_CLUSTER)
    request.config.stash[_USES].update(s.fixture for s in servers if s.fixture in request.fixturenames)


_CROWDED = {"crash", "races"}
"""The folders whose tests fill both cores and the server's connections: never two of them at once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in _CROWDED:
            item.add_marker(pytest.mark.xdist_group("crowded"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what a worker of pytest-xdist knows about its servers over to who prints the summary."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        used: Counter[str] = session.config.stash[_USES]
        output["servers"] = (session.config.stash[_FATES], {**used})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    fates, uses = getattr(node, "workeroutput", {}).get("servers", ({}, {}))  # none from one that crashed
    config: pytest.Config = node.config
    config.stash[_FATES].update(fates)
    for fixture, times in uses.items():
        config.stash[_USES][fixture] += times


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    fates, uses = config.stash[_FATES], config.stash[_USES]
    if not fates:
        return
    terminalreporter.section("servers")
    for fixture, fate in fates.items():
        count = f", tests that used it: {uses[fixture]}" if uses[fixture] else ""
        terminalreporter.write_line(fate + count)
