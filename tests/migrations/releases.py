"""The table of claims as earlier releases knew it, frozen: what is written here never changes.

A release that changes the table adds the one before it here. Processes of both run beside each other while a
new release is rolled out, and one is rolled back to now and then, so whatever is here must go on working.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlalchemy import (
    DateTime,
    Delete,
    Insert,
    Select,
    TableClause,
    Update,
    column,
    delete,
    insert,
    select,
    table,
    update,
)


@dataclass(frozen=True)
class Release:
    """What a release reads and writes, by the names of columns.

    Attributes:
        name: What set it apart.
        columns: Every column that its INSERT names; it knows of no others.
        ddl: The table as it was made, by the dialect's name.
    """

    name: str
    columns: tuple[str, ...]
    ddl: dict[str, tuple[str, ...]]

    @cached_property
    def table(self) -> TableClause:
        moments = dict.fromkeys(("claimed_at", "expires_at"), DateTime(timezone=True))
        return table("dedup_claims", *(column(name, moments.get(name)) for name in self.columns))

    def insert(self, values: dict[str, Any]) -> Insert:
        """Return its INSERT, which names its columns and no others."""
        return insert(self.table).values({name: values[name] for name in self.columns})

    def look(self, key: bytes) -> Select[Any]:
        """Return its SELECT for what a claim answers."""
        return select(*self.table.c).where(self.table.c.key == key)

    def take_over(self, key: bytes, now: datetime, values: dict[str, Any]) -> Update:
        """Return its UPDATE of a claim whose window is over."""
        expired = update(self.table).where(self.table.c.key == key, self.table.c.expires_at <= now)
        return expired.values({name: values[name] for name in ("token", "claimed_at", "expires_at")})

    def reap(self, now: datetime) -> Delete:
        """Return its DELETE of claims whose windows are over."""
        return delete(self.table).where(self.table.c.expires_at <= now)


BEFORE_LEASES = Release(
    "before leased claims",
    ("key", "scope", "logical_id", "token", "fingerprint", "claimed_at", "expires_at"),
    {
        "postgresql": (
            """
            CREATE TABLE dedup_claims (
                key BYTEA NOT NULL, scope TEXT NOT NULL, logical_id TEXT NOT NULL, token BYTEA NOT NULL,
                fingerprint BYTEA, claimed_at TIMESTAMP WITH TIME ZONE NOT NULL,
                expires_at TIMESTAMP WITH TIME ZONE NOT NULL, PRIMARY KEY (key)
            )
            """,
            "COMMENT ON COLUMN dedup_claims.key IS 'SHA-256 of scope and logical id'",
            "COMMENT ON COLUMN dedup_claims.scope IS 'legible scope'",
            "COMMENT ON COLUMN dedup_claims.logical_id IS 'legible id'",
            "COMMENT ON COLUMN dedup_claims.token IS 'who may release the claim'",
            "COMMENT ON COLUMN dedup_claims.fingerprint IS 'digest of the payload'",
            "CREATE INDEX ix_dedup_claims_expires_at ON dedup_claims (expires_at)",
        ),
        "mysql": (
            """
            CREATE TABLE dedup_claims (
                `key` BINARY(32) NOT NULL COMMENT 'SHA-256 of scope and logical id',
                scope TEXT NOT NULL COMMENT 'legible scope',
                logical_id TEXT NOT NULL COMMENT 'legible id',
                token BINARY(16) NOT NULL COMMENT 'who may release the claim',
                fingerprint BINARY(32) COMMENT 'digest of the payload',
                claimed_at DATETIME(6) NOT NULL, expires_at DATETIME(6) NOT NULL, PRIMARY KEY (`key`)
            ) CHARSET=utf8mb4
            """,
            "CREATE INDEX ix_dedup_claims_expires_at ON dedup_claims (expires_at)",
        ),
        "sqlite": (
            """
            CREATE TABLE dedup_claims (
                "key" BLOB NOT NULL, scope TEXT NOT NULL, logical_id TEXT NOT NULL, token BLOB NOT NULL,
                fingerprint BLOB, claimed_at DATETIME NOT NULL, expires_at DATETIME NOT NULL,
                PRIMARY KEY ("key")
            )
            """,
            "CREATE INDEX ix_dedup_claims_expires_at ON dedup_claims (expires_at)",
        ),
    },
)

RELEASES = (BEFORE_LEASES,)
