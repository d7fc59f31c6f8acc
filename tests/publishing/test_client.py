"""Outgoing HTTP: one key per request, on a real socket, for the sync and the async transport alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import httpx
import pytest
from fastapi import Depends, FastAPI
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from fastapi_dedup import Claim, Dedup, Deduplicated, DedupMiddleware, RequestSession
from fastapi_dedup.errors import ConfigurationError, InvalidLogicalIdError
from fastapi_dedup.http.client import AsyncDeduplicatingTransport, DeduplicatingTransport, header_value
from fastapi_dedup.identity import from_header
from tests.live import live, live_in_a_thread
from tests.publishing.shop import (
    AsyncRetrying,
    Client,
    Retrying,
    Shop,
    async_transport,
    distinct,
    losing_the_first_answer,
    transport,
)

Connect = Callable[..., Client]


class Street:
    """An app at one address for all the tests here: each of them opens a shop of its own there."""

    shop: Shop

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.shop(scope, receive, send)


@pytest.fixture(scope="module")
def street() -> Iterator[tuple[Street, str]]:
    street = Street()
    with live_in_a_thread(street) as url:
        yield street, url


@pytest.fixture
def shop(street: tuple[Street, str]) -> Shop:
    street[0].shop = shop = Shop()
    return shop


@pytest.fixture
def url(street: tuple[Street, str]) -> str:
    return street[1]


@pytest.fixture(params=["sync", "async"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Yield what makes clients; `retrying` puts a layer that retries inside our transport, or outside."""
    clients = []

    def make(*, retrying: str = "", client: dict[str, Any] | None = None, **options: Any) -> Client:
        made: httpx.Client | httpx.AsyncClient
        if request.param == "sync":
            ours = DeduplicatingTransport(Retrying() if retrying == "inside" else transport(), **options)
            made = httpx.Client(transport=Retrying(ours) if retrying == "outside" else ours, **client or {})
        else:
            inner = AsyncRetrying() if retrying == "inside" else async_transport()
            mine = AsyncDeduplicatingTransport(inner, **options)
            outer = AsyncRetrying(mine) if retrying == "outside" else mine
            made = httpx.AsyncClient(transport=outer, **client or {})
        clients.append(Client(made))
        return clients[-1]

    yield make
    for each in clients:
        await each.close()


# Which requests get a key, and which one


@pytest.mark.parametrize("method", ["POST", "PATCH"])
async def test_an_unsafe_request_gets_a_fresh_uuid(
    method: str, connect: Connect, shop: Shop, url: str
) -> None:
    response = await connect().request(method, f"{url}/orders", json={"sku": "a"})

    (key,) = shop.keys
    assert uuid.UUID(key).version == 4
    assert response.request.headers["Idempotency-Key"] == key


async def test_without_a_transport_of_yours_they_make_httpx_s_own(shop: Shop, url: str) -> None:
    with httpx.Client(transport=DeduplicatingTransport()) as client:
        await Client(client).post(url)
    async with httpx.AsyncClient(transport=AsyncDeduplicatingTransport()) as following:
        await following.post(url)

    assert distinct(shop.keys) == 2


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_other_requests_get_none(method: str, connect: Connect, shop: Shop, url: str) -> None:
    await connect().request(method, f"{url}/orders", extensions={"logical_id": "a"})

    assert shop.seen == [(method, "/orders", [])]


async def test_header_and_methods_are_yours_to_choose(connect: Connect, shop: Shop, url: str) -> None:
    shop.header = "x-request-id"
    client = connect(header="X-Request-Id", methods=["put"])
    await client.request("PUT", f"{url}/orders", extensions={"logical_id": "a"})
    await client.post(f"{url}/orders")

    assert shop.seen == [("PUT", "/orders", ["a"]), ("POST", "/orders", [])]


async def test_the_request_s_own_identity_is_its_key(connect: Connect, shop: Shop, url: str) -> None:
    client = connect(identify=lambda request: f"order {request.url.path}")
    await client.post(f"{url}/1", extensions={"logical_id": "own"})
    await client.post(f"{url}/2", extensions={"logical_id": 12})
    await client.post(f"{url}/3")

    assert shop.keys == ["own", "12", "order /3"]


@pytest.mark.parametrize("missing", [None, "", "  "])
async def test_an_identity_that_is_missing_leaves_it_to_the_next(
    missing: str | None, connect: Connect, shop: Shop, url: str
) -> None:
    await connect(identify=lambda _: "next").post(url, extensions={"logical_id": missing})
    await connect(identify=lambda _: missing).post(url, extensions={"logical_id": missing})

    following, fresh = shop.keys
    assert following == "next"
    assert uuid.UUID(fresh).version == 4


async def test_a_key_can_be_made_of_the_body(connect: Connect, shop: Shop, url: str) -> None:
    client = connect(identify=lambda request: request.content.decode())
    await client.post(url, content=b"body")

    assert shop.keys == ["body"]


