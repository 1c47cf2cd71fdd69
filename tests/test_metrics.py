"""Each metric is declared once, is used, has a name that follows the rules, and is listed in docs/metrics.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dispatcher.config import BUILT_IN
from dispatcher.config.plugins import provider_class
from dispatcher.monitor import server_gauges
from dispatcher.monitor.health import CHECKS
from dispatcher.telemetry import metrics, scrape
from dispatcher.telemetry.meters import Histogram, Meter
from tests.test_layers import FOLDER

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
UNITS = "seconds|emails|messages|workers|files|info|checks|pauses"
PRIVATE = {"email_id", "address", "recipient", "subject", "tenant", "tenant_id", "message_key", "host", "pid", "worker"}

Row = tuple[str, str, tuple[str, ...]]


def declared() -> dict[str, Meter]:
    """The meters by the names of their constants."""
    return {name: value for name, value in vars(metrics).items() if isinstance(value, Meter)}


def rows(heading: str) -> list[Row]:
    """The table below a heading of docs/metrics.md: name, kind, labels."""
    _, _, after = PAGE.read_text().partition(f"## {heading}\n")
    section = after.partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "`" in line]
    return [
        (name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _ in (line for line in cells if len(line) == 4)
    ]


def test_every_metric_that_processes_count_is_used() -> None:
    code = "\n".join(path.read_text() for path in FOLDER.rglob("*.py") if path != FOLDER / "telemetry" / "metrics.py")

    assert [
        name for name in declared() if not re.search(rf"\bmetrics\.{name}\.(add|set|observe|observe_all)\(", code)
    ] == []


def test_every_metric_has_a_panel_so_that_processes_count_it() -> None:
    for name in BUILT_IN:
        provider_class(name)  # imports the module that declares its metrics
    modules = [module for name, module in sys.modules.items() if name.startswith("dispatcher.")]
    meters = [each for module in modules for each in vars(module).values() if isinstance(each, Meter)]

    assert [each.name for each in meters if each.panel is None] == []
    assert meters


def test_names_end_in_their_unit() -> None:
    wrong = [
        each.name
        for each in Meter.declared
        if not re.fullmatch(
            "dispatcher_[a-z_]+_total" if each.kind == "counter" else f"dispatcher_[a-z_]+_({UNITS})", each.name
        )
    ]

    assert wrong == []


def test_no_label_identifies_a_person_or_host() -> None:
    assert [each.name for each in Meter.declared if PRIVATE.intersection(each.labels)] == []


def test_buckets_ascend() -> None:
    assert [
        each.name
        for each in Meter.declared
        if isinstance(each, Histogram) and list(each.bounds) != sorted(set(each.bounds))
    ] == []


def read_by_the_monitor() -> list[Row]:
    return [
        *((each.name, "gauge", each.labels) for each in server_gauges.SERVER_GAUGES),
        (scrape.SKIPPED[0], "gauge", ("reason",)),
    ]


def test_readings_are_named_as_metrics_are() -> None:
    assert [name for name, *_ in read_by_the_monitor() if not re.fullmatch(f"dispatcher_[a-z_]+_({UNITS})", name)] == []


def test_names_are_unique() -> None:
    names = [each.name for each in Meter.declared] + [name for name, *_ in read_by_the_monitor()]

    assert len(set(names)) == len(names)


def test_the_page_lists_what_the_monitor_reads() -> None:
    assert rows("Read by the monitor") == read_by_the_monitor()


def test_the_page_lists_every_check() -> None:
    _, _, after = PAGE.read_text().partition("## Health\n")

    assert re.findall(r"^\| `(\w+)` \|", after.partition("\n## ")[0], re.MULTILINE) == list(CHECKS)


def test_the_page_lists_what_processes_count() -> None:
    assert rows("Counted by processes") == [(each.name, each.kind, each.labels) for each in Meter.declared]
