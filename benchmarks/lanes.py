"""Measures urgent emails behind a bulk backlog under a rate ceiling: `python benchmarks/lanes.py --hosts 1 2`.

Bulk emails are enqueued first. After the hosts have sent bulk emails alone for a while, urgent emails are enqueued one
by one, evenly over a minute, and each is committed. With `--sms`, the urgent messages are SMS. The benchmark prints the
time from the commit to the acceptance of the urgent messages, and the rate of the bulk emails before and meanwhile.
`--bulk 1000000` is the backlog of the requirement; the default is smaller, because enqueueing takes minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/lanes.py`

from benchmarks.doubles import Double, running_double
from benchmarks.rig import Case, Stage, bare_stage, database, wait_until
from dispatcher import Email, Sms, enqueue, enqueue_many
from dispatcher.dev.acceptance_ledger import read_ledger
from dispatcher.dev.servers import private_servers
from dispatcher.store.connections import connected

ALONE_SECONDS = 15.0
BATCH = 10_000


def main() -> None:
    """The command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/lanes.py", description=summary, epilog=details)
    parser.add_argument("--bulk", type=int, default=100_000, metavar="N", help="the backlog; default: 100000")
    parser.add_argument("--urgent", type=int, default=1000, metavar="N", help="urgent emails; default: 1000")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="their time; default: 60")
    parser.add_argument("--ceiling", type=float, default=100.0, metavar="N", help="emails per second; default: 100")
    parser.add_argument("--latency-ms", type=float, default=20.0, metavar="N", help="of the provider; default: 20")
    parser.add_argument(
        "--no-ceiling", action="store_true", help="no rate limit: the provider's latency limits the rate"
    )
    parser.add_argument("--sms", action="store_true", help="the urgent messages are SMS, by a local Twilio")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2], metavar="N", help="default: 1 2")
    options = parser.parse_args()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-bench-") as name,
        private_servers(Path(name) / "servers", progress=console.log) as servers,
    ):
        for hosts in options.hosts:
            case = Case("smtp", 2, options.bulk, latency_ms=options.latency_ms)
            with (
                database(servers) as database_url,
                bare_stage(servers, case, Path(name) / f"hosts-{hosts}", database_url) as scene,
                running_double("twilio", Path(name) / f"hosts-{hosts}", options.latency_ms) as twilio,
            ):
                _enqueue_bulk(scene, options.bulk, console)
                Console().print_json(json.dumps(_measure(scene, twilio, hosts, options, console)))


def _email(lane: str, number: int) -> Email:
    return Email(
        message_key=f"{lane}-{number}",
        sender="Shop <shop@example.com>",
        to=[f"customer-{number}@example.org"],
        subject="Your code" if lane == "urgent" else "Our news",
        text="Hello, this is the text of an email.\n" * 10,
        lane=lane,
    )


def _sms(number: int) -> Sms:
    return Sms(
        message_key=f"urgent-{number}",
        to=f"+4915112{number % 1_000_000:06}",
        text=f"{number} is your code.",
        lane="urgent",
    )


def _enqueue_bulk(scene: Stage, emails: int, console: Console) -> None:
    console.log(f"enqueueing {emails:,} bulk emails")
    with connected(scene.database_url) as connection:
        for start in range(0, emails, BATCH):
            batch = [_email("bulk", number) for number in range(start, min(emails, start + BATCH))]
            with connection.transaction():
                enqueue_many(connection, batch)
        connection.execute("vacuum analyze")


def _measure(scene: Stage, twilio: Double, hosts: int, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    limit = {} if options.no_ceiling else {"DISPATCHER_SMTP_MAX_PER_SECOND": str(options.ceiling)}
    limit |= twilio.environment if options.sms else {}
    ledger = scene.folder / "sink" / "ledger.jsonl"
    with contextlib.ExitStack() as stack:
        for host in range(hosts):
            stack.enter_context(scene.running(f"host-{host}", limit))
        wait_until(lambda: ledger.exists() and len(read_ledger(ledger).entries) > 0, 60)
        time.sleep(3)
        alone_from = time.time()
        time.sleep(ALONE_SECONDS)
        urgent_from = time.time()
        console.log(f"{hosts} host(s): {options.urgent:,} urgent emails over {options.seconds:g} s")
        committed = _enqueue_urgent(scene, options)
        urgent_until = time.time()
        wait_until(lambda: committed.keys() <= _accepted(scene, twilio, ledger).keys(), 60)
        accepted = _accepted(scene, twilio, ledger)
    waits = sorted(accepted[email_id] - at for email_id, at in committed.items())
    bulk = [at for email_id, at in accepted.items() if email_id not in committed]
    alone = sum(alone_from <= at < urgent_from for at in bulk) / (urgent_from - alone_from)
    beside = sum(urgent_from <= at < urgent_until for at in bulk) / (urgent_until - urgent_from)
    percentiles = statistics.quantiles(waits, n=100)
    return {
        "hosts": hosts,
        "bulk_backlog": options.bulk,
        "ceiling": None if options.no_ceiling else options.ceiling,
        "urgent": len(waits),
        "urgent_are_sms": options.sms,
        "commit_to_accepted_seconds": {
            "p50": round(percentiles[49], 3),
            "p99": round(percentiles[98], 3),
            "max": round(waits[-1], 3),
        },
        "bulk_per_second": {"alone": round(alone, 1), "beside_urgent": round(beside, 1)},
        "bulk_share_kept": round(beside / alone, 3),
    }


def _enqueue_urgent(scene: Stage, options: argparse.Namespace) -> dict[str, float]:
    """Enqueues the urgent messages evenly; returns when each was committed, by id."""
    committed: dict[str, float] = {}
    began = time.monotonic()
    with connected(scene.database_url) as connection:
        for number in range(options.urgent):
            time.sleep(max(0.0, began + number * options.seconds / options.urgent - time.monotonic()))
            answer = enqueue(connection, _sms(number) if options.sms else _email("urgent", number))
            committed[str(answer.email_id)] = time.time()
    return committed


def _accepted(scene: Stage, twilio: Double, ledger: Path) -> dict[str, float]:
    """When each email or SMS was accepted first, by id."""
    found = scene.double.acceptances() if ledger.exists() else {}
    return {name: min(instants) for name, instants in (*found.items(), *twilio.acceptances().items())}


if __name__ == "__main__":
    main()
