"""`dispatcher run` checks the settings and servers before its first fork, and then sends and drains."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import boto3.session
import orjson
import psycopg
import pytest
from moto.server import ThreadedMotoServer

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology
from dispatcher.dev.servers import Servers
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.events.requests import delivery
from tests.providers.ses_place import REGION, aws_environment
from tests.waiting import wait_until


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because one test copies the database."""
    return own_database_url


@pytest.fixture
def silent_address() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"


def _event(process: subprocess.Popen[bytes], name: str) -> dict[str, object]:
    """Reads the log up to an event, and returns the event."""
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, object] = orjson.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the log ended without {name}")


def _end(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes, bytes]:
    """Sends a signal; returns the exit code, stderr, and the log lines after the signal."""
    process.send_signal(number)
    log, stderr = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, stderr, log


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"DISPATCHER_PROVIDERS": None}, "DISPATCHER_PROVIDERS is not set"),
        ({"DISPATCHER_PROVIDERS": "none"}, "DISPATCHER_PROVIDERS has an unknown provider: 'none'"),
        ({"DISPATCHER_PROVIDERS": "smtp"}, "DISPATCHER_SMTP_URL is not set"),
        ({"DISPATCHER_CAPTURE_DIR": None}, "DISPATCHER_CAPTURE_DIR is not set"),
        ({"DISPATCHER_AMQP_URL": "amqp://u:p@mq/?heartbeat=blue"}, "DISPATCHER_AMQP_URL"),
    ],
)
def test_missing_or_invalid_settings_stop_the_start(
    settled: CommandLine, settings: dict[str, str | None], words: str
) -> None:
    ended = settled.having(**settings)("run")

    assert (ended.code, ended.stderr) == (78, "")
    assert ended.refusals[0].startswith(words)


def test_an_invalid_certificate_file_stops_the_start(settled: CommandLine) -> None:
    (settled.folder / "ca.pem").write_text("not a certificate")
    ended = settled.having(DISPATCHER_PROVIDERS="smtp", DISPATCHER_SMTP_URL="smtp://mx", DISPATCHER_CA_FILE="ca.pem")(
        "run"
    )

    assert ended.code == 78
    assert ended.refusals[0].startswith("DISPATCHER_CA_FILE")


def test_on_a_terminal_start_errors_are_text_and_not_log_lines(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_LOG_FORMAT=None, DISPATCHER_PROVIDERS="none").on_terminal("run")

    assert (ended.code, ended.stdout.startswith("DISPATCHER_PROVIDERS has an unknown provider: 'none'")) == (78, True)


def test_missing_tables_and_queues_are_both_reported_before_the_start(unprepared: CommandLine) -> None:
    ended = unprepared("run")

    assert (ended.code, ended.stderr) == (78, "")
    tables, queues = ended.refusals
    assert tables.startswith("The database lacks")
    assert queues.startswith("RabbitMQ has no exchange")
    assert tables.endswith("Run `dispatcher init`.")
    assert queues.endswith("Run `dispatcher init`.")


