"""A host under test: `dispatcher run` as real processes, with its own database, queues, run directory and provider."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit
from uuid import UUID

import orjson
import psycopg

from dispatcher import Email, enqueue_many
from dispatcher.broker.topology import Topology
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.ports import choose
from dispatcher.dev.servers import Servers
from tests.acceptance.books import FINAL, Books, EmailRecord
from tests.acceptance.rabbit import Rabbit
from tests.supervisor.program import DEADLINE_SECONDS, Program, eventually

DISPATCHER: Final = (sys.executable, "-m", "dispatcher.cli.main")
WORKERS: Final = 2
CONNECTIONS: Final = 8
"""SMTP connections per worker, and so the most emails that a worker can have on the wire."""


VENDOR_NAMES: Final = ("SENDGRID_API_KEY", "RESEND_API_KEY", "OTEL_", "LD_PRELOAD", "FAKETIME_")
"""Prefixes of settings that do not start with DISPATCHER_."""


class Recipient(Protocol):
    @property
    def settings(self) -> Mapping[str, str]: ...

    def delivered(self) -> Counter[UUID]: ...


class Capture:
    """The capture provider's Maildir; its file names are the record of accepted emails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def settings(self) -> Mapping[str, str]:
        return {"PROVIDERS": "capture", "CAPTURE_DIR": str(self.folder)}

    def delivered(self) -> Counter[UUID]:
        folder = self.folder / "new"
        return Counter(UUID(path.name[:36]) for path in folder.iterdir()) if folder.exists() else Counter()


class LocalProvider:
    module: str
    program: Program

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self._folder = folder
        self._options = options
        (self._port,) = choose(1)  # outside the ephemeral range, so the port is free at a restart
        self.start()

    def start(self) -> None:
        words = ["--folder", str(self._folder), "--port", str(self._port), "--die-with-parent"]
        argv = [sys.executable, "-m", self.module, *words, *self._options]
        self.program = program = Program(argv, self._folder, "provider", env={"PATH": os.defpath})
        eventually(lambda: program.log.endswith("\n"), self.module)
        self._started = orjson.loads(program.log)

    def kill(self) -> None:
        self.program.destroy()

    @property
    def ledger_octets(self) -> int:
        """The size of the record in bytes. The record grows with each accepted email."""
        return self._ledger.stat().st_size

    @property
    def _ledger(self) -> Path:
        return Path(self._started["ledger"])

    def delivered(self) -> Counter[UUID]:
        return Counter({UUID(email_id): times for email_id, times in read_ledger(self._ledger).times.items()})

    def deliveries(self) -> Counter[tuple[UUID, str]]:
        """The number of times that each email arrived for each recipient, if the provider records recipients."""
        counted = read_ledger(self._ledger).deliveries
        return Counter({(UUID(email_id), address): times for (email_id, address), times in counted.items()})

    def witnessed(self) -> list[dict[str, Any]]:
        """The events on the provider's connections, if the provider was started with `--wire`."""
        return self._lines("wire.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a file. The last line may be incomplete, because the provider may be writing it."""
        *lines, _unfinished = (self._folder / name).read_bytes().split(b"\n")
        return [orjson.loads(line) for line in lines]


class Sink(LocalProvider):
    module = "dispatcher.dev.smtp_sink"

    def __init__(self, folder: Path, *options: str, keeps_eml: bool = False) -> None:
        super().__init__(folder, *(() if keeps_eml else ("--no-eml",)), *options)

    @property
    def mail_folder(self) -> Path:
        return self._folder / "mail"

    def behave(self, **behaviour: object) -> None:
        """See `dispatcher.dev.smtp_behaviour.SmtpBehaviour.change`."""
        with socket.create_connection(("127.0.0.1", self._started["control_port"]), timeout=10) as control:
            control.sendall(orjson.dumps(behaviour) + b"\n")
            assert control.makefile("rb").readline() == b"{}\n", behaviour

    def become(self, *options: str) -> None:
        """Restart the server with these options, on the same port and with the same record of accepted emails."""
        self.kill()
        self._options = ("--no-eml", *options)
        self.start()

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            "PROVIDERS": "smtp",
            "SMTP_URL": f"smtp://127.0.0.1:{self._port}?tls=none",
            "SMTP_CONNECTIONS": str(CONNECTIONS),
        }


