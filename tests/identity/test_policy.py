"""A policy is validated once, where it is written, and every refusal says what to write instead."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Any

import pytest
from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession

from fastapi_dedup import ConfigurationError, Dedup, Deduplicated, RequestSession
from fastapi_dedup.policy import failure_status


async def get_session() -> AsyncSession:
    raise NotImplementedError


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, status: int) -> bool:
        return status > 399


def named(options: dict[str, Any]) -> str:
    """Return what a test case is called: the same in every process, so without addresses and sets."""
    shown = {name: sorted(value) if isinstance(value, set) else value for name, value in options.items()}
    return re.sub(r" at 0x[0-9a-f]+", "", str(shown))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"source": "cookie"}, "source must be one of header, body, path, query, form, .*callable, not 'cookie'"),
    ({"source": None}, "source must be one of"),
    ({"source": "body"}, "source='body' needs member="),
    ({"source": "path"}, "source='path' needs member="),
    ({"source": "query"}, "source='query' needs member="),
    ({"source": "form"}, "source='form' needs member="),
    ({"source": len, "member": "sku"}, "a callable source returns the whole id"),
    ({"source": "body", "member": ""}, "member '' is no name"),
    ({"source": "body", "member": " "}, "member ' ' is no name"),
    ({"source": "body", "member": "a..b"}, "member 'a..b' is no name"),
    ({"source": "body", "member": ".a"}, "member '.a' is no name"),
    ({"source": "body", "member": ["a", 7]}, "member 7 is no name"),
    ({"source": "body", "member": []}, "member must name one field, or several different ones"),
    ({"source": "body", "member": ["a", "a"]}, "several different ones"),
    ({"member": "Idempotency Key"}, "member 'Idempotency Key' is no header name"),
    ({"member": "Schlüssel"}, "is no header name"),
    ({"member": "X-Key:"}, "is no header name"),
    ({"source": "anything", "member": "a b"}, "is no header name"),
    ({"window": 60}, r"window must be a timedelta, not int: write timedelta\(seconds="),
    ({"window": timedelta(0)}, "window must be longer than zero"),
    ({"window": timedelta(seconds=-1)}, "window must be longer than zero"),
    ({"wait_timeout": 5}, "wait_timeout must be a timedelta"),
    ({"wait_timeout": timedelta(0)}, "wait_timeout must be longer than zero"),
    ({"duplicate_status": 199}, "duplicate_status must be a final HTTP status from 200 to 599, not 199"),
    ({"duplicate_status": 600}, "not 600"),
    ({"duplicate_status": True}, "not True"),
    ({"duplicate_status": "409"}, "not '409'"),
    ({"duplicate_status": 409.0}, "not 409.0"),
    ({"in_flight": "queue"}, "in_flight must be 'reject' or 'wait', not 'queue'"),
    ({"lease": 30}, "lease must be a timedelta"),
    ({"lease": timedelta(0)}, "lease must be longer than zero"),
    ({"lease": timedelta(seconds=30), "store": "memory"}, "store='memory' has no leases"),
    ({"lease": timedelta(seconds=30), "on_abandoned": "ignore"}, "on_abandoned must be 'retry' or 'block'"),
    ({"on_abandoned": "block"}, "a riding one is never abandoned: give lease= too"),
    ({"source": len, "identity": "id"}, "identity is about source='delivery'"),
    ({"replay": True}, "replay is not in this release"),
    ({"failed": 500}, "failed must be a callable that takes a status"),
    ({"methods": "POST"}, "methods must be a list of method names, not 'POST'"),
    ({"methods": []}, "methods must not be empty"),
    ({"scope": ""}, "scope must not be blank"),
    ({"scope": "  "}, "scope must not be blank"),
    ({"scope": ()}, "scope must not be empty"),
    ({"scope": ["a", ""]}, "scope must not be blank"),
    ({"scope": ["a", 7]}, "the parts of a scope are names and callables, not 7"),
    ({"scope": 7}, r"scope must be a name, a tuple of parts, a callable or Depends\(...\), not 7"),
    ({"session": 7}, "session must be a dependency: a callable, .*not 7"),
    ({"session": "get_session"}, "session must be a dependency"),
    ({"session": Annotated[AsyncSession, "no marker"]}, "session must be a dependency"),
    ({"failed": Unhashable()}, "every option of a policy must be hashable"),
    ({"store": []}, r"store must be 'durable' or 'memory', not \[\]"),
    ({"in_flight": []}, "in_flight must be"),
    ({"on_abandoned": {}}, "on_abandoned must be"),
    ({"identity": []}, "identity must be 'id' or 'id_and_destination'"),
    ({"methods": None}, "methods must be a list of method names"),
    ({"source": "delivery", "window": timedelta(hours=1)}, "give keep_after_handling, not window"),
    ({"source": "delivery", "scope": "orders"}, "source='delivery' has a scope of its own"),
    ({"keep_after_handling": timedelta(hours=1)}, "keep_after_handling is about source='delivery'.*window="),
    ({"identity": "id"}, "identity is about source='delivery'.*scope="),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[named(options) for options, _ in REFUSED])
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Deduplicated(**options)


@pytest.mark.parametrize("option", ["required", "fingerprint"])
@pytest.mark.parametrize("value", ["yes", 7, []])
def test_an_option_that_is_on_or_off_takes_nothing_else(option: str, value: Any) -> None:
    # `required="false"`, from a settings file say, would silently mean True.
    with pytest.raises(ConfigurationError, match=option):
        Deduplicated(**{option: value})


@pytest.mark.parametrize("methods", [[7], ["POST", ""], ["PO ST"], [None]])
def test_a_method_that_is_none_is_refused(methods: Any) -> None:
    with pytest.raises(ConfigurationError, match="method"):
        Deduplicated(methods=methods)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": "anything"},
        {"source": "body", "member": "order.sku"},
        {"source": "path", "member": "order_id"},
        {"source": "query", "member": ["a", "b"]},
        {"source": "form", "member": ("a", "b")},
        {"source": lambda request: request},
        {"member": "X-Request-Id", "required": False},
        {"member": ["X-A", "X-B"]},
        {"window": timedelta(microseconds=1)},
        {"scope": "orders"},
        {"scope": len},
        {"scope": ["orders", len]},
        {"scope": Depends(get_session)},
        {"session": get_session},
        {"session": Depends(get_session)},
        {"session": Depends(get_session, scope="function")},
        {"session": Annotated[AsyncSession, Depends(get_session)]},
        {"session": RequestSession},
        {"duplicate_status": 204},
        {"in_flight": "wait", "wait_timeout": timedelta(seconds=1)},
        {"fingerprint": len},
        {"failed": lambda status: status > 499},
        {"methods": {"get", "Post"}},
    ],
    ids=named,
)
def test_what_can_be_kept_is_a_value(options: dict[str, Any]) -> None:
    first, second = Deduplicated(**options), Deduplicated(**options)
    assert first == second
    assert hash(first) == hash(second)
    assert first != Deduplicated(**{**options, "duplicate_status": 299})
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.required = False  # type: ignore[misc]


def test_options_beyond_source_and_member_are_named() -> None:
    make: Callable[..., Any] = Deduplicated
    assert make("body", "sku") == make(source="body", member="sku")
    with pytest.raises(TypeError):
        make("body", "sku", False)  # noqa: FBT003


def test_names_are_taken_as_they_are_and_methods_in_capitals() -> None:
    policy = Deduplicated("query", ["b", "a"], methods=["post", "Patch"])
    assert policy.members == ("b", "a")
    assert policy.applies_to == {"POST", "PATCH"}
    assert Deduplicated().applies_to == {"POST", "PUT", "PATCH", "DELETE"}


def test_a_generator_of_members_is_read_once() -> None:
    assert Deduplicated("query", (name for name in ("a", "b"))).members == ("a", "b")


@pytest.mark.parametrize(
    "policy", [Deduplicated("body", ["a", "b"]), Deduplicated(len), Deduplicated(scope=["x", len])]
)
def test_a_policy_may_be_varied(policy: Deduplicated) -> None:
    varied = dataclasses.replace(policy, duplicate_status=202)
    assert varied.duplicate_status == 202
    assert dataclasses.replace(varied, duplicate_status=409) == policy


def test_a_policy_shows_its_options() -> None:
    assert "source='body'" in repr(Deduplicated("body", "sku"))


def test_errors_and_repeated_requests_count_as_failures_and_all_else_as_done() -> None:
    failures = {status for status in range(200, 600) if failure_status(status)}
    assert failures == {307, 308, *range(400, 600)}


# The primitive has some of the options, and judges them alike


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": "queue"}, "in_flight must be 'reject' or 'wait', not 'queue'"),
        ({"wait_timeout": 5}, "wait_timeout must be a timedelta"),
        ({"window": timedelta(0)}, "window must be longer than zero"),
        ({"lease": 30}, "lease must be a timedelta"),
        ({"on_abandoned": "block"}, "give lease= too"),
    ],
    ids=str,
)
async def test_what_dedup_claim_cannot_keep_is_refused(options: dict[str, Any], message: str) -> None:
    dedup = Dedup("sqlite+aiosqlite:///nobody.asks.it.db", reap_every=None)
    with pytest.raises(ConfigurationError, match=message):
        async with dedup.claim("news", scope="tests", **options):
            raise AssertionError