@pytest.mark.parametrize("name", ["Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY"])
async def test_a_key_that_is_there_is_never_overwritten(
    name: str, connect: Connect, shop: Shop, url: str
) -> None:
    client = connect(identify=lambda _: "identified", quoted=True)
    await client.post(url, headers={name: "mine"}, extensions={"logical_id": "own"})
    await connect(client={"headers": {name: "the client's"}}).post(url)

    assert shop.keys == ["mine", "the client's"]


# The next call is another intent


async def test_the_next_call_gets_another_key(connect: Connect, shop: Shop, url: str) -> None:
    client = connect()
    for _ in range(3):
        await client.post(url)

    assert distinct(shop.keys) == 3


async def test_calls_at_the_same_time_get_keys_of_their_own(connect: Connect, shop: Shop, url: str) -> None:
    client = connect()
    await asyncio.gather(*[client.post(url) for _ in range(50)])

    assert distinct(shop.keys) == 50


async def test_options_that_are_used_again_carry_no_key_over(connect: Connect, shop: Shop, url: str) -> None:
    headers, shared = {"x-shop": "s"}, httpx.Headers({"x-shop": "s"})
    extensions: dict[str, Any] = {"timeout": {}}
    client = connect(client={"headers": shared})
    for _ in range(2):
        await client.post(url, headers=headers, extensions=extensions)
        await client.post(url, headers=shared)

    assert distinct(shop.keys) == 4
    assert (headers, extensions, dict(shared)) == ({"x-shop": "s"}, {"timeout": {}}, {"x-shop": "s"})
    assert "idempotency-key" not in client.httpx.headers


async def test_an_identity_does_not_stay_for_the_next_call(connect: Connect, shop: Shop, url: str) -> None:
    client = connect()
    await client.post(url, extensions={"logical_id": "own"})
    await client.post(url)

    assert shop.keys[0] == "own"
    assert uuid.UUID(shop.keys[1]).version == 4


# The same request again is the same intent


@pytest.mark.parametrize("retrying", ["inside", "outside"])
async def test_retries_carry_the_same_key_and_the_next_call_another_one(
    retrying: str, connect: Connect, shop: Shop, url: str
) -> None:
    shop.answers = [503, 503, 201]
    client = connect(retrying=retrying)
    assert (await client.post(url)).status_code == 201
    await client.post(url)

    first, second, third, following = shop.keys
    assert first == second == third != following


@pytest.mark.parametrize("retrying", ["inside", "outside"])
async def test_a_retry_after_a_dropped_connection_carries_the_same_key(
    retrying: str, connect: Connect, shop: Shop, url: str
) -> None:
    async with losing_the_first_answer(url) as lossy:
        response = await connect(retrying=retrying).post(lossy, json={"sku": "a"})

    assert response.status_code == 201
    assert len(shop.keys) == 2
    assert distinct(shop.keys) == 1


async def test_a_request_that_is_sent_again_by_hand_has_the_same_key(
    connect: Connect, shop: Shop, url: str
) -> None:
    client = connect()
    request = client.httpx.build_request("POST", url)
    async with losing_the_first_answer(url) as lossy:
        request.url = httpx.URL(lossy)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.send(request)
        await client.send(request)

    assert len(shop.keys) == 2
    assert distinct(shop.keys) == 1


@pytest.mark.parametrize("status", [307, 308])
async def test_a_redirected_request_keeps_its_key(
    status: int, connect: Connect, shop: Shop, url: str
) -> None:
    await connect(client={"follow_redirects": True}).post(f"{url}/moved/{status}", json={"sku": "a"})

    assert [(method, path) for method, path, _ in shop.seen] == [
        ("POST", f"/moved/{status}"),
        ("POST", "/orders"),
    ]
    assert len(shop.keys) == 2
    assert distinct(shop.keys) == 1


@pytest.mark.parametrize("status", [301, 302, 303])
@pytest.mark.parametrize("mine", [False, True], ids=["stamped", "the caller's own"])
async def test_a_redirect_that_makes_a_get_of_it_takes_no_key_along_but_the_caller_s_own(
    status: int, mine: bool, connect: Connect, shop: Shop, url: str
) -> None:
    headers = {"Idempotency-Key": "mine"} if mine else {}
    await connect(client={"follow_redirects": True}).post(f"{url}/moved/{status}", headers=headers)

    assert [method for method, _, _ in shop.seen] == ["POST", "GET"]
    assert [len(keys) for _, _, keys in shop.seen] == [1, 1 if mine else 0]


async def test_an_answered_challenge_keeps_the_key(connect: Connect, shop: Shop, url: str) -> None:
    await connect().post(f"{url}/guarded", auth=httpx.DigestAuth("anna", "secret"))

    assert len(shop.keys) == 2
    assert distinct(shop.keys) == 1


# What the header may carry


