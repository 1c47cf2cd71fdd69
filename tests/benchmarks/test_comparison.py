"""The report compares two runs, and shows the tables of one run."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from benchmarks import report
from benchmarks.results import by_kind, kind_of, lines_of, read_records


def test_runs_are_compared_by_case_with_ratio_and_ranges() -> None:
    before = [_record(workers=2, rate=rate) for rate in (950, 1000, 1050)]
    after = [_record(workers=2, rate=rate) for rate in (1450, 1500, 1550)]

    text = _text(report.comparison(before, after))

    assert "1,000 (950 \u2013 1,050)" in text
    assert "1,500 (1,450 \u2013 1,550)" in text
    assert "1.50" in text
    assert "separate" in text


@pytest.mark.parametrize(
    ("before", "after", "verdict"), [((900, 1000), (990, 1100), "overlap"), ((900,), (1000,), "unknown")]
)
def test_whether_the_ranges_overlap_is_reported_and_unknown_for_one_repetition(
    before: tuple[int, ...], after: tuple[int, ...], verdict: str
) -> None:
    text = _text(report.comparison([_record(rate=each) for each in before], [_record(rate=each) for each in after]))

    assert verdict in next(line for line in text.splitlines() if "emails/s" in line)
    assert "p50" not in text


def test_latency_is_compared_in_open_loops() -> None:
    assert "p50 ms" in _text(report.comparison([_record(arrivals=300.0)], [_record(arrivals=310.0)]))


def test_a_case_in_only_one_run_is_listed_and_not_compared() -> None:
    text = _text(report.comparison([_record(workers=1)], [_record(workers=1), _record(workers=4)]))

    assert "only in one run: sendgrid, 4 workers" in text


def test_open_loops_of_different_rates_are_one_case_and_a_backlog_is_another() -> None:
    loops = [_record(arrivals=300.0), _record(arrivals=310.0)]

    assert kind_of(loops[0]) == kind_of(loops[1])
    assert kind_of(loops[0]) != kind_of(_record())
    assert [len(records) for records in by_kind([*loops, _record()]).values()] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"double_busy": 0.95}], ["may be the bottleneck"]),
        ([{"double_busy": 0.4}], ["is not the bottleneck"]),
        ([{"lost": None}], ["unknown", "cannot be counted"]),
        ([{}], ["update [x]"]),
        ([{"workers": 1, "rate": 1000}, {"workers": 2, "rate": 1800}], ["90%"]),
    ],
    ids=["bottleneck", "no bottleneck", "no ledger", "the dearest statement verbatim", "share of the ideal rate"],
)
def test_the_tables_of_a_run_say_what_limits_its_figures(changes: list[dict[str, Any]], words: list[str]) -> None:
    text = _text(report.tables([_record(**each) for each in changes]))

    assert [each for each in words if each not in text] == []


def test_written_results_are_read_back_unchanged(tmp_path: Path) -> None:
    records = [_record(), _record(workers=4)]
    (tmp_path / "run.jsonl").write_text(lines_of(records))

    assert read_records(tmp_path) == records


def test_a_folder_without_results_gives_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give a folder that an earlier run wrote with --out"):
        read_records(tmp_path)
    (tmp_path / "run.jsonl").write_text("no JSON")
    with pytest.raises(ValueError, match="does not contain results"):
        read_records(tmp_path)


def _record(
    *,
    workers: int = 1,
    rate: float = 1000.0,
    arrivals: float | None = None,
    double_busy: float | None = 0.3,
    lost: int | None = 0,
) -> dict[str, Any]:
    case = {
        "provider": "sendgrid",
        "workers": workers,
        "emails": 100,
        "prefetch": None,
        "latency_ms": 0.0,
        "rate": arrivals,
        "has_faults": False,
        "preload": 0,
        "sink": "python",
        "is_templated": False,
        "settings": [],
    }
    statement = {"text": "update [x]", "calls": 0.01, "rows": 1.0, "execution_us": 30.0, "wal_bytes": 500.0}
    return {
        "case": case,
        "emails_per_second": rate,
        "seconds": 1.0,
        "latency_ms": {"p50": 5.0, "p95": 8.0, "p99": 9.0},
        "from_commit_ms": {"p50": 4.0, "p95": 7.0, "p99": 8.0},
        "cpu_us": {"worker": 200.0, "relay": 50.0, "postgresql": 100.0, "machine": 500.0},
        "pss_mb": 40.0,
        "lease_batch": 100.0,
        "record_batch": 100.0,
        "in_flight_share": 0.95,
        "work": {"wal_bytes": 900.0, "statements": 0.1, "execution_us": 50.0, "top": [statement]},
        "double_busy": double_busy,
        "kills": 0,
        "books": {"sent": 100, "failed": 0, "held": 0, "lost": lost, "duplicates": lost, "last_sent_at": 1.0},
        "machine": {"commit": "abc", "cpu": "a CPU", "cores": 2, "memory_gib": 4.0, "kernel": "6.1", "python": "3.11"},
    }


def _text(shown: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()
