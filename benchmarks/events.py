"""Provider events that one API process stores beside sending: `python benchmarks/events.py --events 2000`.

First, `dispatcher run` sends a backlog through the SendGrid double. Then emails arrive at the rate of this backlog, in
an open loop (see `open_loop`): another process enqueues them in batches, by a schedule. The rate at which they are sent
is the capacity of the machine, which also enqueues. Then emails arrive at half of the capacity, or at `--rate`, so
every email that a stall delays must still be sent. With `--ahead`, all emails of a window are enqueued before it and
become due by the schedule. Then no CPU goes into enqueueing, and the default rate is half of the backlog's.

Time windows without events and with events take turns (A B B A). With events, another process posts SendGrid's batches,
signed, also by a schedule, to a real `dispatcher api`. The events are about emails that are sent. PostgreSQL, RabbitMQ,
the double and all other processes share the machine. The rates and the latencies are those of the double's ledger.
After each window, every event must be in the database.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import secrets
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
from pyreqwest.client import Client, ClientBuilder
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/events.py`

from benchmarks.capacity import server_pids
from benchmarks.cpu import read_cpu
from benchmarks.double import WRITE_SECONDS
from benchmarks.figures import latencies_ms, percentile
from benchmarks.machine import machine
from benchmarks.open_loop import read_arrivals
from benchmarks.rig import Case, Stage, stage, wait_until
from dispatcher.dev.servers import Servers, private_servers

KINDS: Final = ("processed", "delivered", "open", "click")
START_SECONDS: Final = 5.0
"""Until arrivals and events start: the processes prepare their emails and sign their requests."""
AHEAD_SECONDS: Final = 15.0
"""The same, if all emails are enqueued before the start."""
WARM_UP_SECONDS: Final = 2.0
"""How long emails arrive, with or without events, before a window is measured."""
WARM_UP_SHARE: Final = 0.3
END_SHARE: Final = 0.95
"""The capacity is measured between these shares of the backlog: the first emails start the workers."""
DRAIN_SECONDS: Final = 60.0
HELD_SHARE: Final = 0.99
"""Below this share of the arrivals' rate, even without events, the machine cannot send as many emails as arrive."""


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
        capacity, windows = _measure(servers, options, Path(folder) / "case", console)
    if options.json:
        facts = {"capacity_per_second": capacity, **machine()}
        sys.stdout.write("".join(json.dumps({**window, **facts}) + "\n" for window in windows))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(capacity, windows))
    if any(window["missing"] or set(window["statuses"]) - {"204"} for window in windows if window["posted"]):
        sys.exit("Events were refused or are missing: see the columns responses and missing.")


def _measure(
    servers: Servers, options: argparse.Namespace, folder: Path, console: Console
) -> tuple[float, list[dict[str, Any]]]:
    case = Case("sendgrid", options.workers, options.emails)
    key = ec.generate_private_key(ec.SECP256R1())
    with stage(servers, case, folder) as scene, _api(scene, key) as (port, api), scene.running("run") as run:
        _drain(scene)
        backlog = _capacity(scene)
        assert scene.double.pid is not None
        roots = {**server_pids(servers), "api": api, "run": run, "double": scene.double.pid}
        capacity = backlog
        if not options.ahead:
            capacity = _window(scene, options, roots, port, key, backlog, 0)["sent_per_second"]
        rate = options.rate or capacity / 2
        console.log(f"{backlog:,.0f} emails/s from a backlog, capacity {capacity:,.0f}; now {rate:,.0f} arrive")
        windows = []
        for pair in range(options.repeat):
            for events in (0, options.events) if pair % 2 == 0 else (options.events, 0):
                windows.append({"pair": pair + 1, **_window(scene, options, roots, port, key, rate, events)})
                console.log(_row(windows[-1]))
    return capacity, windows


def _drain(scene: Stage) -> None:
    """Wait until all emails are sent and the double has written its ledger."""
    with psycopg.connect(scene.database_url, autocommit=True) as connection:
        left = "select count(*) from dispatcher.email_log where status in ('pending', 'sending')"
        wait_until(lambda: connection.execute(left).fetchone() == (0,), DRAIN_SECONDS)
    time.sleep(2 * WRITE_SECONDS)


