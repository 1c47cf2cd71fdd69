"""Each metric and each log event is declared once, is used, and has a name that follows the rules and no private field.
docs/metrics.md lists the metrics."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dispatcher.config import BUILT_IN
from dispatcher.config.plugins import provider_class
from dispatcher.monitor import server_gauges
from dispatcher.monitor.health import CHECKS
from dispatcher.telemetry import metrics, scrape
from dispatcher.telemetry.events import EVENTS
from dispatcher.telemetry.meters import Meter
from tests.test_layers import FOLDER

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
GAUGE = "dispatcher_[a-z_]+_(seconds|emails|messages|workers|files|info|checks|pauses)"
PRIVATE = {"email_id", "address", "recipient", "subject", "tenant", "tenant_id", "message_key", "host", "pid", "worker"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "msg"}
PRIVATE_FIELDS = {"email", "address", "to", "sender", "recipient", "recipients", "subject", "text", "html", "body"}
PRIVATE_FIELDS |= {"password"}

Row = tuple[str, str, tuple[str, ...]]


def section(heading: str) -> str:
    _, _, after = PAGE.read_text().partition(f"## {heading}\n")
    return after.partition("\n## ")[0]


def rows(heading: str) -> list[Row]:
    """The table below a heading of docs/metrics.md: name, kind, labels."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section(heading).splitlines()]
    return [
        (name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _ in (line for line in cells if len(line) == 4 and "`" in line[0])
    ]


def read_by_the_monitor() -> list[Row]:
    return [
        *((each.name, "gauge", each.labels) for each in server_gauges.SERVER_GAUGES),
        (scrape.SKIPPED[0], "gauge", ("reason",)),
    ]


def test_every_metric_that_processes_count_is_used() -> None:
    code = "\n".join(path.read_text() for path in FOLDER.rglob("*.py") if path != FOLDER / "telemetry" / "metrics.py")
    used = set(re.findall(r"\bmetrics\.(\w+)\.(?:add|set|observe|observe_all)\(", code))

    assert {name for name, value in vars(metrics).items() if isinstance(value, Meter)} - used == set()


def test_every_metric_has_a_panel_so_that_processes_count_it() -> None:
    for name in BUILT_IN:
        provider_class(name)  # imports the module that declares its metrics
    modules = [module for name, module in sys.modules.items() if name.startswith("dispatcher.")]
    meters = [each for module in modules for each in vars(module).values() if issubclass(type(each), Meter)]

    assert [each.name for each in meters if each.panel is None] == []
    assert meters


def test_names_are_unique_and_end_in_their_unit_and_no_label_identifies_a_person_or_host() -> None:
    declared = [(each.name, each.kind, each.labels) for each in Meter.declared] + read_by_the_monitor()
    forms = {"counter": "dispatcher_[a-z_]+_total"}

    assert [name for name, kind, _ in declared if not re.fullmatch(forms.get(kind, GAUGE), name)] == []
    assert [name for name, _, labels in declared if PRIVATE.intersection(labels)] == []
    assert len({name for name, *_ in declared}) == len(declared)


def test_the_page_lists_every_metric_and_every_check() -> None:
    assert rows("Read by the monitor") == read_by_the_monitor()
    assert rows("Counted by processes") == [(each.name, each.kind, each.labels) for each in Meter.declared]
    assert re.findall(r"^\| `(\w+)` \|", section("Health"), re.MULTILINE) == list(CHECKS)


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Call(func=ast.Attribute(value=log, attr=level)) if level in LEVELS:
                if re.fullmatch(r"(.*\.)?_?log(ger)?|(.*\.)?get_log\(\)", ast.unparse(log)):
                    yield node
            case ast.Call(func=ast.Name(id="log")):  # `log` is a method that was chosen earlier
                yield node


@cache
def logged() -> list[tuple[str, ast.Call]]:
    return [
        (f"{path.relative_to(FOLDER)}:{call.lineno}", call)
        for path in sorted(FOLDER.rglob("*.py"))
        if b"log" in path.read_bytes()
        for call in calls(path)
    ]


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


def test_every_logged_event_is_declared_as_a_noun_and_a_verb_and_every_declared_event_is_logged() -> None:
    used = {where: names_of(call.args[0]) for where, call in logged()}

    assert [where for where, names in used.items() if not names] == []
    assert set().union(*used.values()) == set(EVENTS)
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", name)] == []


def test_no_event_has_a_private_field() -> None:
    fields = {(where, field.arg) for where, call in logged() for field in call.keywords}

    assert [(where, name) for where, name in fields if name in PRIVATE_FIELDS] == []
