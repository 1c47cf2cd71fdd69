"""The monitor's gauges in /metrics, read from PostgreSQL and RabbitMQ at the last poll.

The gauges describe the whole database and all of RabbitMQ, so all hosts report the same values: take the maximum over
hosts, not the sum. An unknown value is left out, and never reported as zero.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.domain.controls import PauseScope
from dispatcher.domain.lanes import send_queue
from dispatcher.domain.values import dataclass
from dispatcher.monitor.health import Health
from dispatcher.monitor.polling import Poll
from dispatcher.store.figures import MonitorCounts
from dispatcher.telemetry.meters import Labels
from dispatcher.version import VERSION


@dataclass(frozen=True, slots=True)
class ServerGauge:
    """A gauge whose values the monitor reads from a server."""

    name: str
    about: str
    labels: Labels = ()

    def show(self, values: Mapping[Labels, float]) -> Metric:
        """The Prometheus metric; its values by the values of the labels, such as `{("failed",): 3}`."""
        family = GaugeMetricFamily(self.name, self.about, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


CURRENT: Final = ServerGauge(
    "dispatcher_current_emails",
    "Current number of emails by status: pending, waiting, sending, failed, held.",
    ("status",),
)
OLDEST_PENDING: Final = ServerGauge(
    "dispatcher_oldest_pending_seconds",
    "The longest time that a pending email has waited since it could first be sent; 0 if no email is pending. Emails "
    "that wait because of an operator's pause do not count.",
)
RELAY_LAG: Final = ServerGauge(
    "dispatcher_relay_lag_seconds",
    "How long ago the oldest due email became due; 0 if no email is due. Emails that wait because of an operator's "
    "pause do not count.",
)
SENT_LAST_HOUR: Final = ServerGauge("dispatcher_sent_last_hour_emails", "Emails sent in the last hour, approximately.")
SENT_LAST_DAY: Final = ServerGauge(
    "dispatcher_sent_last_day_emails", "Emails sent in the last 24 hours, approximately."
)
WEBHOOK_LAG: Final = ServerGauge(
    "dispatcher_webhook_lag_seconds",
    "How long the oldest undelivered event of an active webhook has waited, by the webhook's number.",
    ("webhook",),
)
PAUSED: Final = ServerGauge(
    "dispatcher_active_pauses",
    "Operators' pauses that are in force, by scope: all, lane, tenant, provider.",
    ("scope",),
)
QUEUES: Final = ServerGauge(
    "dispatcher_queue_messages",
    "Messages on each lane's send queue (send for the normal lane, send.bulk for bulk) and on the DLQ. Messages that "
    "are delivered but not yet acked do not count.",
    ("queue",),
)
SEND_QUEUE_WORKERS: Final = ServerGauge(
    "dispatcher_send_queue_workers", "Workers of all hosts that consume from the lane's send queue.", ("lane",)
)
FAILING: Final = ServerGauge("dispatcher_failing_checks", "1 if this check of /readyz fails, otherwise 0.", ("check",))
AGE: Final = ServerGauge(
    "dispatcher_readings_age_seconds", "Time since the monitor last read values from this server.", ("server",)
)
BUILD: Final = ServerGauge(
    "dispatcher_build_info", "Always 1; the labels contain the running versions.", ("version", "python")
)

SERVER_GAUGES: Final = tuple(each for each in globals().copy().values() if isinstance(each, ServerGauge))
"""Every gauge of this module."""


class ServerGauges(Collector):
    """Collects the gauges of this module, for a Prometheus registry."""

    def __init__(
        self, settings: Settings, store: Poll[MonitorCounts], broker: Poll[dict[str, FoundQueue]], health: Health
    ) -> None:
        self._settings = settings
        self._store = store
        self._broker = broker
        self._health = health

    def describe(self) -> Iterable[Metric]:
        """Returns nothing. Without this method, the registry would call `collect` to find the names of the gauges."""
        return []

    def collect(self) -> Iterator[Metric]:
        if self._store.found is not None:
            counts = self._store.found
            yield CURRENT.show({(status.value,): count for status, count in counts.emails.items()})
            yield OLDEST_PENDING.show({(): counts.oldest_pending_seconds or 0.0})
            yield RELAY_LAG.show({(): max(0.0, counts.longest_due_seconds or 0.0)})
            yield SENT_LAST_HOUR.show({(): round(counts.sent_last_hour)})
            yield SENT_LAST_DAY.show({(): round(counts.sent_last_day)})
            scopes = Counter(pause.scope for pause in counts.pauses)
            yield PAUSED.show({(scope.value,): scopes[scope] for scope in PauseScope})
            yield WEBHOOK_LAG.show({(str(number),): seconds for number, seconds in counts.webhook_lag_seconds.items()})
        if self._broker.found is not None:
            queues = self._broker.found
            send = {lane: queues[self._settings.queue_of(lane)] for lane in self._settings.lanes}
            depths: dict[Labels, float] = {(send_queue("send", lane),): queue.messages for lane, queue in send.items()}
            yield QUEUES.show({**depths, ("dlq",): queues[self._settings.dlq].messages})
            yield SEND_QUEUE_WORKERS.show({(lane,): queue.consumers for lane, queue in send.items()})
        ages = {"postgresql": self._store.age_seconds, "rabbitmq": self._broker.age_seconds}
        yield AGE.show({(server,): age for server, age in ages.items() if age is not None})
        yield FAILING.show({(name,): reason is not None for name, reason in self._health.reasons().items()})
        yield BUILD.show({(VERSION, platform.python_version()): 1})
