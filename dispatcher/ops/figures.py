"""The figures of the Overview (the first view of the operators' page), as values. `ops.overview` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from dispatcher.domain.controls import Pause
from dispatcher.domain.waiting import ProviderProblem
from dispatcher.store.activity import Latency, VanishedHost
from dispatcher.store.overview import ActiveAlert, AlertCheck, BoundedCount, ProviderRate
from dispatcher.store.samples import MinuteSample

OLD_SAMPLE_SECONDS: Final = 90.0
"""If the newest sample is older than this, no monitor writes samples."""


@dataclass(frozen=True, slots=True)
class Point:
    """How many attempts of one minute, hour or day sent an email, and how many did not.

    Attributes:
        sent: The number of emails; None if unknown, because no monitor took a sample.
        not_sent: The number of attempts whose email was deferred or rejected, or whose outcome is uncertain; None if
            unknown.
    """

    begins_at: datetime
    sent: int | None
    not_sent: int | None


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """A process of a host, as the Overview shows it.

    Attributes:
        name: The name of the process, such as `worker 0`, `relay` or `monitor`.
        state: `up`, `starting`, `stopping`, `failing` (the process could not start), or `dead` (the worker has leases,
            but no database session).
        age_seconds: Seconds since the process started; None if unknown.
        in_flight: Emails under the worker's leases; None for other processes.
        restarts: How many times the process ended by itself; None if its host does not report this number.
        reason: Why the process could not start, if its state is `failing`; otherwise empty.
    """

    name: str
    pid: int | None
    state: str
    age_seconds: float | None
    in_flight: int | None
    restarts: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HostFigures:
    """A host, as the Overview shows it.

    Attributes:
        version: The release that the host runs; None if unknown.
        reported_seconds: Seconds since the host's monitor last reported; None if no monitor has reported.
        vanished: Details if the host has vanished; otherwise None.
        settled_in_seconds: If the host has vanished: within how many seconds other hosts recover its leased
            emails. None if the host has not vanished, or has no leases.
    """

    name: str
    version: str | None
    reported_seconds: float | None
    processes: Sequence[ProcessFigures]
    vanished: VanishedHost | None = None
    settled_in_seconds: float | None = None

    @property
    def in_flight(self) -> int:
        """Emails under the leases of this host's workers."""
        if self.vanished is not None:
            return self.vanished.in_flight
        return sum(process.in_flight or 0 for process in self.processes)


@dataclass(frozen=True, slots=True)
class ProviderFigures:
    """A provider, as the Overview shows it.

    Attributes:
        problem: The worst problem that workers report; None if all workers can use the provider.
        pause: The operator's pause; None if the provider is not paused.
        rate: How many emails per second all hosts together may send now; None if the provider has no ceiling, or has
            not sent an email yet.
        ceiling: The most emails per second, by this host's settings; None if the settings set no ceiling.
        sent: Emails that the provider accepted in the current hour and the 23 hours before.
        not_sent: Attempts with other outcomes in the same hours.
    """

    name: str
    problem: ProviderProblem | None
    pause: Pause | None
    rate: ProviderRate | None
    ceiling: float | None
    sent: int
    not_sent: int


@dataclass(frozen=True, slots=True)
class LaneFigures:
    """A lane, as the Overview shows it.

    Attributes:
        weight: The weight that an operator set; None if the default applies.
        messages: Messages that wait on the lane's send queue; None if unknown.
        workers: Workers that consume from this queue; None if unknown.
        pause: The operator's pause of the lane; None if the lane is not paused.
    """

    name: str
    weight: float | None
    messages: int | None
    workers: int | None
    pause: Pause | None


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of emails that every visitor of the Overview sees.

    Attributes:
        dead_letters: Failed emails whose dead letter no operator has discarded.
        held: Held emails whose dead letter no operator has discarded.
        paused: Pending emails that an operator paused; None if they were not counted.
    """

    dead_letters: BoundedCount
    held: BoundedCount
    pending: BoundedCount
    sending: BoundedCount
    waiting: BoundedCount
    cancelled: BoundedCount
    paused: BoundedCount | None = None


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the Overview for one visitor.

    If the visitor may see only one tenant, only `taken_at`, `counts` and `pauses` are filled.

    Attributes:
        counts: Counts of all tenants, or of the visitor's tenant.
        pauses: The pauses that are in force; for a visitor of one tenant, only the pause of this tenant.
        sample: The newest of the counts that a monitor stores every minute; None if none is stored.
        check: The last check of the DLQ, with the active alerts; None if no monitor has checked yet.
    """

    taken_at: datetime
    counts: Counts
    pauses: Sequence[Pause] = ()
    oldest_pending_seconds: float | None = None
    longest_due_seconds: float | None = None
    latency: Latency | None = None
    minutes: Sequence[Point] = ()
    hours: Sequence[Point] = ()
    days: Sequence[Point] = ()
    hosts: Sequence[HostFigures] = ()
    providers: Sequence[ProviderFigures] = ()
    lanes: Sequence[LaneFigures] = ()
    sample: MinuteSample | None = None
    check: AlertCheck | None = None

    @property
    def alerts(self) -> Sequence[ActiveAlert]:
        """The alerts that are active, oldest first."""
        return sorted(self.check.alerts, key=lambda alert: alert.raised_at) if self.check else ()

    @property
    def is_sampled(self) -> bool:
        """Whether the newest sample is recent, which shows that a monitor is running and writes samples."""
        return self.sample is not None and self.sample.age_seconds < OLD_SAMPLE_SECONDS
