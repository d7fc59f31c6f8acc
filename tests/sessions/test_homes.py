"""Which database and table a claim goes to: several binds, schemas, and URLs that name one place twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine, String, create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.sql import Update

from fastapi_dedup import Claim, ConfigurationError, Dedup, DuplicateError
from fastapi_dedup.stores.homes import _place_of
from tests.databases import orders_table
from tests.http.world import World
from tests.sessions.kinds import sync_url


class Base(DeclarativeBase):
    """The app's tables."""


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    sku: Mapped[str] = mapped_column(String(300))


class Metric(Base):
    """What the app keeps in another database."""

    __tablename__ = "metrics"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
async def elsewhere(tmp_path: Path) -> AsyncIterator[Engine]:
    """Yield an engine on another database, which has a table of claims too: nothing must go there."""
    url = f"sqlite+aiosqlite:///{tmp_path}/elsewhere.db"
    async with orders_table(url) as made:
        await Dedup(made, create_table=True, reap_every=None).create_table()
    engine = create_engine(f"sqlite:///{tmp_path}/elsewhere.db")
    Base.metadata.create_all(engine)
    yield engine
    with engine.connect() as connection:
        assert connection.scalar(text("select count(*) from dedup_claims")) == 0
    engine.dispose()


@pytest.fixture
def ours(postgres: World) -> Any:
    engine = create_engine(sync_url(postgres.engine.url, "psycopg"))
    yield engine
    engine.dispose()


async def claim_and_order(world: World, session: Session) -> None:
    async with world.dedup.claim("news", scope="tests", session=session):
        session.add_all([Order(sku="news"), Metric()])
    session.commit()


class Routed(Session):
    """As SQLAlchemy's documentation routes: writes to the leader, the rest to a replica."""

    engines: ClassVar[dict[str, Engine]] = {}

    def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
        if mapper is not None and issubclass(mapper.class_, Metric):
            return self.engines["metrics"]
        return self.engines["leader" if self._flushing or isinstance(clause, Update) else "replica"]


def tables_of(ours: Engine, other: Engine) -> Any:
    return {Order.__table__: ours, Metric.__table__: other}


BINDS: dict[str, Callable[[Engine, Engine], Session]] = {
    "by class": lambda ours, other: Session(binds={Order: ours, Metric: other}),
    "by table": lambda ours, other: Session(binds=tables_of(ours, other)),
    "one by default": lambda ours, other: Session(bind=ours, binds={Metric: other}),
    "the other by default": lambda ours, other: Session(bind=other, binds={Order: ours}),
}


@pytest.mark.parametrize("binds", BINDS)
async def test_a_claim_goes_where_the_claims_are(
    postgres: World, ours: Engine, elsewhere: Engine, binds: str
) -> None:
    if binds == "the other by default":
        Base.metadata.tables["metrics"].create(elsewhere, checkfirst=True)
    with BINDS[binds](ours, elsewhere) as session:
        await claim_and_order(postgres, session)
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])
    with BINDS[binds](ours, elsewhere) as session:
        with pytest.raises(DuplicateError):
            await claim_and_order(postgres, session)
        session.rollback()


async def test_a_claim_in_a_session_of_several_binds_is_taken_anew_where_the_claims_are(
    postgres: World, ours: Engine, elsewhere: Engine
) -> None:
    with BINDS["by class"](ours, elsewhere) as session:
        async with postgres.dedup.claim("news", scope="tests", session=session):
            session.add_all([Order(sku="dropped"), Metric()])
            session.flush()
            session.rollback()
            session.add_all([Order(sku="kept"), Metric()])
        session.commit()
    assert (await postgres.orders(), await postgres.ids()) == (["kept"], ["news"])


async def test_an_asynchronous_session_of_several_binds_claims_where_the_claims_are(
    postgres: World, elsewhere: Engine
) -> None:
    other = create_async_engine(elsewhere.url.set(drivername="sqlite+aiosqlite"))
    async with AsyncSession(binds={Order: postgres.engine, Metric: other}) as session:
        async with postgres.dedup.claim("news", scope="tests", session=session):
            session.add_all([Order(sku="news"), Metric()])
        await session.commit()
    await other.dispose()
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])


async def test_the_apps_own_routing_is_asked_as_for_a_write(
    postgres: World, ours: Engine, elsewhere: Engine
) -> None:
    replica = create_engine(ours.url)
    asked: list[str] = []
    event.listen(replica, "before_cursor_execute", lambda _c, _cursor, statement, *_: asked.append(statement))
    Routed.engines.update(leader=ours, replica=replica, metrics=elsewhere)
    with Routed() as session:
        await claim_and_order(postgres, session)
    assert (await postgres.orders(), await postgres.ids()) == (["news"], ["news"])
    assert asked == []
    replica.dispose()


async def test_a_session_of_which_no_bind_leads_to_the_claims_is_refused(
    postgres: World, elsewhere: Engine
) -> None:
    Routed.engines.update(leader=elsewhere, replica=elsewhere, metrics=elsewhere)
    refused = pytest.raises(ConfigurationError, match=r"elsewhere\.db, but this Dedup is on postgresql")
    for session in (Session(binds={Order: elsewhere, Metric: elsewhere}), Routed()):
        with session, refused:
            await claim_and_order(postgres, session)


async def test_a_session_with_two_transactions_on_the_database_of_the_claims_is_refused(
    postgres: World, ours: Engine
) -> None:
    second = create_engine(ours.url)
    refused = pytest.raises(ConfigurationError, match="2 binds to postgresql")
    with Session(binds={Order: ours, Metric: second}) as session, refused:
        await claim_and_order(postgres, session)
    second.dispose()


# Schemas


