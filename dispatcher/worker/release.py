"""The release stage: ends the leases of emails that were not sent, so that the emails are due again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer
from dispatcher.errors import StoreUnavailable
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from dispatcher.worker.in_flight_email import EmailEvent, ReleaseRequest
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.window import Window

LONGEST_DELAY_SECONDS: Final = 240.0
"""A released email is due again after at most this time. It must be below `store.instants.AHEAD_SECONDS`: the relay
would publish an email with a later due mark at once."""


@dataclass(eq=False, repr=False)
class ReleaseStage:
    """Makes emails pending and due again, or lets them wait, then acks their messages."""

    store: LeaseStore
    broker: Consumer
    outage: StoreOutage
    window: Window
    _: KW_ONLY
    inbox: BatchQueue[ReleaseRequest]
    released_count: int = field(default=0, init=False)

    async def run(self) -> None:
        await self.inbox.run(self._release)

    async def _release(self, batch: list[ReleaseRequest]) -> None:
        """Releases the leases; the emails are then pending or waiting. They are due later if they were deferred, or
        lack a provider or memory: otherwise, workers would lease and release them over and over."""
        tokens = {email.email_id: email.lease.token for email, _, wait in batch if wait is None}
        delays = {email.email_id: min(seconds, LONGEST_DELAY_SECONDS) for email, seconds, _ in batch}
        waits = {email.email_id: (email.lease.token, wait) for email, _, wait in batch if wait is not None}
        locked: set[UUID] = set()
        if tokens:
            locked |= await self._until_answered(lambda: self.store.release_unlocked(tokens, delays))
        if waits:
            locked |= await self._until_answered(lambda: self.store.wait_for_domains(waits))
            metrics.DOMAIN_WAITS.add(len(waits))
        released = []
        for request in batch:
            email = request.email
            if email.email_id in locked:
                self.inbox.add_later(request, LOCKED_SECONDS)
                continue
            email.on(EmailEvent.FINISH)
            del self.window.emails[email.email_id]
            released.append(email.delivery)
        self.released_count += len(released)
        self.broker.ack(released)
        self.window.wake()

    async def _until_answered(self, release: Callable[[], Awaitable[set[UUID]]]) -> set[UUID]:
        """Calls `release` until PostgreSQL answers. Returns the emails whose rows are locked."""
        while True:
            try:
                locked = await release()
            except StoreUnavailable as error:
                await self.outage.wait(error)
            else:
                self.outage.end()
                return locked

    async def finish(self) -> None:
        await self.inbox.finish()
