"""Finds suppressed recipients between an email's lease and its attempt.

    leased ─▶ is a recipient's hash in memory? ─ no, nearly always ─▶ attempt
                 └ yes ─▶ one query for all such emails ─▶ attempt, without the suppressed recipients
                                                        └▶ all are suppressed: failed, nothing is sent

For each tenant, the worker keeps the first eight bytes of the hash of every suppressed recipient in memory. Entries
that were added within the last two seconds may be missing there. Entries that were removed or have expired stay in
memory until the next complete read. Such an entry causes a needless query, but the query decides. So a removal takes
effect at once. A worker that gets no emails reads no entries: the query decides about the next emails, until the worker
has read the entries again.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.suppression import Recipient
from dispatcher.domain.values import dataclass, field
from dispatcher.errors import DispatcherError, StatementRefused
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.store.address_hashes import AddressHasher, hash_with_topic
from dispatcher.store.bisection import bisect_batch
from dispatcher.store.suppressions import SuppressionReader, number_of
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log
from dispatcher.telemetry.storms import CountedLine
from dispatcher.worker.outage import StoreOutage

REFRESH_SECONDS: Final = 0.75
REFRESH_SHARE: Final = 20
"""A worker spends at most about a twentieth (1 / REFRESH_SHARE) of its time on reading entries, even if a long
transaction makes it read the same entries again."""
IDLE_SECONDS: Final = 10.0
"""A worker that gets no email for this time reads no entries until the next email."""
COMPLETE_SECONDS: Final = 3600.0
"""The time between two complete reads, which drop the entries that were removed or have expired."""
MAX_RECENT: Final = 10_000
"""After this many changed entries, the worker reads all entries again into a sorted array, which takes a tenth of the
memory of a set."""
LOG_SECONDS: Final = 3600.0
CACHED_DOMAINS: Final = 4096
Positions = Mapping[int, str]
NO_POSITIONS: Final[Positions] = MappingProxyType({})


class Question(NamedTuple):
    """An email with a recipient that may be suppressed. `hashes`: for each recipient, its position with each of
    `AddressHasher.suppressing_hashes`. `answer`: a future of the suppressed recipients."""

    email_id: UUID
    hashes: list[tuple[int, bytes]]
    answer: asyncio.Future[Positions]


@dataclass(slots=True)
class TenantMemory:
    """The suppressed recipients of one tenant. `numbers`: sorted, the first eight bytes of each hash at the last
    complete read. `recent`: entries read since."""

    numbers: array[int] = field(default_factory=lambda: array("Q"))
    has_domains: bool = False
    recent: set[int] = field(default_factory=set)

    def __contains__(self, address_hash: bytes) -> bool:
        number, numbers = number_of(address_hash), self.numbers
        at = bisect_left(numbers, number)
        return (at < len(numbers) and numbers[at] == number) or number in self.recent


class SuppressedRecipients:
    """Finds the suppressed recipients of emails. Keeps the suppression entries of all tenants in memory. While
    `is_current`, they are at most two seconds old."""

    def __init__(self, store: SuppressionReader, outage: StoreOutage, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self.is_current = False
        self._store = store
        self._outage = outage
        self._questions: BatchQueue[Question] = BatchQueue()
        self._is_read = asyncio.Event()
        self._idle_seconds = idle_seconds
        self._is_asked = False  # whether there was an email since the last read
        self._wanted = asyncio.Event()
        self.hasher: AddressHasher | None = None
        self._domain_hash: Callable[[str], bytes] = str.encode
        self._tenants: dict[str, TenantMemory] = {}
        self._recent_count = 0
        self._until = ""
        self._complete_until = 0.0
        self._unlogged = CountedLine(LOG_SECONDS)

    async def run(self) -> None:
        """Keeps the entries in memory up to date, and serves calls of `find`, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._refresh))
            group.create_task(raise_on_stray_cancel(self._questions.run, self._answer))

    def may_concern(self, email: OutgoingEmail, tenant_id: str, topic: str | None) -> bool:
        """Whether a recipient is perhaps suppressed for this tenant: then call `find`. Nearly always False; needs no
        I/O."""
        self._is_asked = True
        hasher = self.hasher
        if hasher is None or not self.is_current:
            self._wanted.set()
            return True  # the entries were not read yet, or not lately, so any recipient may be suppressed
        known = self._tenants.get(tenant_id)
        if known is None:
            return False
        for address in (*email.to, *email.cc, *email.bcc) if email.cc or email.bcc else email.to:
            address_hash = hasher.hash(address)
            if address_hash in known or (topic is not None and hash_with_topic(address_hash, topic) in known):
                return True
            if known.has_domains:
                domain_hash = self._domain_hash(address[address.rfind("@") :])
                if domain_hash in known or (topic is not None and hash_with_topic(domain_hash, topic) in known):
                    return True
        return False

    def redirected(self, email: OutgoingEmail) -> OutgoingEmail:
        """The email as this host sends it; see `kept_back`."""
        return email

    async def find(self, email: OutgoingEmail, topic: str | None) -> Positions:
        """The suppressed recipients and why, by position from 1 over To, Cc and Bcc. Raises StatementRefused."""
        await self._is_read.wait()
        assert self.hasher is not None
        hashes = [
            (position, address_hash)
            for position, address in enumerate((*email.to, *email.cc, *email.bcc), 1)
            for address_hash in self.hasher.suppressing_hashes(address, topic)
        ]
        answer: asyncio.Future[Positions] = asyncio.get_running_loop().create_future()
        self._questions.add(Question(email.email_id, hashes, answer))
        found = await answer
        for reason in found.values():
            metrics.SUPPRESSED_RECIPIENTS.add(1, reason)
        if count := self._unlogged.due(len(found)):
            get_log().warning("recipients.suppressed", count=count)
        return found

    async def opt_out(self, email: OutgoingEmail) -> None:
        """Suppresses an email's recipients, because the provider reports that they want no more messages. If PostgreSQL
        is unavailable, stores nothing: the provider reports this again for the next message."""
        if (hasher := self.hasher) is not None:
            entries = {hasher.hash(address): Recipient(address, is_domain=False).masked for address in email.to}
            try:
                await self._store.opt_out(email.email_id, entries)
            except DispatcherError as error:
                get_log().warning("recipients.opt_out_failed", email_id=str(email.email_id), reason=error.message)

    async def _answer(self, batch: list[Question]) -> None:
        open_questions = [question for question in batch if not question.answer.done()]
        if not open_questions:
            return
        _, culprits = await bisect_batch(open_questions, self._answer_with_retries)
        for question, error in culprits:
            if not question.answer.done():
                question.answer.set_exception(error)

    async def _answer_with_retries(self, questions: Sequence[Question]) -> None:
        """Answers the questions, and retries until PostgreSQL answers. Raises StatementRefused."""
        while True:
            try:
                found = await self._store.find({question.email_id: question.hashes for question in questions})
            except StatementRefused:
                raise
            except DispatcherError as error:
                await self._outage.wait(error)
                continue
            self._outage.end()
            for question in questions:
                if not question.answer.done():
                    question.answer.set_result(found.get(question.email_id, NO_POSITIONS))
            return

    async def _refresh(self) -> None:
        is_failing = False
        asked_at = time.monotonic()
        while True:
            began_at = time.monotonic()
            seconds = REFRESH_SECONDS
            self._is_asked = False
            try:
                await self._read()
            except DispatcherError as error:
                if not is_failing:
                    get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds)
                is_failing, self.is_current = True, False
            else:
                is_failing, self.is_current = False, True
                seconds = max(seconds, REFRESH_SHARE * (time.monotonic() - began_at))
            await asyncio.sleep(seconds)
            if self._is_asked:
                asked_at = began_at
            elif began_at - asked_at >= self._idle_seconds and not is_failing:
                self.is_current = False
                self._wanted.clear()
                await self._wanted.wait()
                asked_at = time.monotonic()

    async def _read(self) -> None:
        """Reads the entries that have changed since the last read. From time to time, reads all entries instead."""
        now = time.monotonic()
        if self.hasher is None or now >= self._complete_until or self._recent_count > MAX_RECENT:
            hasher = self.hasher or await self._store.open_hasher()
            found = await self._store.read_all()
            self._tenants = {i: TenantMemory(each.numbers, each.has_domains) for i, each in found.by_tenant.items()}
            self._recent_count = 0
            self._domain_hash = lru_cache(CACHED_DOMAINS)(hasher.hash_domain)
            self.hasher, self._complete_until = hasher, now + COMPLETE_SECONDS
        else:
            found = await self._store.read_changed(self._until)
            for tenant_id, each in found.by_tenant.items():
                known = self._tenants.setdefault(tenant_id, TenantMemory())
                self._recent_count += len(each.numbers)
                known.recent.update(each.numbers)
                known.has_domains |= each.has_domains
        self._until = found.until
        self._is_read.set()
