"""Server processes that cost a fork, for tests that kill hundreds or want many clients at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
from collections.abc import Callable
from typing import Any


def forking() -> multiprocessing.context.ForkServerContext:
    """Return what starts processes by forking one that has everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "tests.apps.orders",
            "asyncpg",
            "httptools",
            "uvloop",
            "tests.messaging.faststream_brokers",
        ]
    )
    return context


class Forked:
    """A server process that costs a fork, for tests that kill hundreds.

    The test's own process holds the socket, so requests that come between two servers wait for the next.

    Args:
        serve: Serves on a listening socket until the process ends; a module's function.
        arguments: What it is called with, before the socket.
        options: What it is called with, after the socket.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self._serve = serve
        self._arguments = arguments
        self._options = options
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._process: multiprocessing.process.BaseProcess | None = None
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        """Fork the process; the first answer tells that it is up."""
        arguments = (*self._arguments, self._listener, self._options)
        self._process = forking().Process(target=self._serve, args=arguments, daemon=True)
        self._process.start()

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send it a signal."""
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, how)

    async def ended(self) -> int | None:
        """Wait for its end, and return its exit status: -9 where it was killed."""
        assert self._process is not None
        await asyncio.to_thread(self._process.join, 30)
        return self._process.exitcode

    def close(self) -> None:
        """Kill what is left, and free the port."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(30)
        self._listener.close()
