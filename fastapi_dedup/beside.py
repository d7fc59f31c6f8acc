"""What claims that do not ride have in common: they stand beside the transaction of the handler's work.

How such a claim ends is its own affair (`leases`, `stores.memory`). All else it leaves to that transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi_dedup.claims import Fate
    from fastapi_dedup.store import Enclosing

__all__ = ["BesideTransaction"]


class BesideTransaction:
    """What stands for a transaction where a claim does not ride in one.

    Args:
        around: The transaction that the handler works in.
    """

    idle = True
    """It holds no connection, whatever the handler's does."""

    def __init__(self, around: Enclosing) -> None:
        self._around = around
        self._decided: list[Callable[[Fate], None]] = []

    @property
    def session(self) -> Any:
        """The session that the handler works with."""
        return self._around.session

    @property
    def used(self) -> bool:
        """Whether a handler works in it."""
        return self._around.used

    @property
    def outermost(self) -> bool:
        """Whether the handler's COMMIT is the database's."""
        return self._around.outermost

    @property
    def in_hand(self) -> bool:
        """Whether the handler's connection is surely its own still."""
        return self._around.in_hand

    def watch(self, decided: Callable[[Fate], None]) -> None:
        """Call back once, when the claim has ended."""
        self._decided.append(decided)

    def forget(self) -> None:
        """There is nothing to take anew: a ROLLBACK of the handler's leaves the claim alone."""

    async def confirm(self) -> None:
        """Have the handler's transaction do what is to be done, where no event will ask before its COMMIT."""
        await self._around.confirm()

    async def leave(self) -> None:
        """Find out what became of the handler's transaction, where no event tells."""
        await self._around.leave()

    def _end(self, fate: Fate) -> None:
        decided, self._decided = self._decided, []
        for each in decided:
            each(fate)
