"""The session of a message handler: which parameter gets it, and who opens it."""

from __future__ import annotations

import inspect
import re
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, get_args, get_origin, get_type_hints

from fastapi_dedup.claims import Claim
from fastapi_dedup.declared import annotations_of
from fastapi_dedup.errors import ConfigurationError, StoreUnavailableError
from fastapi_dedup.stores.borrowed import is_session
from fastapi_dedup.stores.failures import of_the_database
from fastapi_dedup.stores.threads import entered_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from fastapi_dedup.policy import Policy

__all__ = ["SessionUnavailableError", "check_factory", "factory_of", "opened", "parameters_of"]


class SessionUnavailableError(StoreUnavailableError):
    """The handler's session could not be opened, so it was not run."""


@asynccontextmanager
async def opened(
    policies: Sequence[Policy], given: Any, opens: Callable[[], Any] | None
) -> AsyncIterator[Any]:
    """Yield the handler's own session: given, or made by the policies' `session=`; None where it has none.

    Raises:
        SessionUnavailableError: The database did not let it be opened.
    """
    sources = {factory_of(policy.session) for policy in policies if policy.session is not None}
    make = sources.pop() if sources else opens
    if given is not None or make is None:
        yield given
        return
    async with AsyncExitStack() as stack:
        with _opening():
            made = make()
            if inspect.isasyncgen(made):
                made = asynccontextmanager(lambda: made)()
            elif inspect.isgenerator(made):
                made = contextmanager(lambda: made)()
            if isinstance(made, AbstractAsyncContextManager):
                session = await stack.enter_async_context(made)
            elif isinstance(made, AbstractContextManager):
                session = await stack.enter_async_context(entered_in_thread(made))
            else:
                session = await made if inspect.isawaitable(made) else made
        yield session


@contextmanager
def _opening() -> Iterator[None]:
    """Tell a database that is down from a handler that fails: what raised here is not its work."""
    try:
        yield
    except Exception as error:
        if not of_the_database(error):
            raise
        msg = f"the handler's session could not be opened ({type(error).__name__})"
        raise SessionUnavailableError(msg) from error


def factory_of(session: Any) -> Callable[[], Any]:
    """Return what makes a session, whether it is named as for FastAPI (Depends, Annotated) or plainly."""
    if get_origin(session) is Annotated:
        session = next((each for each in get_args(session)[1:] if hasattr(each, "dependency")), session)
    factory: Callable[[], Any] = getattr(session, "dependency", session)
    return factory


def check_factory(factory: Callable[[], Any]) -> None:
    """Refuse a dependency that has dependencies: over HTTP FastAPI resolves them, here nobody does."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # it cannot be called, or does not tell
        parameters = {}.values()
    wanted = [
        each.name
        for each in parameters
        if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}
        and (each.default is each.empty or hasattr(each.default, "dependency"))
    ]
    if not callable(factory) or wanted:
        takes = f" takes {', '.join(wanted)}" if wanted else " cannot be called"
        msg = (
            f"session={factory!r}{takes}: over messages nobody fills in what a dependency takes. Give one "
            "that takes nothing, or call the handler with its session"
        )
        raise ConfigurationError(msg)


_OURS = re.compile(r"\b(\w*Session|\w*scoped_session|\w*Connection|Claim)\b")


def parameters_of(function: Callable[..., Any]) -> tuple[str | None, type | None, str | None]:
    """Return the parameter for the session, of which kind it is, and the parameter for the claim.

    Raises:
        ConfigurationError: An annotation of one of them exists for type checkers only.
    """
    session = asked = claim = None
    for name, hint in _hints(function).items():
        for kind in (get_origin(hint), *(get_args(hint) or (hint,))):
            if isinstance(kind, type) and is_session(kind):
                session, asked = name, asked if session == name else kind
            if kind is Claim:
                claim = name
    return session, asked, claim


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's parameters; what exists for type checkers only is left out.

    Raises:
        ConfigurationError: What exists for type checkers only is the session or the claim.
    """
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    try:
        hints = get_type_hints(function)
    except Exception:  # noqa: BLE001 - one annotation that means nothing here hides all the others
        names = getattr(inspect.unwrap(function), "__globals__", {})
        hints = {name: _evaluated(hint, names, name) for name, hint in annotations_of(function).items()}
    hints.pop("return", None)
    return hints


def _evaluated(hint: Any, names: dict[str, Any], parameter: str) -> Any:
    text = hint.__forward_arg__ if isinstance(hint, ForwardRef) else hint
    if not isinstance(text, str):
        return hint
    try:
        return eval(text, names)  # noqa: S307 - the function's own text, as in typing.get_type_hints
    except Exception as error:
        if not _OURS.search(text):
            return None
        msg = (
            f"the annotation of {parameter}, {text!r}, names something that only exists for type checkers or "
            "inside a function: import it at run time, at the top of the module"
        )
        raise ConfigurationError(msg) from error
