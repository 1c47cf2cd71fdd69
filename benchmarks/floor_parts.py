"""Runs each unavoidable part of sending an email with pika, psycopg and the HTTP client, without our other code.

The statements are the product's, at the batch sizes that the chain used. All code that turns the parts into a program
is left out on purpose: tasks, the in-flight ledger, decisions, logs, metrics, checks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol
from uuid import UUID

import orjson
from pika import spec

from benchmarks import cpu
from benchmarks.figures import per_email_us
from dispatcher.broker.connection import open_connection
from dispatcher.providers.contract import Attempt
from dispatcher.store.connections import connect_async
from dispatcher.store.instants import AHEAD_SECONDS, EARLIEST, LATEST
from dispatcher.store.leases import MAX_OCTETS
from dispatcher.store.queries import ids_within, query
from dispatcher.transport.http import HttpTransport

PARTS: Final = ("publish", "consume", "lease", "send", "record")
ELAPSED: Final = "elapsed"
"""The key of a part's elapsed time, next to the keys of the CPU times."""
PUBLISH_BATCH: Final = 500
"""The batch size of the relay."""
DEADLINE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch sizes of the chain. The parts use the same sizes.

    Attributes:
        in_flight: Concurrent requests to the provider.
        bundle: Emails per message.
    """

    prefetch: int
    lease_batch: int
    record_batch: int
    in_flight: int
    bundle: int = 1


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of the servers.

    Attributes:
        roots: The top process of each server's process tree, to measure the CPU.
    """

    database_url: str
    amqp_url: str
    exchange: str
    queue: str
    sendgrid_url: str
    ca_file: Any
    roots: Mapping[str, int]


class Gate(Protocol):
    """Holds back each part until the part may begin, then measures the part. A part connects and prepares before it
    opens the gate."""

    def open(self, part: str, emails: int) -> AbstractAsyncContextManager[None]:
        """Measure the block, which runs a part for this many emails."""
        ...


class Alone:
    """Runs the parts one after the other, and measures each part.

    Attributes:
        by_part: For each part, microseconds per email: the CPU by process (`client` runs the part), and the elapsed
            time (`ELAPSED`).
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self.by_part: dict[str, dict[str, float]] = {}
        self._roots = roots

    @asynccontextmanager
    async def open(self, part: str, emails: int) -> AsyncIterator[None]:
        """See `Gate.open`."""
        began = _Meters.read(self._roots)
        yield
        self.by_part[part] = began.since(self._roots, emails)


class Together:
    """Runs all parts at the same time, and measures them together.

    Attributes:
        costs: The sum of the parts, in the form of a single part's cost; every part handles the same number of emails.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self.costs: dict[str, float] = {}
        self._roots = roots
        self._begin = asyncio.Barrier(len(PARTS))
        self._end = asyncio.Barrier(len(PARTS))
        self._began = _Meters.read(roots)

    @asynccontextmanager
    async def open(self, part: str, emails: int) -> AsyncIterator[None]:  # noqa: ARG002
        """See `Gate.open`."""
        # One part reads the meters without yielding to the event loop, so no other part runs at that moment.
        if await self._begin.wait() == 0:
            self._began = _Meters.read(self._roots)
        yield
        if await self._end.wait() == 0:
            self.costs = self._began.since(self._roots, emails)


class _Free:
    """A gate that neither delays nor measures."""

    @asynccontextmanager
    async def open(self, part: str, emails: int) -> AsyncIterator[None]:  # noqa: ARG002
        yield


@dataclass(frozen=True, slots=True)
class _Meters:
    """The CPU and elapsed time up to an instant, in seconds."""

    servers: Mapping[str, float]
    client: float
    instant: float

    @classmethod
    def read(cls, roots: Mapping[str, int]) -> _Meters:
        return cls(cpu.read_cpu(roots), time.process_time(), time.monotonic())

    def since(self, roots: Mapping[str, int], emails: int) -> dict[str, float]:
        """The CPU and elapsed time since that instant, in microseconds per email."""
        now = _Meters.read(roots)
        used = per_email_us(self.servers, now.servers, emails)
        client, elapsed = (seconds / emails * 1e6 for seconds in (now.client - self.client, now.instant - self.instant))
        return {"client": client, ELAPSED: elapsed, **{name: used[name] for name in roots}}


