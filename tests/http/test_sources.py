"""Where a policy finds the id of a request."""

import datetime as dt
import enum
import uuid
from typing import Annotated, Any

import pytest
from fastapi import Body, Depends, Form, HTTPException, Request
from pydantic import BaseModel, Field

from fastapi_dedup import Claim, Deduplicated, InvalidLogicalIdError, RequestSession
from tests.http.world import KEY, Order, World, add, client, problem


class Colour(enum.Enum):
    RED = "red"


class Address(BaseModel):
    zip_code: str = Field(alias="zipCode")


class Customer(BaseModel):
    number: int
    address: Address


class Line(BaseModel):
    sku: str


class Purchase(BaseModel):
    customer: Customer
    lines: list[Line]
    purchase_id: uuid.UUID = Field(alias="purchaseId")
    day: dt.date


PURCHASE = {
    "customer": {"number": 7, "address": {"zipCode": "1010"}},
    "lines": [{"sku": "a"}, {"sku": "b"}],
    "purchaseId": "5f0c8a1e-7a3d-4c2b-9d1e-0123456789ab",
    "day": "2026-11-30",
}


@pytest.mark.parametrize(
    ("member", "logical_id"),
    [
        ("purchaseId", PURCHASE["purchaseId"]),
        ("customer.number", "7"),
        ("customer.address.zipCode", "1010"),
        ("lines.1.sku", "b"),
        ("day", "2026-11-30"),
        (("customer.number", "day"), "7|2026-11-30"),
        (["lines.0.sku", "lines.1.sku", "customer.number"], "a|b|7"),
    ],
)
async def test_a_member_of_the_body_is_named_as_on_the_wire(
    sqlite: World, member: Any, logical_id: str
) -> None:
    app = sqlite.app()
    policy = Deduplicated(source="body", member=member)

    @app.post("/purchases")
    async def create(purchase: Purchase, claim: Annotated[Claim, Depends(policy)]) -> str:
        assert purchase.customer.number == 7
        return claim.logical_id

    async with client(app) as c:
        assert (await c.post("/purchases", json=PURCHASE)).json() == logical_id
        assert (await c.post("/purchases", json=PURCHASE)).status_code == 409


async def test_members_never_meet_however_they_are_split(world: World) -> None:
    app = world.app()
    policy = Deduplicated(source="body", member=["sku", "note"])

    @app.post("/orders")
    async def create(order: Order, claim: Annotated[Claim, Depends(policy)]) -> str:
        return claim.logical_id + order.sku[:0]

    pairs = [("a|b", "c"), ("a", "b|c"), ("a\\", "b|c"), ("a\\|b", "c"), ("a", "b\\|c")]
    async with client(app) as c:
        answers = [await c.post("/orders", json={"sku": a, "note": b}) for a, b in pairs]
    assert [each.status_code for each in answers] == [200] * len(pairs)
    assert len({each.json() for each in answers}) == len(pairs)


async def test_an_embedded_body_is_walked_from_its_top(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/two", dependencies=[Depends(Deduplicated(source="body", member="order.sku"))])
    async def two(order: Order, line: Line) -> str:
        return order.sku + line.sku

    @app.post("/one", dependencies=[Depends(Deduplicated(source="body", member="order.sku"))])
    async def one(order: Annotated[Order, Body(embed=True)]) -> str:
        return order.sku

    async with client(app) as c:
        for path in ("/one", "/two"):
            body = {"order": {"sku": "a"}, "line": {"sku": "x"}}
            assert (await c.post(path, json=body)).status_code == 200
            assert (await c.post(path, json=body)).status_code == 409
    assert await sqlite.ids() == ["a", "a"]


async def test_a_body_that_no_model_describes_is_read_as_json(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(source="body", member="order.sku"))])
    async def create(request: Request) -> Any:
        return await request.json()

    async with client(app) as c:
        body = {"order": {"sku": "a"}}
        assert (await c.post("/orders", json=body)).json() == body
        assert (await c.post("/orders", json=body)).status_code == 409
        for malformed in (b"", b"{", b"\xff", b"[" * 100_000):
            refused = await c.post("/orders", content=malformed)
            assert (refused.status_code, problem(refused)) == (400, "invalid-logical-id")
        for elsewhere in (b"[1]", b'"text"', b"7", b"null", b'{"order": [1]}'):
            refused = await c.post("/orders", content=elsewhere)
            assert (refused.status_code, problem(refused)) == (400, "missing-logical-id")


async def test_a_path_parameter_is_an_id(sqlite: World) -> None:
    app = sqlite.app()

    @app.put("/orders/{order_id}", dependencies=[Depends(Deduplicated("path", "order_id", scope="orders"))])
    async def put(order_id: uuid.UUID) -> str:
        return str(order_id)

    @app.post("/orders/{order_id}/{n:int}", dependencies=[Depends(Deduplicated("path", ["order_id", "n"]))])
    async def post(request: Request) -> Any:
        return request.path_params

    async with client(app) as c:
        order = "5f0c8a1e-7a3d-4c2b-9d1e-0123456789ab"
        assert (await c.put(f"/orders/{order}")).status_code == 200
        assert (await c.put(f"/orders/{order}")).status_code == 409
        assert (await c.post("/orders/x/7")).status_code == 200
        assert (await c.post("/orders/x/7")).status_code == 409
    assert await sqlite.ids() == [order, "x|7"]


