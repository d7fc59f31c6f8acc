"""What databases and drivers raise, as errors of ours; and the note that a statement has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import event, exc

from fastapi_dedup.errors import ConfigurationError, DedupError, StoreUnavailableError
from fastapi_dedup.stores.codes import Kind, kind

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import ExceptionContext

__all__ = ["note_failures", "of_the_database", "store_errors", "take_failure"]

_FAILED = "fastapi_dedup.statement_failed"
_DRIVERS = {
    *("aiomysql", "aiosqlite", "asyncmy", "asyncpg", "psycopg", "psycopg2", "pymysql", "MySQLdb", "sqlite3"),
}


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what SQLAlchemy and drivers raise into our errors, with theirs as the cause."""
    try:
        yield
    except DedupError:
        raise
    except exc.DBAPIError as error:
        if kind(error) is Kind.MISSING_TABLE:
            msg = (
                "the table of claims is missing in the database that the claim rides in: create it with "
                "Dedup(..., create_table=True), await dedup.create_table(), or a migration"
            )
            raise ConfigurationError(msg) from error
        msg = f"the database refused the claim ({type(error.orig).__name__})"
        raise StoreUnavailableError(msg) from error
    except Exception as error:
        if not of_the_database(error):
            raise
        msg = f"the database did not answer ({type(error).__name__})"
        raise StoreUnavailableError(msg) from error


def of_the_database(error: Exception) -> bool:
    """Tell whether it is the database, or the way to it, that an error comes from."""
    # SQLAlchemy 2.0 does not wrap what drivers raise while they connect.
    by_driver = type(error).__module__.partition(".")[0] in _DRIVERS
    return by_driver or isinstance(error, exc.SQLAlchemyError | OSError)


def note_failures(engine: Engine) -> None:
    """Note on each connection that a statement failed: its transaction may be over, though nobody said so.

    PostgreSQL answers the COMMIT of an aborted transaction with ROLLBACK, and no driver calls that an error;
    MySQL rolls the whole transaction back on a deadlock, and lets the next statement begin a new one. An app
    that swallows the error would be told of a success.
    """

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        if context.connection is not None and not context.connection.invalidated:
            context.connection.info[_FAILED] = True

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.info.pop(_FAILED, None)  # what failed before was in a transaction before


def take_failure(connection: Connection) -> bool:
    """Tell whether a statement has failed on a connection since this was asked last."""
    return bool(connection.info.pop(_FAILED, False))
