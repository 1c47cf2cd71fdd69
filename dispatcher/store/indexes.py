"""The indexes of the migrations, which `init` builds while other sessions write to their tables.

`create index` in a migration blocks every write until PostgreSQL has read the table. So in a database that is in use,
`init` takes these statements out of a migration, and builds each index concurrently after the migration, whose columns
it may need. The next `init` builds an index that is missing or invalid, because a build was interrupted, or
was dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from dispatcher.domain.values import dataclass

_CREATED_TABLE: Final = re.compile(r"^create table (\w+)", re.MULTILINE)
_CREATED: Final = re.compile(r"^create (unique |)index (\w+) on (\w+)([^;]*);\n", re.MULTILINE)
_DROPPED: Final = re.compile(r"\bdrop index (?:if exists )?(\w+)")


@dataclass(frozen=True, slots=True)
class Index:
    """An index that a migration creates: the parts of its statement, with the spaces that follow them."""

    unique: str
    name: str
    table: str
    definition: str

    @property
    def statement(self) -> str:
        """The statement as it is in the migration."""
        return f"create {self.unique}index {self.name} on {self.table}{self.definition};\n"


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
    """The indexes that exist after these migrations, in order, by name."""
    found: dict[str, Index] = {}
    for text in texts:
        found |= {index.name: index for index in (Index(*each) for each in _CREATED.findall(text))}
        for name in _DROPPED.findall(text):
            found.pop(name, None)
    return found
