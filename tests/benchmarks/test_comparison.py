"""The report compares two runs, and shows the tables of one run."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from benchmarks import report
from benchmarks.pages import RESULTS
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
    double_busy: float = 0.3,
    lost: int | None = 0,
) -> dict[str, Any]:
    """The record of a committed result, with these figures."""
    record: dict[str, Any] = {**read_records(RESULTS / "latency")[0], "emails_per_second": rate}
    record["double_busy"] = double_busy
    record["case"] |= {"workers": workers, "rate": arrivals}
    record["books"] |= {"lost": lost, "duplicates": lost}
    record["work"]["top"][0]["text"] = "update [x]"
    return record


def _text(shown: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=200).print(shown)
    return out.getvalue()
