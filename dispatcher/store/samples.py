"""Figures per minute, and the processes of each host: the monitors write them, and the operators' page reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Final

import orjson

from dispatcher.domain.values import dataclass
from dispatcher.host.process_table import ProcessStatus
from dispatcher.store.connections import AsyncSession
from dispatcher.store.figures import count_for_monitor, measure_latency
from dispatcher.store.statements import Source, fetch, statement
from dispatcher.version import VERSION

KEEP_DAYS: Final = 3
_SHOWN: Final = ("role", "number", "pid", "is_up", "is_ending", "restarts", "age_seconds", "reason")


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The ready messages of a queue, without those that workers have received, and its workers."""

    messages: int
    workers: int


@dataclass(frozen=True, slots=True)
class MinuteSample:
    """What a monitor found in one minute.

    Attributes:
        emails: The number of emails by status, without `sent` and `cancelled`.
        queues: The queues by lane, and the DLQ as `dlq`; None if RabbitMQ could not be read.
        attempts: The number of attempts since the first sample, by outcome. The difference between two samples is the
            number of attempts in the time between them.
    """

    minute: datetime
    taken_at: datetime
    age_seconds: float
    emails: Mapping[str, int]
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None
    queues: Mapping[str, QueueDepth] | None
    attempts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Trend:
    """The worst that monitors found in ten minutes; see `Latency`. None: it is not known."""

    begins_at: datetime
    longest_due_seconds: float | None
    p50_seconds: float | None
    p99_seconds: float | None
    dlq_messages: int | None


@statement
async def list_trend(source: Source) -> list[Trend]: ...


async def save_sample(
    session: AsyncSession, queues: Mapping[str, QueueDepth] | None, *, every_seconds: float
) -> int | None:
    """Stores a sample, and deletes samples that are older than KEEP_DAYS. Stores nothing if the newest sample is less
    than `every_seconds` old: then returns None. Otherwise returns the number of emails that operators and applications
    cancelled since the last sample; so of all monitors, one counts each of these emails.

    Reads only the hourly counts that may have changed since the last sample, so the cost does not grow with the age of
    the database.
    """
    last = await fetch(session, "find_last_sample")
    age_seconds, attempts, since, counted = last[0] if last else (None, {}, None, {})
    # If PostgreSQL's clock was set back, the age is negative, and a new sample is due.
    if age_seconds is not None and 0 <= age_seconds < every_seconds:
        return None
    counts = await count_for_monitor(session)
    rows = await fetch(session, "sum_attempts_for_sample", {"since": since})
    totals = dict(attempts)
    for _, outcome, since_last, _ in rows:
        if outcome is not None:
            totals[outcome] = totals.get(outcome, 0) + max(0, since_last - counted.get(outcome, 0))
    parameters = {
        "emails": _json(counts.emails),
        "oldest_pending_seconds": counts.oldest_pending_seconds,
        "longest_due_seconds": counts.longest_due_seconds,
        "queues": None if queues is None else _json({name: asdict(queue) for name, queue in queues.items()}),
        "attempts": _json(totals),
        "counted_since": rows[0][0],
        "counted": _json({outcome: recent for _, outcome, _, recent in rows if outcome is not None}),
        "days": KEEP_DAYS,
        "every_seconds": every_seconds,
    }
    latency = await measure_latency(session)
    parameters |= {each: latency and getattr(latency, each) for each in ("p50_seconds", "p99_seconds")}
    stored = await fetch(session, "save_sample", parameters)
    return stored[0][0] if stored else None


async def list_samples(source: Source, minutes: int) -> list[MinuteSample]:
    """The samples of the last `minutes` minutes, oldest first."""
    rows = await fetch(source, "list_samples", {"minutes": minutes})
    return [
        MinuteSample(*[*figures, queues and {name: QueueDepth(**depth) for name, depth in queues.items()}, attempts])
        for *figures, queues, attempts in rows
    ]


async def report_processes(
    source: Source, holder: str, host: str, processes: Sequence[ProcessStatus], recipients: str = ""
) -> None:
    """Records which processes run on a host, and that the host is running. `holder` is the name of its monitor, and
    `recipients` its `Settings.recipients_digest`."""
    shown = [{name: getattr(each, name) for name in _SHOWN} for each in processes]
    parameters = {"holder": holder, "host": host, "version": VERSION, "processes": _json(shown)}
    parameters["recipients"] = recipients
    await fetch(source, "report_presence", parameters)


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
