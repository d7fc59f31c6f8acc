"""The stores that the suite runs over, as data: it branches on this, and never skips without saying why.

What a store promises is its dialect's own word; what is tested holds for whoever gives it. A store that joins
adds one line to `BACKENDS` and one kind of `World`; no scenario names a backend. The documentation's table of
databases is made of this too: `python -m tests.docs.support` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fastapi_dedup.stores.dialects.generic import Generic
from fastapi_dedup.stores.dialects.habits import habits_of
from fastapi_dedup.stores.dialects.mysql import MySQL
from fastapi_dedup.stores.dialects.postgresql import PostgreSQL
from fastapi_dedup.stores.dialects.sqlite import SQLite
from fastapi_dedup.stores.promises import Promise
from fastapi_dedup.stores.sql import Dialect

__all__ = ["BACKENDS", "COMPILED", "LEASING", "SLICE", "Backend", "Elsewhere", "Promise", "Store"]


@dataclass(frozen=True, kw_only=True)
class Store:
    """What the documentation says of a store.

    Attributes:
        title: The database, and how it is reached.
        floor: The oldest version that has what the statements need; () where none is known.
        run_on: The versions that the whole suite was run on; () where it never was.
        instead: What was done instead.
        drivers: The drivers, where no backend of the suite tells.
        keeps: What it promises.
        lacks: Promises that are about what there is not in it.
    """

    title: str
    floor: tuple[int, ...] = ()
    run_on: tuple[str, ...] = ()
    instead: str = "not run: compiled"
    drivers: str = "any asynchronous one of SQLAlchemy's"
    keeps: frozenset[Promise]
    lacks: frozenset[Promise] = frozenset()


POSTGRESQL = Store(title="PostgreSQL", floor=(12,), run_on=("15.20", "18.6"), keeps=PostgreSQL.keeps)
PGBOUNCER = Store(
    title="PostgreSQL through pgbouncer (transaction mode)",
    floor=(12,),
    run_on=("15.20 behind 1.18.0",),
    keeps=PostgreSQL.keeps,
)
MARIADB = Store(title="MariaDB", floor=(10, 6), run_on=("10.11.19",), keeps=MySQL.keeps)
MYSQL = Store(
    title="MySQL",
    floor=(8, 0),
    instead="not run: gets MariaDB's statements",
    drivers="asyncmy, aiomysql",
    keeps=MySQL.keeps,
)
SQLITE = Store(title="SQLite", floor=(3, 35), run_on=("3.40.1",), keeps=SQLite.keeps)
GENERIC_POSTGRESQL = Store(
    title='PostgreSQL, `dialect="generic"`', run_on=("15.20", "18.6"), keeps=habits_of("postgresql").keeps
)
GENERIC_MARIADB = Store(
    title='MariaDB, `dialect="generic"`', run_on=("10.11.19",), keeps=habits_of("mariadb").keeps
)
COMPILED = (
    MYSQL,
    Store(title="SQL Server", keeps=habits_of("mssql").keeps),
    Store(title="Oracle", keeps=habits_of("oracle").keeps),
    Store(title="CockroachDB", keeps=habits_of("cockroachdb").keeps),
    Store(title="any other", instead="not run: tried out at start-up", keeps=habits_of("any other").keeps),
)
"""The stores whose statements no test has run."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A place for leased claims that is not the handler's database.

    The COMMIT of the work asks it for the lease, and completing follows; riding claims of the same id are not
    known there; the server deletes what has expired.

    Attributes:
        fixture: What gives its URL.
        store: What the documentation says of it, and what it promises.
        driver: The client, and how to install it.
    """

    fixture: str
    store: Store
    driver: str


_ABOUT_TABLES = frozenset({Promise.FREE_WITH_SAVEPOINT, Promise.SNAPSHOTS, Promise.NAMES_A_MISSING_TABLE})
REDIS = Elsewhere(
    fixture="redis_url",
    store=Store(
        title="Redis (leased claims only)",
        floor=(5,),
        run_on=("7.0.15",),
        keeps=frozenset(Promise) - _ABOUT_TABLES,
        lacks=_ABOUT_TABLES,
    ),
    driver="redis-py (`fastapi-dedup[redis]`)",
)
REDIS_CLUSTER = Elsewhere(
    fixture="redis_cluster_url",
    store=Store(
        title="Redis Cluster (leased claims only)",
        floor=(5,),
        run_on=("7.0.15, three masters",),
        keeps=frozenset(Promise) - _ABOUT_TABLES,
        lacks=_ABOUT_TABLES,
    ),
    driver="redis-py 7.2 (`fastapi-dedup[redis]`)",
)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A database, how we speak to it, and what it promises.

    Attributes:
        name: What the tests call it.
        database: Its name in `tests.databases`.
        store: What the documentation says of it, and what it promises.
        driver: The driver, and how to install it; "" where the documentation need not tell.
        dialect: Whose statements are run there.
        app_engine: Whether the engine is the app's, as `tests.databases.engine_on` makes it; else
            `Dedup(url)` makes it.
        options: What else `Dedup` is told.
        claiming: The first words of the statements that a claim costs.
        reaps_fast: Whether a batch of the reaper's is a statement or two; else each claim is deleted by one.
        tick: The smallest step of its clock.
        in_slices: Whether `make test` runs only the modules `SLICE` over it, and `make soak` the others.
        leases: Where leased claims are; None has them in the database.
    """

    name: str
    database: str
    store: Store
    driver: str = ""
    dialect: type[Dialect]
    app_engine: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    claiming: tuple[str, ...]
    reaps_fast: bool = True
    tick: timedelta = timedelta(microseconds=1)
    in_slices: bool = False
    leases: Elsewhere | None = None

    def __contains__(self, promise: Promise) -> bool:
        return promise in self.store.keeps


