"""A batch inside a request: many ids in one POST, in the request's own transaction."""

from collections import Counter
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel

from fastapi_dedup import RequestSession
from fastapi_dedup.batches import Batch
from tests.http.world import World, add, client, problem


class Event(BaseModel):
    id: str
    sku: str


def webhooks(world: World) -> FastAPI:
    """Return an app that takes many events at once, and answers as the header of the first one says."""
    app = world.app(header=None)

    @app.post("/webhooks")
    async def receive(
        events: list[Event], session: RequestSession, response: Response, status: int = 200
    ) -> list[dict[str, Any]]:
        batch: Batch[Event]
        async with world.dedup.claim_many(
            events, logical_id=lambda event: event.id, scope="webhooks", session=session
        ) as batch:
            for event in batch.new:
                await add(session, event.sku)
        response.status_code = status if status != 200 else (503 if batch.unfinished else 200)
        return [{"id": entry.logical_id, "outcome": entry.outcome.value} for entry in batch]

    return app


def events(*ids: str) -> list[dict[str, str]]:
    return [{"id": each, "sku": f"sku of {each}"} for each in ids]


def outcomes(answer: Any) -> list[str]:
    return [entry["outcome"] for entry in answer.json()]


async def test_new_events_of_a_post_are_worked_on_once(world: World) -> None:
    async with client(webhooks(world)) as c:
        assert outcomes(await c.post("/webhooks", json=events("a", "b", "a"))) == ["new", "new", "repeat"]
        assert outcomes(await c.post("/webhooks", json=events("b", "c"))) == ["duplicate", "new"]
    assert await world.orders() == ["sku of a", "sku of b", "sku of c"]
    assert await world.ids() == ["a", "b", "c"]


async def test_an_error_status_after_the_block_undoes_the_whole_batch(world: World) -> None:
    # case A3
    async with client(webhooks(world)) as c:
        answer = await c.post("/webhooks?status=500", json=events("a", "b"))
        assert (answer.status_code, outcomes(answer)) == (500, ["new", "new"])
        assert (await world.orders(), await world.ids()) == ([], [])
        assert Counter(world.kinds()) == {"claimed": 2, "released": 2}
        assert outcomes(await c.post("/webhooks", json=events("a", "b"))) == ["new", "new"]
    assert await world.ids() == ["a", "b"]


async def test_a_success_is_told_after_the_commit_of_every_claim(world: World) -> None:
    async with client(webhooks(world)) as c:
        await c.post("/webhooks", json=events("a", "b"))
        assert world.kinds() == ["claimed", "claimed", "committed", "committed"]


async def test_an_event_in_flight_elsewhere_is_never_answered_as_done(world: World) -> None:
    # case F1
    async with client(webhooks(world)) as c, world.dedup.claim("b", scope="webhooks"):
        answer = await c.post("/webhooks", json=events("b"))
        assert (answer.status_code, outcomes(answer)) == (503, ["in_flight"])
    assert await world.orders() == []


async def test_an_illegal_id_among_the_events_is_a_400_that_names_it(world: World) -> None:
    # case C1
    async with client(webhooks(world)) as c:
        answer = await c.post("/webhooks", json=events("a", " "))
        assert (answer.status_code, problem(answer)) == (400, "missing-logical-id")
        assert "items[1]" in answer.text
    assert (await world.orders(), await world.ids()) == ([], [])
