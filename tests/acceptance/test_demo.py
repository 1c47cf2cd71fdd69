"""`dispatcher demo` on the servers of the test run: output, exit, and removal of everything that it created."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson
import psycopg
import pytest

from dispatcher.dev.demo_folder import locked_folder
from dispatcher.dev.servers import Servers
from dispatcher.errors import DispatcherError
from tests.waiting import wait_until

EMAILS: Final = 120
DEADLINE_SECONDS: Final = 90.0


@pytest.fixture
def environment(servers: Servers) -> Mapping[str, str]:
    """An environment with the servers' URLs, so that the demo starts no servers. The environment also has one host
    setting, which the demo must ignore."""
    named = {"DISPATCHER_QUEUE": "somebody.elses", "DISPATCHER_DATABASE_SCHEMA": "somebody_elses"}
    ours = {**servers.environment(), **named, "DISPATCHER_PROVIDERS": "capture"}
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")}
    return {**foreign, **ours}


def demo(folder: Path, *arguments: str) -> list[str]:
    words = ["demo", "--folder", str(folder), "--emails", str(EMAILS), "--json", *arguments]
    return [sys.executable, "-m", "dispatcher.cli.main", *words]


def processes_of(folder: Path) -> dict[int, str]:
    """Processes whose working directory is the folder, or whose command line contains its path. A worker has a title
    instead of a command line."""
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                words = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                if str(folder) in words or (process / "cwd").readlink().is_relative_to(folder):
                    found[int(process.name)] = words
    return found


def databases(servers: Servers) -> set[str]:
    with psycopg.connect(servers.database_url) as connection:
        return {name for (name,) in connection.execute("select datname from pg_database")}


def test_books_balance_and_nothing_is_left(tmp_path: Path, servers: Servers, environment: Mapping[str, str]) -> None:
    folder = tmp_path / "demo"

    done = subprocess.run(
        demo(folder), env=environment, capture_output=True, check=False, cwd=tmp_path, timeout=DEADLINE_SECONDS
    )

    assert done.stdout.count(b"\n") == 1, done.stderr.decode()
    summary = orjson.loads(done.stdout)
    assert done.returncode == 0, summary
    assert (summary["emails"], summary["pending"], summary["lost"], summary["duplicates"]) == (EMAILS, 0, 0, 0)
    assert summary["emails"] == summary["sent"] + summary["failed"] + summary["held"]
    assert summary["dlq"] == summary["failed"] + summary["held"] + 1
    assert summary["sent"] <= summary["delivered"] <= summary["sent"] + summary["held"]
    assert summary["failed"] == 2
    assert summary["retried"] <= 2, "the kill may have hit an email whose deferral was not logged yet"
    assert summary["known"] == 4
    assert summary["killed"]["uncertain"] == summary["held"]
    assert summary["recovered"] <= 1, "only an email that was being rendered at the kill may be recovered"
    assert summary["seconds"] > 0
    assert summary["emails_per_second"] == pytest.approx(EMAILS / summary["seconds"], rel=0.2)
    assert len(list((folder / "smtp" / "mail").glob("*.eml"))) == summary["delivered"]
    assert processes_of(folder) == {}
    assert "email_dispatcher_demo" not in databases(servers)
    assert not (folder / "servers").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_demo(tmp_path: Path, environment: Mapping[str, str], number: signal.Signals) -> None:
    folder = tmp_path / "demo"
    # There are so many emails that the demo still runs when the stop arrives, even on a slow machine.
    many = demo(folder, "--emails", "5000")
    running = subprocess.Popen(
        many, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    with running:
        assert running.stderr is not None
        assert any("are ready" in line for line in running.stderr)
        assert len(processes_of(folder)) >= 5, "not all of keeper, SMTP server, run, worker and relay are running"

        running.send_signal(number)
        output, _ = running.communicate(timeout=DEADLINE_SECONDS)

    assert running.returncode == (-number if number is signal.SIGKILL else 130)
    assert output == ""
    wait_until(lambda: not processes_of(folder))


def test_a_folder_with_foreign_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")

    with pytest.raises(DispatcherError, match="has files that are not from a demo"), locked_folder(tmp_path):
        pass

    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
