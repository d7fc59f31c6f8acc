"""The stores that the suite runs over, as data: it branches on this, and never skips without saying why.

What a store promises is its dialect's own word; what is tested holds for whoever gives it. A store that joins
adds one line to `BACKENDS` and one kind of `World`; no scenario names a backend.
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

__all__ = ["BACKENDS", "Backend", "Promise"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A database, how we speak to it, and what it promises.

    Attributes:
        name: What the tests call it.
        database: Its name in `tests.databases`.
        dialect: Whose statements are run there.
        keeps: What it promises.
        app_engine: Whether the engine is the app's, as `tests.databases.engine_on` makes it; else
            `Dedup(url)` makes it.
        options: What else `Dedup` is told.
        claiming: The first words of the statements that a claim costs.
        reaps_fast: Whether a batch of the reaper's is a statement or two; else each claim is deleted by one.
        tick: The smallest step of its clock.
    """

    name: str
    database: str
    dialect: type[Dialect]
    keeps: frozenset[Promise]
    app_engine: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    claiming: tuple[str, ...]
    reaps_fast: bool = True
    tick: timedelta = timedelta(microseconds=1)

    def __contains__(self, promise: Promise) -> bool:
        return promise in self.keeps


_POSTGRESQL: Mapping[str, Any] = {"dialect": PostgreSQL, "keeps": PostgreSQL.keeps, "claiming": ("WITH",)}
_MARIADB: Mapping[str, Any] = {"dialect": MySQL, "keeps": MySQL.keeps, "claiming": ("SELECT", "INSERT")}
_SQLITE: Mapping[str, Any] = {
    "database": "sqlite",
    "dialect": SQLite,
    "keeps": SQLite.keeps,
    "claiming": ("SELECT", "BEGIN", "INSERT"),
    "tick": timedelta(milliseconds=1),
}
_GENERIC: Mapping[str, Any] = {
    "dialect": Generic,
    "options": {"dialect": "generic"},
    "reaps_fast": False,
}

BACKENDS = (
    Backend(name="asyncpg", database="asyncpg", **_POSTGRESQL),
    Backend(name="psycopg", database="psycopg", **_POSTGRESQL),
    Backend(name="asyncpg-pgbouncer", database="asyncpg+pgbouncer", app_engine=True, **_POSTGRESQL),
    Backend(name="psycopg-pgbouncer", database="psycopg+pgbouncer", app_engine=True, **_POSTGRESQL),
    Backend(name="sqlite", **_SQLITE),
    Backend(name="sqlite-app-engine", app_engine=True, **_SQLITE),
    Backend(name="asyncmy", database="asyncmy", **_MARIADB),
    Backend(name="aiomysql", database="aiomysql", **_MARIADB),
    Backend(
        name="asyncpg-generic",
        database="asyncpg",
        keeps=habits_of("postgresql").keeps,
        claiming=("SELECT", "SAVEPOINT", "SHOW", "SET", "INSERT", "SET", "RELEASE"),
        **_GENERIC,
    ),
    Backend(
        name="asyncmy-generic",
        database="asyncmy",
        keeps=habits_of("mysql").keeps,
        claiming=("SELECT", "SAVEPOINT", "INSERT", "RELEASE"),
        **_GENERIC,
    ),
)
