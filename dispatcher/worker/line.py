"""The stages of one worker, wired into a line, and how the line drains.

    arrivals ─▶ LeaseStage ─▶ SendStage ─▶ outcomes ─▶ RecordStage ─▶ acked
                                 ▲   └─▶ returns ─▶ ReturnStage ─▶ acked
                                 └──── deferred ◀──── RecordStage

Where something is away, this is what waits: without PostgreSQL, outcomes and arrivals; without RabbitMQ, acks are
dropped with the channel that they belonged to, and the redelivery finds the row as it is; without the provider,
nothing is leased.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dispatcher.broker.consumer import Consumer
from dispatcher.config import Settings
from dispatcher.host.batches import Batches
from dispatcher.host.ledger import Ledger
from dispatcher.host.lifecycle import unless_cut_off
from dispatcher.host.roster import Seat
from dispatcher.routing.routes import Routes
from dispatcher.store.leases import LeaseStore
from dispatcher.telemetry import metrics
from dispatcher.worker.attempts import Attempts
from dispatcher.worker.contents import Contents
from dispatcher.worker.in_flight_email import Ended, Returned
from dispatcher.worker.keep import Renewals, ReturnStage
from dispatcher.worker.lease import Arrival, LeaseStage
from dispatcher.worker.outage import StoreOutage
from dispatcher.worker.record import RecordStage
from dispatcher.worker.send import SendStage
from dispatcher.worker.watch import ProviderWatch
from dispatcher.worker.window import Window

SHOW_SECONDS: Final = 1.0


class Line:
    """The stages between a delivery and its ack."""

    def __init__(
        self,
        settings: Settings,
        consumer: Consumer,
        store: LeaseStore,
        routes: Routes,
        watch: ProviderWatch,
        ledger: Ledger,
        seat: Seat,
    ) -> None:
        """
        Args:
            watch: Made the breakers of `routes`.
            seat: Where the worker reports that commits and acks flow.
        """
        arrivals: Batches[Arrival] = Batches()
        outcomes: Batches[Ended] = Batches()
        returns: Batches[Returned] = Batches()
        outage = StoreOutage(seat.commit)
        self._prefetch = settings.prefetch
        self._consumer = consumer
        self._routes = routes
        self._watch = watch
        self._seat = seat
        self.window = Window(routes, settings.prefetch, arrivals)
        attempts = Attempts(
            routes,
            ledger,
            timeout_seconds=settings.send_timeout_seconds,
            allowed_headers=settings.allowed_provider_headers,
        )
        contents = Contents(
            store,
            outage,
            self.window,
            octets=settings.worker_memory_mb * 1_000_000,
            copies=routes.copies,
            prefetch=settings.prefetch,
        )
        self.send = SendStage(settings, attempts, contents, ledger, self.window, outcomes=outcomes, returns=returns)
        self.lease = LeaseStage(
            settings, store, consumer, outage, ledger, self.window, inbox=arrivals, leased=self.send
        )
        self.record = RecordStage(store, consumer, outage, ledger, self.window, inbox=outcomes, deferred=self.send)
        self.returned = ReturnStage(store, consumer, outage, self.window, inbox=returns)
        self._renewals = Renewals(store, self.window, self.send, lease_seconds=settings.lease_seconds)

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(unless_cut_off(self.lease.run))
            group.create_task(unless_cut_off(self.record.run, self._prefetch))
            group.create_task(unless_cut_off(self.returned.run))
            group.create_task(unless_cut_off(self._renewals.run))
            group.create_task(self._show_in_flight())
            group.create_task(unless_cut_off(self._watch.run, self._routes, self._consumer, self.window.wake))

    async def drain(self, seconds: float) -> None:
        """Gives back what nothing has left of, waits for what is on the wire, and records.

        What got no answer in that time is recorded as uncertain. The caller has stopped the deliveries.
        """
        until = asyncio.get_running_loop().time() + seconds
        # At once, since leasing may wait for PostgreSQL, and nothing may leave in the last moment; and what it leased.
        self.send.stop_all()
        await self.lease.stop()
        self.send.stop_all()
        await self.send.finish(until)
        await self.record.finish()
        await self.returned.finish()

    async def _show_in_flight(self) -> None:
        # Now and then, and not per email: whoever looks at a gauge sees moments.
        acked = 0
        while True:
            metrics.IN_FLIGHT.set(len(self.window.emails))
            if self._consumer.acked_count != acked:
                acked = self._consumer.acked_count
                self._seat.served()
            await asyncio.sleep(SHOW_SECONDS)
