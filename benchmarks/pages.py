"""Writes the measured figures of README.md and docs/performance.md: `python benchmarks/pages.py`.

A page has blocks between the lines `<!-- figures: NAME -->` and `<!-- end of figures -->`. This command replaces each
block with the figures in benchmarks/results/. A test fails if a block differs from the results, or if a current figure
is outside a block.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/pages.py`

from benchmarks.figures import Spread
from benchmarks.floor import cpu_sum, medians, overhead_by_cpu, overhead_by_the_clock, read_turns
from benchmarks.floor_parts import ELAPSED
from benchmarks.peers.measuring import Measured
from benchmarks.peers.report import by_case, ratios, turns
from benchmarks.report import PARTS, cpu_of
from benchmarks.results import Record, by_kind, read_records, spread

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "results"
PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "performance.md")
BLOCK: Final = re.compile(r"(?<=<!-- figures: )([a-z ]+)( -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
FLOORS: Final = {
    "two workers": "floor",
    "one worker": "floor-one-worker",
    "two workers, tuned, with the parts also in bundles": "floor-bundles",
}
PEERS: Final = {
    "Celery, stock": "celery-stock",
    "Celery, tuned": "celery-tuned",
    "dramatiq, stock": "dramatiq-stock",
    "dramatiq, tuned": "dramatiq-tuned",
    "graphile-worker, tuned": "graphile_worker-tuned",
    "django-post_office with a lease, tuned": "post_office-leasing",
    "django-post_office unchanged, without a lease: tuned": "post_office-tuned",
    "the same, stock": "post_office-stock",
    "procrastinate, tuned": "procrastinate-tuned",
    "procrastinate, stock": "procrastinate-stock",
}
"""The rows of the table of peers, and the case of each. A case that was not measured has no row."""
COMMIT: Final = "from_commit_ms"
ARRIVAL: Final = "latency_ms"
WITH_BROKER: Final = ("celery", "dramatiq")
RATES: Final[tuple[tuple[str, str, Mapping[str, object]], ...]] = (
    ("SendGrid, one email per call, one worker", "sendgrid", {"workers": 1}),
    ("two workers", "sendgrid", {"workers": 2}),
    ("SendGrid with bundle 1, window 256: the defaults", "bundles", {"settings": ("1", "256")}),
    ("bundle 1, window 512", "bundles", {"settings": ("1", "512")}),
    ("bundle 16, window 256", "bundles", {"settings": ("16", "256")}),
    ("bundle 16, window 512: tuned", "bundles", {"settings": ("16", "512")}),
    ("SendGrid, templated, bundle 16, window 1,024: one email per call", "coalesced", {"settings": ("16", "1")}),
    ("up to 100 emails per call", "coalesced", {"settings": ("16", "100")}),
    ("SendGrid, templated, at the defaults: one email per call", "coalesced-defaults", {"settings": ("1",)}),
    ("up to 100 emails per call", "coalesced-defaults", {"settings": ("100",)}),
    ("SES, templated: one email per call", "coalesced-ses", {"settings": ("1",)}),
    ("up to 50 emails per call", "coalesced-ses", {"settings": ("50",)}),
    ("Postfix's SMTP sink in C, which has no ledger, one worker", "smtp", {"workers": 1}),
    ("two workers", "smtp", {"workers": 2}),
    ("SendGrid with 50 ms latency, window 32, always full, one worker", "slow-provider", {"workers": 1}),
    ("two workers", "slow-provider", {"workers": 2}),
    ("SendGrid, empty tables", "million", {"preload": 0}),
    ("a million emails in the tables", "million", {"preload": 1_000_000}),
)
"""The rows of the table of rates: the text, the folder, and what the case has. Two workers, if the text does not say
otherwise. A row is compared with the row before if both have the same folder."""


def written(text: str, results: Path = RESULTS) -> str:
    """A page with the figures of the results.

    Raises:
        ValueError: A block has an unknown name, or the results do not have its figures; the text is for the user.
    """

    def figures(found: re.Match[str]) -> str:
        name = found[1]
        if name not in BLOCKS:
            raise ValueError(f"no figures have the name {name!r}; known: {', '.join(BLOCKS)}")
        return f"{name}{found[2]}{BLOCKS[name](results)}\n"

    return BLOCK.sub(figures, text)


def main() -> int:
    """The command line; returns the exit code."""
    for page in PAGES:
        page.write_text(written(page.read_text()))
    return 0


def case_of(results: Path, folder: str, **wanted: object) -> list[Record]:
    """The repetitions of the only case in a folder that has these values. `settings` are the values of its settings.

    Raises:
        ValueError: There is not exactly one such case.
    """

    def has(case: Mapping[str, Any]) -> bool:
        values = {**case, "settings": tuple(value for _, value in case["settings"])}
        return all(values[name] == value for name, value in wanted.items())

    cases = [records for records in by_kind(read_records(results / folder)).values() if has(records[0]["case"])]
    if len(cases) != 1:
        raise ValueError(f"{results / folder} has {len(cases)} cases with {wanted}, not one: measure the folder again")
    return cases[0]


def _rate(record: Record) -> float:
    return float(record["emails_per_second"])


def _cpu(records: Sequence[Record], *parts: str) -> str:
    found = spread(records, cpu_of(*(parts or PARTS)))
    assert found is not None
    return f"{found.median:,.0f}"


def _median(records: Sequence[Record], figure: Callable[[Record], float | None], digits: int = 0) -> str:
    found = spread(records, figure)
    return "–" if found is None else f"{found.median:,.{digits}f}"


def _with_range(figures: Spread, digits: int = 0) -> str:
    return f"{figures.median:,.{digits}f} ({figures.lowest:,.{digits}f} – {figures.highest:,.{digits}f})"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))


def commits(results: Path) -> str:
    """The commit of each folder's figures, and the lost, duplicate and held emails of all runs."""
    folders: dict[str, list[str]] = {}
    for file in sorted(results.glob("*/*.jsonl")):
        facts = json.loads(file.read_text().splitlines()[0])["machine"]
        folders.setdefault(facts["commit"], []).append(f"`{file.parent.name}`")
    lines = [f"| {commit} | {', '.join(names)} |" for commit, names in folders.items()]
    table = "\n".join(("| measured at commit | folders |", "|---|---|", *lines))
    records = [record["books"] for file in results.glob("*/run.jsonl") for record in read_records(file.parent)]
    books = [each for each in records if each["lost"] is not None]  # the sink in C has no ledger
    found = [sum(each[book] for each in books) for book in ("sent", "lost", "duplicates", "held")]
    words = "`benchmarks/run.py` sent {:,} emails to doubles with a ledger: {} were lost, {} sent twice and {} held."
    return f"{table}\n\n{words.format(*found)}"