@pytest.fixture
async def schema(postgres: World) -> AsyncIterator[str]:
    async with postgres.engine.begin() as connection:
        await connection.execute(text("create schema infra"))
    yield "infra"
    async with postgres.engine.begin() as connection:
        await connection.execute(text("drop schema infra cascade"))


async def claims_in(world: World, table: str) -> list[str]:
    return [str(each) for each in await world.column(f"select logical_id from {table}")]


@pytest.mark.parametrize("name", ["app_dedup_claims", "Claims of the app"])
async def test_the_table_has_the_name_and_the_schema_that_the_app_gives_it(
    postgres: World, schema: str, ours: Engine, name: str
) -> None:
    async with Dedup(postgres.engine, create_table=True, reap_every=None, table=name, schema=schema) as dedup:
        with Session(ours) as session:
            async with dedup.claim("news", scope="tests", session=session):
                session.add(Order(sku="news"))
            session.commit()
        async with dedup.claim("more", scope="tests"):
            pass
        assert await claims_in(postgres, f'{schema}."{name}"') == ["news", "more"]
        assert await dedup.release("news", scope="tests")
        assert await claims_in(postgres, f'{schema}."{name}"') == ["more"]
    assert await postgres.ids() == []


@pytest.mark.parametrize("given", ["an engine", "a sessionmaker"])
@pytest.mark.parametrize("named", [None, "dedup"])
async def test_the_engines_schema_translate_map_says_where_the_claims_are(
    postgres: World, schema: str, named: str | None, given: str
) -> None:
    translated = postgres.engine.execution_options(schema_translate_map={named: schema, schema: "nowhere"})
    bind: Any = translated if given == "an engine" else async_sessionmaker(translated)
    async with Dedup(bind, create_table=True, reap_every=None, schema=named) as dedup:
        async with dedup.claim("own", scope="tests"):
            pass
        async with AsyncSession(postgres.engine) as session:
            async with dedup.claim("borrowed", scope="tests", session=session):
                pass
            await session.commit()
        assert await claims_in(postgres, f"{schema}.dedup_claims") == ["own", "borrowed"]
        assert await dedup.reap() == 0
        assert await dedup.release("own", scope="tests")
        assert await claims_in(postgres, f"{schema}.dedup_claims") == ["borrowed"]
    assert await postgres.ids() == []


async def test_a_missing_table_is_named_where_it_is_looked_for(postgres: World, schema: str) -> None:
    translated = postgres.engine.execution_options(schema_translate_map={None: schema})
    with pytest.raises(ConfigurationError, match=r"infra\.dedup_claims"):
        await Dedup(translated, reap_every=None).start()


async def test_a_sessions_own_schema_translate_map_moves_its_tables_and_no_claims(
    postgres: World, schema: str, ours: Engine
) -> None:
    # One table of claims for all tenants: the reaper and releases know no session's map.
    with ours.begin() as connection:
        connection.execute(text(f"create table {schema}.orders (like public.orders including all)"))
    with Session(ours) as session:
        session.connection(execution_options={"schema_translate_map": {None: schema}})
        async with postgres.dedup.claim("news", scope=("tests", schema), session=session):
            session.add(Order(sku="a tenant's"))
        session.commit()
    assert await postgres.ids() == ["news"]
    assert await postgres.orders() == []
    assert await postgres.column(f"select sku from {schema}.orders") == ["a tenant's"]


# Places


SAME = [
    ("postgresql+asyncpg://a@localhost/shop", "postgresql+psycopg://b@127.0.0.1:5432/shop"),
    ("postgresql+asyncpg:///shop", "postgresql+psycopg2:///shop?host=/var/run/postgresql"),
    ("postgresql+asyncpg://DB.example/shop", "postgresql+psycopg://db.example:5432/shop"),
    ("mysql+asyncmy://a@localhost/shop", "mariadb+pymysql://a@localhost:3306/shop"),
    ("sqlite+aiosqlite:///shop.db", f"sqlite:///{Path.cwd()}/shop.db"),
]
DIFFERENT = [
    ("postgresql+asyncpg://a@localhost/shop", "postgresql+psycopg://a@localhost/other"),
    ("postgresql+asyncpg://a@localhost/shop", "postgresql+psycopg://a@localhost:6432/shop"),
    ("postgresql+asyncpg://a@one/shop", "postgresql+psycopg://a@two/shop"),
    ("postgresql+asyncpg:///shop?host=one", "postgresql+psycopg:///shop?host=two"),
    ("postgresql+asyncpg:///shop?host=one:1&host=two:2", "postgresql+psycopg:///shop?host=one:1"),
    ("postgresql+asyncpg://localhost:3306/shop", "mysql+pymysql://localhost:3306/shop"),
    ("sqlite+aiosqlite:///shop.db", "sqlite:///other.db"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_two_drivers_urls_of_one_database_are_one_place(first: str, second: str) -> None:
    assert _place_of(make_url(first)) == _place_of(make_url(second))


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_two_databases_are_two_places(first: str, second: str) -> None:
    assert _place_of(make_url(first)) != _place_of(make_url(second))


async def test_an_engine_with_options_is_the_engine_that_it_was_made_of(
    postgres: World, ours: Engine
) -> None:
    # One per request, as some apps make them, must not leave listeners behind.
    for number in range(3):
        with Session(ours.execution_options(isolation_level="READ COMMITTED")) as session:
            async with postgres.dedup.claim(str(number), scope="tests", session=session) as claim:
                assert isinstance(claim, Claim)
            session.commit()
    store = postgres.dedup._store
    assert {dialect.driver for dialect in store._spoken} == {"asyncpg", "psycopg"}
    assert len(store._spoken) == 2
