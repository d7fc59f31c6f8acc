"""`Deduplicated(session=...)`: the claim rides the handler's session, whatever that is."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse
from sqlalchemy import event, text

from fastapi_dedup.hooks import EventKind
from tests.http.world import KEY, client, eventually, problem
from tests.sessions.conftest import kind_on, name_of
from tests.sessions.kinds import CASES, DIFFERENT, KINDS, MARIADB, ASession
from tests.sessions.routes import Shop


def styles(cases: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param((kind, backend, style), id=f"{name_of((kind, backend))}-{style}")
        for kind, backend in cases
        for style in (("async def", "def") if KINDS[kind].blocking else ("async def",))
    ]


@pytest.fixture(params=styles(CASES + MARIADB))
async def any_shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """Yield every kind of session, under every kind of handler."""
    name, backend, style = request.param
    async with kind_on((name, backend), request, tmp_path) as kind:
        yield Shop(kind, style)


@pytest.fixture(params=styles(DIFFERENT))
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    """Yield every kind of session whose transactions differ, under every kind of handler."""
    name, backend, style = request.param
    async with kind_on((name, backend), request, tmp_path) as kind:
        yield Shop(kind, style)


async def found(shop: Shop) -> tuple[list[str], list[str]]:
    """Return the work and the claims that are committed."""
    return await shop.kind.world.orders(), await shop.kind.world.ids()


async def test_the_claim_rides_the_session_of_the_handler(any_shop: Shop) -> None:
    kind = any_shop.kind

    async def create(session: Any, sku: str) -> None:
        assert await kind.claims(session) == 1
        await kind.add(session, sku)
        if sku == "bad":
            raise HTTPException(400)

    async with client(any_shop.app(create, scope="orders")) as c:
        assert (await c.post("/orders/bad", headers={KEY: "k"})).status_code == 400
        assert await found(any_shop) == ([], [])
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 200
        again = await c.post("/orders/good", headers={KEY: "k"})
        assert (again.status_code, problem(again)) == (409, "duplicate")
    assert await found(any_shop) == (["good"], ["k"])


@pytest.mark.parametrize(
    "commits", ["at a request-scoped exit", "at a function-scoped exit", "in the handler"]
)
async def test_success_is_told_only_after_commit(shop: Shop, commits: str) -> None:
    # case A2
    kind = shop.kind
    by_handler = commits == "in the handler"

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        if by_handler:
            await kind.commit(session)

    get_session = kind.dependency(commits=not by_handler)
    exits = "function" if "function" in commits else None
    async with client(shop.app(create, get_session=get_session, exits=exits)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert shop.seen[0] == (["a"], ["k"])


@pytest.mark.parametrize("exits", [None, "function"])
async def test_a_session_that_nobody_commits_is_no_success(shop: Shop, exits: Any) -> None:
    # case A2
    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)

    app = shop.app(create, get_session=shop.kind.dependency(commits=False), exits=exits)
    async with client(app) as c:
        for _ in range(2):
            assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
    assert await found(shop) == ([], [])


@pytest.fixture
async def strict(shop: Shop) -> AsyncIterator[Shop]:
    """Yield a shop with a table `lines` whose constraint only COMMIT looks at."""
    engine = shop.kind.world.engine
    if engine.dialect.name == "sqlite":
        engines = [engine.sync_engine, *([shop.kind.engine] if isinstance(shop.kind, ASession) else [])]
        for each in engines:
            event.listen(
                each, "connect", lambda connection, _: connection.execute("pragma foreign_keys = on")
            )
        await engine.dispose()
    async with engine.begin() as connection:
        for left in ("lines", "parents"):  # by another module's tests, on the same database
            await connection.execute(text(f"drop table if exists {left}"))
        await connection.execute(text("create table parents (id integer primary key)"))
        await connection.execute(
            text("create table lines (parent integer references parents (id) deferrable initially deferred)")
        )
    yield shop
    async with engine.begin() as connection:
        await connection.execute(text("drop table lines"))
        await connection.execute(text("drop table parents"))


@pytest.mark.parametrize(
    "commits", ["at a request-scoped exit", "at a function-scoped exit", "in the handler"]
)
async def test_a_commit_that_fails_is_never_told_as_a_success(strict: Shop, commits: str) -> None:
    # case A2
    kind = strict.kind
    by_handler = commits == "in the handler"

    async def create(session: Any, sku: str) -> None:
        await kind.run(session, "insert into lines (parent) values (1)")
        await kind.add(session, sku)
        if by_handler:
            await kind.commit(session)

    get_session = kind.dependency(commits=not by_handler)
    exits = "function" if "function" in commits else None
    async with client(strict.app(create, get_session=get_session, exits=exits)) as c:
        for _ in range(2):
            assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500
            assert await found(strict) == ([], [])
        async with kind.world.engine.begin() as connection:
            await connection.execute(text("insert into parents (id) values (1)"))
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert await found(strict) == (["a"], ["k"])


async def test_a_refused_duplicate_leaves_the_apps_transaction_usable(shop: Shop) -> None:
    # case F5
    kind = shop.kind

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    async def before(session: Any) -> None:
        await kind.add(session, "before")

    async def audit(session: Any) -> None:
        await kind.add(session, "audit")
        await kind.commit(session)

    get_session = kind.dependency(first=before, on_error=audit)
    async with client(shop.app(create, get_session=get_session)) as c:
        assert (await c.post("/orders/work", headers={KEY: "k"})).status_code == 200
        again = await c.post("/orders/work", headers={KEY: "k"})
        assert (again.status_code, problem(again)) == (409, "duplicate")
    assert await found(shop) == (["before", "work", "before", "audit"], ["k"])


async def test_a_session_that_commits_in_spite_of_a_failure_does_not_keep_the_id(shop: Shop) -> None:
    # case A3
    kind = shop.kind
    tries: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        tries.append(sku)
        if len(tries) == 1:
            raise HTTPException(400)

    async with client(shop.app(create, get_session=kind.dependency(on_error=kind.commit))) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 400
        assert await shop.kind.world.ids() == []
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert tries == ["a", "a"]


async def test_a_returned_error_gives_the_id_back(shop: Shop) -> None:
    # case A3
    kind = shop.kind
    statuses = [503, 200]

    async def create(session: Any, sku: str) -> Response:
        await kind.add(session, sku)
        return JSONResponse({}, statuses.pop(0))

    async with client(shop.app(create)) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 503
        assert shop.seen[0][1] == []
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert await shop.kind.world.ids() == ["k"]


async def test_a_response_that_does_not_fit_its_model_frees_the_id(shop: Shop) -> None:
    async def create(session: Any, sku: str) -> Any:
        await shop.kind.add(session, sku)
        return {"sku": sku} if sku == "good" else "no model's"

    async with client(shop.app(create, route={"response_model": dict[str, str]}, scope="orders")) as c:
        assert (await c.post("/orders/bad", headers={KEY: "k"})).status_code == 500
        assert await found(shop) == ([], [])
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 200
    assert await found(shop) == (["good"], ["k"])


async def test_a_handler_that_committed_midway_and_then_failed_gets_its_claim_released(shop: Shop) -> None:
    # cases A3, E2
    kind = shop.kind
    tries: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        await kind.commit(session)
        tries.append(sku)
        if len(tries) == 1:
            msg = "the handler failed after its COMMIT, as the test wished"
            raise RuntimeError(msg)

    async with client(shop.app(create, get_session=kind.dependency(commits=False))) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 500

        async def free() -> bool:
            return await shop.kind.world.ids() == []

        await eventually(free)
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert await found(shop) == (["a", "a"], ["k"])


@pytest.mark.parametrize("exits", [None, "function"])
async def test_work_that_goes_on_after_a_rollback_never_commits_without_its_claim(
    shop: Shop, exits: Any
) -> None:
    # DESIGN.md §4.2
    kind = shop.kind

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, "dropped")
        await kind.rollback(session)
        await kind.add(session, sku)

    async with client(shop.app(create, exits=exits)) as c:
        assert (await c.post("/orders/kept", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/kept", headers={KEY: "k"})).status_code == 409
    assert await found(shop) == (["kept"], ["k"])


async def test_a_handler_that_rolls_back_midway_loses_against_a_twin_that_did_the_work(shop: Shop) -> None:
    kind = shop.kind

    async def twin() -> None:
        assert (await c.post("/orders/quick", headers={KEY: "k"})).status_code == 200

    async def create(session: Any, sku: str) -> None:
        if sku == "slow":
            await kind.rollback(session)
            await shop.meanwhile(twin)
        await kind.add(session, sku)

    async with client(shop.app(create, scope="orders")) as c:
        answer = await c.post("/orders/slow", headers={KEY: "k"})
        assert answer.status_code in {409, 500}
        assert await found(shop) == (["quick"], ["k"])
        again = await c.post("/orders/slow", headers={KEY: "k"})
        assert (again.status_code, problem(again)) == (409, "duplicate")


async def test_a_savepoint_of_the_handlers_that_is_rolled_back_keeps_the_claim(shop: Shop) -> None:
    # case F7
    kind = shop.kind

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, "kept")
        savepoint = await kind.savepoint(session)
        await kind.add(session, "dropped")
        await kind.undo(savepoint)
        await kind.add(session, sku)

    async with client(shop.app(create)) as c:
        assert (await c.post("/orders/after", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/after", headers={KEY: "k"})).status_code == 409
    assert await found(shop) == (["kept", "after"], ["k"])


async def test_a_claim_in_a_savepoint_that_is_rolled_back_is_free(shop: Shop) -> None:
    # case F7, DESIGN.md §4.3
    kind = shop.kind
    tries: list[str] = []

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)
        tries.append(sku)
        if len(tries) == 1:
            raise HTTPException(400)

    async with client(shop.app(create, get_session=kind.dependency(nested=True))) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 400
        assert await found(shop) == ([], [])
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 409
    assert await found(shop) == (["a"], ["k"])


async def test_a_failed_statement_that_the_handler_swallows_is_no_success_without_work(shop: Shop) -> None:
    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)
        await shop.kind.stumble(session)

    async with client(shop.app(create)) as c:
        answer = await c.post("/orders/a", headers={KEY: "k"})
    state = answer.status_code, *await found(shop)
    aborts = shop.kind.world.engine.dialect.name == "postgresql"
    assert state == ((500, [], []) if aborts else (200, ["a"], ["k"]))


@pytest.mark.parametrize("same", [False, True], ids=["distinct keys", "one key"])
async def test_many_requests_at_once_that_read_before_they_claim_get_through(shop: Shop, same: bool) -> None:
    # case F8
    kind = shop.kind

    async def create(session: Any, sku: str) -> None:
        await kind.add(session, sku)

    async def read(session: Any) -> None:
        await kind.run(session, "select count(*) from orders")

    count = 20 if kind.world.engine.dialect.name == "sqlite" else 5  # a server is shared with other runs
    async with client(shop.app(create, get_session=kind.dependency(first=read))) as c:
        keys = ["k" if same else f"{n}" for n in range(count)]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*[c.post("/orders/a", headers={KEY: key}) for key in keys])
    statuses = sorted(each.status_code for each in answers)
    assert statuses == ([200] + [409] * (count - 1) if same else [200] * count)
    assert len(await kind.world.orders()) == len(await kind.world.ids()) == len({*keys})


@pytest.mark.parametrize("exits", [None, "function"])
async def test_a_claim_in_memory_waits_for_the_commit_of_the_session(shop: Shop, exits: Any) -> None:
    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)
        if sku == "bad":
            raise HTTPException(400)

    async with client(shop.app(create, exits=exits, scope="orders", store="memory")) as c:
        assert (await c.post("/orders/bad", headers={KEY: "k"})).status_code == 400
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/good", headers={KEY: "k"})).status_code == 409
    assert await found(shop) == (["good"], [])


@pytest.mark.parametrize("exits", [None, "function"])
async def test_a_claim_in_memory_is_kept_where_the_handler_only_reads(shop: Shop, exits: Any) -> None:
    async def look(session: Any, _: str) -> None:
        await shop.kind.run(session, "select count(*) from orders")

    async with client(shop.app(look, exits=exits, store="memory")) as c:
        answers = [await c.post("/orders/a", headers={KEY: "k"}) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 409]


async def test_a_claim_in_memory_is_free_where_nobody_commits_the_session(shop: Shop) -> None:
    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)

    get_session = shop.kind.dependency(commits=False)
    async with client(shop.app(create, get_session=get_session, store="memory")) as c:
        for _ in range(2):
            assert (await c.post("/orders/a", headers={KEY: "k"})).status_code in {200, 500}
    assert await found(shop) == ([], [])


async def test_two_policies_of_one_route_share_the_session(shop: Shop) -> None:
    async def create(session: Any, sku: str) -> None:
        assert await shop.kind.claims(session) == 2
        await shop.kind.add(session, sku)

    async with client(shop.app(create, members=("word", None))) as c:
        assert (await c.post("/orders/a", headers={KEY: "k"})).status_code == 200
        assert (await c.post("/orders/a", headers={KEY: "other"})).status_code == 409
    assert await found(shop) == (["a"], ["a", "k"])


async def test_hooks_hear_what_became_of_each_claim(shop: Shop) -> None:
    async def create(session: Any, sku: str) -> None:
        await shop.kind.add(session, sku)
        if sku == "bad":
            raise HTTPException(400)

    async with client(shop.app(create, scope="orders")) as c:
        for sku in ("bad", "good", "good"):
            await c.post(f"/orders/{sku}", headers={KEY: "k"})
    told = [
        EventKind.CLAIMED,
        EventKind.RELEASED,
        EventKind.CLAIMED,
        EventKind.COMMITTED,
        EventKind.DUPLICATE,
    ]
    assert [each.kind for each in shop.kind.world.events] == told