SLICE = {"test_claiming", "test_isolation", "test_statements", "test_transactions", "test_generic"}
"""The modules that every run has for every backend."""

_POSTGRESQL: Mapping[str, Any] = {"dialect": PostgreSQL, "claiming": ("WITH",)}
_PGBOUNCER: Mapping[str, Any] = {"store": PGBOUNCER, "app_engine": True, **_POSTGRESQL}
_MARIADB: Mapping[str, Any] = {"store": MARIADB, "dialect": MySQL, "claiming": ("SELECT", "INSERT")}
_SQLITE: Mapping[str, Any] = {
    "database": "sqlite",
    "store": SQLITE,
    "dialect": SQLite,
    "claiming": ("SELECT", "BEGIN", "INSERT"),
    "tick": timedelta(milliseconds=1),
}
_GENERIC: Mapping[str, Any] = {
    "dialect": Generic,
    "options": {"dialect": "generic"},
    "reaps_fast": False,
}
_ASYNCPG = "asyncpg (`fastapi-dedup[postgresql]`)"
_PSYCOPG = "psycopg 3 (`fastapi-dedup[psycopg]`)"
_ASYNCMY = "asyncmy (`fastapi-dedup[asyncmy]`)"

BACKENDS = (
    Backend(name="asyncpg", database="asyncpg", store=POSTGRESQL, driver=_ASYNCPG, **_POSTGRESQL),
    Backend(name="psycopg", database="psycopg", store=POSTGRESQL, driver=_PSYCOPG, **_POSTGRESQL),
    Backend(
        name="asyncpg-pgbouncer",
        database="asyncpg+pgbouncer",
        driver=_ASYNCPG,
        in_slices=True,
        **_PGBOUNCER,
    ),
    Backend(
        name="psycopg-pgbouncer",
        database="psycopg+pgbouncer",
        driver=_PSYCOPG,
        in_slices=True,
        **_PGBOUNCER,
    ),
    Backend(name="sqlite", driver="aiosqlite (comes with the package)", **_SQLITE),
    Backend(name="sqlite-app-engine", app_engine=True, in_slices=True, **_SQLITE),
    Backend(name="asyncmy", database="asyncmy", driver=_ASYNCMY, **_MARIADB),
    Backend(
        name="aiomysql",
        database="aiomysql",
        driver="aiomysql (`fastapi-dedup[aiomysql]`)",
        in_slices=True,
        **_MARIADB,
    ),
    Backend(
        name="asyncpg-generic",
        database="asyncpg",
        store=GENERIC_POSTGRESQL,
        driver=_ASYNCPG,
        claiming=("SELECT", "SAVEPOINT", "SHOW", "SET", "INSERT", "SET", "RELEASE"),
        in_slices=True,
        **_GENERIC,
    ),
    Backend(
        name="asyncmy-generic",
        database="asyncmy",
        store=GENERIC_MARIADB,
        driver=_ASYNCMY,
        claiming=("SELECT", "SAVEPOINT", "INSERT", "RELEASE"),
        in_slices=True,
        **_GENERIC,
    ),
)

LEASING = (
    *BACKENDS,
    Backend(name="redis", database="asyncpg", store=POSTGRESQL, leases=REDIS, **_POSTGRESQL),
    Backend(name="redis-cluster", leases=REDIS_CLUSTER, **{**_SQLITE, "tick": timedelta(microseconds=1)}),
)
"""Where leased claims can be: in the database, or elsewhere."""
