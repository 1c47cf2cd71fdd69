"""The tables of one run, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.capacity import BUSY_DOUBLE
from benchmarks.figures import Spread, ideal_rate, machine_rate
from benchmarks.machine import described
from benchmarks.results import Kind, Record, by_kind, name_of, spread

PARTS: Final = ("worker", "relay", "monitor", "parent", "postgresql", "rabbitmq", "double")
_LATENCIES: Final = ("p50", "p95", "p99")

Figure = Callable[[Record], float | None]


def tables(records: Sequence[Record]) -> RenderableType:
    """One run: throughput with lost and duplicate emails, latency, CPU, and work per email."""
    cases = by_kind(records)
    parts: list[RenderableType] = [_throughput(cases), _latency(cases), _cpu(cases), _work(cases)]
    if records[-1]["work"]["top"]:
        parts.append(_statements(records[-1]))
    return Group(*parts, *_remarks(cases), described(records[0]["machine"]))


def comparison(before: Sequence[Record], after: Sequence[Record]) -> RenderableType:
    """Two runs side by side: medians, ranges and ratio of each figure."""
    table = Table(title="Two runs: median (lowest – highest). If the ranges overlap, the difference may be noise")
    for heading in ("case", "figure", "before", "after", "ratio", "ranges"):
        table.add_column(heading, justify="left" if heading in ("case", "figure", "ranges") else "right")
    old, new = by_kind(before), by_kind(after)
    for kind in (kind for kind in new if kind in old):
        name = name_of(new[kind][0])
        for label, figure in _compared(is_open_loop=bool(dict(kind)["rate"])).items():
            was, is_now = spread(old[kind], figure), spread(new[kind], figure)
            if was and is_now and was.median:
                ratio = f"{is_now.median / was.median:.2f}"
                overlap = _overlap(was, is_now, min(len(old[kind]), len(new[kind])))
                table.add_row(name, label, _range(was), _range(is_now), ratio, overlap)
                name = ""
        table.add_section()
    machines = [f"before: {described(before[0]['machine'])}", f"after: {described(after[0]['machine'])}"]
    unmatched = [name_of(cases[0]) for kind, cases in (old | new).items() if kind not in old or kind not in new]
    if unmatched:
        machines.append(f"only in one run: {'; '.join(unmatched)}")
    return Group(table, *machines)


def cpu_of(*parts: str) -> Figure:
    """The figure for the CPU microseconds per email of these processes together."""
    return lambda record: sum(record["cpu_us"].get(part, 0.0) for part in parts)


def _overlap(was: Spread, is_now: Spread, repetitions: int) -> str:
    if repetitions < 2:
        return "unknown"  # a single figure has no range
    return "overlap" if was.overlaps(is_now) else "separate"


def _compared(*, is_open_loop: bool) -> dict[str, Figure]:
    # In a backlog, the latency of an email depends on its position, and thus on the backlog's size. So only open loops
    # compare latencies.
    latencies: dict[str, Figure] = {f"{name} ms": _latency_of(name) for name in _LATENCIES} if is_open_loop else {}
    return {
        "emails/s": lambda record: record["emails_per_second"],
        **latencies,
        "CPU µs, worker": cpu_of("worker"),
        "CPU µs, all": cpu_of(*PARTS),
        "PSS MB": lambda record: record["pss_mb"],
        "statements": lambda record: record["work"]["statements"],
        "WAL bytes": lambda record: record["work"]["wal_bytes"],
    }


def _throughput(cases: dict[Kind, list[Record]]) -> Table:
    table = Table(title="Throughput: median (lowest – highest). Ideal: each worker as fast as in the first case")
    for heading in ("case", "emails", "emails/s", "range", "of ideal", "kills", "sent", "lost", "duplicates", "held"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for kind, records in cases.items():
        rate = Spread.of(record["emails_per_second"] for record in records)
        table.add_row(
            name_of(records[0]),
            f"{records[0]['case']['emails']:,}",
            f"{rate.median:,.0f}",
            f"{rate.lowest:,.0f} – {rate.highest:,.0f}",
            _of_ideal(kind, rate.median, cases),
            str(sum(record["kills"] for record in records)),
            *(_booked(records, book) for book in ("sent", "lost", "duplicates", "held")),
        )
    return table


def _of_ideal(kind: Kind, rate: float, cases: dict[Kind, list[Record]]) -> str:
    if dict(kind)["rate"]:
        return "–"
    rates = rates_by_workers(kind, cases)
    return f"{rate / ideal_rate(rates, dict(kind)['workers']):.0%}"


def rates_by_workers(kind: Kind, cases: dict[Kind, list[Record]]) -> dict[int, float]:
    """The median rate for each number of workers, from the cases that differ from `kind` only in this number."""
    alike = {k: records for k, records in cases.items() if {**dict(k), "workers": 0} == {**dict(kind), "workers": 0}}
    return {dict(k)["workers"]: Spread.of(r["emails_per_second"] for r in rs).median for k, rs in alike.items()}


def _booked(records: Sequence[Record], book: str) -> str:
    counts = [record["books"][book] for record in records]
    return "unknown" if None in counts else f"{sum(counts):,}"


def _latency(cases: dict[Kind, list[Record]]) -> Table:
    table = Table(
        title="Enqueue to accepted, ms: medians of the percentiles. In a backlog, they depend on the queue's length"
    )
    table.add_column("case")
    table.add_column("clock starts")
    for heading in ("arrivals/s", *_LATENCIES):
        table.add_column(heading, justify="right")
    for records in cases.values():
        rate = records[0]["case"]["rate"]
        clock = "due arrival" if rate else "backlog's commit"
        figures = [_shown(spread(records, _latency_of(name)), 1) for name in _LATENCIES]
        table.add_row(name_of(records[0]), clock, f"{rate:,.0f}" if rate else "–", *figures)
        if rate:
            figures = [_shown(spread(records, _commit_latency_of(name)), 1) for name in _LATENCIES]
            table.add_row("", "its commit", "", *figures)
    return table


def _latency_of(name: str) -> Figure:
    return lambda record: record["latency_ms"].get(name)


def _commit_latency_of(name: str) -> Figure:
    return lambda record: record["from_commit_ms"].get(name)


def _cpu(cases: dict[Kind, list[Record]]) -> Table:
    table = Table(title="CPU microseconds per email, user and system: medians. Machine: all processes")
    table.add_column("case")
    for heading in (*PARTS, "sum", "machine"):
        table.add_column(heading, justify="right")
    for records in cases.values():
        figures = [_shown(spread(records, _known_cpu(part))) for part in PARTS]
        table.add_row(
            name_of(records[0]),
            *figures,
            _shown(spread(records, cpu_of(*PARTS))),
            _shown(spread(records, cpu_of("machine"))),
        )
    return table


def _known_cpu(part: str) -> Figure:
    return lambda record: record["cpu_us"].get(part)


def _work(cases: dict[Kind, list[Record]]) -> Table:
    table = Table(title="Work per email, batches, memory: medians")
    table.add_column("case")
    headings = ("statements", "WAL bytes", "leased at once", "recorded at once", "window filled", "PSS MB per worker")
    for heading in headings:
        table.add_column(heading, justify="right")
    for records in cases.values():
        share = spread(records, lambda record: record["in_flight_share"])
        table.add_row(
            name_of(records[0]),
            _shown(spread(records, lambda record: record["work"]["statements"]), 3),
            _shown(spread(records, lambda record: record["work"]["wal_bytes"])),
            _shown(spread(records, lambda record: record["lease_batch"]), 1),
            _shown(spread(records, lambda record: record["record_batch"]), 1),
            f"{share.median:.0%}" if share else "–",
            _shown(spread(records, lambda record: record["pss_mb"]), 1),
        )
    return table


def _statements(record: Record) -> Table:
    table = Table(title=f"The most expensive statements of the last run ({name_of(record)}), per email")
    table.add_column("statement", no_wrap=True, overflow="ellipsis", max_width=70)
    for heading in ("calls", "rows", "execution µs", "WAL bytes"):
        table.add_column(heading, justify="right")
    for one in record["work"]["top"]:
        calls, rows = f"{one['calls']:.4f}", f"{one['rows']:.2f}"
        table.add_row(Text(one["text"]), calls, rows, f"{one['execution_us']:.1f}", f"{one['wal_bytes']:,.0f}")
    return table


def _remarks(cases: dict[Kind, list[Record]]) -> list[str]:
    remarks = []
    for records in cases.values():
        busy = spread(records, lambda record: record["double_busy"])
        name = name_of(records[0])
        if busy and busy.median >= BUSY_DOUBLE:
            remarks.append(f"{name}: the double used {busy.median:.0%} of a core and may be the bottleneck.")
        elif busy and not records[0]["case"]["rate"]:
            remarks.append(f"{name}: the double used {busy.median:.0%} of one core and is not the bottleneck.")
        if records[0]["books"]["lost"] is None:
            remarks.append(f"{name}: this sink keeps no ledger, so lost and duplicate emails cannot be counted.")
        if records[0]["case"]["has_faults"]:
            remarks.append(f"{name}: worker includes the parent's CPU, which contains that of killed workers.")
    return remarks


def machine_limit(records: Sequence[Record]) -> float:
    """The rate at which this machine's cores are fully used."""
    used = Spread.of(sum(record["cpu_us"].get(part, 0.0) for part in PARTS) for record in records)
    return machine_rate(records[0]["machine"]["cores"], used.median)


def _shown(figure: Spread | None, digits: int = 0) -> str:
    return "–" if figure is None else f"{figure.median:,.{digits}f}"


def _range(figure: Spread) -> str:
    digits = 0 if figure.median >= 100 else 1 if figure.median >= 10 else 3
    return f"{figure.median:,.{digits}f} ({figure.lowest:,.{digits}f} – {figure.highest:,.{digits}f})"
