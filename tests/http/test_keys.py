"""Which keys are legal, which are missing, and which are the same: on the wire."""

import asyncio
import json
import secrets
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, Request

from fastapi_dedup import Claim, Deduplicated, RequestSession
from tests.http.world import KEY, Order, Statements, World, add, client, problem
from tests.live import live


def app_of(world: World, policy: Deduplicated) -> Any:
    app = world.app()

    @app.post("/orders")
    async def create(
        request: Request, session: RequestSession, claim: Annotated[Claim | None, Depends(policy)]
    ) -> str | None:
        await request.body()
        await add(session, "a")
        return None if claim is None else claim.logical_id

    return app


async def raw(url: str, key: bytes) -> bytes:
    """Send a key as it stands, which a client library might mend or refuse, and return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    head = b"POST /orders HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n"
    writer.write(head + KEY.encode() + b": " + key + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


MISSING: list[dict[str, Any]] = [
    {},
    {"headers": {KEY: ""}},
    {"headers": {KEY: "   "}},
    {"headers": {KEY: '""'}},
    {"headers": {KEY: '"  "'}},
]
MISSING_IN_BODIES: list[Any] = [{}, {"sku": None}, {"sku": ""}, {"sku": " \t "}, {"other": 1}, None, []]


@pytest.mark.parametrize("request_", MISSING, ids=str)
async def test_a_missing_key_is_a_bad_request_where_it_is_required(
    sqlite: World, request_: dict[str, Any]
) -> None:
    # case C1
    statements = Statements(sqlite.engine)
    async with client(app_of(sqlite, Deduplicated())) as c:
        statements.clear()
        refused = await c.post("/orders", **request_)
    assert (refused.status_code, problem(refused)) == (400, "missing-logical-id")
    assert refused.json()["field"] == f"header.{KEY}"
    assert statements == []


@pytest.mark.parametrize("body", MISSING_IN_BODIES, ids=str)
async def test_a_missing_field_is_a_bad_request_where_it_is_required(sqlite: World, body: Any) -> None:
    # case C1
    async with client(app_of(sqlite, Deduplicated("body", "sku"))) as c:
        refused = await c.post("/orders", content=json.dumps(body))
    assert (refused.status_code, problem(refused)) == (400, "missing-logical-id")
    assert refused.json()["field"] == "body.sku"
    assert (await sqlite.orders(), await sqlite.ids()) == ([], [])


@pytest.mark.parametrize("request_", MISSING, ids=str)
async def test_without_an_optional_key_a_request_runs_every_time_and_costs_no_query(
    world: World, request_: dict[str, Any]
) -> None:
    # case C1
    statements = Statements(world.engine)
    async with client(app_of(world, Deduplicated(required=False))) as c:
        statements.clear()
        for _ in range(2):
            assert (await c.post("/orders", **request_)).status_code == 200
        assert [each for each in statements if "insert into orders" not in each] == []
    assert (await world.orders(), await world.ids()) == (["a", "a"], [])


@pytest.mark.parametrize("body", MISSING_IN_BODIES, ids=str)
async def test_without_an_optional_field_a_request_runs_every_time(sqlite: World, body: Any) -> None:
    # case C1
    async with client(app_of(sqlite, Deduplicated("body", "sku", required=False))) as c:
        for _ in range(2):
            assert (await c.post("/orders", content=json.dumps(body))).status_code == 200
    assert (await sqlite.orders(), await sqlite.ids()) == (["a", "a"], [])


@pytest.mark.parametrize("key", ["None", "null", "undefined", "0", "false", "{}", "-"])
async def test_words_for_nothing_are_keys_like_any_other(sqlite: World, key: str) -> None:
    # case C1
    async with client(app_of(sqlite, Deduplicated())) as c:
        assert (await c.post("/orders", headers={KEY: key})).json() == key
        assert (await c.post("/orders", headers={KEY: key})).status_code == 409


async def test_repeated_different_keys_are_a_bad_request_and_equal_ones_are_one(sqlite: World) -> None:
    # case C3
    app = app_of(sqlite, Deduplicated())
    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        refused = await c.post("/orders", headers=[(KEY, "a"), (KEY, "b")])
        assert (refused.status_code, problem(refused)) == (400, "invalid-logical-id")
        assert await sqlite.ids() == []
        assert (await c.post("/orders", headers=[(KEY, "a"), (KEY, "a")])).json() == "a"
        assert (await c.post("/orders", headers={KEY: "a"})).status_code == 409
        assert (await c.post("/orders", headers={KEY: "a, b"})).json() == "a, b"


SPELLINGS = {
    b'"abc"': "abc",
    b'  "a-b"\t': "a-b",
    b"  bare ": "bare",
    b'"a b"': "a b",
    b"a c": "a c",
    rb'"say \"hi\" \\ there"': r'say "hi" \ there',
    b"it's-fine!#$%&()*+,-./:;<=>?@[]^_`{|}~\\": "it's-fine!#$%&()*+,-./:;<=>?@[]^_`{|}~\\",
    b'" padded "': " padded ",
}


async def test_a_key_may_be_bare_or_quoted(sqlite: World) -> None:
    # case C4
    async with live(app_of(sqlite, Deduplicated())) as url:
        for sent in SPELLINGS:
            assert (await raw(url, sent)).startswith(b"HTTP/1.1 200 "), sent
            assert (await raw(url, sent)).startswith(b"HTTP/1.1 409 "), sent
        # Both forms are one key.
        assert (await raw(url, b"abc")).startswith(b"HTTP/1.1 409 ")
        assert (await raw(url, b'"bare"')).startswith(b"HTTP/1.1 409 ")
    assert await sqlite.ids() == sorted(SPELLINGS.values())


MALFORMED = [
    *(b'"abc', b'abc"', b'"', b'"a"b"', b'"a" ; p=1', rb'"bad \escape"', b'"a", "b"', b"a\tb"),
    *("é".encode(), "é".encode("latin-1"), b"\xff", b'"\xc3\xa9"'),
]


async def test_malformed_keys_are_a_bad_request_before_any_query(sqlite: World) -> None:
    # case C4
    # case C5
    app = app_of(sqlite, Deduplicated())
    statements = Statements(sqlite.engine)
    async with live(app) as url:
        await raw(url, b"")
        statements.clear()
        for sent in MALFORMED:
            refused = await raw(url, sent)
            assert refused.startswith(b"HTTP/1.1 400 "), sent
            assert b"#invalid-logical-id" in refused
        assert statements == []


async def test_what_is_not_folded_stays_apart(world: World) -> None:
    # case C5
    # case F9
    keys = [
        "Ab",
        "ab",
        "ab ",
        "áb",
        "a\u0301b",
        "ÁB",
        " ab",
        "ab\u00a0",
        "\uff41b",
        "ß",
        "ss",
        "🦊",
        "a" * 255,
    ]
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        for status in (200, 409):
            for key in keys:
                answer = await c.post("/orders", json={"sku": key})
                assert answer.status_code == status, key
                assert status == 200 or answer.json()["logical_id"] == key
    assert await world.orders() == keys


async def test_surrogates_and_control_characters_are_a_bad_request_before_any_query(world: World) -> None:
    # case C5
    app = app_of(world, Deduplicated("body", "sku"))
    statements = Statements(world.engine)
    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        statements.clear()
        for sku in (r"\ud800", r"a\udfffb", r"\u0000", r"a\u0000b", r"\u0007", r"a\u0085", r"\u007f"):
            refused = await c.post("/orders", content=f'{{"sku": "{sku}"}}')
            assert (refused.status_code, problem(refused)) == (400, "invalid-logical-id"), sku
        assert statements == []


async def test_a_strange_path_never_breaks_the_claim_that_is_scoped_by_it(world: World) -> None:
    # case C5
    # PostgreSQL's text has no NUL: such a path is a bad request, or is kept in another way, but never a 503.
    app = world.app()

    @app.post("/files/{name}", dependencies=[Depends(Deduplicated())])
    async def create(name: str, session: RequestSession) -> None:
        await add(session, f"sku {len(name)}")

    async with live(app) as url, httpx.AsyncClient(base_url=url) as c:
        for path in ("/files/a%00b", "/files/%ED%A0%80", "/files/%FF%FE", "/files/a%0Ab", "/files/%C3%A9"):
            first = await c.post(path, headers={KEY: "k"})
            assert first.status_code in {200, 400}, path
            if first.status_code == 200:
                assert (await c.post(path, headers={KEY: "k"})).status_code == 409, path


async def test_an_overlong_key_is_a_bad_request_before_any_query(world: World) -> None:
    # case C7
    app = app_of(world, Deduplicated())
    statements = Statements(world.engine)
    async with client(app) as c:
        statements.clear()
        for key in ("x" * 256, secrets.token_hex(4000)):
            refused = await c.post("/orders", headers={KEY: key})
            assert (refused.status_code, problem(refused)) == (400, "invalid-logical-id")
            assert key not in refused.text
        assert statements == []


async def test_an_overlong_composition_is_a_bad_request(sqlite: World) -> None:
    # case C7
    app = app_of(sqlite, Deduplicated("body", ["sku", "note"]))
    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "x" * 127, "note": "y" * 127})).status_code == 200
        refused = await c.post("/orders", json={"sku": "x" * 128, "note": "y" * 127})
        assert (refused.status_code, problem(refused)) == (400, "invalid-logical-id")


async def test_the_longest_key_works(world: World) -> None:
    # case C7
    keys = [secrets.token_hex(128)[:255], "é" * 255, "🦊" * 255]
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        for key in keys:
            assert (await c.post("/orders", json={"sku": key})).status_code == 200
            assert (await c.post("/orders", json={"sku": key})).status_code == 409
            assert (await c.post("/orders", json={"sku": key[:-1]})).status_code == 200


async def test_a_number_and_its_text_are_one_id(sqlite: World) -> None:
    # What an id is made of is text: only payloads tell 1 and "1" apart (case C8).
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(body: dict[str, Any]) -> int:
        return len(body)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": 1})).status_code == 200
        assert (await c.post("/orders", json={"sku": "1"})).status_code == 409
