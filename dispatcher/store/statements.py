"""Executes the named statements of `sql/queries/`, and makes values of their rows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias, TypeVar, get_type_hints, overload

from psycopg import AsyncConnection

from dispatcher.store.connections import AsyncSession, Pool, Session, session, translated
from dispatcher.store.queries import query

T = TypeVar("T")

Row = tuple[Any, ...]
Source: TypeAlias = "Pool | AsyncSession"
"""What executes a statement: one session, or any session of a pool."""


@overload
async def fetch(source: Source, name: str, parameters: Mapping[str, Any] | None = None) -> list[Row]: ...
@overload
async def fetch(
    source: Source, name: str, parameters: Mapping[str, Any] | None = None, *, into: Callable[..., T]
) -> list[T]: ...
async def fetch(
    source: Source, name: str, parameters: Mapping[str, Any] | None = None, *, into: Callable[..., Any] | None = None
) -> list[Any]:
    """Executes a statement; returns its rows, none if it returns none. Faults are ours (see `translated`).

    Args:
        into: What each row becomes (see `made`).
    """
    async with session_of(source) as connection:
        cursor = await connection.execute(query(name), parameters)
        rows = await cursor.fetchall() if cursor.description else []
    return rows if into is None else made(into, rows)


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
        rows = cursor.fetchall() if cursor.description else []
    return rows if into is None else made(into, rows)


def session_of(source: Source) -> AbstractAsyncContextManager[AsyncSession]:
    """A session of the source, for several statements. Faults are ours."""
    return _same(source) if isinstance(source, AsyncConnection) else session(source)


@asynccontextmanager
async def _same(connection: AsyncSession) -> AsyncIterator[AsyncSession]:
    with translated():
        yield connection


def made(kind: Callable[..., T], rows: Sequence[Row]) -> list[T]:
    """A value of each row: its columns are the fields, in order. A text becomes the StrEnum that its field names."""
    if not (words := _words_of(kind)):
        return [kind(*row) for row in rows]
    return [kind(*[words[at](value) if at in words else value for at, value in enumerate(row)]) for row in rows]


@cache
def _words_of(kind: Callable[..., Any]) -> dict[int, type[StrEnum]]:
    """The fields that hold a StrEnum, by position."""
    hints = get_type_hints(kind).values()
    return {at: hint for at, hint in enumerate(hints) if isinstance(hint, type) and issubclass(hint, StrEnum)}
