"""A connection that replaces one statement by a mutant. The dispatcher's code is unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import TupleRow

from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import query


@dataclass(frozen=True)
class Mutant:
    """A named statement with one passage replaced."""

    name: str
    passage: str
    replacement: str = ""

    @property
    def texts(self) -> tuple[bytes, bytes]:
        """The text of the original statement, and of the mutant."""
        text = query(self.name).decode()
        passage = re.sub(r"^[ ]+", "", self.passage, flags=re.MULTILINE)  # `query` removes the indents
        assert text.count(passage) == 1, f"{self.name} has {text.count(passage)} times: {passage}"
        return text.encode(), text.replace(passage, self.replacement).encode()


def connection_class(mutant: Mutant | None) -> type[AsyncSession]:
    """A connection class that executes the mutant instead of the original statement. Without a mutant, the class
    changes no statement."""
    original, altered = mutant.texts if mutant else (b"", b"")

    class Altered(psycopg.AsyncConnection[TupleRow]):
        async def execute(self, query: Any, *arguments: Any, **options: Any) -> psycopg.AsyncCursor[TupleRow]:
            return await super().execute(altered if query == original else query, *arguments, **options)

    return Altered
