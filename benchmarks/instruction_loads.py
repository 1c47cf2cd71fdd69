"""The work whose instructions `instructions.py` counts. It runs with the Python and packages of the measured checkout.

    python -P instruction_loads.py migrate|sendgrid|smtp|statements DATABASE_URL PARTS_FILE

A load marks the beginning and the end of each part of its work. For a mark, it calls `ctermid`, a function of the C
library that nothing else calls, and executes `pg_backend_pid()` in the session that does the part. callgrind begins a
new count whenever the process that it runs (the load, or PostgreSQL) calls that function. At its end, the load writes
its parts to a file, as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import psycopg
import uvloop

from dispatcher import Email, enqueue, enqueue_many
from dispatcher.broker.consumer import Consumer
from dispatcher.broker.pointer import Pointer, encode
from dispatcher.config import Settings, load
from dispatcher.domain.status import Status
from dispatcher.domain.turns import LaneWeights
from dispatcher.host.ledger import Ledger
from dispatcher.host.process_table import ProcessTable
from dispatcher.providers.registry import max_in_flight, open_provider
from dispatcher.routing.gate import Gate
from dispatcher.routing.routes import Route, Routes
from dispatcher.store.connections import connected, make_pool, session
from dispatcher.store.leases import Lease, LeaseStore, Result
from dispatcher.store.migrations import migrate
from dispatcher.store.providers import ProviderStore
from dispatcher.telemetry import log, metric_files, quick_log
from dispatcher.worker.breaker_listener import BreakerListener
from dispatcher.worker.bulk_calls import with_bulk_calls
from dispatcher.worker.pipeline import Pipeline

WARM_UP_EMAILS: Final = 1_000
WORKER_EMAILS: Final = 2_000
PREFETCHED: Final = 320
"""The messages that RabbitMQ delivers ahead: a window of 256, and a quarter more."""
DELIVERED_AT_ONCE: Final = 32
ENQUEUE_BATCH: Final = 500
ENQUEUES: Final = 6
WARM_UP_ENQUEUES: Final = 2
SINGLE_ENQUEUES: Final = 100
PLANNED_EXECUTIONS: Final = 12
"""psycopg prepares a statement after five executions, and PostgreSQL plans the next five, too."""
LEASE_SECONDS: Final = 3600.0
BATCHES: Final = {6: 20, 72: 6, 108: 6}
"""How many batches of each size are counted."""
WARM_UP_BATCHES: Final = 8
"""PostgreSQL makes a new plan for each of the first five executions of a prepared statement."""
NOTHING: Final = "nothing"
"""The part that contains only its marks."""
_ANSWER: Final = (
    b"HTTP/1.1 202 Accepted\r\nServer: double\r\nX-Message-Id: 01a22242-67e6-77d4-9468-98f77b7d957b\r\n"
    b"Content-Length: 0\r\nDate: Sat, 28 Nov 2026 12:00:00 GMT\r\n\r\n"
)
_SMTP_REPLIES: Final = {
    b"EHLO": b"250-double\r\n250 PIPELINING\r\n",
    b"DATA": b"354 End data with <CR><LF>.<CR><LF>\r\n",
    b".": b"250 2.0.0 Ok: queued as 4F7D2A01\r\n",
}
_NUMBERS: Final = count()


class Part(NamedTuple):
    """A part of the work.

    Attributes:
        emails: The number of emails that the part handled.
        backend_pid: The process of PostgreSQL that executed the part's statements; 0 if there was none.
    """

    name: str
    emails: int
    backend_pid: int


def run_migrations(database_url: str) -> list[Part]:
    """Creates the tables."""
    with connected(database_url) as connection:
        migrate(connection)
    return []


def run_sendgrid(database_url: str) -> list[Part]:
    """Sends emails through a worker's pipeline, to SendGrid."""
    with asyncio.Runner(loop_factory=partial(Loop, HttpServer)) as runner:
        return runner.run(_work(database_url, "sendgrid", "pipeline"))


def run_smtp(database_url: str) -> list[Part]:
    """Sends emails through a worker's pipeline, to an SMTP server without TLS."""
    with asyncio.Runner(loop_factory=partial(Loop, SmtpServer)) as runner:
        return runner.run(_work(database_url, "smtp", "pipeline, SMTP"))


def run_statements(database_url: str) -> list[Part]:
    """Enqueues emails with the library, then leases and records them with a worker's store."""
    return uvloop.run(_execute(database_url))


