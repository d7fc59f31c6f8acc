"""What a type says of its identity, and what is refused where it says it. For every kind of type.

The annotations of this module are text (`from __future__ import annotations`), as in much code that uses us.
"""

from __future__ import annotations

import dataclasses
import functools
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, NotRequired, Optional, TypedDict

import attr
import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from typing_extensions import TypeAliasType

from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.identities import DeduplicationIdentity, Identities, deduplication_identity
from tests.publishing.kinds import MARKED, PLAIN, Kind

# As people write them


class Model(pydantic.BaseModel):
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


@dataclass
class Data:
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


@pydantic.dataclasses.dataclass
class Checked:
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


class Struct(msgspec.Struct, frozen=True):
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


@attrs.define
class Attrs:
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


@attrs.frozen
class FrozenAttrs:
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


class Tuple(NamedTuple):
    sku: Annotated[str, DeduplicationIdentity()]
    night: str = ""


class Plain:
    sku: Annotated[str, DeduplicationIdentity()]

    def __init__(self, sku: str) -> None:
        self.sku = sku


class Typed(TypedDict):
    sku: Annotated[str, DeduplicationIdentity()]
    night: NotRequired[str]


@pytest.mark.parametrize("declared", [Model, Data, Checked, Struct, Attrs, FrozenAttrs, Tuple, Plain])
def test_a_marked_field_is_the_id_of_a_message(declared: Any, identities: Identities) -> None:
    assert identities.of(declared(sku="a")) == "a"


def test_a_typed_dict_s_marks_count_where_the_publisher_names_it(identities: Identities) -> None:
    message: Typed = {"sku": "a"}

    assert identities.of(message, as_type=Typed) == "a"
    assert identities.of({}, as_type=Typed) is None
    assert identities.of(message) is None


class Index(Enum):
    PRODUCTS = "products"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "7"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime(2026, 11, 30, 3, tzinfo=UTC), "2026-11-30T03:00:00+00:00"),
        (Decimal("1.10"), "1.10"),
        (Index.PRODUCTS, "products"),
    ],
)
def test_other_values_become_text(value: Any, expected: str, identities: Identities) -> None:
    assert identities.of(Data(sku=value)) == expected


# Where a mark may stand

Sku = Annotated[str, DeduplicationIdentity()]
Alias = TypeAliasType("Alias", Annotated[str, DeduplicationIdentity()])
Json = TypeAliasType("Json", "dict[str, Json] | list[Json] | str")


def _typed(hint: Any) -> Any:
    return type("Order", (), {"__annotations__": {"document": Json, "sku": hint}})


@pytest.mark.parametrize(
    "hint",
    [
        Annotated[str, DeduplicationIdentity],
        Annotated[str, "a note", DeduplicationIdentity(), msgspec.Meta(max_length=9)],
        Annotated[str, DeduplicationIdentity()] | None,
        Optional[Annotated[str, DeduplicationIdentity()]],  # noqa: UP045 - people write it
        Final[Annotated[str, DeduplicationIdentity()]],
        ClassVar[Annotated[str, DeduplicationIdentity()]],
        Annotated[Annotated[str, DeduplicationIdentity()], "more"],
        Sku,
        "Sku",
        "Sku | None",
        Optional["Sku"],
        Alias,
        "Alias",
        "Sku | Nothing",
        "Annotated[Nothing, DeduplicationIdentity()]",
    ],
)
def test_a_mark_is_seen_through_what_surrounds_the_whole_value(hint: Any, identities: Identities) -> None:
    message = _typed(hint)()
    message.__class__.__module__ = __name__
    message.sku = "a"

    assert identities.of(message) == "a"


@pytest.mark.parametrize(
    "hint",
    [
        list[Annotated[str, DeduplicationIdentity()]],
        "dict[str, Sku]",
        tuple[Sku, ...] | None,
        dataclasses.InitVar[Annotated[str, DeduplicationIdentity()]],
    ],
)
def test_a_mark_on_a_part_of_the_value_is_refused(hint: Any, identities: Identities) -> None:
    made = _typed(hint)
    made.__module__ = __name__

    with pytest.raises(ConfigurationError, match="mark the field itself"):
        identities.check(made)


def test_a_mark_whose_name_exists_for_type_checkers_only_is_refused(identities: Identities) -> None:
    made = _typed("Annotated[str, nowhere.DeduplicationIdentity()]")

    with pytest.raises(ConfigurationError, match=r"annotation of Order\.sku .* import it at run time"):
        identities.check(made)


