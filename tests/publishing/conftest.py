"""What the tests of the publisher's side share."""

from __future__ import annotations

import pytest

from fastapi_dedup.identities import Identities
from tests.publishing.kinds import KINDS, Kind


@pytest.fixture
def identities() -> Identities:
    return Identities()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture(params=[kind for kind in KINDS if kind.inherits], ids=lambda kind: kind.name)
def inheriting(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


@pytest.fixture(params=[kind for kind in KINDS if not kind.plain_dicts], ids=lambda kind: kind.name)
def objects(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made
