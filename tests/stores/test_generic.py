"""The generic dialect: what it says to databases that no test has, and what it makes of unknown ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import MetaData, event, text
from sqlalchemy.dialects import mssql, oracle, postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.schema import CreateIndex, CreateTable

from fastapi_dedup import Claim, ConfigurationError, Dedup, StoreUnavailableError
from fastapi_dedup.claims import Duplicate, InFlight, Lease
from fastapi_dedup.stores import undone as undone_by
from fastapi_dedup.stores.codes import Kind, kind
from fastapi_dedup.stores.dialects.generic import Generic
from fastapi_dedup.stores.sql import SqlStore
from fastapi_dedup.tables import claims_table
from tests.databases import engine_on
from tests.stores.promises import BACKENDS, Promise
from tests.stores.worlds import SOON, World, intent

NEWS = intent("news")
NOON = datetime(2031, 7, 1, 12)  # noqa: DTZ001 - as UTC_TIMESTAMP and its like give it


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on some of the backends."""
    chosen = [pytest.param(backend, id=backend.name) for backend in BACKENDS if backend.name in names]
    assert len(chosen) == len(names)
    return pytest.mark.parametrize("backend", chosen, indirect=True)


on_both = on("asyncpg-generic", "asyncmy-generic")


# Databases that no test has: what would be sent to them


class Scribe:
    """A connection that writes down what it is to send, in a dialect's words, and answers as it is told."""

    def __init__(self, dialect: Dialect, *, found: bool) -> None:
        self.sent: list[str] = []
        self._dialect = dialect
        self._found = found

    def execute(self, statement: Any, _values: object = None) -> Any:
        compiled = statement.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
        self.sent.append(" ".join(str(compiled).split()))
        at = NOON if self._found else None
        row = SimpleNamespace(
            moment=NOON, claimed_at=at, expires_at=at, leased_until=None, fingerprint=None, key=b"k"
        )
        return SimpleNamespace(
            one=lambda: row,
            rowcount=1,
            scalar_one=lambda: NOON,
            scalars=lambda: SimpleNamespace(all=lambda: [b"k"]),
        )

    def exec_driver_sql(self, statement: str) -> Any:
        self.sent.append(statement)
        return SimpleNamespace(scalar=lambda: "0")

    @contextmanager
    def begin_nested(self) -> Iterator[None]:
        self.sent.append("SAVEPOINT")
        yield


def dialect_of(name: str) -> Dialect:
    """Return SQLAlchemy's dialect; CockroachDB's own is PostgreSQL's with another name."""
    modules: dict[str, Any] = {"mssql": mssql, "oracle": oracle, "cockroachdb": postgresql}
    dialect: Dialect = modules[name].dialect()
    dialect.name = name
    return dialect


def everything(dialect: Dialect) -> list[str]:
    """Return all that the generic dialect sends."""
    generic = Generic(claims_table(MetaData()), dialect)
    sent: list[str] = []
    leased = intent("news", lease=Lease(timedelta(minutes=1)))
    for found in (False, True):
        scribe: Any = Scribe(dialect, found=found)
        for wanted in (NEWS, leased):
            generic.claim(scribe, wanted, b"t" * 16)
        generic.look(scribe, NEWS)
        generic.holds(scribe, NEWS.key, b"t" * 16)
        generic.renew(scribe, NEWS, b"t" * 16)
        generic.extend(scribe, NEWS.key, b"t" * 16, timedelta(minutes=1))
        generic.complete(scribe, leased, b"t" * 16)
        generic.release(scribe, NEWS.key, b"t" * 16)
        generic.release(scribe, NEWS.key, None)
        generic.reap(scribe, 1000)
        sent += scribe.sent
    return [*dict.fromkeys(sent)]


@pytest.mark.parametrize("name", ["mssql", "oracle", "cockroachdb"])
def test_every_statement_compiles(name: str) -> None:
    sent = everything(dialect_of(name))
    verbs = [statement.split()[0] for statement in sent]
    assert {*verbs} >= {"SELECT", "SAVEPOINT", "INSERT", "UPDATE", "DELETE"}
    assert not [statement for statement in sent if "POSTCOMPILE" in statement]


def ddl(dialect: Dialect) -> str:
    table = claims_table(MetaData())
    (index,) = table.indexes
    made = (CreateTable(table).compile(dialect=dialect), CreateIndex(index).compile(dialect=dialect))
    return " ".join(" ".join(map(str, made)).split())


