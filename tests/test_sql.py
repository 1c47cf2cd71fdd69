"""Each named query is used, each used name has a query, and statuses in SQL agree with those of the domain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    """The literal texts among the arguments of a call."""
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
