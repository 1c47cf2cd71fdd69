"""Measures the operators' page: `python benchmarks/ops_page.py --emails 1000000`.

Fills the tables with finished emails by SQL, adds a backlog, dead letters, held emails, a month of hourly counts and
the statistics of 400 tenants, and starts a real `dispatcher api`. Then it measures:

- how long the server takes for the Overview if each request reads all figures again (requests are more than a second
  apart), and if several viewers share an answer;
- how long it takes for each other page;
- the CPU time that open pages cost, each refreshing every five seconds: of the API and of PostgreSQL, as a share of
  all cores. Sending that uses all cores loses at most this share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import psycopg
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/ops_page.py`

from benchmarks.capacity import server_pids
from benchmarks.cpu import read_cpu
from benchmarks.machine import machine
from benchmarks.preload import preload
from benchmarks.rig import Case, Stage, bare_stage, database
from dispatcher.dev.servers import private_servers
from dispatcher.domain.api_key import Secret

REFRESH_SECONDS: Final = 5.0
_FILL: Final = (
    """
    insert into dispatcher.email_log (email_id, tenant_id, message_key, status, created_at, publish_due_at, error_type)
    select
        (lpad(to_hex((extract(epoch from now() - n * interval '1 millisecond') * 1000)::bigint), 12, '0')
            || '7' || substr(md5(random()::text), 1, 3) || 'a' || substr(md5(random()::text), 1, 15))::uuid,
        'tenant-' || n % 50, 'unsent-' || n,
        case when n <= 40000 then 'pending' when n <= 41000 then 'failed' else 'held' end, now(),
        case when n <= 40000 then now() end,
        case when n > 40000 then 'rejected_recipient' end
    from generate_series(1, 41500) as n
    """,
    """
    insert into dispatcher.email_hourly
    select date_trunc('hour', now() - hour * interval '1 hour', 'UTC'), provider, outcome, 'host-1:w' || slot, 1000
    from generate_series(0, 31 * 24) as hour,
        unnest(array['sendgrid', 'ses']) as provider,
        unnest(array['accepted', 'deferred', 'rejected']) as outcome,
        generate_series(1, 8) as slot
    """,
    """
    insert into dispatcher.minute_sample
    select
        date_trunc('minute', now() - n * interval '1 minute'), now(), '{"pending": 40000}', 1, 1,
        '{"normal": {"messages": 1000, "workers": 8}}', '{"accepted": 1000}', now(), '{}'
    from generate_series(0, 60) as n
    """,
    """
    insert into dispatcher.email_stat
    select
        is_day, begins_at, 'tenant-' || tenant, lane, provider, '(none)', 1000, 10, 0, 0, 900, 0, 0, 0, 20, 10, 5, 5, 0,
        1
    from generate_series(1, 400) as tenant,
        unnest(array['normal', 'bulk']) as lane,
        unnest(array['sendgrid', 'ses']) as provider,
        (
            select false as is_day, date_trunc('hour', now() - n * interval '1 hour', 'UTC') as begins_at
            from generate_series(0, 7 * 24) as n
            union all
            select true, date_trunc('day', now() - n * interval '1 day', 'UTC')
            from generate_series(0, 31) as n
        ) as period
    """,
    "vacuum (analyze) dispatcher.email_stat",
    "vacuum (analyze) dispatcher.email_log",
    "vacuum (analyze) dispatcher.email_hourly",
)
PAGES: Final = (
    *("/?range=day&split=tenant", "/?range=month&split=lane", "/stats?per=tenant", "/stats?per=day", "/tenants"),
    *("/emails", "/emails?status=pending", "/emails?tenant=tenant-7", "/emails?status=failed&since=24h"),
    *("/emails?q=nobody%40example.org", "/dead-letters?status=failed", "/dead-letters?by=tenant", "/held", "/events"),
    *("/suppressions", "/replays", "/replays/new?error_type=rejected_recipient", "/lanes", "/pauses", "/webhooks"),
)


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as name,
        private_servers(Path(name) / "servers", progress=console.log) as servers,
        database(servers) as database_url,
        bare_stage(servers, Case("capture", 1, 0), Path(name) / "stage", database_url) as scene,
    ):
        console.log(f"inserting {options.emails:,} emails")
        preload(database_url, options.emails)
        key = _fill(database_url)
        with _api(scene) as (port, api_pid):
            cookie = _sign_in(port, key)
            alone = [_seconds(port, cookie, after=1.2) for _ in range(options.requests)]
            shared = [_seconds(port, cookie, after=0.0) for _ in range(options.requests)]
            pages = {path: [_seconds(port, cookie, path, after=0.1) for _ in range(options.requests)] for path in PAGES}
            roots = {**server_pids(servers), "api": api_pid}
            idle = asyncio.run(_cpu_with_viewers(port, cookie, 0, options.seconds, roots))
            busy = asyncio.run(_cpu_with_viewers(port, cookie, options.viewers, options.seconds, roots))
    result = {
        "emails": options.emails,
        "read_p50_ms": 1000 * statistics.median(alone),
        "read_longest_ms": 1000 * max(alone),
        "shared_p50_ms": 1000 * statistics.median(shared),
        "pages_p50_ms": {path: round(1000 * statistics.median(each), 1) for path, each in pages.items()},
        "viewers": options.viewers,
        "viewers_share_of_cores_percent": {
            name: round(100 * (busy[name] - idle[name]) / options.seconds / int(str(machine()["cores"])), 2)
            for name in ("api", "postgresql")
        },
        **machine(),
    }
    sys.stdout.write(f"{json.dumps(result)}\n")


def _fill(database_url: str) -> str:
    """Adds unsent emails, hourly counts, samples, and an operator's key; returns the key."""
    secret = Secret.new()
    with psycopg.connect(database_url, autocommit=True) as connection:
        for statement in _FILL:
            connection.execute(statement.encode())
        connection.execute(
            "insert into dispatcher.api_key (key_id, secret_hash, name, scopes) "
            "values (%s, %s, 'benchmark', '{read,operate}')",
            [secret.key_id, secret.hashed()],
        )
    return secret.text()


