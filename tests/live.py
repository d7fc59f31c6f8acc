"""Real servers for tests: uvicorn in this process's loop, or as processes of its own that may be killed.

And the bare clients that race against them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import uvicorn


def free_port() -> int:
    """Return a port of loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Server(uvicorn.Server):
    """uvicorn looks whether it is to stop every tenth of a second; this one is told."""

    def __init__(self, app: Any, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on", **options)
        )
        # The test owns the signals.
        self.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"


@asynccontextmanager
async def live(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an app on a real socket, in this event loop, and yield its base URL."""
    server = _Server(app, **options)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if serving.done():
                await serving
                msg = "the server stopped before it had started"
                raise RuntimeError(msg)
            await asyncio.sleep(0.01)
        yield server.url
    finally:
        server.should_exit = True
        server.stopping.set()
        await serving


@contextmanager
def live_in_a_thread(app: Any) -> Iterator[str]:
    """Serve an app on a real socket, in a thread, and yield its base URL: for tests that share it."""
    started: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()

    async def serve() -> None:
        stopped = asyncio.Event()
        async with live(app) as url:
            started.put((url, partial(asyncio.get_running_loop().call_soon_threadsafe, stopped.set)))
            await stopped.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, stop = started.get(timeout=30)
    yield url
    stop()
    thread.join()


class Process:
    """A server process, of one or more workers, that a test may kill."""

    def __init__(self, app: str, *, workers: int = 1, environ: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            *(sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--workers", str(workers), "--log-level", "warning"),
        ]
        self._environ = {**os.environ, **(environ or {})}
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Start the process, in a group of its own, and wait until it answers."""
        self._popen = subprocess.Popen(
            self._command, env={**self._environ, **(environ or {})}, start_new_session=True
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                httpx.get(f"{self.url}/openapi.json", timeout=5)
            except httpx.TransportError:
                if self._popen.poll() is not None or time.monotonic() > deadline:
                    msg = f"{' '.join(self._command)} did not start (exit status {self._popen.returncode})"
                    raise RuntimeError(msg) from None
                time.sleep(0.05)
            else:
                return

    def wait(self, timeout: float = 30) -> int:
        """Wait until the process has ended, as one that kills itself does, and return its exit status."""
        assert self._popen is not None
        return self._popen.wait(timeout)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill the whole group, and wait for the end."""
        if self._popen is None:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, how)
            self._popen.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            self._popen = None


@contextmanager
def process(app: str, *, workers: int = 1, environ: Mapping[str, str] | None = None) -> Iterator[Process]:
    """Run an app, named `module:attribute`, as a server process of its own."""
    server = Process(app, workers=workers, environ=environ)
    try:
        server.start()
        yield server
    finally:
        server.kill(signal.SIGTERM)


_PATIENCE = 60.0
"""Seconds. An answer that never comes is a failure, and not a test that hangs."""


@dataclass(frozen=True)
class Reply:
    """What a server answered; the names of headers are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as what its JSON says."""
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The slug of the problem's type, such as "in-flight"; "" where this is no problem."""
        if self.headers.get("content-type") != "application/problem+json":
            return ""
        return str(self.json()["type"]).partition("#")[2]


class Caller:
    """One connection to a server, so bare that a test can hang up, and hundreds at once cost little.

    Attributes:
        answered: Whether an answer has begun to arrive.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answered = False
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Connect to the server at a base URL."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port))

    async def send(
        self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a request, with a JSON body unless the document is None."""
        body = b"" if document is None else json.dumps(document).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: test",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self._writer.drain()

    async def reply(self) -> Reply:
        """Wait for the whole answer.

        Raises:
            ConnectionError: The connection ended before it.
        """
        try:
            async with asyncio.timeout(_PATIENCE):
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                lines = [line.partition(": ") for line in head[1:] if line]
                headers = {name.lower(): value for name, _, value in lines}
                self.answered = True
                body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        except asyncio.IncompleteReadError as error:
            msg = "the server hung up"
            raise ConnectionResetError(msg) from error
        return Reply(int(head[0].split()[1]), headers, body)

    async def call(
        self, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a request, and wait for the answer."""
        await self.send(method, path, document, headers)
        return await self.reply()

    def hang_up(self) -> None:
        """End the connection, whether or not an answer is on its way."""
        self._writer.close()


async def call(
    url: str, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """Send one request over a connection of its own, and return the answer."""
    caller = await Caller.connect(url)
    try:
        return await caller.call(method, path, document, headers)
    finally:
        caller.hang_up()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that nobody announces, by asking again and again."""
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - nobody here sets an event
            await asyncio.sleep(0.005)
