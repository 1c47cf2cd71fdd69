"""The results of a soak: the tolerance of each series, the table, the summary and the plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.trends import Tolerance, Trend, Verdict, trend
from benchmarks.vitals import TABLES

Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class SoakBooks:
    """The numbers of emails, from our tables and from the provider's ledger.

    Attributes:
        lost: Enqueued emails that are not in our tables, and emails that our tables have as sent but the provider's
            ledger does not have.
        duplicates: Acceptances of emails that were already accepted, from the provider's ledger.
        unfinished: Pending or sending at the end.
    """

    enqueued: int
    sent: int
    failed: int
    held: int
    unfinished: int
    lost: int
    duplicates: int

    @property
    def balance(self) -> bool:
        """Whether every email was sent exactly once."""
        return not (self.lost or self.duplicates or self.held or self.failed or self.unfinished)


_MEBI: Final = 1024 * 1024
_BY_ENDING: Final = {
    # These limits detect a worker that leaks ten bytes per email at 40 emails/s. A smaller leak takes at least two
    # months to reach a gigabyte.
    "private_bytes": Tolerance(0.5 * _MEBI, 0.01),
    "rss_bytes": Tolerance(0.5 * _MEBI, 0.01),
    "descriptors": Tolerance(1.0),
    "threads": Tolerance(1.0),
    # Latencies do not grow with the working set: the value after some minutes should still be the same an hour later.
    "p50_ms": Tolerance(1.0, 0.1, settles=0.1),
    "cpu_ms": Tolerance(0.2, 0.05, settles=0.1),
    "commit_ms": Tolerance(0.1, 0.05, settles=0.1),
    "p99_ms": Tolerance(5.0, 0.2, settles=0.1),
    "bytes_per_email": Tolerance(1.0, 0.03),
    "total_bytes": Tolerance(0.25 * _MEBI, 0.1),
    "wal_bytes_each": Tolerance(200.0, 0.1),
    "hot_ratio": Tolerance(0.02),
    "messages": Tolerance(10.0),
    "pending": Tolerance(10.0),
}
_GOOD_TO_GROW: Final = ("hot_ratio",)
_YARDSTICKS: Final = "yardstick."
"""The prefix of the series that measure the machine itself. These series are never a failure. They show how much of a
change in latency the machine may have caused."""
_PANELS: Final = (
    ("Memory of a process (PSS, MB)", "pss_bytes", 1 / _MEBI),
    ("File descriptors", "descriptors", 1.0),
    ("From enqueue to accepted (ms)", "_ms", 1.0),
    ("Bytes on the disk per email", "_bytes_per_email", 1.0),
    ("Content, pruned as it is sent (MB)", "total_bytes", 1 / _MEBI),
    ("Dead rows, share of a table", "dead_share", 1.0),
    ("Messages on the queues", "messages", 1.0),
    ("Write-ahead log per email (bytes)", "wal_bytes_each", 1.0),
)


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """The trends of all series that should stay constant."""
    series = _series(samples)
    judged = []
    for name, points in series.items():
        if tolerance := next((each for ending, each in _BY_ENDING.items() if name.endswith(ending)), None):
            judged.append(trend(name, [at for at, _ in points], [value for _, value in points], tolerance))
    return judged


def growing(found: Iterable[Trend]) -> list[Trend]:
    """The trends that got worse."""
    return [each for each in found if _is_bad(each)]


def table(found: Sequence[Trend]) -> Table:
    """All verdicts."""
    shown = Table(title="A robust line through the second half of each series; for latency, all but the first tenth")
    for heading in ("series", "median", "per hour", "95 % interval", "tolerance", "verdict"):
        shown.add_column(heading, justify="left" if heading in ("series", "verdict") else "right")
    for each in found:
        style = "red" if _is_bad(each) else "green" if each.verdict is Verdict.FLAT else ""
        shown.add_row(
            each.name,
            _figure(each.median),
            _signed(each.per_hour),
            f"{_signed(each.lowest)} … {_signed(each.highest)}",
            f"± {_figure(each.tolerance)}",
            each.verdict.value,
            style=style,
        )
    return shown


def summary(samples: Sequence[Sample], books: SoakBooks) -> str:
    """A summary of the emails and of the tables' updates and vacuums."""
    if not samples:
        return "Nothing was sampled."
    last = samples[-1]
    updates = last.get("email_log.updates", 0.0)
    hot = last.get("email_log.hot_updates", 0.0) / updates if updates else 0.0
    vacuums = ", ".join(f"{name} {last.get(f'{name}.autovacuums', 0):.0f}" for name in TABLES)
    return (
        f"{books.enqueued:,} enqueued, {books.sent:,} sent, {books.failed} failed; "
        f"lost {books.lost}, duplicates {books.duplicates}, held {books.held}, unfinished {books.unfinished}\n"
        f"HOT updates of email_log: {hot:.1%}; autovacuums: {vacuums}"
    )


