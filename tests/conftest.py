"""What every test can ask for, and what the run says about its servers at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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


@pytest.fixture(autouse=True)
def _count_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Count who used which server, those asked for by `request.getfixturevalue` included."""
    yield
    request.config.stash[_USES].update(s.fixture for s in SERVERS if s.fixture in request.fixturenames)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    fates, uses = config.stash[_FATES], config.stash[_USES]
    if not fates:
        return
    terminalreporter.section("servers")
    for fixture, fate in fates.items():
        count = f", tests that used it: {uses[fixture]}" if uses[fixture] else ""
        terminalreporter.write_line(fate + count)
