"""A retry brings the same payload; another payload under a used key is no retry."""

import asyncio
import json
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Form, Request, UploadFile
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, Order, World, add, client, problem

JSON = {"content-type": "application/json", KEY: "k"}


def raw_app(world: World, policy: Deduplicated) -> FastAPI:
    app = world.app()

    @app.post("/orders", dependencies=[Depends(policy)])
    async def create(request: Request, session: RequestSession) -> int:
        await add(session, "a")
        return len(await request.body())

    return app


async def test_another_payload_under_a_used_key_is_refused_and_the_first_stays(world: World) -> None:
    # case D3
    app = world.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 200
        refused = await c.post("/orders", json={"sku": "b"}, headers={KEY: "k"})
        assert (refused.status_code, problem(refused)) == (422, "fingerprint-mismatch")
        assert (await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})).status_code == 409
    assert (await world.orders(), await world.ids()) == (["a"], ["k"])
    assert world.kinds() == ["claimed", "committed", "mismatch", "duplicate"]


async def test_another_payload_is_told_even_while_the_first_is_in_flight(world: World) -> None:
    # case D3
    app = world.app()
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)
        running.set()
        await go_on.wait()

    async with client(app) as c:
        first = asyncio.create_task(c.post("/orders", json={"sku": "a"}, headers={KEY: "k"}))
        await running.wait()
        refused = await c.post("/orders", json={"sku": "b"}, headers={KEY: "k"})
        assert (refused.status_code, problem(refused)) == (422, "fingerprint-mismatch")
        twin = await c.post("/orders", json={"sku": "a"}, headers={KEY: "k"})
        assert (twin.status_code, problem(twin)) == (409, "in-flight")
        go_on.set()
        assert (await first).status_code == 200
    assert await world.orders() == ["a"]


SAME = [
    (b'{"a": 1, "b": [1, 2], "c": {"x": 1, "y": 2}}', b'{"c":{"y":2,"x":1},"b":[1,2],"a":1}'),
    (b'"\\u00e9"', '"é"'.encode()),
    (b"  [1,2]  ", b"[1, 2]"),
]
DIFFERENT = [
    (b"[1, 2]", b"[2, 1]"),
    (b'{"a": 1}', b'{"a": "1"}'),
    (b'{"a": null}', b"{}"),
    (b'{"a": true}', b'{"a": 1}'),
    (b'{"a": "x"}', b'{"a": "X"}'),
    (b'{"a": ""}', b'{"a": " "}'),
    (b"", b"{}"),
    (b"{broken", b"{broken "),
    (b'{"a": "\\ud800"}', b'{"a": "\\ud801"}'),
]


@pytest.mark.parametrize(("first", "second"), SAME)
async def test_json_is_compared_by_meaning(sqlite: World, first: bytes, second: bytes) -> None:
    # case C8
    async with client(raw_app(sqlite, Deduplicated())) as c:
        assert (await c.post("/orders", content=first, headers=JSON)).status_code == 200
        assert (await c.post("/orders", content=second, headers=JSON)).status_code == 409


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
async def test_what_means_something_else_is_told_apart(sqlite: World, first: bytes, second: bytes) -> None:
    # case C8
    async with client(raw_app(sqlite, Deduplicated())) as c:
        assert (await c.post("/orders", content=first, headers=JSON)).status_code == 200
        assert (await c.post("/orders", content=second, headers=JSON)).status_code == 422


async def test_headers_are_no_part_of_the_payload_and_the_query_is(sqlite: World) -> None:
    # peers.md §3.20
    async with client(raw_app(sqlite, Deduplicated())) as c:
        assert (await c.post("/orders?x=1", headers={**JSON, "x-trace": "1"})).status_code == 200
        assert (
            await c.post("/orders?x=1", headers={**JSON, "x-trace": "2", "accept": "*/*"})
        ).status_code == 409
        assert (await c.post("/orders?x=2", headers=JSON)).status_code == 422


