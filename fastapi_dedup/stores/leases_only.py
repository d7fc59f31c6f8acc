"""What a runtime without a database has in the place of a store of riding claims, and of a transaction.

Nothing can ride there, and nothing needs a table or a reaper. What needs a database is refused, with the fix.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

from sqlalchemy import Engine
from sqlalchemy.exc import UnboundExecutionError

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.homes import Home, binds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from fastapi_dedup.claims import Fate, Intent, Outcome, Receipt

__all__ = ["Anywhere", "NoDatabase", "NoTransaction", "no_database", "no_riding"]


_WITH_DATABASE = (
    "give Dedup a database too, as in Dedup('postgresql+asyncpg://…', leases=RedisLeases('redis://…'))"
)


def no_riding() -> ConfigurationError:
    """Return the error of a claim that would ride where there is no transaction."""
    msg = (
        "a claim without lease= rides the handler's transaction, and this Dedup keeps claims in Redis only, "
        f"which cannot take part in one: give the claim a lease=, or {_WITH_DATABASE}"
    )
    return ConfigurationError(msg)


def no_database(what: str) -> ConfigurationError:
    """Return the error of what needs a database where there is none.

    Args:
        what: What needs it.
    """
    msg = (
        f"{what} needs a database, and this Dedup keeps claims in Redis only: give the handler a session of "
        f"its own (Deduplicated(session=...)), or {_WITH_DATABASE}"
    )
    return ConfigurationError(msg)


class _NoSession:
    """Stands where a session would be: a handler that does not touch it needs none."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked for by tools, who want an AttributeError
            raise AttributeError(name)
        what = f"session.{name}"
        raise no_database(what)


class NoTransaction:
    """The transaction of a handler's work where no database is known: nothing is ever open in it."""

    used = False
    idle = True
    in_hand = True
    outermost = True
    commits = 0
    session = _NoSession()

    def watch(self, _: Callable[[Fate], None]) -> None:
        """Nothing rides here."""
        raise no_riding()

    async def must_lead_home(self) -> None:
        """There is no database to lead to."""

    def before_commit(self, _: Callable[[Any], None], __: Callable[[Fate], None]) -> None:
        """There will be no COMMIT."""

    def forget(self) -> None:
        """There is nothing to forget."""

    async def step_aside(self) -> bool:
        """A duplicate may wait: it holds no connection."""
        return True

    async def confirm(self) -> None:
        """There is nothing to be seen to."""

    async def commit(self) -> None:
        """There is nothing to commit."""

    async def rollback(self) -> None:
        """There is nothing to roll back."""

    async def leave(self) -> None:
        """There is nothing to find out."""


class Anywhere(Home):
    """The home of claims that are in no database: whatever a session is on, its COMMIT can be followed."""

    def __init__(self) -> None:
        """Know no database."""

    def bind_of(self, session: Session) -> Engine | Connection:
        """Return what a session is bound to; where that is several, one that it has used, if it has."""
        try:
            return session.get_bind()
        except UnboundExecutionError:
            binds = [bind for bind in binds_of(session) if isinstance(bind, Engine)]
            in_use = getattr(session.get_transaction(), "_connections", {})
            return next((bind for bind in binds if bind in in_use), binds[0])


class NoDatabase:
    """The store of riding claims of a runtime that has none: it refuses them."""

    sees_in_flight = True
    durable = True
    refusals_logged_at = logging.INFO

    async def claim(self, _: Intent, __: Any) -> NoReturn:
        """Refuse: nothing here can ride."""
        raise no_riding()

    async def look(self, _: Intent, __: Any) -> Outcome | None:
        """There is no claim."""

    async def renew(self, _: Intent, __: Receipt, ___: Any) -> None:
        """There is no claim."""

    async def withdraw(self, _: Intent, __: Receipt, ___: Any) -> None:
        """There is no claim."""

    async def claim_many(self, _: Sequence[Intent], __: Any) -> NoReturn:
        """Refuse: nothing here can ride."""
        raise no_riding()

    async def withdraw_many(self, _: Sequence[Intent], __: Receipt, ___: Any) -> None:
        """There is no claim."""

    async def release_many(self, _: Sequence[Intent], __: Receipt) -> None:
        """There is no claim."""

    def adopt(self, _: Any) -> NoReturn:
        """Refuse: nothing here can ride."""
        raise no_riding()

    async def release(self, _: Intent, __: Receipt | None) -> bool:
        """There is no claim."""
        return False

    async def reap(self, _: int) -> int:
        """There is no claim; those in Redis expire there."""
        return 0

    async def create_table(self) -> None:
        """There is no table."""
