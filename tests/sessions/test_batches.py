"""`dedup.claim_many(..., session=...)`: a batch shares the fate of the app's session, whatever that is."""

from __future__ import annotations

import pytest

from fastapi_dedup import Claim, DuplicateError
from fastapi_dedup.batches import BatchOutcome
from tests.sessions.kinds import Kind
from tests.sessions.test_claims import HandlerError, found, outcome


async def test_the_new_ids_of_a_batch_are_claimed_in_the_session(every_kind: Kind) -> None:
    kind = every_kind
    assert await outcome(kind, "b") is Claim
    async with kind.open() as session:
        many = kind.world.dedup.claim_many(["a", "b", "c", "a"], scope="tests", session=session)
        async with many as batch:
            new = {str(item) for item in batch.new}
            for sku in sorted(new):
                await kind.add(session, sku)
            assert [entry.outcome for entry in batch] == [
                BatchOutcome.NEW,
                BatchOutcome.DUPLICATE,
                BatchOutcome.NEW,
                BatchOutcome.REPEAT,
            ]
        await kind.commit(session)
    assert new == {"a", "c"}
    assert await found(kind) == (["a", "c"], ["a", "b", "c"])
    assert await outcome(kind, "a") is DuplicateError


async def test_a_batch_is_rolled_back_with_its_session(kind: Kind) -> None:
    async with kind.open() as session:
        async with kind.world.dedup.claim_many(["a", "b"], scope="tests", session=session):
            await kind.add(session, "lost")
        await kind.rollback(session)
    assert await found(kind) == ([], [])
    assert await outcome(kind, "a") is Claim


async def test_a_batch_whose_block_raises_is_withdrawn(kind: Kind) -> None:
    async with kind.open() as session:
        await kind.add(session, "before")
        with pytest.raises(HandlerError):
            async with kind.world.dedup.claim_many(["a", "b"], scope="tests", session=session):
                raise HandlerError
        await kind.commit(session)
    assert await found(kind) == (["before"], [])
    assert await outcome(kind, "b") is Claim


async def test_a_batch_is_claimed_anew_after_a_rollback_midway(kind: Kind) -> None:
    async with kind.open() as session:
        async with kind.world.dedup.claim_many(["a", "b"], scope="tests", session=session):
            await kind.add(session, "dropped")
            await kind.rollback(session)
            await kind.add(session, "kept")
        await kind.commit(session)
    assert await found(kind) == (["kept"], ["a", "b"])
