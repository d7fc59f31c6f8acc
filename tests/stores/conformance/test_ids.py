"""Ids are exact: nothing that a database or its collation does merges two of them."""

from __future__ import annotations

import random
import unicodedata

import pytest

from fastapi_dedup import Claim, InvalidLogicalIdError, MissingLogicalIdError
from fastapi_dedup.claims import Duplicate, Intent, digest
from fastapi_dedup.identity import MAX_LENGTH
from tests.stores.worlds import World, intent, statements

_COMPOSED = unicodedata.normalize("NFC", "áb")
_DECOMPOSED = unicodedata.normalize("NFD", "áb")
LOOKALIKES = (
    "Ab",
    "ab",
    "ab ",
    " ab",
    _COMPOSED,
    _DECOMPOSED,
    "a b",
    "\N{CYRILLIC SMALL LETTER A}b",
    "ab",
    "AB",
    "ß",
    "ss",
    "\N{LATIN SMALL LETTER DOTLESS I}",
    "i",
    "I",
)


async def test_ids_that_a_collation_would_merge_stay_apart(world: World) -> None:
    # case F9
    assert len({*LOOKALIKES}) == len(LOOKALIKES) - 1  # "ab" is there twice: it is a duplicate of itself
    for expected in (Claim, Duplicate):
        async with world.attempt() as attempt:
            outcomes = {id_: type(await attempt.claim(intent(id_))) for id_ in LOOKALIKES}
            await attempt.delivery.succeed()
        assert {*outcomes.values()} == {expected}
    assert await world.count() == len({*LOOKALIKES})


async def test_releasing_one_variant_of_an_id_leaves_the_others(world: World) -> None:
    # case F9
    async with world.attempt() as attempt:
        for id_ in LOOKALIKES:
            await attempt.claim(intent(id_))
        await attempt.delivery.succeed()
    assert await world.dedup.release("ab", scope="tests")
    assert {row.logical_id for row in await world.rows()} == {*LOOKALIKES} - {"ab"}


async def test_scope_and_id_are_never_split_elsewhere(world: World) -> None:
    # `scope_text` of some of these is the same: only the digest may decide
    splits = [
        (("a", "bc"), "d"),
        (("ab", "c"), "d"),
        (("a", "b"), "cd"),
        (("a b",), "cd"),
        (("abc",), "d"),
        (("a",), "bcd"),
        ((), "abcd"),
        (("",), "abcd"),
        (("", ""), "abcd"),
        (("a", "b", ""), "cd"),
    ]
    async with world.attempt() as attempt:
        for scope, id_ in splits:
            assert isinstance(await attempt.claim(Intent(scope, id_)), Claim), (scope, id_)
        await attempt.delivery.succeed()
    assert await world.count() == len(splits)


async def test_the_legible_id_and_scope_stand_beside_the_digest(world: World) -> None:
    wanted = Intent(("POST", "/orders", "tenant ä"), "Rebuild 'x' | 100 % \\ \N{SNOWMAN}")
    await world.claimed(wanted)
    [row] = await world.rows()
    assert row.key == wanted.key == digest(wanted.scope, wanted.logical_id)
    assert (row.scope, row.logical_id) == ("POST /orders tenant ä", wanted.logical_id)


@pytest.mark.parametrize("plane", ["ascii", "astral"])
async def test_the_longest_ids_are_claimed_and_told_apart_by_their_last_character(
    world: World, plane: str
) -> None:
    # case C7: random data, for compression hides what an index cannot hold
    letters = range(0x21, 0x7F) if plane == "ascii" else range(0x10000, 0x1F000)
    start = "".join(chr(random.choice(letters)) for _ in range(MAX_LENGTH - 1))  # noqa: S311 - no secret
    one, two = start + chr(letters[0]), start + chr(letters[1])
    for id_ in (one, two):
        async with world.dedup.claim(id_, scope=(start, start)) as claim:
            assert claim.logical_id == id_
        assert isinstance(await world.run(world.dedup.intent(id_, scope=(start, start))), Duplicate)
    assert {row.logical_id for row in await world.rows()} == {one, two}


ILLEGAL = ("x" * (MAX_LENGTH + 1), "a\0b", "a\nb", "\ud800", 1.5, True, ["a"])
MISSING = (None, "", " ", "\t\n", "\N{NO-BREAK SPACE}")
ODD = ("None", "null", "0", "'; drop table dedup_claims; --", "%s", "%(key)s", ":key", "$1", "?")


async def test_an_illegal_or_missing_id_is_refused_before_any_query(world: World) -> None:
    # cases C1, C5, C7
    with statements(world.dedup.engine) as heard:
        for ids, error in ((ILLEGAL, InvalidLogicalIdError), (MISSING, MissingLogicalIdError)):
            for id_ in ids:
                with pytest.raises(error):
                    async with world.dedup.claim(id_, scope="tests"):  # type: ignore[arg-type]
                        raise AssertionError
    assert heard.sent == []


async def test_ids_that_look_like_something_else_are_ids_like_any_other(world: World) -> None:
    # case C1
    for id_ in ODD:
        async with world.dedup.claim(id_, scope=id_):
            pass
    assert {(row.logical_id, row.scope) for row in await world.rows()} == {(id_, id_) for id_ in ODD}
