"""The output of `dispatcher status`: one table, a page for `--watch`, or the table of `--history`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from dispatcher.cli.output import counted
from dispatcher.cli.table import Styled, Table, in_style, side_by_side
from dispatcher.domain.status import Status
from dispatcher.domain.text import printable
from dispatcher.domain.values import dataclass
from dispatcher.domain.waiting import resume_remedy
from dispatcher.store.instants import AHEAD_SECONDS

if TYPE_CHECKING:
    from dispatcher.domain.controls import LimitedDomain, Pause
    from dispatcher.domain.waiting import ProviderProblem
    from dispatcher.ops.hosts import Host
    from dispatcher.store.figures import Attempts, Latency, Pace, WorkerSeen
    from dispatcher.store.old_transactions import OldTransaction
    from dispatcher.store.retention import ExpiringEmails


OUTCOMES: Final = ("accepted", "deferred", "rejected", "uncertain")
"""The outcomes that always have a column. If a later release has recorded other outcomes, their columns follow."""
_TIMES: Final = {"hour": "%Y-%m-%d %H:%M", "day": "%Y-%m-%d"}
_PROVIDER_FIELDS: Final = ("state", "workers", "reason", "seconds_left")
_HOST_FIELDS: Final = ("name", "in_flight", "settled_in_seconds", "silent_seconds")
_WORKER_FIELDS: Final = ("name", "age_seconds", "in_flight")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of emails, queues, workers and providers at about one instant.

    Attributes:
        kept_back: The failed emails that DISPATCHER_ALLOW_RECIPIENTS keeps back.
        oldest_pending_seconds, longest_due_seconds: See `find_oldest_pending`.
        expiring: Failed and held emails whose content will soon be deleted; None if content is kept for ever.
        troubles: Providers that at least one worker cannot use now.
        old_transaction: What keeps PostgreSQL from removing old row versions; None if nothing does.
        domains: The recipient domains with emails that wait because of the domain's ceiling.
        unready: The processes of this host that do not work, and why; None if all work, or if no monitor answers.
        queues: The number of ready messages in each queue, the DLQ last; None if RabbitMQ could not be read.
        queues_fault: Why RabbitMQ could not be read; None if there was no fault.
        taken_at: The monotonic clock in seconds, to compute rates from two snapshots.
    """

    emails: Mapping[Status, int]
    kept_back: int
    oldest_pending_seconds: float | None
    longest_due_seconds: float | None
    expiring: ExpiringEmails | None
    troubles: list[ProviderProblem]
    old_transaction: OldTransaction | None
    pauses: list[Pause]
    domains: list[LimitedDomain]
    workers: list[WorkerSeen]
    hosts: list[Host]
    latency: Latency | None
    paces: list[Pace]
    unready: str | None
    queues: dict[str, int] | None
    queues_fault: str | None
    taken_at: float

    @property
    def vanished(self) -> list[Host]:
        return [host for host in self.hosts if host.is_vanished]

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`; scripts rely on its form."""
        return {
            "emails": {status.value: count for status, count in self.emails.items()},
            "kept_back": self.kept_back,
            "queues": self.queues,
            "oldest_pending_seconds": self.oldest_pending_seconds,
            "longest_due_seconds": self.longest_due_seconds,
            "expiring": self.expiring and asdict(self.expiring),
            "providers": {each.provider: _shown(each, _PROVIDER_FIELDS) for each in self.troubles},
            "old_transaction": self.old_transaction and asdict(self.old_transaction),
            "pauses": [asdict(pause) for pause in self.pauses],
            "domains": [asdict(each) for each in self.domains],
            "vanished_hosts": [_shown(host, _HOST_FIELDS) for host in self.vanished],
            "unready": self.unready,
            "workers": [_shown(worker, _WORKER_FIELDS) for worker in self.workers],
            "latency_seconds": _percentiles(self.latency),
            "paces": [asdict(each) for each in self.paces],
        }


def _shown(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def page(snapshot: Snapshot, before: Snapshot | None, width: int, *, coloured: bool) -> list[str]:
    """The page of `--watch`: counts, rates since the previous snapshot (`before`), workers, faults."""
    tables = [_table(snapshot), _speed(snapshot, before), _workers(snapshot)]
    fault = [in_style(snapshot.queues_fault, "red" if coloured else "")] if snapshot.queues_fault else []
    return [*side_by_side(tables, width, coloured=coloured), *_troubles(snapshot, coloured=coloured), *fault]


def table(snapshot: Snapshot, *, coloured: bool) -> list[str]:
    """The table without `--watch`: emails, ages, number of workers, queues, faults."""
    return [*_table(snapshot).lines(coloured=coloured), *_troubles(snapshot, coloured=coloured)]


def _troubles(snapshot: Snapshot, *, coloured: bool) -> list[str]:
    """Lines below the table: pauses, domains with waiting emails, and the faults of providers and of this host.

    These texts are not in the table, because long reasons would widen its columns.
    """
    lines = [(pause.describe(), "yellow") for pause in snapshot.pauses]
    lines += [(each.describe(), "") for each in snapshot.domains]
    if kept := snapshot.kept_back:
        lines += [(f"kept back by DISPATCHER_ALLOW_RECIPIENTS: {counted(kept, 'failed email')}", "yellow")]
    lines += [
        (f"{trouble.provider}: {_describe(trouble)}", "yellow" if trouble.state == "paused" else "red")
        for trouble in snapshot.troubles
    ]
    if old := snapshot.old_transaction:
        lines += [(f"PostgreSQL cannot remove old row versions, because of {old}. {old.remedy}", "yellow")]
    lines += [(f"this host: {snapshot.unready}", "red")] if snapshot.unready else []
    return (
        ["", *(in_style(printable(words).rstrip(), style if coloured else "") for words, style in lines)]
        if lines
        else []
    )


def _table(snapshot: Snapshot) -> Table:
    shown = Table(right=[1])
    for status, count in snapshot.emails.items():
        # Colour marks only what needs an operator.
        style = {"failed": "red", "held": "yellow"}.get(status.value, "") if count else ""
        shown.add(status.value, f"{count:,}", style=style)
    shown.add_gap()
    shown.add("oldest pending", _age(snapshot.oldest_pending_seconds))
    shown.add("oldest unpublished", _age(snapshot.longest_due_seconds))
    if snapshot.expiring and snapshot.expiring.emails:
        days = (snapshot.expiring.first_in_seconds or 0.0) / 86400
        left = "due now" if days <= 0 else f"first in {days:.1f} days"
        shown.add("undecided, expiring", f"{snapshot.expiring.emails:,} ({left})", style="red")
    shown.add_gap()
    living = [worker for worker in snapshot.workers if worker.age_seconds is not None]
    hosts = len({worker.host for worker in living})
    on_hosts = f" on {hosts:,} hosts" if hosts > 1 else ""
    shown.add("workers", f"{len(living):,}{on_hosts}" if living else "none", style="" if living else "yellow")
    for host in snapshot.vanished:
        text = f"no report for {_duration(host.silent_seconds)}"
        if host.settled_in_seconds is not None:
            text = f"{counted(host.in_flight, 'email')}, settled within {_duration(host.settled_in_seconds)}"
        shown.add(f"{host.name} vanished", text, style="yellow")
    shown.add_gap()
    if snapshot.queues is None:
        shown.add("queues", "unknown")
    queues = snapshot.queues or {}
    for number, (queue, depth) in enumerate(queues.items(), 1):
        # The last queue is the DLQ: a dead letter needs an operator.
        shown.add(queue, f"{depth:,}", style="red" if depth and number == len(queues) else "")
    return shown


def _speed(snapshot: Snapshot, before: Snapshot | None) -> Table:
    shown = Table(right=[1])
    seconds = snapshot.taken_at - before.taken_at if before else 0.0
    old = before.emails if before else {}
    new = snapshot.emails
    for label, now, then in (
        ("enqueued", sum(new.values()), sum(old.values())),
        ("sent", new[Status.SENT], old.get(Status.SENT, 0)),
        ("failed", new[Status.FAILED], old.get(Status.FAILED, 0)),
    ):
        shown.add(f"{label} per second", f"{max(0, now - then) / seconds:,.1f}" if seconds > 0 else "-")
    shown.add_gap()
    for name, value in _percentiles(snapshot.latency).items():
        shown.add(f"enqueue to accepted, {name}", _short(value))
    shown.add_gap()
    for each in snapshot.paces:
        attempt = f"{_short(each.p50_seconds)}, 99 %: {_short(each.p99_seconds)}"
        shown.add(f"{each.host or each.provider}, {each.per_minute:,.0f} per minute", attempt)
    return shown


def _short(seconds: float | None) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds is not None and seconds < 10 else _duration(seconds)


def _percentiles(latency: Latency | None) -> dict[str, float | None]:
    """The latency's percentiles in seconds, by name; each is None if no email was sent recently."""
    return {name: getattr(latency, f"{name}_seconds", None) for name in ("p50", "p95", "p99")}


def _workers(snapshot: Snapshot) -> Table:
    shown = Table("worker", "age", "in flight", right=[1, 2])
    for worker in snapshot.workers:
        host, slot, pid = worker.parts
        is_dead = worker.age_seconds is None
        age = "dead" if is_dead else _duration(worker.age_seconds)
        shown.add(f"{host} {slot} ({pid})", age, f"{worker.in_flight:,}", style="yellow" if is_dead else "")
    if not snapshot.workers:
        shown.add("none", "", "", style="yellow")
    return shown


def _describe(trouble: ProviderProblem) -> str:
    workers = counted(trouble.workers, "worker")
    left = f", {_duration(trouble.seconds_left)} left" if trouble.seconds_left else ""
    reason = f": {trouble.reason}" if trouble.reason else ""
    remedy = "" if trouble.state == "half_open" else f". {resume_remedy(trouble)}"
    return f"{trouble.state.replace('_', ' ')} ({workers}{left}){reason.rstrip('.')}{remedy}"


def _age(seconds: float | None) -> Styled:
    """An age as text; a warning if the age is below -AHEAD_SECONDS, because PostgreSQL's clock was then set back."""
    if seconds is not None and seconds < -AHEAD_SECONDS:
        return Styled(f"{_duration(-seconds)} ahead of PostgreSQL's clock", "red")
    return Styled(_duration(seconds and max(0.0, seconds)), "")


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def history_json(attempts: Sequence[Attempts]) -> list[dict[str, Any]]:
    """The attempts as in the JSON of `--history`."""
    return [
        {
            "begins_at": f"{each.begins_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "provider": each.provider,
            "outcome": each.outcome,
            "attempts": each.emails,
        }
        for each in attempts
    ]


def history_table(attempts: Sequence[Attempts], unit: str) -> Table:
    """A table with a row for each provider in each hour or day, a column for each outcome, and the totals below."""
    by_row: dict[tuple[str, str], Counter[str]] = {}
    for each in attempts:
        row = (f"{each.begins_at.astimezone(UTC):{_TIMES[unit]}}", each.provider)
        by_row.setdefault(row, Counter())[each.outcome] += each.emails
    names = [*OUTCOMES, *sorted({each.outcome for each in attempts} - set(OUTCOMES))]
    shown = Table(f"{unit} (UTC)", "provider", *names, "accepted of all", right=range(2, len(names) + 3))
    before = ""
    for (begins, provider), counts in sorted(by_row.items()):
        # Show each hour or day only in its first row, so that the reader sees where the next hour or day begins.
        shown.add("" if begins == before else begins, provider, *_cells(counts, names))
        before = begins
    shown.add_gap()
    for provider in sorted({each.provider for each in attempts}):
        counts = sum((counts for (_, name), counts in by_row.items() if name == provider), Counter())
        shown.add("total", provider, *_cells(counts, names))
    return shown


def _cells(counts: Counter[str], names: Sequence[str]) -> list[object]:
    share = counts["accepted"] / total if (total := counts.total()) else 0.0
    styles = {"rejected": "red", "uncertain": "yellow"}
    cells: list[object] = [Styled(f"{counts[name]:,}", styles.get(name, "") if counts[name] else "") for name in names]
    # Round down, so that 100 % appears only if all attempts were accepted.
    return [*cells, f"{int(share * 1000) / 10:.1f} %"]
