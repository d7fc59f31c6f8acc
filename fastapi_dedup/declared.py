"""What a message's type says of its own identity: a marker on a field, or a class decorator. Pure, no I/O.

Pydantic, msgspec and attrs are known by what their classes carry, and never imported.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_origin

from fastapi_dedup.errors import ConfigurationError

__all__ = [
    "DECLARED",
    "DeduplicationIdentity",
    "annotations_of",
    "checked_names",
    "checked_type",
    "deduplication_identity",
    "marks_of",
    "own_members",
    "unannotated",
]

if sys.version_info >= (3, 14):
    # A name that only exists for type checkers is no error there.
    from annotationlib import Format

    annotations_of = partial(inspect.get_annotations, format=Format.FORWARDREF)
else:
    annotations_of = inspect.get_annotations

DECLARED = "__deduplication_identity__"
_Type = TypeVar("_Type", bound=type)


@dataclass(frozen=True, slots=True)
class DeduplicationIdentity:
    """Marks the field that is a message's logical id: `sku: Annotated[str, DeduplicationIdentity()]`.

    It works in Pydantic models, dataclasses, msgspec structs, attrs classes, named tuples, typed dicts and
    plain classes. Subclasses inherit the mark, and one that annotates the field anew replaces it. A type
    marks one field at most; `deduplication_identity` composes several.
    """


def deduplication_identity(*members: str) -> Callable[[_Type], _Type]:
    """Name the members that make a message's logical id, for types that one cannot annotate.

        @deduplication_identity("index", "night")
        class RebuildIndex: ...

        deduplication_identity("reference")(TheirMessage)

    Several members are composed (`fastapi_dedup.identity.compose`) in the order given. Where one of them is
    missing there is no id, for an id that silently lost a member would be another id. Subclasses inherit
    the declaration, and may be decorated anew.

    Args:
        members: Names of fields, properties or attributes, as Python knows them, whatever their name on
            the wire. At least one.

    Raises:
        ConfigurationError: A name is no member of the type, the type has a marked field too, or the type
            takes no attributes. Raised where the type is decorated.
    """
    names = checked_names("deduplication_identity", members)

    def declare(kind: _Type) -> _Type:
        own_members(checked_type("deduplication_identity", kind), names)
        try:
            setattr(kind, DECLARED, names)
        except (AttributeError, TypeError) as error:
            msg = f"{kind.__qualname__} cannot be decorated: use identities.by_message(...) instead"
            raise ConfigurationError(msg) from error
        return kind

    return declare


def own_members(kind: type, named: tuple[str, ...]) -> tuple[str, ...]:
    """Return the members that are a type's own identity, given those that its decorator names."""
    marks = marks_of(kind)
    marked = tuple([name for name, is_marked in marks.items() if is_marked])
    if len(marked) > 1:
        msg = (
            f"{kind.__qualname__} marks several fields, {', '.join(marked)}: mark one of them, "
            f"or compose them with @deduplication_identity{marked!r}"
        )
        raise ConfigurationError(msg)
    if named and marked:
        msg = (
            f"{kind.__qualname__} names {', '.join(named)} with deduplication_identity, and marks "
            f"{marked[0]}: keep one of the two"
        )
        raise ConfigurationError(msg)
    unknown = set(named) - marks.keys()
    unknown -= set(unannotated(kind)) if unknown else set()
    if unknown:
        msg = f"deduplication_identity: {kind.__qualname__} has no member {', '.join(sorted(unknown))}"
        raise ConfigurationError(msg)
    return named or marked


_METHODS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(classmethod, staticmethod),
)


def unannotated(kind: type) -> Iterator[str]:
    """Yield the data members that a type has without annotating them: properties, slots, attributes."""
    for base in kind.__mro__[:-1]:
        yield from [name for name, value in vars(base).items() if not isinstance(value, _METHODS)]
        # From Python 3.13 on a class knows the attributes that its methods give to `self`; before, their
        # code tells.
        yield from vars(base).get("__static_attributes__", ())
        for method in vars(base).values():
            if isinstance(method, types.FunctionType) and method.__code__.co_argcount:
                itself = method.__code__.co_varnames[0]
                for before, step in itertools.pairwise(dis.get_instructions(method)):
                    if step.opname == "STORE_ATTR" and before.argval == itself:
                        yield step.argval


