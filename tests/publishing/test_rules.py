"""Rules over types: which messages they apply to, and what is refused where they are registered."""

from __future__ import annotations

import abc
import gc
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import msgspec
import pydantic
import pytest

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identities import Identities
from tests.publishing.kinds import PLAIN, Kind

Content = TypeVar("Content")


def _word(word: str, _message: object) -> str:
    return word


def _sku(message: Any) -> object:
    return message.sku


# By message


def test_a_rule_covers_its_type_and_the_subclasses(inheriting: Kind, identities: Identities) -> None:
    base = inheriting.type_of(sku=PLAIN)
    derived = inheriting.type_of(base, night=PLAIN)
    identities.by_message(base, _sku)

    assert inheriting.id_of(identities, base, sku="a") == "a"
    assert inheriting.id_of(identities, derived, sku="b") == "b"
    assert inheriting.id_of(identities, inheriting.type_of(sku=PLAIN), sku="c") is None


def test_a_subclass_s_rule_comes_first_only_where_it_is_registered_first(inheriting: Kind) -> None:
    base = inheriting.type_of(sku=PLAIN)
    derived = inheriting.type_of(base, night=PLAIN)
    for order, expected in (((base, derived), "base"), ((derived, base), "derived")):
        identities = Identities()
        for each in order:
            identities.by_message(each, partial(_word, "base" if each is base else "derived"))

        assert inheriting.id_of(identities, derived) == expected


class Sku(Protocol):
    sku: str | None


@runtime_checkable
class CheckableSku(Protocol):
    @property
    def sku(self) -> str | None: ...


class Numbered(Protocol):
    def number(self) -> int: ...


class Event(Protocol):
    pass


@pytest.mark.parametrize("protocol", [Sku, CheckableSku])
def test_a_rule_for_a_protocol_covers_all_that_have_its_members(
    protocol: type, objects: Kind, identities: Identities
) -> None:
    identities.by_message(protocol, _sku)

    assert objects.id_of(identities, objects.type_of(sku=PLAIN), sku="a") == "a"
    assert objects.id_of(identities, objects.type_of(night=PLAIN), night="a") is None


def test_methods_are_members_of_a_protocol_too(identities: Identities) -> None:
    class Invoice:
        def number(self) -> int:
            return 7

    identities.by_message(Numbered, lambda message: message.number())

    assert identities.of(Invoice()) == "7"
    assert identities.of(SimpleNamespace()) is None


def test_attributes_that_only_the_constructor_gives_count(identities: Identities) -> None:
    class Order:
        def __init__(self, sku: str) -> None:
            self.sku = sku

    class Reader:
        """Has no sku, and only reads one."""

        def __init__(self, order: Order) -> None:
            self.copy = order.sku

    identities.by_message(Sku, _sku)

    assert identities.of(Order("a")) == "a"
    assert identities.of(Reader(Order("a"))) is None


def test_a_protocol_without_members_covers_only_those_that_inherit_from_it(identities: Identities) -> None:
    class Said(Event):
        pass

    identities.by_message(Event, lambda _message: "event")

    assert identities.of(Said()) == "event"
    assert identities.of(object()) is None


def test_a_rule_for_an_abc_covers_its_implementers(identities: Identities) -> None:
    class Command(abc.ABC):
        @abc.abstractmethod
        def run(self) -> None: ...

    class Ship(Command):
        def run(self) -> None: ...

    @Command.register
    class Foreign:
        pass

    identities.by_message(Command, lambda _message: "command")

    assert identities.of(Ship()) == "command"
    assert identities.of(Foreign()) == "command"
    assert identities.of(object()) is None


def test_an_abc_that_looks_at_methods_does_so_here_too(identities: Identities) -> None:
    identities.by_message(cast("type", Sized), len)

    assert identities.of([1, 2]) == "2"


def test_a_rule_for_a_generic_model_covers_its_parametrised_forms(identities: Identities) -> None:
    class Envelope(pydantic.BaseModel, Generic[Content]):
        content: Content

    identities.by_message(Envelope, lambda message: message.content)

    assert identities.of(Envelope[int](content=3)) == "3"


# By predicate


def test_a_predicate_is_asked_once_per_type(identities: Identities) -> None:
    asked: list[type] = []

    def is_command(kind: type) -> bool:
        asked.append(kind)
        return kind.__name__.endswith("Command")

    class ShipCommand:
        sku = "a"

    identities.by_predicate(is_command, _sku)

    assert [identities.of(ShipCommand()) for _ in range(3)] == ["a"] * 3
    assert identities.of(SimpleNamespace(sku="b")) is None
    assert asked == [ShipCommand, SimpleNamespace]


# By member


