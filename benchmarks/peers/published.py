"""Publishes the dispatcher's messages before the measurement, with the product's relay, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import psycopg
import uvloop

from dispatcher import config
from dispatcher.broker import pointer
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publisher import Publisher, PublishResults
from dispatcher.broker.topology import FoundQueue, Topology, depths
from dispatcher.config import Settings
from dispatcher.errors import DispatcherError
from dispatcher.host.process_table import ProcessTable
from dispatcher.relay.publish_loop import PublishLoop

PUBLISH_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1


def publish_all(environment: Mapping[str, str], emails: int) -> None:
    """Publish all due emails, so that no relay publishes them again.

    Args:
        environment: The environment of `dispatcher run`.
        emails: The number of due emails. The queue must be empty.

    Raises:
        RuntimeError: Not every email was published exactly once in time, or some emails are still due.
    """
    settings = config.load(environment)
    try:
        publisher, waiting = uvloop.run(_publish(settings, emails))
    except (DispatcherError, TimeoutError) as error:
        raise RuntimeError(f"the relay did not publish {emails} emails: {error!r}") from error
    due = _due(settings)
    if publisher.emails != emails or waiting != publisher.messages or due:
        raise RuntimeError(
            f"of {emails} emails {publisher.emails} were published, {waiting} of their {publisher.messages} messages "
            f"wait on RabbitMQ, and {due} emails are still due"
        )


class _CountingPublisher(Publisher):
    """Counts the confirmed messages, and the emails in these messages. Reports every queue as empty, so that the relay
    publishes everything although no worker takes messages."""

    messages = 0
    emails = 0

    async def publish(self, messages: Sequence[Outgoing]) -> PublishResults:
        answers = await super().publish(messages)
        confirmed = [message for message, answer in zip(messages, answers, strict=True) if answer]
        self.messages += len(confirmed)
        self.emails += sum(len(pointer.decode(message.body)) for message in confirmed)
        return answers

    async def find(self, _: str) -> FoundQueue:
        return FoundQueue(messages=0, consumers=1)


async def _publish(settings: Settings, emails: int) -> tuple[_CountingPublisher, int]:
    """Run the relay as the leader until all messages are on the queue. Then stop the relay, which clears the due marks.

    Returns:
        The publisher with its counts, and the number of messages on the queue.
    """
    publisher = _CountingPublisher(
        settings.amqp_url, settings.exchange, name="benchmark relay", ca_file=settings.ca_file
    )
    publishing = PublishLoop(settings, publisher, lambda _: (), ProcessTable(["relay"]).take_slot("relay", 0))
    relay = asyncio.create_task(publishing.run())
    try:
        async with asyncio.timeout(PUBLISH_SECONDS):
            while not relay.done() and (publisher.emails < emails or await _waiting(settings) < publisher.messages):
                await asyncio.wait([relay], timeout=POLL_SECONDS)
            publishing.stop()
            await relay
            return publisher, await _waiting(settings)
    finally:
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        await publisher.close()


async def _waiting(settings: Settings) -> int:
    found = await depths(settings.amqp_url, Topology.of(settings), ca_file=settings.ca_file)
    return found[settings.queue]


def _due(settings: Settings) -> int:
    with psycopg.connect(settings.database_url) as connection:
        row = connection.execute(
            "select count(*) from dispatcher.email_log where publish_due_at is not null"
        ).fetchone()
    assert row is not None
    return int(row[0])
