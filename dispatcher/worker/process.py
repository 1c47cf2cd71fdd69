"""The worker process: what is opened in which order, and closed again when it drains."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace

import uvloop

from dispatcher.broker.consumer import Consumer
from dispatcher.config import Settings
from dispatcher.errors import BrokerRefused, ConfigurationError, StoreRefused, StoreUnavailable
from dispatcher.host.ledger import Ledger
from dispatcher.host.lifecycle import stop_event, unless_cut_off
from dispatcher.host.roster import Post, Seat
from dispatcher.providers.registry import most_at_once, open_provider
from dispatcher.routing.rate import RateLimit
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.store.leases import LeaseStore
from dispatcher.store.providers import ProviderStore
from dispatcher.store.server import verify_sessions
from dispatcher.telemetry import log, metric_files, quick_log
from dispatcher.telemetry.tracing import TRACER
from dispatcher.worker.coalescing import coalesced
from dispatcher.worker.line import Line
from dispatcher.worker.watch import ProviderWatch

FORGET_SECONDS = 1.0
"""A stop waits no longer than this to take back what the worker said of providers."""
POOL_SIZE = 3
"""Lease, record, and one for renewals, releases and rates: each has one statement under way at a time."""
CANCEL_SECONDS = 2.0
"""A RabbitMQ that hangs must not use up the drain's time; what it may still deliver then is not taken."""
RECYCLE_SPREAD = 0.2
"""Each worker picks its own number, so far around the one that is set: else they all ask at once."""
_LOOK_SECONDS = 1.0
AT_HAND = 4
"""One of so many messages more than emails may be sent at once: the next are here when a place is free, and the window
stays full over the way to RabbitMQ and back."""
GC_THRESHOLDS = (20_000, 20, 50)
"""An email is some dozens of objects, which die with it and without the collector: what it looks for, cycles of faults
and closed connections, is rare. By default it would look after every ten emails."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is.

    Attributes:
        slot: The same over restarts: the host and the slot's number.
        worker: Never seen before or again; at most 63 octets, so that it fits PostgreSQL's application_name.
    """

    slot: str
    worker: str

    @classmethod
    def new(cls, host: str, slot_number: int) -> Identity:
        """This process's identity."""
        slot = f"{host}:w{slot_number}"
        return cls(slot, f"{slot}:{os.getpid()}:{secrets.token_hex(4)}")


def run_worker(settings: Settings, post: Post) -> int:
    """Works until told to stop; returns the exit code."""
    identity = Identity.new(settings.host_name, post.number)
    log.configure(settings.log_level, settings.log_format, worker=identity.slot)
    gc.set_threshold(*GC_THRESHOLDS)
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, f"w{post.number}")
    TRACER.begin(identity.slot)
    try:
        uvloop.run(_work(settings, identity, post))
    finally:
        quick_log.log.buffer(None)
        TRACER.end()
    return 0


async def _work(settings: Settings, identity: Identity, post: Post) -> None:
    stop = stop_event(post)
    await _make_sure_of_store(settings, identity)
    quick_log.log.buffer(asyncio.get_running_loop().call_soon)
    pool = make_pool(
        settings.database_url,
        name=identity.worker,
        size=POOL_SIZE,
        lock_seconds=BATCH_LOCK_SECONDS,
        keeps_plans=True,
    )
    # Twice the window: after a lost channel, emails of the old one are still on the wire while new ones are leased.
    ledger = Ledger(settings.run_dir, worker=identity.worker, slot=identity.slot, slots=2 * settings.prefetch)
    providers = ProviderStore(pool, slot=identity.slot)
    watch = ProviderWatch(providers)
    routes = Routes([_route(name, settings, watch, providers) for name in settings.providers])
    await pool.open()
    try:
        store = LeaseStore(pool, worker=identity.worker, slot=identity.slot)
        await _dispatch(settings, identity, stop, store, routes, watch, ledger, post.seat)
    finally:
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(FORGET_SECONDS):
                await providers.forget_states()
        await routes.close()
        await pool.close()
    ledger.close()