def _capacity(scene: Stage) -> float:
    """The rate at which the double accepted the emails of the backlog."""
    instants = sorted(instants[0] for instants in scene.double.acceptances().values())
    first, last = int(len(instants) * WARM_UP_SHARE), int(len(instants) * END_SHARE)
    return (last - first) / (instants[last] - instants[first])


def _window(
    scene: Stage,
    options: argparse.Namespace,
    roots: Mapping[str, int],
    port: int,
    key: ec.EllipticCurvePrivateKey,
    rate: float,
    events: int,
) -> dict[str, Any]:
    """One measured time window: emails arrive at this rate, and so many events per second."""
    seconds = WARM_UP_SECONDS + options.seconds
    ids = _sent_ids(scene.database_url, int(events * seconds / len(KINDS)) + options.batch) if events else []
    stored = _count_events(scene.database_url)
    starts_at = time.time() + (AHEAD_SECONDS if options.ahead else START_SECONDS)
    began_at, ended_at = starts_at + WARM_UP_SECONDS, starts_at + seconds
    with _arriving(scene, options, rate, int(rate * seconds), starts_at) as arrivals:
        load = _posting(options, port, key, ids, events, seconds, starts_at) if events else None
        processes = {**roots, "arrivals": arrivals.pid, **({"load": load.pid} if load else {})}
        time.sleep(began_at - time.time())
        before = read_cpu(processes)
        time.sleep(ended_at - time.time())
        after = read_cpu(processes)
        posted: dict[str, Any] = {"posted": 0, "statuses": {}, "events_per_second": 0.0}
        if load:
            posted = json.loads(load.communicate()[0])
        if arrivals.wait(DRAIN_SECONDS) or (load and load.returncode):
            raise RuntimeError("the process that enqueues emails or posts events has failed")
    _drain(scene)
    used = {name: after[name] - before.get(name, 0.0) for name in after}
    return {
        **posted,
        **_sending(scene, began_at, ended_at),
        "missing": posted["posted"] - (_count_events(scene.database_url) - stored),
        "api_cpu_us_per_event": 1e6 * used["api"] / (events * options.seconds) if events else 0.0,
        "cpu_seconds": used,
    }


def _sending(scene: Stage, began_at: float, ended_at: float) -> dict[str, float]:
    """The rates of arrivals and acceptances in the window, and the latency of the emails that arrived in it."""
    scheduled = {
        email_id: instant
        for email_id, (instant, _) in read_arrivals((scene.folder / "arrivals.txt").read_text()).items()
        if began_at <= instant < ended_at
    }
    accepted = scene.double.acceptances()
    count = sum(began_at <= instants[0] < ended_at for instants in accepted.values())
    latencies = latencies_ms(scheduled, accepted)
    if len(latencies) < len(scheduled):
        raise RuntimeError(f"{len(scheduled) - len(latencies)} emails were not accepted")
    return {
        "arrived_per_second": len(scheduled) / (ended_at - began_at),
        "sent_per_second": count / (ended_at - began_at),
        "email_p50_ms": percentile(latencies, 50),
        "email_p99_ms": percentile(latencies, 99),
    }


