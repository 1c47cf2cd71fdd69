"""Provider events that one API process stores beside sending: `python benchmarks/events.py --rate 3000 --events 2000`.

`dispatcher run` sends emails through the SendGrid double at a limited rate; set it to half of what the machine sends.
Time windows without events and with events alternate. With events, another process posts SendGrid's batches, signed, by
a schedule (an open loop), to a real `dispatcher api`. The events are about emails that are sent. PostgreSQL, RabbitMQ
and all processes share the machine. After each window, every event must be in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import psycopg
import uvloop
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
)
from psycopg import sql
from pyreqwest.client import Client, ClientBuilder
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/events.py`

from benchmarks.capacity import server_pids
from benchmarks.cpu import read_cpu
from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, stage, wait_until
from dispatcher.dev.servers import Servers, private_servers

KINDS: Final = ("processed", "delivered", "open", "click")
WARM_UP_SECONDS: Final = 4.0
PAUSE_SECONDS: Final = 1.0
_SENT: Final = (
    "select count(*) from dispatcher.email_log where sent_at >= to_timestamp(%s) and sent_at < to_timestamp(%s)"
)


def main() -> None:
    """The command line."""
    options = _options()
    if options.load:
        sys.stdout.write(json.dumps(uvloop.run(_load(json.loads(sys.stdin.read())))) + "\n")
        return
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        windows = _measure(servers, options, Path(folder) / "case")
    if options.json:
        sys.stdout.write("".join(json.dumps({**window, **machine()}) + "\n" for window in windows))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(windows))
    if any(window["missing"] or set(window["statuses"]) - {"204"} for window in windows if window["events_per_second"]):
        sys.exit("Events were refused or are missing: see the columns responses and missing.")


def _measure(servers: Servers, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    seconds = WARM_UP_SECONDS + 2 * options.repeat * (options.seconds + PAUSE_SECONDS) + 5
    emails = int(options.rate * seconds)
    limit = (("DISPATCHER_SENDGRID_MAX_PER_SECOND", str(options.rate)),)
    case = Case("sendgrid", options.workers, emails, settings=limit)
    key = ec.generate_private_key(ec.SECP256R1())
    with stage(servers, case, folder) as scene, _api(scene, key) as (port, api), scene.running("run") as run:
        roots = {**server_pids(servers), "api": api, "run": run}
        wait_until(lambda: _count(scene.database_url) > 0, 30)
        time.sleep(WARM_UP_SECONDS)
        return [
            _window(scene, options, roots, port, key, events)
            for _ in range(options.repeat)
            for events in (0, options.events)
        ]


def _window(
    scene: Stage,
    options: argparse.Namespace,
    roots: Mapping[str, int],
    port: int,
    key: ec.EllipticCurvePrivateKey,
    events: int,
) -> dict[str, Any]:
    """One measured time window, with so many events per second."""
    ids = _sent_ids(scene.database_url, int(events * options.seconds / len(KINDS)) + options.batch)
    stored = _count(scene.database_url, "email_event")
    time.sleep(PAUSE_SECONDS)
    before, began_at = read_cpu(roots), time.time()
    told: dict[str, Any] = {"posted": 0, "statuses": {}, "p50_ms": 0.0, "p99_ms": 0.0, "seconds": options.seconds}
    if events:
        told = _posted(options, port, key, ids, events)
    else:
        time.sleep(options.seconds)
    after, ended_at = read_cpu(roots), time.time()
    with psycopg.connect(scene.database_url) as connection:
        row = connection.execute(_SENT, (began_at, ended_at)).fetchone()
    assert row is not None
    return {
        **told,
        "sent_per_second": row[0] / (ended_at - began_at),
        "events_per_second": told["posted"] / told["seconds"],
        "missing": told["posted"] - (_count(scene.database_url, "email_event") - stored),
        "api_cpu_us_per_event": 1e6 * (after["api"] - before["api"]) / told["posted"] if events else 0.0,
        "cpu_seconds": {name: after[name] - before.get(name, 0.0) for name in after},
    }


def _posted(
    options: argparse.Namespace, port: int, key: ec.EllipticCurvePrivateKey, ids: Sequence[str], events: int
) -> dict[str, Any]:
    der = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    asked = {
        "port": port,
        "key": base64.b64encode(der).decode(),
        "ids": ids,
        "batch": options.batch,
        "per_second": events,
        "seconds": options.seconds,
    }
    command = [sys.executable, __file__, "--load"]
    done = subprocess.run(command, input=json.dumps(asked).encode(), stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


async def _load(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Posts signed batches by a schedule, in a process of its own; the bodies are signed before the first post."""
    requests = list(_requests(asked))
    interval = asked["batch"] / asked["per_second"]
    url = f"http://127.0.0.1:{asked['port']}/v1/events/sendgrid"
    async with ClientBuilder().pool_max_idle_per_host(100).build() as client:
        loop = asyncio.get_running_loop()
        began_at = loop.time() + 0.2
        posts = []
        for number, (body, headers) in enumerate(requests):
            scheduled_at = began_at + number * interval
            await asyncio.sleep(max(0.0, scheduled_at - loop.time()))
            posts.append(asyncio.create_task(_post(client, url, body, headers, scheduled_at)))
        found = await asyncio.gather(*posts)
        seconds = loop.time() - began_at
    durations = sorted(duration for _, duration in found)
    return {
        "posted": len(requests) * asked["batch"],
        "seconds": seconds,
        "statuses": dict(Counter(str(status) for status, _ in found)),
        "p50_ms": 1000 * durations[len(durations) // 2],
        "p99_ms": 1000 * durations[len(durations) * 99 // 100],
    }


def _requests(asked: Mapping[str, Any]) -> Iterator[tuple[bytes, dict[str, str]]]:
    key = load_der_private_key(base64.b64decode(asked["key"]), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    batch, ids = asked["batch"], asked["ids"]
    pairs = ((email_id, kind) for email_id in ids for kind in KINDS)
    for _ in range(int(asked["per_second"] * asked["seconds"]) // batch):
        body = orjson.dumps([_event(*next(pairs)) for _ in range(batch)])
        timestamp = str(int(time.time()))
        signature = base64.b64encode(key.sign(timestamp.encode() + body, ec.ECDSA(SHA256()))).decode()
        yield (
            body,
            {
                "Content-Type": "application/json",
                "X-Twilio-Email-Event-Webhook-Signature": signature,
                "X-Twilio-Email-Event-Webhook-Timestamp": timestamp,
            },
        )


def _event(email_id: str, kind: str) -> dict[str, Any]:
    return {
        "email": f"customer{email_id[-6:]}@example.org",
        "timestamp": int(time.time()),
        "smtp-id": f"<{email_id}@example.com>",
        "event": kind,
        "sg_event_id": base64.b64encode(f"{kind}-{email_id}".encode()).decode(),
        "sg_message_id": f"{email_id[:22]}.filterdrecv-5f5fc76c-9.0",
        "email_id": email_id,
        "response": "250 2.0.0 OK  1764000000 d2e1a72fcca58-7b0f8b2c3a5si1234567b3a.99 - gsmtp",
        "useragent": "Mozilla/5.0 (Windows NT 5.1; rv:11.0) Gecko Firefox/11.0 (via ggpht.com GoogleImageProxy)",
        "ip": "192.0.2.17",
        "tls": 1,
    }


async def _post(
    client: Client, url: str, body: bytes, headers: Mapping[str, str], scheduled_at: float
) -> tuple[int, float]:
    request = client.post(url).body_bytes(body)
    for name, value in headers.items():
        request = request.header(name, value)
    response = await request.build().send()
    await response.bytes()
    return response.status, asyncio.get_running_loop().time() - scheduled_at


@contextmanager
def _api(scene: Stage, key: ec.EllipticCurvePrivateKey) -> Iterator[tuple[int, int]]:
    """Run the API; yields its port and its process id."""
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    more = {
        "DISPATCHER_API_ADDRESS": "127.0.0.1:0",
        "DISPATCHER_API_ALLOW_ANONYMOUS": "on",
        "DISPATCHER_RUN_DIR": str(scene.folder / "api"),
        "DISPATCHER_SENDGRID_EVENTS_KEYS": base64.b64encode(public).decode(),
    }
    command = [sys.executable, "-m", "dispatcher.cli.main", "api"]
    with subprocess.Popen(command, env={**scene.environment, **more}, stdout=subprocess.PIPE) as api:
        assert api.stdout is not None
        try:
            yield int(json.loads(api.stdout.readline())["listener"].rpartition(":")[2]), api.pid
        finally:
            api.terminate()
            api.stdout.read()


def _count(database_url: str, table: str = "email_attempt") -> int:
    counting = sql.SQL("select count(*) from dispatcher.{}").format(sql.Identifier(table))
    with psycopg.connect(database_url) as connection:
        row = connection.execute(counting).fetchone()
    assert row is not None
    count: int = row[0]
    return count


def _sent_ids(database_url: str, count: int) -> list[str]:
    """Emails that are sent and have no events yet."""
    with psycopg.connect(database_url) as connection:
        found = connection.execute(
            "select email_id from dispatcher.email_log where status = 'sent'"
            " and not exists (select from dispatcher.email_event as v where v.email_id = email_log.email_id)"
            " order by email_id desc limit %s",
            [count],
        ).fetchall()
    return [str(email_id) for (email_id,) in found]


def _table(windows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Events stored by one API process beside sending")
    for column in ("window", "events/s", "sent/s", "p50 ms", "p99 ms", "API µs/event", "responses", "missing"):
        table.add_column(column, justify="left" if column == "window" else "right")
    for window in windows:
        table.add_row(
            "with events" if window["posted"] else "without",
            f"{window['events_per_second']:,.0f}",
            f"{window['sent_per_second']:,.0f}",
            f"{window['p50_ms']:.1f}",
            f"{window['p99_ms']:.1f}",
            f"{window['api_cpu_us_per_event']:.0f}",
            " ".join(f"{status}: {count}" for status, count in window["statuses"].items()),
            str(window["missing"]),
        )
    with_events, without = (
        statistics.median(each["sent_per_second"] for each in windows if bool(each["posted"]) is has_events)
        for has_events in (True, False)
    )
    table.caption = f"Sending with events is at {100 * with_events / without:.1f} % of sending without."
    return table


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/events.py", description=summary, epilog=details)
    parser.add_argument("--rate", type=float, default=3000.0, metavar="N", help="emails per second; default: 3000")
    parser.add_argument("--events", type=int, default=2000, metavar="N", help="events per second; default: 2000")
    parser.add_argument("--batch", type=int, default=50, metavar="N", help="events per request; default: 50")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="N", help="per window; default: 8")
    parser.add_argument("--repeat", type=int, default=2, metavar="N", help="pairs of windows; default: 2")
    parser.add_argument("--json", action="store_true", help="print one line per window")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
