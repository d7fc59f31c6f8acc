"""Consumers of RabbitMQ are killed at random until all is drained: no work is lost or done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.messaging.brokers import RabbitMQ
from tests.messaging.rounds import play
from tests.servers import driver_url


async def test_two_rounds(rabbitmq: RabbitMQ, postgres_url: str, tmp_path: Path) -> None:
    await play(2, rabbitmq, driver_url(postgres_url, "asyncpg"), tmp_path)


@pytest.mark.soak
async def test_twenty_rounds(rabbitmq: RabbitMQ, postgres_url: str, tmp_path: Path) -> None:
    await play(20, rabbitmq, driver_url(postgres_url, "asyncpg"), tmp_path)