@pytest.mark.parametrize(
    "hint", ["Nothing", "Nothing[int]", "not a type", "1 / 0", Literal["Sku"], "Callable"]
)
def test_what_cannot_be_made_out_marks_nothing(hint: Any, identities: Identities) -> None:
    made = _typed(hint)
    made.__module__ = __name__

    identities.check(made)

    assert identities.of(made()) is None


class _NoTruth:
    """Metadata like a column or an array, which has no truth value when it is compared."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError


def test_metadata_of_others_is_left_alone(identities: Identities) -> None:
    made = _typed(Annotated[str, _NoTruth(), DeduplicationIdentity()])
    message = made()
    message.sku = "a"

    assert identities.of(message) == "a"


def test_metadata_is_never_evaluated(identities: Identities) -> None:
    identities.check(_typed(Annotated[str, "__import__('no_such_module')"]))
    identities.check(_typed(Literal["__import__('no_such_module')"]))


def test_pydantic_knows_names_that_are_local_to_a_function(identities: Identities) -> None:
    key = Annotated[str, DeduplicationIdentity()]

    class Order(pydantic.BaseModel):
        sku: key

    assert identities.of(Order(sku="a")) == "a"


# Inheritance


def test_subclasses_inherit_the_mark(inheriting: Kind, identities: Identities) -> None:
    base = inheriting.type_of(sku=MARKED)
    derived = inheriting.type_of(base, night=PLAIN)

    assert inheriting.id_of(identities, derived, sku="a", night="n") == "a"


def test_a_field_that_is_annotated_anew_replaces_the_base_s(inheriting: Kind, identities: Identities) -> None:
    marked = inheriting.type_of(sku=MARKED, night=PLAIN)
    unmarked = inheriting.type_of(marked, sku=PLAIN)
    moved = inheriting.type_of(unmarked, night=MARKED)

    assert inheriting.id_of(identities, unmarked, sku="a", night="n") is None
    assert inheriting.id_of(identities, moved, sku="a", night="n") == "n"


def test_subclasses_inherit_the_decorator_and_may_be_decorated_anew(
    inheriting: Kind, identities: Identities
) -> None:
    base = deduplication_identity("sku")(inheriting.type_of(sku=PLAIN, night=PLAIN))
    derived = inheriting.type_of(base, more=PLAIN)
    anew = deduplication_identity("night")(inheriting.type_of(base, more=PLAIN))

    assert inheriting.id_of(identities, derived, sku="a", night="n") == "a"
    assert inheriting.id_of(identities, anew, sku="a", night="n") == "n"


# Several members


def test_several_members_are_composed_in_the_order_given(kind: Kind, identities: Identities) -> None:
    made = deduplication_identity("night", "sku")(kind.type_of(sku=PLAIN, night=PLAIN))

    assert kind.id_of(identities, made, sku="a|b", night="2026-11-30") == r"2026-11-30|a\|b"


@pytest.mark.parametrize("missing", [None, "", " "])
def test_an_id_never_loses_a_member_silently(missing: str | None, kind: Kind, identities: Identities) -> None:
    made = deduplication_identity("night", "sku")(kind.type_of(sku=PLAIN, night=PLAIN))

    assert kind.id_of(identities, made, sku="a", night=missing) is None
    assert kind.id_of(identities, made, sku=missing, night=missing) is None


# What the decorator takes


def test_it_stands_above_and_below_other_decorators(identities: Identities) -> None:
    @deduplication_identity("sku")
    @dataclass(slots=True)
    class Above:
        sku: str

    @dataclass(slots=True)
    @deduplication_identity("sku")
    class Below:
        sku: str

    @attrs.define
    @deduplication_identity("sku")
    class BelowAttrs:
        sku: str

    @attr.s
    @deduplication_identity("sku")
    class OldAttrs:
        sku: Any = attr.ib()

    for made in (Above, Below, BelowAttrs, OldAttrs):
        assert identities.of(made("a")) == "a"


def test_properties_slots_and_attributes_of_the_constructor_are_members(identities: Identities) -> None:
    @deduplication_identity("sku", "night", "slot", "index")
    class Order:
        __slots__ = ("__dict__", "slot")

        def __init__(self, sku: str) -> None:
            self.sku: str = sku
            self.slot = "s"

        @property
        def night(self) -> str:
            return "n"

        @functools.cached_property
        def index(self) -> str:
            return "i"

    assert identities.of(Order("a")) == "a|n|s|i"


def test_it_is_called_on_types_of_others(identities: Identities) -> None:
    class Theirs:
        def __init__(self, reference: str) -> None:
            self.reference = reference

    assert deduplication_identity("reference")(Theirs) is Theirs
    assert identities.of(Theirs("r")) == "r"


def test_the_type_stays_as_it_is_otherwise() -> None:
    @deduplication_identity("night")
    class Order(pydantic.BaseModel):
        night: str

    assert Order(night="n").model_dump() == {"night": "n"}
    assert Model(sku="a").model_dump() == {"sku": "a", "night": ""}
    assert Model.model_json_schema()["properties"]["sku"] == {"title": "Sku", "type": "string"}
    assert msgspec.json.decode(msgspec.json.encode(Struct("a")), type=Struct) == Struct("a")


# What is refused, as early as it can be


def test_two_marked_fields_are_refused_by_check_and_at_the_first_message(
    kind: Kind, identities: Identities
) -> None:
    made = kind.type_of(sku=MARKED, night=MARKED)

    with pytest.raises(
        ConfigurationError, match=r"Order marks several fields, sku, night: .*@deduplication_identity"
    ):
        identities.check(made)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="marks several fields"):
            kind.id_of(identities, made, sku="a", night="n")
    with pytest.raises(ConfigurationError, match="marks several fields"):
        kind.id_of(identities, made, "explicit", sku="a", night="n")


def test_a_second_mark_in_a_subclass_is_refused(inheriting: Kind, identities: Identities) -> None:
    derived = inheriting.type_of(inheriting.type_of(sku=MARKED), night=MARKED)

    with pytest.raises(ConfigurationError, match="marks several fields, sku, night"):
        identities.check(derived)


def test_a_mark_and_a_decorator_are_refused_at_decoration(kind: Kind) -> None:
    with pytest.raises(ConfigurationError, match="names night with deduplication_identity, and marks sku"):
        deduplication_identity("night")(kind.type_of(sku=MARKED, night=PLAIN))
    with pytest.raises(ConfigurationError, match="marks several fields"):
        deduplication_identity("night")(kind.type_of(sku=MARKED, night=MARKED))


def test_an_inherited_mark_and_a_decorator_are_refused_at_decoration(inheriting: Kind) -> None:
    derived = inheriting.type_of(inheriting.type_of(sku=MARKED), night=PLAIN)

    with pytest.raises(ConfigurationError, match="keep one of the two"):
        deduplication_identity("night")(derived)


def test_a_mark_under_an_inherited_decorator_is_refused_by_check(
    inheriting: Kind, identities: Identities
) -> None:
    base = deduplication_identity("sku")(inheriting.type_of(sku=PLAIN))
    derived = inheriting.type_of(base, night=MARKED)

    with pytest.raises(ConfigurationError, match="keep one of the two"):
        identities.check(derived)


@pytest.mark.parametrize("wrong", ["skuu", "SKU", "sku.nested", "order"])
def test_a_wrong_name_is_refused_at_decoration(wrong: str, kind: Kind) -> None:
    with pytest.raises(ConfigurationError, match=f"Order has no member {wrong}$"):
        deduplication_identity("sku", wrong)(kind.type_of(sku=PLAIN))


def test_a_method_is_no_member() -> None:
    class Order:
        def sku(self) -> str:
            return ""

    with pytest.raises(ConfigurationError, match="has no member sku"):
        deduplication_identity("sku")(Order)


@pytest.mark.parametrize("names", [(), ("",), ("  ",), (None,), (5,), (Data,), ("sku", "sku")])
def test_the_decorator_takes_names(names: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="deduplication_identity takes"):
        deduplication_identity(*names)


def test_the_decorator_is_for_classes() -> None:
    def publish() -> None: ...

    with pytest.raises(ConfigurationError, match="takes a class"):
        deduplication_identity("sku")(publish)  # type: ignore[type-var]


def test_a_type_that_takes_no_attributes_is_sent_to_a_rule() -> None:
    with pytest.raises(ConfigurationError, match=r"use identities\.by_message"):
        deduplication_identity("real")(int)


def test_a_message_without_what_its_type_declares_is_refused(identities: Identities) -> None:
    class Order:
        sku: Annotated[str, DeduplicationIdentity()]

    identities.check(Order)

    with pytest.raises(ConfigurationError, match="Order declares sku, and this message does not have it"):
        identities.of(Order())


@pytest.mark.parametrize("no_type", ["Order", 5, list[int]])
def test_a_message_is_taken_for_a_class_only(no_type: Any, identities: Identities) -> None:
    with pytest.raises(ConfigurationError, match="as_type takes a class"):
        identities.of({}, as_type=no_type)


def test_check_says_nothing_of_types_that_are_in_order(kind: Kind, identities: Identities) -> None:
    identities.check(kind.type_of(sku=MARKED, night=PLAIN), kind.type_of(sku=PLAIN), int, object)
