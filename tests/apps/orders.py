"""The app that races and crashes are run against: `tests.apps.orders:app` for uvicorn's workers.

Settings come from the environment; a test that serves it itself makes one with `create_app`.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool, QueuePool
from starlette.responses import JSONResponse, Response

from fastapi_dedup import Dedup, Deduplicated, DedupMiddleware, RequestSession
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.stores.redis import RedisLeases
from tests.apps.gate import ask

KILL_POINTS = ("before_claim", "after_claim", "after_write", "after_commit")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a test may choose.

    Attributes:
        url: The database.
        pool_size: The most connections that the app's pool opens. 0 leaves the engine to `Dedup(url)`, and
            -1 does without a pool, as one does behind pgbouncer.
        gate: The port of the gate that handlers go to after their write; 0 for none.
        wait_timeout: How long POST /waiting waits for a twin, in seconds.
        lease: The lease of the claims of POST /leased…, in seconds.
        on_abandoned: What becomes of them when their owner dies; not in the environment, as what follows.
        redis: The URL of the Redis that they are in; "" keeps them in the database.
        prefix: What their keys start with there.
    """

    url: str
    pool_size: int = 0
    gate: int = 0
    wait_timeout: float = 3600.0
    lease: float = 0.6
    on_abandoned: Literal["retry", "block"] = "retry"
    redis: str = ""
    prefix: str = "dedup:"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Read the settings from variables `ORDERS_…`."""
        return cls(
            url=environ.get("ORDERS_URL", "sqlite+aiosqlite:///orders.db"),
            pool_size=int(environ.get("ORDERS_POOL_SIZE", "0")),
            gate=int(environ.get("ORDERS_GATE", "0")),
            wait_timeout=float(environ.get("ORDERS_WAIT_TIMEOUT", "3600")),
            lease=float(environ.get("ORDERS_LEASE", "0.6")),
        )

    def environ(self) -> dict[str, str]:
        """Return the variables that `from_environ` reads."""
        return {
            "ORDERS_URL": self.url,
            "ORDERS_POOL_SIZE": str(self.pool_size),
            "ORDERS_GATE": str(self.gate),
            "ORDERS_WAIT_TIMEOUT": str(self.wait_timeout),
            "ORDERS_LEASE": str(self.lease),
        }


class Order(BaseModel):
    """What a client sends."""

    sku: str
    note: str = ""


class Shop:
    """What the handlers share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.doomed: set[str] = set()  # the skus at whose COMMIT the process kills itself
        bind: str | AsyncEngine = settings.url
        if settings.pool_size < 0:
            bind = create_async_engine(settings.url, poolclass=NullPool)
        elif settings.pool_size:
            bind = create_async_engine(settings.url, pool_size=settings.pool_size, max_overflow=0)
        leases = RedisLeases(settings.redis, prefix=settings.prefix) if settings.redis else None
        self.dedup = Dedup(bind, create_table=True, hooks=[self._hear], leases=leases)
        self.engine = self.dedup.engine
        self.sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @property
    def waiting(self) -> int:
        """How many deliveries wait for an outcome; those who wait for a neighbour have asked nothing."""
        return sum(map(len, self.dedup._flights._lines.values()))

    def _hear(self, heard: Event) -> None:
        if heard.kind is EventKind.COMMITTED and heard.logical_id in self.doomed:
            die()

    async def work(self, order: Order, session: AsyncSession, kill_at: str) -> Response:
        """Do what every endpoint here does: one business row, and whatever the test wants to go wrong."""
        if kill_at == "after_claim":
            die()
        await session.execute(
            text("insert into orders (sku, note) values (:sku, :note)"),
            order.model_dump(include={"sku", "note"}),
        )
        if kill_at == "after_write":
            die()
        if kill_at == "after_commit":
            self.doomed.add(order.sku)
        match "go" if not self.settings.gate else await ask(self.settings.gate, order.sku):
            case "raise":
                msg = "the handler failed, as the test wished"
                raise RuntimeError(msg)
            case "refuse":
                return JSONResponse({"detail": "the handler returned an error"}, status_code=503)
            case "time out":
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            case "commit and raise":
                await session.commit()
                msg = "the handler failed after its COMMIT, as the test wished"
                raise RuntimeError(msg)
            case "query for ever":
                await session.execute(text("select pg_sleep(600)"))
        return JSONResponse({"sku": order.sku}, status_code=201)

    async def write(self, order: Order, session: AsyncSession, kill_at: str) -> None:
        """Do what an endpoint with a lease does when its slow part is over."""
        await session.execute(text("insert into orders (sku) values (:sku)"), {"sku": order.sku})
        match kill_at:
            case "after_write":
                die()
            case "right after COMMIT":
                event.listen(session.sync_session, "after_commit", lambda _: die())
            case "after_commit":
                self.doomed.add(order.sku)


