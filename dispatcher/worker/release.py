"""The release stage: ends the leases of emails that were not sent, so that the emails are due again."""

from __future__ import annotations

from uuid import UUID

from dispatcher.broker.consumer import Consumer
from dispatcher.errors import StoreUnavailable
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.store.leases import LeaseStore
from dispatcher.worker.in_flight_email import EmailEvent, ReleaseRequest
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.window import Window


class ReleaseStage:
    """Makes emails pending and due again, then acks their messages."""

    def __init__(
        self,
        store: LeaseStore,
        broker: Consumer,
        outage: StoreOutage,
        window: Window,
        *,
        inbox: BatchQueue[ReleaseRequest],
    ) -> None:
        self._store = store
        self._broker = broker
        self._outage = outage
        self._window = window
        self._inbox = inbox
        self.released_count = 0

    async def run(self) -> None:
        """Releases leases until cancelled."""
        await self._inbox.run(self._release)

    async def _release(self, batch: list[ReleaseRequest]) -> None:
        """Releases the leases. The emails are then pending and due, so their messages can be acked.

        An email becomes due later, and not immediately, if its provider is unavailable while other providers work, or
        if there is no memory for its content. Otherwise, workers would lease and release it over and over.
        """
        tokens = {email.email_id: email.lease.token for email, _ in batch}
        delays = {email.email_id: seconds for email, seconds in batch}
        locked: set[UUID] | None = None
        while locked is None:
            try:
                locked = await self._store.release_unlocked(tokens, delays)
            except StoreUnavailable as error:
                await self._outage.wait(error)
        self._outage.end()
        released = []
        for request in batch:
            email = request.email
            if email.email_id in locked:
                self._inbox.add_later(request, LOCKED_SECONDS)
                continue
            email.on(EmailEvent.FINISH)
            del self._window.emails[email.email_id]
            released.append(email.delivery)
        self.released_count += len(released)
        self._broker.ack(released)
        self._window.wake()

    async def finish(self) -> None:
        """Waits until every queued lease is released."""
        await self._inbox.finish()
