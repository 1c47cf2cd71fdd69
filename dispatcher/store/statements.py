"""Executes the named statements of `sql/queries/`, and converts their rows to values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints, overload

from psycopg import AsyncConnection, DataError

from dispatcher.store.connections import AsyncSession, Pool, Session, session, translated
from dispatcher.store.instants import load_nearest
from dispatcher.store.queries import query

T = TypeVar("T")

Row = tuple[Any, ...]
Record = dict[str, Any]
"""A row with the columns' names."""
Source: TypeAlias = "Pool | AsyncSession"
"""Where to execute a statement: on one session, or on any session of a pool."""


@overload
async def fetch(
    source: Source, name: str, parameters: Mapping[str, Any] | None = None, *, is_exact: bool = False
) -> list[Row]: ...
@overload
async def fetch(
    source: Source, name: str, parameters: Mapping[str, Any] | None = None, *, into: Callable[..., T]
) -> list[T]: ...
async def fetch(
    source: Source,
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    into: Callable[..., Any] | None = None,
    is_exact: bool = False,
) -> list[Any]:
    """Executes a statement and returns its rows. Errors are translated (see `translated`).

    Args:
        into: Converts each row (see `from_rows`).
        is_exact: Whether to raise an error if Python cannot represent an instant. Otherwise, the nearest instant that
            Python can represent stands for it (see `store.instants`), and the rows cannot be read in binary, which
            takes less time.
    """
    async with session_of(source) as connection:
        cursor = await connection.execute(query(name), parameters, binary=is_exact)
        try:
            # `rownumber` is None without a result. `description` would create an object for each column.
            rows = [] if cursor.rownumber is None else await cursor.fetchall()
        except DataError:
            if is_exact:
                raise
            rows = load_nearest(cursor)
    return rows if into is None else from_rows(into, rows)


async def fetch_records(source: Source, name: str, parameters: Mapping[str, Any] | None = None) -> list[Record]:
    """As `fetch`, but each row has the columns' names."""
    async with session_of(source) as connection:
        cursor = await connection.execute(query(name), parameters)
        try:
            rows = await cursor.fetchall()
        except DataError:
            rows = load_nearest(cursor)
    names = [column.name for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in rows]


@overload
def fetch_sync(connection: Session, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]: ...
@overload
def fetch_sync(
    connection: Session, name: str, parameters: Mapping[str, Any] | None = None, *, into: Callable[..., T]
) -> list[T]: ...
def fetch_sync(
    connection: Session,
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    into: Callable[..., Any] | None = None,
) -> list[Any]:
    """As `fetch`, on a synchronous connection."""
    with translated():
        cursor = connection.execute(query(name), parameters)
        try:
            rows = [] if cursor.rownumber is None else cursor.fetchall()
        except DataError:
            rows = load_nearest(cursor)
    return rows if into is None else from_rows(into, rows)


def session_of(source: Source) -> AbstractAsyncContextManager[AsyncSession]:
    """A session of the source, for several statements. Errors are translated (see `translated`)."""
    return _same(source) if isinstance(source, AsyncConnection) else session(source)


@asynccontextmanager
async def _same(connection: AsyncSession) -> AsyncIterator[AsyncSession]:
    with translated():
        yield connection


def from_rows(kind: Callable[..., T], rows: Sequence[Row]) -> list[T]:
    """Calls `kind` with the columns of each row, in order. Converts a text to the field's StrEnum, and an array to the
    field's frozenset."""
    if not (made := _converted_fields(kind)):
        return [kind(*row) for row in rows]
    return [kind(*[made[at](value) if at in made else value for at, value in enumerate(row)]) for row in rows]


@cache
def _converted_fields(kind: Callable[..., Any]) -> dict[int, Callable[[Any], Any]]:
    """The position of each field whose column is converted, and what converts it."""
    found: dict[int, Callable[[Any], Any]] = {}
    for at, hint in enumerate(get_type_hints(kind).values()):
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            found[at] = hint
        elif any(get_origin(each) is frozenset for each in (hint, *get_args(hint))):
            found[at] = lambda array: None if array is None else frozenset(array)
    return found
