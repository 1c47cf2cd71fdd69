"""The API process: opens its resources in order, serves, and closes them when it stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from dispatcher.admission.enqueueing import open_enqueuer
from dispatcher.admission.fair_limiter import FairLimiter, FairSessions
from dispatcher.admission.insert_batcher import CONCURRENT_INSERTS, CONCURRENT_RETRIES
from dispatcher.admission.policy import Policy
from dispatcher.admission.process import ACCEPT_BACKLOG, NEEDS_A_KEY, metrics_pages, run
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.admission.validation import EmailValidator
from dispatcher.api.access import AccessControl
from dispatcher.api.app import make_app
from dispatcher.api.body_reader import BodyReader
from dispatcher.api.enqueue_endpoints import EnqueueEndpoints
from dispatcher.api.error_middleware import ErrorMiddleware
from dispatcher.api.face import ActionEndpoints
from dispatcher.api.feed_endpoints import FeedEndpoints
from dispatcher.api.http_protocol import GuardedApp, GuardedProtocol, RequestIds, Timeouts
from dispatcher.api.operator_jobs import OperatorJobs, ReplayEndpoints
from dispatcher.api.status_endpoints import StatusEndpoints
from dispatcher.config import Settings
from dispatcher.config.settings import EVENTS_FIELDS
from dispatcher.config.values import LOOPBACKS
from dispatcher.errors import ConfigurationError
from dispatcher.providers.capabilities import capabilities_of
from dispatcher.store.api_keys import KeyStore
from dispatcher.store.connections import BATCH_LOCK_SECONDS, Pool, make_pool
from dispatcher.store.connections import LOCK_SECONDS as STORE_LOCK_SECONDS
from dispatcher.telemetry import log, metrics

if TYPE_CHECKING:
    from dispatcher.api.captured_endpoints import CapturedEndpoints
    from dispatcher.api.event_endpoints import EventEndpoints
    from dispatcher.api.ops_page.application import OpsMount
    from dispatcher.events.sns_certificates import Fetch

LOCK_SECONDS: Final = 0.25
"""How long an insert waits for a transaction that is inserting the same message key, and how long a request waits for
its API key's quota row. While an insert waits, all emails of its batch wait."""
READ_SESSIONS: Final = 3
KEY_SESSIONS: Final = 2
"""The number of database sessions for keys and quotas only, so that these do not wait for list queries."""
OPERATOR_SESSIONS: Final = 4
"""The number of database sessions for operators' requests only, half of them for one tenant. If such a request waits
for a locked row, other requests do not wait."""
MAX_OPERATOR_BYTES: Final = 256 * 1024
"""The largest body of an operator's request. A thousand ids need 40 KB."""
UNSUBSCRIBE_SESSIONS: Final = 1
"""The number of database sessions for recipients' requests only."""
OPERATOR_LOCK_SECONDS: Final = 2.0
OPS_SESSIONS: Final = 4
"""The number of database sessions for the operators' page only: one for each of its concurrent requests."""
OPS_STATEMENT_SECONDS: Final = 2.0
"""The time limit of each statement for the operators' page. If a statement takes longer, the visitor gets a page that
asks for a narrower filter."""
EVENT_SESSIONS: Final = 2
"""The number of database sessions for providers' events: one stores a batch, the other looks for locked rows."""
KEEP_ALIVE_SECONDS: Final = 75
"""How long an idle connection stays open. Proxies keep idle connections for 60 s. If the API closed a connection before
the proxy did, the proxy's next request would fail."""
SHUTDOWN_SECONDS: Final = 3.0
"""How long the process publishes the messages of emails at shutdown. The relay publishes the messages that remain."""
ACCEPTS_PER_ITERATION: Final = 16
"""How many new connections the event loop accepts per iteration. libuv accepts one connection per listening descriptor
and iteration, so the loop gets several descriptors of the same socket. With a single descriptor, clients that connect
and disconnect would keep all other clients in the backlog."""
GC_THRESHOLDS: Final = (10_000, 4, 50)
"""The garbage collector's thresholds. Requests leave almost no reference cycles. With Python's defaults and a few
thousand waiting requests, the collector would repeatedly scan the objects of all requests, up to 40 ms each time. But
abandoned pipelined requests are cycles. To free 200,000 objects at once took 0.2 s; to free 50,000 takes 0.04 s."""


_OR_NO_KEY: Final = (
    "Or, for development on this machine only, set DISPATCHER_API_ALLOW_ANONYMOUS=on and listen on 127.0.0.1. Then "
    "every local client may do everything until the first key is created."
)


