"""The programs of the benchmarks, run with few emails, process every email once and print their results."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import psycopg
import pytest
import uvloop

from benchmarks.doubles import Double, running_double
from benchmarks.floor_parts import ELAPSED, PARTS, Places, Sizes, measure_alone
from benchmarks.instruction_loads import NOTHING, WARM_UP_EMAILS, WORKER_EMAILS, Part
from benchmarks.rig import database, drafts, passing_topology
from dispatcher import enqueue_many
from dispatcher.dev.servers import Servers
from tests.waiting import wait_until

BENCHMARKS: Final = Path(__file__).resolve().parents[2] / "benchmarks"
SECONDS: Final = 60
EMAILS: Final = 300
SIZES: Final = Sizes(prefetch=64, lease_batch=50, record_batch=40, in_flight=8)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("bundle", [1, 16])
def test_every_part_of_the_floor_handles_every_email_and_has_a_cost(
    servers: Servers, tmp_path: Path, bundle: int
) -> None:
    with _places(servers, tmp_path) as (places, double):
        enqueued = _enqueue(places)

        costs = uvloop.run(measure_alone(places, replace(SIZES, bundle=bundle), EMAILS))

        assert tuple(costs) == PARTS
        assert all(used["client"] > 0 and used[ELAPSED] > 0 for used in costs.values())
        assert _recorded(places) == EMAILS
        wait_until(lambda: double.acceptances().keys() == enqueued)


@contextmanager
def _places(servers: Servers, folder: Path) -> Iterator[tuple[Places, Double]]:
    with (
        database(servers) as url,
        passing_topology(servers) as topology,
        running_double("sendgrid", folder) as double,
    ):
        assert double.pid is not None
        host, roots = double.environment["DISPATCHER_SENDGRID_HOST"], {"double": double.pid}
        yield Places(url, servers.amqp_url, topology.exchange, topology.queue, host, double.ca_file, roots), double


def _enqueue(places: Places) -> set[str]:
    with psycopg.connect(places.database_url, autocommit=True) as connection:
        return {str(one.email_id) for one in enqueue_many(connection, drafts(EMAILS, secrets.token_hex(4)))}


def _recorded(places: Places) -> int:
    with psycopg.connect(places.database_url) as connection:
        row = connection.execute(
            "select count(*) from email_log join every_attempt using (email_id) where status = 'sent'"
        ).fetchone()
    assert row is not None
    return int(row[0])


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
