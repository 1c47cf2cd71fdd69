"""The ceilings of recipient domains in one worker: emails per second, and attempts at the same time, over all hosts.

PostgreSQL has one row per domain, with both ceilings. Each email needs a token of its domain, and holds a slot of its
domain during its attempt. A worker claims tokens for a tenth of a second, and all slots that it needs, with one
statement. So the ceilings do not cost a statement for each email. While no domain has ceilings, there is no cost.

If an email gets no token, the worker releases it at once, and the email becomes `waiting` (see `wait_for_domains`). If
an email gets a token but no slot, it first waits in the worker for a moment, because another attempt will soon end.
Only a few emails may wait in this way, so most of the prefetch window stays free for emails to other domains.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from dispatcher.domain.accounts import provider_of
from dispatcher.domain.controls import LIMITED_PROVIDER, DomainLimit
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import steady_clock
from dispatcher.routing.evidence import domains_of
from dispatcher.store.comparable_address import comparable_domain
from dispatcher.store.domains import SLOT_SECONDS, Claim, DomainStore

CLAIM_SECONDS: Final = 0.1
"""A worker takes the tokens for this time in one step. Tokens that it does not use in this time are lost."""
ASK_SECONDS: Final = 0.25
"""How often a worker asks again for a slot while other workers hold all slots."""
RENEW_SECONDS: Final = 1.0
"""How often a worker renews its slots, and gives back slots that it does not need."""
HOLD_SECONDS: Final = 1.0
"""The longest time for which an email waits for a slot in the worker."""
EAGERNESS: Final = 1.25
"""Waiting emails become due at the pace that the ceilings allow, multiplied by this, so that no token and no slot stays
unused."""


class DomainFull(Exception):
    """The ceiling of a recipient domain is reached. `pace`: how many waiting emails may become due per second."""

    def __init__(self, domain: str, pace: float) -> None:
        super().__init__()
        self.domain = domain
        self.pace = pace


class _WaitingEmail(NamedTuple):
    granted: asyncio.Future[bool]
    until: float


class DomainGate:
    """One worker's tokens and slots of a domain. Emails get tokens and slots in order of arrival."""

    def __init__(self, store: DomainStore, limit: DomainLimit, waits: asyncio.Semaphore) -> None:
        """`waits` limits how many emails may wait in this worker, for all domains together."""
        self._store = store
        self.domain = limit.domain
        self._limit: DomainLimit | None = limit
        self._waits = waits
        self._waiting: deque[_WaitingEmail] = deque()
        self._tokens = 0
        self._tokens_until = self._empty_until = -math.inf
        self._slots = self._used = 0
        self._slots_until = -math.inf  # by the steady clock, which also counts while the host is suspended
        self._lengths: list[float] = []  # of the attempts since the last claim
        self._claimed_at = -math.inf
        self._is_asked = asyncio.Event()
        self._claiming: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def pace(self) -> float:
        return math.inf if self._limit is None else EAGERNESS * self._limit.pace

    def set_limit(self, limit: DomainLimit | None) -> None:
        """Applies the ceilings that an operator set; None if the ceilings were removed."""
        self._limit = limit
        self._admit()

    async def enter(self) -> bool:
        """Waits for a token and a slot for one email. If it did not get both, the worker must release the email.
        Otherwise, call `leave` after the attempt, or `give_back` if no attempt was made."""
        if not self._waiting and self._may_enter():
            self._take()
            return True
        limit, now = self._limit, self._loop.time()
        # Do not wait if PostgreSQL had too few tokens at a claim less than CLAIM_SECONDS ago.
        is_empty = limit is not None and not self._has_token(limit) and now < self._empty_until
        if is_empty or self._waits.locked():
            return False
        async with self._waits:
            return await self._wait()

    def leave(self, seconds: float | None) -> None:
        """Frees the email's slot; its token stays used. `seconds` is None if the attempt raised an exception."""
        if seconds is not None:
            self._lengths.append(seconds)
        self._used -= 1
        self._admit()

    def give_back(self) -> None:
        """Frees the email's slot, and gives back the email's token, because no attempt was begun."""
        self._tokens += 1
        self._used -= 1
        self._admit()

    def _may_enter(self) -> bool:
        limit = self._limit
        if limit is None:
            return True
        has_slot = limit.concurrent is None or (self._used < self._slots and steady_clock() < self._slots_until)
        return has_slot and self._has_token(limit)

    def _has_token(self, limit: DomainLimit) -> bool:
        return limit.per_second is None or (self._tokens >= 1 and self._loop.time() < self._tokens_until)

    def _take(self) -> None:
        self._tokens -= 1
        self._used += 1

    async def _wait(self) -> bool:
        email = _WaitingEmail(self._loop.create_future(), self._loop.time() + HOLD_SECONDS)
        self._waiting.append(email)
        self._is_asked.set()
        if self._claiming is None:
            self._claiming = asyncio.create_task(self._claim_while_needed())
        try:
            return await email.granted
        except asyncio.CancelledError:
            if not email.granted.cancelled() and email.granted.exception() is None and email.granted.result():
                self.give_back()
            raise

    def _admit(self) -> None:
        while self._waiting and self._may_enter():
            granted = self._waiting.popleft().granted
            if not granted.done():
                self._take()
                granted.set_result(True)

    def _refuse(self) -> None:
        """Refuses emails for which there is no token, and emails that have waited too long for a slot."""
        limit, now = self._limit, self._loop.time()
        has_token = limit is None or self._has_token(limit)
        while self._waiting and (not has_token or self._waiting[0].until <= now):
            granted = self._waiting.popleft().granted
            if not granted.done():
                granted.set_result(False)

    async def _claim_while_needed(self) -> None:
        """Claims tokens and slots while emails wait or use slots. At the end, the worker holds no slot."""
        try:
            while self._waiting or self._holds_slots():
                await self._claim()
                self._admit()
                self._refuse()
                if self._waiting or self._holds_slots():
                    await self._wait_to_claim()
        except Exception as error:  # noqa: BLE001 - each waiting attempt handles it
            for email in self._waiting:
                if not email.granted.done():
                    email.granted.set_exception(error)
            self._waiting.clear()
        finally:
            self._claiming = None

    def _holds_slots(self) -> bool:
        is_limited = self._limit is not None and self._limit.concurrent is not None
        return is_limited and (self._used > 0 or self._slots > 0)

    async def _claim(self) -> None:
        limit, waiting = self._limit, len(self._waiting)
        if limit is None:
            return
        chunk = 0 if limit.per_second is None else max(waiting, math.ceil(limit.per_second * CLAIM_SECONDS))
        tokens = chunk if waiting else 0
        self._claimed_at = self._loop.time()
        self._is_asked.clear()
        asked_at = steady_clock()
        try:
            slots = 0 if limit.concurrent is None else self._used + waiting
            lengths, self._lengths = self._lengths, []
            claim = await self._store.claim(self.domain, tokens=tokens, slots=slots, used=self._used, lengths=lengths)
        except DispatcherError:
            claim = Claim(0, None, limit.attempt_seconds)
        if claim is None:
            self._limit = None  # the ceilings were removed; the next read of the controls will show this
            return
        if self._limit is not None:  # which may have changed meanwhile
            self._limit = replace(self._limit, attempt_seconds=claim.attempt_seconds)
        if claim.tokens is not None and waiting:
            now = self._loop.time()
            self._tokens, self._tokens_until = claim.tokens, now + CLAIM_SECONDS
            if claim.tokens < tokens:
                self._empty_until = now + CLAIM_SECONDS
        if claim.slots is not None:
            self._slots, self._slots_until = claim.slots, asked_at + SLOT_SECONDS

    async def _wait_to_claim(self) -> None:
        """Waits until the next claim is due: an email arrives, or ASK_SECONDS pass (RENEW_SECONDS if none waits)."""
        until = self._claimed_at + (ASK_SECONDS if self._waiting else RENEW_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(until - self._loop.time()):
                await self._is_asked.wait()
        await asyncio.sleep(self._claimed_at + CLAIM_SECONDS - self._loop.time())


class DomainGates:
    """The gates of all domains that have ceilings, in one worker."""

    def __init__(self, store: DomainStore | None = None, *, most_waiting: int = 0) -> None:
        self._store = store
        self._waits = asyncio.Semaphore(most_waiting)
        self._gates: dict[str, DomainGate] = {}

    def update(self, limits: Mapping[str, DomainLimit]) -> None:
        if self._store is None:
            return
        for domain in self._gates.keys() - limits.keys():
            self._gates.pop(domain).set_limit(None)
        for domain, limit in limits.items():
            if gate := self._gates.get(domain):
                gate.set_limit(limit)
            else:
                self._gates[domain] = DomainGate(self._store, limit, self._waits)

    def concern(self, provider: str) -> bool:
        """Whether ceilings of recipient domains may apply to emails that this provider sends."""
        return bool(self._gates) and provider_of(provider) == LIMITED_PROVIDER

    async def enter(self, email: OutgoingEmail) -> Sequence[DomainGate]:
        """Waits at the gate of each of the email's recipient domains that has ceilings; returns these gates. Call
        `leave` or `give_back` of each gate once. Raises DomainFull."""
        domains = self._gates.keys() & map(comparable_domain, domains_of(email))
        gates = [self._gates[domain] for domain in sorted(domains)]
        entered: list[DomainGate] = []
        try:
            for gate in gates:
                await _enter(gate)
                entered.append(gate)
        except BaseException:
            for gate in entered:
                gate.give_back()
            raise
        return gates


async def _enter(gate: DomainGate) -> None:
    if not await gate.enter():
        raise DomainFull(gate.domain, gate.pace)
