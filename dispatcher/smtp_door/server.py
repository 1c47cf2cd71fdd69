"""The process of the SMTP server: opens its resources in order, serves, and closes them when it stops."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

from dispatcher.admission.access import KeyAccess
from dispatcher.admission.enqueueing import open_enqueuer
from dispatcher.admission.fair_limiter import FairLimiter
from dispatcher.admission.insert_batcher import CONCURRENT_INSERTS, CONCURRENT_RETRIES
from dispatcher.admission.policy import Policy
from dispatcher.admission.process import NEEDS_A_KEY, metrics_pages, run
from dispatcher.admission.refusal_counter import RefusalCounter
from dispatcher.admission.validation import EmailValidator
from dispatcher.config import Settings
from dispatcher.errors import ConfigurationError
from dispatcher.providers.capabilities import capabilities_of
from dispatcher.smtp_door.connection import HANDSHAKE_SECONDS, LINGER_SECONDS, Connection, Hooks
from dispatcher.smtp_door.door import Door
from dispatcher.smtp_door.guard import Guard
from dispatcher.store.api_keys import KeyStore
from dispatcher.store.connections import LOCK_SECONDS, Pool, make_pool
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

INSERT_LOCK_SECONDS: Final = 0.25
READ_SESSIONS: Final = 2
KEY_SESSIONS: Final = 2
LOGIN_DELAY_SECONDS: Final = 1.0
ACCEPT_AGAIN_SECONDS: Final = 1.0
FINISH_SECONDS: Final = 3.0
"""How long the process publishes the messages of emails when it stops. The relay publishes the messages that remain."""


def run_smtp(settings: Settings, listener: socket.socket) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit code 0."""
    return run(settings, "smtp", lambda stop: serve(settings, listener, stop))


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context of the server; None if its clients connect without TLS. Raises ConfigurationError."""
    if settings.submission_tls == "off":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert settings.submission_certificate is not None
    try:
        context.load_cert_chain(settings.submission_certificate, settings.submission_certificate_key)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        mistake = (
            f"DISPATCHER_SUBMISSION_CERTIFICATE and DISPATCHER_SUBMISSION_CERTIFICATE_KEY cannot be loaded: {reason}. "
            "They need PEM files with the certificate's chain and its private key without a password."
        )
        raise ConfigurationError([mistake]) from None
    return context


class Connections:
    """The open connections of this process."""

    def __init__(self) -> None:
        self.open: set[Connection] = set()
        self._change = asyncio.Event()

    def discard(self, connection: Connection) -> None:
        self.open.discard(connection)
        self._change.set()

    async def closed(self) -> None:
        """Waits until no connection is open."""
        while self.open:
            self._change.clear()
            await self._change.wait()


async def accept_encrypted(listener: socket.socket, tls: ssl.SSLContext, made: Callable[[], Connection]) -> None:
    """Accepts connections until cancelled. Counts each before its handshake, which a server of asyncio does not."""
    loop = asyncio.get_running_loop()

    async def encrypt(client: socket.socket, connection: Connection) -> None:
        try:
            with suppress(OSError):
                await loop.connect_accepted_socket(
                    lambda: connection, client, ssl=tls, ssl_handshake_timeout=HANDSHAKE_SECONDS
                )
        finally:
            if connection.transport is None:
                client.close()
                connection.leave()

    async with asyncio.TaskGroup() as handshakes:
        while True:
            try:
                client, peer = await loop.sock_accept(listener)
            except OSError:  # such as too many open files
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            connection = made()
            if connection.enter(peer):
                client.close()
            else:
                handshakes.create_task(encrypt(client, connection))


async def serve(
    settings: Settings,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    lock_seconds: float = INSERT_LOCK_SECONDS,
    login_delay_seconds: float = LOGIN_DELAY_SECONDS,
) -> None:
    """Serves until `stop` is set, then finishes the messages in progress."""
    logging.getLogger("mail.log").disabled = True  # aiosmtpd logs addresses and passwords there
    tls = server_context(settings)
    async with AsyncExitStack() as opened:

        async def pool(name: str, size: int, lock_seconds: float) -> Pool:
            made = make_pool(settings.database_url, name=f"dispatcher smtp{name}", size=size, lock_seconds=lock_seconds)
            return await opened.enter_async_context(made)

        writers = await pool("", CONCURRENT_INSERTS + CONCURRENT_RETRIES, lock_seconds)
        readers = await pool(" reader", READ_SESSIONS, LOCK_SECONDS)
        access = KeyAccess(KeyStore(await pool(" keys", KEY_SESSIONS, lock_seconds)))
        await access.refresh()
        if not access.has_usable_keys:
            raise ConfigurationError([NEEDS_A_KEY])
        enqueuer = await open_enqueuer(settings, opened, access.quotas, writers, readers, name="smtp")
        refusals = RefusalCounter("submission", lambda code: metrics.SUBMISSION_REFUSALS.add(1, code))
        door = Door(
            settings,
            access,
            EmailValidator(Policy(settings), capabilities_of(settings.providers), settings.lanes),
            enqueuer,
            readers,
            Guard(
                connections=settings.submission_connections,
                per_address=settings.submission_connections_per_address,
                delay_seconds=login_delay_seconds,
            ),
            FairLimiter(settings.submission_connections),
            FairLimiter(settings.api_memory_bytes, max_request=2 * settings.submission_max_bytes),
            refusals,
        )
        hooks = Hooks(door)
        hostname = settings.submission_host_name or socket.gethostname()
        connections = Connections()

        def made() -> Connection:
            on_open, on_closed = connections.open.add, connections.discard
            return Connection(door, hooks, tls, hostname=hostname, on_open=on_open, on_closed=on_closed)

        tasks = [asyncio.create_task(work.run()) for work in (access, enqueuer, refusals)]
        tasks += [asyncio.create_task(page.run()) for page in metrics_pages(settings)]
        stop_accepting: Callable[[], object]
        if tls is not None and settings.submission_tls == "implicit":
            listener.setblocking(False)
            tasks.append(asyncio.create_task(accept_encrypted(listener, tls, made)))
            stop_accepting = tasks[-1].cancel
        else:
            stop_accepting = (await asyncio.get_running_loop().create_server(made, sock=listener)).close
        host, port = listener.getsockname()[:2]
        get_log().info("submission.started", listener=f"{host}:{port}", tls=settings.submission_tls)
        stopped = asyncio.create_task(stop.wait())
        ended, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stop_accepting()
        for connection in list(connections.open):
            connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_seconds + 2 * LINGER_SECONDS):
                await connections.closed()
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await enqueuer.finish()
        for task in [stopped, *tasks]:
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
        refusals.log_new()
        for task in ended - {stopped}:
            task.result()
    get_log().info("submission.stopped")
