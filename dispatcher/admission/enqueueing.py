"""Enqueues emails within the quota of their API key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.admission.access import Caller
from dispatcher.admission.insert_batcher import InsertBatcher, InsertResult
from dispatcher.admission.quotas import QuotaExhausted, Quotas
from dispatcher.admission.validation import quota_exceeded
from dispatcher.domain.capabilities import recipients_of
from dispatcher.producers import Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore
from dispatcher.store.enqueueing import Draft


@dataclass(frozen=True, slots=True)
class Enqueuer:
    quotas: Quotas
    batcher: InsertBatcher
    store: DraftStore

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
