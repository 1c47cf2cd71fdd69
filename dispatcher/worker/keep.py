"""Leases between two statements: renewed while an email is in hand, given back where nothing of it left."""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

from dispatcher.broker.consumer import Consumer
from dispatcher.errors import DispatcherError, StoreUnavailable
from dispatcher.host.batches import Batches
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import Event, Returned, State
from dispatcher.worker.outage import LOCKED_SECONDS, StoreOutage
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

RENEWALS_PER_LEASE: Final = 3
"""A lease is renewed at a third of its length, also while its email waits for a retry: two more tries before it ends,
and other hosts see that its owner is alive (see `relay.unrenewed`)."""


class ReturnStage:
    """Emails to be given back → pending again and due → their messages acked."""

    def __init__(
        self, store: LeaseStore, broker: Consumer, outage: StoreOutage, window: Window, *, inbox: Batches[Returned]
    ) -> None:
        self._store = store
        self._broker = broker
        self._outage = outage
        self._window = window
        self._inbox = inbox
        self.released_count = 0

    async def run(self) -> None:
        """Gives back until cancelled."""
        await self._inbox.run(self._release)

    async def _release(self, batch: list[Returned]) -> None:
        """Releases the leases: the emails are pending and due again, so their messages have done their work.

        An email whose provider is away while others work, or for which there is no memory, is due later: leased at
        once, it would only come back again.
        """
        tokens = {email.email_id: email.lease.token for email, _ in batch}
        away_seconds = {email.email_id: seconds for email, seconds in batch}
        locked: set[UUID] | None = None
        while locked is None:
            try:
                locked = await self._store.release_free(tokens, away_seconds)
            except StoreUnavailable as error:
                await self._outage.wait(error)
        self._outage.over()
        released = []
        for returned in batch:
            email = returned.email
            if email.email_id in locked:
                self._inbox.add_later(returned, LOCKED_SECONDS)
                continue
            email.on(Event.FINISH)
            del self._window.emails[email.email_id]
            released.append(email.delivery)
        self.released_count += len(released)
        self._broker.ack(released)
        self._window.wake()

    async def finish(self) -> None:
        """Returns once everything queued is given back."""
        await self._inbox.finish()


class Renewals:
    """Renews the leases of slow sends and of emails that wait, and stops the emails whose lease was lost."""

    def __init__(self, store: LeaseStore, window: Window, send: SendStage, *, lease_seconds: float) -> None:
        self._store = store
        self._window = window
        self._send = send
        self._lease_seconds = lease_seconds
        self._log = get_log()

    async def run(self) -> None:
        """Renews until cancelled."""
        seconds = self._lease_seconds / RENEWALS_PER_LEASE
        while True:
            await asyncio.sleep(seconds / 2)
            before = steady_clock() - seconds
            old = {
                email_id: email.lease.token
                for email_id, email in self._window.emails.items()
                if email.confirmed_at < before and email.state is not State.REFUSED
            }
            if not old:
                continue
            try:
                await self._renew(old)
            except DispatcherError as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds / 2)

    async def _renew(self, tokens: dict[UUID, int]) -> None:
        """Renews what can be renewed; of emails that are locked, or that PostgreSQL refuses, we learn nothing."""
        asked_at = steady_clock()
        emails = {email_id: self._window.emails[email_id] for email_id in tokens}
        around = await self._store.locked.around(
            tokens, lambda free: self._store.renew({i: tokens[i] for i in free}, self._lease_seconds)
        )
        ours: set[UUID] = set().union(*around.answers)
        for email_id in tokens.keys() - around.locked - around.refused.keys():
            email = emails[email_id]
            if email_id in ours:
                email.confirm(asked_at, self._lease_seconds)
            elif email.may(Event.STOP):
                # Not an email that is being recorded: its lease has ended because it is done.
                self._send.stop(email)
