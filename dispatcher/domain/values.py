"""Values of which one or more are made per email."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A frozen dataclass, says mypy; at runtime it is not frozen: making one would cost more than twice as much."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
