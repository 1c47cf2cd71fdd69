"""The gauge's loads do their work without callgrind, and its command line explains what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest

from benchmarks.instruction_loads import NOTHING, WARM_UP_EMAILS, WORKER_EMAILS, Part
from benchmarks.instructions import BACKEND, CLIENT, PER_WORKER, main, per_email, sum_of
from benchmarks.rig import database
from dispatcher.dev.servers import Servers

LOADS: Final = Path(__file__).resolve().parents[2] / "benchmarks" / "instruction_loads.py"
SECONDS: Final = 60


def test_every_part_of_the_statements_handles_all_its_emails(servers: Servers, tmp_path: Path) -> None:
    with database(servers) as url:
        parts = _run("statements", url, tmp_path)

        names = {part.name for part in parts}
        assert {"enqueue 1", "enqueue 500", "lease 6", "record 6", "lease 72", "record 108", NOTHING} <= names
        with psycopg.connect(url) as connection:
            found = connection.execute("select count(*) filter (where status = 'sent') from email_log").fetchone()
        assert found is not None
        assert found[0] >= sum(part.emails for part in parts if part.name.startswith("record"))


@pytest.mark.parametrize(("load", "part"), [("sendgrid", "pipeline"), ("smtp", "pipeline, SMTP")])
def test_the_worker_sends_all_its_emails(load: str, part: str, servers: Servers, tmp_path: Path) -> None:
    with database(servers) as url:
        assert _run(load, url, tmp_path) == [Part(part, WORKER_EMAILS, 0)]

    attempts = (tmp_path / "load.log").read_text().count('"event":"email.attempted"')
    assert attempts == WARM_UP_EMAILS + WORKER_EMAILS


def test_the_count_of_a_part_leaves_out_its_marks_and_what_came_before(tmp_path: Path) -> None:
    for number, count in enumerate((9_000_000, 500_000, 7_000_000, 100_000), start=1):
        (tmp_path / f"backend.77.{number}").write_text(f"version: 1\nsummary: {count}\ntotals: {count}\n")

    counted = per_email([Part("lease 6", 10, 77), Part(NOTHING, 1, 77)], tmp_path / "backend")

    assert counted == {"lease 6": 40_000.0}


def test_the_sum_contains_the_parts_of_an_email_in_a_backlog() -> None:
    figures = {part: {CLIENT: 10.0, BACKEND: 1.0} for part in (*PER_WORKER, "lease 6")}

    assert sum_of(figures) == {CLIENT: 30.0, BACKEND: 3.0}


def test_a_checkout_that_is_not_set_up_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tree", str(tmp_path)]) == 2
    assert "./run setup" in capsys.readouterr().err


def test_without_valgrind_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main([]) == 2
    assert "apt-get install valgrind" in capsys.readouterr().err


def _run(load: str, url: str, folder: Path) -> list[Part]:
    parts, log = folder / "parts.json", folder / "load.log"
    with log.open("wb") as output:
        words = [sys.executable, "-P", str(LOADS), load, url, str(parts)]
        subprocess.run(words, stdout=output, stderr=output, timeout=SECONDS, check=True)
    return [Part(*each) for each in json.loads(parts.read_text())]