async def test_a_quoted_key_is_the_draft_s_structured_field(connect: Connect, shop: Shop, url: str) -> None:
    client = connect(quoted=True)
    await client.post(url, extensions={"logical_id": r'a "b" \ '})
    await client.post(url)

    assert shop.keys[0] == r'"a \"b\" \\ "'
    assert from_header(shop.keys[:1], field="") == r'a "b" \ '
    assert uuid.UUID(shop.keys[1].strip('"')).version == 4


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("illegal", ["a\r\nX-Injected: 1", "\x00", "é", "x" * 256, 1.5, ["a"]])
async def test_an_illegal_id_is_refused_before_anything_is_sent(
    illegal: object, quoted: bool, connect: Connect, shop: Shop, url: str
) -> None:
    with pytest.raises(InvalidLogicalIdError):
        await connect(quoted=quoted).post(url, extensions={"logical_id": illegal})
    with pytest.raises(InvalidLogicalIdError):
        await connect(quoted=quoted, identify=lambda _: illegal).post(url)

    assert shop.seen == []


@pytest.mark.parametrize("lossy", [" a", "a ", 'say "a"', '"a"'])
async def test_an_id_that_would_arrive_as_another_one_is_refused_unless_quoted(
    lossy: str, connect: Connect, shop: Shop, url: str
) -> None:
    with pytest.raises(InvalidLogicalIdError):
        await connect().post(url, extensions={"logical_id": lossy})
    assert shop.seen == []

    await connect(quoted=True).post(url, extensions={"logical_id": lossy})
    assert from_header(shop.keys, field="") == lossy


@given(st.text(st.characters(max_codepoint=0x100), min_size=1, max_size=20), st.booleans())
def test_a_header_is_read_as_the_id_that_it_was_made_of(logical_id: str, quoted: bool) -> None:
    try:
        value = header_value(logical_id, quoted=quoted)
    except InvalidLogicalIdError:
        return
    assert from_header([value], field="") == logical_id


# With a server that deduplicates


async def test_an_order_whose_answer_was_lost_is_committed_once(connect: Connect, tmp_path: Path) -> None:
    dedup = Dedup(f"sqlite+aiosqlite:///{tmp_path}/shop.db", create_table=True)
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=dedup)

    @app.post("/orders", status_code=201)
    async def order(_claim: Annotated[Claim, Depends(Deduplicated())], session: RequestSession) -> None:
        await session.execute(text("insert into orders default values"))

    async with dedup.engine.begin() as connection:
        await connection.execute(text("create table orders (id integer primary key)"))
    async with live(app) as url, losing_the_first_answer(url) as lossy:
        client = connect(retrying="inside")
        retried = await client.post(f"{lossy}/orders")
        following = await client.post(f"{lossy}/orders")
        async with dedup.engine.connect() as connection:
            orders = await connection.scalar(text("select count(*) from orders"))
    await dedup.engine.dispose()

    # Committed by the request whose answer was lost, and by the following one; the retry was told so.
    assert (retried.status_code, following.status_code, orders) == (409, 201, 2)


# Set-up


async def _asynchronous(_request: httpx.Request) -> str:
    return ""


@pytest.mark.parametrize("transport", [DeduplicatingTransport, AsyncDeduplicatingTransport])
@pytest.mark.parametrize(
    "options",
    [
        {"header": ""},
        {"header": "no header"},
        {"methods": "POST"},
        {"methods": []},
        {"identify": "sku"},
        {"identify": _asynchronous},
    ],
)
def test_options_that_cannot_be_kept_are_refused(transport: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        transport(**options)


class _Noting(httpx.BaseTransport, httpx.AsyncBaseTransport):
    def __init__(self) -> None:
        self.noted: list[str] = []

    def __enter__(self) -> Self:
        self.noted.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.noted.append("exit")

    async def __aenter__(self) -> Self:
        self.noted.append("enter")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.noted.append("exit")

    def close(self) -> None:
        self.noted.append("close")

    async def aclose(self) -> None:
        self.noted.append("close")


async def test_the_wrapped_transport_is_entered_left_and_closed_with_ours() -> None:
    sync, entered, closed, left = _Noting(), _Noting(), _Noting(), _Noting()
    with httpx.Client(transport=DeduplicatingTransport(sync)):
        pass
    async with httpx.AsyncClient(transport=AsyncDeduplicatingTransport(entered)):
        pass
    httpx.Client(transport=DeduplicatingTransport(closed)).close()
    await httpx.AsyncClient(transport=AsyncDeduplicatingTransport(left)).aclose()

    assert sync.noted == entered.noted == ["enter", "exit"]
    assert closed.noted == left.noted == ["close"]


MISSING = """
import sys
sys.modules["httpx"] = None  # as if it were not installed
try:
    import fastapi_dedup.http.client
except ImportError as error:
    print(error.name, error)
"""


def test_without_httpx_the_error_says_what_to_install() -> None:
    run = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, check=True)

    assert run.stdout == "httpx fastapi_dedup.http.client needs httpx: pip install 'fastapi-dedup[httpx]'\n"
