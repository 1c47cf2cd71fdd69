"""The checks of /readyz. The reasons contain nothing private, because the page needs no login."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.domain.controls import Controls, Pause, PauseScope
from dispatcher.domain.waiting import BLOCKED_WORDS
from dispatcher.errors import SchemaError, TopologyError
from dispatcher.host.process_table import ProcessStatus
from dispatcher.monitor.polling import ANSWER_SECONDS, POLL_SECONDS, Poll
from dispatcher.store.figures import MonitorCounts
from dispatcher.store.instants import AHEAD_SECONDS
from dispatcher.telemetry import metrics
from dispatcher.telemetry.scrape import ProcessCollector

CHECKS: Final = (
    *("processes", "database", "schema", "commits"),
    *("broker", "topology", "confirms", "consumers", "providers", "pending"),
)
LATE_SECONDS: Final = 20.0
"""A process that has waited longer than this for a commit, or for RabbitMQ's confirms, fails the check."""
FRESH_SECONDS: Final = 10.0
"""If RabbitMQ has answered a process of this host within this time, an unanswered poll does not fail the check."""
OLD_SECONDS: Final = 6 * POLL_SECONDS
"""A server whose last answer is older than this fails the check, unless it is polled less often."""


class Health:
    """The checks of /readyz for this host: of the last answers from PostgreSQL and RabbitMQ, and of what the host's
    processes report in shared memory."""

    def __init__(
        self,
        settings: Settings,
        store: Poll[MonitorCounts],
        broker: Poll[dict[str, FoundQueue]],
        processes: ProcessCollector,
        unready: Callable[[], list[str]],
        members: Callable[[], list[ProcessStatus]],
    ) -> None:
        self._settings = settings
        self._store = store
        self._broker = broker
        self._processes = processes
        self._unready = unready
        self._members = members

    def reasons(self) -> dict[str, str | None]:
        """Why each check fails, by the check's name; None if the check passes."""
        members = [member for member in self._members() if not member.is_ending]
        is_served = any((seconds := each.served_seconds) is not None and seconds < FRESH_SECONDS for each in members)
        is_blocked = self._store.found is not None and self._store.found.is_blocked
        confirm_waits = [member.confirm_wait_seconds for member in members]
        return {
            "processes": " ".join(self._unready()) or None,
            "database": _unavailability(self._store, "PostgreSQL", SchemaError),
            "schema": _fault_text(self._store, SchemaError),
            "commits": _late("a commit", [member.commit_wait_seconds for member in members]),
            "broker": None if is_served else _unavailability(self._broker, "RabbitMQ", TopologyError),
            "topology": _fault_text(self._broker, TopologyError),
            "confirms": BLOCKED_WORDS if is_blocked else _late("RabbitMQ's confirms", confirm_waits),
            "consumers": None if is_served else self._consumers(),
            "providers": self._providers(),
            "pending": self._pending(),
        }

    def _consumers(self) -> str | None:
        queues = self._broker.found
        if queues is None or self._are_all_providers_paused:
            return None
        controls = Controls(tuple(self._pauses))
        lanes = [lane for lane in self._settings.lanes if controls.pause_of_lane(lane) is None]
        idle = [lane for lane in lanes if not queues[self._settings.queue_of(lane)].consumers]
        if len(idle) == len(self._settings.lanes):
            return "The send queues have no consumers."
        return f"The send queue of lane {idle[0]} has no consumer." if idle else None

    def _providers(self) -> str | None:
        """A sentence if every circuit breaker is open, in every worker that has reported, except of paused providers. A
        half-open breaker counts as open: it waits for the answer to a probe, which can take a long time."""
        paused = self._paused_providers
        states = self._processes.values_of(metrics.BREAKERS).items()
        views = [labels for labels, workers in states if workers and labels[0] not in paused]
        if not views or any(state not in ("open", "half_open") for _, state in views):
            return None
        return f"No provider is usable; circuit breakers are open: {', '.join(sorted({name for name, _ in views}))}."

    @property
    def _paused_providers(self) -> set[str]:
        return {pause.name for pause in self._pauses if pause.scope is PauseScope.PROVIDER}

    @property
    def _are_all_providers_paused(self) -> bool:
        return bool(self._settings.providers) and self._paused_providers.issuperset(self._settings.providers)

    @property
    def _pauses(self) -> Sequence[Pause]:
        return self._store.found.pauses if self._store.found else ()

    def _pending(self) -> str | None:
        counts, longest = self._store.found, self._settings.ready_pending_seconds
        age_seconds = counts.oldest_pending_seconds if counts else None
        if age_seconds is None or self._are_all_providers_paused:
            return None
        if age_seconds < -AHEAD_SECONDS:
            ahead = f"{-age_seconds:.0f} s ahead of PostgreSQL's clock"
            return f"The oldest pending email was enqueued {ahead}: the clock was set back, so ages are meaningless."
        if age_seconds <= longest:
            return None
        return f"The oldest pending email has waited for {age_seconds:.0f} s; the limit is {longest:g} s."


def _unavailability(
    poll: Poll[MonitorCounts] | Poll[dict[str, FoundQueue]], server: str, answered: type[Exception]
) -> str | None:
    """Why a server counts as unreachable, without the error's text, which may contain users and hosts; None if it is
    reachable, as after an error of the class `answered`."""
    if isinstance(poll.fault, answered):
        return None
    if poll.fault is not None:
        return f"{server} is not available."
    if poll.age_seconds is None:
        return f"{server} has not answered yet."
    if poll.age_seconds > max(OLD_SECONDS, poll.interval_seconds + ANSWER_SECONDS):
        return f"{server} last answered {poll.age_seconds:.0f} s ago."
    return None


def _late(what: str, waits: list[float | None]) -> str | None:
    longest = max((seconds for seconds in waits if seconds is not None), default=0.0)
    return f"A process of this host has waited for {what} for {longest:.0f} s." if longest > LATE_SECONDS else None


def _fault_text(poll: Poll[MonitorCounts] | Poll[dict[str, FoundQueue]], kind: type[Exception]) -> str | None:
    """The last poll's error if it is of this class: the dispatcher writes its text, so it contains nothing private."""
    return str(poll.fault) if isinstance(poll.fault, kind) else None
