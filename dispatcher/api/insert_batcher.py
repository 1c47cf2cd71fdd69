"""Inserts the emails of concurrent requests in batches, one statement per batch.

A commit waits about two milliseconds for the disk, and a batch of a hundred emails waits only once. The batcher never
delays a batch to make it larger: it starts an insert when one of its two concurrent inserts has finished. All emails
that have arrived by then form the next batch, so batches grow with the load. Tenants take turns, so a tenant with many
emails does not delay the others.

If PostgreSQL refuses a batch because of one email, the batcher splits the batch until that email is alone, and inserts
all other emails.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dispatcher.api.immediate_publisher import ImmediatePublisher
from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.producers import BATCH_OCTETS, Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore, Insertion
from dispatcher.store.enqueueing import Draft
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

CONCURRENT_INSERTS: Final = 2
"""The most concurrent inserts of new batches. While one insert waits for the disk, another insert is sent."""
CONCURRENT_RETRIES: Final = 2
"""The most concurrent inserts of split batches, in addition to `CONCURRENT_INSERTS`, so that new batches do not
wait."""

InsertResult = Enqueued | DispatcherError
"""The result for one email. Errors are values, since other emails of the same batch have other results."""


@dataclass(slots=True)
class _RequestResults:
    """The results for one request's emails, in order. `done` is set when every email has its result."""

    results: list[InsertResult | None]
    missing: int
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _QueuedDraft:
    """One email that waits to be inserted, and the request that waits for the result."""

    draft: Draft
    request: _RequestResults
    index: int
    size: int

    def set_result(self, result: InsertResult) -> None:
        self.request.results[self.index] = result
        self.request.missing -= 1
        if self.request.missing == 0 and not self.request.done.done():
            self.request.done.set_result(None)


@dataclass(slots=True)
class InsertBatcher:
    """Inserts drafts, which are prepared emails, in batches.

    Attributes:
        publisher: Decides which emails the API publishes itself, and publishes them after the commit.
        max_emails: The largest batch; 1 inserts each email with its own statement.
    """

    store: DraftStore
    publisher: ImmediatePublisher
    max_emails: int
    # The emails that wait for an insert, by tenant. The first tenant has the next turn.
    _waiting: dict[str, deque[_QueuedDraft]] = field(default_factory=dict)
    _free_inserts: int = CONCURRENT_INSERTS
    _retry_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_RETRIES))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_scheduled: bool = False

    async def enqueue(self, drafts: Sequence[Draft]) -> list[InsertResult]:
        """Inserts drafts, and returns their results in the same order after the commit."""
        loop = asyncio.get_running_loop()
        request = _RequestResults([None] * len(drafts), len(drafts), loop.create_future())
        for index, draft in enumerate(drafts):
            queued = _QueuedDraft(draft, request, index, _content_bytes(draft))
            tenant_queue = self._waiting.get(draft.email.tenant_id)
            if tenant_queue is None:
                tenant_queue = self._waiting[draft.email.tenant_id] = deque()
            tenant_queue.append(queued)
        if not self._is_scheduled:
            # Start the inserts a moment later, so that the batch also contains the emails of other requests that the
            # event loop reads in the same iteration.
            self._is_scheduled = True
            loop.call_soon(self._start_inserts)
        await request.done
        return [result for result in request.results if result is not None]

    async def finish(self) -> None:
        """Waits until no insert is running."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start_inserts(self) -> None:
        self._is_scheduled = False
        while self._waiting and self._free_inserts:
            self._free_inserts -= 1
            self._start(self._run_insert(self._next_batch()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[_QueuedDraft]:
        batch: list[_QueuedDraft] = []
        size = 0
        while self._waiting and len(batch) < self.max_emails:
            tenant_id, tenant_queue = next(iter(self._waiting.items()))
            size += tenant_queue[0].size
            if batch and size > BATCH_OCTETS:
                break
            batch.append(tenant_queue.popleft())
            if not tenant_queue:
                del self._waiting[tenant_id]
            elif len(self._waiting) > 1:
                self._waiting[tenant_id] = self._waiting.pop(tenant_id)  # moves the tenant behind all other tenants
        return batch

    async def _run_insert(self, batch: list[_QueuedDraft]) -> None:
        refusal = await self._insert(batch)
        self._free_inserts += 1
        self._start_inserts()
        if refusal is not None:
            await self._handle_refusal(batch, refusal)

    async def _insert(self, batch: list[_QueuedDraft]) -> DispatcherError | None:
        """Inserts a batch and sets its results. If the insert fails, sets no results and returns the error."""
        drafts = [queued.draft for queued in batch]
        began_at = time.perf_counter()
        try:
            insertion = await self.store.insert(
                drafts,
                direct_lanes=self.publisher.direct_lanes(),
                relay_tenants=self.publisher.relay_tenants(draft.email.tenant_id for draft in drafts),
            )
        except DispatcherError as error:
            return error.with_traceback(None)  # the traceback would keep the batch in memory
        except Exception as error:  # noqa: BLE001 - the waiting requests need a result, whatever failed
            get_log().error("error.unexpected", where="insert", error=type(error).__name__)
            return DispatcherError("The email could not be stored.")
        metrics.API_INSERT_SECONDS.observe(time.perf_counter() - began_at)
        metrics.API_INSERT_EMAILS.observe(len(batch))
        metrics.API_EMAILS.add(len(insertion.due_at), "accepted")
        self.publisher.add(drafts, insertion)
        results = [_result_of(queued.draft, insertion) for queued in batch]
        metrics.API_EMAILS.add(sum(_was_known(result) for result in results), "known")
        for queued, result in zip(batch, results, strict=True):
            queued.set_result(result)
        return None

    async def _handle_refusal(self, batch: list[_QueuedDraft], refusal: DispatcherError) -> None:
        """Handles the error with which the insert of a batch failed: splits the batch and inserts the parts.

        If the batch has only one email, or if PostgreSQL is unavailable, sets the error as each email's result instead.
        """
        affects_all = isinstance(refusal, StoreUnavailable) and not isinstance(refusal, StoreBusy)
        if affects_all or len(batch) == 1:
            for queued in batch:
                queued.set_result(refusal)
            return
        for part in _split(batch):
            async with self._retry_slots:
                refused = await self._insert(part)
            if refused is not None:
                await self._handle_refusal(part, refused)


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


def _was_known(result: InsertResult) -> bool:
    return isinstance(result, Enqueued) and result.acceptance is Acceptance.KNOWN


def _split(batch: list[_QueuedDraft]) -> list[list[_QueuedDraft]]:
    # Splits n emails into about √n parts, not into halves, because each lock timeout takes long. In a batch of 256
    # emails, the locked email is found after five timeouts (256, 16, 4, 2 and 1 emails). Halves would need nine.
    size = max(1, math.isqrt(len(batch)))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _content_bytes(draft: Draft) -> int:
    email = draft.email
    return len(email.text or "") + len(email.html or "") + sum(len(file.content) for file in email.attachments)
