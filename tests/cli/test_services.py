"""`dispatcher run` and `dispatcher api` check settings and servers, and then work until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import boto3.session
import orjson
import psycopg
import pytest
import trustme
from moto.server import ThreadedMotoServer

from dispatcher import Email, enqueue
from dispatcher.broker.topology import Topology, depths
from dispatcher.dev.servers import Servers
from tests.acceptance.harness import Sink
from tests.cli.commandline import DEADLINE_SECONDS, CommandLine
from tests.events.requests import delivery
from tests.monitor.receiver import SECRET, receiving, write_ca
from tests.providers.ses_place import REGION, aws_environment
from tests.waiting import wait_until


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
        (
            {"DATABASE_URL": "http://db", "WORKERS": "many", "PROVIDERS": "none", "AMQP_URL": None},
            ["DISPATCHER_DATABASE_URL", "DISPATCHER_WORKERS", "DISPATCHER_PROVIDERS has an", "DISPATCHER_AMQP_URL is"],
        ),
        ({"PROVIDERS": "smtp"}, ["DISPATCHER_SMTP_URL is not set"]),
        ({"AMQP_URL": "amqp://u:p@mq/?heartbeat=blue"}, ["DISPATCHER_AMQP_URL"]),
        ({"PROVIDERS": "smtp", "SMTP_URL": "smtp://mx", "CA_FILE": "/dev/null"}, ["DISPATCHER_CA_FILE"]),
    ],
    ids=["all mistakes", "provider", "URL", "certificate"],
)
def test_missing_or_invalid_settings_stop_the_start(
    settled: CommandLine, settings: dict[str, str | None], words: list[str]
) -> None:
    ended = settled.having(**{f"DISPATCHER_{name}": value for name, value in settings.items()})("run")

    assert (ended.code, ended.stderr) == (78, "")
    assert [reason[: len(each)] for reason, each in zip(ended.refusals, words, strict=True)] == words


def test_on_a_terminal_start_errors_are_text_and_not_log_lines(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_LOG_FORMAT=None, DISPATCHER_PROVIDERS="none").on_terminal("run")

    assert (ended.code, ended.stdout.startswith("DISPATCHER_PROVIDERS has an unknown provider: 'none'")) == (78, True)


def test_missing_tables_and_queues_are_both_reported_before_the_start(unprepared: CommandLine) -> None:
    ended = unprepared("run")
    without_rabbitmq = unprepared.having(DISPATCHER_AMQP_URL="amqp://u:p@127.0.0.1:1/")("run")

    assert (ended.code, ended.stderr, without_rabbitmq.code) == (78, "", 78)
    tables, queues = ended.refusals
    assert tables.startswith("The database lacks")
    assert queues.startswith("RabbitMQ has no exchange")
    assert tables.endswith("Run `dispatcher init`.")
    assert queues.endswith("Run `dispatcher init`.")
    assert without_rabbitmq.refusals[0].startswith("The database lacks")


@pytest.mark.parametrize(
    ("variable", "url", "event", "number", "code"),
    [
        ("DISPATCHER_DATABASE_URL", "postgresql://u:p@127.0.0.1:1/x", "store.connection_lost", signal.SIGTERM, 0),
        ("DISPATCHER_AMQP_URL", "amqp://u:p@127.0.0.1:1/", "broker.connection_lost", signal.SIGINT, 130),
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
def test_a_server_that_is_silent_does_not_delay_the_exit(
    settled: CommandLine, silent_address: str, variable: str
) -> None:
    scheme = "amqp" if "AMQP" in variable else "postgresql"
    with settled.having(**{variable: f"{scheme}://u:p@{silent_address}/x"}).started("run") as process:
        wait_until(lambda: _has_connected_to(process.pid, silent_address))
        ended, stderr, log = _end(process, signal.SIGTERM)

    assert (ended, stderr) == (0, b"")
    assert b"connection_lost" not in log  # `run` would log this after the connection timeout


def test_the_start_continues_when_the_server_is_back(
    prepared: CommandLine, servers: Servers, own_database_url: str
) -> None:
    name = urlsplit(own_database_url).path[1:]
    run = prepared.having(DISPATCHER_DATABASE_URL=own_database_url, DISPATCHER_WORKERS="1")
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(f"alter database {name} rename to {name}_away".encode())
        with run.started("run") as process:
            _event(process, "store.connection_lost")
            administration.execute(f"alter database {name}_away rename to {name}".encode())
            _event(process, "store.connected")
            _event(process, "relay.leading")
            ended, *_ = _end(process, signal.SIGTERM)

    assert ended == 0


def test_the_parent_is_alone_without_sockets_and_its_workers_send(
    prepared: CommandLine, connection: psycopg.Connection
) -> None:
    enqueue(connection, Email(message_key="k", sender="a@example.com", to="b@example.org", text="x"))

    with prepared.started("run", "--workers", "1") as process:
        sent = _event(process, "email.attempted")
        title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        sockets = _sockets(process.pid)
        # The last child may start only after the first worker has sent the email.
        children = wait_until(lambda: _children(process.pid)[2:] and _children(process.pid))
        second = prepared("run")
        code, stderr, _ = _end(process, signal.SIGTERM)

    assert sent["outcome"] == "accepted"
    assert title.startswith(b"dispatcher: run")
    assert (len(threads), sockets, len(children)) == (1, [], 3)
    assert (code, stderr) == (0, b"")
    assert len(list((prepared.folder / "mail" / "new").iterdir())) == 1
    assert prepared("status", "--json").json["emails"]["sent"] == 1
    assert second.code == 1
    assert "Another `dispatcher run` uses the run directory" in second.refusals[0]


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


def depth(topology: Topology, servers: Servers) -> int:
    return asyncio.run(depths(servers.amqp_url, topology))[topology.queue]


def test_api_serves_until_sigterm(
    prepared: CommandLine, connection: psycopg.Connection, topology: Topology, servers: Servers
) -> None:
    open_to_all = prepared.having(DISPATCHER_API_ADDRESS="127.0.0.1:0", DISPATCHER_API_ALLOW_ANONYMOUS="on")
    body = orjson.dumps({"from": "a@example.com", "to": "b@example.org", "subject": "Hello", "text": "It works."})
    with open_to_all.started("api") as process:
        assert process.stdout is not None
        started = orjson.loads(process.stdout.readline())
        headers = {"Content-Type": "application/json", "Idempotency-Key": "hello-1"}
        with urlopen(Request(f"http://{started['listener']}/v1/emails", body, headers), timeout=20) as answer:
            assert answer.status == 202
        # Wait until the message is published, because a stopping API waits only a few seconds for confirms.
        wait_until(lambda: depth(topology, servers) == 1)
        process.send_signal(signal.SIGTERM)
        log, errors = process.communicate(timeout=20)

    assert (process.returncode, errors) == (0, b"")
    assert b"api.stopped" in log
    assert b"example.org" not in log
    assert connection.execute("select message_key, publish_due_at from email_log").fetchall() == [("hello-1", None)]


def test_repeated_sigterm_stops_api_like_one(prepared: CommandLine) -> None:
    open_to_all = prepared.having(DISPATCHER_API_ADDRESS="127.0.0.1:0", DISPATCHER_API_ALLOW_ANONYMOUS="on")
    with open_to_all.started("api") as process:
        assert process.stdout is not None
        process.stdout.readline()

        def has_ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_until(has_ended)

        assert process.returncode == 0


def test_without_keys_api_refuses_to_start_on_a_public_address(storing: CommandLine) -> None:
    given = storing.having(DISPATCHER_AMQP_URL="amqp://127.0.0.1:1", DISPATCHER_API_ALLOW_ANONYMOUS="on")

    ended = given("api", "--address", "0.0.0.0:0")

    (reason,) = ended.refusals
    assert (ended.code, "dispatcher keys create --name" in reason) == (78, True)
    assert "DISPATCHER_API_ALLOW_ANONYMOUS=on" in reason


def test_without_the_packages_of_api_the_error_says_how_to_install_them(bare: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module named starlette', name='starlette')")
    settings = {"DISPATCHER_DATABASE_URL": "postgresql://127.0.0.1:1/x", "DISPATCHER_AMQP_URL": "amqp://127.0.0.1:1"}

    ended = bare.having(PYTHONPATH=str(tmp_path), **settings)("api")

    assert ended.code == 1
    assert ended.json["event"] == "startup.failed"
    assert "pip install 'email-dispatcher[api]'" in ended.json["remedy"]
    assert "Traceback" not in ended.stderr


def test_every_channel_gets_a_test_alert_and_a_failed_channel_is_named(bare: CommandLine, tmp_path: Path) -> None:
    ca, mailbox = trustme.CA(), Sink(tmp_path / "operators")
    write_ca(ca, tmp_path)
    with receiving(ca, "127.0.0.1") as receiver:
        alerting = bare.having(
            DISPATCHER_ALERT_WEBHOOK_URL=receiver.url,
            DISPATCHER_ALERT_WEBHOOK_SECRET=SECRET,
            DISPATCHER_ALERT_WEBHOOK_ALLOW_PRIVATE="on",
            DISPATCHER_ALERT_SMTP_URL=mailbox.settings["SMTP_URL"],
            DISPATCHER_ALERT_EMAIL_FROM="a@example.com",
            DISPATCHER_ALERT_EMAIL_TO="ops@example.com",
            DISPATCHER_CA_FILE=str(tmp_path / "ca.pem"),
        )
        every = alerting("alerts", "test", "--json")
        (posted,) = receiver.posted
        receiver.statuses = [403]
        some = alerting("alerts", "test")
        mailbox.kill()
        receiver.statuses = [403]
        none = alerting("alerts", "test")

    detail = "the SMTP server accepted the alert for 1 of 1 recipients"
    assert every.json == {
        "ok": True,
        "channels": [
            {"channel": "webhook", "ok": True, "detail": "the receiver answered 204"},
            {"channel": "email", "ok": True, "detail": detail},
        ],
    }
    assert (posted.is_signed, posted.json["type"]) == (True, "alert.test")
    assert (every.code, some.code, none.code) == (0, 3, 1)
    assert [line.split()[:2] for line in some.stdout.splitlines()] == [["✗", "webhook"], ["✓", "email"]]
    assert "the receiver answered 403" in none.stdout
    assert "no connection to the SMTP server" in none.stdout
    assert SECRET not in some.stdout + some.stderr


def test_without_a_complete_channel_the_error_names_the_settings(bare: CommandLine) -> None:
    half = bare.having(DISPATCHER_ALERT_WEBHOOK_URL="https://a.example/", DISPATCHER_ALERT_EMAIL_FROM="a@example.com")
    none, incomplete = bare("alerts", "test"), half("alerts", "test")

    assert (none.code, incomplete.code) == (78, 78)
    for words in ("DISPATCHER_ALERT_WEBHOOK_URL", "DISPATCHER_ALERT_SMTP_URL"):
        assert words in none.stderr
    assert "DISPATCHER_ALERT_WEBHOOK_SECRET is not set" in incomplete.stderr
    assert "DISPATCHER_ALERT_SMTP_URL and DISPATCHER_ALERT_EMAIL_TO are not set" in incomplete.stderr
