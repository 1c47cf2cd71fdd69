"""Self-contained plots of a run, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.figures import Spread, ideal_rate
from benchmarks.machine import described
from benchmarks.report import PARTS, machine_limit, rates_by_workers
from benchmarks.results import Kind, Record, by_kind, name_of, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#1f77b4", "#2ca02c", "#17becf", "#7f7f7f", "#ff7f0e", "#d62728", "#bcbd22")
DOTS_PER_INCH: Final = 150


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every plot for which there are figures; return the files."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen is needed
    mpl.rcParams["svg.hashsalt"] = "dispatcher"  # the same figures, the same file
    cases = by_kind(records)
    backlogs = {kind: of for kind, of in cases.items() if not dict(kind)["rate"]}
    loops = {kind: of for kind, of in cases.items() if dict(kind)["rate"]}
    facts = described(records[0]["machine"])
    files = []
    if backlogs:
        files += _saved(_throughput(backlogs), folder / "throughput", facts)
        files += _saved(_cpu(backlogs), folder / "cpu", facts)
    if loops:
        files += _saved(_latency(loops), folder / "latency", facts)
    return files


def _throughput(cases: dict[Kind, list[Record]]) -> Figure:
    figure, axes = _figure()
    series: dict[str, list[Kind]] = {}
    for kind in cases:
        series.setdefault(name_of({"case": {**dict(kind), "workers": 1}}).replace(", 1 worker", ""), []).append(kind)
    for number, (name, kinds) in enumerate(series.items()):
        kinds.sort(key=lambda kind: dict(kind)["workers"])
        _rate_line(axes, name, kinds, cases, COLOURS[number % len(COLOURS)])
    counts = sorted({dict(kind)["workers"] for kind in cases})
    axes.set_xticks(counts)
    axes.set_xlim(0, max(counts) * 1.1)
    axes.set_ylim(0)
    axes.set_xlabel("workers")
    axes.set_ylabel("emails per second")
    axes.set_title("Emails sent per second as workers grow\nmedian; bars: lowest and highest of the repetitions")
    axes.legend(fontsize=8)
    return figure


def _rate_line(axes: Axes, name: str, kinds: list[Kind], cases: dict[Kind, list[Record]], colour: str) -> None:
    workers = [dict(kind)["workers"] for kind in kinds]
    rates = [Spread.of(record["emails_per_second"] for record in cases[kind]) for kind in kinds]
    medians = [rate.median for rate in rates]
    bars = [[rate.median - rate.lowest for rate in rates], [rate.highest - rate.median for rate in rates]]
    axes.errorbar(workers, medians, yerr=bars, marker="o", capsize=4, color=colour, label=name)
    for count, median in zip(workers, medians, strict=True):
        axes.annotate(f"{median:,.0f}", (count, median), textcoords="offset points", xytext=(6, 6), fontsize=8)
    by_workers = rates_by_workers(kinds[0], cases)
    ideal = [ideal_rate(by_workers, count) for count in (0, *workers)]
    axes.plot(
        (0, *workers),
        ideal,
        linestyle="--",
        color=colour,
        alpha=0.5,
        label=f"{name}: ideal, each worker as fast as at first",
    )
    limit = machine_limit(cases[kinds[-1]])
    cores = cases[kinds[-1]][0]["machine"]["cores"]
    label = f"{name}: limit of {cores} cores that servers and double share"
    axes.axhline(limit, linestyle=":", color=colour, alpha=0.7, label=label)


def _cpu(cases: dict[Kind, list[Record]]) -> Figure:
    figure, axes = _figure(height=2.0 + 0.6 * len(cases))
    names = [name_of(records[0]) for records in cases.values()]
    left = [0.0] * len(names)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [
            found.median if (found := spread(records, lambda record: record["cpu_us"].get(part))) else 0.0  # noqa: B023
            for records in cases.values()
        ]
        axes.barh(names, widths, left=left, color=colour, label=part)
        for row, width in enumerate(widths):
            if width > 0.04 * max(left[row] + width, 1):
                axes.text(
                    left[row] + width / 2, row, f"{width:.0f}", ha="center", va="center", fontsize=7, color="white"
                )
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("CPU microseconds per email (user and system)")
    axes.set_title("What one email costs, by who works on it (medians)", pad=28)
    axes.legend(fontsize=8, ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _latency(cases: dict[Kind, list[Record]]) -> Figure:
    figure, axes = _figure()
    names = ("p50", "p95", "p99")
    for number, records in enumerate(cases.values()):
        found = [spread(records, lambda record: record["latency_ms"].get(name)) for name in names]  # noqa: B023
        spreads = [each for each in found if each is not None]
        medians = [each.median for each in spreads]
        bars = [[each.median - each.lowest for each in spreads], [each.highest - each.median for each in spreads]]
        places = [place + number * 0.8 / len(cases) for place in range(len(spreads))]
        label = f"{name_of(records[0])}, {records[0]['case']['rate']:,.0f} arrivals/s"
        axes.bar(places, medians, 0.75 / len(cases), yerr=bars, capsize=3, color=COLOURS[number % 7], label=label)
        for place, median in zip(places, medians, strict=True):
            axes.annotate(f"{median:.1f}", (place, median), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("milliseconds")
    axes.set_title(
        "From an email's due arrival to the provider's yes, arrivals by a schedule (open loop)\n"
        "median of the repetitions; bars: lowest and highest"
    )
    axes.legend(fontsize=8)
    return figure


def _figure(height: float = 5.0) -> tuple[Figure, Axes]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, height))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def _saved(figure: Figure, path: Path, facts: str) -> list[Path]:
    from matplotlib import pyplot

    figure.text(0.01, 0.005, facts, fontsize=6, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    figure.savefig(files[0], dpi=DOTS_PER_INCH)
    figure.savefig(files[1], metadata={"Date": None})
    pyplot.close(figure)
    return files
