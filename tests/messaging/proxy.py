"""A TCP proxy between a client and its server, for tests in which the network goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Passes bytes on between clients and a server, until a test interferes.

    Attributes:
        port: Where clients connect to, on loopback.
        lost: How many bytes from clients were swallowed.
    """

    def __init__(self, host: str, port: int) -> None:
        self.port = 0
        self.lost = 0
        self._target = (host, port)
        self._down = False
        self._swallowing: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Cut every connection, as an unplugged cable does; new ones are let through."""
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Lose from now on what clients send over the connections that are open."""
        self._swallowing |= self._writers

    def go_down(self) -> None:
        """Cut every connection, and let nobody through."""
        self._down = True
        self.cut()

    def come_back(self) -> None:
        """Let clients through again."""
        self._down = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, there_writer, from_client=True))
                both.create_task(self._pass_on(there_reader, writer, from_client=False))
        finally:
            self._writers -= {writer, there_writer}
            for each in (writer, there_writer):
                each.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool
    ) -> None:
        try:
            while some := await reader.read(65536):
                if from_client and writer in self._swallowing:
                    self.lost += len(some)
                    continue
                writer.write(some)
                await writer.drain()
        except OSError:
            return  # cut
        finally:
            writer.close()


@asynccontextmanager
async def proxy(host: str, port: int) -> AsyncIterator[Proxy]:
    """Run a proxy to a server."""
    opened = Proxy(host, port)
    server = await asyncio.start_server(opened._serve, "127.0.0.1", 0)
    opened.port = server.sockets[0].getsockname()[1]
    try:
        yield opened
    finally:
        server.close()
        opened.go_down()
