"""What not every database can promise. What all of them keep is no entry here: it simply holds.

The one list of these: each dialect says which it keeps, start-up names the rest, the tests' suite asks each
store for no less and no more, and the documentation's table is made of it.
"""

from __future__ import annotations

import enum

__all__ = ["Promise"]


class Promise(enum.Enum):
    """What a store keeps, or else does instead.

    Attributes:
        kept: What holds where the promise is kept.
        otherwise: What happens where it is not.
    """

    kept: str
    otherwise: str

    SEES_TWINS_ELSEWHERE = (
        "an unfinished twin in another process is answered at once",
        "a delivery waits while its twin in another process is unfinished, and is then told the outcome",
    )
    WRITES_SIDE_BY_SIDE = (
        "claims of different ids wait neither for each other nor for the reaper",
        "claims of different ids may wait for each other, or for the reaper",
    )
    ANY_ORDER = (
        "transactions that claim the same ids in different orders never deadlock",
        "transactions that claim the same ids in different orders may deadlock: one of them is told 503",
    )
    FREE_WITH_SAVEPOINT = (
        "an id whose claim was rolled back with a savepoint is free at once",
        "an id whose claim was rolled back with a savepoint is free when the transaction around it ends",
    )
    SNAPSHOTS = (
        "a race lost behind the snapshot of REPEATABLE READ or SERIALIZABLE is a refusal, no error",
        "a transaction that has read an older state of the database may be told 503",
    )
    NAMES_A_MISSING_TABLE = (
        "a missing table of claims is told from a database that is down",
        "a table of claims that goes missing while the app runs looks like a database that is down",
    )

    def __init__(self, kept: str, otherwise: str) -> None:
        self.kept = kept
        self.otherwise = otherwise
