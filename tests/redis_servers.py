"""Where the tests find Redis: one server, a cluster, and private ones that a test may kill."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers import Server, UnreachableError

_MASTERS = 3
_SLOTS = 16384
_BUS = 10_000
"""How far above a node's port the port is at which the nodes talk to each other."""
_SOON = 30.0


class PrivateRedis:
    """A server of the test's own, which it may kill and start again; what it was told to keep is in its file.

    Args:
        folder: Where it keeps what it keeps.
        options: What it is told on its command line.
        port: Where it listens.
        sentinel: The file of a sentinel, which is the same program.
    """

    def __init__(
        self, folder: Path, *options: str, port: int | None = None, sentinel: Path | None = None
    ) -> None:
        self._sentinel = sentinel
        self.port = _free_port_and_bus() if port is None else port
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        binary = shutil.which("redis-server")
        if binary is None:
            msg = "there is no redis-server on this machine"
            raise UnreachableError(msg)
        place = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder))
        kind = ["--save", ""] if self._sentinel is None else ["--sentinel"]
        file = [] if self._sentinel is None else [str(self._sentinel)]
        self._process = subprocess.Popen(
            [binary, *file, *place, *kind, *self._options], stdout=subprocess.DEVNULL
        )
        self._wait(self._answers)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self) -> redis.Redis:
        """Return a client of the test's own."""
        return redis.Redis(host="127.0.0.1", port=self.port, retry=Retry(NoBackoff(), 0))

    def until(self, holds: Callable[[redis.Redis], bool]) -> None:
        """Wait for something that nobody tells of."""
        with self.client() as client:
            self._wait(lambda: holds(client))

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False

    def _wait(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SOON
        while not holds():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                msg = f"redis-server at port {self.port} did not get ready"
                raise UnreachableError(msg)
            time.sleep(0.02)


@contextmanager
def private_redis(*options: str) -> Iterator[PrivateRedis]:
    """Run a server of our own, and kill it in the end."""
    with tempfile.TemporaryDirectory(prefix="fastapi-dedup-redis-") as folder:
        server = PrivateRedis(Path(folder), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def _private_url() -> Iterator[str]:
    with private_redis() as server:
        yield server.url


@contextmanager
def _private_cluster_url() -> Iterator[str]:
    with private_cluster() as nodes:
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


@contextmanager
def private_cluster() -> Iterator[list[PrivateRedis]]:
    """Run a cluster of three masters on loopback, and kill it in the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastapi-dedup-redis-")))
        nodes: list[PrivateRedis] = []
        for number in range(_MASTERS):
            (home := folder / str(number)).mkdir()
            node = PrivateRedis(
                home, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000", port=_free_port_and_bus()
            )
            stack.callback(node.kill)
            node.start()
            nodes.append(node)
        for number, node in enumerate(nodes):
            slots = range(_SLOTS * number // _MASTERS, _SLOTS * (number + 1) // _MASTERS)
            with node.client() as client:
                client.execute_command("CLUSTER ADDSLOTS", *slots)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            node.until(_is_whole)
        yield nodes


def _is_whole(client: redis.Redis) -> bool:
    told = client.cluster("INFO")
    assert isinstance(told, dict)
    return (told["cluster_state"], told["cluster_known_nodes"]) == ("ok", str(_MASTERS))


def _free_port_and_bus() -> int:
    while True:
        port = random.randint(20_000, 32_000)  # noqa: S311 - below what the system hands out by itself
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + _BUS)):
                return port
        except OSError:
            continue


def _version(url: str) -> str:
    """Return the server's version, if it lets us in."""
    try:
        with redis.Redis.from_url(url, socket_connect_timeout=5) as client:
            return str(client.info("server")["redis_version"])
    except (redis.RedisError, OSError) as error:
        raise UnreachableError(str(error)) from error


def _cluster_version(url: str) -> str:
    """Return the version of a cluster's nodes, if it lets us in."""
    try:
        with redis.RedisCluster.from_url(url.replace("+cluster", ""), socket_connect_timeout=5) as client:
            nodes = client.get_primaries()
            versions = {str(client.info("server", target_nodes=node)["redis_version"]) for node in nodes}
    except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
        raise UnreachableError(str(error)) from error
    return f"{'/'.join(versions)} of {len(nodes)} masters"


REDIS = Server(
    name="Redis",
    fixture="redis_url",
    variable="FASTAPI_DEDUP_TEST_REDIS_URL",
    standard_urls=("redis://127.0.0.1:6379/0",),
    start_private=_private_url,
    version=_version,
    how_to_get=(
        "`apt-get install redis-server` on Debian,"
        " or set FASTAPI_DEDUP_TEST_REDIS_URL to redis://user:password@host/database."
    ),
)

REDIS_CLUSTER = Server(
    name="Redis Cluster",
    fixture="redis_cluster_url",
    variable="FASTAPI_DEDUP_TEST_REDIS_CLUSTER_URL",
    standard_urls=(),
    start_private=_private_cluster_url,
    version=_cluster_version,
    how_to_get=(
        "`apt-get install redis-server` on Debian, of which the tests start three,"
        " or set FASTAPI_DEDUP_TEST_REDIS_CLUSTER_URL to redis+cluster://user:password@host."
    ),
)
