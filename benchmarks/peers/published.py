"""Our messages on RabbitMQ before anything is measured: by the product's relay, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import psycopg
import uvloop

from dispatcher import config
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.errors import DispatcherError
from dispatcher.relay.publishing import Publishing

PUBLISH_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.1


def publish_all(environment: Mapping[str, str], emails: int) -> None:
    """Publish what is due, so that no relay would publish it once more.

    Args:
        environment: Of `dispatcher run`.
        emails: How many are due, on a queue that is empty.

    Raises:
        RuntimeError: they were not all published in time, or are due after it.
    """
    settings = config.load(environment)
    try:
        waiting = uvloop.run(_publish(settings, emails))
    except (DispatcherError, TimeoutError) as error:
        raise RuntimeError(f"the relay did not publish {emails} emails: {error!r}") from error
    due = _due(settings)
    if waiting != emails or due:
        raise RuntimeError(f"of {emails} emails {waiting} wait on RabbitMQ, and {due} are due all the same")


async def _publish(settings: Settings, emails: int) -> int:
    """Lead until the queue holds them, and end in order, which marks them; returns how many the queue holds then."""
    publisher = Publisher(settings.amqp_url, settings.exchange, name="benchmark relay", ca_file=settings.ca_file)
    publishing = Publishing(settings, publisher, tuple)
    relay = asyncio.create_task(publishing.run())
    try:
        async with asyncio.timeout(PUBLISH_SECONDS):
            while not relay.done() and await _waiting(settings) < emails:
                await asyncio.wait([relay], timeout=LOOK_SECONDS)
            publishing.stop()
            await relay
            return await _waiting(settings)
    finally:
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        await publisher.close()


async def _waiting(settings: Settings) -> int:
    found = await depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file)
    return found[settings.queue]


def _due(settings: Settings) -> int:
    with psycopg.connect(settings.database_url) as connection:
        row = connection.execute("select count(*) from email_log where publish_due_at is not null").fetchone()
    assert row is not None
    return int(row[0])
