"""What databases and drivers raise, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from fastapi_dedup.errors import ConfigurationError, DedupError, StoreUnavailableError
from fastapi_dedup.stores.codes import Kind, kind, sqlstate

__all__ = ["ABORTED", "of_the_database", "store_errors"]

ABORTED = "25P02"
"""The SQLSTATE of a statement in a transaction in which another has failed."""

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
        if sqlstate(error) == ABORTED:
            msg = "a statement has failed in the handler's transaction before, and PostgreSQL takes no other"
        else:
            msg = f"the database refused the claim ({_name_of(error)})"
        raise StoreUnavailableError(msg) from error
    except exc.IdentifierError as error:
        msg = f"a name is too long for the database: {error}"
        raise ConfigurationError(msg) from error
    except exc.PendingRollbackError as error:
        msg = "the handler's session has failed before, and was not rolled back"
        raise StoreUnavailableError(msg) from error
    except exc.InvalidRequestError as error:
        msg = f"the claim cannot be made in the handler's session as it is: {error}"
        raise ConfigurationError(msg) from error
    except Exception as error:
        if not of_the_database(error):
            raise
        msg = f"the database did not answer ({type(error).__name__})"
        raise StoreUnavailableError(msg) from error


def _name_of(error: exc.DBAPIError) -> str:
    """Return what a driver calls its error; SQLAlchemy has asyncpg's as the cause of one of its own."""
    return type(getattr(error.orig, "__cause__", None) or error.orig).__name__


def of_the_database(error: Exception) -> bool:
    """Tell whether it is the database, or the way to it, that an error comes from."""
    # SQLAlchemy 2.0 does not wrap what drivers raise while they connect.
    by_driver = type(error).__module__.partition(".")[0] in _DRIVERS
    return by_driver or isinstance(error, exc.SQLAlchemyError | OSError)
