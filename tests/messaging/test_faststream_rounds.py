"""Consumers with FastStream are killed at random until all is drained: no work is lost or done twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.messaging import rounds
from tests.messaging.faststream_brokers import FastStreamCrew, FastStreamRabbitMQ
from tests.servers import driver_url


@pytest.fixture
async def broker(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FastStreamRabbitMQ]:
    """Yield RabbitMQ, and let the rounds' consumers be FastStream's."""
    monkeypatch.setattr(rounds, "Crew", FastStreamCrew)
    opened = FastStreamRabbitMQ(rabbitmq_url)
    yield opened
    await opened.close()


async def test_three_rounds(broker: FastStreamRabbitMQ, postgres_url: str, tmp_path: Path) -> None:
    await rounds.play(3, broker, driver_url(postgres_url, "asyncpg"), tmp_path)


@pytest.mark.soak
async def test_twenty_rounds(broker: FastStreamRabbitMQ, postgres_url: str, tmp_path: Path) -> None:
    await rounds.play(20, broker, driver_url(postgres_url, "asyncpg"), tmp_path)
