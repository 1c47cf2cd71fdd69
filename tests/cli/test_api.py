"""`dispatcher api` as a process: it serves requests, drains, and reports what is missing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from urllib.request import Request, urlopen

import orjson
import psycopg
import pytest

from dispatcher.broker.topology import Topology, depths
from dispatcher.dev.servers import Servers
from tests.cli.commandline import CommandLine
from tests.waiting import wait_until


def depth(topology: Topology, servers: Servers) -> int:
    return asyncio.run(depths(servers.amqp_url, topology))[topology.queue]


def test_it_serves_until_sigterm(
    prepared: CommandLine, connection: psycopg.Connection, topology: Topology, servers: Servers
) -> None:
    body = orjson.dumps({"from": "a@example.com", "to": "b@example.org", "subject": "Hello", "text": "It works."})
    with prepared.having(DISPATCHER_API_ADDRESS="127.0.0.1:0", DISPATCHER_API_ALLOW_ANONYMOUS="on").started(
        "api"
    ) as process:
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


def test_repeated_sigterm_stops_it_like_one(prepared: CommandLine) -> None:
    with prepared.having(DISPATCHER_API_ADDRESS="127.0.0.1:0", DISPATCHER_API_ALLOW_ANONYMOUS="on").started(
        "api"
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def has_ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_until(has_ended)

        assert process.returncode == 0


@pytest.mark.parametrize(
    ("address", "is_open"), [("127.0.0.1:0", None), ("127.0.0.1:0", "off"), ("0.0.0.0:0", None), ("0.0.0.0:0", "on")]
)
def test_without_keys_it_refuses_to_start(storing: CommandLine, address: str, is_open: str | None) -> None:
    given = storing.having(DISPATCHER_AMQP_URL="amqp://127.0.0.1:1", DISPATCHER_API_ALLOW_ANONYMOUS=is_open)

    ended = given("api", "--address", address)

    assert ended.code == 78
    (reason,) = ended.refusals
    assert "dispatcher keys create --name" in reason
    assert "DISPATCHER_API_ALLOW_ANONYMOUS=on" in reason


def test_without_its_packages_the_error_says_how_to_install_them(bare: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module named starlette', name='starlette')")
    settings = {"DISPATCHER_DATABASE_URL": "postgresql://127.0.0.1:1/x", "DISPATCHER_AMQP_URL": "amqp://127.0.0.1:1"}

    ended = bare.having(PYTHONPATH=str(tmp_path), **settings)("api")

    assert ended.code == 1
    assert ended.json["event"] == "startup.failed"
    assert "pip install 'email-dispatcher[api]'" in ended.json["remedy"]
    assert "Traceback" not in ended.stderr
