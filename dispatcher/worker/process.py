"""The worker process: opens connections in order, runs the pipeline, drains, and closes the connections."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import secrets
from contextlib import suppress

import uvloop

from dispatcher.broker.consumer import Consumer
from dispatcher.config import Settings
from dispatcher.domain.turns import LaneWeights
from dispatcher.domain.values import dataclass, replace
from dispatcher.errors import BrokerRefused, ConfigurationError, StoreRefused, StoreUnavailable
from dispatcher.host.clock import seconds_to_tick
from dispatcher.host.ledger import Ledger
from dispatcher.host.lifecycle import raise_on_stray_cancel, stop_event
from dispatcher.host.process_table import ChildContext, ProcessSlot
from dispatcher.providers.registry import max_in_flight, open_provider
from dispatcher.routing.domain_gates import DomainGates
from dispatcher.routing.gate import Gate
from dispatcher.routing.rate import RateLimit
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.connections import BATCH_LOCK_SECONDS, make_pool
from dispatcher.store.domains import DomainStore
from dispatcher.store.leases import LeaseStore
from dispatcher.store.providers import ProviderStore
from dispatcher.store.server import verify_sessions
from dispatcher.telemetry import log, metric_files, quick_log
from dispatcher.telemetry.tracing import TRACER
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.pipeline import Pipeline
from dispatcher.worker.simulator import simulator_route

CLEAR_STATES_SECONDS = 1.0
"""The longest that a stopping worker waits to delete its breaker states from PostgreSQL."""
POOL_SIZE = 3
"""Connections to PostgreSQL: one for leases, one for results, and one for renewals, releases and rate limits. Each
connection executes one statement at a time."""
CANCEL_SECONDS = 2.0
"""The longest wait for RabbitMQ to stop deliveries, so that a hanging RabbitMQ does not use up the drain's time. The
worker ignores messages that arrive later."""
RECYCLE_SPREAD = 0.2
"""A worker requests a replacement after a number of emails. Each worker varies this number by up to 20 %, so that
workers do not all restart together."""
_POLL_SECONDS = 1.0
PREFETCH_HEADROOM = 0.25
"""A worker prefetches 25 % more messages than the number of emails that it sends at the same time, to hide the round
trip to RabbitMQ."""
WAITING_SHARE = 0.125
"""The largest share of the prefetch window that may wait in this worker for slots of recipient domains."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Thresholds at which the garbage collector rarely runs. An email's few dozen objects are freed by reference counting.
Cycles (of exceptions and closed connections) are rare. By default the collector would run after every ten emails."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker's `slot`, such as `host-1:w0`, which its replacement inherits, and its name `worker`, which no other
    process ever has. A name has at most 63 octets, to fit PostgreSQL's application_name."""

    slot: str
    worker: str

    @classmethod
    def new(cls, host: str, slot_number: int) -> WorkerIdentity:
        slot = f"{host}:w{slot_number}"
        return cls(slot, f"{slot}:{os.getpid()}:{secrets.token_hex(4)}")


def run_worker(settings: Settings, context: ChildContext) -> int:
    """Runs a worker until it is stopped; returns the exit code."""
    identity = WorkerIdentity.new(settings.host_name, context.number)
    log.configure(settings.log_level, settings.log_format, worker=identity.slot)
    gc.set_threshold(*GC_THRESHOLDS)
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, f"w{context.number}")
    TRACER.begin(identity.slot)
    try:
        uvloop.run(_work(settings, identity, context))
    finally:
        quick_log.log.buffer(None)
        TRACER.end()
    return 0