def test_the_first_member_that_the_type_has_counts(kind: Kind, identities: Identities) -> None:
    identities.by_member_named("idempotency_key", "deduplication_id")
    both = kind.type_of(deduplication_id=PLAIN, idempotency_key=PLAIN)
    second = kind.type_of(deduplication_id=PLAIN)

    assert kind.id_of(identities, both, idempotency_key="k", deduplication_id="d") == "k"
    assert kind.id_of(identities, both, idempotency_key=None, deduplication_id="d") is None
    assert kind.id_of(identities, both, idempotency_key="", deduplication_id="d") is None
    assert kind.id_of(identities, second, deduplication_id="d") == "d"
    assert kind.id_of(identities, kind.type_of(sku=PLAIN), sku="a") is None


@pytest.mark.parametrize("mapping", [dict, UserDict])
def test_a_mapping_s_members_are_its_keys(mapping: Callable[..., Any], identities: Identities) -> None:
    identities.by_member_named("idempotency_key", "deduplication_id")

    assert identities.of(mapping(idempotency_key="k", deduplication_id="d")) == "k"
    assert identities.of(mapping(deduplication_id="d")) == "d"
    assert identities.of(mapping(idempotency_key=None, deduplication_id="d")) is None
    assert identities.of(mapping(items="not the method")) is None


def test_a_mapping_without_the_keys_is_left_to_the_next_rule(identities: Identities) -> None:
    identities.by_member_named("idempotency_key")
    identities.by_message(dict, lambda message: message["sku"])

    assert identities.of({"idempotency_key": "k", "sku": "a"}) == "k"
    assert identities.of({"sku": "a"}) == "a"


def test_properties_and_inherited_members_count_and_methods_do_not(identities: Identities) -> None:
    class Order:
        @property
        def idempotency_key(self) -> int:
            return 12

    class Special(Order):
        pass

    class Talkative:
        def idempotency_key(self) -> str:
            return "a method"

    identities.by_member_named("idempotency_key")

    assert identities.of(Special()) == "12"
    assert identities.of(Talkative()) is None


def test_a_field_that_msgspec_was_not_sent_is_missing(identities: Identities) -> None:
    class Order(msgspec.Struct):
        idempotency_key: str | msgspec.UnsetType = msgspec.UNSET

    identities.by_member_named("idempotency_key")

    assert identities.of(Order()) is None
    assert identities.of(Order("k")) == "k"


# What is refused at registration


class Message(TypedDict):
    sku: str


async def _asynchronous(_message: object) -> str:
    return ""


class _AsynchronousCall:
    async def __call__(self, _message: object) -> str:
        return ""


NO_CALLABLES = [None, "sku", 5, lambda: "", lambda _one, _two: "", _asynchronous, _AsynchronousCall()]


@pytest.mark.parametrize("derive", NO_CALLABLES)
def test_what_takes_no_message_derives_nothing(derive: Any, identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match=r"by_message takes a callable"):
        identities.by_message(object, derive)
    with pytest.raises(ConfigurationError, match=r"by_predicate takes a callable"):
        identities.by_predicate(lambda _kind: True, derive)
    with pytest.raises(ConfigurationError, match=r"by_predicate takes a callable"):
        identities.by_predicate(derive, _sku)
    assert identities.of(SimpleNamespace(sku="a")) is None


@pytest.mark.parametrize("no_class", [None, "Order", 5, list[int], int | str, SimpleNamespace()])
def test_a_rule_is_for_a_class(no_class: Any, identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="by_message takes a class"):
        identities.by_message(no_class, _sku)
    with pytest.raises(ConfigurationError, match="check takes a class"):
        identities.check(no_class)


def test_a_class_is_no_predicate_over_types(identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="use by_message"):
        identities.by_predicate(cast("Any", dict), _sku)


def test_a_typed_dict_is_nothing_that_messages_could_be(identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="plain dicts; use by_member_named"):
        identities.by_message(Message, _sku)


@pytest.mark.parametrize("names", [(), ("",), (" ",), (None,), (5,), ("a", "a"), ("a", "")])
def test_members_are_named(names: tuple[Any, ...], identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="by_member_named takes"):
        identities.by_member_named(*names)


def test_a_builtin_that_hides_its_signature_is_taken_at_its_word(identities: Identities) -> None:
    identities.by_message(int, str)

    assert identities.of(5) == "5"


# What an instance keeps


def test_a_type_that_nobody_else_keeps_is_forgotten(identities: Identities) -> None:
    identities.by_member_named("sku")
    identities.by_message(object, lambda _message: "any")

    def publish_one() -> weakref.ref[type]:
        @dataclass
        class Order:
            sku: str

        assert identities.of(Order("a")) == "a"
        return weakref.ref(Order)

    forgotten = publish_one()
    gc.collect()

    assert forgotten() is None


def test_threads_that_meet_a_type_for_the_first_time_agree(kind: Kind, identities: Identities) -> None:
    made = kind.type_of(sku=PLAIN)
    identities.by_member_named("sku")
    start = threading.Barrier(8)
    ids: list[str | None] = []

    def publish() -> None:
        start.wait()
        ids.append(kind.id_of(identities, made, sku="a"))

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ids == ["a"] * 8
