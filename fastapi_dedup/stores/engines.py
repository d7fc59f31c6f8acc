"""From what `Dedup(...)` is given to an engine: URLs, drivers, the embedded default."""

from __future__ import annotations

import logging
import os
from typing import Any

from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.dialects import sqlite

__all__ = ["DATABASE_URL_VARIABLE", "bound", "root_of"]

logger = logging.getLogger("fastapi_dedup")

DATABASE_URL_VARIABLE = "FASTAPI_DEDUP_DATABASE_URL"
EMBEDDED_URL = "sqlite+aiosqlite:///fastapi_dedup.db"
_BUSY_TIMEOUT = 30.0

# Which drivers serve a URL that names none, and the extra that brings each.
_DRIVERS = {
    "postgresql": (("asyncpg", "postgresql"), ("psycopg", "psycopg")),
    "sqlite": (("aiosqlite", "sqlite"),),
    "mysql": (("asyncmy", "asyncmy"), ("aiomysql", "aiomysql")),
    "mariadb": (("asyncmy", "asyncmy"), ("aiomysql", "aiomysql")),
}


def bound(
    bind: str | URL | AsyncEngine | async_sessionmaker[Any] | None,
) -> tuple[async_sessionmaker[Any], AsyncEngine, bool]:
    """Return what opens sessions, the engine behind it, and whether the engine is ours to dispose of."""
    if isinstance(bind, async_sessionmaker):
        engine = bind.kw.get("bind")
        if not isinstance(engine, AsyncEngine):
            msg = "the async_sessionmaker has no AsyncEngine as its bind: give Dedup(...) the engine itself"
            raise ConfigurationError(msg)
        return bind, engine, False
    if isinstance(bind, AsyncEngine):
        return async_sessionmaker(bind, expire_on_commit=False), bind, False
    if bind is None:
        bind = os.environ.get(DATABASE_URL_VARIABLE) or EMBEDDED_URL
        logger.info("claims are kept in %s", make_url(bind).render_as_string())
    if not isinstance(bind, str | URL):
        msg = (
            f"Dedup(...) takes a URL, an AsyncEngine or an async_sessionmaker, not {type(bind).__name__}: "
            "a synchronous engine becomes one with create_async_engine(url)"
        )
        raise ConfigurationError(msg)
    engine = _engine(bind)
    return async_sessionmaker(engine, expire_on_commit=False), engine, True


def _engine(bind: str | URL) -> AsyncEngine:
    try:
        url = make_url(bind)
    except ArgumentError as error:
        msg = f"{DATABASE_URL_VARIABLE} or the URL given to Dedup(...) is no database URL: {error}"
        raise ConfigurationError(msg) from error
    backend = url.get_backend_name()
    candidates = _DRIVERS.get(backend, ())
    if "+" not in url.drivername and candidates:
        url = _with_driver(url, backend)
    try:
        engine = create_async_engine(url)
    except ImportError as error:
        hints = " or ".join(f"'fastapi-dedup[{extra}]'" for _, extra in candidates) or "the driver"
        msg = f"the driver of {url.drivername} is not installed: pip install {hints}"
        raise ConfigurationError(msg) from error
    except Exception as error:
        msg = f"SQLAlchemy makes no asynchronous engine of {url.render_as_string()}: {error}"
        raise ConfigurationError(msg) from error
    if backend == "sqlite":
        sqlite.prepare_engine(engine.sync_engine, busy_timeout=_BUSY_TIMEOUT)
    return engine


def _with_driver(url: URL, backend: str) -> URL:
    """Return a URL that names no driver with the first asynchronous one that is installed."""
    for driver, _ in _DRIVERS[backend]:
        named = url.set(drivername=f"{backend}+{driver}")
        try:
            named.get_dialect().import_dbapi()
        except ImportError:
            continue
        return named
    return url.set(drivername=f"{backend}+{_DRIVERS[backend][0][0]}")


def root_of(engine: Engine) -> Engine:
    """Return the engine that an engine with execution options was made of: events on it reach both."""
    inner = getattr(engine, "_proxied", None)
    return root_of(inner) if isinstance(inner, Engine) else engine
