"""A gate in the middle of a handler, for tests that must know where a server is and say what comes next.

The handler goes to the gate and waits; the test meets it there, does what it wants done meanwhile, and tells
the handler how to go on. It works over a socket, so the server may be another process, and may die waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PATIENCE = 30.0


class Visitor:
    """A handler that waits at the gate."""

    def __init__(self, sku: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sku = sku
        self._reader = reader
        self._writer = writer

    async def answer(self, verdict: str) -> None:
        """Tell the handler how to go on, and let it go."""
        self._writer.write(f"{verdict}\n".encode())
        await self._writer.drain()
        self._writer.close()

    async def gone(self) -> None:
        """Wait until the handler has left without an answer, as one does that is cancelled."""
        async with asyncio.timeout(_PATIENCE):
            await self._reader.read()
        self._writer.close()


class Gate:
    """The test's side of the gate.

    Attributes:
        port: Where handlers come to.
        visits: How many have come so far.
    """

    def __init__(self) -> None:
        self.port = 0
        self.visits = 0
        self._arrived: asyncio.Queue[Visitor] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def visitor(self) -> Visitor:
        """Wait for the next handler that arrives."""
        async with asyncio.timeout(_PATIENCE):
            return await self._arrived.get()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        sku = (await reader.readline()).decode().rstrip("\n")
        self.visits += 1
        self._arrived.put_nowait(Visitor(sku, reader, writer))


@asynccontextmanager
async def gate() -> AsyncIterator[Gate]:
    """Open a gate; when it closes, who still waits there fails."""
    opened = Gate()
    server = await asyncio.start_server(opened._welcome, "127.0.0.1", 0)
    opened.port = server.sockets[0].getsockname()[1]
    try:
        yield opened
    finally:
        server.close()
        for writer in opened._writers:
            writer.close()


async def ask(port: int, sku: str) -> str:
    """Go to the gate, and return what the test says: the handler's side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{sku}\n".encode())
        verdict = (await reader.readline()).decode().rstrip("\n")
    finally:
        writer.close()
    if not verdict:
        msg = "the gate closed"
        raise ConnectionError(msg)
    return verdict
