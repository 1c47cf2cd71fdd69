"""The signature of each stub has the parameters and the columns that PostgreSQL sees in its statement."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import psycopg

import dispatcher.store
from dispatcher.store.queries import query
from dispatcher.store.statements import STATEMENTS, Record, Statement
from tests.store.statements import prepared

for module in iter_modules(dispatcher.store.__path__, "dispatcher.store."):
    import_module(module.name)


def columns_of(kind: Any) -> list[str | None] | None:
    """The name of each column of a result, if it is known; None if the signature leaves the columns open."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is None or kind is bool or kind is Record:
        return None
    if origin in (list, set):
        return columns_of(parts[0])
    if origin is UnionType:
        return columns_of(next(part for part in parts if part is not NoneType))
    if origin is dict:
        return [None, *(columns_of(parts[1]) or [None])]
    if origin is tuple:
        return [None] * len(parts)
    if is_dataclass(kind):
        return [each.name for each in fields(kind)]
    return list(getattr(kind, "_fields", [None]))


def faults_of(connection: psycopg.Connection, statement: Statement[..., Any]) -> list[str]:
    """What differs between a signature and its statement."""
    text = query(statement.name).decode()
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)[sbt]", text)))
    _, *parameters = inspect.signature(statement.stub).parameters
    if sorted(names) != sorted(parameters) or statement.stub.__defaults__:
        return [f"parameters: {parameters}, not {names}; only a keyword can have a default"]
    wanted, preparing = columns_of(statement.returns), prepared(statement.name, text)
    if wanted is None or preparing is None:
        return []
    connection.execute(preparing)
    described = connection.pgconn.describe_prepared(statement.name.encode())
    found = [(described.fname(at) or b"").decode() for at in range(described.nfields)]
    if len(found) > len(wanted):  # the last fields may have defaults
        return [f"{len(found)} columns for {len(wanted)} fields"]
    pairs = zip(wanted, found, strict=False)
    return [f"{name}, not {column}" for name, column in pairs if column in wanted and column != name]


def test_each_signature_fits_its_statement(tables_session: psycopg.Connection) -> None:
    faults = {statement.name: faults_of(tables_session, statement) for statement in STATEMENTS}

    assert len(faults) > 50
    assert {name: wrong for name, wrong in faults.items() if wrong} == {}
