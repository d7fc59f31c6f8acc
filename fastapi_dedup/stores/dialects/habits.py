"""Where the databases that the generic dialect serves differ: their clocks, their locks, what they undo.

Moments come and go as the database's clock gives them: with a zone on PostgreSQL and CockroachDB, as UTC
without one elsewhere, for not every driver hands out the zone that its database has stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sqlalchemy import DateTime, cast, func, literal, literal_column, text
from sqlalchemy.dialects import mssql, mysql, oracle

from fastapi_dedup.stores.promises import Promise

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import ColumnElement
    from sqlalchemy.types import TypeEngine

__all__ = ["Habits", "habits_of"]


def _as_it_is(moment: Any) -> Any:
    return moment


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How one kind of database is spoken to, beyond what SQLAlchemy puts into its words.

    Attributes:
        clock: The time of the statement, to the microsecond.
        read: Makes a stored moment one of the clock's kind.
        write: Makes a moment of the clock's kind one to store.
        keeps: The promises that the generic dialect keeps there.
        was_run: Whether the tests run it there; else its statements were compiled for it, and no more.
        past_locks: The hint that has a SELECT look past rows which others have locked.
        lock_past_locks: The hint that has a SELECT also lock the rows that it finds.
        skip_locked: Whether FOR UPDATE SKIP LOCKED does that.
        by_rownum: Whether such a SELECT takes ROWNUM, and neither ORDER BY nor another limit.
        lock_timeout: Whether SET LOCAL lock_timeout bounds how long a statement waits for others.
        reap_at: What a transaction of the reaper's begins with.
    """

    clock: ColumnElement[datetime]
    read: Callable[[ColumnElement[datetime]], ColumnElement[datetime]] = _as_it_is
    write: Callable[[datetime], Any] = _as_it_is
    keeps: frozenset[Promise] = frozenset({Promise.NAMES_A_MISSING_TABLE})
    was_run: bool = False
    past_locks: str | None = None
    lock_past_locks: str | None = None
    skip_locked: bool = False
    by_rownum: bool = False
    lock_timeout: bool = False
    reap_at: str | None = None


_POSTGRESQL = Habits(
    clock=func.clock_timestamp(type_=DateTime(timezone=True)),
    keeps=frozenset(Promise) - {Promise.SEES_TWINS_ELSEWHERE, Promise.ANY_ORDER},
    was_run=True,
    skip_locked=True,
    lock_timeout=True,
)
_MYSQL = Habits(
    clock=func.utc_timestamp(text("6"), type_=mysql.DATETIME(fsp=6)),
    keeps=frozenset({Promise.NAMES_A_MISSING_TABLE, Promise.WRITES_SIDE_BY_SIDE}),
    was_run=True,
    skip_locked=True,
    # At REPEATABLE READ the reaper would lock the gaps that new claims are inserted into.
    reap_at="SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
)
_MSSQL_MOMENT: TypeEngine[datetime] = mssql.DATETIME2(6)  # type: ignore[no-untyped-call]
_ORACLE_MOMENT = oracle.TIMESTAMP()
_HABITS = {
    "postgresql": _POSTGRESQL,
    "cockroachdb": replace(_POSTGRESQL, keeps=_MYSQL.keeps, was_run=False),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "mssql": Habits(
        clock=cast(func.sysutcdatetime(), _MSSQL_MOMENT),
        read=lambda stored: cast(func.switchoffset(stored, 0), _MSSQL_MOMENT),
        write=lambda moment: func.todatetimeoffset(cast(literal(moment, _MSSQL_MOMENT), _MSSQL_MOMENT), 0),
        keeps=_MYSQL.keeps,
        # Unless READ_COMMITTED_SNAPSHOT is on, a SELECT waits for what others have not committed yet.
        past_locks="WITH (READCOMMITTEDLOCK, READPAST)",
        lock_past_locks="WITH (UPDLOCK, READCOMMITTEDLOCK, READPAST, ROWLOCK)",
    ),
    "oracle": Habits(
        clock=func.sys_extract_utc(literal_column("SYSTIMESTAMP"), type_=_ORACLE_MOMENT),
        read=lambda stored: func.sys_extract_utc(stored, type_=_ORACLE_MOMENT),
        write=lambda moment: func.from_tz(
            cast(literal(moment, _ORACLE_MOMENT), _ORACLE_MOMENT), literal_column("'UTC'")
        ),
        keeps=_MYSQL.keeps,
        skip_locked=True,
        by_rownum=True,
    ),
}


def habits_of(name: str) -> Habits:
    """Return the habits of a kind of database, by the name of its dialect in SQLAlchemy.

    What is known of none is the standard's: CURRENT_TIMESTAMP, which may be the transaction's own.
    """
    return _HABITS.get(name) or Habits(clock=func.current_timestamp(type_=DateTime(timezone=True)))