def test_the_table_on_sql_server() -> None:
    # VARBINARY(max), which is what bytes are by default, can be in no index; `key` is a reserved word
    assert ddl(dialect_of("mssql")) == (
        "CREATE TABLE dedup_claims ( [key] BINARY(32) NOT NULL, scope NVARCHAR(max) NOT NULL, "
        "logical_id NVARCHAR(max) NOT NULL, token BINARY(16) NOT NULL, fingerprint BINARY(32) NULL, "
        "claimed_at DATETIMEOFFSET(6) NOT NULL, expires_at DATETIMEOFFSET(6) NOT NULL, "
        "leased_until DATETIMEOFFSET(6) NULL, PRIMARY KEY ([key]) ) "
        "CREATE INDEX ix_dedup_claims_expires_at ON dedup_claims (expires_at)"
    )


def test_the_table_on_oracle() -> None:
    # BLOB can be in no index, and DATE counts whole seconds
    assert ddl(dialect_of("oracle")) == (
        "CREATE TABLE dedup_claims ( key RAW(32) NOT NULL, scope CLOB NOT NULL, logical_id CLOB NOT NULL, "
        "token RAW(16) NOT NULL, fingerprint RAW(32), claimed_at TIMESTAMP WITH TIME ZONE NOT NULL, "
        "expires_at TIMESTAMP WITH TIME ZONE NOT NULL, leased_until TIMESTAMP WITH TIME ZONE, "
        "PRIMARY KEY (key) ) CREATE INDEX ix_dedup_claims_expires_at ON dedup_claims (expires_at)"
    )


def one(sent: list[str], start: str) -> str:
    return next(statement for statement in sent if statement.startswith(start))


def test_sql_server_is_asked_by_its_own_clock_past_the_locks_of_others() -> None:
    sent = everything(dialect_of("mssql"))
    look = one(sent, "SELECT clock.moment")
    assert "(SELECT CAST(sysutcdatetime() AS DATETIME2(6)) AS moment) AS clock" in look
    assert "LEFT OUTER JOIN dedup_claims WITH (READCOMMITTEDLOCK, READPAST) ON dedup_claims.[key] =" in look
    assert "SELECT TOP 1000 dedup_claims.[key] FROM dedup_claims WITH (UPDLOCK," in one(sent, "SELECT TOP")
    assert "todatetimeoffset(CAST(:" in one(sent, "INSERT")
    assert "LIMIT" not in " ".join(sent)


def test_oracle_is_asked_by_its_own_clock_in_utc() -> None:
    sent = everything(dialect_of("oracle"))
    look = one(sent, "SELECT clock.moment")
    assert "(SELECT sys_extract_utc(SYSTIMESTAMP) AS moment FROM DUAL) clock" in look
    assert "sys_extract_utc(dedup_claims.expires_at) AS expires_at" in look
    reaping = one(sent, "SELECT dedup_claims.key")
    assert reaping.endswith("FOR UPDATE SKIP LOCKED")
    assert "ROWNUM <= :" in reaping
    assert "FETCH FIRST" not in reaping  # ORA-02014: not with FOR UPDATE
    assert "from_tz(CAST(:" in one(sent, "INSERT")
    assert one(sent, "SELECT sys_extract_utc(SYSTIMESTAMP)").endswith("FROM DUAL")


# What the drivers of those databases say


class OdbcError(Exception):
    """As pyodbc's: a SQLSTATE, and a text."""


class PymssqlError(Exception):
    """As pymssql's: a number, and a text."""

    __module__ = "pymssql.exceptions"


class OracleError(Exception):
    """As oracledb's: an object with a number."""

    __module__ = "oracledb.exceptions"


