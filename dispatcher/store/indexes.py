"""The indexes of the migrations, which `init` builds while other sessions write to their tables.

`create index` in a migration blocks every write until PostgreSQL has read the table. So in a database that is in use,
`init` takes these statements out of a migration, and builds each index concurrently: `create index` after the
migration, whose columns the index may need; `create index if not exists` before the migration, which needs the index.
If a build is interrupted, the next `init` finds that the index is missing or invalid, and builds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from dispatcher.domain.values import dataclass

_CREATED_TABLE: Final = re.compile(r"^create table (\w+)", re.MULTILINE)
_CREATED: Final = re.compile(r"^create (unique |)index (if not exists |)(\w+) on (\w+)([^;]*);\n", re.MULTILINE)
_GONE: Final = re.compile(r"\b(?:drop index (?:if exists )?|using index )(\w+)")
"""An index that a migration drops, or turns into a constraint with another name."""


@dataclass(frozen=True, slots=True)
class Index:
    """An index that a migration creates: the parts of its statement, with the spaces that follow them."""

    unique: str
    if_not_exists: str
    name: str
    table: str
    definition: str

    @property
    def statement(self) -> str:
        """The statement as it is in the migration."""
        return f"create {self.unique}index {self.if_not_exists}{self.name} on {self.table}{self.definition};\n"


def indexes_of(text: str) -> list[Index]:
    """The indexes that a migration creates on tables of earlier migrations."""
    own = set(_CREATED_TABLE.findall(text))
    return [index for found in _CREATED.findall(text) if (index := Index(*found)).table not in own]


def without_indexes(text: str) -> str:
    """A migration without the statements that create the indexes of `indexes_of`."""
    for index in indexes_of(text):
        text = text.replace(index.statement, "")
    return text


def lasting_indexes(texts: Iterable[str]) -> dict[str, Index]:
    """The indexes of `indexes_of` that exist after these migrations, in order, by name."""
    found: dict[str, Index] = {}
    for text in texts:
        found |= {index.name: index for index in indexes_of(text)}
        for name in _GONE.findall(text):
            found.pop(name, None)
    return found