def test_missing_tables_are_reported_also_while_rabbitmq_is_unreachable(unprepared: CommandLine) -> None:
    ended = unprepared.having(DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")("run")

    assert ended.code == 78
    assert ended.refusals[0].startswith("The database lacks")


def test_queue_with_other_arguments_stops_the_start(prepared: CommandLine, topology: Topology) -> None:
    ended = prepared.having(DISPATCHER_QUEUE_TYPE="classic")("run")

    assert ended.code == 78
    assert topology.dlq in ended.refusals[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("variable", "url", "event"),
    [
        ("DISPATCHER_DATABASE_URL", "postgresql://u:p@127.0.0.1:1/x", "store.connection_lost"),
        ("DISPATCHER_AMQP_URL", "amqp://u:p@127.0.0.1:1/", "broker.connection_lost"),
    ],
)
def test_run_waits_for_an_unreachable_server_until_a_signal(
    settled: CommandLine, variable: str, url: str, event: str, number: int, code: int
) -> None:
    with settled.having(**{variable: url}).started("run") as process:
        lost = [_event(process, event), _event(process, event)]
        ended, stderr, _ = _end(process, number)

    assert all("refused" in str(one["reason"]) for one in lost)
    assert ended == code
    assert stderr.strip() == b""


@pytest.mark.parametrize("variable", ["DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"])
def test_a_server_that_does_not_answer_does_not_delay_the_exit(
    settled: CommandLine, silent_address: str, variable: str
) -> None:
    scheme = "amqp" if "AMQP" in variable else "postgresql"
    with settled.having(**{variable: f"{scheme}://u:p@{silent_address}/x"}).started("run") as process:
        wait_until(lambda: _has_connected_to(process.pid, silent_address))
        ended, stderr, log = _end(process, signal.SIGTERM)

    assert (ended, stderr) == (0, b"")
    assert b"connection_lost" not in log  # `run` would log this after the connection timeout


def test_the_start_continues_when_the_server_is_reachable_again(
    prepared: CommandLine, servers: Servers, database_url: str
) -> None:
    name = f"test_{secrets.token_hex(6)}"
    later = urlsplit(database_url)._replace(path=f"/{name}").geturl()
    with prepared.having(DISPATCHER_DATABASE_URL=later, DISPATCHER_WORKERS="1").started("run") as process:
        _event(process, "store.connection_lost")
        with psycopg.connect(servers.database_url, autocommit=True) as administration:
            administration.execute(f'create database {name} template "{urlsplit(database_url).path[1:]}"'.encode())
            _event(process, "store.connected")
            _event(process, "relay.leading")
            ended, *_ = _end(process, signal.SIGTERM)
            administration.execute(f"drop database {name} with (force)".encode())

    assert ended == 0


def test_parent_has_one_thread_and_no_socket_and_its_workers_send(prepared: CommandLine) -> None:
    prepared(
        "enqueue", "--key", "k", "--from", "a@example.com", "--to", "b@example.org", "--subject", "s", "--text", "t"
    )

    with prepared.started("run", "--workers", "3") as process:
        sent = _event(process, "email.attempted")
        title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        sockets = _sockets(process.pid)
        # The last child may start only after the first worker has sent the email.
        children = wait_until(lambda: _children(process.pid)[4:] and _children(process.pid))
        code, stderr, _ = _end(process, signal.SIGTERM)

    assert sent["outcome"] == "accepted"
    assert title.startswith(b"dispatcher: run")
    assert (len(threads), sockets, len(children)) == (1, [], 5)
    assert (code, stderr) == (0, b"")
    assert len(list((prepared.folder / "mail" / "new").iterdir())) == 1
    assert prepared("status", "--json").json["emails"]["sent"] == 1


def test_second_run_in_one_run_directory_is_refused(prepared: CommandLine) -> None:
    with prepared.started("run", "--workers", "1") as process:
        _event(process, "dispatcher.started")

        ended = prepared("run")

        assert _end(process, signal.SIGTERM)[0] == 0
    assert ended.code == 1
    assert "Another `dispatcher run` uses the run directory" in ended.refusals[0]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _sockets(pid: int) -> list[str]:
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the process has closed the descriptor since `iterdir`
            targets.append(str(path.readlink()))
    return [target for target in targets if target.startswith("socket:")]


def _has_connected_to(pid: int, address: str) -> bool:
    """Whether the process has a TCP connection to a port of this machine."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{line[9]}]" for line in lines if line[2].endswith(port) and line[3] == "01"}
    return not inodes.isdisjoint(_sockets(pid))


def test_the_monitor_polls_the_queue_of_provider_events(prepared: CommandLine, database_url: str) -> None:
    amazon = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    amazon.start()
    with psycopg.connect(database_url, autocommit=True) as connection, aws_environment(AWS_DEFAULT_REGION=REGION):
        host, port = amazon.get_host_and_port()
        queue = boto3.session.Session().client("sqs", endpoint_url=f"http://{host}:{port}")
        url = queue.create_queue(QueueName="events")["QueueUrl"]
        email = enqueue(connection, Email(message_key="k-1", sender="a@example.com", to="b@example.org", text="x"))
        queue.send_message(QueueUrl=url, MessageBody=orjson.dumps(delivery(email.email_id)).decode())

        access = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": REGION}
        polling = prepared.having(DISPATCHER_SES_EVENTS_QUEUE_URL=url, **access)
        with polling.started("run", "--workers", "1") as process:
            wait_until(lambda: connection.execute("select from dispatcher.email_event").rowcount == 1)
            assert _end(process, signal.SIGTERM)[0] == 0
        queue.close()
    amazon.stop()