async def _work(settings: Settings, identity: WorkerIdentity, context: ChildContext) -> None:
    stop = stop_event(context)
    # A reload may have changed the URL. If this process is a replacement, and PostgreSQL refuses the connection or a
    # pooler shares sessions, the old worker then keeps running.
    try:
        await verify_sessions(settings.database_url, name=identity.worker)
    except StoreRefused as refusal:
        raise ConfigurationError([str(refusal)]) from refusal
    except StoreUnavailable:
        pass
    quick_log.log.buffer(asyncio.get_running_loop().call_soon)
    name, limit = identity.worker, BATCH_LOCK_SECONDS
    pool = make_pool(settings.database_url, name=name, size=POOL_SIZE, lock_seconds=limit, keeps_plans=True)
    # The ledger has slots for two windows: after a lost channel, emails of the old channel are still on the wire while
    # new emails are leased.
    ledger = Ledger(settings.run_dir, worker=identity.worker, slot=identity.slot, slots=2 * settings.prefetch)
    providers = ProviderStore(pool, slot=identity.slot)
    breakers = BreakerListener(providers)
    weights = LaneWeights(settings.lanes)
    domains = DomainGates(
        DomainStore(pool, worker=identity.worker), most_waiting=math.ceil(settings.prefetch * WAITING_SHARE)
    )
    opened = [_route(each, settings, breakers, providers, weights) for each in settings.providers]
    routes = Routes(opened, weights=weights, domains=domains, simulator=simulator_route(pool))
    await pool.open()
    try:
        store = LeaseStore(pool, worker=identity.worker, slot=identity.slot, redeliver_seconds=settings.redeliver_for)
        await _dispatch(settings, identity, stop, store, routes, breakers, ledger, context.process_slot)
    finally:
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(CLEAR_STATES_SECONDS):
                await providers.delete_states()
        await routes.close()
        await pool.close()
    ledger.close()


def _route(
    name: str, settings: Settings, breakers: BreakerListener, store: ProviderStore, weights: LaneWeights
) -> Route:
    ceiling = settings.ceiling_of(name)
    limit = None if ceiling is None else RateLimit(store, name, ceiling, weights)
    most = max_in_flight(name, settings)
    breaker = breakers.new_breaker(name, window=most)
    provider = with_bulk_calls(open_provider(name, settings), settings.bulk_call_emails)
    return Route(provider, breaker, limit, Gate(most, weights))


async def _dispatch(
    settings: Settings,
    identity: WorkerIdentity,
    stop: asyncio.Event,
    store: LeaseStore,
    routes: Routes,
    breakers: BreakerListener,
    ledger: Ledger,
    process_slot: ProcessSlot,
) -> None:
    """Consumes messages until `stop` is set, then drains. Raises ConfigurationError if RabbitMQ refused the first
    connection."""
    refusals: list[BrokerRefused] = []

    def note_refusal(refusal: BrokerRefused) -> None:
        if not process_slot.is_up:
            refusals.append(refusal)
            stop.set()

    window = routes.window(settings.prefetch, max(settings.lease_seconds / 2, settings.send_timeout_seconds))
    consumer = Consumer(
        settings.amqp_url,
        {lane: settings.queue_of(lane) for lane in settings.lanes},
        prefetch=window + int(window * PREFETCH_HEADROOM),
        on_attempt=process_slot.mark_up,
        on_refused=note_refusal,
        name=f"dispatcher {identity.worker}",
        ca_file=settings.ca_file,
    )
    pipeline = Pipeline(replace(settings, prefetch=window), consumer, store, routes, breakers, ledger, process_slot)
    async with asyncio.TaskGroup() as group:
        working = group.create_task(pipeline.run())
        lease = pipeline.lease
        consuming = group.create_task(raise_on_stray_cancel(consumer.run, lease.take, lease.drop_unleased))
        retiring = group.create_task(_ask_for_successor(process_slot, pipeline, ledger, settings.recycle_emails))
        await stop.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await consumer.cancel()
        await pipeline.drain(settings.drain_seconds)
        await consumer.close()
        # The consumer may still be connecting to a RabbitMQ that does not answer.
        await asyncio.wait({consuming}, timeout=CANCEL_SECONDS)
        for task in (consuming, working, retiring):
            task.cancel()
    if refusals:
        raise ConfigurationError([str(refusals[0])]) from refusals[0]
    log.get_log().info("worker.drained", sent=pipeline.record.sent_count, released=pipeline.release.released_count)


async def _ask_for_successor(process_slot: ProcessSlot, pipeline: Pipeline, ledger: Ledger, after_emails: int) -> None:
    """Requests a replacement after about `after_emails` emails (0: no limit), or if the ledger file is lost."""
    spread = random.uniform(1 - RECYCLE_SPREAD, 1 + RECYCLE_SPREAD)  # noqa: S311
    enough = after_emails * spread if after_emails else math.inf
    # Poll once a second, which costs less than a check per email.
    while pipeline.record.finished_count < enough and ledger.is_in_place:  # noqa: ASYNC110
        await asyncio.sleep(seconds_to_tick(_POLL_SECONDS))
    if not ledger.is_in_place:
        log.get_log().error("ledger.lost", file=ledger.path.name)
    process_slot.ask_for_successor()
