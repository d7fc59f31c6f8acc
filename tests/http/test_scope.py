"""The namespace that an id is unique in: one endpoint, one principal, or a name of your own."""

import asyncio
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, World, add, client, problem


async def user(x_user: Annotated[str | None, Header()] = None) -> str:
    if x_user is None:
        raise HTTPException(401)
    return x_user


def user_of(request: Request) -> str | None:
    return request.headers.get("x-user")


def app_of(world: World, scope: Any) -> FastAPI:
    app = world.app()
    policy = Depends(Deduplicated(scope=scope))

    @app.post("/orders", dependencies=[policy])
    async def create(session: RequestSession) -> None:
        await add(session, "create")

    @app.post("/orders/{number}/cancel", dependencies=[policy])
    async def cancel(number: int, session: RequestSession) -> None:
        await add(session, f"cancel {number}")

    @app.patch("/orders/{number}", dependencies=[policy])
    async def change(number: int, session: RequestSession) -> None:
        await add(session, f"change {number}")

    return app


CALLS = [
    ("POST", "/orders"),
    ("POST", "/orders/1/cancel"),
    ("POST", "/orders/2/cancel"),
    ("PATCH", "/orders/1"),
    ("PATCH", "/orders/2"),
]


async def test_the_default_scope_is_method_and_path(world: World) -> None:
    # case D2
    async with client(app_of(world, None)) as c:
        for status in (200, 409):
            for method, path in CALLS:
                assert (await c.request(method, path, headers={KEY: "k"})).status_code == status
    assert len(await world.orders()) == 5
    assert await world.scopes() == sorted(" ".join(each) for each in CALLS)


async def test_a_name_is_shared_by_whoever_names_it(sqlite: World) -> None:
    # case D2
    async with client(app_of(sqlite, "orders")) as c:
        answers = [(await c.request(*call, headers={KEY: "k"})).status_code for call in CALLS]
    assert answers == [200, 409, 409, 409, 409]
    assert await sqlite.scopes() == ["orders"]


@pytest.mark.parametrize("scope", [user_of, Depends(user), Annotated[str, Depends(user)]])
async def test_nobody_borrows_the_id_of_another_principal(sqlite: World, scope: Any) -> None:
    # case D1
    async with client(app_of(sqlite, scope)) as c:
        for name in ("ann", "bob"):
            headers = {KEY: "k", "x-user": name}
            assert (await c.post("/orders", headers=headers)).status_code == 200
            assert (await c.post("/orders", headers=headers)).status_code == 409
            assert (await c.post("/orders/1/cancel", headers=headers)).status_code == 200
    assert await sqlite.orders() == ["create", "cancel 1"] * 2
    assert await sqlite.scopes() == [
        "POST /orders ann",
        "POST /orders bob",
        "POST /orders/1/cancel ann",
        "POST /orders/1/cancel bob",
    ]


async def test_anonymous_callers_share_no_scope(sqlite: World) -> None:
    # case D1
    async with client(app_of(sqlite, user_of)) as c:
        for headers in ({}, {"x-user": ""}, {"x-user": "  "}):
            refused = await c.post("/orders", headers={KEY: "k", **headers})
            assert (refused.status_code, problem(refused)) == (400, "missing-logical-id")
            assert refused.json()["field"] == "scope"
    async with client(app_of(sqlite, Depends(user))) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 401
    assert await sqlite.ids() == []


async def test_a_tuple_is_taken_as_it_stands(sqlite: World) -> None:
    async def tenant(request: Request) -> str | None:
        return request.headers.get("x-tenant")

    async with client(app_of(sqlite, ("shop", tenant, user_of))) as c:
        headers = {KEY: "k", "x-tenant": "t", "x-user": "u"}
        assert (await c.post("/orders", headers=headers)).status_code == 200
        assert (await c.patch("/orders/1", headers=headers)).status_code == 409
        assert (
            await c.post("/orders", headers={**headers, "x-tenant": "u", "x-user": "t"})
        ).status_code == 200
        assert (
            await c.post("/orders", headers={**headers, "x-tenant": "t u", "x-user": ""})
        ).status_code == 400
    assert await sqlite.scopes() == ["shop t u", "shop u t"]


