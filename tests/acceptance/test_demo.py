"""`dispatcher demo`, on the servers of the whole test run: what it tells, how it ends, that nothing of it is left."""

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

from dispatcher.dev.servers import Servers
from tests.waiting import wait_until

EMAILS: Final = 120
DEADLINE_SECONDS: Final = 90.0


@pytest.fixture
def environment(servers: Servers) -> Mapping[str, str]:
    """One that names the servers, so that none is started; and a setting of a host, which must not matter."""
    named = {"DISPATCHER_QUEUE": "somebody.elses", "DISPATCHER_DATABASE_SCHEMA": "somebody_elses"}
    ours = {**servers.environment(), **named, "DISPATCHER_PROVIDERS": "capture"}
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")}
    return {**foreign, **ours}


def demo(folder: Path, *arguments: str) -> list[str]:
    """The command."""
    words = ["demo", "--folder", str(folder), "--emails", str(EMAILS), "--json", *arguments]
    return [sys.executable, "-m", "dispatcher.cli.main", *words]


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that work in the folder, or whose command line names it; workers overwrite theirs with a title."""
    found: dict[int, str] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            with suppress(OSError):
                words = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                if str(folder) in words or (process / "cwd").readlink().is_relative_to(folder):
                    found[int(process.name)] = words
    return found


def databases(servers: Servers) -> set[str]:
    """What is on the server."""
    with psycopg.connect(servers.database_url) as connection:
        return {name for (name,) in connection.execute("select datname from pg_database")}


def test_books_balance_and_nothing_is_left(tmp_path: Path, servers: Servers, environment: Mapping[str, str]) -> None:
    folder = tmp_path / "demo"

    done = subprocess.run(
        demo(folder), env=environment, capture_output=True, check=False, cwd=tmp_path, timeout=DEADLINE_SECONDS
    )

    assert done.stdout.count(b"\n") == 1, done.stderr.decode()
    told = orjson.loads(done.stdout)
    assert done.returncode == 0, told
    assert (told["emails"], told["pending"], told["lost"], told["duplicates"]) == (EMAILS, 0, 0, 0)
    assert told["emails"] == told["sent"] + told["failed"] + told["held"]
    assert told["dlq"] == told["failed"] + told["held"] + 1
    assert told["sent"] <= told["delivered"] <= told["sent"] + told["held"]
    assert told["failed"] == 2
    assert told["retried"] <= 2, "one that the kill met may have been deferred without a word in the log"
    assert told["known"] == 4
    assert told["killed"]["uncertain"] == told["held"]
    assert told["recovered"] <= 1, "one that was being rendered at the kill is given back with a mark"
    assert told["seconds"] > 0
    assert told["emails_per_second"] == pytest.approx(EMAILS / told["seconds"], rel=0.2)
    assert len(list((folder / "smtp" / "mail").glob("*.eml"))) == told["delivered"]
    assert processes_of(folder) == {}
    assert "email_dispatcher_demo" not in databases(servers)
    assert not (folder / "servers").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_no_process(
    tmp_path: Path, environment: Mapping[str, str], number: signal.Signals
) -> None:
    folder = tmp_path / "demo"
    # So many that it goes on for seconds, however late we stop it.
    many = demo(folder, "--emails", "5000")
    running = subprocess.Popen(
        many, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    with running:
        assert running.stderr is not None
        assert any("are ready" in line for line in running.stderr)
        assert len(processes_of(folder)) >= 5, "keeper, SMTP server, run, worker, relay"

        running.send_signal(number)
        output, _ = running.communicate(timeout=DEADLINE_SECONDS)

    assert running.returncode == (-number if number is signal.SIGKILL else 130)
    assert output == ""
    wait_until(lambda: not processes_of(folder))


def test_a_folder_with_files_of_others_is_left_alone(tmp_path: Path, environment: Mapping[str, str]) -> None:
    (tmp_path / "letter.txt").write_text("mine")

    done = subprocess.run(demo(tmp_path), env=environment, capture_output=True, check=False, timeout=DEADLINE_SECONDS)

    assert done.returncode == 1
    assert b"has files that are not from a demo" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
