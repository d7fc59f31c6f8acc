"""A policy names what its route has: a mistyped member is refused at start-up."""

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from fastapi import Body, Depends, FastAPI
from pydantic import BaseModel, Field

from fastapi_dedup import Deduplicated
from tests.http.world import Order, World, lifespan, refusal_of

Build = Callable[[FastAPI], None]


class Item(BaseModel):
    sku: str
    code: str = Field(alias="Code")


class Basket(BaseModel):
    item: Item
    perhaps: Item | None = None
    items: list[Item] = []
    free: dict[str, Any] = {}


def with_body(model: Any, member: Any, *, required: bool = True, embed: bool = False) -> Build:
    def build(app: FastAPI) -> None:
        policy = Deduplicated("body", member, required=required)

        @app.post("/orders", dependencies=[Depends(policy)])
        async def create(body: Annotated[model, Body(embed=embed)]) -> None:
            assert body

    return build


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("model", "member"),
    [
        (Order, "skuu"),
        (Order, "Sku"),
        (Order, "order.sku"),
        (Item, "code"),
        (Basket, "item.skuu"),
        (Basket, ("item.sku", "item.code")),
        (Basket, "perhaps.skuu"),
        (Basket, "items.0.skuu"),
        (Order | None, "skuu"),
    ],
    ids=str,
)
async def test_a_mistyped_member_of_the_body_is_refused(
    sqlite: World, model: Any, member: Any, *, required: bool
) -> None:
    # case C8
    message = await refusal_of(sqlite, with_body(model, member, required=required))
    assert message.startswith("POST /orders: member=")
    assert "spelled on the wire" in message


async def test_a_mistyped_member_of_an_embedded_body_is_refused(sqlite: World) -> None:
    # case C8
    message = await refusal_of(sqlite, with_body(Order, "sku", embed=True))
    assert "member='sku'" in message
    message = await refusal_of(sqlite, with_body(Order, "body.skuu", embed=True))
    assert "member='body.skuu'" in message


async def test_a_mistyped_path_parameter_is_refused(sqlite: World) -> None:
    # case C8
    def build(app: FastAPI) -> None:
        @app.post("/orders/{order_id}", dependencies=[Depends(Deduplicated("path", "orderid"))])
        async def create(order_id: int) -> None:
            assert order_id

    message = await refusal_of(sqlite, build)
    assert "member='orderid' is not among its path parameters (order_id)" in message


@pytest.mark.parametrize(
    ("model", "member"),
    [
        (Order, "sku"),
        (Item, "Code"),
        (Basket, "item.Code"),
        (Basket, "perhaps.sku"),
        (Basket, "items.0.sku"),
        (Basket, "free.anything.goes"),
        (dict[str, Any], "anything"),
        (list[Order], "0.sku"),
        (Any, "whatever"),
    ],
    ids=str,
)
async def test_a_member_that_may_be_there_is_not_refused(sqlite: World, model: Any, member: str) -> None:
    app = sqlite.app()
    with_body(model, member)(app)
    async with lifespan(app):
        pass