class MysqlError(Exception):
    """As PyMySQL's."""

    __module__ = "pymysql.err"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OdbcError("23000", "[23000] Verletzung der PRIMARY KEY-Einschränkung (2627)"), Kind.INTEGRITY),
        (OdbcError("40001", "[40001] Deadlock (1205)"), Kind.BUSY),
        (OdbcError("42S02", "[42S02] Ungültiger Objektname (208)"), Kind.MISSING_TABLE),
        (OdbcError("42000", "[42000] duplicate key unique constraint 23000 (2627)"), None),
        (PymssqlError(2627, b"Verletzung"), Kind.DUPLICATE),
        (PymssqlError(2601, b"Verletzung"), Kind.DUPLICATE),
        (PymssqlError(547, b"duplicate key 2627"), None),
        (PymssqlError(3960, b""), Kind.BUSY),
        (OracleError(SimpleNamespace(code=1, message="ORA-00001: Eindeutigkeit")), Kind.DUPLICATE),
        (OracleError(SimpleNamespace(code=1400, message="ORA-00001")), None),
        (OracleError(SimpleNamespace(code=8177, message="")), Kind.BUSY),
        (OracleError(SimpleNamespace(code=942, message="")), Kind.MISSING_TABLE),
        (MysqlError(1062, "Doppelter Eintrag"), Kind.DUPLICATE),
        (MysqlError(1452, "Duplicate entry 1062"), None),
        (MysqlError(), None),
    ],
)
def test_an_error_is_told_by_its_code_and_never_by_its_text(error: Exception, expected: Kind | None) -> None:
    # case G9
    assert kind(DBAPIError("", None, error)) is expected


def test_a_driver_without_codes_is_believed_by_its_class() -> None:
    class Error(Exception):
        pass

    assert kind(IntegrityError("", None, Error("?"))) is Kind.INTEGRITY
    assert kind(DBAPIError("", None, Error("duplicate key"))) is None


@pytest.mark.parametrize(("state", "undone"), [("40001", True), ("40P01", True), ("23000", False)])
def test_an_error_of_the_class_of_rollbacks_has_undone_the_transaction(state: str, undone: bool) -> None:
    class Error(Exception):
        """As ODBC's drivers raise it."""

    connection: Any = SimpleNamespace(invalidated=False, info={}, dialect=SimpleNamespace(name="mssql"))
    error = DBAPIError("", None, Error(state, "?"))
    context: Any = SimpleNamespace(connection=connection, sqlalchemy_exception=error)
    undone_by._note(context)
    assert undone_by.has_failed(connection)
    assert undone_by.is_undone(connection) is undone


# A database that is not known


def stranger(world: World, name: str) -> Dedup:
    """Return a runtime that takes the world's database for one of another kind."""
    engine = engine_on(world.url)
    engine.sync_engine.dialect.name = name
    return world.runtime(engine=engine)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@on("asyncpg-generic")