async def test_a_query_parameter_is_an_id(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("query", "order", scope="orders"))])
    async def create() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/orders?order=a&x=1")).status_code == 200
        assert (await c.post("/orders?x=2&order=a&order=a")).status_code == 409
        assert problem(await c.post("/orders?order=a&order=b")) == "invalid-logical-id"
        assert problem(await c.post("/orders?order=")) == "missing-logical-id"
        assert problem(await c.post("/orders")) == "missing-logical-id"
    assert await sqlite.ids() == ["a"]


@pytest.mark.parametrize("encoding", ["urlencoded", "multipart"])
async def test_a_field_of_a_form_is_an_id(sqlite: World, encoding: str) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("form", "sku"))])
    async def create(sku: Annotated[str, Form()], note: Annotated[str, Form()]) -> str:
        return sku + note

    async with client(app) as c:

        async def send(sku: str, note: str) -> int:
            if encoding == "urlencoded":
                response = await c.post("/orders", data={"sku": sku, "note": note})
            else:
                response = await c.post("/orders", files={"sku": (None, sku), "note": (None, note)})
            return response.status_code

        assert await send("a", "x") == 200
        assert await send("a", "y") == 409
        assert await send("b", "x") == 200
        assert (await c.post("/orders", data={"note": "x"})).status_code == 400
        assert await send(" ", "x") == 400
    assert await sqlite.ids() == ["a", "b"]


async def test_a_form_that_the_handler_reads_itself_stays_readable(sqlite: World) -> None:
    # case B1
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("form", "sku"))])
    async def create(request: Request) -> list[Any]:
        form = await request.form()
        return [[*form.items()], (await request.body()).decode()]

    async with client(app) as c:
        answer = await c.post("/orders", data={"sku": "a", "note": "x"})
        assert answer.status_code == 200
        assert answer.json() == [[["sku", "a"], ["note", "x"]], "sku=a&note=x"]


async def test_a_callable_gives_the_whole_id(sqlite: World) -> None:
    app = sqlite.app()

    def plain(request: Request) -> str | None:
        return request.query_params.get("id")

    async def asynchronous(request: Request) -> int | None:
        number: int | None = (await request.json()).get("number")
        return number

    def refuses(_: Request) -> str:
        raise HTTPException(418)

    def finds_nonsense(_: Request) -> object:
        return object()

    for name, source in {"a": plain, "b": asynchronous, "c": refuses, "d": finds_nonsense}.items():

        @app.post(f"/{name}", dependencies=[Depends(Deduplicated(source))])
        async def endpoint(request: Request) -> Any:
            return await request.body()

    async with client(app) as c:
        assert (await c.post("/a?id=x")).status_code == 200
        assert (await c.post("/a?id=x")).status_code == 409
        assert problem(await c.post("/a")) == "missing-logical-id"
        assert (await c.post("/b", json={"number": 7})).status_code == 200
        assert (await c.post("/b", json={"number": 7})).status_code == 409
        assert problem(await c.post("/b", json={})) == "missing-logical-id"
        assert (await c.post("/c")).status_code == 418
        assert problem(await c.post("/d")) == "invalid-logical-id"
    assert await sqlite.ids() == ["7", "x"]


async def test_a_callable_may_refuse_in_our_words(sqlite: World) -> None:
    app = sqlite.app()

    def strict(_: Request) -> str:
        raise InvalidLogicalIdError("header.X-Order", "it has no check digit")

    @app.post("/", dependencies=[Depends(Deduplicated(strict))])
    async def endpoint() -> None:
        pass

    async with client(app) as c:
        refused = await c.post("/")
        assert (refused.status_code, refused.json()["field"]) == (400, "header.X-Order")
        assert "check digit" in refused.json()["detail"]


async def test_anything_is_the_header_over_http(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/", dependencies=[Depends(Deduplicated("anything"))])
    async def endpoint() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/", headers={KEY: "k"})).status_code == 409
        assert (await c.post("/", headers={KEY: "k"}, json={})).status_code == 422
        assert (await c.post("/")).status_code == 400


async def test_other_headers_and_several_of_them_carry_the_id(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/one", dependencies=[Depends(Deduplicated(member="X-Request-Id"))])
    async def one() -> None:
        pass

    @app.post("/two", dependencies=[Depends(Deduplicated(member=["X-Batch", "X-Line"], required=False))])
    async def two() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/one", headers={"x-request-id": "k"})).status_code == 200
        assert (await c.post("/one", headers={"X-REQUEST-ID": "k"})).status_code == 409
        assert (await c.post("/two", headers={"X-Batch": "1", "X-Line": "2"})).status_code == 200
        assert (await c.post("/two", headers={"X-Batch": "1", "X-Line": "2"})).status_code == 409
        # An id that silently lost a member would be another id.
        assert problem(await c.post("/two", headers={"X-Batch": "1"})) == "missing-logical-id"
        assert (await c.post("/two")).status_code == 200
    assert await sqlite.ids() == ["1|2", "k"]


@pytest.mark.parametrize("value", [True, 1.5, [1], {"a": 1}])
async def test_what_cannot_be_an_id_is_a_bad_request(sqlite: World, value: Any) -> None:
    app = sqlite.app()

    @app.post("/", dependencies=[Depends(Deduplicated("body", "id"))])
    async def endpoint(body: dict[str, Any]) -> None:
        assert body

    async with client(app) as c:
        assert problem(await c.post("/", json={"id": value})) == "invalid-logical-id"
    assert await sqlite.ids() == []


async def test_an_id_in_the_body_needs_no_equal_payload(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku"))])
    async def create(order: Order, session: RequestSession) -> None:
        await add(session, order.sku)

    async with client(app) as c:
        assert (await c.post("/orders", json={"sku": "a", "note": "x"})).status_code == 200
        assert (await c.post("/orders", json={"sku": "a", "note": "y"})).status_code == 409
