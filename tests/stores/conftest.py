"""The worlds that the suite runs in: one per backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.databases import url_of
from tests.redis.worlds import RedisWorld
from tests.stores.promises import BACKENDS, SLICE, Backend
from tests.stores.worlds import World, world_of

_STALLED = {("asyncmy-generic", "test_batches_in_opposite_order_never_deadlock")}
"""It stood still once for minutes, and nobody has found out why: no run of `make test` is to hang on it."""
_NO_PARAMETERS = SimpleNamespace(params={})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make soak` what would take the time of every run to say again what another driver says."""
    for item in items:
        backend = getattr(item, "callspec", _NO_PARAMETERS).params.get("backend")
        if not isinstance(backend, Backend):
            continue
        in_slice = item.path.stem in SLICE and (backend.name, _name(item)) not in _STALLED
        if backend.in_slices and not in_slice:
            item.add_marker(pytest.mark.soak)


def _name(item: pytest.Item) -> str:
    return str(getattr(item, "originalname", item.name))


@pytest.fixture(params=BACKENDS, ids=lambda backend: str(backend.name))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Return each backend in turn."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture
def database_url(backend: Backend, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of the backend's database."""
    return url_of(backend.database, request, tmp_path)


@pytest.fixture(scope="session")
def pristine() -> set[str]:
    """Return the tables that may be used again."""
    return set()


@pytest.fixture
def make_world(backend: Backend, request: pytest.FixtureRequest) -> Callable[..., World]:
    """Return what makes worlds on the backend."""
    if backend.leases is None:
        return World
    return partial(RedisWorld, redis=request.getfixturevalue(backend.leases.fixture))


@pytest.fixture
async def world(
    backend: Backend, database_url: str, pristine: set[str], make_world: Callable[..., World]
) -> AsyncIterator[World]:
    """Yield a world on the backend."""
    async with world_of(backend, database_url, pristine=pristine, make=make_world) as new:
        yield new


@pytest.fixture
async def timed(
    backend: Backend, database_url: str, pristine: set[str], make_world: Callable[..., World]
) -> AsyncIterator[World]:
    """Yield a world whose clock stands where the test puts it."""
    async with world_of(backend, database_url, pristine=pristine, stopped_clock=True, make=make_world) as new:
        yield new
