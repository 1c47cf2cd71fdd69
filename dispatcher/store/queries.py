"""Loads the named statements of `sql/queries/`; Python never builds SQL text.

Each statement contains the default schema, `dispatcher`, before the names of our tables and functions. If
DISPATCHER_DATABASE_SCHEMA is set to a different schema, that schema replaces the default. So no statement depends on
the search_path of a session, which may belong to the application or a pooler.

`-- part: name` heads a text that several statements have in common. It replaces `{name}` in statements of all files.
A part may include parts that include none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from dispatcher.errors import ConfigurationError

_NUMBER: Final = attrgetter("int")
_HEADING: Final = re.compile(r"^-- (name|part): (\w+)$", re.MULTILINE)
_PART: Final = re.compile(r"\{(\w+)\}")
_DEFAULT_SCHEMA: Final = "dispatcher"
_SCHEMA_NAME: Final = re.compile(rb"(?<=\bschema )dispatcher\b|\bdispatcher(?=\.)")


@cache
def schema() -> str:
    """The schema of our tables: the value of DISPATCHER_DATABASE_SCHEMA at the first call. Raises ConfigurationError.

    This function reads the environment itself, because an application that uses the library loads no settings.
    """
    text = os.environ.get("DISPATCHER_DATABASE_SCHEMA", "").strip()
    if not text:
        return _DEFAULT_SCHEMA
    from dispatcher.config.values import schema_name

    try:
        return schema_name(text)
    except ValueError as error:
        raise ConfigurationError([f"DISPATCHER_DATABASE_SCHEMA {error}."]) from None


@cache
def all_queries() -> Mapping[str, bytes]:
    """Every named statement, without comments, for the default schema."""
    return MappingProxyType({name: _without_comments(text) for name, text in _sections().items()})


def query(name: str) -> bytes:
    """The statement with this name, without comments, as bytes: psycopg accepts bytes as trusted SQL."""
    return _query_in(schema(), name)


@cache
def _query_in(schema_name: str, name: str) -> bytes:
    """Converts only this statement, because a command executes few of the hundreds of statements."""
    text = _without_comments(_sections()[name])
    return text if schema_name == _DEFAULT_SCHEMA else _SCHEMA_NAME.sub(f'"{schema_name}"'.encode(), text)


@cache
def _sections() -> Mapping[str, str]:
    """Every named statement with its comments; read from the package once."""
    found: dict[str, dict[str, str]] = {"name": {}, "part": {}}
    for resource in sorted(files("dispatcher.sql.queries").iterdir(), key=lambda item: item.name):
        if resource.name.endswith(".sql"):
            _, *sections = _HEADING.split(resource.read_text(encoding="utf-8"))
            for kind, name, text in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
                if name in found[kind]:
                    raise ValueError(f"{resource.name}: another {kind} is {name}")
                found[kind][name] = text
    parts = {name: _without_comments(text).decode() for name, text in found["part"].items()}

    def with_parts(text: str) -> str:
        return _PART.sub(lambda place: with_parts(parts[place[1]]) if place[1] in parts else place[0], text)

    return {name: with_parts(text) for name, text in found["name"].items()}


def ids_within(email_ids: Iterable[UUID]) -> dict[str, Any]:
    """The parameters that select a statement's emails (at least one): the sorted ids, and the lowest and the highest
    id.

    With these two ids, PostgreSQL skips the weekly partitions that contain none of the emails.
    """
    ordered = sorted(email_ids, key=_NUMBER)  # comparing UUID objects instead of numbers takes ten times as long
    return {"email_ids": ordered, "lowest_id": ordered[0], "highest_id": ordered[-1]}


def ids_with(name: str, values: Mapping[UUID, Any]) -> dict[str, Any]:
    """As `ids_within`, with an additional parameter `name`: the values of the emails, in the order of the ids."""
    ids = ids_within(values)
    return {**ids, name: [values[email_id] for email_id in ids["email_ids"]]}


def _without_comments(text: str) -> bytes:
    """The statement without comments and indents. psycopg keeps its analysis of a statement for the next call only if
    the statement has at most 4,096 bytes, and the longest that an application executes, `enqueue`, has almost as many.
    """
    lines = (line for each in text.splitlines() if (line := each.strip()) and not line.startswith("--"))
    return "\n".join(lines).rstrip(";").encode()
