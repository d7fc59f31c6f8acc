"""The table of claims, for `Dedup` and for the `MetaData` that your migrations are made of."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from sqlalchemy import BLANK_SCHEMA, Column, DateTime, Index, LargeBinary, MetaData, Table, Text
from sqlalchemy.dialects import mssql, mysql, oracle
from sqlalchemy.schema import CreateColumn

from fastapi_dedup.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from sqlalchemy import Dialect
    from sqlalchemy.types import TypeEngine

__all__ = ["DEFAULT_TABLE", "additions", "claims_table", "must_be_plain"]

DEFAULT_TABLE = "dedup_claims"
_LONGEST_NAME = 63
"""PostgreSQL's limit; MariaDB has one more."""


def claims_table(metadata: MetaData, *, name: str = DEFAULT_TABLE, schema: str | None = None) -> Table:
    """Add the table of claims to a `MetaData`, your app's own for migrations, and return it.

    Args:
        metadata: Where to add it.
        name: The table's name, as in `Dedup(table=...)`.
        schema: The schema that it is in, as in `Dedup(schema=...)`; None is the connection's default, even
            where the `MetaData` has another one.

    Raises:
        ConfigurationError: A name has a character that would be taken for a parameter of a statement.
    """
    must_be_plain("table", name)
    must_be_plain("schema", schema)
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
        Index(_index_of(name), "expires_at"),
        schema=BLANK_SCHEMA if schema is None else schema,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
    )


def must_be_plain(option: str, name: str | None) -> None:
    """Refuse a name which statements as text would take for something else.

    Args:
        option: What it is the name of.
        name: The name; None is none.

    Raises:
        ConfigurationError: It has such a character.
    """
    if name is not None and (name == "" or {*name} & {*"%:{}"}):
        msg = f"{option} must be a name without any of the characters % : {{ }}, not {name!r}"
        raise ConfigurationError(msg)


def _index_of(name: str) -> str:
    """Return the name of a table's index, which for a long table is a shortened one."""
    full = f"ix_{name}_expires_at"
    if len(full) <= _LONGEST_NAME:
        return full
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"ix_{name[: _LONGEST_NAME - len(f'ix__{digest}_expires_at')]}_{digest}_expires_at"


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
