"""Checks the named queries: each query is used, each used name has a query, and statuses in SQL agree with the domain.

The test finds uses in the source. If a function passes a parameter on to `query` or `fetch`, the parameter is a query's
name. If a caller of this function passes on its own parameter, that parameter is a query's name, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from dispatcher.actions import all_actions
from dispatcher.actions.action import Action
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.migrations import all_migrations
from dispatcher.store.queries import all_queries
from tests.store.statements import prepared
from tests.test_layers import FOLDER

Function = ast.FunctionDef | ast.AsyncFunctionDef

TAKERS = dict.fromkeys(("fetch", "fetch_records", "fetch_sync"), (1, "name")) | {"query": (0, "name")}


def modules(*words: str) -> Iterator[ast.Module]:
    """The modules that contain one of these words."""
    for path in sorted(FOLDER.rglob("*.py")):
        if any(word in (text := path.read_text()) for word in words):
            yield ast.parse(text)


def called_name(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return None


def argument_at(call: ast.Call, place: int, name: str) -> ast.expr | None:
    """The argument for a parameter of a call, by name or by position; the position does not count `self`."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[place] if place < len(call.args) else None


def parameters(function: Function) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def takers(module: ast.Module) -> dict[str, tuple[int, str]]:
    """The functions of a module that take a query's name, with the position and name of that parameter."""
    found = dict(TAKERS)
    functions = [node for node in ast.walk(module) if isinstance(node, Function)]
    while True:
        more = {
            function.name: (parameters(function).index(given.id), given.id)
            for function in functions
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and called_name(call) in found
            if isinstance(given := argument_at(call, *found[called_name(call) or ""]), ast.Name)
            if given.id in parameters(function)
        }
        if more.keys() <= found.keys():
            return found
        found |= more


def uses() -> set[str]:
    """The query names used anywhere in the package. An argument that is not a literal name appears as its source."""
    found = set()
    for module in modules("fetch", "query", "statement"):
        taking = takers(module)
        found |= {
            function.name
            for function in ast.walk(module)
            if isinstance(function, Function)
            for decorator in function.decorator_list
            if isinstance(decorator, ast.Name) and decorator.id == "statement"
        }
        names = [each for each in ast.walk(module) if isinstance(each, Function) and each.name in taking]
        inside = {id(node) for function in names for node in ast.walk(function)}
        for call in ast.walk(module):
            if not isinstance(call, ast.Call) or called_name(call) not in taking:
                continue
            given = argument_at(call, *taking[called_name(call) or ""])
            for each in (given.body, given.orelse) if isinstance(given, ast.IfExp) else (given,):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    found.add(each.value)
                elif each is not None and id(call) not in inside:
                    found.add(ast.unparse(each))
    return found


def _kinds_of(action: type[Action[Any]]) -> Iterator[type[Action[Any]]]:
    """The action and all classes below it, also those that no face lists."""
    all_actions()  # imports them
    yield action
    for each in action.__subclasses__():
        yield from _kinds_of(each)


def test_every_used_query_exists_and_every_query_is_used() -> None:
    declared = {
        getattr(action, each)
        for action in _kinds_of(Action)
        for each in ("query", "count", "find")
        if hasattr(action, each)
    }
    named = {"self.name", "self.query", "action.query", "action.count", "action.find"}  # by a stub or by an action
    assert uses() - named | declared - {""} == set(all_queries())


def test_every_query_has_a_heading_that_says_what_it_does() -> None:
    bare = []
    for resource in files("dispatcher.sql.queries").iterdir():
        if resource.name.endswith(".sql"):
            lines = resource.read_text(encoding="utf-8").splitlines()
            headings = [(line, after) for line, after in pairwise(lines) if line.startswith("-- name:")]
            bare += [line for line, after in headings if not after.startswith("-- ")]

    assert bare == []


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