class Double(LocalProvider):
    module = "dispatcher.dev.http_double"

    def behave(self, **behaviour: object) -> None:
        """See `dispatcher.dev.http_behaviour.Behaviour.change`."""
        connection = HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("PUT", "/double", orjson.dumps(behaviour))
        assert connection.getresponse().status < 300
        connection.close()

    @property
    def settings(self) -> Mapping[str, str]:
        return {"PROVIDERS": "sendgrid", "SENDGRID_HOST": self._url, "SENDGRID_API_KEY": "SG.test.key"}

    @property
    def sms_settings(self) -> Mapping[str, str]:
        """The settings with which a dispatcher sends SMS to this double, which is then a local Twilio."""
        return {
            "SMS_PROVIDERS": "twilio",
            "TWILIO_URL": self._url,
            "TWILIO_ACCOUNT_SID": f"AC{'0' * 32}",
            "TWILIO_AUTH_TOKEN": "test-token",
            "TWILIO_SENDER": "Example",
            "SMS_COUNTRIES": "DE",
            "TWILIO_CALLBACK_URL": "https://mail.example.org/v1/events/twilio",
        }

    @property
    def _url(self) -> str:
        return str(self._started["url"])

    def sms(self) -> set[UUID]:
        """The accepted SMS: only these have addresses in the ledger."""
        return {email_id for email_id, address in self.deliveries() if address}

    def requests(self) -> list[dict[str, Any]]:
        """All requests that the double has read at least partly. Fields: `email_id`, `came` (the result), `at` (unix
        seconds) and `together` (the number of emails in the call)."""
        return self._lines("requests.jsonl")


class Host:
    def __init__(self, folder: Path, servers: Servers, database_url: str, topology: Topology) -> None:
        self.folder = folder
        self.servers = servers
        self.database_url = database_url
        self.topology = topology
        self.run_dir = folder / "run"
        self.recipient: Recipient = Capture(folder / "mail")
        self.rabbit = Rabbit(servers.amqp_url, servers.management_url, keeps_connection=True)
        self._reader: psycopg.Connection | None = None
        self._sink: Sink | None = None
        self._programs: list[Program] = []

    def sink(self, *options: str) -> Sink:
        """Send emails to a local SMTP server with these options from now on (see `dispatcher.dev.smtp_sink`)."""
        self.recipient = self._sink = Sink(self.folder / "sink", *options)
        return self._sink

    def run(self, *, stdout: Path | None = None, **settings: object) -> Program:
        return self.command("run", stdout=stdout, **settings)

    def command(self, *words: str, stdout: Path | None = None, **settings: object) -> Program:
        return self.program([*DISPATCHER, *words], words[0], stdout=stdout, env=self.environment(**settings))

    def program(self, argv: Sequence[str], name: str, *, env: Mapping[str, str], stdout: Path | None = None) -> Program:
        program = Program(argv, self.folder, f"{name}-{len(self._programs)}", env=env, stdout=stdout)
        self._programs.append(program)
        return program

    def environment(self, **settings: object) -> dict[str, str]:
        """The environment for commands of `dispatcher`. Settings are given without the prefix DISPATCHER_."""
        usual = {
            "DATABASE_URL": self.database_url,
            "AMQP_URL": self.servers.amqp_url,
            "RABBITMQ_MANAGEMENT_URL": self.servers.management_url,
            "EXCHANGE": self.topology.exchange,
            "QUEUE": self.topology.queue,
            "DLQ": self.topology.dlq,
            "QUEUE_TYPE": self.topology.queue_type,
            "RUN_DIR": self.run_dir,
            "WORKERS": WORKERS,
            "DRAIN_SECONDS": 20,
            "LEASE_SECONDS": 300,
            "RETRY_BASE_SECONDS": 0.05,
            "METRICS_ADDRESS": "off",
            **self.recipient.settings,
        }
        named = {**usual, **settings}.items()
        env = {name if name.startswith(VENDOR_NAMES) else f"DISPATCHER_{name}": str(value) for name, value in named}
        return {"PATH": os.defpath, **env}

    def enqueue(self, emails: Iterable[Email]) -> set[UUID]:
        with psycopg.connect(self.database_url) as connection:
            return {answer.email_id for answer in enqueue_many(connection, emails)}

    def rows(self) -> dict[UUID, EmailRecord]:
        statement = "select email_id, status, attempt_count, error_type, locked_by from email_log"
        return {row[0]: EmailRecord(*row[1:]) for row in self._read(statement)}

    def count_unfinished(self) -> int:
        ((count,),) = self._read("select count(*) from email_log where status in ('pending', 'sending')")
        return int(count)

    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        """The rows, through a connection that is kept, because tests call this every few milliseconds. If the
        connection was cut, this method opens a new one."""
        if self._reader is not None:
            with suppress(psycopg.OperationalError):
                return self._reader.execute(statement.encode()).fetchall()
            self._reader.close()
        self._reader = psycopg.connect(self.database_url, autocommit=True, prepare_threshold=None)
        return self._reader.execute(statement.encode()).fetchall()

    def leased_by(self, pid: int) -> set[UUID]:
        rows = self.rows().items()
        return {email_id for email_id, row in rows if row.status == "sending" and f":{pid}:" in (row.locked_by or "")}

    def await_ledger(self, pid: int) -> None:
        """Wait until a worker has created its in-flight ledger. Some workers start much later than others."""
        eventually(lambda: list(self.run_dir.glob(f"*:{pid}:*.ledger")), f"the ledger of {pid}")

    def await_consumers(self) -> None:
        """Wait until all workers consume. From then on, RabbitMQ gives each worker its share of the messages."""
        eventually(lambda: self.rabbit.consumers(self.topology.queue) == WORKERS, "the consumers")

    def await_work(self, pid: int) -> None:
        """Wait until a worker has leased more emails than it can have on the wire."""
        eventually(lambda: len(self.leased_by(pid)) > CONNECTIONS, f"leases of {pid}")

    def books(self, enqueued: Iterable[UUID]) -> Books:
        dead_letters = self.rabbit.read_all(self.topology.dlq)
        return Books.of(enqueued, self.rows(), self.recipient.delivered(), dead_letters)

    def await_delivered(self, count: int) -> None:
        eventually(lambda: len(self.recipient.delivered()) >= count, f"delivery of {count} emails")

    def await_finished(self, enqueued: Iterable[UUID], *, seconds: float = DEADLINE_SECONDS) -> Books:
        ids = set(enqueued)

        def unfinished() -> Counter[str]:
            rows = self.rows()
            statuses = {email_id: rows[email_id].status if email_id in rows else "lost" for email_id in ids}
            return Counter(status for status in statuses.values() if status not in FINAL)

        def describe_unfinished() -> str:
            return f"the end of all emails ({dict(unfinished())} left)\n{self._account()}\n"

        def announced() -> Books | None:
            books = self.books(ids)
            return books if books.is_announced else None

        eventually(lambda: not unfinished(), describe_unfinished, seconds=seconds)
        return eventually(announced, "the dead letters of all emails that failed")

    def _account(self) -> str:
        return "\n".join(f"--- {each.pid}\n{each.log[-2000:]}{each.words[-2000:]}" for each in self._programs)

    def destroy(self) -> None:
        for program in self._programs:
            program.destroy()
        if self._sink:
            self._sink.kill()
        self.rabbit.close()
        if self._reader is not None:
            self._reader.close()