async def measure_alone(places: Places, sizes: Sizes, emails: int) -> dict[str, dict[str, float]]:
    """Measure the cost of each part. The emails must be enqueued, due and not leased."""
    gate = Alone(places.roots)
    async with _connected(places) as database:
        keys = await _publish(places, sizes, database, emails, gate)
        await _consume(places, sizes, emails, gate)
        leased = await _lease(sizes, database, keys, gate)
        await _send(places, sizes, leased, gate)
        await _record(sizes, database, leased, gate)
    return gate.by_part


async def measure_together(
    places: Places, other: Places, sizes: Sizes, emails: int, enqueue: Callable[[], object]
) -> dict[str, float]:
    """Measure the total cost of all parts. They run at the same time in one process, each with its own emails.

    Args:
        places: A database whose emails are enqueued and due, and a queue.
        other: A second, empty database, and a second, empty queue.
        enqueue: Enqueues the same number of emails in the second database.
    """
    gate = Together(places.roots)
    async with (
        _connected(places) as publishing,
        _connected(other) as leasing,
        _connected(other) as recording,
    ):
        enqueue()
        rows = await (await leasing.execute("select email_id, message_key from dispatcher.email_log")).fetchall()
        leased = await _lease(sizes, leasing, dict(rows), _Free())
        enqueue()
        keys = await _publish(other, sizes, leasing, emails, _Free())
        await asyncio.gather(
            _publish(places, sizes, publishing, emails, gate),
            _consume(other, sizes, emails, gate),
            _lease(sizes, leasing, keys, gate),
            _send(places, sizes, leased, gate),
            _record(sizes, recording, leased, gate),
        )
    return gate.costs


@asynccontextmanager
async def _connected(places: Places) -> AsyncIterator[Any]:
    async with await connect_async(places.database_url, name="floor") as database:
        yield database


async def _publish(places: Places, sizes: Sizes, database: Any, emails: int, gate: Gate) -> dict[UUID, str]:
    """Find due emails and publish them with confirms. The emails stay marked as due until they are leased."""
    async with await open_connection(places.amqp_url, name="floor") as connection:
        channel = await connection.open_channel()
        confirms = _Confirms()
        await channel.call(channel.raw.confirm_delivery, ack_nack_callback=confirms.on_answer)
        keys: dict[UUID, str] = {}
        messages = 0
        async with gate.open("publish", emails):
            since = EARLIEST
            while new := await _find_due(database, since, keys):
                for bundle in _batches(new, sizes.bundle):
                    properties = spec.BasicProperties(
                        content_type="application/json", delivery_mode=2, message_id=str(bundle[0][0])
                    )
                    body = _pointers(bundle)
                    channel.raw.basic_publish(places.exchange, places.queue, body, properties, mandatory=True)
                    messages += 1
                keys |= {row[0]: row[1] for row in new}
                await confirms.reached(messages)
                since = new[-1][4]
    assert len(keys) == emails, "every email was due once"
    return keys


def _pointers(rows: Sequence[Any]) -> bytes:
    emails = [{"email_id": row[0], "message_key": row[1]} for row in rows]
    return orjson.dumps({"v": 1, **emails[0]} if len(emails) == 1 else {"v": 2, "emails": emails})


async def _find_due(database: Any, since: datetime, known: Collection[UUID]) -> list[Any]:
    """The next batch of due emails after the known emails; the last known email became due at `since`."""
    parameters = {
        "lanes": ["normal"],
        "tenant_ids": ["default"],
        "sinces": [since],
        "until_ats": [LATEST],
        "mosts": [PUBLISH_BATCH],
        "ahead_seconds": AHEAD_SECONDS,
        "only_ids": False,
    }
    rows = await _fetch(database, "find_due_of_tenants", parameters)
    return [row for row in rows if row[0] not in known]


class _Confirms:
    """Waits for RabbitMQ's confirms. A confirm may cover many messages, and confirms may arrive in any order."""

    def __init__(self) -> None:
        self._last = 0
        self._single: set[int] = set()
        self._wanted = 0
        self._done = asyncio.Event()

    def on_answer(self, answer: Any) -> None:
        method = answer.method
        assert isinstance(method, spec.Basic.Ack), "RabbitMQ refused a message"
        if method.multiple:
            self._last = max(self._last, method.delivery_tag)
            self._single = {tag for tag in self._single if tag > self._last}
        else:
            self._single.add(method.delivery_tag)
        if self._last + len(self._single) >= self._wanted:
            self._done.set()

    async def reached(self, count: int) -> None:
        self._wanted = count
        if self._last + len(self._single) < count:
            self._done.clear()
            await self._done.wait()