def marks_of(kind: type) -> dict[str, bool]:
    """Return a type's fields, and whether each is marked. A subclass's annotation replaces its base's."""
    marks: dict[str, bool] = {}
    for base in reversed(kind.__mro__[:-1]):
        names = _Names(dict(vars(base)), getattr(sys.modules.get(base.__module__), "__dict__", {}))
        own = annotations_of(base)
        understood = _understood(base)
        for name in {**own, **understood}:
            where = f"{kind.__qualname__}.{name}"
            hints = [found[name] for found in (own, understood) if name in found]
            marked = any(_carries_mark(hint, names, where) for hint in hints)
            marks[name] = marked or (name not in own and marks.get(name, False))
            if not marked and DeduplicationIdentity.__name__ in str(own.get(name, "")):
                msg = (
                    f"the annotation of {where} names something that only exists for type checkers or "
                    "inside a function: import it at run time, or use @deduplication_identity"
                )
                raise ConfigurationError(msg)
    return marks


def _understood(base: type) -> dict[str, Any]:
    """Return what Pydantic or attrs made of a class's annotations: it may know more than their text."""
    found = {attribute.name: attribute.type for attribute in vars(base).get("__attrs_attrs__", ())}
    fields = vars(base).get("__pydantic_fields__", vars(base).get("model_fields"))  # the latter before 2.10
    if hasattr(base, "__pydantic_decorators__") and isinstance(fields, Mapping):
        for name, field in fields.items():
            found[name] = Annotated[(field.annotation, None, *field.metadata)]
    return found


class _Names(ChainMap[str, Any]):
    """What the text of an annotation may name; what only exists for type checkers is anything."""

    def __missing__(self, key: str) -> Any:
        return getattr(builtins, key, Any)


_TRANSPARENT = (Annotated, types.UnionType)


def _carries_mark(hint: Any, names: _Names, where: str, seen: tuple[object, ...] = ()) -> bool:
    """Tell whether an annotation marks its field.

    Raises:
        ConfigurationError: The mark is on a part of the field's value, such as the items of a list.
    """
    hint = _evaluated(hint, names)
    origin = get_origin(hint)
    alias = hint if origin is None else origin
    if hint in seen or origin is typing.Literal:
        return False
    seen = (*seen, hint)
    if origin is Annotated:
        mark = DeduplicationIdentity  # also without its parentheses
        if any(isinstance(data, mark) or data is mark for data in hint.__metadata__):
            return True
        parts: tuple[Any, ...] = (hint.__origin__,)
    elif hasattr(alias, "__value__") and not isinstance(alias, type):  # `type Sku = Annotated[...]`
        parts = (alias.__value__,)
    else:
        parts = (hint.type,) if isinstance(hint, InitVar) else get_args(hint)
    marked = any(_carries_mark(part, names, where, seen) for part in parts)
    if marked and (isinstance(hint, InitVar) or (isinstance(origin, type) and origin not in _TRANSPARENT)):
        msg = f"the mark of {where} is inside {hint}: mark the field itself, or use @deduplication_identity"
        raise ConfigurationError(msg)
    return marked


def _evaluated(hint: Any, names: _Names) -> Any:
    """Return an annotation with its text made out; None where the text is no type."""
    text = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
    if not isinstance(text, str):
        return hint
    try:
        return eval(text, {}, names)  # noqa: S307 - the class's own text, as in typing.get_type_hints
    except Exception:  # noqa: BLE001 - whatever its author wrote there
        return None


def checked_type(taker: str, kind: Any) -> type:
    """Return a class, or say that what takes it got none."""
    if not isinstance(kind, type):
        msg = f"{taker} takes a class, not {kind!r}"
        raise ConfigurationError(msg)
    return kind


def checked_names(taker: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of members, or say that what takes them got none."""
    if not names or not all(isinstance(name, str) and name.strip() for name in names):
        msg = f"{taker} takes the names of members, such as 'sku', not {names!r}"
        raise ConfigurationError(msg)
    if len(set(names)) != len(names):
        msg = f"{taker} takes each name once, not {names!r}"
        raise ConfigurationError(msg)
    return names
