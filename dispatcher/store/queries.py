"""The named statements of `sql/queries/`; Python never builds SQL text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

_NUMBER: Final = attrgetter("int")
_HEADING: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@cache
def all_queries() -> Mapping[str, bytes]:
    """Every named statement; read from the package once.

    Raises:
        ValueError: a name stands twice.
    """
    found: dict[str, bytes] = {}
    for resource in sorted(files("dispatcher.sql.queries").iterdir(), key=lambda item: item.name):
        if not resource.name.endswith(".sql"):
            continue
        parts = _HEADING.split(resource.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"{resource.name}: the query {name} stands twice")
            found[name] = _without_comments(text).encode()
    return MappingProxyType(found)


def query(name: str) -> bytes:
    """The statement of that name, without its comments; as bytes, which psycopg takes as trusted text."""
    return all_queries()[name]


def ids_within(email_ids: Iterable[UUID]) -> dict[str, Any]:
    """The parameters by which a statement names its emails, of which there must be one: their ids in order, and the
    bounds that keep it out of other weeks' partitions."""
    ordered = sorted(email_ids, key=_NUMBER)  # comparing UUIDs themselves is ten times the work
    return {"email_ids": ordered, "lowest_id": ordered[0], "highest_id": ordered[-1]}


def _without_comments(text: str) -> str:
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("--"))
    return "\n".join(lines).rstrip(";")
