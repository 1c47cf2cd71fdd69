"""The capacity benchmark, run with few emails, prints its results and loses or duplicates no email."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psycopg
import pytest

from benchmarks.capacity import keeping_snapshot
from benchmarks.run import main
from dispatcher.dev.servers import Servers
from tests.supervisor.program import eventually

CHECKOUT: Final = Path(__file__).resolve().parents[2]
SECONDS: Final = 60


@pytest.mark.slow
def test_a_small_run_writes_tables_and_plots_and_loses_and_duplicates_nothing(servers: Servers, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ["--provider", "capture", "--workers", "1", "--emails", "200", "--repeat", "1", "--out", str(out)]

    done = _run([*arguments], servers.environment())

    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    assert record["books"]["sent"] == 200
    assert (record["books"]["lost"], record["books"]["duplicates"], record["books"]["held"]) == (0, 0, 0)
    assert record["emails_per_second"] > 0
    assert record["latency_ms"]["p50"] <= record["latency_ms"]["p99"]
    assert record["cpu_us"]["worker"] > 0
    assert record["lease_batch"] >= 1
    assert {"cpu", "cores", "kernel", "python", "postgresql", "rabbitmq", "commit"} <= record["machine"].keys()
    assert "capture, 1 worker" in done.stdout
    assert (out / "tables.txt").read_text().startswith(" ")
    for plot in ("throughput", "cpu"):
        assert (out / f"{plot}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (out / f"{plot}.svg").read_bytes()


@pytest.mark.slow
def test_an_open_loop_measures_until_the_last_arrival_is_accepted(servers: Servers, tmp_path: Path) -> None:
    arguments = ["--provider", "capture", "--workers", "1", "--rate", "100", "--duration", "4", "--repeat", "1"]

    done = _run([*arguments, "--json"], servers.environment())

    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["books"]["sent"], record["books"]["lost"], record["books"]["duplicates"]) == (400, 0, 0)
    assert record["seconds"] > 2
    # Without work, the workers would use less CPU.
    assert record["cpu_us"]["worker"] > 50
    assert 0 < record["from_commit_ms"]["p50"] <= record["latency_ms"]["p99"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--provider", "postcard"], "known: sendgrid, ses, resend, smtp, capture"),
        (["--workers", "0"], "whole number of at least 1"),
        (["--rate", "0%"], "must be a number above 0"),
        (["--hold-seconds", "-1"], "whole number of at least 1"),
        (["--sink", "c"], "add --provider smtp"),
        (["--compare", "/nowhere"], "give a folder that an earlier run wrote with --out"),
    ],
)
def test_an_invalid_option_is_reported_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as misused:
        code = misused.code

    assert code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_another_session_keeps_a_snapshot_during_the_measured_part(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        with keeping_snapshot(database_url, seconds=60):
            assert _snapshots(connection) == 1
        assert _snapshots(connection) == 0
        with keeping_snapshot(database_url, seconds=0):
            assert _snapshots(connection) == 0
        with keeping_snapshot(database_url, seconds=0.1):
            eventually(lambda: _snapshots(connection) == 0, "the end of the snapshot")


def _snapshots(connection: psycopg.Connection) -> int:
    query = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and state = 'idle in transaction' and backend_xmin is not null"
    )
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def _run(arguments: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKOUT / "benchmarks" / "run.py"), *arguments]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