LOADS: Final[Mapping[str, Callable[[str], list[Part]]]] = {
    "migrate": run_migrations,
    "sendgrid": run_sendgrid,
    "smtp": run_smtp,
    "statements": run_statements,
}


class Loop(uvloop.Loop):
    """An event loop whose connections lead to a server that accepts every email at once."""

    def __init__(self, server: type[AcceptingServer]) -> None:
        super().__init__()
        self._server = server

    async def create_connection(  # type: ignore[override]  # our connections pass only these
        self, protocol_factory: Any, *, sock: socket.socket, ssl: None = None, server_hostname: None = None
    ) -> Any:
        """Gives the protocol a transport that writes nothing."""
        assert ssl is server_hostname is None
        protocol = protocol_factory()
        return self._server(self, protocol, sock), protocol


class AcceptingServer(asyncio.Transport):
    """A transport that answers each write in the loop's next round, instead of a socket and TLS."""

    greeting = b""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        super().__init__({"socket": sock, "sockname": sock.getsockname()})
        self._loop = loop
        self._protocol = protocol
        self._is_closed = False
        protocol.connection_made(self)
        if self.greeting:
            loop.call_soon(protocol.data_received, self.greeting)

    def is_closing(self) -> bool:
        return self._is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.get_extra_info("socket").close()
            self._loop.call_soon(self._protocol.connection_lost, None)


class HttpServer(AcceptingServer):
    """Answers each write, which is a whole request, with an acceptance."""

    def write(self, data: bytes | bytearray | memoryview) -> None:  # noqa: ARG002
        self._loop.call_soon(self._protocol.data_received, _ANSWER)


class SmtpServer(AcceptingServer):
    """Accepts every command and every email. It offers only PIPELINING."""

    greeting = b"220 double ESMTP\r\n"
    _unread = b""
    _is_in_body = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._unread += data
        replies = b"".join(iter(self._next_reply, b""))
        if replies and not self._is_closed:
            self._loop.call_soon(self._protocol.data_received, replies)

    def _next_reply(self) -> bytes:
        """The reply to the next command or email; empty if none is complete."""
        line, end, rest = self._unread.partition(b"\r\n.\r\n" if self._is_in_body else b"\r\n")
        if not end:
            return b""
        self._unread = rest
        verb = b"." if self._is_in_body else line[:4].upper()
        self._is_in_body = verb == b"DATA"
        if verb == b"QUIT":
            self.abort()
        return _SMTP_REPLIES.get(verb, b"250 2.0.0 Ok\r\n")


class ShuttablePool:
    """A pool of sessions. After `shut`, each request for a session waits for ever, so that no periodic statement is
    counted."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._is_open = asyncio.Event()
        self._is_open.set()

    def shut(self) -> None:
        self._is_open.clear()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        await self._is_open.wait()
        async with self._pool.connection() as connection:
            yield connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class PreparedStore(LeaseStore):
    """Returns leases that were read from PostgreSQL before, and forgets all results."""

    def prepare(self, leases: Sequence[Lease]) -> None:
        self._prepared = {lease.email_id: lease for lease in leases}

    async def lease(
        self,
        keys_by_id: dict[UUID, str],
        lease_seconds: float,  # noqa: ARG002
        paused_tenants: Sequence[str] = (),  # noqa: ARG002
    ) -> list[Lease]:
        await asyncio.sleep(0)
        return [self._prepared[email_id] for email_id in keys_by_id]

    async def record(self, results: Sequence[Result]) -> set[UUID]:
        await asyncio.sleep(0)
        return {result.email_id for result in results}


class Deliveries:
    """Delivers messages to a consumer as RabbitMQ's channel does, and takes the acks."""

    lanes = ("normal",)
    is_over = False

    def __init__(self, consumer: Consumer, on_delivery: Callable[[Any], None]) -> None:
        whole = cast(Any, consumer)
        whole._session, whole._on_delivery = self, on_delivery
        self._receive = whole._receiver("normal")
        self._consumer = consumer
        self._tag = 0
        self.channel = self
        self.redelivered = False

    @property
    def delivery_tag(self) -> int:
        return self._tag

    def ack(self, tags: Sequence[tuple[int, bool]]) -> None:
        pass

    async def deliver(self, bodies: Sequence[bytes]) -> None:
        """Delivers these messages, and returns when all of them are acked."""
        rest = iter(bodies)
        while True:
            for _ in range(min(DELIVERED_AT_ONCE, PREFETCHED - self._consumer.outstanding)):
                if (body := next(rest, None)) is not None:
                    self._tag += 1
                    self._receive(None, self, None, body)
            if not self._consumer.outstanding:
                return
            await asyncio.sleep(0)


