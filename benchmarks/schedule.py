"""How late scheduled emails are: `python benchmarks/schedule.py`.

`dispatcher run` sends through the SendGrid double. First, emails are scheduled at a steady rate over some time. Then,
many emails are scheduled for the same second, while another tenant enqueues emails to be sent at once. The lateness of
an email is the time from its send_at, or else from its enqueue, until its acceptance is recorded. PostgreSQL, RabbitMQ
and all processes share the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/schedule.py`

from benchmarks.machine import machine
from benchmarks.rig import Case, Stage, drafts, stage, wait_until
from dispatcher import Email, enqueue_many
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.store.connections import connected

AHEAD_SECONDS: Final = 2.0
LIMIT_SECONDS: Final = 300.0
DIRECT_PER_SECOND: Final = 20
_LATENESS: Final = """
    select
        count(*) filter (where status <> 'sent'),
        count(*),
        percentile_cont(array[0.5, 0.99, 1]) within group (order by extract(epoch from late))
    from dispatcher.email_log
    cross join lateral (select sent_at - coalesce(due_since, created_at) as late) as l
    where message_key like %s
"""


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log) as servers,
    ):
        found = _measure(servers, options, Path(folder) / "case")
    if options.json:
        sys.stdout.write("".join(json.dumps({**each, **machine()}) + "\n" for each in found))
    else:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(found))
    if any(each["unsent"] for each in found):
        sys.exit("Emails were not sent: see the column unsent.")


def _measure(servers: Servers, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    with stage(servers, Case("sendgrid", options.workers, 100), folder) as scene, scene.running("run"):
        _await_sent(scene, "receipt-%")
        return [_spread(scene, options), *_burst(scene, options)]


def _spread(scene: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Emails that are scheduled at a steady rate."""
    first_at = datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS)
    count = int(options.rate * options.seconds)
    _enqueue(scene, _scheduled("spread", [first_at + timedelta(seconds=n / options.rate) for n in range(count)]))
    _await_sent(scene, "spread-%")
    return _lateness(scene, "spread", f"{options.rate:g} per second")


def _burst(scene: Stage, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Emails that are scheduled for the same second, and a few that another tenant enqueues meanwhile."""
    # The emails must be in the tables before their time.
    send_at = datetime.now(UTC) + timedelta(seconds=AHEAD_SECONDS + options.burst / 2500)
    _enqueue(scene, _scheduled("burst", [send_at + timedelta(seconds=n / options.burst) for n in range(options.burst)]))
    if datetime.now(UTC) > send_at:
        raise SystemExit("Enqueueing took longer than expected. Use a smaller --burst.")
    time.sleep(max(0.0, (send_at - datetime.now(UTC)).total_seconds()))
    with connected(scene.database_url) as connection:
        connection.autocommit = True
        number = 0
        while _unsent(connection, "burst-%"):
            (email,) = drafts(1, f"direct-{number}")
            enqueue_many(connection, [Email.from_json(email.to_json() | {"tenant_id": "another"})])
            number += 1
            time.sleep(1 / DIRECT_PER_SECOND)
    _await_sent(scene, "direct-%")
    yield _lateness(scene, "burst", f"{options.burst:,} in one second")
    yield _lateness(scene, "direct", "sent at once, by another tenant")


def _scheduled(prefix: str, instants: Sequence[datetime]) -> list[Email]:
    emails = drafts(len(instants), prefix)
    return [
        Email.from_json(email.to_json() | {"send_at": instant.isoformat()})
        for email, instant in zip(emails, instants, strict=True)
    ]


def _enqueue(scene: Stage, emails: Sequence[Email]) -> None:
    with connected(scene.database_url) as connection:
        enqueue_many(connection, emails)


def _await_sent(scene: Stage, pattern: str) -> None:
    with connected(scene.database_url) as connection:
        connection.autocommit = True
        wait_until(lambda: not _unsent(connection, pattern), LIMIT_SECONDS)


def _unsent(connection: psycopg.Connection[Any], pattern: str) -> bool:
    statement = (
        "select from dispatcher.email_log"
        " where status in ('pending', 'waiting', 'sending') and message_key like %s limit 1"
    )
    return bool(connection.execute(statement, [pattern]).fetchall())


def _lateness(scene: Stage, prefix: str, name: str) -> dict[str, Any]:
    with connected(scene.database_url) as connection:
        row = connection.execute(_LATENESS, [f"{prefix}-%"]).fetchone()
    assert row is not None
    unsent, count, (p50, p99, longest) = row
    return {"emails": count, "schedule": name, "unsent": unsent, "p50": p50, "p99": p99, "longest": longest}


def _table(found: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Lateness of scheduled emails, in seconds")
    for column in ("schedule", "emails", "p50", "p99", "longest", "unsent"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for each in found:
        seconds = [f"{each[name]:.3f}" for name in ("p50", "p99", "longest")]
        table.add_row(each["schedule"], f"{each['emails']:,}", *seconds, str(each["unsent"]))
    return table


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/schedule.py", description=summary, epilog=details)
    parser.add_argument("--rate", type=float, default=100.0, metavar="N", help="emails per second; default: 100")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="N", help="at that rate; default: 20")
    parser.add_argument("--burst", type=int, default=100_000, metavar="N", help="in one second; default: 100,000")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--json", action="store_true", help="print one line per schedule")
    return parser.parse_args()


if __name__ == "__main__":
    main()