async def test_the_payload_may_be_left_out_of_it(sqlite: World) -> None:
    # case D3
    async with client(raw_app(sqlite, Deduplicated(fingerprint=False))) as c:
        assert (await c.post("/orders", content=b"1", headers=JSON)).status_code == 200
        assert (await c.post("/orders?x=1", content=b"2", headers=JSON)).status_code == 409


async def test_the_payload_may_be_compared_although_the_id_is_in_it(sqlite: World) -> None:
    # case D3
    async with client(raw_app(sqlite, Deduplicated("body", "sku", fingerprint=True))) as c:
        assert (await c.post("/orders", json={"sku": "a", "n": 1})).status_code == 200
        assert (await c.post("/orders", json={"n": 1, "sku": "a"})).status_code == 409
        assert (await c.post("/orders", json={"sku": "a", "n": 2})).status_code == 422


async def test_a_callable_chooses_what_is_compared(sqlite: World) -> None:
    async def amount(request: Request) -> str:
        return str((await request.json())["amount"])

    def raw(request: Request) -> bytes:
        return request.headers["x-digest"].encode()

    app = sqlite.app()
    for path, fingerprint in {"/a": amount, "/b": raw}.items():

        @app.post(path, dependencies=[Depends(Deduplicated(fingerprint=fingerprint))])
        async def create(request: Request) -> int:
            return len(await request.body())

    async with client(app) as c:
        for path in ("/a", "/b"):

            async def send(amount: int, time: int, path: str = path) -> int:
                headers = {KEY: "k", "x-digest": str(amount)}
                body = {"amount": amount, "time": time}
                return (await c.post(path, json=body, headers=headers)).status_code

            assert [await send(1, 1), await send(1, 2), await send(2, 1)] == [200, 409, 422]


async def test_two_encodings_of_a_form_are_one_payload(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(sku: Annotated[str, Form()], file: UploadFile) -> str:
        return sku + (await file.read()).decode()

    async with client(app) as c:

        async def send(sku: str, content: bytes, boundary: str) -> tuple[int, str]:
            headers = {KEY: "k", "content-type": f"multipart/form-data; boundary={boundary}"}
            files = {"file": ("a.txt", content)}
            answer = await c.post("/orders", data={"sku": sku}, files=files, headers=headers)
            return answer.status_code, answer.text

        assert await send("a", b"content", "one") == (200, '"acontent"')
        assert (await send("a", b"content", "two"))[0] == 409
        assert (await send("b", b"content", "one"))[0] == 422
        assert (await send("a", b"other", "one"))[0] == 422


@pytest.mark.parametrize("door", ["fastapi", "starlette"])
async def test_a_client_that_draws_a_new_boundary_for_its_retry_sends_the_same_payload(
    sqlite: World, door: str
) -> None:
    # Every HTTP client draws the boundary of a multipart body anew, also when its user presses "retry".
    async def create(request: Request) -> Response:
        async with request.form() as form:
            return JSONResponse([*form])

    app: FastAPI | Starlette = FastAPI() if door == "fastapi" else Starlette()
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    app.add_route("/orders", create, methods=["POST"])
    if isinstance(app, FastAPI):

        @app.post("/fast")
        async def fast(request: Request) -> Response:
            return await create(request)

    path = "/fast" if door == "fastapi" else "/orders"
    async with client(app) as c:
        for status in (200, 409):
            files: Any = {"sku": (None, "a"), "file": ("a.txt", b"content")}
            answer = await c.post(path, files=files, headers={KEY: "k"})
            assert answer.status_code == status
            assert status == 409 or answer.json() == ["sku", "file"]
        files = {"sku": (None, "b"), "file": ("a.txt", b"content")}
        assert (await c.post(path, files=files, headers={KEY: "k"})).status_code == 422


async def test_a_payload_is_never_in_the_logs_or_the_answers(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "fastapi_dedup")
    async with client(raw_app(sqlite, Deduplicated())) as c:
        answers = [
            await c.post("/orders", content=json.dumps({"card": f"secret-{n}"}), headers=JSON)
            for n in (1, 1, 2)
        ]
    assert [each.status_code for each in answers] == [200, 409, 422]
    assert "secret" not in caplog.text + "".join(each.text for each in answers)
