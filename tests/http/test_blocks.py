"""What `dedup.claim` and `dedup.claim_many` are asked for is checked where it enters, before any query."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import pytest

from fastapi_dedup import ConfigurationError, Dedup, DedupError, InvalidLogicalIdError, MissingLogicalIdError
from tests.http.world import Statements, World


def one(dedup: Dedup, logical_id: Any, **options: Any) -> AbstractAsyncContextManager[object]:
    return dedup.claim(logical_id, **{"scope": "jobs", **options})


def many(dedup: Dedup, logical_id: Any, **options: Any) -> AbstractAsyncContextManager[object]:
    if "fingerprint" in options:
        digest = options.pop("fingerprint")
        options["fingerprint"] = lambda _: digest
    return dedup.claim_many([logical_id], **{"scope": "jobs", **options})


BOTH = pytest.mark.parametrize("block", [one, many])


async def refused(world: World, block: Any, logical_id: object, **options: Any) -> DedupError:
    """Enter a block that must not be entered, and return why not."""
    statements = Statements(world.engine)
    with pytest.raises(DedupError) as caught:
        async with block(world.dedup, logical_id, **options):
            pytest.fail("the work ran")
    assert statements == []
    return caught.value


@BOTH
@pytest.mark.parametrize("logical_id", [None, "", "  "])
async def test_a_blank_id_is_a_missing_one(sqlite: World, block: Any, logical_id: object) -> None:
    # case C1
    assert isinstance(await refused(sqlite, block, logical_id), MissingLogicalIdError)


@BOTH
@pytest.mark.parametrize("logical_id", ["\ud800", "a\x00b", "x" * 256, 1.5, True, ["a"]])
async def test_what_cannot_be_an_id_is_refused(sqlite: World, block: Any, logical_id: object) -> None:
    # case C5
    # case C7
    assert isinstance(await refused(sqlite, block, logical_id), InvalidLogicalIdError)


@BOTH
@pytest.mark.parametrize("scope", ["", " ", ("acme", ""), ("", "orders")])
async def test_a_scope_with_a_blank_part_is_shared_by_nobody(
    sqlite: World, block: Any, scope: object
) -> None:
    # case D1
    error = await refused(sqlite, block, "k", scope=scope)
    assert isinstance(error, MissingLogicalIdError)
    assert error.field == "scope"


@BOTH
@pytest.mark.parametrize("scope", [None, (), 5, ("acme", None), ["acme"], b"acme"])
async def test_a_scope_that_is_neither_a_name_nor_a_tuple_of_names_is_refused(
    sqlite: World, block: Any, scope: object
) -> None:
    assert "a name or a tuple of names" in str(await refused(sqlite, block, "k", scope=scope))
    with pytest.raises(ConfigurationError, match="a name or a tuple of names"):
        await sqlite.dedup.release("k", scope=scope)  # type: ignore[arg-type]


@BOTH
@pytest.mark.parametrize("option", [{"window": timedelta(0)}, {"window": 5}, {"fingerprint": "text"}])
async def test_an_option_that_cannot_be_kept_is_refused(
    sqlite: World, block: Any, option: dict[str, object]
) -> None:
    (name,) = option
    error = await refused(sqlite, block, "k", **option)
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(name)


@pytest.mark.parametrize(
    "option",
    [
        {"in_flight": "waiting"},
        {"wait_timeout": 5},
        {"wait_timeout": timedelta(0)},
        {"lease": timedelta(0)},
        {"on_abandoned": "block"},
        {"on_abandoned": "never", "lease": timedelta(seconds=1)},
    ],
)
async def test_a_claim_is_held_to_the_rules_of_a_policy(sqlite: World, option: dict[str, object]) -> None:
    error = await refused(sqlite, one, "k", **option)
    assert isinstance(error, ConfigurationError)
    assert str(error).startswith(next(iter(option)))
