"""Measures how long `find` takes among many emails: `python benchmarks/lookup.py --emails 10000000`.

SQL generates the emails on a private PostgreSQL: a few weeks of them, 40 % to one large domain, 1 % failed. Then each
look-up runs repeatedly, without and with the next page. The whole command `dispatcher find` runs as often: a process
for each look-up. 10,000,000 emails take 6 GB of disk and some minutes. The disk's caches stay warm: a first look-up
after a restart of PostgreSQL takes longer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psycopg
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/lookup.py`

from dispatcher.dev.servers import private_servers
from dispatcher.domain.status import Status
from dispatcher.monitor.upkeep import RecipientSummaries
from dispatcher.ops.lookup import find
from dispatcher.store.connections import connect_async, connected
from dispatcher.store.migrations import migrate

CHUNK: Final = 100_000
SETTINGS: Final = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "512MB", "max_wal_size": "4GB"}
"""For the generation. Reading needs none of the guarantees that these settings take away."""
_GENERATE: Final = """
    with made as materialized (
        select
            (
                lpad(to_hex(floor(extract(epoch from at) * 1000)::bigint), 12, '0') || '7'
                || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15)
            )::uuid as email_id,
            n, at,
            case
                when n %% 250000 = 0 then 'ann'
                when n %% 1000 = 1 then 'monitor'
                else 'c' || n %% 1000003
            end as local,
            case
                when n %% 250000 = 0 then 'example.org'
                when n %% 5 < 2 then 'large.example'
                else 'd' || n %% 50021 || '.example'
            end as domain
        from generate_series(%(first)s::bigint, %(last)s::bigint) as n
        cross join lateral (select %(begin)s::timestamptz + n * %(step)s::interval as at offset 0) as clock
    ),
    logged as (
        insert into dispatcher.email_log (
            email_id, tenant_id, message_key, status, attempt_count, correlation_id, error_type, provider, created_at,
            published_at, leased_at, sent_at, settled_at
        )
        select
            email_id, 'tenant-' || n %% 7, 'order-' || n, case when n %% 100 = 7 then 'failed' else 'sent' end, 1,
            case when n %% 10 = 0 then 'run-' || n / 1000 end, case when n %% 100 = 7 then 'refused' end, 'smtp',
            at, at, at, case when n %% 100 <> 7 then at end, case when n %% 100 = 7 then at end
        from made
    )
    insert into dispatcher.email_recipient (email_id, address_hash, domain)
    select given.email_id, given.address_hash, given.domain
    from (
        select
            array_agg(email_id order by n) as ids,
            array_agg(domain order by n) as domains,
            dispatcher.hash_addresses(array_agg(local || '@' || domain order by n)) as hashes
        from made
    ) as whole
    cross join lateral unnest(whole.ids, whole.hashes, whole.domains) as given (email_id, address_hash, domain)