async def _make_sure_of_store(settings: Settings, identity: Identity) -> None:
    """Returns where PostgreSQL lets us in, or is away: the pool goes on trying.

    Raises:
        ConfigurationError: PostgreSQL refuses us, or a pooler shares sessions. `run` checked both at its start, but a
            reload may have changed the URL. The worker that this one would replace goes on.
    """
    try:
        await verify_sessions(settings.database_url, name=identity.worker)
    except StoreRefused as refusal:
        raise ConfigurationError([str(refusal)]) from refusal
    except StoreUnavailable:
        pass


def _route(name: str, settings: Settings, watch: ProviderWatch, store: ProviderStore) -> Route:
    ceiling = settings.ceiling_of(name)
    limit = None if ceiling is None else RateLimit(store, name, ceiling)
    breaker = watch.new_breaker(name, window=most_at_once(name, settings))
    return Route(coalesced(open_provider(name, settings), settings.bulk_call_emails), breaker, limit)


async def _dispatch(
    settings: Settings,
    identity: Identity,
    stop: asyncio.Event,
    store: LeaseStore,
    routes: Routes,
    watch: ProviderWatch,
    ledger: Ledger,
    seat: Seat,
) -> None:
    """Consumes and works until the stop, then drains.

    Raises:
        ConfigurationError: RabbitMQ does not let us in, and never did. Whoever we are to replace works on meanwhile.
    """
    refusals: list[BrokerRefused] = []

    def note_refusal(refusal: BrokerRefused) -> None:
        if not seat.is_up:
            refusals.append(refusal)
            stop.set()

    window = routes.window(settings.prefetch, max(settings.lease_seconds / 2, settings.send_timeout_seconds))
    consumer = Consumer(
        settings.amqp_url,
        settings.queue,
        prefetch=_messages_at_hand(window, settings),
        on_tried=seat.up,
        on_refused=note_refusal,
        name=f"dispatcher {identity.worker}",
        ca_file=settings.ca_file,
    )
    line = Line(replace(settings, prefetch=window), consumer, store, routes, watch, ledger, seat)
    async with asyncio.TaskGroup() as group:
        working = group.create_task(line.run())
        consuming = group.create_task(unless_cut_off(consumer.run, line.lease.take, line.lease.forget))
        retiring = group.create_task(_ask_for_successor(seat, line, ledger, settings.recycle_emails))
        await stop.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await consumer.cancel()
        await line.drain(settings.drain_seconds)
        await consumer.close()
        # It may still be connecting, to a RabbitMQ that does not answer.
        await asyncio.wait({consuming}, timeout=CANCEL_SECONDS)
        for task in (consuming, working, retiring):
            task.cancel()
    if refusals:
        raise ConfigurationError([str(refusals[0])]) from refusals[0]
    log.get_log().info("worker.drained", sent=line.record.sent_count, released=line.returned.released_count)


def _messages_at_hand(window: int, settings: Settings) -> int:
    """How many unacked messages RabbitMQ lets us hold.

    Args:
        window: How many emails are sent at once.
    """
    emails = window + window // AT_HAND
    if window < settings.prefetch:
        # Ceilings have cut it: they bound the emails that are worth holding, and a message may point to many.
        return math.ceil(emails / settings.bundle_emails)
    # As if each pointed to one: in a trickle each does, and they are to keep a slow provider busy.
    return emails


async def _ask_for_successor(seat: Seat, line: Line, ledger: Ledger, after_emails: int) -> None:
    """Asks once: after about so many emails (never where that is 0), or when its ledger's file is lost.

    The worker works on until it is stopped: then it drains, and what is on the wire ends first.
    """
    spread = random.uniform(1 - RECYCLE_SPREAD, 1 + RECYCLE_SPREAD)  # noqa: S311
    enough = after_emails * spread if after_emails else math.inf
    # Nothing is done per email that can be done per second.
    while line.record.finished_count < enough and ledger.is_in_place:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_SECONDS)
    if not ledger.is_in_place:
        log.get_log().error("ledger.lost", file=ledger.path.name)
    seat.ask_for_successor()
