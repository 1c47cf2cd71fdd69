"""Reads the controls that operators set for all hosts, and applies the lanes' weights and the pauses in this worker.

    pause of a lane, or of everything ─▶ the lane's consumer is cancelled; unleased messages go back to RabbitMQ
    pause of a tenant                 ─▶ the lease statement leaves out the tenant's emails (see `lease.LeaseStage`)
    pause of a provider               ─▶ the worker does not try the provider; other providers take over
    resume of a provider              ─▶ also ends the wait of the provider's circuit breaker

The worker releases paused emails that it has leased, but that are not on the wire. Emails on the wire are completed.
While PostgreSQL is unreachable, the controls that were read last stay in force. This module also applies the ceilings
of recipient domains. An idle worker reads no controls until its next message; it leases the email after that read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from dispatcher.broker.consumer import Consumer
from dispatcher.domain.controls import Controls, Pause, PauseScope
from dispatcher.errors import DispatcherError
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.routing.routes import Routes
from dispatcher.store.controls import READ_SECONDS
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry.log import get_log
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.in_flight_email import EmailEvent
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

IDLE_SECONDS: Final = 10.0
"""A worker that gets no message for this time reads no controls until the next message."""
NOTHING: Final[frozenset[UUID]] = frozenset()


class LaneHolder(Protocol):
    """The part of the lease stage that this module calls."""

    def hold_lanes(self, lanes: frozenset[str]) -> None:
        """Leases no emails of these lanes until the next call. Emails of all other lanes may be leased."""

    def return_held(self) -> None: ...


@dataclass(eq=False, repr=False)
class OperatorControls:
    """Keeps the controls that this worker last read, and applies their changes. Until the first read, `current` is
    empty and the worker leases nothing. The lease stage sets `wanted` for each message before it leases the email."""

    lanes: Sequence[str]
    consumer: Consumer
    store: LeaseStore
    routes: Routes
    breakers: BreakerListener
    window: Window
    send: SendStage

    def __post_init__(self) -> None:
        self.current = Controls()
        self.wanted = asyncio.Event()
        self._log = get_log()
        self._paused_lanes: frozenset[str] = frozenset()
        self._lanes_changed = asyncio.Event()
        self.window.is_held = True

    async def run(self, lease: LaneHolder) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._read, lease))
            # A separate task, so that a slow RabbitMQ does not delay the next read.
            group.create_task(raise_on_stray_cancel(self._control_lanes, lease))

    async def _read(self, lease: LaneHolder) -> None:
        is_failing = False
        loop = asyncio.get_running_loop()
        busy_at = loop.time()
        while True:
            self.wanted.clear()
            try:
                self._apply(await self.store.read_controls(), lease)
                await self._release_paused()
                await self.breakers.apply_resumes(self.routes)
            except DispatcherError as error:
                if not is_failing:
                    self._log.warning("store.connection_lost", reason=error.message, retry_in_seconds=READ_SECONDS)
                is_failing = True
            else:
                is_failing = False
            await asyncio.sleep(seconds_to_tick(READ_SECONDS))
            # A message is outstanding while its email is leased, too, however long that takes.
            is_used = self.wanted.is_set() or self.consumer.outstanding or self.window.emails
            is_busy = is_used or self.routes.change_seconds is not None
            if is_busy or is_failing or self.current.pauses:
                busy_at = loop.time()
            elif loop.time() - busy_at >= IDLE_SECONDS:
                self.window.is_held = True
                await self.wanted.wait()
                busy_at = loop.time()

    async def paused_since(self, pauses: Collection[Pause], email_ids: Collection[UUID]) -> Collection[UUID]:
        """Which of these emails belong to a tenant or lane that was paused after the lease statement was sent. All, if
        PostgreSQL does not answer or no email may be leased now."""
        if self.window.is_held:
            return email_ids
        if self.current.pauses == pauses:
            return NOTHING
        try:
            return await self._find_paused(email_ids)
        except DispatcherError:
            return email_ids

    async def _control_lanes(self, lease: LaneHolder) -> None:
        """Cancels the consumers of paused lanes, and returns the lanes' unleased messages to RabbitMQ."""
        while True:
            await self._lanes_changed.wait()
            self._lanes_changed.clear()
            for lane in self.lanes:
                await (self.consumer.pause_lane if lane in self._paused_lanes else self.consumer.resume_lane)(lane)
            lease.return_held()

    def _apply(self, controls: Controls, lease: LaneHolder) -> None:
        began = [pause.subject for pause in controls.pauses if pause not in self.current.pauses]
        ended = [pause.subject for pause in self.current.pauses if pause not in controls.pauses]
        self.current = controls
        if began or ended:
            self._log.info("controls.changed", paused=", ".join(began), resumed=", ".join(ended))
        self.routes.weights.update(controls.lanes)
        self.routes.domains.update(controls.domains)
        if self.routes.pause({pause.name for pause in controls.pauses if pause.scope is PauseScope.PROVIDER}):
            self.breakers.note_pauses()
        paused_lanes = frozenset(lane for lane in self.lanes if controls.pause_of_lane(lane) is not None)
        if paused_lanes != self._paused_lanes:
            self._paused_lanes = paused_lanes
            self._lanes_changed.set()
            lease.hold_lanes(paused_lanes)
        self.window.is_held = paused_lanes.issuperset(self.lanes)
        self.window.wake()

    async def _release_paused(self) -> None:
        if not self.current.pauses:
            return
        emails = {i: email for i, email in self.window.emails.items() if email.may(EmailEvent.STOP)}
        paused = await self._find_paused(emails)
        for email_id, email in emails.items():
            is_paused = email_id in paused or email.provider in self.routes.paused or self.routes.are_all_paused
            if is_paused and email.may(EmailEvent.STOP):
                self.send.stop(email)

    async def _find_paused(self, email_ids: Collection[UUID]) -> Collection[UUID]:
        pauses = self.current.pauses
        if any(pause.scope is PauseScope.ALL for pause in pauses):
            return email_ids
        tenants = self.current.paused_tenants
        lanes = [pause.name for pause in pauses if pause.scope is PauseScope.LANE]
        if not email_ids or not (tenants or lanes):
            return NOTHING
        return await self.store.find_paused(email_ids, tenants, lanes)