async def _consume(places: Places, sizes: Sizes, emails: int, gate: Gate) -> None:
    """Receive every message; each ack covers as many messages as one record statement of the chain."""
    async with await open_connection(places.amqp_url, name="floor") as connection:
        channel = await connection.open_channel()
        await channel.call(channel.raw.basic_qos, prefetch_count=sizes.prefetch)
        done = asyncio.Event()
        batch = max(1, min(sizes.record_batch, sizes.prefetch) // sizes.bundle)
        taken = 0

        def receive(_channel: Any, method: Any, _properties: Any, body: bytes) -> None:
            nonlocal taken
            taken += len(orjson.loads(body).get("emails", (body,)))
            if method.delivery_tag % batch == 0 or taken == emails:
                channel.raw.basic_ack(method.delivery_tag, multiple=True)
            if taken == emails:
                done.set()

        async with gate.open("consume", emails):
            await channel.call(channel.raw.basic_consume, queue=places.queue, on_message_callback=receive)
            await done.wait()


async def _lease(sizes: Sizes, database: Any, keys: dict[UUID, str], gate: Gate) -> list[Any]:
    leased: list[Any] = []
    async with gate.open("lease", len(keys)):
        for batch in _batches(sorted(keys), sizes.lease_batch):
            parameters = {
                **ids_within(batch),
                "message_keys": [keys[email_id] for email_id in batch],
                "worker": "floor",
                "lease_seconds": 60.0,
                "most_octets": MAX_OCTETS,
                "paused_tenants": [],
                "redeliver_seconds": 0.0,
            }
            leased += await _fetch(database, "lease", parameters)
    assert len(leased) == len(keys), "every email was leased"
    return leased


async def _send(places: Places, sizes: Sizes, leased: Sequence[Any], gate: Gate) -> None:
    """Send each email by the smallest equivalent request, over the product's own HTTP connections."""
    transport = HttpTransport(connections=sizes.in_flight, ca_file=places.ca_file)
    loop = asyncio.get_running_loop()
    url = f"{places.sendgrid_url}/v3/mail/send"
    headers = {"Authorization": "Bearer SG.benchmark", "Content-Type": "application/json"}

    async def lane(rows: Iterator[Any]) -> None:
        for row in rows:
            attempt = Attempt(1, loop.time() + DEADLINE_SECONDS)
            answer = await transport.post(url, headers, _document(row), attempt)
            assert answer.status == 202, answer

    async def post(rows: Sequence[Any]) -> None:
        waiting = iter(rows)
        await asyncio.gather(*(lane(waiting) for _ in range(sizes.in_flight)))

    warm_up = leased[: 2 * sizes.in_flight]
    await post(warm_up)  # opens the connection
    async with gate.open("send", len(leased)):
        await post(leased)
    await transport.close()


def _document(row: Any) -> bytes:
    email_id, recipients = row[0], row[9]
    person = {"to": [{"email": address} for address in recipients["to"]], "custom_args": {"email_id": str(email_id)}}
    content = [{"type": "text/plain", "value": row[11]}]
    sender = {"email": "shop@example.com", "name": "Shop"}
    return orjson.dumps({"personalizations": [person], "from": sender, "subject": row[10], "content": content})


async def _record(sizes: Sizes, database: Any, leased: Sequence[Any], gate: Gate) -> None:
    now = datetime.now(UTC)
    async with gate.open("record", len(leased)):
        for batch in _batches(leased, sizes.record_batch):
            count = len(batch)
            email_ids = [row[0] for row in batch]
            parameters = {
                **ids_within(email_ids),
                "email_ids": email_ids,
                "lease_tokens": [row[1] for row in batch],
                "statuses": ["sent"] * count,
                "lease_seconds": [None] * count,
                "attempt_numbers": [row[2] for row in batch],
                "started_ats": [now] * count,
                "finished_ats": [now] * count,
                "outcomes": ["accepted"] * count,
                "error_types": [None] * count,
                "errors": [None] * count,
                "providers": ["sendgrid"] * count,
                "provider_codes": [None] * count,
                "provider_message_ids": [str(email_id) for email_id in email_ids],
                "expired_ats": [None] * count,
                "are_pinned": [False] * count,
                "wait_seconds": [None] * count,
                "worker": "floor",
                "slot": "floor:w0",
            }
            recorded = await _fetch(database, "record", parameters)
            assert len(recorded) == count, "every lease was ours"


async def _fetch(database: Any, name: str, parameters: dict[str, Any]) -> list[Any]:
    cursor = await database.execute(query(name), parameters)
    rows: list[Any] = await cursor.fetchall()
    return rows


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in itertools.count(0, size):
        if not (batch := items[first : first + size]):
            return
        yield batch
