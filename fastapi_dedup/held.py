"""A claim in the hands of a delivery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi_dedup.claims import Claim, Fate, scope_text

if TYPE_CHECKING:
    from fastapi_dedup.claims import Intent, Receipt
    from fastapi_dedup.store import Store, Transaction

__all__ = ["Held"]


@dataclass(slots=True, eq=False)
class Held:
    """A claim that a delivery holds, and what became of it."""

    intent: Intent
    receipt: Receipt
    claim: Claim
    store: Store[Any]
    transaction: Transaction
    fate: Fate = Fate.OPEN
    given_back: bool = False
    kept: bool = False
    """Whether it was committed because the delivery had succeeded: then nothing may take it back."""

    @classmethod
    def of(cls, intent: Intent, receipt: Receipt, store: Store[Any], transaction: Transaction) -> Held:
        """Return a claim that a store has just given."""
        times = receipt.claimed_at, receipt.expires_at
        claim = Claim(intent.logical_id, scope_text(intent.scope), *times, transaction)
        return cls(intent, receipt, claim, store, transaction)

    @property
    def to_give_back(self) -> bool:
        """Whether a failure has left it standing."""
        return self.fate in {Fate.OPEN, Fate.COMMITTED} and not (self.given_back or self.kept)
