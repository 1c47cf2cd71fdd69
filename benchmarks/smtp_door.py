"""Measures how fast `dispatcher smtp` accepts emails: `python benchmarks/smtp_door.py --connections 50 --processes 1`.

Each connection logs in once, and submits one message after the other, with MAIL, RCPT and DATA in one packet, as
Postfix does. PostgreSQL, RabbitMQ, the server and the clients share the machine; no worker runs. Every accepted email
must be in the database. The CPU per email shows what limits the rate: a process uses one core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/smtp_door.py`

from benchmarks.capacity import server_pids
from benchmarks.cpu import read_cpu
from benchmarks.machine import machine
from benchmarks.rig import database, passing_topology, settings_of
from dispatcher.dev.ports import choose
from dispatcher.dev.servers import private_servers
from dispatcher.domain.api_key import Secret

ENVELOPE = b"MAIL FROM:<shop@example.com>\r\nRCPT TO:<ann@example.org>\r\nDATA\r\n"

INSERT_KEY = """
    insert into dispatcher.api_key (key_id, secret_hash, tenant_id, name, scopes) values (%s, %s, %s, %s, %s)
"""


def message(name: str, octets: int) -> bytes:
    head = (
        f"From: shop@example.com\r\nTo: ann@example.org\r\nSubject: Receipt\r\nMessage-ID: <{name}@example.com>\r\n\r\n"
    )
    return head.encode() + b"Thank you for your order.\r\n" * (octets // 27) + b".\r\n"


async def submit(port: int, login: bytes, name: str, until: float, octets: int) -> list[float]:
    """Submits messages over one connection; the seconds that each took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def reply(code: bytes) -> None:
        while (line := await reader.readline())[3:4] == b"-":
            pass
        assert line.startswith(code), line

    await reply(b"220")
    for line, code in ((b"EHLO load\r\n", b"250"), (login, b"235")):
        writer.write(line)
        await reply(code)
    took: list[float] = []
    while (began_at := time.monotonic()) < until:
        writer.write(ENVELOPE)
        for code in (b"250", b"250", b"354"):
            await reply(code)
        writer.write(message(f"{name}-{len(took)}", octets))
        await reply(b"250")
        took.append(time.monotonic() - began_at)
    writer.close()
    return took


@contextmanager
def doors(environment: Mapping[str, str], port: int, processes: int) -> Iterator[list[int]]:
    command = [sys.executable, "-m", "dispatcher.cli.main", "smtp", "--share-port"]
    more = {"DISPATCHER_SUBMISSION_ADDRESS": f"127.0.0.1:{port}", "DISPATCHER_LOG_FORMAT": "json"}
    started = [subprocess.Popen(command, env={**environment, **more}, stdout=subprocess.PIPE) for _ in range(processes)]
    try:
        for door in started:
            assert door.stdout is not None
            assert b"submission.started" in door.stdout.readline()
        yield [door.pid for door in started]
    finally:
        for door in started:
            door.terminate()
            door.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--octets", type=int, default=2000, help="the size of a message")
    options = parser.parse_args()
    (port,) = choose(1)
    key = Secret.new()
    login = b"AUTH PLAIN " + b64encode(f"\0load\0{key.text()}".encode()) + b"\r\n"

    async def run(name: str, seconds: float) -> list[float]:
        until = time.monotonic() + seconds
        names = [f"{name}-{number}" for number in range(options.connections)]
        every = await asyncio.gather(*(submit(port, login, one, until, options.octets) for one in names))
        return [took for one in every for took in one]

    with (
        tempfile.TemporaryDirectory(prefix="smtp-door-") as folder,
        private_servers(Path(folder)) as servers,
        database(servers) as database_url,
        passing_topology(servers) as topology,
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        values = (key.key_id, key.hashed(), "shop", "load", ["send"])
        connection.execute(INSERT_KEY, values)
        environment = {**os.environ, **settings_of(servers, database_url, topology)}
        with doors(environment, port, options.processes) as pids:
            uvloop.run(run("warm-up", 1.0))
            roots = {**server_pids(servers), **{f"smtp {number}": pid for number, pid in enumerate(pids)}}
            before, own = read_cpu(roots), time.process_time()
            took = uvloop.run(run("load", options.seconds))
            own, after = time.process_time() - own, read_cpu(roots)
        found = connection.execute("select count(*) from dispatcher.email_log").fetchone()
    assert found is not None
    cpu = {name: 1e6 * (after[name] - before.get(name, 0)) / len(took) for name in after if name != "machine"}
    cpu["clients"] = 1e6 * own / len(took)
    spent = ", ".join(f"{name} {each:.0f}" for name, each in sorted(cpu.items()) if each >= 1)
    median, slow = (1e3 * statistics.quantiles(took, n=100)[at] for at in (49, 98))
    print(machine())
    print(f"{len(took) / options.seconds:,.0f} emails/s, p50 {median:.1f} ms, p99 {slow:.1f} ms")
    print(f"CPU in µs per email: {spent}")
    print(f"stored {found[0]:,}, accepted in the measurement {len(took):,}")


if __name__ == "__main__":
    socket.setdefaulttimeout(30)
    main()
