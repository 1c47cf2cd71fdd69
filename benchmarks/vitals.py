"""Measures a running dispatcher and its servers at one instant, as a flat mapping from names to figures.

worker-0.pss_bytes   email_log.dead_rows   latency.p99_ms   queue.send_messages   wal_bytes …
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psycopg import Connection

from dispatcher.broker.management import Management
from dispatcher.errors import BrokerUnavailable
from dispatcher.store.figures import count_emails, find_oldest_pending

TITLE: Final = re.compile(r"^dispatcher: (run|worker|relay|monitor)(?: (\d+))?")
TABLES: Final = ("email_log", "email_content", "email_attempt", "email_hourly", "email_idempotency")
_KIB: Final = 1024
_YARD: Final = bytes(4 * _KIB * _KIB)
_COMMITS: Final = 9
_TICKS: Final = os.sysconf("SC_CLK_TCK")

# The query adds up the partitions of each table. A sum falls when a partition is dropped.
_TABLES_NOW: Final = r"""
select
    regexp_replace(relname, '_(p\d{8}|default)$', '') as name,
    sum(pg_table_size(relid))::bigint,
    sum(pg_indexes_size(relid))::bigint,
    sum(n_live_tup)::bigint,
    sum(n_dead_tup)::bigint,
    sum(n_tup_upd)::bigint,
    sum(n_tup_hot_upd)::bigint,
    sum(autovacuum_count)::bigint,
    sum(n_tup_ins)::bigint
from pg_stat_user_tables
group by 1
"""
_COLUMNS: Final = (
    "table_bytes",
    "index_bytes",
    "live_rows",
    "dead_rows",
    "updates",
    "hot_updates",
    "autovacuums",
    "inserts",
)
# The range of ids limits the query to the emails of the last minutes.
_LATENCY: Final = """
select
    count(*),
    percentile_cont(0.5) within group (order by ms),
    percentile_cont(0.99) within group (order by ms)
from (
    select extract(epoch from a.finished_at - l.created_at)::float8 * 1000 as ms
    from dispatcher.email_log as l
    join dispatcher.every_attempt as a using (email_id)
    where l.email_id >= dispatcher.email_id_lowest_at(to_timestamp(%(since)s) - interval '2 minutes')
        and a.email_id >= dispatcher.email_id_lowest_at(to_timestamp(%(since)s) - interval '2 minutes')
        and a.finished_at >= to_timestamp(%(since)s)
        and a.finished_at < to_timestamp(%(until)s)
        and a.outcome = 'accepted'
) as accepted
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a dispatcher.

    Attributes:
        name: `parent`, `worker-0`, `relay`, `monitor`.
    """

    name: str
    pid: int
    parent: int


def members(of: int) -> list[Member]:
    """All processes of the dispatchers that the process `of` has started, found by their titles."""
    by_parent: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and (parent := _parent(place)) is not None:
            by_parent.setdefault(parent, []).append(int(place.name))
    return list(_members(of, by_parent))


def _members(of: int, by_parent: dict[int, list[int]]) -> Iterator[Member]:
    for pid in by_parent.get(of, ()):
        if match := TITLE.match(_title(pid)):
            name = "parent" if match[1] == "run" else match[1] if match[2] is None else f"{match[1]}-{match[2]}"
            yield Member(name, pid, of)
            yield from _members(pid, by_parent)


def process_vitals(member: Member) -> dict[str, float]:
    """Memory, descriptors, threads and CPU of a process; empty if the process has exited."""
    place = Path("/proc") / str(member.pid)
    try:
        rollup = dict(_kibibytes((place / "smaps_rollup").read_text()))
        stat = (place / "stat").read_text().rpartition(")")[2].split()
        descriptors = sum(1 for _ in (place / "fd").iterdir())
    except OSError:
        return {}
    figures = {
        "rss_bytes": rollup["Rss"],
        # PSS also changes when other processes begin or stop sharing pages. Private memory shows a leak.
        "pss_bytes": rollup["Pss"],
        "private_bytes": rollup["Private_Dirty"],
        "descriptors": descriptors,
        "threads": int(stat[17]),
        "cpu_seconds": (int(stat[11]) + int(stat[12])) / _TICKS,
    }
    return {f"{member.name}.{name}": float(figure) for name, figure in figures.items()}


def table_vitals(connection: Connection[Any]) -> dict[str, float]:
    """Size, rows and vacuums of each table; for a partitioned table, the sum over its partitions."""
    figures: dict[str, float] = {}
    for name, *values in connection.execute(_TABLES_NOW):
        if name in TABLES:
            figures |= {f"{name}.{column}": float(value) for column, value in zip(_COLUMNS, values, strict=True)}
    row = connection.execute("select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8").fetchone()
    assert row is not None
    return {**figures, "wal_bytes": row[0]}


def latency_vitals(connection: Connection[Any], since: float, until: float) -> dict[str, float]:
    """Percentiles of the time from enqueue to acceptance, for emails accepted between two instants.

    Without such emails, there are no percentiles.
    """
    row = connection.execute(_LATENCY, {"since": since, "until": until}).fetchone()
    assert row is not None
    count, median, p99 = row
    return {"accepted_emails": float(count)} | ({"latency.p50_ms": median, "latency.p99_ms": p99} if count else {})


def yardsticks(connection: Connection[Any]) -> dict[str, float]:
    """The speed of the machine without the product: the time to hash 4 MB, and the time of a commit.

    If the latency changes and these times do not, the product caused the change. If these times change, the machine
    became slower or faster.
    """
    began = time.perf_counter()
    hashlib.sha256(_YARD).digest()
    figures = {"yardstick.cpu_ms": 1000 * (time.perf_counter() - began)}
    commits = []
    for _ in range(_COMMITS):
        began = time.perf_counter()
        # The statement waits for the disk like any commit, but writes to no table.
        connection.execute("select pg_logical_emit_message(true, 'yardstick', '')")
        commits.append(1000 * (time.perf_counter() - began))
    return {**figures, "yardstick.commit_ms": statistics.median(commits)}


def email_vitals(connection: Connection[Any]) -> dict[str, float]:
    """Emails by status, and the age of the oldest pending email."""
    figures = {f"emails.{status.value}": float(count) for status, count in count_emails.sync(connection).items()}
    oldest_seconds, _ = find_oldest_pending.sync(connection)
    return {**figures, "oldest_pending_seconds": oldest_seconds or 0.0}


def queue_vitals(management: Management, queues: dict[str, str]) -> dict[str, float]:
    """The number of messages of each queue, from the management API. The API's figures are up to five seconds old.

    Leaves out a queue for which the API does not answer.

    Args:
        queues: RabbitMQ's name of each queue, by our name.
    """
    figures: dict[str, float] = {}
    for name, queue in queues.items():
        with contextlib.suppress(BrokerUnavailable):
            figures[f"queue.{name}_messages"] = float(asyncio.run(management.depth(queue)).messages)
    return figures


def _parent(place: Path) -> int | None:
    try:
        return int((place / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _title(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _kibibytes(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            yield name, float(words[0]) * _KIB
