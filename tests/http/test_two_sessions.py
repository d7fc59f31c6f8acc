"""The claim and the handler work in one session: two under one callable are refused at start-up."""

import logging
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import OAuth2PasswordBearer
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Deduplicated, RequestSession
from tests.http.world import KEY, OWN, StartUpError, World, add, client, lifespan, refusal_of


async def get_session() -> AsyncIterator[AsyncSession]:
    raise NotImplementedError
    yield


class Database:
    async def session(self) -> AsyncIterator[AsyncSession]:
        raise NotImplementedError
        yield


DATABASE = Database()
PLAIN: Any = Depends(get_session)
FUNCTION: Any = Depends(get_session, scope="function")
REQUEST: Any = Depends(get_session, scope="request")
UNCACHED: Any = Depends(get_session, use_cache=False)

Build = Callable[[FastAPI], None]


def simple(policy: Any, handler: Any) -> Build:
    def build(app: FastAPI) -> None:
        @app.post("/orders", dependencies=[Depends(Deduplicated(session=policy))])
        async def create(session: Annotated[AsyncSession, handler]) -> None:
            await add(session, "a")

    return build


TWO_SESSIONS: dict[str, tuple[Any, Any, str]] = {
    "a function-scoped handler": (PLAIN, FUNCTION, 'session=Depends(get_session, scope="function")'),
    "by callable": (get_session, FUNCTION, 'session=Depends(get_session, scope="function")'),
    "by alias": (
        Annotated[AsyncSession, Depends(get_session)],
        FUNCTION,
        'session=Depends(get_session, scope="function")',
    ),
    "a function-scoped claim": (FUNCTION, PLAIN, "session=Depends(get_session)"),
    "a request-scoped handler of a function-scoped claim": (
        FUNCTION,
        REQUEST,
        'session=Depends(get_session, scope="request")',
    ),
    "an uncached handler": (PLAIN, UNCACHED, "use_cache=False"),
    "an uncached claim": (UNCACHED, PLAIN, "session=Depends(get_session)"),
}


@pytest.mark.parametrize("case", TWO_SESSIONS)
async def test_two_sessions_under_one_callable_are_refused(sqlite: World, case: str) -> None:
    policy, handler, fix = TWO_SESSIONS[case]
    message = await refusal_of(sqlite, simple(policy, handler))
    assert message.startswith("POST /orders: ")
    assert "two different sessions of get_session" in message
    assert fix in message


async def test_two_sessions_of_a_bound_method_are_refused(sqlite: World) -> None:
    build = simple(DATABASE.session, Depends(DATABASE.session, scope="function"))
    assert "two different sessions of session" in await refusal_of(sqlite, build)


async def test_two_sessions_are_found_deep_in_the_handlers_tree(sqlite: World) -> None:
    async def repository(session: Annotated[AsyncSession, FUNCTION]) -> AsyncSession:
        return session

    async def service(found: Annotated[AsyncSession, Depends(repository)]) -> AsyncSession:
        return found

    def build(app: FastAPI) -> None:
        router = APIRouter(prefix="/v1", dependencies=[Depends(Deduplicated(session=get_session))])

        @router.post("/orders")
        async def create(found: Annotated[AsyncSession, Depends(service)]) -> None:
            await add(found, "a")

        app.include_router(router, prefix="/api")

    message = await refusal_of(sqlite, build)
    assert message.startswith("POST /api/v1/orders: ")
    assert 'session=Depends(get_session, scope="function")' in message


async def test_two_sessions_are_found_in_a_mounted_app_and_below_a_deep_policy(sqlite: World) -> None:
    async def claims(_: Annotated[Any, Depends(Deduplicated(session=get_session))]) -> None:
        pass

    def build(app: FastAPI) -> None:
        inner = FastAPI()

        @inner.post("/orders", dependencies=[Depends(claims)])
        async def create(session: Annotated[AsyncSession, FUNCTION]) -> None:
            await add(session, "a")

        app.mount("/shop", inner)

    assert "POST /orders: " in await refusal_of(sqlite, build)


async def test_two_sessions_by_the_scopes_of_a_security_dependency_are_refused(sqlite: World) -> None:
    # FastAPI's cache key holds the OAuth scopes too, where a dependency's tree ends in a security scheme.
    bearer = OAuth2PasswordBearer("token", auto_error=False)

    async def session_of_user(_: Annotated[str | None, Depends(bearer)]) -> AsyncIterator[AsyncSession]:
        async with sqlite.sessions() as session, session.begin():
            yield session

    async def service(session: Annotated[AsyncSession, Depends(session_of_user)]) -> AsyncSession:
        return session

    app = sqlite.app()
    used: list[AsyncSession] = []

    @app.post("/orders")
    async def create(
        session: Annotated[AsyncSession, Security(service, scopes=["orders"])],
        claim: Annotated[Any, Depends(Deduplicated(session=session_of_user))],
    ) -> None:
        used.extend([session, claim.session])

    try:
        async with client(app) as c:
            assert (await c.post("/orders", headers={KEY: "k"})).status_code == 200
    except StartUpError as error:
        assert "POST /orders" in str(error)  # noqa: PT017 - either is right, and only one of them at a time
    else:
        assert used[0] is used[1]


async def test_one_session_is_no_two(sqlite: World, caplog: pytest.LogCaptureFixture) -> None:
    for policy, handler in [
        (PLAIN, PLAIN),
        (get_session, PLAIN),
        (PLAIN, REQUEST),  # a generator is request-scoped by default
        (REQUEST, PLAIN),
        (FUNCTION, FUNCTION),
        (Annotated[AsyncSession, FUNCTION], FUNCTION),
        (RequestSession, OWN),
    ]:
        app = sqlite.app()
        simple(policy, handler)(app)
        async with lifespan(app):
            pass
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
