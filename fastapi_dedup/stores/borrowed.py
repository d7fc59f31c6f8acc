"""Which session or connection of the app's is which kind of transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import ThreadLocalRegistry

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.connections import AsyncCoreConnection, CoreConnection
from fastapi_dedup.stores.drivers import DriverTransaction, driver_of, is_drivers
from fastapi_dedup.stores.homes import Home
from fastapi_dedup.stores.riding import RidingTransaction
from fastapi_dedup.stores.transactions import BorrowedSession, SyncSession

__all__ = ["borrowed", "is_session"]

_SCOPED = (async_scoped_session, scoped_session)
_SQLALCHEMY = (AsyncSession, Session, AsyncConnection, Connection, *_SCOPED)


def borrowed(session: Any, home: Home, *, lent: bool = False) -> RidingTransaction:
    """Return the transaction of a session or connection of the app's.

    Args:
        session: The session or connection.
        home: Where the claims live.
        lent: Whether it may be given back as soon as the handler's work is done, as by a dependency's exit.

    Raises:
        ConfigurationError: A claim cannot ride that.
    """
    current = _current(session) if isinstance(session, _SCOPED) else session
    match current:
        case AsyncSession():
            return BorrowedSession(current, session, home)
        case Session():
            return SyncSession(current, session, home)
        case AsyncConnection():
            return AsyncCoreConnection(current, home)
        case Connection():
            return CoreConnection(current, home)
    if (driver := driver_of(current)) is not None:
        return DriverTransaction(driver, current, home, lent=lent)
    kind = type(session)
    msg = (
        f"a claim cannot ride a {kind.__module__}.{kind.__qualname__}: session= must give an AsyncSession or "
        "Session (SQLAlchemy's or SQLModel's, scoped or not), a SQLAlchemy AsyncConnection or Connection, an "
        "asyncpg Connection, or a psycopg AsyncConnection"
    )
    raise ConfigurationError(msg)


def is_session(kind: type) -> bool:
    """Tell whether a class is one of those that `borrowed` takes."""
    return issubclass(kind, _SQLALCHEMY) or is_drivers(kind)


def _current(scoped: async_scoped_session[Any] | scoped_session[Any]) -> Any:
    """Return the session that a scoped one stands for in this request."""
    if isinstance(scoped.registry, ThreadLocalRegistry):
        msg = (
            "a scoped_session without scopefunc is one per thread, and requests share threads, so the "
            "handler may get another session than the claim: give it a scopefunc, such as the get of a "
            "ContextVar that is set per request, or hand the session itself over"
        )
        raise ConfigurationError(msg)
    return scoped.registry()
