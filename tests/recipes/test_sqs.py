"""The page on SQS, word for word, with aiobotocore against moto's server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import Dedup, Deduplicated
from fastapi_dedup.messaging.acknowledge import Judge
from tests.messaging.shop import fail
from tests.messaging.test_pages import page
from tests.recipes.conftest import Shop, at_work

PAUSE = timedelta(seconds=0.1)
"""How long a message is put off; SQS counts whole seconds, so that becomes one."""

LONG = "9" * 200


@dataclass
class Queue:
    """What the page defines, on queues of the test's own."""

    sqs: Any
    url: str
    dead: str
    defined: dict[str, Any]

    async def publish(self, *orders: str) -> None:
        for order in orders:
            placed = self.defined["OrderPlaced"](order, "anna")
            await self.defined["publish"](self.sqs, self.url, placed)

    async def send(self, order: str, **arguments: Any) -> None:
        """Send an order past SQS' own deduplication."""
        await self.sqs.send_message(
            QueueUrl=self.url,
            MessageBody=f'{{"order_id": "{order}"}}',
            MessageGroupId="anna",
            **{"MessageDeduplicationId": hashlib.sha256(repr(arguments).encode()).hexdigest(), **arguments},
        )

    def worker(self, wrap: Callable[[Any], Any] | None = None) -> Any:
        """Return a block in which a worker consumes; the page's handler may be wrapped."""
        dedup: Dedup = self.defined["dedup"]
        inner = self.defined["on_order"].__wrapped__
        handler = dedup.handler(Deduplicated())(wrap(inner) if wrap else inner)
        self.defined["judge"] = Judge(handler, on_error="requeue", pause=PAUSE)
        return at_work(self._consume())

    async def _consume(self) -> None:
        while True:
            await self.defined["receive"](self.sqs, self.url, self.dead, seconds=0)
            await asyncio.sleep(0.02)

    async def left(self) -> int:
        """Return how many messages the queue holds, visible or not.

        It is asked twice: a message whose visibility timeout ends while SQS counts is in neither number.
        """
        return max(await self._count(), await self._count())

    async def _count(self) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answer = await self.sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)
        return sum(int(number) for number in answer["Attributes"].values())

    async def drained(self) -> bool:
        return await self.left() == 0

    async def letters(self) -> list[dict[str, Any]]:
        """Return the dead letters."""
        answer = await self.sqs.receive_message(QueueUrl=self.dead, MessageAttributeNames=["All"])
        letters: list[dict[str, Any]] = answer.get("Messages", [])
        return letters


def stamp(logical_id: str) -> dict[str, Any]:
    """Return an id as a message attribute."""
    return {"MessageAttributes": {"deduplication-id": {"DataType": "String", "StringValue": logical_id}}}


@pytest.fixture
async def queue(sqs: Any, name: str, shop: Shop) -> AsyncIterator[Queue]:  # noqa: ARG001 - its folder
    fifo = {"FifoQueue": "true", "VisibilityTimeout": "1"}
    url, dead = [
        (await sqs.create_queue(QueueName=f"{each}.fifo", Attributes=fifo))["QueueUrl"]
        for each in (name, f"{name}-dead")
    ]
    defined = page("consume-from-sqs.md", {})
    async with defined["dedup"]:
        yield Queue(sqs, url, dead, defined)
        await defined["dedup"].engine.dispose()
    for each in (url, dead):
        await sqs.delete_queue(QueueUrl=each)


async def test_what_is_published_twice_within_five_minutes_is_dropped_by_sqs_itself(
    queue: Queue, shop: Shop
) -> None:
    await queue.publish("A-17", "A-17", "A-18")
    assert await queue.left() == 2
    async with queue.worker():
        await shop.until(queue.drained)
    assert shop.orders == ["A-17", "A-18"]


async def test_a_copy_that_sqs_lets_through_is_deleted_and_not_run(
    queue: Queue, shop: Shop
) -> None:  # case G3
    await queue.publish("A-17")
    for attempt in ("m2", "m3"):
        await queue.send("A-17", MessageDeduplicationId=attempt, **stamp("A-17"))
    assert await queue.left() == 3
    async with queue.worker():
        await shop.until(queue.drained)
    assert (shop.orders, await queue.letters()) == (["A-17"], [])


async def test_an_id_of_more_than_128_characters_arrives_as_it_is(queue: Queue, shop: Shop) -> None:
    await queue.publish(LONG, LONG, f"{LONG}0")
    assert await queue.left() == 2
    async with queue.worker():
        await shop.until(queue.drained)
    assert sorted(shop.ids) == [LONG, f"{LONG}0"]


async def test_a_message_without_an_id_is_in_the_dead_letter_queue_at_once(queue: Queue, shop: Shop) -> None:
    await queue.send("")
    async with queue.worker():
        await shop.until(queue.drained)
    (letter,) = await queue.letters()
    assert letter["Body"] == '{"order_id": ""}'
    assert "deduplication-id has none" in letter["MessageAttributes"]["reason"]["StringValue"]
    assert shop.orders == []


async def test_a_copy_in_flight_is_not_deleted_and_runs_if_the_original_fails(  # case G4
    queue: Queue, shop: Shop
) -> None:
    dedup: Dedup = queue.defined["dedup"]
    await queue.publish("A-17")
    where = queue.url.rpartition("/")[2]
    async with queue.worker():
        with pytest.raises(RuntimeError):
            async with dedup.claim("A-17", scope=("message", where)):
                await shop.until(lambda: not_visible(queue))
                await fail()
        assert (await queue.left(), shop.orders) == (1, [])
        await shop.until(queue.drained)
    assert shop.orders == ["A-17"]


async def not_visible(queue: Queue) -> bool:
    """Tell whether the message was received at least once."""
    answer = await queue.sqs.get_queue_attributes(
        QueueUrl=queue.url, AttributeNames=["ApproximateNumberOfMessagesNotVisible"]
    )
    return int(answer["Attributes"]["ApproximateNumberOfMessagesNotVisible"]) == 1


class LosingTheFirstDeletion:
    """A client of SQS whose first deletion does not get through."""

    def __init__(self, sqs: Any) -> None:
        self.lost = 0
        self._sqs = sqs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sqs, name)

    async def delete_message(self, **arguments: Any) -> None:
        if not self.lost:
            self.lost += 1
            raise EndpointConnectionError(endpoint_url=arguments["QueueUrl"])
        await self._sqs.delete_message(**arguments)


async def test_a_lost_deletion_ends_no_loop_and_is_made_up_for_when_the_message_appears_again(  # case G3
    queue: Queue, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    queue.sqs = losing = LosingTheFirstDeletion(queue.sqs)
    await queue.publish("A-17")
    async with queue.worker():
        await shop.until(queue.drained)
    assert (shop.orders, losing.lost) == (["A-17"], 1)
    assert "could not tell the broker" in caplog.text


async def test_a_handler_that_raises_is_tried_again(queue: Queue, shop: Shop) -> None:
    mishaps = [fail]

    def fails_once(inner: Any) -> Any:
        async def on_order(body: str, session: AsyncSession) -> None:
            await inner(body, session)
            if mishaps:
                await mishaps.pop()()

        return on_order

    await queue.publish("A-17")
    async with queue.worker(fails_once):
        await shop.until(queue.drained)
    assert (shop.orders, mishaps) == (["A-17"], [])