@contextmanager
def _api(scene: Stage) -> Iterator[tuple[int, int]]:
    """Runs the API with the operators' page; yields its port and its process id."""
    more = {
        "DISPATCHER_API_ADDRESS": "127.0.0.1:0",
        "DISPATCHER_OPS": "on",
        "DISPATCHER_RUN_DIR": str(scene.folder / "api"),
        "DISPATCHER_LOG_LEVEL": "info",
    }
    command = [sys.executable, "-m", "dispatcher.cli.main", "api"]
    with subprocess.Popen(command, env={**scene.environment, **more}, stdout=subprocess.PIPE) as api:
        assert api.stdout is not None
        try:
            yield int(json.loads(api.stdout.readline())["listener"].rpartition(":")[2]), api.pid
        finally:
            api.terminate()
            api.stdout.read()


def _sign_in(port: int, key: str) -> str:
    """Signs in; returns the cookie."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/ops/sign-in")
    page = connection.getresponse()
    cookie = (page.getheader("set-cookie") or "").partition(";")[0]
    fields = dict(re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', page.read().decode()))
    headers = {
        "Cookie": cookie,
        "Content-Type": "application/x-www-form-urlencoded",
        "Sec-Fetch-Site": "same-origin",
    }
    connection.request("POST", "/ops/sign-in", urlencode({**fields, "key": key}), headers)
    answer = connection.getresponse()
    answer.read()
    if answer.status != 303:
        sys.exit(f"Signing in failed with status {answer.status}.")
    return (answer.getheader("set-cookie") or cookie).partition(";")[0]


def _seconds(port: int, cookie: str, path: str = "/", *, after: float) -> float:
    time.sleep(after)
    connection = HTTPConnection("127.0.0.1", port)
    began_at = time.perf_counter()
    connection.request("GET", f"/ops{path}", headers={"Cookie": cookie})
    answer = connection.getresponse()
    body = answer.read()
    seconds = time.perf_counter() - began_at
    if answer.status != 200 or (path == "/" and b"1,000" not in body):
        sys.exit(f"The page {path} answers with status {answer.status}.")
    return seconds


async def _cpu_with_viewers(
    port: int, cookie: str, viewers: int, seconds: float, roots: dict[str, int]
) -> dict[str, float]:
    """The CPU seconds of the API and of the servers while pages are open."""
    before = read_cpu(roots)
    tasks = [asyncio.create_task(_view(port, cookie, number * REFRESH_SECONDS / viewers)) for number in range(viewers)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    after = read_cpu(roots)
    return {name: after[name] - before[name] for name in after}


async def _view(port: int, cookie: str, after: float) -> None:
    """An open page: refreshes itself as htmx does."""
    request = f"GET /ops/ HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\nHX-Request: true\r\n\r\n".encode()
    await asyncio.sleep(after)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        assert length is not None
        await reader.readexactly(int(length[1]))
        await asyncio.sleep(REFRESH_SECONDS)


def _options(arguments: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--emails", type=int, default=1_000_000, help="finished emails in the tables")
    parser.add_argument("--requests", type=int, default=20, help="timed requests of each kind")
    parser.add_argument("--viewers", type=int, default=50, help="open pages")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the pages are open")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
