"""A decorator for values that are created for every email."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """Makes a dataclass that mypy treats as frozen. It is not frozen at runtime, because a frozen dataclass takes more
    than twice the time to create a value."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
