"""`dispatcher run` and `dispatcher api` check settings and servers, and then work until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
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
from tests.cli.commandline import DEADLINE_SECONDS, PROGRAM, CommandLine
from tests.events.requests import delivery
from tests.monitor.receiver import SECRET, receiving, write_ca
from tests.providers.ses_place import REGION, aws_environment
from tests.supervisor.program import Program
from tests.waiting import wait_until

Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    programs: list[Program] = []

    def start_one(commandline: CommandLine, *words: str) -> Program:
        folder = commandline.folder
        env = commandline.having(DISPATCHER_CAPTURE_DIR=str(folder / "mail")).whole_environment
        programs.append(Program([*PROGRAM, *words], folder, words[0], env=env))
        return programs[-1]

    yield start_one
    for program in programs:
        program.destroy()


def _end(program: Program, number: signal.Signals = signal.SIGTERM) -> int:
    program.send(number)
    return program.await_exit(DEADLINE_SECONDS)


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
    settled: CommandLine, start: Start, variable: str, url: str, event: str, number: signal.Signals, code: int
) -> None:
    run = start(settled.having(**{variable: url}), "run")
    run.await_events(event, 2)

    assert _end(run, number) == code
    assert all("refused" in str(one["reason"]) for one in run.events(event))
    assert run.words.strip() == ""


@pytest.mark.parametrize("variable", ["DISPATCHER_DATABASE_URL", "DISPATCHER_AMQP_URL"])
def test_a_server_that_is_silent_does_not_delay_the_exit(settled: CommandLine, start: Start, variable: str) -> None:
    scheme = "amqp" if "AMQP" in variable else "postgresql"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = start(settled.having(**{variable: f"{scheme}://u:p@127.0.0.1:{port}/x"}), "run")
        connected, _ = server.accept()
        with connected:
            assert (_end(run), run.words) == (0, "")
    assert "connection_lost" not in run.log  # `run` would log this after the connection timeout


def test_the_parent_is_alone_without_sockets_and_its_workers_send(
    prepared: CommandLine, start: Start, connection: psycopg.Connection
) -> None:
    enqueue(connection, Email(message_key="k", sender="a@example.com", to="b@example.org", text="x"))

    run = start(prepared, "run", "--workers", "1")
    sent = run.await_events("email.attempted")
    title = Path(f"/proc/{run.pid}/cmdline").read_bytes()
    threads = list(Path(f"/proc/{run.pid}/task").iterdir())
    sockets = [path for path in Path(f"/proc/{run.pid}/fd").iterdir() if path.is_socket()]
    # The last child may start only after the worker has sent the email.
    children = wait_until(lambda: run.children()[2:] and run.children())
    second = prepared("run")
    code = _end(run)

    assert sent["outcome"] == "accepted"
    assert title.startswith(b"dispatcher: run")
    assert (len(threads), sockets, len(children)) == (1, [], 3)
    assert (code, run.words) == (0, "")
    assert len(list((prepared.folder / "mail" / "new").iterdir())) == 1
    assert prepared("status", "--json").json["emails"]["sent"] == 1
    assert second.code == 1
    assert "Another `dispatcher run` uses the run directory" in second.refusals[0]


def test_the_monitor_polls_the_queue_of_provider_events(
    prepared: CommandLine, start: Start, connection: psycopg.Connection
) -> None:
    amazon = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    amazon.start()
    with aws_environment(AWS_DEFAULT_REGION=REGION):
        host, port = amazon.get_host_and_port()
        queue = boto3.session.Session().client("sqs", endpoint_url=f"http://{host}:{port}")
        url = queue.create_queue(QueueName="events")["QueueUrl"]
        email = enqueue(connection, Email(message_key="k-1", sender="a@example.com", to="b@example.org", text="x"))
        queue.send_message(QueueUrl=url, MessageBody=orjson.dumps(delivery(email.email_id)).decode())

        access = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": REGION}
        polling = prepared.having(DISPATCHER_SES_EVENTS_QUEUE_URL=url, **access)
        run = start(polling, "run", "--workers", "1")
        wait_until(lambda: connection.execute("select from dispatcher.email_event").rowcount == 1)
        assert _end(run) == 0
        queue.close()
    amazon.stop()


@pytest.mark.parametrize("repeats", [False, True], ids=["one signal", "many signals"])
def test_api_serves_until_sigterm(
    prepared: CommandLine,
    start: Start,
    connection: psycopg.Connection,
    topology: Topology,
    servers: Servers,
    repeats: bool,
) -> None:
    given = {"DISPATCHER_API_ADDRESS": "127.0.0.1:0", "DISPATCHER_API_ALLOW_ANONYMOUS": "on"}
    api = start(prepared.having(**given), "api")
    body = orjson.dumps({"from": "a@example.com", "to": "b@example.org", "subject": "Hello", "text": "It works."})
    headers = {"Content-Type": "application/json", "Idempotency-Key": "hello-1"}
    listener = api.await_events("api.started")["listener"]
    with urlopen(Request(f"http://{listener}/v1/emails", body, headers), timeout=20) as answer:
        assert answer.status == 202
    # Wait until the message is published, because a stopping API waits only a few seconds for confirms.
    wait_until(lambda: asyncio.run(depths(servers.amqp_url, topology))[topology.queue] == 1)

    def has_ended() -> bool:
        with suppress(ProcessLookupError):
            api.send(signal.SIGTERM)
        return api.exit_code is not None

    if repeats:
        wait_until(has_ended)
    assert (api.exit_code if repeats else _end(api), api.words) == (0, "")
    assert api.events("api.stopped")
    assert "example.org" not in api.log
    assert connection.execute("select message_key, publish_due_at from email_log").fetchall() == [("hello-1", None)]


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