def die() -> None:
    """End this process at once, as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


KillAt = Annotated[str, Header()]


def before_claim(kill_at: KillAt = "") -> None:
    """Run before the claim, for policies come after every other dependency of their route."""
    if kill_at == "before_claim":
        die()


def create_app(settings: Settings) -> FastAPI:
    """Return the app; `app.state.shop` is what its handlers share."""
    shop = Shop(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await shop.engine.dispose()

    app = FastAPI(lifespan=lifespan)
    app.state.shop = shop
    app.add_middleware(DedupMiddleware, dedup=shop.dedup)
    _add_riding(app, shop)
    _add_borrowing(app, shop)
    _add_leased(app, shop)
    _add_reading(app, shop)
    return app


BY_SKU: Mapping[str, Any] = {"source": "body", "member": "sku"}


def _add_riding(app: FastAPI, shop: Shop) -> None:
    """Add the routes whose claim rides the request's own transaction."""
    waits = Deduplicated(
        **BY_SKU, in_flight="wait", wait_timeout=timedelta(seconds=shop.settings.wait_timeout)
    )

    @app.post("/orders", dependencies=[Depends(before_claim), Depends(Deduplicated(**BY_SKU))])
    async def orders(order: Order, session: RequestSession, kill_at: KillAt = "") -> Response:
        return await shop.work(order, session, kill_at)

    @app.post("/waiting", dependencies=[Depends(waits)])
    async def waiting(order: Order, session: RequestSession) -> Response:
        return await shop.work(order, session, "")

    @app.post("/slow", status_code=201, dependencies=[Depends(Deduplicated())])
    async def slow(order: Order, session: RequestSession, seconds: float = 2.0) -> dict[str, float]:
        entered = time.monotonic()
        await shop.work(order, session, "")
        await asyncio.sleep(seconds)
        return {"entered": entered, "left": time.monotonic()}


def _add_borrowing(app: FastAPI, shop: Shop) -> None:
    """Add the routes whose claim rides a session of the app's own."""

    async def committed_by_the_handler() -> AsyncIterator[AsyncSession]:
        async with shop.sessions() as session:
            yield session

    async def committed_by_the_dependency() -> AsyncIterator[AsyncSession]:
        async with shop.sessions() as session:
            yield session
            await session.commit()

    @app.post(
        "/committed-by-handler",
        dependencies=[
            Depends(before_claim),
            Depends(Deduplicated(**BY_SKU, session=committed_by_the_handler)),
        ],
    )
    async def by_handler(
        order: Order,
        session: Annotated[AsyncSession, Depends(committed_by_the_handler)],
        kill_at: KillAt = "",
    ) -> Response:
        response = await shop.work(order, session, kill_at)
        if response.status_code < 400:
            await session.commit()
        return response

    @app.post(
        "/committed-by-dependency",
        dependencies=[
            Depends(before_claim),
            Depends(Deduplicated(**BY_SKU, session=committed_by_the_dependency)),
        ],
    )
    async def by_dependency(
        order: Order,
        session: Annotated[AsyncSession, Depends(committed_by_the_dependency)],
        kill_at: KillAt = "",
    ) -> Response:
        return await shop.work(order, session, kill_at)


def _add_leased(app: FastAPI, shop: Shop) -> None:
    """Add the routes whose claim is leased: their handlers go to the gate before they touch the database."""
    leased_by: Mapping[str, Any] = {
        **BY_SKU,
        "lease": timedelta(seconds=shop.settings.lease),
        "on_abandoned": shop.settings.on_abandoned,
    }

    async def charge(order: Order, kill_at: str) -> None:
        if kill_at == "after_claim":
            die()
        if shop.settings.gate and await ask(shop.settings.gate, order.sku) == "raise":
            msg = "the handler failed, as the test wished"
            raise RuntimeError(msg)

    before = Depends(before_claim)

    @app.post("/leased", status_code=201, dependencies=[before, Depends(Deduplicated(**leased_by))])
    async def leased(order: Order, session: RequestSession, kill_at: KillAt = "") -> None:
        await charge(order, kill_at)
        await shop.write(order, session, kill_at)

    async def own_session() -> AsyncIterator[AsyncSession]:
        async with shop.sessions() as session:
            yield session

    by_handler = Deduplicated(**leased_by, session=own_session)

    @app.post("/leased-by-handler", status_code=201, dependencies=[before, Depends(by_handler)])
    async def leased_by_handler(
        order: Order, session: Annotated[AsyncSession, Depends(own_session)], kill_at: KillAt = ""
    ) -> None:
        await charge(order, kill_at)
        await shop.write(order, session, kill_at)
        await session.commit()


def _add_reading(app: FastAPI, shop: Shop) -> None:
    """Add the routes that claim nothing."""

    @app.get("/ping")
    async def ping(session: RequestSession) -> dict[str, int]:
        return {"one": int(await session.scalar(text("select 1")) or 0)}

    @app.get("/pool")
    async def pool() -> dict[str, int]:
        return {"checked_out": checked_out(shop.engine), "waiting": shop.waiting}


def checked_out(engine: AsyncEngine) -> int:
    """Return how many of a pool's connections are in somebody's hands; 0 where there is no pool."""
    pool = engine.sync_engine.pool
    return pool.checkedout() if isinstance(pool, QueuePool) else 0


def serve(settings: Settings, listener: socket.socket, options: Mapping[str, Any]) -> None:
    """Serve the app on a socket that listens already, until the process ends: a process's whole work."""
    config = uvicorn.Config(create_app(settings), lifespan="on", log_level="critical", **options)
    uvicorn.Server(config).run(sockets=[listener])


app = create_app(Settings.from_environ())
