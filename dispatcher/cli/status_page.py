"""How `dispatcher status` looks: one table, or an operator's page that is drawn again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dispatcher.cli.output import plain_table
from dispatcher.domain.status import Status
from dispatcher.store.activity import VanishedHost, find_vanished_hosts
from dispatcher.store.outbox import AHEAD_SECONDS

if TYPE_CHECKING:
    from dispatcher.domain.waiting import Trouble
    from dispatcher.store.activity import Latency, WorkerSeen
    from dispatcher.store.counts import Counts
    from dispatcher.store.retention import Expiring


@dataclass(frozen=True, slots=True)
class Standing:
    """The books, the queues and the workers at about one instant.

    Attributes:
        expiring: Undecided emails that are about to lose their content; None where they are kept for ever.
        troubles: Providers that some worker cannot use now.
        silent_seconds: How long each host's monitor has been silent; only hosts that are silent for too long.
        unready: The processes of this host that do not work, and why; None if all work, or if no monitor answers.
        rescue_seconds: How long after its end the lease of a vanished host is settled, at most.
        queues: Waiting messages by queue, the DLQ last; None if RabbitMQ did not tell.
        queues_fault: Why it did not.
        looked_at: Steady seconds, to tell rates from two looks.
    """

    counts: Counts
    expiring: Expiring | None
    troubles: list[Trouble]
    workers: list[WorkerSeen]
    silent_seconds: Mapping[str, float]
    unready: str | None
    rescue_seconds: float
    latency: Latency | None
    queues: dict[str, int] | None
    queues_fault: str | None
    looked_at: float

    @property
    def vanished(self) -> list[tuple[VanishedHost, float | None]]:
        """Hosts that vanished, each with the most seconds until its leases are settled; None without leases."""
        return [
            (host, None if end is None else max(0.0, end) + self.rescue_seconds)
            for host in find_vanished_hosts(self.workers, self.silent_seconds)
            for end in [host.leases_end_in_seconds]
        ]

    def to_json(self) -> dict[str, Any]:
        """The form that scripts rely on."""
        return {
            "emails": {status.value: count for status, count in self.counts.emails.items()},
            "queues": self.queues,
            "oldest_pending_seconds": self.counts.oldest_pending_seconds,
            "longest_due_seconds": self.counts.longest_due_seconds,
            "expiring": self.expiring
            and {"emails": self.expiring.emails, "first_in_seconds": self.expiring.first_in_seconds},
            "providers": {
                trouble.provider: {
                    "state": trouble.state,
                    "workers": trouble.workers,
                    "reason": trouble.reason,
                    "seconds_left": trouble.seconds_left,
                }
                for trouble in self.troubles
            },
            "vanished_hosts": [
                {
                    "name": host.name,
                    "in_flight": host.in_flight,
                    "settled_in_seconds": seconds,
                    "silent_seconds": host.silent_seconds,
                }
                for host, seconds in self.vanished
            ],
            "unready": self.unready,
            "workers": [
                {"name": worker.name, "age_seconds": worker.age_seconds, "in_flight": worker.in_flight}
                for worker in self.workers
            ],
            "latency_seconds": _percentiles(self.latency),
        }


def page(standing: Standing, before: Standing | None, footer: str) -> RenderableType:
    """Everything at a glance; the rates are those since the look before."""
    top = Columns([_table(standing), _speed(standing, before), _workers(standing)], padding=(0, 4))
    fault = [Text(standing.queues_fault, style="red")] if standing.queues_fault else []
    return Group(top, *_troubles(standing), *fault, Text(footer, style="dim"))


def table(standing: Standing) -> RenderableType:
    """Emails, ages, workers, queues, and the providers that cannot be used."""
    return Group(_table(standing), *_troubles(standing))


def _troubles(standing: Standing) -> list[Text]:
    """Providers and processes that do not work. They come below the table, since long reasons would widen its columns.

    Each is a Text, since rich would take brackets in a reason for markup.
    """
    lines = [
        Text(f"{trouble.provider}: {_words(trouble)}", style="yellow" if trouble.state == "paused" else "red")
        for trouble in standing.troubles
    ]
    lines += [Text(f"this host: {standing.unready}", style="red")] if standing.unready else []
    return [Text(""), *lines] if lines else []


def _table(standing: Standing) -> Table:
    shown = plain_table("", "", show_header=False)
    shown.columns[1].justify = "right"
    for status, count in standing.counts.emails.items():
        shown.add_row(status.value, f"{count:,}", style=_style(status.value, count))
    shown.add_section()
    shown.add_row("oldest pending", _age(standing.counts.oldest_pending_seconds))
    shown.add_row("longest due", _age(standing.counts.longest_due_seconds))
    if standing.expiring and standing.expiring.emails:
        left = _days(standing.expiring.first_in_seconds)
        shown.add_row("undecided, expiring", f"{standing.expiring.emails:,} ({left})", style="red")
    shown.add_section()
    living = [worker for worker in standing.workers if worker.age_seconds is not None]
    hosts = len({worker.host for worker in living})
    on_hosts = f" on {hosts:,} hosts" if hosts > 1 else ""
    shown.add_row("workers", f"{len(living):,}{on_hosts}" if living else "none", style=None if living else "yellow")
    for host, seconds in standing.vanished:
        emails = f"{host.in_flight:,} email{'' if host.in_flight == 1 else 's'}"
        words = f"silent for {_duration(host.silent_seconds)}"
        if seconds is not None:
            words = f"{emails}, settled within {_duration(seconds)}"
        shown.add_row(f"{host.name} vanished", words, style="yellow")
    shown.add_section()
    if standing.queues is None:
        shown.add_row("queues", "unknown")
    for queue, depth in (standing.queues or {}).items():
        shown.add_row(queue, f"{depth:,}", style=_alarm(queue, standing, depth))
    return shown


def _alarm(queue: str, standing: Standing, depth: int) -> str | None:
    """A dead letter waits for a person."""
    return "red" if depth and queue == list(standing.queues or {})[-1] else None


def _speed(standing: Standing, before: Standing | None) -> Table:
    shown = plain_table("", "", show_header=False)
    shown.columns[1].justify = "right"
    seconds = standing.looked_at - before.looked_at if before else 0.0
    old = before.counts.emails if before else {}
    new = standing.counts.emails
    for words, now, then in (
        ("enqueued", sum(new.values()), sum(old.values())),
        ("sent", new[Status.SENT], old.get(Status.SENT, 0)),
        ("failed", new[Status.FAILED], old.get(Status.FAILED, 0)),
    ):
        shown.add_row(f"{words} per second", f"{max(0, now - then) / seconds:,.1f}" if seconds > 0 else "-")
    shown.add_section()
    for name, value in _percentiles(standing.latency).items():
        shown.add_row(f"enqueue to accepted, {name}", "-" if value is None else _short(value))
    return shown


def _percentiles(latency: Latency | None) -> dict[str, float | None]:
    """None where nothing was sent lately."""
    if latency is None:
        return {"p50": None, "p95": None, "p99": None}
    return {"p50": latency.p50_seconds, "p95": latency.p95_seconds, "p99": latency.p99_seconds}


def _workers(standing: Standing) -> Table:
    shown = plain_table("worker", "age", "in flight")
    for column in shown.columns[1:]:
        column.justify = "right"
    for worker in standing.workers:
        host, slot, pid, *_ = [*worker.name.split(":"), "", ""]
        age = "gone" if worker.age_seconds is None else _duration(worker.age_seconds)
        style = "yellow" if worker.age_seconds is None else None
        shown.add_row(f"{host} {slot} ({pid})", age, f"{worker.in_flight:,}", style=style)
    if not standing.workers:
        shown.add_row("none", "", "", style="yellow")
    return shown


def _short(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else _duration(seconds)


def _words(trouble: Trouble) -> str:
    workers = f"{trouble.workers} worker{'' if trouble.workers == 1 else 's'}"
    left = f", {_duration(trouble.seconds_left)} left" if trouble.seconds_left else ""
    reason = f": {trouble.reason}" if trouble.reason else ""
    return f"{trouble.state.replace('_', ' ')} ({workers}{left}){reason}"


def _days(seconds: float | None) -> str:
    """How soon the first of the expiring emails loses its content."""
    days = (seconds or 0.0) / 86400
    return "due" if days <= 0 else f"first in {days:.1f} days"


def _style(status: str, count: int) -> str | None:
    """Colour only for what a person has to look at."""
    return {"failed": "red", "held": "yellow"}.get(status) if count else None


def _age(seconds: float | None) -> Text:
    """A negative age is a clock that was set back, unless it is some seconds (see the statement `enqueue`)."""
    if seconds is not None and seconds < -AHEAD_SECONDS:
        return Text(f"{_duration(-seconds)} ahead of PostgreSQL's clock", style="red")
    return Text(_duration(seconds and max(0.0, seconds)))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
