"""Dataclasses that start quickly: Python compiles one method of each class, instead of six."""

from __future__ import annotations

import dataclasses
from dataclasses import field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

__all__ = ["dataclass", "field", "replace", "value"]
T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool = False, eq: bool = True, **options: bool) -> Any:
        """As `dataclasses.dataclass`, but a frozen class is frozen only for mypy, because a value of a class that is
        also frozen at runtime takes more than twice the time to create."""

        def make(cls: type[T]) -> type[T]:
            own = vars(cls)
            made = dataclasses.dataclass(init="__init__" not in own, eq=False, repr=False, **options)(cls)
            if "__repr__" not in own:
                made.__repr__ = _repr
            if eq and "__eq__" not in own:
                key = attrgetter("__class__", *(each.name for each in fields(made) if each.compare))
                made.__eq__ = lambda a, b: key(a) == key(b) if a.__class__ is b.__class__ else NotImplemented
                made.__hash__ = (lambda a: hash(key(a))) if frozen else None
            return made

        return make


def _repr(value: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(value, each.name)!r}" for each in fields(value) if each.repr)
    return f"{type(value).__qualname__}({shown})"


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass with slots, for values that are created for every email."""
    return dataclass(frozen=True, slots=True)(cls)