@contextmanager
def _arriving(
    scene: Stage, options: argparse.Namespace, rate: float, emails: int, starts_at: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Enqueue emails in an open loop, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.open_loop", "--rate", str(rate), "--emails", str(emails)]
    command += ["--batch", str(options.arrive), "--starts-at", str(starts_at), "--seed", str(secrets.randbelow(2**31))]
    command += ["--ahead"] if options.ahead else []
    here = Path(__file__).resolve().parent.parent
    with (
        (scene.folder / "arrivals.txt").open("wb") as file,
        subprocess.Popen(command, stdout=file, cwd=here, env=scene.environment) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


def _posting(
    options: argparse.Namespace,
    port: int,
    key: ec.EllipticCurvePrivateKey,
    ids: Sequence[str],
    events: int,
    seconds: float,
    starts_at: float,
) -> subprocess.Popen[bytes]:
    der = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    asked = {
        "port": port,
        "key": base64.b64encode(der).decode(),
        "ids": ids,
        "batch": options.batch,
        "per_second": events,
        "seconds": seconds,
        "starts_at": starts_at,
    }
    load = subprocess.Popen([sys.executable, __file__, "--load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert load.stdin is not None
    load.stdin.write(json.dumps(asked).encode())
    load.stdin.close()
    load.stdin = None  # `communicate` would flush it
    return load


async def _load(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Posts signed batches by a schedule, in a process of its own; the bodies are signed before the first post."""
    requests = list(_requests(asked))
    interval = asked["batch"] / asked["per_second"]
    url = f"http://127.0.0.1:{asked['port']}/v1/events/sendgrid"
    async with ClientBuilder().pool_max_idle_per_host(100).build() as client:
        loop = asyncio.get_running_loop()
        began_at = loop.time() + asked["starts_at"] - time.time()
        posts = []
        for number, (body, headers) in enumerate(requests):
            scheduled_at = began_at + number * interval
            await asyncio.sleep(max(0.0, scheduled_at - loop.time()))
            posts.append(asyncio.create_task(_post(client, url, body, headers, scheduled_at)))
        found = await asyncio.gather(*posts)
    durations = sorted(duration for _, duration in found)
    return {
        "posted": len(requests) * asked["batch"],
        "events_per_second": asked["per_second"],
        "statuses": dict(Counter(str(status) for status, _ in found)),
        "post_p50_ms": 1000 * percentile(durations, 50),
        "post_p99_ms": 1000 * percentile(durations, 99),
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


def _count_events(database_url: str) -> int:
    with psycopg.connect(database_url) as connection:
        row = connection.execute("select count(*) from dispatcher.email_event").fetchone()
    assert row is not None
    return int(row[0])


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


def _table(capacity: float, windows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"Events stored by one API process beside sending; capacity {capacity:,.0f} emails/s")
    for column in _row(windows[0]):
        table.add_column(column, justify="left" if column == "window" else "right")
    for window in windows:
        table.add_row(*_row(window).values())
    ratios = [_ratio(windows, pair) for pair in sorted({window["pair"] for window in windows})]
    table.caption = (
        "Emails/s with events, of emails/s without, by pair: "
        + ", ".join(f"{100 * ratio:.1f} %" for ratio in ratios)
        + f"; median {100 * statistics.median(ratios):.1f} %."
    )
    if any(w["sent_per_second"] < HELD_SHARE * w["arrived_per_second"] for w in windows if not w["posted"]):
        table.caption += " Even without events, emails arrive faster than they are sent: set a lower --rate."
    return table


def _ratio(windows: Sequence[Mapping[str, Any]], pair: int) -> float:
    rates = {bool(window["posted"]): window["sent_per_second"] for window in windows if window["pair"] == pair}
    return float(rates[True] / rates[False])


def _row(window: Mapping[str, Any]) -> dict[str, str]:
    """A window as texts, by the names of the columns."""
    used, has_events = window["cpu_seconds"], bool(window["posted"])
    return {
        "window": f"{window['pair']} {'with events' if has_events else 'without'}",
        "arrived/s": f"{window['arrived_per_second']:,.1f}",
        "sent/s": f"{window['sent_per_second']:,.1f}",
        "p50, p99 ms": f"{window['email_p50_ms']:.1f}, {window['email_p99_ms']:.1f}",
        "events/s": f"{window['events_per_second']:,.0f}",
        "post p50, p99 ms": f"{window['post_p50_ms']:.1f}, {window['post_p99_ms']:.1f}" if has_events else "",
        "API µs/event": f"{window['api_cpu_us_per_event']:.0f}" if has_events else "",
        "CPU s: machine, postgresql": f"{used['machine']:.1f}, {used['postgresql']:.1f}",
        "responses": " ".join(f"{status}: {count}" for status, count in window["statuses"].items()),
        "missing": str(window["missing"]),
    }


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/events.py", description=summary, epilog=details)
    parser.add_argument("--rate", type=float, metavar="N", help="emails per second; default: half of the capacity")
    parser.add_argument("--arrive", type=int, default=50, metavar="N", help="emails that arrive together; default: 50")
    parser.add_argument("--ahead", action="store_true", help="enqueue the emails of each window before it")
    parser.add_argument("--events", type=int, default=2000, metavar="N", help="events per second; default: 2000")
    parser.add_argument("--batch", type=int, default=50, metavar="N", help="events per request; default: 50")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--emails", type=int, default=40_000, metavar="N", help="the backlog; default: 40000")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="per window; default: 10")
    parser.add_argument("--repeat", type=int, default=4, metavar="N", help="pairs of windows; default: 4")
    parser.add_argument("--json", action="store_true", help="print one line per window")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