async def _work(database_url: str, provider: str, part: str) -> list[Part]:
    with _provider() as address, tempfile.TemporaryDirectory(prefix="dispatcher-count-") as folder:
        settings = _settings(database_url, provider, address, Path(folder))
        log.configure(settings.log_level, settings.log_format, worker="host:w0")
        metric_files.begin(settings.metrics_folder, "w0")
        quick_log.log.buffer(asyncio.get_running_loop().call_soon)
        pool = make_pool(database_url, name="gauge", size=3, keeps_plans=True)
        await pool.open()
        leases, bodies = await _leased(database_url, pool, WARM_UP_EMAILS + WORKER_EMAILS)
        shuttable = ShuttablePool(pool)
        store = PreparedStore(cast(Any, shuttable), worker="host:w0:1", slot="host:w0")
        store.prepare(leases)
        consumer, pipeline = _pipeline(settings, provider, store, ProviderStore(cast(Any, shuttable), slot="host:w0"))
        deliveries = Deliveries(consumer, pipeline.lease.take)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(pipeline.run())
            await deliveries.deliver(bodies[:WARM_UP_EMAILS])
            shuttable.shut()
            _mark()
            await deliveries.deliver(bodies[WARM_UP_EMAILS:])
            _mark()
            running.cancel()
        await pool.close()
        return [Part(part, WORKER_EMAILS, 0)]


def _settings(database_url: str, provider: str, address: str, run_dir: Path) -> Settings:
    return load(
        {
            "DISPATCHER_DATABASE_URL": database_url,
            "DISPATCHER_AMQP_URL": "amqp://nobody:none@127.0.0.1/",
            "DISPATCHER_PROVIDERS": provider,
            "SENDGRID_API_KEY": "SG.counted",
            "DISPATCHER_SENDGRID_HOST": f"http://{address}",
            "DISPATCHER_SMTP_URL": f"smtp://{address}?tls=none",
            "DISPATCHER_SMTP_EHLO_NAME": "worker.example.com",
            "DISPATCHER_RUN_DIR": str(run_dir),
            "DISPATCHER_LOG_FORMAT": "json",
        }
    )


def _pipeline(settings: Settings, name: str, store: LeaseStore, providers: ProviderStore) -> tuple[Consumer, Pipeline]:
    breakers, weights = BreakerListener(providers), LaneWeights(settings.lanes)
    most = max_in_flight(name, settings)
    provider = with_bulk_calls(open_provider(name, settings), settings.bulk_call_emails)
    route = Route(provider, breakers.new_breaker(name, window=most), None, Gate(most, weights))
    queues = {lane: settings.queue_of(lane) for lane in settings.lanes}
    consumer = Consumer(settings.amqp_url, queues, prefetch=PREFETCHED, name="gauge")
    ledger = Ledger(settings.run_dir, worker="host:w0:1", slot="host:w0", slots=2 * settings.prefetch)
    slot = ProcessTable(["worker"]).take_slot("worker", 0)
    # Under callgrind, time seems to pass fifty times as fast. No lease is renewed meanwhile.
    long = replace(settings, lease_seconds=LEASE_SECONDS)
    return consumer, Pipeline(long, consumer, store, Routes([route], weights=weights), breakers, ledger, slot)


