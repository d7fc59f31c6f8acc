"""/openapi.json says what the routes do, and nothing that they do not."""

import warnings
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header

from fastapi_dedup import Deduplicated, DedupMiddleware, RequestSession
from tests.http.world import KEY, Order, World, add, client, session_of


async def document_of(app: FastAPI) -> Any:
    async with client(app) as c:
        response = await c.get("/openapi.json")
        assert response.status_code == 200
        again = await c.get("/openapi.json")
        assert response.json() == again.json()
        return response.json()


def headers_of(operation: Any) -> dict[str, bool]:
    """Return the header parameters of an operation, and whether they are required."""
    return {
        each["name"]: each["required"] for each in operation.get("parameters", []) if each["in"] == "header"
    }


def orders(app: FastAPI | APIRouter, *policies: Deduplicated) -> None:
    @app.post("/orders", status_code=201, dependencies=[Depends(each) for each in policies])
    async def create(order: Order, session: RequestSession) -> Order:
        await add(session, order.sku)
        return order


async def test_a_required_header_and_its_refusals_are_shown(sqlite: World) -> None:
    app = sqlite.app(header=None)
    orders(app, Deduplicated())
    operation = (await document_of(app))["paths"]["/orders"]["post"]
    assert headers_of(operation) == {KEY: True}
    assert operation["responses"].keys() == {"201", "400", "409", "422", "503"}
    for status in ("400", "409", "503"):
        assert [*operation["responses"][status]["content"]] == ["application/problem+json"]
    assert "Retry-After" in operation["responses"]["409"]["headers"]
    (parameter,) = operation["parameters"]
    assert parameter["schema"] == {"type": "string", "minLength": 1, "maxLength": 255}


async def test_an_optional_header_is_shown_as_optional(sqlite: World) -> None:
    app = sqlite.app(header=None)
    orders(app, Deduplicated(member="X-Request-Id", required=False))
    operation = (await document_of(app))["paths"]["/orders"]["post"]
    assert headers_of(operation) == {"X-Request-Id": False}


async def test_the_middlewares_own_header_is_shown_where_it_counts(sqlite: World) -> None:
    app = sqlite.app()
    orders(app)

    @app.api_route("/other", methods=["GET", "PUT", "PATCH"], operation_id="other")
    async def other() -> None:
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one operation id for three methods
        paths = (await document_of(app))["paths"]
    assert headers_of(paths["/orders"]["post"]) == {KEY: False}
    assert headers_of(paths["/other"]["patch"]) == {KEY: False}
    assert headers_of(paths["/other"]["get"]) == headers_of(paths["/other"]["put"]) == {}
    assert paths["/other"]["get"]["responses"].keys() == {"200"}
    assert "409" in paths["/other"]["patch"]["responses"]


async def test_the_request_bodys_schema_and_the_apps_own_responses_stay_as_they_were(sqlite: World) -> None:
    bare, dressed = FastAPI(), sqlite.app(header=None)
    mine: dict[int | str, dict[str, Any]] = {409: {"description": "My own words."}}
    for app, policies in ((bare, []), (dressed, [Depends(Deduplicated("body", "sku"))])):

        @app.post("/orders", status_code=201, dependencies=policies, responses=mine)
        async def create(order: Order, page: int = 1) -> Order:
            assert page
            return order

    before = bare.openapi()
    after = await document_of(dressed)
    assert after["components"] == before["components"]
    was, now = before["paths"]["/orders"]["post"], after["paths"]["/orders"]["post"]
    added = now["responses"].keys() - was["responses"].keys()
    assert added == {"400", "503"}
    for status in added:
        del now["responses"][status]
    assert now == was


async def test_an_id_that_is_in_the_body_shows_no_header(sqlite: World) -> None:
    app = sqlite.app(header=None)
    orders(app, Deduplicated("body", "sku"))
    operation = (await document_of(app))["paths"]["/orders"]["post"]
    assert headers_of(operation) == {}
    assert {"400", "409", "503"} <= operation["responses"].keys()


@pytest.mark.parametrize("status", [200, 202, 204, 409, 410])
async def test_the_status_of_duplicates_is_shown_and_kept(sqlite: World, status: int) -> None:
    app = sqlite.app(header=None)
    orders(app, Deduplicated("body", "sku", duplicate_status=status))
    async with client(app) as c:
        shown = (await c.get("/openapi.json")).json()["paths"]["/orders"]["post"]["responses"]
        assert (await c.post("/orders", json={"sku": "a"})).status_code == 201
        again = await c.post("/orders", json={"sku": "a"})
    assert again.status_code == status
    content = shown[str(status)].get("content", {})
    assert [*content] == ([again.headers["content-type"]] if again.content else [])
    for media_type in content.values():
        assert set(media_type["schema"]["required"]) <= again.json().keys()
    assert "409" in shown  # in flight stays 409


