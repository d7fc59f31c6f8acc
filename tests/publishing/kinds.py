"""Every kind of message type, made alike: so that what holds for one is tested for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict

import attrs
import msgspec
import pydantic

from fastapi_dedup.identities import UNSET, DeduplicationIdentity, Identities

MARKED = Annotated[str | None, DeduplicationIdentity()]
PLAIN = str | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of message type.

    Attributes:
        name: What the tests call it.
        make: Makes a type of this kind of its name, its annotations and its base; fields are None by default.
        inherits: Whether its types have subclasses.
        plain_dicts: Whether its messages are dicts when the program runs.
    """

    name: str
    make: Callable[[str, dict[str, Any], type | None], Any]
    inherits: bool = True
    plain_dicts: bool = False

    def type_of(self, base: type | None = None, **annotations: Any) -> Any:
        """Make a type with these fields, and what its base has."""
        return self.make("Order", annotations, base)

    def id_of(
        self, identities: Identities, kind: type, /, explicit: Any = UNSET, **values: Any
    ) -> str | None:
        """Return the id of a message of a type."""
        return identities.of(kind(**values), explicit, as_type=kind if self.plain_dicts else None)


def _pydantic(name: str, annotations: dict[str, Any], base: Any) -> Any:
    fields: dict[str, Any] = {field: (annotation, None) for field, annotation in annotations.items()}
    return pydantic.create_model(name, __base__=base, **fields)


def _dataclass(name: str, annotations: dict[str, Any], base: Any, **options: Any) -> Any:
    fields = [
        (field, annotation, dataclasses.field(default=None)) for field, annotation in annotations.items()
    ]
    return dataclasses.make_dataclass(name, fields, bases=(base,) if base else (), **options)


def _slotted_dataclass(name: str, annotations: dict[str, Any], base: Any) -> Any:
    return _dataclass(name, annotations, base, slots=True, frozen=True)


def _struct(name: str, annotations: dict[str, Any], base: Any) -> Any:
    fields = [(field, annotation, None) for field, annotation in annotations.items()]
    return msgspec.defstruct(name, fields, bases=(base,) if base else None)


def _attrs(name: str, annotations: dict[str, Any], base: Any) -> Any:
    namespace = {field: attrs.field(default=None) for field in annotations}
    bases = (base,) if base else ()
    return attrs.define(type(name, bases, {**namespace, "__annotations__": annotations}))


def _attrs_by_argument(name: str, annotations: dict[str, Any], base: Any) -> Any:
    fields = {field: attrs.field(type=annotation, default=None) for field, annotation in annotations.items()}
    return attrs.make_class(name, fields, bases=(base,) if base else (object,))


def _plain(name: str, annotations: dict[str, Any], base: Any) -> Any:
    def fill(self: Any, **values: Any) -> None:
        for field in [field for each in type(self).__mro__ for field in getattr(each, "__annotations__", ())]:
            setattr(self, field, values.get(field))

    namespace = {"__annotations__": annotations, "__init__": fill}
    return type(name, (base,) if base else (), namespace)


def _named_tuple(name: str, annotations: dict[str, Any], _base: Any) -> Any:
    kind: Any = NamedTuple(name, list(annotations.items()))  # type: ignore[misc]
    kind.__new__.__defaults__ = (None,) * len(annotations)
    return kind


def _typed_dict(name: str, annotations: dict[str, Any], _base: Any) -> Any:
    return TypedDict(name, annotations)  # type: ignore[operator]


KINDS = (
    Kind(name="pydantic", make=_pydantic),
    Kind(name="dataclass", make=_dataclass),
    Kind(name="slotted-dataclass", make=_slotted_dataclass),
    Kind(name="msgspec", make=_struct),
    Kind(name="attrs", make=_attrs),
    Kind(name="attrs-by-argument", make=_attrs_by_argument),
    Kind(name="plain", make=_plain),
    Kind(name="named-tuple", make=_named_tuple, inherits=False),
    Kind(name="typed-dict", make=_typed_dict, inherits=False, plain_dicts=True),
)
