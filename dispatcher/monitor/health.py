"""Whether this host can do its work, check by check, in words that may be shown to anybody who can ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.errors import SchemaError, TopologyError
from dispatcher.host.process_table import ProcessStatus
from dispatcher.monitor.looking import ANSWER_SECONDS, LOOK_SECONDS, Poll
from dispatcher.store.counts import Stock
from dispatcher.store.outbox import AHEAD_SECONDS
from dispatcher.telemetry import metrics
from dispatcher.telemetry.scrape import ProcessCollector

CHECKS: Final = (
    *("processes", "database", "schema", "commits"),
    *("broker", "topology", "confirms", "consumers", "providers", "pending"),
)
LATE_SECONDS: Final = 20.0
"""What waits for a commit, or for RabbitMQ's confirms, for longer than this may as well get none."""
FRESH_SECONDS: Final = 10.0
"""While RabbitMQ has served a process of this host so lately, a look that it does not answer counts for nothing."""
OLD_SECONDS: Final = 6 * LOOK_SECONDS
"""An answer older than this tells nothing about now, unless it is as slow to come as that."""


class Health:
    """What the monitor's looks say, as checks."""

    def __init__(
        self,
        settings: Settings,
        store: Poll[Stock],
        broker: Poll[dict[str, FoundQueue]],
        processes: ProcessCollector,
        unready: Callable[[], list[str]],
        members: Callable[[], list[ProcessStatus]],
    ) -> None:
        """
        Args:
            unready: A sentence for each process of this host that should work and does not.
            members: What the processes of this host say of themselves.
        """
        self._settings = settings
        self._store = store
        self._broker = broker
        self._processes = processes
        self._unready = unready
        self._members = members

    def reasons(self) -> dict[str, str | None]:
        """Why each check fails, by its name; None where it holds."""
        members = [member for member in self._members() if not member.is_ending]
        is_served = any((seconds := each.served_seconds) is not None and seconds < FRESH_SECONDS for each in members)
        return {
            "processes": " ".join(self._unready()) or None,
            "database": _plight(self._store, "PostgreSQL", SchemaError),
            "schema": _words(self._store, SchemaError),
            "commits": _late("a commit", [member.commit_wait_seconds for member in members]),
            "broker": None if is_served else _plight(self._broker, "RabbitMQ", TopologyError),
            "topology": _words(self._broker, TopologyError),
            "confirms": _late("RabbitMQ's confirms", [member.confirm_wait_seconds for member in members]),
            "consumers": None if is_served else self._consumers(),
            "providers": self._providers(),
            "pending": self._pending(),
        }

    def _consumers(self) -> str | None:
        queues = self._broker.found
        if queues is None or queues[self._settings.queue].consumers:
            return None
        return "Nobody consumes the send queue."

    def _providers(self) -> str | None:
        """All providers open in all of this host's workers; a worker that has not spoken is no reason.

        Half open is no better: a probe is under way, as after each wait, and may take as long as an attempt does.
        """
        views = [labels for labels, workers in self._processes.values_of(metrics.BREAKERS).items() if workers]
        if not views or any(state not in ("open", "half_open") for _, state in views):
            return None
        return f"Every provider fails as a whole: {', '.join(sorted({provider for provider, _ in views}))}."

    def _pending(self) -> str | None:
        stock, longest = self._store.found, self._settings.ready_pending_seconds
        if stock is None or stock.oldest_pending_seconds is None:
            return None
        if stock.oldest_pending_seconds < -AHEAD_SECONDS:
            ahead = f"{-stock.oldest_pending_seconds:.0f} s ahead of PostgreSQL's clock"
            return f"The oldest pending email was enqueued {ahead}: the clock was set back, so that ages say nothing."
        if stock.oldest_pending_seconds <= longest:
            return None
        return f"The oldest pending email has waited for {stock.oldest_pending_seconds:.0f} s, above {longest:g}."


def _plight(look: Poll[Stock] | Poll[dict[str, FoundQueue]], server: str, answered: type[Exception]) -> str | None:
    """Why a server counts as away. Not in its own words: those may name users and hosts, and stand in our log."""
    if isinstance(look.fault, answered):
        return None
    if look.fault is not None:
        return f"{server} is not available."
    if look.age_seconds is None:
        return f"{server} has not answered yet."
    if look.age_seconds > max(OLD_SECONDS, look.interval_seconds + ANSWER_SECONDS):
        return f"{server} was last heard of {look.age_seconds:.0f} s ago."
    return None


def _late(what: str, waits: list[float | None]) -> str | None:
    longest = max((seconds for seconds in waits if seconds is not None), default=0.0)
    return f"A process of this host has waited for {what} for {longest:.0f} s." if longest > LATE_SECONDS else None


def _words(look: Poll[Stock] | Poll[dict[str, FoundQueue]], kind: type[Exception]) -> str | None:
    """A fault of this kind in its words: ours, about tables and queues."""
    return str(look.fault) if isinstance(look.fault, kind) else None
