"""Reads what operators set for all hosts, and applies their pauses in this worker.

    all, lane ─▶ consumes nothing of it; unleased messages go back to RabbitMQ
    tenant    ─▶ the lease statement leaves out its emails (see `lease.LeaseStage`)
    provider  ─▶ its route may not be tried; other providers take over, as for an open breaker

Emails that are leased, but not on the wire, are released. What is on the wire ends. While PostgreSQL is unreachable,
the controls that were read last stay in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final
from uuid import UUID

from dispatcher.domain.controls import NORMAL, Controls, Pause, PauseScope
from dispatcher.errors import DispatcherError
from dispatcher.routing.routes import Routes
from dispatcher.store.controls import READ_SECONDS
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.in_flight_email import EmailEvent
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

NOTHING: Final[frozenset[UUID]] = frozenset()


class OperatorControls:
    """The controls, as this worker last read them.

    Attributes:
        current: Empty until the first read. Until then, the worker leases nothing.
    """

    def __init__(
        self, store: LeaseStore, routes: Routes, breakers: BreakerListener, window: Window, send: SendStage
    ) -> None:
        self.current = Controls()
        self._store = store
        self._routes = routes
        self._breakers = breakers
        self._window = window
        self._send = send
        self._log = get_log()
        window.is_held = True

    async def run(self) -> None:
        """Reads and applies the controls until cancelled."""
        is_failing = False
        while True:
            try:
                self._apply(await self._store.read_controls())
                await self._release_paused()
            except DispatcherError as error:
                if not is_failing:
                    self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=READ_SECONDS)
                is_failing = True
            else:
                is_failing = False
            await asyncio.sleep(READ_SECONDS)

    async def paused_since(self, pauses: Collection[Pause], email_ids: Collection[UUID]) -> Collection[UUID]:
        """Which of these emails are paused, if other pauses than these are in force by now; otherwise none.

        If PostgreSQL cannot say, all of them count as paused.
        """
        if self.current.pauses == pauses:
            return NOTHING
        try:
            return await self._find_paused(email_ids)
        except DispatcherError:
            return email_ids

    def _apply(self, controls: Controls) -> None:
        began = [pause.subject for pause in controls.pauses if pause not in self.current.pauses]
        ended = [pause.subject for pause in self.current.pauses if pause not in controls.pauses]
        self.current = controls
        if began or ended:
            self._log.info("controls.changed", paused=", ".join(began), resumed=", ".join(ended))
        self._routes.weights.update(controls.lanes)
        is_held = controls.pause_of_lane(NORMAL) is not None
        providers = {pause.name for pause in controls.pauses if pause.scope is PauseScope.PROVIDER}
        if self._routes.pause(providers) or is_held != self._window.is_held:
            self._window.is_held = is_held
            self._breakers.hold(is_held=is_held)
            self._window.wake()

    async def _release_paused(self) -> None:
        """Releases the emails that are paused, and not on the wire."""
        if not self.current.pauses:
            return
        emails = {i: email for i, email in self._window.emails.items() if email.may(EmailEvent.STOP)}
        paused = await self._find_paused(emails)
        for email_id, email in emails.items():
            is_paused = email_id in paused or email.provider in self._routes.paused or self._routes.are_all_paused
            if is_paused and email.may(EmailEvent.STOP):
                self._send.stop(email)

    async def _find_paused(self, email_ids: Collection[UUID]) -> Collection[UUID]:
        """Which of these emails belong to a paused tenant or lane."""
        pauses = self.current.pauses
        if any(pause.scope is PauseScope.ALL for pause in pauses):
            return email_ids
        tenants = self.current.paused_tenants
        lanes = [pause.name for pause in pauses if pause.scope is PauseScope.LANE]
        if not email_ids or not (tenants or lanes):
            return NOTHING
        return await self._store.find_paused(email_ids, tenants, lanes)
