"""Each log event is declared and used, has a name like `noun.verb_past`, and has no private field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dispatcher.telemetry.events import EVENTS
from tests.test_layers import FOLDER

LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "msg"}
PRIVATE = {"email", "address", "to", "sender", "recipient", "recipients", "subject", "text", "html", "body", "password"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """All calls of a log method, each with its file and line."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Call(func=ast.Attribute(value=log, attr=level)) if level in LEVELS:
                    if re.fullmatch(r"(.*\.)?_?log(ger)?|(.*\.)?get_log\(\)", ast.unparse(log)):
                        yield f"{path.relative_to(FOLDER)}:{node.lineno}", node
                case ast.Call(func=ast.Name(id="log")):  # `log` is a method that was chosen earlier
                    yield f"{path.relative_to(FOLDER)}:{node.lineno}", node


def names_of(event: ast.expr) -> set[str]:
    """The names of the events that a call may log. If a part of the name is computed, all declared names that match."""
    match event:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.JoinedStr(values=parts):
            fitting = "".join(
                re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z_]+" for part in parts
            )
            return {name for name in EVENTS if re.fullmatch(fitting, name)}
        case _:
            return set()


def test_every_logged_event_is_declared_and_every_declared_event_is_logged() -> None:
    used = {where: names_of(call.args[0]) for where, call in calls()}

    assert [where for where, names in used.items() if not names] == []
    assert set().union(*used.values()) == set(EVENTS)


def test_names_are_a_noun_and_a_verb() -> None:
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", name)] == []


def test_no_event_has_a_private_field() -> None:
    private = {f"{where}: {field.arg}" for where, call in calls() for field in call.keywords if field.arg in PRIVATE}

    assert private == set()
