"""How many messages the DLQ holds, by what RabbitMQ reports: a figure, or a fault; never a guess.

The management API counts all of them, up to 5 seconds late. Where none is configured, AMQP counts those that nobody
holds, so that the DLQ seems empty while somebody looks through it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from dispatcher.broker.connection import vhost_of
from dispatcher.broker.management import Management, NoFigures
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.errors import BrokerUnavailable
from dispatcher.telemetry.log import get_log

PROBE_SECONDS: Final = 5.0
FIGURES_LAG_SECONDS: Final = 6.0
"""A new queue's figures may be so late; only then is their absence a failure."""


class Probe(Protocol):
    """A way to ask for the depth."""

    async def depth(self) -> int:
        """Messages on the DLQ.

        Raises:
            DispatcherError: nobody knows.
        """
        ...


def probe_of(settings: Settings) -> Probe:
    """The better way of those that the settings allow; says so if it is not the best.

    Raises:
        ConfigurationError: the management API's URL cannot be used.
    """
    if settings.rabbitmq_management_url:
        return ManagementProbe(
            Management(
                settings.rabbitmq_management_url,
                vhost=vhost_of(settings.amqp_url),
                ca_file=settings.ca_file,
                timeout_seconds=PROBE_SECONDS,
            ),
            settings.dlq,
            lag_seconds=min(FIGURES_LAG_SECONDS, settings.dlq_probe_seconds),
        )
    get_log().warning("probe.limited", reason="DISPATCHER_RABBITMQ_MANAGEMENT_URL is not set")
    return AmqpProbe(settings.amqp_url, Topology.of(settings), settings.ca_file)


class ManagementProbe:
    """See the module."""

    def __init__(self, management: Management, queue: str, *, lag_seconds: float) -> None:
        """
        Args:
            lag_seconds: How long to wait for figures that are not there, before that is a failure.
        """
        self._management = management
        self._queue = queue
        self._lag_seconds = lag_seconds
        # Not the loop's own: the end of the process would wait for a call that hangs.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="probe")

    async def depth(self) -> int:
        """See `Probe`."""
        try:
            return await self._ask()
        except NoFigures:
            await asyncio.sleep(self._lag_seconds)
            return await self._ask()

    async def _ask(self) -> int:
        seconds = self._management.longest_seconds
        asked = asyncio.get_running_loop().run_in_executor(self._thread, self._management.depth, self._queue)
        try:
            async with asyncio.timeout(seconds + 1):
                return (await asked).messages
        except TimeoutError:
            raise BrokerUnavailable(f"RabbitMQ's management API does not answer within {seconds:g} s.") from None


class AmqpProbe:
    """See the module."""

    def __init__(self, amqp_url: str, topology: Topology, ca_file: Path | None) -> None:
        self._amqp_url = amqp_url
        self._topology = topology
        self._ca_file = ca_file

    async def depth(self) -> int:
        """See `Probe`."""
        counts = await depths(self._amqp_url, self._topology, ca_file=self._ca_file)
        return counts[self._topology.dlq]
