"""A shop behind a real socket, which notes the keys that it is sent; and what goes wrong on the way to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx


@dataclass
class Shop:
    """An ASGI app that notes every request.

    `/moved/307` redirects to `/orders` with that status, `/guarded` wants digest authentication, and
    everything else is answered 201, unless there is a status left in `answers`.

    Attributes:
        answers: The statuses of the next answers.
        seen: Method, path and keys of each request, in order.
    """

    header: str = "idempotency-key"
    answers: list[int] = field(default_factory=list)
    seen: list[tuple[str, str, list[str]]] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """The keys that came, in order."""
        return [key for _, _, keys in self.seen for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        path = scope["path"]
        self.seen.append((scope["method"], path, [value for name, value in headers if name == self.header]))
        status, answer = self.answers.pop(0) if self.answers else 201, {}
        if path.startswith("/moved/"):
            status, answer = int(path.rpartition("/")[2]), {"location": "/orders"}
        if path == "/guarded" and "authorization" not in dict(headers):
            status, answer = 401, {"www-authenticate": 'Digest realm="shop", nonce="n", qop="auth"'}
        answer["content-length"] = "0"
        lines = [(name.encode(), value.encode()) for name, value in answer.items()]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        await send({"type": "http.response.body"})


@asynccontextmanager
async def losing_the_first_answer(url: str) -> AsyncIterator[str]:
    """Stand between client and server: the first request arrives, and its connection drops unanswered."""
    lost = False
    upstream = urlsplit(url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lost
        there, thither = await asyncio.open_connection(upstream.hostname, upstream.port)
        onward = asyncio.create_task(_pump(reader, thither))
        try:
            answer = await there.readuntil(b"\r\n\r\n")
            if lost:
                writer.write(answer)
                await _pump(there, writer)
            lost = True
        finally:
            onward.cancel()
            thither.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()


# Transports: all share one TLS context, which takes longer to make than a test here takes

_TLS = ssl.create_default_context()


def transport() -> httpx.HTTPTransport:
    """Return httpx's own transport."""
    return httpx.HTTPTransport(verify=_TLS)


def async_transport() -> httpx.AsyncHTTPTransport:
    """Return httpx's own transport, async."""
    return httpx.AsyncHTTPTransport(verify=_TLS)


# Layers that retry, as there are many


def _worth_retrying(response: httpx.Response) -> bool:
    return response.status_code == httpx.codes.SERVICE_UNAVAILABLE


class Retrying(httpx.BaseTransport):
    """Sends a request up to three times, over a transport of its own or around another one."""

    def __init__(self, inner: httpx.BaseTransport | None = None) -> None:
        self._transport = inner or transport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(2):
            with contextlib.suppress(httpx.TransportError):
                response = self._transport.handle_request(request)
                if not _worth_retrying(response):
                    return response
                response.close()
        return self._transport.handle_request(request)

    def close(self) -> None:
        self._transport.close()


class AsyncRetrying(httpx.AsyncBaseTransport):
    """`Retrying`, async."""

    def __init__(self, inner: httpx.AsyncBaseTransport | None = None) -> None:
        self._transport = inner or async_transport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(2):
            with contextlib.suppress(httpx.TransportError):
                response = await self._transport.handle_async_request(request)
                if not _worth_retrying(response):
                    return response
                await response.aclose()
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        await self._transport.aclose()


# Both clients, spoken to alike


class Client:
    """An `httpx.Client` or `httpx.AsyncClient`, called from a test's event loop."""

    def __init__(self, client: httpx.Client | httpx.AsyncClient) -> None:
        self.httpx = client

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        return await self._call(self.httpx.request, method, url, **options)

    async def post(self, url: str, **options: Any) -> httpx.Response:
        return await self.request("POST", url, **options)

    async def send(self, request: httpx.Request) -> httpx.Response:
        return await self._call(self.httpx.send, request)

    async def close(self) -> None:
        if isinstance(self.httpx, httpx.Client):
            await asyncio.to_thread(self.httpx.close)
        else:
            await self.httpx.aclose()

    async def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> httpx.Response:
        if isinstance(self.httpx, httpx.Client):
            response: httpx.Response = await asyncio.to_thread(function, *arguments, **options)
        else:
            response = await function(*arguments, **options)
        return response


def distinct(keys: Iterable[str]) -> int:
    """Return how many different keys there are."""
    return len(set(keys))
