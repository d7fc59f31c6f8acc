"""Consumers of JetStream are killed at random until all is drained: no work is lost or done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messaging.brokers import JetStream
from tests.messaging.rounds import play
from tests.servers import driver_url


async def test_two_rounds(jetstream: JetStream, postgres_url: str, tmp_path: Path) -> None:
    await play(2, jetstream, driver_url(postgres_url, "asyncpg"), tmp_path)


@pytest.mark.soak
async def test_twenty_rounds(jetstream: JetStream, postgres_url: str, tmp_path: Path) -> None:
    await play(20, jetstream, driver_url(postgres_url, "asyncpg"), tmp_path)
