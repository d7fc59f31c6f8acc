"""Real RabbitMQ and JetStream with FastStream as the consumer; the workers of `rounds` run on it too."""

from __future__ import annotations

import multiprocessing.process
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any
from unittest.mock import patch

from faststream import AckPolicy, Context
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
from nats.js.api import ConsumerConfig

from fastapi_dedup import Dedup
from fastapi_dedup.messaging.faststream import DeduplicatingMiddleware, MessageSession
from fastapi_dedup.policy import Policy
from tests.apps.forked import forking
from tests.messaging import workers
from tests.messaging.brokers import AT_ONCE, BROKERS, JetStream, RabbitMQ
from tests.messaging.shop import PAUSE
from tests.messaging.workers import Crew, Job

Message = Annotated[Any, Context("message")]


class FastStreamRabbitMQ(RabbitMQ):
    """RabbitMQ, consumed through FastStream."""

    kind = "rabbitmq, faststream"

    def __init__(self, url: str, consumers_url: str | None = None) -> None:
        super().__init__(url, consumers_url)
        self._running: list[RabbitBroker] = []

    async def consume(
        self,
        endpoint: str,
        dedup: Dedup,
        *policies: Policy,
        function: Callable[..., Any],
        pause: timedelta = PAUSE,
        **options: Any,
    ) -> None:
        broker = RabbitBroker(
            self._consumers_url,
            reconnect_interval=0.1,
            default_channel=Channel(prefetch_count=AT_ONCE),
            middlewares=[DeduplicatingMiddleware(dedup, *policies, pause=pause)],
            logger=None,
        )
        subscribe = broker.subscriber(
            RabbitQueue(endpoint, declare=False), **{"ack_policy": AckPolicy.NACK_ON_ERROR, **options}
        )

        @subscribe
        async def on_order(message: Message, session: MessageSession) -> None:
            await function(message, session)

        self._running.append(broker)
        await broker.start()

    async def hang_up(self) -> None:
        for broker in self._running:
            if broker._connection is not None:
                await broker._connection.close()
        await self.stop()

    async def stop(self) -> None:
        while self._running:
            await self._running.pop().stop()


class FastStreamJetStream(JetStream):
    """JetStream, consumed through FastStream: pull consumers."""

    kind = "jetstream, faststream"

    def __init__(self, url: str, consumers_url: str | None = None) -> None:
        super().__init__(url, consumers_url)
        self._running: list[NatsBroker] = []

    async def consume(
        self,
        endpoint: str,
        dedup: Dedup,
        *policies: Policy,
        function: Callable[..., Any],
        pause: timedelta = PAUSE,
        **options: Any,
    ) -> None:
        name, _, durable = endpoint.partition("/")
        broker = NatsBroker(
            self._consumers_url,
            reconnect_time_wait=0.1,  # type: ignore[arg-type]  # nats-py takes fractions
            max_reconnect_attempts=-1,
            middlewares=[DeduplicatingMiddleware(dedup, *policies, pause=pause)],
            logger=None,
        )

        @broker.subscriber(
            name,
            stream=JStream(name, declare=False),
            durable=durable,
            config=ConsumerConfig(ack_wait=self.ack_wait),
            pull_sub=PullSub(),
            max_workers=AT_ONCE,
            **{"ack_policy": AckPolicy.NACK_ON_ERROR, **options},
        )
        async def on_order(message: Message, session: MessageSession) -> None:
            await function(message, session)

        self._running.append(broker)
        await broker.start()

    async def hang_up(self) -> None:
        while self._running:
            await self._running.pop().stop()

    async def stop(self) -> None:
        await self.hang_up()


def work(job: Job) -> None:
    """Consume with FastStream until told to stop: a process's whole life."""
    with patch.dict(BROKERS, {job.kind: FastStreamRabbitMQ}):
        workers.work(job)


class FastStreamCrew(Crew):
    """Some workers on one job, which consume with FastStream."""

    def _start(self) -> multiprocessing.process.BaseProcess:
        worker = forking().Process(target=work, args=(self._job,), daemon=True)
        worker.start()
        return worker
