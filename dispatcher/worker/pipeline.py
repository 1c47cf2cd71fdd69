"""The stages of one worker, how they are connected, and how they drain.

    arrivals ─▶ LeaseStage ─▶ SendStage ─▶ outcomes ─▶ RecordStage ─▶ acked
                                 ▲   └─▶ releases ─▶ ReleaseStage ─▶ acked
                                 ├──── deferred ◀──── RecordStage
                                 └──── Renewals ◀──── emails whose wait is over

During an outage of PostgreSQL, outcomes and arrivals wait. If the connection to RabbitMQ is lost, its acks are lost,
too. RabbitMQ redelivers the messages, and the lease stage finds that their emails are finished. During an outage of all
providers, no email is leased, except to probe a provider.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dispatcher.broker.consumer import Consumer
from dispatcher.config import Settings
from dispatcher.host.batch_queue import BatchQueue
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.ledger import Ledger
from dispatcher.host.lifecycle import raise_on_stray_cancel
from dispatcher.host.process_table import ProcessSlot
from dispatcher.routing.routes import Routes
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from dispatcher.worker.attempts import Attempts
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.contents import ContentLoader
from dispatcher.worker.controls import OperatorControls
from dispatcher.worker.in_flight_email import EndedAttempt, InFlightEmail, ReleaseRequest
from dispatcher.worker.kept_back import recipients_to_leave_out
from dispatcher.worker.lane_inbox import LaneInbox
from dispatcher.worker.lease import LeaseStage
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.record import RecordStage
from dispatcher.worker.release import ReleaseStage
from dispatcher.worker.renewals import Renewals
from dispatcher.worker.send import SendStage
from dispatcher.worker.window import Window

REPORT_SECONDS: Final = 1.0


class Pipeline:
    """All stages between a delivery and its ack."""

    def __init__(
        self,
        settings: Settings,
        consumer: Consumer,
        store: LeaseStore,
        routes: Routes,
        breakers: BreakerListener,
        ledger: Ledger,
        process_slot: ProcessSlot,
    ) -> None:
        arrivals = LaneInbox(routes.weights)
        outcomes: BatchQueue[EndedAttempt] = BatchQueue()
        releases: BatchQueue[ReleaseRequest] = BatchQueue()
        retries: BatchQueue[InFlightEmail] = BatchQueue()
        outage = StoreOutage(process_slot.commit)
        self._prefetch = settings.prefetch
        self._consumer = consumer
        self._routes = routes
        self._breakers = breakers
        self._process_slot = process_slot
        self.window = Window(routes, settings.prefetch, arrivals)
        attempts = Attempts(
            routes,
            ledger,
            timeout_seconds=settings.send_timeout_seconds,
            allowed_headers=settings.allowed_provider_headers,
            sms=settings.sms_rules,
            rules=settings.account_rules,
        )
        contents = ContentLoader(
            store,
            outage,
            self.window,
            octets=settings.worker_memory_mb * 1_000_000,
            copies=routes.copies,
            prefetch=settings.prefetch,
        )
        self._suppressed = recipients_to_leave_out(settings, store.suppressions, outage)
        self.send = SendStage(
            settings,
            attempts,
            contents,
            self._suppressed,
            ledger,
            self.window,
            outcomes=outcomes,
            releases=releases,
            retries=retries,
        )
        self.controls = OperatorControls(settings.lanes, consumer, store, routes, breakers, self.window, self.send)
        self.lease = LeaseStage(
            settings, store, consumer, outage, ledger, self.window, self.controls, inbox=arrivals, leased=self.send
        )
        self.record = RecordStage(store, consumer, outage, ledger, self.window, inbox=outcomes, deferred=self.send)
        self.release = ReleaseStage(store, consumer, outage, self.window, inbox=releases)
        self._renewals = Renewals(
            store, outage, self.window, self.send, inbox=retries, lease_seconds=settings.lease_seconds
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(raise_on_stray_cancel(self._suppressed.run))
            group.create_task(raise_on_stray_cancel(self.controls.run, self.lease))
            group.create_task(raise_on_stray_cancel(self.lease.run))
            group.create_task(raise_on_stray_cancel(self.record.run, self._prefetch))
            group.create_task(raise_on_stray_cancel(self.release.run))
            group.create_task(raise_on_stray_cancel(self._renewals.run))
            group.create_task(raise_on_stray_cancel(self._renewals.run_retries))
            group.create_task(self._report())
            group.create_task(raise_on_stray_cancel(self._breakers.run, self._routes, self._consumer, self.window.wake))

    async def drain(self, seconds: float) -> None:
        """Releases emails that are not on the wire, and records the answers to all others; an email without an answer
        after `seconds` is uncertain. Stop the deliveries before you call this."""
        until = asyncio.get_running_loop().time() + seconds
        # Stop the emails before the lease stage ends, because the lease stage may wait for PostgreSQL, and no email may
        # be sent during the wait. The send stage releases the emails that the last lease statement returns.
        self.send.stop_all()
        await self.lease.stop()
        await self.send.finish(until)
        await self.record.finish()
        await self.release.finish()

    async def _report(self) -> None:
        # Report once a second, which costs less than a report per email. Prometheus reads the gauge less often, anyway.
        acked = 0
        while True:
            metrics.IN_FLIGHT.set(len(self.window.emails))
            if self._consumer.acked_count != acked:
                acked = self._consumer.acked_count
                self._process_slot.note_served()
            await asyncio.sleep(seconds_to_tick(REPORT_SECONDS))
