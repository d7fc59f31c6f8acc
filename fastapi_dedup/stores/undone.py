"""What a failed statement has left of its transaction, where the app takes no notice of the error.

PostgreSQL answers the COMMIT of an aborted transaction with ROLLBACK, and no driver calls that an error.
MySQL rolls the whole transaction back on a deadlock, SQLite on a full disk or ON CONFLICT ROLLBACK, and both
let the next statement begin a new one. An app that swallows the error would be told of a success. So what
failed is noted, and looked at before the COMMIT.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from sqlalchemy import event, exc

from fastapi_dedup.stores.codes import number_of, sqlstate
from fastapi_dedup.stores.dialects.sqlite import is_open
from fastapi_dedup.stores.engines import root_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

__all__ = ["has_failed", "is_undone", "note_failures"]

_FAILED = "fastapi_dedup.failed"
_OPEN = "fastapi_dedup.open"


class _Extent(enum.IntEnum):
    """How much a failed statement has undone; of several, the one that may have undone the most counts."""

    ITSELF = 1  # or the transaction is aborted, and says so to the next statement
    TIMEOUT = 2  # what innodb_rollback_on_timeout says
    ALL = 3


def note_failures(engine: Engine) -> None:
    """Note on each connection of an engine that a statement failed, and what it undid, until the next BEGIN.

    Args:
        engine: The engine, or one that was made of it. It may be noted already.
    """
    engine = root_of(engine)
    # Asked of an event of the engine's own. `handle_error` is its dialect's, which may outlive it, and then a
    # new engine at the same address would pass for the old one.
    if not event.contains(engine, "begin", _begins):
        event.listen(engine, "handle_error", _note)
        event.listen(engine, "begin", _begins)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "before_cursor_execute", _look_whether_open)


def has_failed(connection: Connection) -> bool:
    """Tell whether a statement has failed in a connection's transaction."""
    return connection.invalidated or _FAILED in connection.info


def is_undone(connection: Connection) -> bool:
    """Tell whether the database has rolled all of a connection's transaction back, and maybe begun a new one.

    One that is aborted, and refuses each statement, is not told here. One whose connection was lost is.
    """
    if connection.invalidated:
        return True
    extent = connection.info.get(_FAILED)
    if extent is _Extent.TIMEOUT:
        return bool(connection.exec_driver_sql("SELECT @@innodb_rollback_on_timeout").scalar())
    return extent is _Extent.ALL


def _begins(connection: Connection) -> None:
    connection.info.pop(_FAILED, None)


def _look_whether_open(connection: Connection, *_: object) -> None:
    connection.info[_OPEN] = is_open(connection)


def _note(context: ExceptionContext) -> None:
    connection, error = context.connection, context.sqlalchemy_exception
    if connection is None or connection.invalidated:
        return
    extent = _Extent.ITSELF
    if isinstance(error, exc.DBAPIError):
        extent = _EXTENTS.get(connection.dialect.name, _of_any_other)(connection, error)
    connection.info[_FAILED] = max(extent, connection.info.get(_FAILED, extent))


def _of_postgresql(_: Connection, __: exc.DBAPIError) -> _Extent:
    return _Extent.ITSELF


_DEADLOCK = 1213
_LOCK_WAIT_TIMEOUT = 1205
_LOCK_TABLE_FULL = 1206
_CHANGED_BEHIND_THE_SNAPSHOT = 1020  # MariaDB, where innodb_snapshot_isolation is on


def _of_mysql(_: Connection, error: exc.DBAPIError) -> _Extent:
    number = number_of(error)
    if number == _LOCK_WAIT_TIMEOUT:
        return _Extent.TIMEOUT
    undoes_all = number in {_DEADLOCK, _LOCK_TABLE_FULL, _CHANGED_BEHIND_THE_SNAPSHOT}
    return _Extent.ALL if undoes_all else _Extent.ITSELF


def _of_sqlite(connection: Connection, _: exc.DBAPIError) -> _Extent:
    """Look whether a transaction is gone that was open before: what may do that is no fixed list."""
    gone = connection.info.get(_OPEN) and not is_open(connection)
    return _Extent.ALL if gone else _Extent.ITSELF


def _of_any_other(_: Connection, error: exc.DBAPIError) -> _Extent:
    """Go by the standard: the errors of class 40 are transactions that were rolled back."""
    return _Extent.ALL if (sqlstate(error) or "").startswith("40") else _Extent.ITSELF


_EXTENTS: dict[str, Callable[[Connection, exc.DBAPIError], _Extent]] = {
    "cockroachdb": _of_postgresql,
    "mariadb": _of_mysql,
    "mysql": _of_mysql,
    "oracle": _of_postgresql,  # a deadlock, and a snapshot that is too old, undo the statement
    "postgresql": _of_postgresql,
    "sqlite": _of_sqlite,
}
