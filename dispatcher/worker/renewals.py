"""Renews leases while their emails are in flight, and before each retry. Stops emails that may no longer be sent."""

from __future__ import annotations

import asyncio
from dataclasses import KW_ONLY, dataclass
from typing import Final
from uuid import UUID

from dispatcher.errors import DispatcherError
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import EmailEvent, EmailState, InFlightEmail
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

RENEWALS_PER_LEASE: Final = 3
"""A lease is renewed after a third of its time, even while the email waits for a retry. This leaves two more tries
before the lease ends, and proves to other hosts that the owner is alive (see `recovery.unrenewed`)."""


@dataclass(eq=False, repr=False)
class Renewals:
    """Renews the leases of emails whose attempt takes long, and of emails that wait for a retry."""

    store: LeaseStore
    outage: StoreOutage
    window: Window
    send: SendStage
    _: KW_ONLY
    inbox: BatchQueue[InFlightEmail]
    lease_seconds: float

    async def run(self) -> None:
        seconds = self.lease_seconds / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(seconds / 2)
            before = steady_clock() - seconds
            old = {
                email_id: email.lease.token
                for email_id, email in self.window.emails.items()
                if email.confirmed_at < before and email.state is not EmailState.REFUSED
            }
            if not old:
                continue
            try:
                await self._renew(old)
            except DispatcherError as error:
                get_log().warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds / 2)

    async def run_retries(self) -> None:
        """Begins the next attempt of each email whose wait is over, until cancelled."""
        await self.inbox.run(self._retry)

    async def _retry(self, batch: list[InFlightEmail]) -> None:
        """Renews the leases, and begins the next attempts; stops emails whose acceptance an event has proven
        meanwhile."""
        while waiting := [email for email in batch if email.state is EmailState.WAITING]:
            try:
                locked = await self._renew({email.email_id: email.lease.token for email in waiting})
            except DispatcherError as error:
                await self.outage.wait(error)
                continue
            self.outage.end()
            for email in waiting:
                if email.email_id in locked:
                    self.inbox.add_later(email, LOCKED_SECONDS)
                elif email.state is EmailState.WAITING:
                    self.send.resume(email)
            return

    async def _renew(self, tokens: dict[UUID, int]) -> set[UUID]:
        """Renews these leases, and stops emails whose lease is lost. Returns those to try again later: locked or
        refused."""
        asked_at = steady_clock()
        emails = {email_id: self.window.emails[email_id] for email_id in tokens}
        outcome = await self.store.locked.execute_unlocked(
            tokens, lambda free: self.store.renew({i: tokens[i] for i in free}, self.lease_seconds)
        )
        ours: set[UUID] = set().union(*outcome.answers)
        for email_id in tokens.keys() - outcome.locked - outcome.refused.keys():
            email = emails[email_id]
            if email_id in ours:
                email.confirm(asked_at, self.lease_seconds)
            elif email.may(EmailEvent.STOP):
                # The email has lost its lease, so stop it. An email whose result was just recorded has no lease,
                # either, but `may` has excluded that email.
                self.send.stop(email)
        return outcome.locked
