"""The API process: what is opened in which order, and closed again when it stops."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

import uvicorn
import uvloop

from dispatcher.api.access import Access
from dispatcher.api.announcing import RELAY_AFTER_SECONDS, Announcing
from dispatcher.api.app import make_app
from dispatcher.api.bodies import Bodies
from dispatcher.api.emails import Emails
from dispatcher.api.gathering import LANES, SPLITTING_LANES, Gathering
from dispatcher.api.guard import Guard
from dispatcher.api.intake import Intake
from dispatcher.api.operating import MOST_BYTES, Operating
from dispatcher.api.policy import Policy
from dispatcher.api.protocol import AheadQueue, Patience, PatientProtocol
from dispatcher.api.reading import LISTS_AT_ONCE, Reading
from dispatcher.api.refusals import Refusals
from dispatcher.api.shares import Shares
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.config.values import LOOPBACKS
from dispatcher.errors import ConfigurationError, DispatcherError
from dispatcher.host.lifecycle import set_on_signals
from dispatcher.host.web_server import WebResponse, WebServer
from dispatcher.providers.capabilities import capabilities_of
from dispatcher.store.api_keys import KeyStore
from dispatcher.store.connections import make_pool
from dispatcher.store.drafts import DraftStore
from dispatcher.store.emails import EmailStore
from dispatcher.supervisor.run_dir import make_run_dir
from dispatcher.telemetry import log, metric_files, scrape
from dispatcher.telemetry.tracing import TRACER

LOCK_SECONDS: Final = 0.25
"""How long an insert waits for an application's open transaction that holds the same key; others wait with it. So does
a request for its API key's quota."""
READERS: Final = 3
KEEPERS: Final = 2
"""Sessions for keys and quotas, so that neither waits for who reads."""
DECIDERS: Final = 2
"""Sessions for what operators decide: an email whose row somebody has locked makes nobody else wait."""
DECISION_LOCK_SECONDS: Final = 2.0
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the 60 seconds for which proxies keep connections: closing first makes them fail a request."""
LAST_SECONDS: Final = 3.0
"""For what was inserted last to be announced; the relay takes the rest."""
BACKLOG: Final = 4096
ACCEPTS_PER_TURN: Final = 16
"""New connections per turn of the loop. libuv accepts one for each listening descriptor, so the loop gets several
descriptors of one socket. With one descriptor, clients that connect and go keep new ones waiting in the backlog."""
GC_THRESHOLDS: Final = (10_000, 20, 50)
"""Requests leave hardly any reference cycles. With Python's defaults, a few thousand requests that wait would make the
collector look at all of them again and again, for up to 40 ms at a time."""
LARGE_BLOCK_BYTES: Final = 1 << 20
_M_MMAP_THRESHOLD: Final = -3
SWITCH_SECONDS: Final = 0.0005
"""How long the thread that parses large bodies may keep the interpreter from the loop at a time. Python's default is
ten times as long."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT)
_HEADERS: Final = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]


def run_api(settings: Settings, listener: socket.socket) -> int:
    """Serves until told to stop; returns the exit code.

    Raises:
        ConfigurationError: there is no usable key, and the API may not be open; or its files would be where strangers
            may write.
    """
    if settings.metrics:
        with suppress(OSError):  # the metrics alone need it, and say so themselves
            make_run_dir(settings.run_dir)
    sys.setswitchinterval(SWITCH_SECONDS)
    _give_back_memory()
    TRACER.begin("api")
    if settings.metrics:
        metric_files.begin(settings.metrics_folder, metric_files.API)
    try:
        uvloop.run(_serve_until_signalled(settings, listener))
    finally:
        # The interpreter sets handlers back as it ends; a signal that is late must not make the exit look like a death.
        for number in _STOPS:
            signal.signal(number, signal.SIG_IGN)
        metric_files.end()
        TRACER.end()
    return 0


def _give_back_memory() -> None:
    """Has the C library give large blocks back to the system as they become free.

    Otherwise it raises, with each block that is freed, the size from which blocks are the system's, up to 32 MiB: a few
    large bodies would leave the process larger by hundreds of megabytes.
    """
    with suppress(AttributeError):  # other C libraries than glibc have no such function, nor this habit
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


async def _serve_until_signalled(settings: Settings, listener: socket.socket) -> None:
    stop = asyncio.Event()
    set_on_signals(stop, *_STOPS)
    await serve(settings, listener, stop)


def listen(settings: Settings, *, shares_port: bool) -> socket.socket:
    """The socket that clients connect to.

    Args:
        shares_port: Other processes of the same user may listen there, too; the kernel spreads connections over them.

    Raises:
        DispatcherError: it cannot be had.
    """
    host, port = settings.api_address.host, settings.api_address.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise DispatcherError(
            f"The API cannot listen on {host}:{port}: {error.strerror or error}.",
            remedy="Name another address in DISPATCHER_API_ADDRESS, or end what listens there.",
        ) from error
    return listener