@contextmanager
def _provider() -> Iterator[str]:
    """A server whose queue of connections has room for the whole window, but that reads nothing; yields its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def _leased(database_url: str, pool: Any, emails: int) -> tuple[list[Lease], list[bytes]]:
    """Enqueues and leases emails; returns the leases, and the message of each."""
    store = LeaseStore(pool, worker="host:w0:1", slot="host:w0")
    with psycopg.connect(database_url, autocommit=True) as connection:
        keys = {each.email_id: each.message_key for each in enqueue_many(connection, _emails(emails))}
    leases = [lease for batch in _batches(list(keys), 108) for lease in await _lease(store, keys, batch)]
    return leases, [encode(Pointer(email_id, key)) for email_id, key in keys.items()]


async def _execute(database_url: str) -> list[Part]:
    parts: list[Part] = []
    pool = make_pool(database_url, name="gauge", size=1, keeps_plans=True)
    await pool.open()
    store = LeaseStore(pool, worker="host:w0:1", slot="host:w0")
    with psycopg.connect(database_url) as application:
        keys = _enqueue_all(application, parts)

    @asynccontextmanager
    async def part(name: str, emails: int) -> AsyncIterator[None]:
        async with session(pool) as worker:
            await worker.execute("select pg_backend_pid()")
            parts.append(Part(name, emails, worker.info.backend_pid))
        _mark()
        yield
        _mark()
        async with session(pool) as worker:
            await worker.execute("select pg_backend_pid()")

    waiting = list(keys)
    for size, times in BATCHES.items():
        batches = _batches([waiting.pop() for _ in range(size * (WARM_UP_BATCHES + times))], size)
        for batch in batches[:WARM_UP_BATCHES]:
            await store.record(_results(await _lease(store, keys, batch)))
        async with part(f"lease {size}", size * times):
            leases = [await _lease(store, keys, batch) for batch in batches[WARM_UP_BATCHES:]]
        results = [_results(each) for each in leases]
        async with part(f"record {size}", size * times):
            for each in results:
                await store.record(each)
    async with part(NOTHING, 1):
        pass
    await pool.close()
    return parts


def _enqueue_all(application: psycopg.Connection[Any], parts: list[Part]) -> dict[UUID, str]:
    @contextmanager
    def part(name: str, emails: int) -> Iterator[None]:
        application.execute("select pg_backend_pid()")
        parts.append(Part(name, emails, application.info.backend_pid))
        _mark()
        yield
        _mark()
        application.execute("select pg_backend_pid()")

    keys: dict[UUID, str] = {}
    singles, batches = _emails(2 * SINGLE_ENQUEUES), _batches(_emails(ENQUEUES * ENQUEUE_BATCH), ENQUEUE_BATCH)

    def enqueue_each(emails: Sequence[Email]) -> None:
        for email in emails:
            enqueue(application, email)
            application.commit()

    def enqueue_batches(batches: Sequence[Sequence[Email]]) -> None:
        for batch in batches:
            keys.update({each.email_id: each.message_key for each in enqueue_many(application, batch)})
            application.commit()

    enqueue_each(singles[SINGLE_ENQUEUES:])
    with part("enqueue 1", SINGLE_ENQUEUES):
        enqueue_each(singles[:SINGLE_ENQUEUES])
    enqueue_batches(_batches(_emails(2 * PLANNED_EXECUTIONS), 2))  # until PostgreSQL keeps the plan
    enqueue_batches(batches[:WARM_UP_ENQUEUES])
    with part(f"enqueue {ENQUEUE_BATCH}", (ENQUEUES - WARM_UP_ENQUEUES) * ENQUEUE_BATCH):
        enqueue_batches(batches[WARM_UP_ENQUEUES:])
    return keys


async def _lease(store: LeaseStore, keys: Mapping[UUID, str], batch: Sequence[UUID]) -> list[Lease]:
    leases = await store.lease({email_id: keys[email_id] for email_id in batch}, LEASE_SECONDS)
    assert len(leases) == len(batch), "every email was leased"
    return leases


def _results(leases: Sequence[Lease]) -> list[Result]:
    ended = datetime.now(UTC)
    began = ended - timedelta(milliseconds=5)
    message_id = "x" * 22
    return [
        Result(
            *(each.email_id, each.token, Status.SENT, each.attempt_number, began, ended, "accepted", "sendgrid"),
            provider_message_id=message_id,
        )
        for each in leases
    ]


def _emails(emails: int) -> list[Email]:
    """Emails like those of a shop.

    They are the same in every run and checkout. With random message keys, PostgreSQL would split the pages of its
    indexes at other places in each run, and the counts would differ by up to a tenth.
    """
    return [
        Email(
            message_key=f"receipt-{number:06}",
            sender="Shop <shop@example.com>",
            to=f"customer{number:06}@example.org",
            subject=f"Your receipt {number:06}",
            text="Thank you for your order. It leaves our house tomorrow.\n" * 8,
        )
        for number in islice(_NUMBERS, emails)
    ]


def _batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _mark() -> None:
    os.ctermid()


if __name__ == "__main__":
    gc.disable()
    _, _load, _database_url, _parts_file = sys.argv
    _parts = LOADS[_load](_database_url)
    Path(_parts_file).write_text(json.dumps(_parts))
