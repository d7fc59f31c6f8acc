"""The table of claims, for `Dedup` and for the `MetaData` that your migrations are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BLANK_SCHEMA, Column, DateTime, Index, LargeBinary, MetaData, Table, Text
from sqlalchemy.dialects import mssql, mysql, oracle
from sqlalchemy.schema import CreateColumn

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from sqlalchemy import Dialect
    from sqlalchemy.types import TypeEngine

__all__ = ["DEFAULT_TABLE", "additions", "claims_table"]

DEFAULT_TABLE = "dedup_claims"


def claims_table(metadata: MetaData, *, name: str = DEFAULT_TABLE, schema: str | None = None) -> Table:
    """Add the table of claims to a `MetaData`, your app's own for migrations, and return it.

    Args:
        metadata: Where to add it.
        name: The table's name, as in `Dedup(table=...)`.
        schema: The schema that it is in, as in `Dedup(schema=...)`; None is the connection's default, even
            where the `MetaData` has another one.
    """
    return Table(
        name,
        metadata,
        Column("key", _binary(32), primary_key=True, comment="SHA-256 of scope and logical id"),
        Column("scope", _legible(), nullable=False, comment="legible scope"),
        Column("logical_id", _legible(), nullable=False, comment="legible id"),
        Column("token", _binary(16), nullable=False, comment="who may release the claim"),
        Column("fingerprint", _binary(32), nullable=True, comment="digest of the payload"),
        Column("claimed_at", _moment(), nullable=False),
        Column("expires_at", _moment(), nullable=False, comment="when the claim stops counting"),
        Column("leased_until", _moment(), nullable=True, comment="the work is not done; null: it is"),
        Index(f"ix_{name}_expires_at", "expires_at"),
        schema=BLANK_SCHEMA if schema is None else schema,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
    )


def additions(table: Table, present: Collection[str], dialect: Dialect) -> list[str]:
    """Return the statements that give an earlier release's table the columns that it lacks.

    Args:
        table: The table as it is to be.
        present: The names of the columns that are there.
        dialect: Whose words to use.
    """
    name = dialect.identifier_preparer.format_table(table)
    lacking = [column for column in table.columns if column.name not in present]
    definitions = (str(CreateColumn(column).compile(dialect=dialect)) for column in lacking)
    return [f"ALTER TABLE {name} ADD {' '.join(definition.split())}" for definition in definitions]


def _binary(length: int) -> TypeEngine[bytes]:
    """Return a type for bytes; fixed in length where only that can be a key."""
    return (
        LargeBinary(length)
        .with_variant(mysql.BINARY(length), "mysql", "mariadb")
        .with_variant(mssql.BINARY(length), "mssql")
        .with_variant(oracle.RAW(length), "oracle")
    )


def _legible() -> TypeEngine[str]:
    """Return a type for text in any language."""
    return Text().with_variant(mssql.NVARCHAR(), "mssql")


def _moment() -> TypeEngine[datetime]:
    """Return a type for a moment, to the microsecond."""
    return (
        DateTime(timezone=True)
        .with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
        .with_variant(mssql.DATETIMEOFFSET(6), "mssql")  # type: ignore[no-untyped-call]
        .with_variant(oracle.TIMESTAMP(timezone=True), "oracle")
    )
