"""What the monitor itself has to say in /metrics: gauges from the database and RabbitMQ, as of its last look.

Of the whole database and broker, so every host says the same: take the maximum over hosts, not the sum. A figure that
nobody knows now is absent, and never zero.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.broker.topology import FoundQueue
from dispatcher.config import Settings
from dispatcher.monitor.health import Health
from dispatcher.monitor.looking import Poll
from dispatcher.store.counts import Stock
from dispatcher.telemetry.meters import Labels
from dispatcher.version import VERSION


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge that the monitor reads somewhere."""

    name: str
    about: str
    labels: Labels = ()

    def show(self, values: Mapping[Labels, float]) -> Metric:
        """It, with these values by label values."""
        family = GaugeMetricFamily(self.name, self.about, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


CURRENT: Final = Gauge(
    "dispatcher_current_emails", "Current number of emails by status: pending, sending, failed, held.", ("status",)
)
OLDEST_PENDING: Final = Gauge(
    "dispatcher_oldest_pending_seconds", "Age of the oldest pending email; 0 if no email is pending."
)
RELAY_LAG: Final = Gauge(
    "dispatcher_relay_lag_seconds",
    "How long the longest waiting message has been due to be published; 0 if none is due.",
)
SENT_LAST_HOUR: Final = Gauge("dispatcher_sent_last_hour_emails", "Emails sent in the last hour, approximately.")
SENT_LAST_DAY: Final = Gauge("dispatcher_sent_last_day_emails", "Emails sent in the last 24 hours, approximately.")
QUEUES: Final = Gauge(
    "dispatcher_queue_messages",
    "Messages on the send queue and on the DLQ, without those that consumers hold.",
    ("queue",),
)
SEND_QUEUE_WORKERS: Final = Gauge(
    "dispatcher_send_queue_workers", "Workers of all hosts that consume from the send queue."
)
FAILING: Final = Gauge("dispatcher_failing_checks", "1 if the check of /readyz fails, otherwise 0.", ("check",))
AGE: Final = Gauge("dispatcher_readings_age_seconds", "Age of the data last read from the server.", ("server",))
BUILD: Final = Gauge("dispatcher_build_info", "Always 1; the labels name the running versions.", ("version", "python"))

READINGS: Final = tuple(each for each in globals().copy().values() if isinstance(each, Gauge))
"""All of them."""


class Readings(Collector):
    """Collects them, for a registry of the library's."""

    def __init__(
        self, settings: Settings, store: Poll[Stock], broker: Poll[dict[str, FoundQueue]], health: Health
    ) -> None:
        self._settings = settings
        self._store = store
        self._broker = broker
        self._health = health

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not collect to learn our names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything that is known now."""
        if self._store.found is not None:
            yield from _of_stock(self._store.found)
        if self._broker.found is not None:
            yield from self._of_queues(self._broker.found)
        ages = {"postgresql": self._store.age_seconds, "rabbitmq": self._broker.age_seconds}
        yield AGE.show({(server,): age for server, age in ages.items() if age is not None})
        yield FAILING.show({(name,): reason is not None for name, reason in self._health.reasons().items()})
        yield BUILD.show({(VERSION, platform.python_version()): 1})

    def _of_queues(self, queues: dict[str, FoundQueue]) -> Iterator[Metric]:
        send, dlq = queues[self._settings.queue], queues[self._settings.dlq]
        yield QUEUES.show({("send",): send.messages, ("dlq",): dlq.messages})
        yield SEND_QUEUE_WORKERS.show({(): send.consumers})


def _of_stock(stock: Stock) -> Iterator[Metric]:
    yield CURRENT.show({(status.value,): count for status, count in stock.emails.items()})
    yield OLDEST_PENDING.show({(): stock.oldest_pending_seconds or 0.0})
    yield RELAY_LAG.show({(): max(0.0, stock.longest_due_seconds or 0.0)})
    yield SENT_LAST_HOUR.show({(): round(stock.sent_last_hour)})
    yield SENT_LAST_DAY.show({(): round(stock.sent_last_day)})