async def test_what_is_shown_as_required_is_refused_when_it_is_missing(sqlite: World) -> None:
    app = sqlite.app()
    routes = {
        "/a": Deduplicated(),
        "/b": Deduplicated(required=False),
        "/c": Deduplicated(member=["X-Batch", "X-Line"]),
        "/d": Deduplicated("query", "n"),
    }
    for path, policy in routes.items():
        app.post(path, dependencies=[Depends(policy)])(lambda: None)
    async with client(app) as c:
        paths = (await c.get("/openapi.json")).json()["paths"]
        for path in routes:
            operation = paths[path]["post"]
            required = any(headers_of(operation).values())
            answer = await c.post(path)
            assert (answer.status_code == 400) is (required or path == "/d"), path
            assert str(answer.status_code) in operation["responses"]


async def test_routers_prefixes_and_mounted_apps_are_shown(sqlite: World) -> None:
    app = sqlite.app()
    router = APIRouter(prefix="/v1", dependencies=[Depends(Deduplicated())])
    orders(router)

    @router.get("/orders")
    async def read() -> None:
        pass

    app.include_router(router, prefix="/api")
    inner = FastAPI()
    orders(inner, Deduplicated(member="X-Inner"))
    app.mount("/shop", inner)
    async with client(app) as c:
        paths = (await c.get("/openapi.json")).json()["paths"]
        within = (await c.get("/shop/openapi.json")).json()["paths"]
    assert headers_of(paths["/api/v1/orders"]["post"]) == {KEY: True}
    assert headers_of(paths["/api/v1/orders"]["get"]) == {}
    assert headers_of(within["/orders"]["post"]) == {"X-Inner": True, KEY: False}


async def test_a_header_that_the_handler_declares_itself_is_not_shown_twice(sqlite: World) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated())])
    async def create(idempotency_key: Annotated[str, Header()]) -> str:
        return idempotency_key

    operation = (await document_of(app))["paths"]["/orders"]["post"]
    assert headers_of(operation) == {"idempotency-key": True}


async def test_what_the_session_dependency_takes_is_shown_as_fastapi_does(sqlite: World) -> None:
    get_session = session_of(sqlite)

    async def tenant_session(
        x_tenant: Annotated[str, Header()], session: Annotated[Any, Depends(get_session)]
    ) -> Any:
        assert x_tenant
        return session

    app = sqlite.app(header=None)

    @app.post("/orders", dependencies=[Depends(Deduplicated("query", "n", session=tenant_session))])
    async def create(session: Annotated[Any, Depends(tenant_session)]) -> None:
        await add(session, "a")

    operation = (await document_of(app))["paths"]["/orders"]["post"]
    assert headers_of(operation) == {"x-tenant": True}


async def test_an_openapi_function_of_the_apps_own_is_kept(sqlite: World) -> None:
    app = sqlite.app()
    orders(app, Deduplicated())
    make = app.openapi

    def mine() -> dict[str, Any]:
        document = make()
        document["info"]["x-mine"] = True
        return document

    app.openapi = mine  # type: ignore[method-assign]
    document = await document_of(app)
    assert document["info"]["x-mine"] is True
    assert headers_of(document["paths"]["/orders"]["post"]) == {KEY: True}


async def test_a_document_that_was_made_before_start_up_is_made_anew(sqlite: World) -> None:
    app = sqlite.app()
    orders(app, Deduplicated())
    app.openapi()
    assert headers_of((await document_of(app))["paths"]["/orders"]["post"]) == {KEY: True}


async def test_routes_that_are_added_after_start_up_are_shown(sqlite: World) -> None:
    app = sqlite.app()
    async with client(app) as c:
        assert (await c.get("/openapi.json")).json()["paths"] == {}
        orders(app, Deduplicated())
        app.openapi_schema = None  # FastAPI keeps the document that it has made
        paths = (await c.get("/openapi.json")).json()["paths"]
    assert headers_of(paths["/orders"]["post"]) == {KEY: True}


async def test_hidden_routes_stay_hidden(sqlite: World) -> None:
    app = FastAPI()
    app.add_middleware(DedupMiddleware, dedup=sqlite.dedup)
    app.post("/hidden", include_in_schema=False, dependencies=[Depends(Deduplicated())])(lambda: None)
    assert (await document_of(app))["paths"] == {}
