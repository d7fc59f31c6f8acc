"""The client's side of HTTP: httpx transports that give every unsafe call an `Idempotency-Key`.

    client = httpx.Client(transport=DeduplicatingTransport(httpx.HTTPTransport(retries=2)))

A key is written into the headers of the request itself, once. So whatever sends that request again sends the
same key: a transport that retries, around this one or inside it; `client.send(request)`; an authentication
that answers a challenge; a redirect that keeps method and body (307 and 308). And nothing else does, for a
key is kept nowhere but in its request; and the GET that a 303 asks for, into which httpx copies the headers
of the POST, loses it again.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

from fastapi_dedup.errors import ConfigurationError, InvalidLogicalIdError
from fastapi_dedup.http.reading import DEFAULT_HEADER
from fastapi_dedup.identity import from_header, legal
from fastapi_dedup.policy import Policy

try:
    import httpx
except ImportError as error:
    if error.name != "httpx":
        raise
    msg = "fastapi_dedup.http.client needs httpx: pip install 'fastapi-dedup[httpx]'"
    raise ImportError(msg, name="httpx") from error

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AsyncDeduplicatingTransport", "DeduplicatingTransport", "header_value"]

EXTENSION = "logical_id"
"""The request's extension that holds its own identity: `client.post(url, extensions={"logical_id": ...})`."""


def header_value(logical_id: str, *, quoted: bool = False, field: str = DEFAULT_HEADER) -> str:
    """Return a header's value that a server reads as exactly this id.

    Args:
        logical_id: The id.
        quoted: Whether to write it as a structured-field string, `"…"`, as the IETF draft
            (draft-ietf-httpapi-idempotency-key-header) has it. Default: bare, as most servers expect it.
        field: The header, for the error.

    Raises:
        InvalidLogicalIdError: It is no legal id, or a header cannot carry it: it is not visible ASCII; or it
            has double quotes or blanks at its ends, and is not to be quoted.
    """
    if quoted:
        escaped = logical_id.replace("\\", r"\\").replace('"', r"\"")
        value = f'"{escaped}"'
    else:
        value = logical_id
    # The rule is the server's own: what it would refuse, or read as another id, is not sent.
    if from_header([value], field=field) != logical_id:
        raise InvalidLogicalIdError(field, "its blanks or quotes would be lost in a header; try quoted=True")
    return value


class _Stamp:
    """Writes the key into a request, and out of one that was redirected. Holds no state of any request."""

    def __init__(
        self,
        header: str,
        methods: Iterable[str],
        identify: Callable[[httpx.Request], object] | None,
        *,
        quoted: bool,
    ) -> None:
        # A policy is what knows what a header's name and a list of methods are.
        self._methods = Policy("header", header, methods=methods).applies_to
        if identify is not None and (not callable(identify) or inspect.iscoroutinefunction(identify)):
            msg = f"identify must be a callable that takes the request and is not async, not {identify!r}"
            raise ConfigurationError(msg)
        self._header = header
        self._identify = identify
        self._quoted = quoted
        self._ours = f"fastapi_dedup.{header.lower()}"

    def __call__(self, request: httpx.Request) -> None:
        present = request.headers.get(self._header)
        if request.method not in self._methods:
            if present is not None and present == request.extensions.get(self._ours):
                del request.headers[self._header]
            return
        if present is not None:
            return
        logical_id = legal(request.extensions.get(EXTENSION), field=f"extensions[{EXTENSION!r}]")
        if logical_id is None and self._identify is not None:
            logical_id = legal(self._identify(request), field="identify")
        if logical_id is None:
            logical_id = str(uuid.uuid4())
        value = header_value(logical_id, quoted=self._quoted, field=self._header)
        request.headers[self._header] = value
        request.extensions = {**request.extensions, self._ours: value}  # redirects take this along as well


class DeduplicatingTransport(httpx.BaseTransport):
    """Stamps `Idempotency-Key` on the requests that it hands on.

    The key is, in this order: the one that the request has already, which is never overwritten; the id in
    `request.extensions["logical_id"]`; what `identify` returns; a fresh UUID. An id that is missing (None,
    empty or blank) leaves it to the next.

    httpx ignores `verify`, `cert`, `http2`, `limits`, `proxy` and the proxies of the environment on a
    client that is given a transport: give them to the transport that is wrapped.

    Args:
        transport: The transport that sends. None is a new `httpx.HTTPTransport()`. Closed with this one.
        header: The header. Default `Idempotency-Key`.
        methods: The methods of the requests that get a key. Default POST and PATCH: the others may be
            repeated by HTTP's own rules (RFC 9110, section 9.2.2).
        identify: Takes the request, and returns its logical id. The body is there as `request.content`,
            unless it is a stream.
        quoted: Whether ids are sent as structured-field strings, `"…"`, as the IETF draft has it. Default
            False: bare, as most servers expect them. A key that is there already stays as it is.

    Raises:
        ConfigurationError: The header is no header's name, there are no methods, or `identify` is not a
            callable or is async.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        header: str = DEFAULT_HEADER,
        methods: Iterable[str] = ("POST", "PATCH"),
        identify: Callable[[httpx.Request], object] | None = None,
        quoted: bool = False,
    ) -> None:
        self._stamp = _Stamp(header, methods, identify, quoted=quoted)
        self._transport = httpx.HTTPTransport() if transport is None else transport

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Stamp the request, and hand it on.

        Raises:
            InvalidLogicalIdError: Its identity is no legal id. Nothing was sent.
        """
        self._stamp(request)
        return self._transport.handle_request(request)

    def __enter__(self) -> Self:
        self._transport.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._transport.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the wrapped transport."""
        self._transport.close()


class AsyncDeduplicatingTransport(httpx.AsyncBaseTransport):
    """`DeduplicatingTransport` for `httpx.AsyncClient`; the options are the same.

    Args:
        transport: The transport that sends. None is a new `httpx.AsyncHTTPTransport()`.
        header: As there.
        methods: As there.
        identify: As there; it is called in the event loop, so it must not block.
        quoted: As there.

    Raises:
        ConfigurationError: As there.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        header: str = DEFAULT_HEADER,
        methods: Iterable[str] = ("POST", "PATCH"),
        identify: Callable[[httpx.Request], object] | None = None,
        quoted: bool = False,
    ) -> None:
        self._stamp = _Stamp(header, methods, identify, quoted=quoted)
        self._transport = httpx.AsyncHTTPTransport() if transport is None else transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Stamp the request, and hand it on.

        Raises:
            InvalidLogicalIdError: Its identity is no legal id. Nothing was sent.
        """
        self._stamp(request)
        return await self._transport.handle_async_request(request)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Close the wrapped transport."""
        await self._transport.aclose()