@pytest.mark.parametrize("name", ["cockroachdb", "acme"])
async def test_an_unknown_database_gets_the_generic_dialect_and_a_warning(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dedup = stranger(world, name)
    await dedup.start()
    [warning] = warnings(caplog)
    assert "generic" in warning
    assert "where its statements were compiled and never run" in warning
    assert Promise.SEES_TWINS_ELSEWHERE.otherwise in warning
    assert world.url.split("@")[1] in warning
    assert isinstance(await world.run(NEWS, dedup), Claim)
    assert isinstance(await world.run(NEWS, dedup), Duplicate)
    assert isinstance(await world.run(NEWS), Duplicate)
    await world.expire(NEWS)
    assert await dedup.reap() == 1


@on_both
async def test_the_start_leaves_nothing_behind_and_says_what_is_not_promised(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.dedup.start()
    assert await world.rows() == []
    [warning] = warnings(caplog)
    for promise in Promise:
        assert (promise.otherwise in warning) == (promise not in world.backend)
    assert "never run" not in warning


@on("asyncpg-generic")
async def test_a_database_that_enforces_no_key_is_refused_at_start(world: World) -> None:
    await world.execute("alter table dedup_claims drop constraint dedup_claims_pkey")
    with pytest.raises(ConfigurationError, match="lets the same claim be made twice"):
        await world.dedup.start()


@on("asyncmy-generic")
async def test_a_database_that_cannot_roll_back_is_refused_at_start(world: World) -> None:
    await world.execute("alter table dedup_claims engine = MyISAM")
    with pytest.raises(ConfigurationError, match="a rollback undoes no claim"):
        await world.dedup.start()


@on("asyncmy-generic")
async def test_a_database_that_shows_what_is_not_committed_is_refused_at_start(world: World) -> None:
    dedup = world.runtime(engine=engine_on(world.url, isolation_level="READ UNCOMMITTED"))
    with pytest.raises(ConfigurationError, match="READ UNCOMMITTED"):
        await dedup.start()


@on("asyncpg", "asyncmy", "sqlite")
async def test_a_database_with_a_dialect_of_its_own_alarms_nobody(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fastapi_dedup"):
        await world.dedup.start()
    assert warnings(caplog) == []
    told = [record.getMessage() for record in caplog.records if "does not promise" in record.getMessage()]
    assert len(told) == any(promise not in world.backend for promise in Promise)


@on("sqlite")
async def test_one_of_several_workers_on_sqlite_is_warned(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    await world.dedup.start()
    [warning] = warnings(caplog)
    assert Promise.SEES_TWINS_ELSEWHERE.otherwise in warning


def test_sqlite_is_served_by_its_own_dialect_only() -> None:
    with pytest.raises(ConfigurationError, match="SQLite"):
        Dedup("sqlite+aiosqlite:///x.db", dialect="generic")


def test_there_is_one_dialect_to_choose() -> None:
    engine = engine_on("sqlite+aiosqlite:///x.db")
    with pytest.raises(ConfigurationError, match="not 'postgresql'"):
        SqlStore(engine, claims_table(MetaData()), dialect="postgresql")


# Waiting for a twin elsewhere


@on("asyncpg-generic")
async def test_who_waits_for_a_twin_elsewhere_is_told_after_a_moment_that_it_is_in_flight(
    world: World,
) -> None:
    # case F2
    elsewhere = world.runtime()
    async with world.attempt() as first, asyncio.timeout(SOON):
        await first.claim(NEWS)
        began = time.monotonic()
        assert await world.run(NEWS, elsewhere) == InFlight()
        assert 0.9 < time.monotonic() - began < 5
        await first.delivery.succeed()
    assert isinstance(await world.run(NEWS, elsewhere), Duplicate)


@on("asyncpg-generic")
async def test_an_app_that_bounds_its_waits_itself_keeps_its_bound(world: World) -> None:
    # case F2
    elsewhere = world.runtime()
    async with world.attempt() as first, world.attempt(elsewhere) as twin, asyncio.timeout(SOON):
        await first.claim(NEWS)
        await twin.session.execute(text("set local lock_timeout = '50ms'"))
        began = time.monotonic()
        assert await twin.claim(NEWS) == InFlight()
        assert time.monotonic() - began < 0.9
        assert await twin.session.scalar(text("show lock_timeout")) == "50ms"
        assert isinstance(await twin.claim(intent("other")), Claim)
        assert await twin.session.scalar(text("show lock_timeout")) == "50ms"


@on("asyncpg-generic")
async def test_the_bound_is_gone_when_the_handler_goes_on(world: World) -> None:
    # case F2
    async with world.attempt() as attempt:
        assert isinstance(await attempt.claim(NEWS), Claim)
        assert await attempt.session.scalar(text("show lock_timeout")) == "0"


# Only our own key


@on("asyncpg-generic")
@pytest.mark.parametrize("code", ["unique_violation", "raise_exception", "check_violation"])
async def test_what_a_trigger_of_the_apps_raises_is_no_duplicate(world: World, code: str) -> None:
    # case G9
    await world.execute(f"""
        create function refuse() returns trigger language plpgsql as
        $$ begin raise exception 'duplicate key, unique constraint' using errcode = '{code}'; end $$
    """)
    await world.execute(
        "create trigger refuse before insert on dedup_claims for each row execute function refuse()"
    )
    try:
        with pytest.raises(StoreUnavailableError) as raised:
            await world.run(NEWS)
        assert isinstance(raised.value.__cause__, DBAPIError)
    finally:
        await world.execute("drop function refuse cascade")
    await world.claimed(NEWS)


@on_both
async def test_a_collision_that_the_snapshot_hides_costs_the_caller_nothing(world: World) -> None:
    # case F3
    async with world.session() as session, asyncio.timeout(SOON):
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        await session.execute(text("insert into orders (sku) values ('before')"))
        await session.execute(text("select count(*) from dedup_claims"))
        await world.claimed(NEWS)
        failures: list[object] = []
        event.listen(world.dedup.engine.sync_engine, "handle_error", failures.append)
        told = await world.claim_in(session)
        await session.commit()
    assert told is not Claim
    assert failures  # the unique key has spoken, and only the store has heard it
    assert (await world.orders(), await world.count()) == (["before", "news"], 1)
