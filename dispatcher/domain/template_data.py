"""The data that a provider's template is filled with: a bounded JSON object that PostgreSQL and any reader can hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from dispatcher.domain.text import body_fault
from dispatcher.errors import InvalidEmail

NO_DATA: Final = MappingProxyType[str, object]({})
MAX_DATA_OCTETS: Final = 256 * 1024
"""As JSON: SES takes 262,144 octets of template data."""
MAX_DEPTH: Final = 16
"""Deeper than any template reads; far below what a parser's stack holds."""
MAX_INTEGER: Final = 2**53 - 1
"""Beyond it, JSON's readers disagree (RFC 8259, section 6)."""


def checked_data(value: object) -> Mapping[str, object]:
    """The data, read-only at its top.

    Raises:
        InvalidEmail: it is no object, or holds what JSON or PostgreSQL cannot.
    """
    if not isinstance(value, Mapping):
        raise InvalidEmail("template_data", "must be an object")
    if not value:
        return NO_DATA
    _check(value, MAX_DEPTH)
    if len(canonical_data(value).encode()) > MAX_DATA_OCTETS:
        raise InvalidEmail("template_data", f"has more than {MAX_DATA_OCTETS} octets")
    return MappingProxyType(dict(value))


def canonical_data(value: Mapping[str, object]) -> str:
    """The data as JSON of one form, whatever the order of its names."""
    return json.dumps(dict(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _check(value: object, depth: int) -> None:
    if depth == 0:
        raise InvalidEmail("template_data", f"is nested more than {MAX_DEPTH} deep")
    match value:
        case Mapping():
            for name, item in value.items():
                if not isinstance(name, str):
                    raise InvalidEmail("template_data", "has a name that is not a text")
                _check(name, depth)
                _check(item, depth - 1)
        case list() | tuple():
            for item in value:
                _check(item, depth - 1)
        case _:
            _check_scalar(value)


def _check_scalar(value: object) -> None:
    match value:
        case None | bool():
            return
        case str():
            if fault := body_fault(value):
                raise InvalidEmail("template_data", fault)
        case int():
            if abs(value) > MAX_INTEGER:
                raise InvalidEmail("template_data", "has a whole number beyond 2**53; give it as text")
        case float():
            if value != value or value in (float("inf"), float("-inf")):
                raise InvalidEmail("template_data", "has a number that is not finite")
        case _:
            raise InvalidEmail("template_data", "holds something that is not JSON")
