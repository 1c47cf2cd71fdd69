"""Each named query is used and has the columns of its signature, each used name has a query, and statuses in SQL agree
with those of the domain."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import psycopg
import pytest

import dispatcher.store
from dispatcher.actions import all_actions
from dispatcher.actions.action import Action
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.migrations import all_migrations
from dispatcher.store.queries import all_queries
from dispatcher.store.statements import STATEMENTS, Record, Statement
from tests.test_layers import FOLDER

_NOT_PREPARED = re.compile(r"(listen|create|drop|set|grant|revoke|do)\b")


def prepared(name: str, text: str) -> bytes | None:
    """A statement with numbered parameters, in the order of first use; None if PREPARE does not accept its kind."""
    numbers: dict[str, str] = {}
    for parameter in re.findall(r"%\((\w+)\)[sb]", text):
        numbers.setdefault(parameter, f"${len(numbers) + 1}")
    if _NOT_PREPARED.match(text):
        return None
    numbered = re.sub(r"%\((\w+)\)[sb]", r"{\1}", text).format_map(numbers).replace("%%", "%")
    return f"prepare {name} as {numbered}".encode()


def modules(*words: str) -> Iterator[ast.Module]:
    for path in sorted(FOLDER.rglob("*.py")):
        if any(word in (text := path.read_text()) for word in words):
            yield ast.parse(text)


def called_name(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return None


def texts(call: ast.Call) -> set[str]:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    chosen = [each for one in given for each in ([one.body, one.orelse] if isinstance(one, ast.IfExp) else [one])]
    return {each.value for each in chosen if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def _kinds_of(action: type[Action[Any]]) -> Iterator[type[Action[Any]]]:
    """The action and all classes below it, also those that no face lists."""
    all_actions()  # imports them
    yield action
    for each in action.__subclasses__():
        yield from _kinds_of(each)


def test_every_used_query_exists_and_every_query_is_used() -> None:
    found, queried = set(), set()
    for node in (each for module in modules("fetch", "query", "statement") for each in ast.walk(module)):
        if isinstance(node, ast.Call):
            found |= texts(node)
            if called_name(node) in ("fetch", "fetch_records", "fetch_sync", "query"):
                queried |= set(filter(str.isidentifier, texts(node)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_stub = any(isinstance(each, ast.Name) and each.id == "statement" for each in node.decorator_list)
            queried |= {node.name} if is_stub else set()
    queried |= {
        getattr(action, each)
        for action in _kinds_of(Action)
        for each in ("query", "count", "find")
        if hasattr(action, each)
    } - {""}

    assert queried <= set(all_queries()) <= found | queried


def test_python_contains_no_sql() -> None:
    statement = re.compile(r"\s*(select|insert into|update|delete from|with)\s+\w+", re.IGNORECASE)

    strays = [
        node.value
        for module in modules("execute", "SQL")
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and called_name(call) in ("execute", "executemany", "SQL")
        for node in call.args
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and statement.match(node.value)
    ]

    assert strays == []


def test_postgresql_can_parse_every_statement_with_any_search_path(tables_url: str) -> None:
    with psycopg.connect(tables_url, autocommit=True) as connection:
        connection.execute("set search_path = ''")
        for name, text in all_queries().items():
            statement = prepared(name, text.decode())
            if statement is None:
                continue
            try:
                connection.execute(statement, prepare=False)
            except psycopg.errors.IndeterminateDatatype:
                continue  # the type depends on the value
            except psycopg.Error as error:
                pytest.fail(f"{name}: {error}")


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
    text = all_queries()[statement.name].decode()
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


def test_each_signature_fits_its_statement(tables_url: str) -> None:
    for module in iter_modules(dispatcher.store.__path__, "dispatcher.store."):
        import_module(module.name)
    with psycopg.connect(tables_url, autocommit=True) as connection:
        faults = {statement.name: faults_of(connection, statement) for statement in STATEMENTS}

    assert len(faults) > 50
    assert {name: wrong for name, wrong in faults.items() if wrong} == {}


def words(definition: str) -> set[str]:
    return set(re.findall(r"'(\w+)'", definition))


def test_the_tables_have_the_domains_values(tables_url: str) -> None:
    with psycopg.connect(tables_url) as connection:
        constraints: dict[str, str] = dict(
            connection.execute(
                "select conname, pg_get_constraintdef(oid) from pg_constraint "
                "where conrelid = 'dispatcher.email_log'::regclass or contypid <> 0"
            ).fetchall()
        )

    assert words(constraints["email_status_known"]) == set(Status)
    assert words(constraints["email_on_uncertain_known"]) == set(OnUncertain)


def test_every_status_in_a_statement_exists() -> None:
    compared = re.compile(r"\bstatus\s*(?:=|<>|in)\s*(\([^)]*\)|'\w+')")
    chosen = re.compile(r"case (?:r\.status|x\.policy)\b.*?\bend", re.DOTALL)
    texts = [text.decode() for text in all_queries().values()] + [migration.text for migration in all_migrations()]

    found = {word for text in texts for match in compared.findall(text) for word in words(match)}
    found |= {word for text in texts for match in chosen.findall(text) for word in words(match)} - {"epoch"}

    assert found <= {*Status, *OnUncertain}
    assert set(Status) <= found


def test_every_statement_that_finishes_an_email_writes_the_feed_of_events() -> None:
    finishing = re.compile(rb"\bstatus = (case\b[^,]*)?('(sent|failed|held)'|r\.status)", re.DOTALL)
    changes = {
        name: text
        for name, text in all_queries().items()
        for change in re.findall(rb"update dispatcher\.email_log\b.*?\bset\b(.*?)\b(?:where|from)\b", text, re.DOTALL)
        if finishing.search(change)
    }

    assert {"record", "confirm_held", "note_crashes", "recover_expired", "republish_lost"} <= changes.keys()
    assert [name for name, text in changes.items() if b"insert into dispatcher.outgoing_event" not in text] == []