"""

Queries = Mapping[str, Mapping[str, Any]]


def main() -> None:
    """The command line."""
    options = _options()
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-lookup-") as folder,
        private_servers(Path(folder) / "servers", progress=console.log, postgres_settings=SETTINGS) as servers,
    ):
        begin = datetime.now(UTC) - timedelta(weeks=options.weeks)
        with connected(servers.database_url) as connection:
            migrate(connection)
            connection.execute("select dispatcher.email_partitions_make(%s, %s)", [begin, options.weeks])
            connection.commit()
        with psycopg.connect(servers.database_url, autocommit=True) as connection:
            _generate(connection, options.emails, begin, timedelta(weeks=options.weeks) / options.emails, console)
            # As the monitor does hourly. The vacuum can cancel autovacuum while it creates a summary.
            asyncio.run(RecipientSummaries(servers.database_url).run_once())
            sizes = connection.execute(
                "select pg_size_pretty(sum(pg_total_relation_size(relid)))"
                " from pg_partition_tree('dispatcher.email_recipient')"
            ).fetchone()
            console.log(f"email_recipient with its indexes: {sizes[0] if sizes else '?'}")
        table = Table(title=f"Milliseconds per page of 50 among {options.emails:,} emails")
        for column in ("look-up", "first", "median", "slowest", "emails", "next page"):
            table.add_column(column, justify="left" if column == "look-up" else "right")
        queries = _queries(begin, options.weeks)
        for name, row in asyncio.run(_measure(servers.database_url, queries, options.repeat)).items():
            table.add_row(name, *row)
        for name, row in _commands(servers.database_url, options.repeat).items():
            table.add_row(name, *row)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _generate(connection: psycopg.Connection, emails: int, begin: datetime, step: timedelta, console: Console) -> None:
    began = time.monotonic()
    for first in range(1, emails + 1, CHUNK):
        last = min(first + CHUNK - 1, emails)
        connection.execute(_GENERATE, {"first": first, "last": last, "begin": begin, "step": step})
        if last % (10 * CHUNK) == 0 or last == emails:
            console.log(f"{last:,} emails after {time.monotonic() - began:.0f} s")
    connection.execute("vacuum (analyze) dispatcher.email_log, dispatcher.email_recipient")
    console.log(f"vacuumed after {time.monotonic() - began:.0f} s")


def _queries(begin: datetime, weeks: int) -> Queries:
    middle = begin + timedelta(weeks=weeks) / 2
    return {
        "--to: an address": {"recipient": "ann@example.org"},
        "--to: at the large domain": {"recipient": "c1025@large.example"},
        "--to: 1 of 1,000 emails": {"recipient": "monitor@large.example"},
        "--to, --status failed": {"recipient": "monitor@large.example", "status": Status.FAILED},
        "--to: unknown": {"recipient": "nobody@large.example"},
        "--domain": {"domain": "d1025.example"},
        "--domain: the large one": {"domain": "large.example"},
        "--domain: the large one, --until": {"domain": "large.example", "created_before": middle},
        "--domain: the large one, --status failed": {"domain": "large.example", "status": Status.FAILED},
        "--correlation-id": {"correlation_id": "run-77"},
        "--status failed": {"status": Status.FAILED},
        "--status failed --tenant": {"status": Status.FAILED, "tenant_id": "tenant-3"},
        "--tenant: unknown": {"tenant_id": "unknown"},
        "--tag: none has it": {"tag": "receipt"},
    }


async def _measure(database_url: str, queries: Queries, repeat: int) -> dict[str, tuple[str, ...]]:
    rows = {}
    async with await connect_async(database_url, name="benchmark") as session:

        async def timed(query: Mapping[str, Any], cursor: UUID | None = None) -> tuple[float, int, UUID | None]:
            began = time.perf_counter()
            page = await find(session, query, after=cursor)
            return 1000 * (time.perf_counter() - began), len(page.rows), page.next

        for name, query in queries.items():
            first, emails, cursor = await timed(query)
            later = [(await timed(query))[0] for _ in range(repeat)]
            following = f"{(await timed(query, cursor))[0]:.1f}" if cursor else "-"
            rows[name] = (
                *(f"{each:.1f}" for each in (first, statistics.median(later), max(later))),
                str(emails),
                following,
            )
    return rows


def _commands(database_url: str, repeat: int) -> dict[str, tuple[str, ...]]:
    """The whole command, from the start of its process to its exit; and, in turns, the part that is not our code."""
    program = [sys.executable, "-m", "dispatcher", "find", "--to", "ann@example.org", "--json"]
    floor = [sys.executable, "-c", "import click, psycopg"]
    environment = {**os.environ, "DISPATCHER_DATABASE_URL": database_url}

    def timed(words: list[str]) -> float:
        began = time.perf_counter()
        subprocess.run(words, env=environment, check=False, stdout=subprocess.DEVNULL)
        return 1000 * (time.perf_counter() - began)

    names = {"the command `dispatcher find --to`": program, "of which Python, click and psycopg": floor}
    taken = [{name: timed(words) for name, words in names.items()} for _ in range(1 + repeat)]
    rows = {}
    for name in names:
        first, *later = [turn[name] for turn in taken]
        rows[name] = (*(f"{each:.0f}" for each in (first, statistics.median(later), max(later))), "", "")
    return rows


def _options() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="benchmarks/lookup.py", description=summary, epilog=details)
    parser.add_argument("--emails", type=int, default=1_000_000, metavar="N", help="default: 1000000")
    parser.add_argument("--weeks", type=int, default=8, metavar="N", help="spread over this many weeks; default: 8")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="default: 20")
    return parser.parse_args()


if __name__ == "__main__":
    main()
