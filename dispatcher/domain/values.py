"""A decorator for values that are created for every email."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass that mypy treats as frozen. It is not frozen at runtime, because that would more than double the time
    to create a value."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
