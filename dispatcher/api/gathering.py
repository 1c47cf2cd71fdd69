"""Gathering: the emails of all requests that wait go into the database with one statement.

An email costs a statement of its own some two milliseconds of waiting for the disk, and shares them as one of a
hundred. There is no linger: a lane inserts as soon as it is free, and what comes meanwhile is the next batch, which
therefore grows with the load. Tenants take turns, so that none waits behind everything that another one sends. If
PostgreSQL refuses a batch because of one email, the batch is split until that email is alone; the others are inserted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.producers import BATCH_OCTETS, Acceptance, Enqueued
from dispatcher.store.drafts import DraftStore, Insertion
from dispatcher.store.enqueueing import Draft
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

LANES: Final = 2
"""Statements at once: while one waits for the disk, the next is on its way."""
SPLITTING_LANES: Final = 2
"""For what was refused, so that nobody waits behind it."""

Answer = Enqueued | DispatcherError
"""What became of one email; a fault is a value here, because its neighbours have another."""


@dataclass(slots=True)
class _Lot:
    """The emails of one request."""

    answers: list[Answer | None]
    missing: int
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Place:
    """One email, and where its answer belongs."""

    draft: Draft
    lot: _Lot
    index: int
    octets: int

    def answer(self, answer: Answer) -> None:
        self.lot.answers[self.index] = answer
        self.lot.missing -= 1
        if self.lot.missing == 0 and not self.lot.done.done():
            self.lot.done.set_result(None)


@dataclass(slots=True)
class Gathering:
    """Inserts what requests bring, in batches of at most `most_emails`; 1 gathers nothing."""

    store: DraftStore
    on_inserted: Callable[[list[Draft], Mapping[UUID, datetime]], None]
    most_emails: int
    _waiting: dict[str, deque[_Place]] = field(default_factory=dict)  # by tenant, who is next first
    _free_lanes: int = LANES
    _splitting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SPLITTING_LANES))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_scheduled: bool = False

    async def enqueue(self, drafts: Sequence[Draft]) -> list[Answer]:
        """What became of each draft, in their order, once that is certain."""
        loop = asyncio.get_running_loop()
        lot = _Lot([None] * len(drafts), len(drafts), loop.create_future())
        for index, draft in enumerate(drafts):
            place = _Place(draft, lot, index, _octets(draft))
            places = self._waiting.get(draft.email.tenant_id)
            if places is None:
                places = self._waiting[draft.email.tenant_id] = deque()
            places.append(place)
        if not self._is_scheduled:
            # Not now: the requests that arrived together have this moment to join.
            self._is_scheduled = True
            loop.call_soon(self._fill_lanes)
        await lot.done
        return [answer for answer in lot.answers if answer is not None]

    async def finish(self) -> None:
        """Returns once nothing waits and nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _fill_lanes(self) -> None:
        self._is_scheduled = False
        while self._waiting and self._free_lanes:
            self._free_lanes -= 1
            self._start(self._use_lane(self._next_batch()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _next_batch(self) -> list[_Place]:
        batch: list[_Place] = []
        octets = 0
        while self._waiting and len(batch) < self.most_emails:
            tenant_id, places = next(iter(self._waiting.items()))
            octets += places[0].octets
            if batch and octets > BATCH_OCTETS:
                break
            batch.append(places.popleft())
            if not places:
                del self._waiting[tenant_id]
            elif len(self._waiting) > 1:
                self._waiting[tenant_id] = self._waiting.pop(tenant_id)  # behind the others
        return batch

    async def _use_lane(self, batch: list[_Place]) -> None:
        refusal = await self._insert(batch)
        self._free_lanes += 1
        self._fill_lanes()
        if refusal is not None:
            await self._settle(batch, refusal)

    async def _insert(self, batch: list[_Place]) -> DispatcherError | None:
        """Inserts and answers; returns why nothing was answered, if so."""
        drafts = [place.draft for place in batch]
        began_at = time.perf_counter()
        try:
            insertion = await self.store.insert(drafts)
        except DispatcherError as error:
            return error.with_traceback(None)  # its frames have the batch
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests that wait need an answer
            get_log().error("error.unexpected", where="gathering", error=type(error).__name__)
            return DispatcherError("The email could not be stored.")
        metrics.API_INSERT_SECONDS.observe(time.perf_counter() - began_at)
        metrics.API_INSERT_EMAILS.observe(len(batch))
        metrics.API_EMAILS.add(len(insertion.due_at), "accepted")
        if insertion.due_at:
            accepted = [draft for draft in drafts if draft.email_id in insertion.due_at]
            self.on_inserted(accepted, insertion.due_at)
        answers = [_answer(place.draft, insertion) for place in batch]
        metrics.API_EMAILS.add(sum(_is_known(answer) for answer in answers), "known")
        for place, answer in zip(batch, answers, strict=True):
            place.answer(answer)
        return None

    async def _settle(self, batch: list[_Place], refusal: DispatcherError) -> None:
        """Answers with what the refusal means: for all of them, or for the one that is to blame."""
        is_everybodys = isinstance(refusal, StoreUnavailable) and not isinstance(refusal, StoreBusy)
        if is_everybodys or len(batch) == 1:
            for place in batch:
                place.answer(refusal)
            return
        for part in _parts(batch):
            async with self._splitting:
                refused = await self._insert(part)
            if refused is not None:
                await self._settle(part, refused)


def _answer(draft: Draft, insertion: Insertion) -> Answer:
    key = draft.email.message_key
    if draft.email_id in insertion.due_at:
        return Enqueued(draft.email_id, key, Acceptance.ACCEPTED)
    holder = insertion.known.get(draft.key)
    if holder is None:  # its holder was pruned between two statements
        return StoreBusy("The key was given up while it was looked at.")
    email_id, payload_hash = holder
    is_same = payload_hash == draft.payload_hash
    return Enqueued(email_id, key, Acceptance.KNOWN if is_same else Acceptance.CONFLICT)


def _is_known(answer: Answer) -> bool:
    return isinstance(answer, Enqueued) and answer.acceptance is Acceptance.KNOWN


def _parts(batch: list[_Place]) -> list[list[_Place]]:
    # Not halves: a wait for a lock is the dearest answer there is, and so it takes two such waits to find the one.
    size = max(1, math.isqrt(len(batch)))
    return [batch[start : start + size] for start in range(0, len(batch), size)]


def _octets(draft: Draft) -> int:
    email = draft.email
    return len(email.text or "") + len(email.html or "") + sum(len(file.content) for file in email.attachments)