async def serve(
    settings: Settings,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    lock_seconds: float = LOCK_SECONDS,
    last_seconds: float = LAST_SECONDS,
) -> None:
    """Serves until the stop, then finishes what has begun.

    Args:
        lock_seconds: See LOCK_SECONDS.
        last_seconds: See LAST_SECONDS.

    Raises:
        ConfigurationError: there is no usable key, and the API may not be open.
    """
    async with AsyncExitStack() as opened:
        url = settings.database_url
        writers = make_pool(url, name="dispatcher api", size=LANES + SPLITTING_LANES, lock_seconds=lock_seconds)
        readers = make_pool(url, name="dispatcher api reader", size=READERS)
        keepers = make_pool(url, name="dispatcher api keys", size=KEEPERS, lock_seconds=lock_seconds)
        deciders = make_pool(url, name="dispatcher api operator", size=DECIDERS, lock_seconds=DECISION_LOCK_SECONDS)
        for pool in (writers, readers, keepers, deciders):
            await pool.open()
            opened.push_async_callback(pool.close)
        publisher = Publisher(settings.amqp_url, settings.exchange, name="dispatcher api", ca_file=settings.ca_file)
        opened.push_async_callback(_close, publisher)
        slots = Shares(settings.api_max_concurrent_requests)
        memory = Shares(settings.api_memory_bytes, largest=settings.api_max_body_bytes)
        access = Access(KeyStore(keepers), slots, may_be_open=settings.api_allow_anonymous and is_loopback(settings))
        await access.refresh()
        if not (access.is_open or access.has_usable_keys):
            raise ConfigurationError([NEEDS_A_KEY])
        drafts = DraftStore(writers, publish_in_seconds=RELAY_AFTER_SECONDS)
        announcing = Announcing(publisher, drafts, settings.queue, bundle=settings.bundle_emails)
        gathering = Gathering(drafts, announcing.add, settings.api_insert_batch_emails)
        refusals = Refusals()
        emails = Emails(
            access,
            Bodies(slots, memory, most_bytes=settings.api_max_body_bytes),
            Intake(Policy.of(settings), capabilities_of(settings.providers)),
            gathering,
            drafts,
            refusals,
        )
        reading = Reading(access, EmailStore(readers), asyncio.Semaphore(LISTS_AT_ONCE), settings.lease_seconds)
        decisions = Bodies(slots, memory, most_bytes=min(MOST_BYTES, settings.api_max_body_bytes))
        operating = Operating(access, decisions, EmailStore(readers), deciders, settings)
        opened.push_async_callback(operating.stop)
        app = Guard(make_app(access, emails, reading, operating, refusals), refusals=refusals)
        helpers = [asyncio.create_task(work.run()) for work in (access, announcing, refusals)]
        helpers += [asyncio.create_task(pages.run()) for pages in _pages(settings)]
        server = _server(settings, app, refusals)
        gc.freeze()  # what is there now stays: the collector need not look at it while a request waits
        gc.set_threshold(*GC_THRESHOLDS)
        _tell_start(listener, access)
        await _until_stopped(server, listener, [asyncio.create_task(stop.wait()), *helpers])
        with suppress(TimeoutError):
            async with asyncio.timeout(last_seconds):
                await gathering.finish()
                await access.quotas.close()
                await announcing.finish()
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        refusals.tell()
    log.get_log().info("api.stopped")


NEEDS_A_KEY: Final = (
    "There is no API key that could be used: make one, as with `dispatcher keys create --name shop --from-domain "
    "example.com`. Or, for development on this machine alone, set DISPATCHER_API_ALLOW_ANONYMOUS=on and listen on "
    "127.0.0.1: as long as there has never been a key, whoever reaches it may do everything."
)


def is_loopback(settings: Settings) -> bool:
    """Whether the API listens where no other host can connect to it."""
    return settings.api_address.host in LOOPBACKS


def _pages(settings: Settings) -> list[WebServer]:
    """Where this host's metrics are told; nothing where that is switched off."""
    if not settings.api_metrics_address.host:
        return []

    async def metrics() -> WebResponse:
        return WebResponse(scrape.page(settings.metrics_folder), scrape.CONTENT_TYPE)

    # Every API process of the host reads all files, so it does not matter which one answers.
    setting = "DISPATCHER_API_METRICS_ADDRESS"
    return [WebServer(settings.api_metrics_address, {"/metrics": metrics}, setting=setting, shares_port=True)]


async def _close(publisher: Publisher) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            await publisher.close()


def _tell_start(listener: socket.socket, access: Access) -> None:
    host, port = listener.getsockname()[:2]
    log.get_log().info("api.started", listener=f"{host}:{port}")
    if access.is_open:
        log.get_log().warning("api.anonymous_allowed", setting="DISPATCHER_API_ALLOW_ANONYMOUS")


async def _until_stopped(server: _Server, listener: socket.socket, others: list[asyncio.Task[Any]]) -> None:
    """Serves until any of the others ends: the stop, or what should not."""
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]
    serving = asyncio.create_task(server.serve(sockets=listeners))
    ended, _ = await asyncio.wait([serving, *others], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    for task in ended:
        task.result()


class _Server(uvicorn.Server):
    """uvicorn's, which leaves the signals to us: by its own handling, the process would die of them after its end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def _server(settings: Settings, app: Guard, refusals: Refusals) -> _Server:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)  # they would tell paths and addresses
    patience = Patience(settings.api_head_seconds, settings.api_request_seconds)
    return _Server(
        uvicorn.Config(
            app,
            backlog=BACKLOG,
            http=partial(PatientProtocol, patience=patience, ahead=AheadQueue(), on_refusal=refusals.count),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            headers=_HEADERS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, int(settings.drain_seconds)),
        )
    )