@contextmanager
def new_host(folder: Path, servers: Servers, topology: Topology) -> Iterator[Host]:
    """A host with a database of its own and these queues; `dispatcher init` creates what is missing."""
    name = f"host_{secrets.token_hex(6)}"
    database_url = urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        administration.execute(f"create database {name}".encode())
    host = Host(folder, servers, database_url, topology)
    try:
        assert host.command("init").await_exit() == 0
        yield host
    finally:
        host.destroy()
        with psycopg.connect(servers.database_url, autocommit=True) as administration:
            administration.execute(f"drop database {name} with (force)".encode())


def address_of(run: Program) -> str:
    listener: str = run.await_events("http.listening")["listener"]
    return listener


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sample(address: str, name: str) -> float | None:
    values = [line.rpartition(" ") for line in get(address, "/metrics")[1].splitlines()]
    return next((float(value) for found, _, value in values if found == name), None)


def failing(address: str) -> list[str]:
    checks = json.loads(get(address, "/readyz")[1])["checks"]
    return [name for name, check in checks.items() if not check["ok"]]


def stop(run: Program, *, seconds: float = DEADLINE_SECONDS) -> None:
    """Send SIGTERM. Assert that the run exits 0 in time, that no child fails, and that no process remains."""
    run.send(signal.SIGTERM)
    assert run.await_exit(seconds) == 0, run.log[-3000:]
    draining = [event for event in run.events("process.exited") if "retry_in_seconds" not in event]
    assert not [
        event for event in draining if event["exit_status"].startswith("exit") and event["exit_status"] != "exit 0"
    ], run.words
    assert not run.members()


def emails(count: int, *, name: str = "email", to: Callable[[int], str | list[str]] | None = None) -> Iterator[Email]:
    for number in range(count):
        yield Email(
            message_key=f"{name}-{number}",
            sender="Shop <shop@example.com>",
            to=to(number) if to else f"customer-{number}@example.org",
            subject=f"Receipt {number}",
            text=f"Thank you for order {number}.",
            correlation_id=f"order-{number}",
        )
