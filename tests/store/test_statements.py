"""The signature of each stub says what PostgreSQL says about its statement: the parameters and the columns."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import StrEnum
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints
from uuid import UUID

import psycopg

import dispatcher.store
from dispatcher.store.queries import query
from dispatcher.store.statements import STATEMENTS, Record, Statement
from tests.store.statements import prepared

for module in iter_modules(dispatcher.store.__path__, "dispatcher.store."):
    import_module(module.name)

SCALARS: dict[int, type] = {16: bool, 17: bytes, 25: str, 1082: date, 1184: datetime, 1700: Decimal, 2950: UUID}
SCALARS |= dict.fromkeys((20, 21, 23, 26, 28), int) | dict.fromkeys((19, 1042, 1043), str)
SCALARS |= dict.fromkeys((700, 701), float)
JSON = (114, 3802)
VOID = 2278


def fits(oid: int, kind: Any, *, is_parameter: bool = False) -> bool:
    """Whether a column of a PostgreSQL type has values of a Python type."""
    if get_origin(kind) is UnionType:
        return any(fits(oid, part, is_parameter=is_parameter) for part in get_args(kind) if part is not NoneType)
    outer = get_origin(kind) or kind
    if kind is Any or oid == VOID:
        return True
    if oid in JSON:
        return outer in (Mapping, dict, Sequence, list) or (is_parameter and outer is str)
    if isinstance(outer, type) and issubclass(outer, StrEnum):
        outer = str
    if oid in SCALARS:
        return outer is SCALARS[oid] or (is_parameter and (outer, SCALARS[oid]) == (int, float))
    return outer in (list, Sequence, Collection, set, frozenset, tuple)


def columns_of(kind: Any) -> list[tuple[str | None, Any]] | None:
    """The name, if it is known, and the type of each column of a result; None if the signature leaves them open."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is None or kind is bool or kind is Record:
        return None
    if origin in (list, set):
        return columns_of(parts[0])
    if origin is UnionType:
        return columns_of(next(part for part in parts if part is not NoneType))
    if origin is dict:
        return [(None, parts[0]), *(columns_of(parts[1]) or [(None, parts[1])])]
    if origin is tuple:
        return [(None, part) for part in parts]
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind)] if is_dataclass(kind) else kind._fields
        return [(name, hints[name]) for name in names]
    return [(None, kind)]


def faults_of(connection: psycopg.Connection, statement: Statement[..., Any]) -> list[str]:
    """What differs between a signature and its statement."""
    text = query(statement.name).decode()
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)[sbt]", text)))
    _, *parameters = inspect.signature(statement.stub).parameters
    if sorted(names) != sorted(parameters) or statement.stub.__defaults__:
        return [f"parameters: {parameters}, not {names}; only a keyword can have a default"]
    if (preparing := prepared(statement.name, text)) is None:
        return []
    connection.execute(preparing)
    described = connection.pgconn.describe_prepared(statement.name.encode())
    annotations = statement.stub.__annotations__
    hints = {name: eval(annotations[name], statement.stub.__globals__) for name in names}  # noqa: S307 - our own source
    wrong = [
        f"{name}: {hints[name]}, not {described.param_type(at)}"
        for at, name in enumerate(names)
        if not fits(described.param_type(at), hints[name], is_parameter=True)
    ]
    wanted = columns_of(statement.returns)
    found = [((described.fname(at) or b"").decode(), described.ftype(at)) for at in range(described.nfields)]
    if wanted is not None:
        if len(found) > len(wanted):  # the last fields may have defaults
            wrong.append(f"{len(found)} columns for {len(wanted)} fields")
        fields_of_row = [name for name, _ in wanted]
        wrong += [
            f"column {name}: {kind}, not {column} of type {oid}"
            for (name, kind), (column, oid) in zip(wanted, found, strict=False)
            if not fits(oid, kind) or (column in fields_of_row and column != name)
        ]
    return wrong


def test_each_signature_fits_its_statement(tables_session: psycopg.Connection) -> None:
    faults = {statement.name: faults_of(tables_session, statement) for statement in STATEMENTS}

    assert len(faults) > 50
    assert {name: wrong for name, wrong in faults.items() if wrong} == {}
