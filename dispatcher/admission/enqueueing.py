"""Enqueues emails within the quota of their API key, and publishes their messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from dispatcher.admission.access import Caller
from dispatcher.admission.immediate_publisher import RELAY_AFTER_SECONDS, ImmediatePublisher
from dispatcher.admission.insert_batcher import InsertBatcher, InsertResult
from dispatcher.admission.quotas import QuotaExhausted, Quotas
from dispatcher.admission.validation import quota_exceeded
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.domain.capabilities import recipients_of
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.store.connections import Pool
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import Draft


@dataclass(frozen=True, slots=True)
class Enqueuer:
    quotas: Quotas
    batcher: InsertBatcher
    store: DraftStore
    publisher: ImmediatePublisher

    async def run(self) -> None:
        """Publishes the messages of the emails, until cancelled."""
        await self.publisher.run()

    async def finish(self) -> None:
        """Waits until all emails are committed and their messages published. Returns what is unused of the quotas."""
        await self.batcher.finish()
        await self.quotas.close()
        await self.publisher.finish()

    async def enqueue(self, drafts: Sequence[Draft], caller: Caller) -> list[InsertResult]:
        """Enqueues all drafts, if enough of the key's quota is left; otherwise raises the problem `quota-exceeded`.

        Drafts that were not inserted use no quota: refused drafts, and repeated requests.
        """
        recipients = sum(recipients_of(item.email) for item in drafts)
        reservation = await self.quotas.reserve(caller.key, recipients)
        if isinstance(reservation, QuotaExhausted):
            known = await self.store.find(drafts)
            if any(known.get(item.key) != item.payload_hash for item in drafts):
                raise quota_exceeded(reservation)
            return await self.batcher.submit(drafts)
        answers = await self.batcher.submit(drafts)
        unused = sum(
            recipients_of(item.email)
            for item, answer in zip(drafts, answers, strict=True)
            if not (isinstance(answer, Enqueued) and answer.acceptance is Acceptance.ACCEPTED)
        )
        await self.quotas.return_unused(reservation, unused)
        return answers


async def open_enqueuer(
    settings: Settings, opened: AsyncExitStack, quotas: Quotas, writers: Pool, readers: Pool, *, name: str
) -> Enqueuer:
    """An enqueuer whose connection to RabbitMQ closes with `opened`. `name`: of the process."""
    broker = Publisher(settings.amqp_url, settings.exchange, name=f"dispatcher {name}", ca_file=settings.ca_file)
    opened.push_async_callback(_close, broker)
    drafts = DraftStore(writers, publish_in_seconds=RELAY_AFTER_SECONDS)
    queues = {lane: settings.queue_of(lane) for lane in settings.lanes}
    publisher = ImmediatePublisher(
        broker, drafts, queues, readers, bundle=settings.bundle_emails, prefetch=settings.prefetch
    )
    await publisher.begin()
    batcher = InsertBatcher(drafts, publisher, settings.api_insert_batch_emails)
    return Enqueuer(quotas, batcher, drafts, publisher)


async def _close(broker: Publisher) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await broker.close()