def run_api(settings: Settings, listener: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit code 0."""
    return run(settings, "api", lambda stop: serve(settings, listener, stop))


async def serve(
    settings: Settings,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    lock_seconds: float = LOCK_SECONDS,
    shutdown_seconds: float = SHUTDOWN_SECONDS,
    fetch: Fetch | None = None,
) -> None:
    """Serves until `stop` is set, then finishes the requests in progress.

    `fetch` requests a URL of Amazon SNS, to get a certificate or to confirm a subscription. By default, it sends the
    request over the network; tests pass a different function.
    """
    async with AsyncExitStack() as opened:

        async def pool(name: str, size: int, lock_seconds: float) -> Pool:
            made = make_pool(settings.database_url, name=f"dispatcher api{name}", size=size, lock_seconds=lock_seconds)
            return await opened.enter_async_context(made)

        write_sessions = await pool("", CONCURRENT_INSERTS + CONCURRENT_RETRIES, lock_seconds)
        read_sessions = await pool(" reader", READ_SESSIONS, STORE_LOCK_SECONDS)
        key_sessions = await pool(" keys", KEY_SESSIONS, lock_seconds)
        operator_sessions = await pool(" operator", OPERATOR_SESSIONS, OPERATOR_LOCK_SECONDS)
        unsubscribe_sessions = await pool(" unsubscribe", UNSUBSCRIBE_SESSIONS, OPERATOR_LOCK_SECONDS)
        slots = FairLimiter(settings.api_max_concurrent_requests)
        memory = FairLimiter(settings.api_memory_bytes, max_request=settings.api_max_body_bytes)
        access = AccessControl(
            KeyStore(key_sessions), slots, may_be_open=settings.api_allow_anonymous and is_loopback(settings)
        )
        await access.refresh()
        if not (access.is_open or access.has_usable_keys):
            raise ConfigurationError([f"{NEEDS_A_KEY} {_OR_NO_KEY}"])
        enqueuer = await open_enqueuer(settings, opened, access.quotas, write_sessions, read_sessions, name="api")
        refusals = RefusalCounter("api", lambda code: metrics.API_REFUSALS.add(1, code))
        enqueueing = EnqueueEndpoints(
            access,
            BodyReader(slots, memory, max_bytes=settings.api_max_body_bytes),
            EmailValidator(Policy(settings), capabilities_of(settings.providers), settings.lanes),
            enqueuer,
            refusals,
        )
        status = StatusEndpoints(access, settings.lease_seconds, read_sessions)
        operator_bodies = BodyReader(slots, memory, max_bytes=min(MAX_OPERATOR_BYTES, settings.api_max_body_bytes))
        jobs = OperatorJobs(settings)
        opened.push_async_callback(jobs.stop)
        shared = (access, operator_bodies, FairSessions(operator_sessions), read_sessions, settings)
        operators = (ActionEndpoints(*shared), ReplayEndpoints(*shared, jobs=jobs), FeedEndpoints(*shared))
        events = await opened.enter_async_context(_event_endpoints(settings, slots, memory, fetch))
        endpoints = (enqueueing, status, *operators)
        ops = await opened.enter_async_context(_ops_page(settings, access, jobs))
        captured = _captured_endpoints(settings, access, stop)
        app = ErrorMiddleware(
            make_app(access, *endpoints, refusals, unsubscribe_sessions, events, ops, captured), refusals=refusals
        )
        background_tasks = [asyncio.create_task(work.run()) for work in (access, enqueuer, refusals)]
        background_tasks += [asyncio.create_task(pages.run()) for pages in metrics_pages(settings)]
        server = _server(settings, app, refusals, () if ops is None else ops.static_paths)
        # Exclude all objects that exist now from garbage collection, because they are never freed.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        host, port = listener.getsockname()[:2]
        log.get_log().info("api.started", listener=f"{host}:{port}")
        if access.is_open:
            log.get_log().warning("api.anonymous_allowed", setting="DISPATCHER_API_ALLOW_ANONYMOUS")
        await _until_stopped(server, listener, [asyncio.create_task(stop.wait()), *background_tasks])
        with suppress(TimeoutError):
            async with asyncio.timeout(shutdown_seconds):
                await enqueuer.finish()
        for task in background_tasks:
            task.cancel()
        await asyncio.gather(*background_tasks, return_exceptions=True)
        refusals.log_new()
    log.get_log().info("api.stopped")


@asynccontextmanager
async def _event_endpoints(
    settings: Settings, slots: FairLimiter, memory: FairLimiter, fetch: Fetch | None
) -> AsyncIterator[EventEndpoints | None]:
    """The endpoints for providers' events, with their database sessions; None if no provider may post events."""
    has_callbacks = getattr(settings.own.get("twilio"), "callback_url", None) is not None
    signed = map(settings.verifies_events, EVENTS_FIELDS)
    providers = sum(map(bool, signed)) + has_callbacks
    if not providers:
        yield None
        return
    from dispatcher.api import event_endpoints  # loads `cryptography`, which is not needed without these endpoints
    from dispatcher.events.intake import EventBatcher, EventIntake, suppression_rules

    url, name = settings.database_url, "dispatcher api events"
    async with make_pool(
        url, name=name, size=EVENT_SESSIONS, lock_seconds=BATCH_LOCK_SECONDS, keeps_plans=True
    ) as pool:
        max_bytes = min(event_endpoints.MAX_BODY_BYTES, settings.api_max_body_bytes)
        share = event_endpoints.SHARE
        bodies = BodyReader(
            FairLimiter(slots.max_per_caller, callers=providers, part_of=(slots, share)),
            FairLimiter(memory.max_per_caller, max_request=max_bytes, callers=providers, part_of=(memory, share)),
            max_bytes=max_bytes,
            for_providers=True,
        )
        intake = EventIntake(pool, suppression_rules(settings))
        endpoints = event_endpoints.EventEndpoints(settings, bodies, EventBatcher(intake), fetch, pool)
        if endpoints.sns is not None:
            await endpoints.sns.certificates.load()
        yield endpoints


def _captured_endpoints(settings: Settings, access: AccessControl, stop: asyncio.Event) -> CapturedEndpoints | None:
    """The endpoints for captured emails; None unless the settings are those of a machine for development."""
    if not (settings.ops and settings.api_allow_anonymous and is_loopback(settings)):
        return None
    from dispatcher.api.captured_endpoints import CapturedEndpoints
    from dispatcher.ops.captured import delivers_nothing, folders_of

    folders = folders_of(settings) if delivers_nothing(settings) else None
    return None if folders is None else CapturedEndpoints(access, folders, stop)


@asynccontextmanager
async def _ops_page(settings: Settings, access: AccessControl, jobs: OperatorJobs) -> AsyncIterator[OpsMount | None]:
    """The operators' page, with its database sessions; None if DISPATCHER_OPS is off."""
    if not settings.ops:
        yield None
        return
    from dispatcher.api.ops_page.application import OpsMount, make_ops_app  # imported late, because it loads Jinja2
    from dispatcher.api.ops_page.site import Site

    async with make_pool(
        settings.database_url,
        name="dispatcher api ops",
        size=OPS_SESSIONS,
        lock_seconds=OPS_STATEMENT_SECONDS / 2,
        statement_seconds=OPS_STATEMENT_SECONDS,
    ) as pool:
        site = Site(settings, access, pool, jobs)
        async with site.resources:
            yield OpsMount(make_ops_app(site), site)


def is_loopback(settings: Settings) -> bool:
    """Whether the API listens on the loopback, where no other host can connect."""
    return settings.api_address.host in LOOPBACKS


async def _until_stopped(server: _Server, listener: socket.socket, others: list[asyncio.Task[Any]]) -> None:
    """Serves until one of `others` ends, and raises its exception if it failed.

    One of these tasks waits until the process should stop; the others are the background tasks.
    """
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_PER_ITERATION - 1))]
    serving = asyncio.create_task(server.serve(sockets=listeners))
    ended, _ = await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    for task in ended:
        task.result()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handling.

    After a signal, uvicorn would send the same signal to this process once more, and so kill it.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing, so that uvicorn captures no signals."""
        yield


def _server(
    settings: Settings, app: ErrorMiddleware, refusals: RefusalCounter, static_paths: tuple[bytes, ...]
) -> _Server:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # these loggers would log paths and addresses
    timeouts, request_ids = Timeouts(settings.api_head_seconds, settings.api_request_seconds), RequestIds()
    return _Server(
        uvicorn.Config(
            GuardedApp(app, request_ids, static_paths=static_paths),
            backlog=ACCEPT_BACKLOG,
            http=partial(  # type: ignore[arg-type]
                GuardedProtocol, timeouts=timeouts, request_ids=request_ids, on_refusal=refusals.count
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
        )
    )