def rates(results: Path) -> str:
    """Emails per second and CPU of each case."""
    rows, before = [], None
    for text, folder, wanted in RATES:
        records = case_of(results, folder, **wanted)
        rate = Spread.of(map(_rate, records))
        times = f"{rate.median / before[1]:.2f}" if before and before[0] == folder else ""
        rows.append([text, _with_range(rate), times, _cpu(records), "" if times else f"`{folder}`"])
        before = folder, rate.median
    return _table(["a backlog of emails to", "emails/s", "times the row before", "CPU, µs", "folder"], rows)


def cpu(results: Path) -> str:
    """CPU by process, and the work per email, at the defaults and tuned."""
    defaults, tuned = (case_of(results, "bundles", settings=each) for each in (("1", "256"), ("16", "512")))
    shown = [part for part in PARTS if part != "parent"]
    names = {"postgresql": "PostgreSQL", "rabbitmq": "RabbitMQ"}
    rows = [
        [text, *(_cpu(records, part) for part in shown), _cpu(records)]
        for text, records in (("at the defaults (`bundles`)", defaults), ("tuned (`bundles`)", tuned))
    ]
    table = _table(["", *(names.get(part, part) for part in shown), "sum"], rows)
    work = [
        _median(defaults, lambda record: record["work"]["statements"], 3),
        _median(defaults, lambda record: record["work"]["wal_bytes"] / 1000, 1),
        _median(defaults, lambda record: record["lease_batch"]),
        _median(defaults, lambda record: record["record_batch"]),
        _median(defaults, lambda record: record["pss_mb"]),
        _median(tuned, lambda record: record["pss_mb"]),
    ]
    words = (
        "At the defaults, an email takes {} SQL statements and {} kB of WAL. A lease statement has {} emails,\n"
        "and a record statement {}. A worker needs {} MB of memory (PSS) at the defaults, and {} MB tuned."
    )
    return f"{table}\n\n{words.format(*work)}"


