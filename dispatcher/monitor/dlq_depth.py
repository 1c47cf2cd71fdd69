"""Reads the number of messages on the DLQ from RabbitMQ, or raises an error; never estimates.

The management API counts all messages, with a delay of up to 5 seconds. If it is not configured, AMQP counts only
messages that are not delivered to a consumer, so the DLQ seems empty while a command reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from dispatcher.broker.connection import vhost_of
from dispatcher.broker.management import CountsUnavailable, Management
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.telemetry.log import get_log

PROBE_SECONDS: Final = 5.0
FIGURES_LAG_SECONDS: Final = 15.0
"""The management API may lack the figures of a new queue for this time; RabbitMQ 3.10 took up to 11 seconds. If the
figures are missing for longer, the read fails."""

Depth = Callable[[], Awaitable[int]]
"""Returns the number of messages on the DLQ. Raises DispatcherError if the number cannot be read."""


def depth_of_dlq(settings: Settings) -> Depth:
    """A function that reads the depth of the DLQ: from the management API if it is configured, otherwise by AMQP, after
    a warning in the log. Raises ConfigurationError if the API's URL is not usable."""
    if settings.rabbitmq_management_url:
        management = Management(
            settings.rabbitmq_management_url,
            vhost=vhost_of(settings.amqp_url),
            ca_file=settings.ca_file,
            timeout_seconds=PROBE_SECONDS,
        )
        lag_seconds = min(FIGURES_LAG_SECONDS, settings.dlq_probe_seconds)
        return by_management(management, settings.dlq, lag_seconds=lag_seconds)
    get_log().warning("dlq.depth_inexact", reason="DISPATCHER_RABBITMQ_MANAGEMENT_URL is not set")
    topology = Topology.of(settings)

    async def by_amqp() -> int:
        return (await depths(settings.amqp_url, topology, ca_file=settings.ca_file))[topology.dlq]

    return by_amqp


def by_management(management: Management, queue: str, *, lag_seconds: float) -> Depth:
    """A function that reads the depth from the management API. If figures are missing, it tries again after
    `lag_seconds`."""

    async def ask_twice() -> int:
        try:
            return (await management.depth(queue)).messages
        except CountsUnavailable:
            await asyncio.sleep(lag_seconds)
            return (await management.depth(queue)).messages

    return ask_twice
