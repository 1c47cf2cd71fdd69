"""Renews leases while their emails are in flight, and stops the emails whose lease was lost."""

from __future__ import annotations

import asyncio
from typing import Final
from uuid import UUID

from dispatcher.errors import DispatcherError
from dispatcher.host.clock import steady_clock
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.in_flight_email import EmailEvent, EmailState
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

RENEWALS_PER_LEASE: Final = 3
"""Renew after a third of the lease, even while the email waits for a retry. This leaves two more tries before the lease
ends, and proves to other hosts that the owner is alive (see `recovery.unrenewed`)."""


class Renewals:
    """Renews the leases of slow sends and of waiting emails."""

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
                if email.confirmed_at < before and email.state is not EmailState.REFUSED
            }
            if not old:
                continue
            try:
                await self._renew(old)
            except DispatcherError as error:
                self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=seconds / 2)

    async def _renew(self, tokens: dict[UUID, int]) -> None:
        """Renews these leases, and stops emails whose lease was lost.

        Skips emails whose row is locked and emails that PostgreSQL refuses. The next round tries them again.
        """
        asked_at = steady_clock()
        emails = {email_id: self._window.emails[email_id] for email_id in tokens}
        outcome = await self._store.locked.execute_unlocked(
            tokens, lambda free: self._store.renew({i: tokens[i] for i in free}, self._lease_seconds)
        )
        ours: set[UUID] = set().union(*outcome.answers)
        for email_id in tokens.keys() - outcome.locked - outcome.refused.keys():
            email = emails[email_id]
            if email_id in ours:
                email.confirm(asked_at, self._lease_seconds)
            elif email.may(EmailEvent.STOP):
                # Do not stop an email that is being recorded: the email has finished, and its lease has ended for that
                # reason.
                self._send.stop(email)
