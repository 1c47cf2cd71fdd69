"""How many messages the DLQ holds, by what RabbitMQ reports: a figure, or a fault; never a guess.

The management API counts all of them, up to 5 seconds late. Where none is configured, AMQP counts those that nobody
holds, so that the DLQ seems empty while somebody looks through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from dispatcher.broker.connection import vhost_of
from dispatcher.broker.management import Management, NoFigures
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.errors import BrokerUnavailable
from dispatcher.telemetry.log import get_log

PROBE_SECONDS: Final = 5.0
FIGURES_LAG_SECONDS: Final = 6.0
"""A new queue's figures may be so late; only then is their absence a failure."""

Depth = Callable[[], Awaitable[int]]
"""Asks how many messages are on the DLQ; raises DispatcherError where nobody knows."""


def depth_of_dlq(settings: Settings) -> Depth:
    """The better way of those that the settings allow; logs if it is not the best.

    Raises:
        ConfigurationError: the management API's URL cannot be used.
    """
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
    """Asks the management API.

    Args:
        lag_seconds: How long to wait for figures that are not there, before that is a failure.
    """
    # Not the loop's own: the end of the process would wait for a call that hangs.
    thread = ThreadPoolExecutor(1, thread_name_prefix="probe")

    async def ask() -> int:
        asked = asyncio.get_running_loop().run_in_executor(thread, management.depth, queue)
        try:
            async with asyncio.timeout(management.longest_seconds + 1):
                return (await asked).messages
        except TimeoutError:
            words = f"RabbitMQ's management API does not answer within {management.longest_seconds:g} s."
            raise BrokerUnavailable(words) from None

    async def ask_twice() -> int:
        try:
            return await ask()
        except NoFigures:
            await asyncio.sleep(lag_seconds)
            return await ask()

    return ask_twice
