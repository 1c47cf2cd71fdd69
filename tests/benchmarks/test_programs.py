"""The programs of the benchmarks, run with few emails, process every email once and print their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest

from benchmarks.instruction_loads import NOTHING, WARM_UP_EMAILS, WORKER_EMAILS, Part
from benchmarks.rig import database
from dispatcher.dev.servers import Servers

BENCHMARKS: Final = Path(__file__).resolve().parents[2] / "benchmarks"
SECONDS: Final = 240  # on a machine that is busy with other programs, too


@pytest.mark.slow  # a whole run of the benchmark
def test_a_small_run_writes_tables_and_plots_and_loses_and_duplicates_nothing(servers: Servers, tmp_path: Path) -> None:
    done = _run(servers, "--emails", "200", "--out", str(tmp_path))

    (record,) = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert record["books"]["sent"] == 200
    assert (record["books"]["lost"], record["books"]["duplicates"], record["books"]["held"]) == (0, 0, 0)
    assert record["emails_per_second"] > 0
    assert record["latency_ms"]["p50"] <= record["latency_ms"]["p99"]
    assert "capture, 1 worker" in done
    assert (tmp_path / "tables.txt").exists()
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # a whole run of the benchmark
def test_an_open_loop_measures_until_the_last_arrival_is_accepted(servers: Servers) -> None:
    record = json.loads(_run(servers, "--rate", "100", "--duration", "4", "--json"))

    assert (record["books"]["sent"], record["books"]["lost"], record["books"]["duplicates"]) == (400, 0, 0)
    assert record["seconds"] > 2
    assert record["cpu_us"]["worker"] > 50  # without work, the workers would use less
    assert 0 < record["from_commit_ms"]["p50"] <= record["latency_ms"]["p99"]


def _run(servers: Servers, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--provider", "capture", "--workers", "1", "--repeat", "1"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **servers.environment()}
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_counted_statements_handle_all_their_emails(servers: Servers, tmp_path: Path) -> None:
    with database(servers) as url:
        parts = _loaded("statements", url, tmp_path)

        assert {"enqueue 1", "lease 72", "record 108", NOTHING} <= {part.name for part in parts}
        with psycopg.connect(url) as connection:
            found = connection.execute("select count(*) filter (where status = 'sent') from email_log").fetchone()
    assert found is not None
    assert found[0] >= sum(part.emails for part in parts if part.name.startswith("record"))


@pytest.mark.parametrize(("load", "part"), [("sendgrid", "pipeline"), ("smtp", "pipeline, SMTP")])
def test_the_counted_worker_sends_all_its_emails(load: str, part: str, servers: Servers, tmp_path: Path) -> None:
    with database(servers) as url:
        assert _loaded(load, url, tmp_path) == [Part(part, WORKER_EMAILS, 0)]

    attempts = (tmp_path / "load.log").read_text().count('"event":"email.attempted"')
    assert attempts == WARM_UP_EMAILS + WORKER_EMAILS


def _loaded(load: str, url: str, folder: Path) -> list[Part]:
    parts, log = folder / "parts.json", folder / "load.log"
    with log.open("wb") as output:
        words = [sys.executable, "-P", str(BENCHMARKS / "instruction_loads.py"), load, url, str(parts)]
        subprocess.run(words, stdout=output, stderr=output, timeout=SECONDS, check=True)
    return [Part(*each) for each in json.loads(parts.read_text())]
