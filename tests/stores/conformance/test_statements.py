"""What a claim costs the database, and that it leaves nothing behind on a pooled connection."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import fastapi_dedup
from fastapi_dedup import Claim, Dedup
from fastapi_dedup.claims import Duplicate, InFlight
from fastapi_dedup.stores.codes import sqlstate
from tests.databases import engine_on
from tests.stores.promises import Promise
from tests.stores.worlds import World, intent, statements

NEWS = intent("news")
PACKAGE = Path(fastapi_dedup.__file__).parent


async def test_a_claim_costs_one_statement_or_what_the_database_cannot_do_without(world: World) -> None:
    with statements(world.dedup.engine) as heard:
        await world.run(NEWS)
    claiming = [sent for sent in heard.sent if "orders" not in sent]
    assert tuple(sent.split()[0] for sent in claiming) == world.backend.claiming
    assert sum("INSERT INTO dedup_claims" in sent for sent in claiming) == 1


async def test_a_duplicate_costs_one_statement(world: World) -> None:
    await world.claimed(NEWS)
    with statements(world.dedup.engine) as heard:
        assert isinstance(await world.run(NEWS), Duplicate)
    assert len(heard.sent) == 1


async def test_a_twin_in_flight_costs_one_statement(world: World) -> None:
    async with world.attempt() as first:
        await first.claim(NEWS)
        with statements(world.dedup.engine) as heard:
            assert await world.run(NEWS) == InFlight()
        assert len(heard.sent) == 1


async def test_the_same_id_met_again_in_a_delivery_costs_nothing(world: World) -> None:
    async with world.attempt() as attempt:
        await attempt.claim(NEWS)
        with statements(world.dedup.engine) as heard:
            assert isinstance(await attempt.claim(NEWS), Claim)
        assert heard.sent == []


async def test_a_delivery_that_claims_nothing_takes_no_connection(world: World) -> None:
    pool = world.dedup.engine.pool
    async with world.attempt() as attempt:
        await attempt.delivery.succeed()
    assert pool.checkedout() == 0  # type: ignore[attr-defined]  # QueuePool's


async def everything(world: World, dedup: Dedup) -> None:
    """Go through all that a store does: claim, refuse, take over, release, reap, create, and fail."""
    await world.run(NEWS, dedup)
    await world.run(NEWS, dedup)
    await world.expire(NEWS)
    await world.run(NEWS, dedup)
    async with world.attempt(dedup) as first:
        await first.claim(intent("other"))
        await world.run(intent("other"), dedup)
        await first.delivery.fail()
    async with world.attempt(dedup) as committed:
        await committed.run(intent("released"))
        await committed.delivery.fail()
    with pytest.raises(RuntimeError):
        async with dedup.claim("failed", scope="tests"):
            raise RuntimeError
    await world.expire(NEWS)
    await dedup.create_table()
    await dedup.reap()


STRANDED = re.compile(
    r"(?i)(set(?! transaction| local)|reset|pragma(?! main\.table_| busy_timeout)"
    r"|listen|prepare|declare|lock)\b"
)


async def test_no_statement_outlives_its_transaction_on_the_connection(world: World) -> None:
    # case F10: what a session holds is stranded by pooling, and by pgbouncer's in transaction mode
    with statements(world.dedup.engine) as heard:
        await everything(world, world.dedup)
    assert len(heard.sent) > 10
    for sent in heard.sent:
        assert not STRANDED.match(sent), sent
        locks = re.findall(r"(?i)pg_\w*advisory\w*", sent)
        assert {*locks} <= {"pg_try_advisory_xact_lock", "pg_advisory_xact_lock"}, sent
        assert not re.search(
            r"(?i)set_config|(?<!local |.show )lock_timeout|temp(orary)? table", f" {sent}"
        ), sent


async def test_the_next_user_of_the_connection_finds_it_as_it_was(world: World) -> None:
    # case F2: lock_timeout and the like do not leak
    engine = engine_on(world.url, pool_size=1, max_overflow=0)
    dedup = world.runtime(engine=engine)
    settings = text(world.hands.settings)
    async with engine.connect() as connection:
        before = (await connection.execute(settings)).all()
    async with world.attempt(dedup) as attempt:
        await attempt.run(NEWS)
    await world.run(NEWS, dedup)
    with pytest.raises(RuntimeError):
        async with dedup.claim("failed", scope="tests"):
            raise RuntimeError
    await dedup.reap()
    async with world.attempt() as writer:
        await writer.claim(intent("other"))
        await dedup.reap()  # beside a writer, which SQLite's reaper does not wait for
    async with engine.connect() as connection:
        assert (await connection.execute(settings)).all() == before
        if world.hands.held_locks is not None:
            assert await connection.scalar(text(world.hands.held_locks)) == 0


async def test_a_refused_twin_waits_for_no_lock(world: World) -> None:
    # case F2
    if Promise.SEES_TWINS_ELSEWHERE not in world.backend:
        # The twin in this process is answered by a look, for a claim would wait for the writer's lock.
        async with world.attempt() as first:
            await first.claim(NEWS)
            with statements(world.dedup.engine) as heard:
                assert await world.run(NEWS) == InFlight()
            assert [sent.split()[0] for sent in heard.sent] == ["SELECT"]
        return
    impatient = world.runtime()
    async with world.attempt() as first, world.attempt(impatient) as twin:
        await first.claim(NEWS)
        await twin.session.execute(text(str(world.hands.impatient)))
        assert await twin.claim(NEWS) == InFlight()


# Only codes are judged, never texts


class DriverError(Exception):
    """An error as a driver raises it, in a language of the server's choice."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.sqlstate = code


def test_an_error_is_known_by_its_code_whatever_its_text_says() -> None:
    # case G9
    foreign = DBAPIError("", None, DriverError("doppelter Schlüsselwert verletzt Unique-Constraint", "40001"))
    lookalike = DBAPIError("", None, DriverError("could not serialize access 40001 duplicate key", None))
    assert sqlstate(foreign) == "40001"
    assert sqlstate(lookalike) is None


def _judges_text(node: ast.AST) -> bool:
    """Tell whether a node compares or searches the text of a caught exception."""

    def is_text_of_an_error(part: ast.AST) -> bool:
        match part:
            case ast.Call(func=ast.Name("str" | "repr"), args=[ast.Name(name)]):
                return name in {"error", "exc", "err", "e", "exception"}
            case ast.Call(func=ast.Name("str" | "repr"), args=[ast.Attribute(attr="orig")]):
                return True
            case ast.Attribute(attr="message" | "msg" | "pgerror" | "detail" | "message_primary"):
                return isinstance(part.ctx, ast.Load)
        return False

    return isinstance(node, ast.Compare | ast.Call | ast.Match) and any(
        is_text_of_an_error(part)
        for child in ast.iter_child_nodes(node)
        for part in ast.walk(child)
        if not isinstance(child, ast.JoinedStr)
    )


def test_no_code_of_the_store_judges_by_the_text_of_an_error() -> None:
    # case G9
    assert _judges_text(ast.parse("if 'unique' in str(error): ...").body[0].test)  # type: ignore[attr-defined]
    assert _judges_text(ast.parse("re.search('unique', str(error.orig))").body[0].value)  # type: ignore[attr-defined]
    assert not _judges_text(ast.parse("error.orig.args[0] == 1062").body[0].value)  # type: ignore[attr-defined]
    modules = [PACKAGE / "core.py", *(PACKAGE / "stores").rglob("*.py")]
    assert len(modules) > 4
    guilty = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr | ast.Match) and _judges_text(node)
    ]
    assert guilty == []