def latency(results: Path) -> str:
    """Latencies in an open loop."""
    (records,) = (each for each in by_kind(read_records(results / "latency")).values() if each[0]["case"]["rate"])
    cells = [f"{_percentile(records, clock, 50)} / {_percentile(records, clock, 99)} ms" for clock in (COMMIT, ARRIVAL)]
    headings = ("from the commit of the enqueue: p50 / p99", "from the scheduled arrival: p50 / p99")
    return _table(["emails per second", *headings, "folder"], [[_median(records, _rate), *cells, "`latency`"]])


def _percentile(records: Sequence[Record], clock: str, share: int) -> str:
    return _median(records, lambda record: record[clock].get(f"p{share}"), 1)


def _peer_results(results: Path) -> list[Measured]:
    lines = [json.loads(line) for line in (results / "peers" / "peers.jsonl").read_text().splitlines()]
    return [Measured(**{name: value for name, value in each.items() if name != "machine"}) for each in lines]


def _times(results: Path, name: str) -> dict[str, tuple[str, str]]:
    """How many times as fast each of our comparable cases is: the ratio of the medians, and its range."""
    cases = by_case(_peer_results(results))
    (theirs,) = (found for (case, _), found in cases.items() if case == name)
    ranges = turns(cases, theirs)
    return {
        ours: (f"{times:.1f}", f" ({ranges[ours][0]:.1f} – {ranges[ours][1]:.1f})" if ours in ranges else "")
        for ours, times in ratios(cases, theirs).items()
    }


def _times_of_defaults(results: Path, name: str, ours: str) -> str:
    rates = {
        each: [one.emails_per_second for one in _peer_results(results) if one.name == each] for each in (name, ours)
    }
    return f"{Spread.of(rates[ours]).median / Spread.of(rates[name]).median:.1f}"


def peers(results: Path) -> str:
    """How many times as fast as each peer our dispatcher is."""
    rows = []
    measured = {each.name for each in _peer_results(results)}
    for text, name in PEERS.items():
        if name not in measured:
            continue
        rate = Spread.of(each.emails_per_second for each in _peer_results(results) if each.name == name)
        has_broker, is_stock = name.startswith(WITH_BROKER), name.endswith("-stock")
        cells = {
            ours.endswith("published"): f"**{median}**{ends}" for ours, (median, ends) in _times(results, name).items()
        }
        by_default = [_times_of_defaults(results, name, ours) for ours in ("ours-published", "ours")]
        published, meanwhile = (
            cells[True] if has_broker else "",
            cells[False].replace("**", "" if has_broker else "**"),
        )
        defaults = ["", ""] if is_stock else [by_default[0] if has_broker else "", by_default[1]]
        rows.append([text, _with_range(rate), published, meanwhile, *defaults])
    ours_names = ("ours", "ours-tuned", "ours-published", "ours-tuned-published")
    found = {
        name: [each.emails_per_second for each in _peer_results(results) if each.name == name] for name in ours_names
    }
    words = (
        "With messages published meanwhile, our dispatcher sent {} emails per second at its defaults and {} tuned.\n"
        "With messages published before, it sent {} and {}."
    )
    against = "tuned peer against our defaults"
    headings = ["peer", "its emails/s", "published", "meanwhile", f"published, {against}", f"meanwhile, {against}"]
    return f"{_table(headings, rows)}\n\n{words.format(*(f'{Spread.of(each).median:,.0f}' for each in found.values()))}"


