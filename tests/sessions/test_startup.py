"""What start-up sees of an app's session, whatever kind it is."""

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import pytest
import sqlmodel
from fastapi import Depends, FastAPI
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Session

from fastapi_dedup import Deduplicated
from tests.http.world import World, lifespan, refusal_of


def get_session() -> Iterator[Any]:
    raise NotImplementedError
    yield


async def get_connection() -> AsyncIterator[Any]:
    raise NotImplementedError
    yield


class Database:
    def session(self) -> Iterator[Session]:
        raise NotImplementedError
        yield


DATABASE = Database()
KINDS: list[Any] = [
    pytest.param(get_session, Session, id="Session"),
    pytest.param(get_session, sqlmodel.Session, id="SQLModel"),
    pytest.param(get_session, Connection, id="Connection"),
    pytest.param(get_connection, AsyncConnection, id="AsyncConnection"),
    pytest.param(DATABASE.session, Session, id="a bound method"),
]


@pytest.mark.parametrize(("get", "annotation"), KINDS)
@pytest.mark.parametrize("style", ["def", "async def"])
async def test_two_sessions_under_one_callable_are_refused(
    sqlite: World, get: Any, annotation: Any, style: str
) -> None:
    handlers = Annotated[annotation, Depends(get, scope="function")]

    def build(app: FastAPI) -> None:
        def create(session: handlers) -> None:  # noqa: ARG001
            raise AssertionError

        async def create_async(session: handlers) -> None:  # noqa: ARG001
            raise AssertionError

        policy = Depends(Deduplicated(session=Annotated[annotation, Depends(get)]))
        app.post("/orders", dependencies=[policy])(create if style == "def" else create_async)

    message = await refusal_of(sqlite, build)
    assert message.startswith("POST /orders: ")
    assert f"two different sessions of {get.__name__}" in message
    assert f'session=Depends({get.__name__}, scope="function")' in message


@pytest.mark.parametrize(("get", "annotation"), KINDS)
@pytest.mark.parametrize("scope", [None, "function", "request"])
async def test_one_session_is_no_two(
    sqlite: World, get: Any, annotation: Any, scope: Any, caplog: pytest.LogCaptureFixture
) -> None:
    alias = Annotated[annotation, Depends(get, scope=scope)]
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=alias))])
    def create(session: alias) -> None:  # noqa: ARG001
        raise AssertionError

    async with lifespan(app):
        pass
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_a_session_that_the_handler_never_uses_is_warned_of(
    sqlite: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = sqlite.app()

    @app.post("/orders", dependencies=[Depends(Deduplicated(session=get_session))])
    def create() -> None:
        raise AssertionError

    async with lifespan(app):
        pass
    assert "POST /orders has a claim in a session of get_session that its handler never uses" in caplog.text