def progress(sample: Sample) -> str:
    """One sample as a line of text."""
    worker = max(
        (value for name, value in sample.items() if name.endswith("pss_bytes") and "worker" in name), default=0
    )
    return (
        f"{sample['at'] / 60:5.1f} min: {sample['enqueued']:,.0f} enqueued, {sample['emails.pending']:.0f} pending, "
        f"p50 {sample.get('latency.p50_ms', 0):.1f} ms, p99 {sample.get('latency.p99_ms', 0):.1f} ms, "
        f"worker {worker / _MEBI:.1f} MB, load {sample['load']:.1f}"
    )


def plot(samples: Sequence[Sample], facts: dict[str, Any], path: Path, console: Console) -> None:
    """Write the plot if matplotlib is installed."""
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    except ImportError:
        console.log("no plot: matplotlib is not installed (pip install 'email-dispatcher[bench]')")
        return
    figure, places = pyplot.subplots(4, 2, figsize=(14, 16), sharex=True)
    series = _series(samples)
    for place, (title, ending, factor) in zip(places.flat, _PANELS, strict=True):
        place.set_title(title)
        for name, points in series.items():
            if name.endswith(ending) and not name.startswith("lateness"):
                place.plot([at / 60 for at, _ in points], [value * factor for _, value in points], label=name, lw=0.9)
        place.set_ylim(bottom=0)
        place.legend(fontsize=6)
        place.grid(alpha=0.3)
    for place in places[-1]:
        place.set_xlabel("minutes")
    what = f"{facts['rate']:g} emails/s, {facts['workers']} workers, {facts['provider']}"
    figure.suptitle(f"Soak: {what}, commit {facts['commit']}, {facts['cores']} cores, Python {facts['python']}")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _series(samples: Sequence[Sample]) -> dict[str, list[tuple[float, float]]]:
    """Every series by name, including derived ones: shares, ratios, and bytes per email."""
    series: dict[str, list[tuple[float, float]]] = {}
    before: Sample = {}
    for sample in samples:
        derived = {**sample, **_per_email(sample), **_shares(sample, before)}
        for name, value in derived.items():
            series.setdefault(name, []).append((sample["at"], value))
        before = sample
    return series


def _per_email(sample: Sample) -> Sample:
    figures = {}
    for name in ("email_log", "email_attempt", "email_idempotency"):
        if emails := sample["enqueued"]:
            for kind in ("table", "index"):
                figures[f"{name}.{kind}_bytes_per_email"] = sample[f"{name}.{kind}_bytes"] / emails
    # Tables that are pruned continuously, or have one row per hour, should keep their size.
    for name in ("email_content", "email_hourly"):
        figures[f"{name}.total_bytes"] = sample[f"{name}.table_bytes"] + sample[f"{name}.index_bytes"]
    return figures


def _shares(sample: Sample, before: Sample) -> Sample:
    figures = {}
    for name in TABLES:
        if rows := sample[f"{name}.live_rows"] + sample[f"{name}.dead_rows"]:
            figures[f"{name}.dead_share"] = sample[f"{name}.dead_rows"] / rows
    if before:
        if updates := sample["email_log.updates"] - before["email_log.updates"]:
            figures["email_log.hot_ratio"] = (
                sample["email_log.hot_updates"] - before["email_log.hot_updates"]
            ) / updates
        if emails := sample["enqueued"] - before["enqueued"]:
            figures["wal_bytes_each"] = (sample["wal_bytes"] - before["wal_bytes"]) / emails
    return figures


def _is_bad(found: Trend) -> bool:
    if found.name.startswith(_YARDSTICKS):
        return False
    return found.verdict is (Verdict.FALLS if found.name.endswith(_GOOD_TO_GROW) else Verdict.GROWS)


def _figure(value: float) -> str:
    for size, unit in ((_MEBI, "M"), (1024, "k")):
        if abs(value) >= 10 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.2f}"


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + _figure(value)
