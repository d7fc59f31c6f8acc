"""Who decides a message's id: the call, then the rules in order, then the type. For every kind of type."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from fastapi_dedup.errors import InvalidLogicalIdError
from fastapi_dedup.identities import UNSET, Identities, deduplication_identity
from tests.publishing.kinds import MARKED, PLAIN, Kind

# Each of the four may name an id, opt out, or say nothing.
SAID = list(itertools.product(*((word, None, "", UNSET) for word in ("call", "first", "second", "own"))))


def _expected(said: tuple[Any, ...]) -> str | None:
    decided = next((word for word in said if word is not UNSET), None)
    return decided or None


def _word(word: object, _message: object) -> object:
    return word


def _rules(identities: Identities, made: Any, *words: Any) -> None:
    for word in words:
        if word is not UNSET:
            identities.by_predicate(lambda kind: kind is made, partial(_word, word))


def test_the_first_that_says_anything_decides_alone(kind: Kind) -> None:
    plain, marked = kind.type_of(sku=PLAIN), kind.type_of(sku=MARKED)
    for said in SAID:
        call, first, second, own = said
        identities = Identities()
        made, sku = (plain, "never asked") if own is UNSET else (marked, own)
        _rules(identities, made, first, second)

        assert kind.id_of(identities, made, call, sku=sku) == _expected(said), said


def test_a_decorator_stands_where_a_mark_does(kind: Kind) -> None:
    made = deduplication_identity("sku")(kind.type_of(sku=PLAIN))
    said = itertools.product(("call", None, "", UNSET), ("first", None, "", UNSET), ("own", None, ""))
    for call, first, own in said:
        identities = Identities()
        _rules(identities, made, first)

        assert kind.id_of(identities, made, call, sku=own) == _expected((call, first, own)), (
            call,
            first,
            own,
        )


def test_member_names_take_their_turn_among_the_rules(kind: Kind, identities: Identities) -> None:
    made = kind.type_of(sku=MARKED, idempotency_key=PLAIN)
    identities.by_predicate(lambda seen: seen is not made, lambda _message: "not for this type")
    identities.by_member_named("idempotency_key")
    _rules(identities, made, "too late")

    assert kind.id_of(identities, made, sku="own", idempotency_key="k") == "k"
    assert kind.id_of(identities, made, sku="own", idempotency_key=None) is None
    assert kind.id_of(identities, made, "call", sku="own", idempotency_key="k") == "call"


def test_a_type_that_says_nothing_has_no_id(kind: Kind, identities: Identities) -> None:
    assert kind.id_of(identities, kind.type_of(sku=PLAIN), sku="a") is None


def test_a_rule_applies_from_its_registration_on(kind: Kind, identities: Identities) -> None:
    made = kind.type_of(sku=MARKED)
    assert kind.id_of(identities, made, sku="a") == "a"

    _rules(identities, made, "rule")

    assert kind.id_of(identities, made, sku="a") == "rule"


def test_rules_live_in_their_instance_and_nowhere_else(kind: Kind) -> None:
    made = kind.type_of(sku=MARKED)
    ruled = Identities()
    _rules(ruled, made, "rule")

    assert kind.id_of(ruled, made, sku="a") == "rule"
    assert kind.id_of(Identities(), made, sku="a") == "a"


@pytest.mark.parametrize("illegal", ["x" * 256, "a\nb", 1.5, True, ["a"], {"a": 1}, "\ud800"])
def test_an_illegal_id_is_an_error_whoever_gave_it(illegal: object) -> None:
    made: Any = type("Order", (), {"__annotations__": {"sku": MARKED}})
    message = made()
    message.sku = illegal
    ruled, named = Identities(), Identities()
    ruled.by_message(made, lambda _message: illegal)
    named.by_member_named("sku")

    for identities in (Identities(), ruled, named):
        with pytest.raises(InvalidLogicalIdError):
            identities.of(message)
    with pytest.raises(InvalidLogicalIdError):
        Identities().of(message, illegal)
    with pytest.raises(InvalidLogicalIdError):
        named.of({"sku": illegal})


@pytest.mark.parametrize("missing", [None, "", " ", "\t "])
def test_a_missing_id_is_none_and_no_error(missing: str | None, kind: Kind, identities: Identities) -> None:
    assert kind.id_of(identities, kind.type_of(sku=MARKED), sku=missing) is None
    assert identities.of(object(), missing) is None


def test_an_error_in_a_rule_reaches_the_publisher(identities: Identities) -> None:
    identities.by_message(object, lambda message: message.no_such_member)

    with pytest.raises(AttributeError, match="no_such_member"):
        identities.of(object())
