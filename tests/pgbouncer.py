"""pgbouncer in transaction mode, in front of the PostgreSQL that the tests have found: one for each run."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from tests.live import free_port
from tests.servers import Server, UnreachableError, driver_url

# Each connection may come to another server process, so whatever it needs must be in the transaction.
_INI = """
[databases]
* = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
admin_users = {user}
pool_mode = transaction
default_pool_size = 20
max_client_conn = 500
server_idle_timeout = 5
"""


@contextmanager
def pgbouncer_before(postgres_url: str) -> Iterator[str]:
    """Run one, yield the URL of the same database through it, and stop it."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        msg = "the program pgbouncer is not installed"
        raise UnreachableError(msg)
    port = free_port()
    url = make_url(postgres_url).set(host="127.0.0.1", port=port, query={})
    with tempfile.TemporaryDirectory(prefix="fastapi-dedup-pgbouncer-") as folder:
        ini = Path(folder, "pgbouncer.ini")
        ini.write_text(_INI.format(server=_server(postgres_url), port=port, user=url.username))
        Path(folder).chmod(0o755)
        command = [program, *_as_nobody(), str(ini)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(process, url.render_as_string(hide_password=False))
                yield url.render_as_string(hide_password=False)
            finally:
                process.kill()  # at once: whatever is still connected is of a test that is over


def _server(postgres_url: str) -> str:
    """Return where a PostgreSQL is, as pgbouncer's list of databases says it."""
    where = make_url(postgres_url)
    parts = {
        "host": where.query.get("host") or where.host or "127.0.0.1",
        "port": where.port or 5432,
        "user": where.username,
        "password": where.password,
    }
    return " ".join(f"{name}='{value}'" for name, value in parts.items() if value is not None)


def _as_nobody() -> list[str]:
    """Return the option that gives up root's rights: with them, pgbouncer does not run."""
    if os.geteuid() != 0:
        return []
    users = {user.pw_name for user in pwd.getpwall()}
    return ["-u", next(name for name in ("postgres", "nobody", "daemon") if name in users)]


def _wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until it answers."""
    deadline = time.monotonic() + 10
    while True:
        try:
            psycopg.connect(driver_url(url, None), connect_timeout=5).close()
        except psycopg.Error as error:
            if process.poll() is not None or time.monotonic() > deadline:
                msg = f"pgbouncer does not answer (exit status {process.returncode}): {error}"
                raise UnreachableError(msg) from error
            time.sleep(0.02)
        else:
            return


def command(url: str, words: str) -> str:
    """Give a pgbouncer a command of its console, and return the first word of what it answers."""
    console = make_url(driver_url(url, None)).set(database="pgbouncer", query={})
    address = console.render_as_string(hide_password=False)
    with psycopg.connect(address, autocommit=True, connect_timeout=5) as connection:
        answer = connection.execute(words.encode())
        return str((answer.fetchone() or ("",))[0]) if answer.description else ""


PGBOUNCER = Server(
    name="pgbouncer",
    fixture="pgbouncer_url",
    variable="",
    standard_urls=(),
    version=lambda url: command(url, "SHOW VERSION").removeprefix("PgBouncer "),
    how_to_get="`apt-get install pgbouncer` on Debian; each run starts its own.",
)
