"""Routes whose handler works in a kind of session: `async def` ones, and for blocking kinds `def` ones."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

from anyio import from_thread
from fastapi import Depends, FastAPI, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastapi_dedup import Deduplicated
from tests.sessions.kinds import REQUEST, Kind, drive

Body = Callable[[Any, str], Awaitable[Response | None]]
"""What a handler does with its session, and a word from the path."""


@dataclass
class Shop:
    """An app with one route, POST /orders/{word}, whose handler works in a kind of session.

    Attributes:
        kind: The kind.
        style: `"async def"` or `"def"`: what the handler is.
    """

    kind: Kind
    style: str
    seen: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """Which work and claims were committed at the moment that each response left."""

    def app(
        self,
        body: Body,
        *,
        get_session: Callable[..., Any] | None = None,
        exits: Any = None,
        members: tuple[str | None, ...] = (None,),
        route: Mapping[str, Any] = MappingProxyType({}),
        **policy: Any,
    ) -> FastAPI:
        """Return the app.

        Args:
            body: What the handler does.
            get_session: The session's dependency. Default: it commits at its end, and rolls back on an error.
            exits: The dependency's scope, in FastAPI's sense.
            members: The member of each policy that the route has; None is that of the header.
            route: Options of the route.
            **policy: Options of the policies.
        """
        depends = Depends(get_session or self.kind.dependency(), scope=exits)
        app = self.kind.world.app()
        app.add_middleware(Outside, shop=self)
        policies = [
            Deduplicated("path" if member else "header", member, session=depends, **policy)
            for member in members
        ]
        options: dict[str, Any] = {"dependencies": [Depends(each) for each in policies], **route}

        @app.post("/orders/{word}", **options)
        async def create(word: str, session: Annotated[Any, depends]) -> Any:
            return await body(session, word)

        if self.style == "def":
            app.router.routes.pop()

            @app.post("/orders/{word}", **options)
            def create_in_thread(word: str, session: Annotated[Any, depends]) -> Any:
                return drive(body(session, word))  # type: ignore[arg-type]

        return app

    async def meanwhile(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do something while a handler is in the middle of its work, whichever thread that is in."""
        if self.style == "def":
            from_thread.run(work)
        else:
            await work()


class Outside:
    """What is around the app: tells requests apart, and notes what is committed when a response leaves."""

    def __init__(self, app: ASGIApp, shop: Shop) -> None:
        self.app = app
        self.shop = shop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        world = self.shop.kind.world

        async def look(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.shop.seen.append((await world.orders(), await world.ids()))
            await send(message)

        REQUEST.set(object())
        await self.app(scope, receive, look)
