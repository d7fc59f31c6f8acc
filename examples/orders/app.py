"""A shop's order service. The reference that the client gives its order is the order's logical id.

    uvicorn examples.orders.app:app

Claims and orders are in one database, for they commit together: in the one that FASTAPI_DEDUP_DATABASE_URL
names, else in SQLite in the working directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, PositiveInt
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fastapi_dedup import Dedup, Deduplicated, DedupMiddleware, RequestSession

dedup = Dedup(create_table=True)
one_order = Deduplicated(source="body", member="reference", scope="orders")
"""The policy of whoever takes orders: this service, and the consumer of `consumer.py`."""


class Base(DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    """An order. Nothing here is unique but `id`: it is the claim that lets an intent's work commit once."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str]
    sku: Mapped[str]
    quantity: Mapped[int]


class Stock(Base):
    """How many of an article are left."""

    __tablename__ = "stock"

    sku: Mapped[str] = mapped_column(primary_key=True)
    quantity: Mapped[int]


class CreateOrder(BaseModel):
    """What a client sends. A retry brings the same reference; another order brings another one."""

    reference: str
    sku: str
    quantity: PositiveInt = 1
    gift: bool = False


class Delivered(BaseModel):
    """How many of an article came in."""

    quantity: PositiveInt


class SoldOutError(Exception):
    """There are not so many left."""


async def place(order: CreateOrder, session: AsyncSession) -> None:
    """Place an order, wherever it came from.

    Raises:
        SoldOutError: There is nothing to sell, and the order that was flushed must go with its claim.
    """
    session.add(Order(reference=order.reference, sku=order.sku, quantity=order.quantity))
    await session.flush()
    left = await session.scalar(
        update(Stock)
        .where(Stock.sku == order.sku, Stock.quantity >= order.quantity)
        .values(quantity=Stock.quantity - order.quantity)
        .returning(Stock.quantity)
    )
    if left is None:
        raise SoldOutError(order.sku)


class WrappingTable:
    """Gifts are wrapped by hand, so the request for one is slow: in flight until somebody says `done`."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    @property
    def references(self) -> list[str]:
        """The orders whose gifts are being wrapped."""
        return list(self._waiting)

    async def wrap(self, reference: str) -> None:
        """Wait until the gift is wrapped."""
        wrapped = self._waiting[reference] = asyncio.Event()
        try:
            await wrapped.wait()
        finally:
            del self._waiting[reference]

    def done(self, reference: str) -> None:
        """Say that a gift is wrapped."""
        if reference not in self._waiting:
            raise HTTPException(404, "no such gift is being wrapped")
        self._waiting[reference].set()


table = WrappingTable()


async def create_tables() -> None:
    """Create the shop's tables. The table of claims is `dedup`'s own affair."""
    async with dedup.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the shop's tables."""
    await create_tables()
    yield


app = FastAPI(title="Orders", lifespan=lifespan)
app.add_middleware(DedupMiddleware, dedup=dedup)


@app.post("/orders", status_code=201, dependencies=[Depends(one_order)])
async def create_order(order: CreateOrder, session: RequestSession) -> CreateOrder:
    """Take an order. Order, stock and claim are in one transaction, which commits before the 201 leaves."""
    if order.gift:
        await table.wrap(order.reference)
    try:
        await place(order, session)
    except SoldOutError as error:
        raise HTTPException(422, "not in stock") from error
    return order


@app.post("/stock/{sku}", dependencies=[Depends(Deduplicated("header"))])
async def deliver(sku: str, delivered: Delivered, session: RequestSession) -> Delivered:
    """Take in a delivery. Its logical id is the `Idempotency-Key`, for twice the same is twice as many."""
    stock = await session.get(Stock, sku, with_for_update=True) or Stock(sku=sku, quantity=0)
    stock.quantity += delivered.quantity
    session.add(stock)
    return Delivered(quantity=stock.quantity)


@app.get("/gifts")
async def gifts() -> list[str]:
    """Tell which orders' gifts are being wrapped."""
    return table.references


@app.put("/gifts/{reference}/wrapped", status_code=204)
async def wrapped(reference: str) -> None:
    """Say that a gift is wrapped."""
    table.done(reference)
