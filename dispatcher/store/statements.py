"""Executes the named statements of `sql/queries/`, and converts their rows to values.

A stub is a typed statement: its signature is the type of the statement's parameters and rows.

    @statement
    async def find_tenants_of_key(source: Source, message_key: str, *, most_tenants: int) -> dict[str, UUID]: ...

executes the statement `find_tenants_of_key`. The comment below the statement's heading says what it does.
`tests/test_sql.py` compares each signature with what PostgreSQL says about the statement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from functools import cache, cached_property, partial
from itertools import chain
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from psycopg import AsyncConnection, DataError

from dispatcher.store.connections import AsyncSession, Pool, Session, session, translated
from dispatcher.store.instants import load_nearest
from dispatcher.store.queries import query

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

Row = tuple[Any, ...]
Record = dict[str, Any]
"""A row with the columns' names."""
Source: TypeAlias = "Pool | AsyncSession"
"""Where to execute a statement: on one session, or on any session of a pool."""
Stub = Callable[Concatenate[Source, P], Awaitable[R]]
_COLLECTIONS: Final = (tuple, set, frozenset)


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
    """Executes a statement, and returns its rows, converted by `into` (see `from_rows`). Errors are translated.

    An instant that Python cannot represent becomes the nearest one that it can (see `store.instants`). With
    `is_exact`, this is an error instead, and the rows are read in binary, which takes less time.
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
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if enums := [each for each in parts if isinstance(each, type) and issubclass(each, StrEnum)]:
            found[at] = enums[0] if len(parts) == 1 else partial(_optional, enums[0])
        elif any(get_origin(each) is frozenset for each in (hint, *get_args(hint))):
            found[at] = lambda array: None if array is None else frozenset(array)
    return found


def _optional(kind: type[StrEnum], text: str | None) -> StrEnum | None:
    return None if text is None else kind(text)


STATEMENTS: Final[list[Statement[..., Any]]] = []
"""The statement of each stub that was imported."""


class Statement(Generic[P, R]):
    """A named statement with the types of its stub. Call it as the stub, or `sync` on a synchronous connection."""

    def __init__(self, stub: Stub[P, R]) -> None:
        self.name = stub.__name__
        self.stub = stub

    async def __call__(self, source: Source, /, *args: P.args, **given: P.kwargs) -> R:
        parameters = self._parameters(args, given)
        if Record in (self.returns, *get_args(self.returns)):
            return self._convert([(record,) for record in await fetch_records(source, self.name, parameters)])
        return self._convert(await fetch(source, self.name, parameters))

    def sync(self, connection: Session, /, *args: P.args, **given: P.kwargs) -> R:
        """As a call, on a synchronous connection."""
        return self._convert(fetch_sync(connection, self.name, self._parameters(args, given)))

    def _parameters(self, args: Sequence[Any], given: dict[str, Any]) -> dict[str, Any] | None:
        """The values by name. psycopg writes only a list as an array."""
        named = chain((self.stub.__kwdefaults__ or {}).items(), zip(self._names, args, strict=False), given.items())
        return {name: list(value) if isinstance(value, _COLLECTIONS) else value for name, value in named} or None

    @cached_property
    def _names(self) -> Sequence[str]:
        return self.stub.__code__.co_varnames[1:]

    @cached_property
    def returns(self) -> Any:
        """The return type of the stub."""
        return eval(self.stub.__annotations__["return"], self.stub.__globals__)  # noqa: S307 - our own source

    @cached_property
    def _convert(self) -> Callable[[Sequence[Row]], R]:
        return _conversion(self.returns)


def statement(stub: Stub[P, R]) -> Statement[P, R]:
    """The statement with the name of the stub. The stub's return type says how rows become the result:

    - `list[T]` or `set[T]`: all rows; `dict[K, V]`: all rows by their first column
    - `T | None`: the first row; None without rows
    - `bool`: whether there is a row, and no column of it is false
    - `None`: nothing
    - any other T: the only row

    A dataclass, a named tuple or a tuple gets all columns of a row, and a `Record` also their names. Any other type is
    the type of a row's only column. A keyword with a default is a constant of the statement.
    """
    found = Statement(stub)
    STATEMENTS.append(found)
    return found


def _conversion(kind: Any) -> Callable[[Sequence[Row]], Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is None:
        return lambda _rows: None
    if kind is bool:
        return lambda rows: bool(rows) and all(value is not False for value in rows[0])
    if origin in (list, set):
        return lambda rows: origin(_values(parts[0], rows))
    if origin is dict and kind != Record:
        return lambda rows: dict(
            zip(_values(parts[0], rows), _values(parts[1], [row[1:] for row in rows]), strict=True)
        )
    if origin is UnionType and NoneType in parts:
        return lambda rows: next(iter(_values(parts[0], rows[:1])), None)
    return lambda rows: _values(kind, rows)[0]


def _values(kind: Any, rows: Sequence[Row]) -> Sequence[Any]:
    if kind is tuple or get_origin(kind) is tuple:
        return rows
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
        return from_rows(kind, rows)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return [kind(row[0]) for row in rows]
    return [row[0] for row in rows]
