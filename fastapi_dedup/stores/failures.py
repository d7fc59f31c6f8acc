"""What databases and drivers raise, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc

from fastapi_dedup.errors import ConfigurationError, DedupError, StoreUnavailableError
from fastapi_dedup.stores.codes import Kind, kind

__all__ = ["store_errors"]

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
    except exc.IdentifierError as error:
        msg = f"a name is too long for the database: {error}"
        raise ConfigurationError(msg) from error
    except Exception as error:
        ours = isinstance(error, exc.SQLAlchemyError | OSError)
        # SQLAlchemy 2.0 does not wrap what drivers raise while they connect.
        if not ours and type(error).__module__.partition(".")[0] not in _DRIVERS:
            raise
        msg = f"the database did not answer ({type(error).__name__})"
        raise StoreUnavailableError(msg) from error
