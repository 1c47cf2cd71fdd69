"""Inserts the emails of concurrent requests in batches, one statement per batch."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import Final

from dispatcher.admission.immediate_publisher import ImmediatePublisher
from dispatcher.domain.outgoing import file_parts
from dispatcher.errors import DispatcherError, StoreBusy
from dispatcher.host.request_batcher import RequestBatcher
from dispatcher.producers import BATCH_OCTETS, Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore, Insertion
from dispatcher.store.enqueueing import Draft
from dispatcher.telemetry import metrics

CONCURRENT_INSERTS: Final = 2
"""The most concurrent inserts of new batches. While one insert waits for the disk, another insert is sent."""
CONCURRENT_RETRIES: Final = 2
"""The most concurrent inserts of split batches, in addition to `CONCURRENT_INSERTS`, so that new batches do not
wait."""

InsertResult = Enqueued | DispatcherError
"""The result for one email. Errors are values, since other emails of the same batch have other results."""


class InsertBatcher(RequestBatcher[Draft, InsertResult]):
    """Inserts drafts, which are prepared emails, in batches of at most `max_emails`."""

    def __init__(self, store: DraftStore, publisher: ImmediatePublisher, max_emails: int) -> None:
        self._store = store
        self._publisher = publisher
        super().__init__(
            self._insert,
            size_of=_content_bytes,
            most_size=BATCH_OCTETS,
            most_items=max_emails,
            tenant_of=attrgetter("email.tenant_id"),
            concurrent=CONCURRENT_INSERTS,
            concurrent_parts=CONCURRENT_RETRIES,
        )

    async def _insert(self, drafts: list[Draft]) -> list[InsertResult]:
        began_at = time.perf_counter()
        try:
            insertion = await self._store.insert(
                drafts,
                direct_lanes=self._publisher.direct_lanes(),
                relay_tenants=self._publisher.relay_tenants(draft.email.tenant_id for draft in drafts),
            )
        except DispatcherError:
            raise
        except Exception as error:  # noqa: BLE001 - the waiting requests need a result, whatever failed
            raise DispatcherError(type(error).__name__) from None
        metrics.API_INSERT_SECONDS.observe(time.perf_counter() - began_at)
        metrics.API_INSERT_EMAILS.observe(len(drafts))
        metrics.API_EMAILS.add(len(insertion.due_at), "accepted")
        self._publisher.add(drafts, insertion)
        results = [_result_of(draft, insertion) for draft in drafts]
        known = [each for each in results if isinstance(each, Enqueued) and each.acceptance is Acceptance.KNOWN]
        metrics.API_EMAILS.add(len(known), "known")
        return results


def _result_of(draft: Draft, insertion: Insertion) -> InsertResult:
    key = draft.email.message_key
    if draft.email_id in insertion.due_at:
        return Enqueued(draft.email_id, key, Acceptance.ACCEPTED)
    holder = insertion.known.get(draft.key)
    if holder is None and draft.email.expires_at is not None:
        return Enqueued(draft.email_id, key, Acceptance.EXPIRED)
    if holder is None:
        # Between the insert, which found the key, and the look-up of the key, the email was pruned. Or the look-up has
        # deleted the key, because it had no email.
        return StoreBusy("The earlier email with this message key was deleted during the request.")
    email_id, payload_hash = holder
    is_same = payload_hash == draft.payload_hash
    return Enqueued(email_id, key, Acceptance.KNOWN if is_same else Acceptance.CONFLICT)


def _content_bytes(draft: Draft) -> int:
    email = draft.email
    return len(email.text or "") + len(email.html or "") + sum(len(file.content) for file in file_parts(email))