async def test_parts_of_a_scope_never_meet_however_they_are_split(sqlite: World) -> None:
    # case D1
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(scope=("a b", user_of)))])
    async def create() -> None:
        pass

    @app.post("/other", dependencies=[Depends(Deduplicated(scope=("a", user_of)))])
    async def other() -> None:
        pass

    async with client(app) as c:
        assert (await c.post("/orders", headers={KEY: "k", "x-user": "c"})).status_code == 200
        assert (await c.post("/other", headers={KEY: "k", "x-user": "b c"})).status_code == 200
    assert await sqlite.scopes() == ["a b c", "a b c"]


async def test_a_principal_that_is_no_id_is_the_servers_fault(sqlite: World) -> None:
    # `scope=Depends(current_user)` where that returns the whole user: no client can mend it, so it is no 400.
    class User(BaseModel):
        name: str

    async with client(app_of(sqlite, lambda _: User(name="ann"))) as c:
        assert (await c.post("/orders", headers={KEY: "k"})).status_code == 500
    assert (await sqlite.orders(), await sqlite.ids()) == ([], [])


async def test_an_id_of_the_body_is_scoped_like_any_other(sqlite: World) -> None:
    # case D1
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated("body", "sku", scope=Depends(user)))])
    async def create(body: dict[str, Any], session: RequestSession) -> None:
        await add(session, body["sku"])

    async with client(app) as c:
        for name in ("ann", "bob"):
            assert (await c.post("/orders", json={"sku": "a"}, headers={"x-user": name})).status_code == 200
            assert (await c.post("/orders", json={"sku": "a"}, headers={"x-user": name})).status_code == 409


async def test_one_cannot_block_another_by_claiming_first_even_in_flight(world: World) -> None:
    # case D1
    app = world.app()
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.post("/orders", dependencies=[Depends(Deduplicated(scope=user_of))])
    async def create(request: Request) -> None:
        if request.headers["x-user"] == "mallory":
            running.set()
            await go_on.wait()

    async with client(app) as c:
        mallory = asyncio.create_task(c.post("/orders", headers={KEY: "k", "x-user": "mallory"}))
        await running.wait()
        async with asyncio.timeout(5):
            if (
                world.engine.dialect.name == "sqlite"
            ):  # one writer at a time: bob waits for the file, not the id
                go_on.set()
            assert (await c.post("/orders", headers={KEY: "k", "x-user": "bob"})).status_code == 200
        go_on.set()
        assert (await mallory).status_code == 200


async def test_the_path_of_a_scope_is_the_whole_path_under_prefixes_and_mounts(sqlite: World) -> None:
    inner = FastAPI()
    router = APIRouter(prefix="/v1")

    @router.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create() -> None:
        pass

    inner.include_router(router)
    app = sqlite.app()
    app.mount("/eu", inner)
    app.mount("/us", inner)
    app.include_router(router, prefix="/root")
    async with client(app) as c:
        for path in ("/eu/v1/orders", "/us/v1/orders", "/root/v1/orders"):
            assert (await c.post(path, headers={KEY: "k"})).status_code == 200
    assert await sqlite.scopes() == ["POST /eu/v1/orders", "POST /root/v1/orders", "POST /us/v1/orders"]


async def test_the_middlewares_own_policy_takes_a_scope_too(sqlite: World) -> None:
    # case D1
    app = FastAPI()
    policy = Deduplicated(required=False, scope=user_of)
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup, policy=policy)

    @app.post("/orders")
    async def create() -> None:
        pass

    async with client(app) as c:
        for name in ("ann", "bob"):
            assert (await c.post("/orders", headers={KEY: "k", "x-user": name})).status_code == 200
            assert (await c.post("/orders", headers={KEY: "k", "x-user": name})).status_code == 409
