"""Quiet tenants beside a noisy one, and the relay's scan beside scheduled emails: `python benchmarks/fairness.py`.

In turns: 99 quiet tenants enqueue 50 emails each, alone; and the same while a noisy tenant has 100,000 due emails. The
clock of each quiet email starts at the commit and ends when the SendGrid double accepted the email, by its ledger.
The number of emails that the double accepts in this time is the email's place in the line. Unlike the time, it does not
depend on the speed of the machine.
Then the statement that finds due emails is timed, on a database with a million scheduled emails and a full page of due
ones.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/fairness.py`

from benchmarks.rig import Case, bare_stage, database, wait_until
from dispatcher import Email, enqueue_many
from dispatcher.dev.servers import Servers, private_servers
from dispatcher.relay.pointers import BATCH
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox

QUIET_TENANTS: Final = 99
QUIET_EMAILS: Final = 50
WARM_EMAILS: Final = 5000
SECONDS: Final = 120.0
SCANS: Final = 50
WAITING: Final = """
    insert into dispatcher.email_log (email_id, tenant_id, message_key, status, wait_until, wait_reason)
    select
        (left(dispatcher.email_id_lowest_at(now())::text, 24) || lpad(to_hex(n), 12, '0'))::uuid,
        'tenant-' || n %% 100, 'scheduled-' || n, 'waiting', now() + n * interval '1 second', 'scheduled'
    from generate_series(1, %s) as n
"""


def main() -> int:
    """Runs the cases and prints their figures; the exit code is 1 if a quiet email was not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noisy", type=int, default=100_000, metavar="N", help="due emails of the noisy tenant")
    parser.add_argument("--scheduled", type=int, default=1_000_000, metavar="N", help="scheduled emails")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default: 3")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, private_servers(Path(folder) / "servers") as servers:
        p99s: dict[int, list[float]] = {0: [], given.noisy: []}
        for turn in range(given.repeat):
            for noisy, found in p99s.items():
                latencies, places = _quiet_emails(servers, Path(folder) / f"{turn}-{noisy}", noisy, given.workers)
                found.append(statistics.quantiles(latencies, n=100)[98])
                print(
                    f"{noisy:,} noisy: p50 {statistics.median(latencies):.3f} s, p99 {found[-1]:.3f} s;"
                    f" place in the line: p50 {statistics.median(places):,.0f},"
                    f" p99 {statistics.quantiles(places, n=100)[98]:,.0f}",
                    flush=True,
                )
        alone, beside = (statistics.median(found) for found in p99s.values())
        print(f"quiet tenants' p99 beside the noisy tenant: {beside / alone:.2f} times as long as alone (medians)")
        if given.scheduled:
            seconds = asyncio.run(_scan_seconds(servers, given.scheduled))
            print(f"find_publish_due of {BATCH} beside {given.scheduled:,} scheduled: median {seconds * 1000:.2f} ms")
    return 0


def _quiet_emails(servers: Servers, folder: Path, noisy: int, workers: int) -> tuple[list[float], list[int]]:
    """The latency of each quiet email, and its place in the line."""
    case = Case(provider="sendgrid", workers=workers, emails=0)
    with database(servers) as database_url, bare_stage(servers, case, folder, database_url) as scene:
        with psycopg.connect(database_url) as connection:
            for start in range(0, noisy, 1000):
                enqueue_many(connection, _emails("noisy", range(start, min(start + 1000, noisy))))
        with scene.running("run"), psycopg.connect(database_url) as connection:
            # The workers' connections to the provider are open, and the noisy tenant's emails are being sent, if any.
            enqueue_many(connection, _emails("warm", range(WARM_EMAILS)))
            connection.commit()
            wait_until(lambda: len(scene.double.acceptances()) >= WARM_EMAILS, SECONDS)
            quiet = [
                str(answer.email_id)
                for number in range(QUIET_TENANTS)
                for answer in enqueue_many(connection, _emails(f"quiet-{number}", range(QUIET_EMAILS)))
            ]
            connection.commit()
            committed_at = time.time()
            wait_until(lambda: scene.double.acceptances().keys() >= set(quiet), SECONDS)
            accepted = scene.double.acceptances()
            _discard_rest(connection)
        line = sorted(instants[0] for instants in accepted.values() if instants[0] >= committed_at)
        accepted_at = [accepted[email_id][0] for email_id in quiet]
        return [at - committed_at for at in accepted_at], [bisect.bisect_right(line, at) for at in accepted_at]


def _emails(tenant_id: str, numbers: range) -> list[Email]:
    return [
        Email(
            message_key=f"{tenant_id}-{number}",
            tenant_id=tenant_id,
            sender="shop@example.com",
            to=f"customer-{number}@example.org",
            subject="Your receipt",
            text="Thank you for your order.",
        )
        for number in numbers
    ]


def _discard_rest(connection: psycopg.Connection) -> None:
    """Ends the noisy tenant's emails, so that the dispatcher drains at once."""
    connection.execute(
        "update dispatcher.email_log set status = 'failed', publish_due_at = null"
        " where status = 'pending' and publish_due_at is not null"
    )
    connection.commit()


async def _scan_seconds(servers: Servers, scheduled: int) -> float:
    with database(servers) as database_url:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(WAITING, [scheduled])
            enqueue_many(connection, _emails("due", range(BATCH)))
            connection.execute("vacuum analyze dispatcher.email_log")
        async with await connect_async(database_url, name="benchmark relay", keeps_plans=True) as session:
            outbox = Outbox(session)
            seconds = []
            for _ in range(SCANS):
                began_at = time.perf_counter()
                found = await outbox.find_publish_due(BATCH)
                seconds.append(time.perf_counter() - began_at)
                assert len(found) == BATCH
        return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
