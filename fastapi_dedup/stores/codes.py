"""What a driver's error means, by its code and its class: never by its text, which is in any language."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from sqlalchemy import exc

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Kind", "kind", "number_of", "sqlstate"]


class Kind(enum.Enum):
    """What a failed statement tells a store."""

    DUPLICATE = "a unique key has that value already"
    INTEGRITY = "some constraint does not hold, perhaps a unique key: this driver does not tell which kind"
    BUSY = "others are at it: a lock, a deadlock, or a snapshot that is too old"
    MISSING_TABLE = "the table is not there"


_STATES = {
    "23000": Kind.INTEGRITY,
    "23505": Kind.DUPLICATE,
    "40001": Kind.BUSY,
    "40P01": Kind.BUSY,
    "42P01": Kind.MISSING_TABLE,
    "42S02": Kind.MISSING_TABLE,
    "55P03": Kind.BUSY,
}

_MYSQL = {
    1020: Kind.BUSY,  # the record has changed since the snapshot
    1062: Kind.DUPLICATE,
    1146: Kind.MISSING_TABLE,
    1205: Kind.BUSY,
    1213: Kind.BUSY,
    1586: Kind.DUPLICATE,
    3572: Kind.BUSY,  # NOWAIT
}
_MSSQL = {
    208: Kind.MISSING_TABLE,
    1205: Kind.BUSY,
    1222: Kind.BUSY,
    2601: Kind.DUPLICATE,  # of a unique index
    2627: Kind.DUPLICATE,  # of a primary key or another constraint
    3960: Kind.BUSY,  # the row has changed since the snapshot
}
_ORACLE = {
    1: Kind.DUPLICATE,
    54: Kind.BUSY,  # NOWAIT
    60: Kind.BUSY,
    942: Kind.MISSING_TABLE,
    8177: Kind.BUSY,
    30006: Kind.BUSY,
}
_NUMBERS: Mapping[str, Mapping[int, Kind]] = {
    "MySQLdb": _MYSQL,
    "aiomysql": _MYSQL,
    "asyncmy": _MYSQL,
    "mysql": _MYSQL,
    "oracledb": _ORACLE,
    "pymssql": _MSSQL,
    "pymysql": _MYSQL,
}
"""The vendors' numbers, by the package of the driver's exception."""


def kind(error: exc.DBAPIError) -> Kind | None:
    """Return what a failed statement tells a store; None where it is nothing that stores know."""
    numbers = _NUMBERS.get(type(error.orig).__module__.partition(".")[0])
    if numbers is not None:
        return numbers.get(number_of(error) or 0)
    state = sqlstate(error)
    if state is None and isinstance(error, exc.IntegrityError):
        return Kind.INTEGRITY
    return _STATES.get(state or "")


def sqlstate(error: exc.DBAPIError) -> str | None:
    """Return the five-character SQLSTATE of a driver's error; None where the driver has none.

    PostgreSQL's drivers have an attribute for it, and those of ODBC give it as their error's first argument.
    """
    found = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    if found is None and isinstance(first := _first_argument(error), str) and len(first) == len("00000"):
        return first
    return found


def number_of(error: exc.DBAPIError) -> int | None:
    """Return the vendor's number: the first argument of the driver's error, or an attribute of that."""
    first = _first_argument(error)
    found = getattr(first, "code", first)
    return found if isinstance(found, int) else None


def _first_argument(error: exc.DBAPIError) -> object:
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments else None
