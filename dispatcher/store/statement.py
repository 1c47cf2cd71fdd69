"""Typed functions over the named statements: a signature is the type of a statement's parameters and rows.

    @statement
    async def find_webhook(source: Source, *, webhook_id: int) -> Webhook | None: ...

executes the statement `find_webhook` of `sql/queries/`. The comment below the statement's heading says what it does.
`tests/store/test_statements.py` compares each signature with what PostgreSQL says about the statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, get_args, get_origin

from dispatcher.store.connections import Session
from dispatcher.store.statements import Record, Row, Source, fetch, fetch_records, fetch_sync, from_rows

P = ParamSpec("P")
R = TypeVar("R")
Stub = Callable[Concatenate[Source, P], Awaitable[R]]
_COLLECTIONS: Final = (tuple, set, frozenset)

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
