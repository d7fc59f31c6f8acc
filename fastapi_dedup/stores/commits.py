"""What a SQLAlchemy session's COMMIT is worth to a memory of it: how often it was, and whether for good."""

from __future__ import annotations

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

__all__ = ["commits_of", "is_outermost"]

_COMMITS = "fastapi_dedup.commits"


def is_outermost(session: Session) -> bool:
    """Tell whether the session's COMMIT is the database's.

    It is not while the session works inside a transaction of its connection's, which began before it and may
    still be rolled back: so do the fixtures of many test suites.
    """
    return not (isinstance(session.bind, Connection) and session.bind.in_transaction())


def commits_of(session: Session) -> int:
    """Return how often the session has committed since this was first asked."""
    return int(session.info.setdefault(_COMMITS, 0))


@event.listens_for(Session, "after_commit")
def _count(session: Session) -> None:
    if _COMMITS in session.info and session.get_nested_transaction() is None:  # else a savepoint was released
        session.info[_COMMITS] += 1