def floor(results: Path) -> str:
    """The chain above its floor, by the clock and by CPU."""
    rows = []
    for text, folder in FLOORS.items():
        turns = read_turns(results / folder)
        chain, below, together = (
            medians(each)
            for each in (
                [turn.chain_us for turn in turns],
                [turn.floor_us for turn in turns],
                [turn.together for turn in turns],
            )
        )
        cells = []
        for cost, over in ((lambda used: used[ELAPSED], overhead_by_the_clock), (cpu_sum, overhead_by_cpu)):
            ends = Spread.of(over(turn.chain_us, turn.floor_us) for turn in turns)
            cells.append(f"{cost(below):,.0f} → {cost(chain):,.0f}")
            cells.append(f"{over(chain, below):+.0%} ({ends.lowest:+.0%} to {ends.highest:+.0%})")
        extra = f"{overhead_by_the_clock(chain, together):+.0%}, {overhead_by_cpu(chain, together):+.0%}"
        rows.append([text, *cells, extra, f"`{folder}`"])
    headings = [
        *("chain", "by the clock, µs: floor → chain", "chain above the floor", "by CPU, µs: floor → chain"),
        *("chain above the floor", "chain above all together: clock, CPU", "folder"),
    ]
    return _table(headings, rows)


def readme(results: Path) -> str:
    """The three figures of the README."""
    defaults = case_of(results, "bundles", settings=("1", "256"))
    (loop,) = (each for each in by_kind(read_records(results / "latency")).values() if each[0]["case"]["rate"])
    tuned = [_times(results, f"{peer}-tuned")["ours-tuned-published"][0] for peer in WITH_BROKER]
    default = [_times_of_defaults(results, f"{peer}-tuned", "ours-published") for peer in WITH_BROKER]
    latencies = [_percentile(loop, COMMIT, share) for share in (50, 99)]
    rate = f"**{_median(defaults, _rate)} emails per second** over HTTPS at the default settings"
    wait = "from the commit of the enqueue until the provider accepts the email"
    peer = "as many emails per second as tuned Celery or tuned dramatiq, if the dispatcher is tuned, too"
    rows = [
        [rate, f"{_cpu(defaults)} µs of CPU per email, all processes together"],
        [
            f"**{latencies[0]} ms** {wait} (median; 99th percentile: {latencies[1]} ms)",
            f"while {_median(loop, _rate)} emails per second are enqueued on the same two cores",
        ],
        [
            f"**{min(tuned, key=float)} times** {peer}",
            f"{min(default, key=float)} times as many, if the dispatcher has its default settings",
        ],
    ]
    return _table(["", ""], rows)


def instructions(results: Path) -> str:
    """The baseline of `instructions.py`, in thousands."""
    builds = json.loads((results / "instructions" / "baseline.json").read_text())
    sections = []
    for build, baseline in builds.items():
        rows = [
            [part, *(f"{counts[name] / 1000:,.1f}" if name in counts else "" for name in ("client", "PostgreSQL"))]
            for part, counts in baseline["figures"].items()
        ]
        sections.append(f"{build}:\n\n{_table(['part', 'client', 'PostgreSQL'], rows)}")
    return "\n\n".join(sections)


def idle(results: Path) -> str:
    """What an idle host and a trickle cost."""
    file = results / "idle" / "idle.jsonl"
    if not file.exists():
        return "These figures were not taken for this page."
    costs = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = list(dict.fromkeys(kind for cost in costs for kind in cost["cpu_ms"]))
    rows = [
        [
            "no dispatcher" if cost["rate"] is None else f"{cost['rate']:g}",
            *(f"{cost['cpu_ms'].get(kind, 0.0):.1f}" for kind in kinds),
            f"{sum(cost['cpu_ms'].values()):.1f}",
            f"{cost['statements']:.1f}",
        ]
        for cost in costs
    ]
    return _table(["emails per second", *kinds, "sum", "statements per second"], rows)


def printed(results: Path) -> str:
    """What the commands printed that write no raw figures."""
    files = sorted(results.glob("*/printed.txt"))
    texts = [f"```\n{file.read_text().strip()}\n```" for file in files]
    return "\n\n".join(texts) or "None of these commands has run for this page."


BLOCKS: Final[Mapping[str, Callable[[Path], str]]] = {
    "commits": commits,
    "rates": rates,
    "cpu": cpu,
    "latency": latency,
    "peers": peers,
    "floor": floor,
    "readme": readme,
    "instructions": instructions,
    "idle": idle,
    "printed": printed,
}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
