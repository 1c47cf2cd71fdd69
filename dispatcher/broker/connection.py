"""A connection to RabbitMQ: awaitable calls instead of pika's callbacks, and pika's exceptions translated.

    async with await open_connection(urls, name="relay") as connection:
        channel = await connection.open_channel()
        answer = await channel.call(channel.raw.queue_declare, queue="x", passive=True)

Runs pika's AsyncioConnection on the running event loop. Use a connection only in that loop's thread, and only in the
process that opened it, never across a fork.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import pika
from pika import exceptions

from dispatcher.broker.deliveries import acks
from dispatcher.broker.faults import NOT_FOUND, REMEDIES, ChannelClosed, channel_fault, reason
from dispatcher.broker.pika_connection import PikaConnection
from dispatcher.config.values import addresses
from dispatcher.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, TopologyError
from dispatcher.transport.tls import client_context
from dispatcher.version import VERSION

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0
NEXT_NODE_SECONDS: Final = 2.0
"""If a node does not answer within this time, the next node is tried at the same time. The first connection that opens
is used."""
ANSWER_SECONDS: Final = 30.0
"""Timeout of a call on a channel. It is long, because the cluster's nodes vote when a quorum queue is declared."""
CLOSE_SECONDS: Final = 5.0
TRUSTED_SECONDS: Final = 0.2
"""A count of 0 is trusted only if it arrives within this time: RabbitMQ also reports 0 for a quorum queue that did not
answer RabbitMQ within 0.25 s (rabbit_quorum_queue:stat)."""
MAX_QUEUE_QUERIES: Final = 10
_DEFAULTS: Final = {
    "socket_timeout": CONNECT_SECONDS / 2,
    "stack_timeout": CONNECT_SECONDS,
    "connection_attempts": 1,
    "heartbeat": 10,
    # A last resort: pika closes a connection that RabbitMQ has blocked for this long. The time can be long, because
    # heartbeats distinguish a RabbitMQ that blocks publishers from a RabbitMQ that is dead.
    "blocked_connection_timeout": 600.0,
}
"""Defaults that the query of a URL may override, such as `?heartbeat=10`."""


def parameters(amqp_url: str, *, name: str = "", ca_file: Path | None = None) -> list[pika.URLParameters]:
    """The connection parameters of each node. Raises ConfigurationError, or OSError for the certificates."""
    found = [_parameters(url, name, ca_file) for url in addresses(amqp_url)]
    if len({each.virtual_host for each in found}) > 1:
        raise ConfigurationError(
            ["The URLs in DISPATCHER_AMQP_URL contain different virtual hosts. Use the same virtual host in each URL."]
        )
    return found


def _parameters(amqp_url: str, name: str, ca_file: Path | None) -> pika.URLParameters:
    try:
        found = pika.URLParameters(amqp_url)
    except (ValueError, TypeError, SyntaxError, OSError) as error:
        # The error's own text is left out, because it may quote the URL with its password.
        mistake = f"DISPATCHER_AMQP_URL is not a valid AMQP URL ({type(error).__name__})."
        example = "amqp://user:password@host:5672/%2F?heartbeat=10"
        raise ConfigurationError([f"{mistake} It must look like {example}."]) from None
    given = parse_qs(urlsplit(amqp_url).query)
    for option, value in _DEFAULTS.items():
        if option not in given:
            setattr(found, option, value)
    if found.ssl_options is not None and (ca_file is not None or "ssl_options" not in given):
        found.ssl_options = pika.SSLOptions(client_context(ca_file))
    found.client_properties = {"connection_name": name, "product": "Email Dispatcher", "version": VERSION}
    return found


def vhost_of(amqp_url: str) -> str:
    """The virtual host in a URL, or in comma-separated URLs. Raises ConfigurationError if the virtual hosts differ."""
    return str(parameters(amqp_url)[0].virtual_host)


async def open_connection(amqp_url: str, *, name: str, ca_file: Path | None = None) -> Connection:
    """Opens a connection to one of the nodes, in random order. Raises BrokerUnavailable with each node's error."""
    try:
        nodes = parameters(amqp_url, name=name, ca_file=ca_file)
    except OSError as error:
        # The CA file was valid when the settings were read, so it is probably being replaced now. Callers retry after
        # BrokerUnavailable.
        raise BrokerUnavailable(f"DISPATCHER_CA_FILE cannot be loaded ({type(error).__name__}).") from error
    random.shuffle(nodes)
    tries: set[asyncio.Task[Connection]] = set()
    faults: list[BrokerUnavailable] = []
    try:
        while nodes or tries:
            if nodes:
                tries.add(asyncio.create_task(_opened(nodes.pop())))
            timeout = NEXT_NODE_SECONDS if nodes else None
            done, _ = await asyncio.wait(tries, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                tries.remove(each)
                try:
                    return each.result()
                except BrokerUnavailable as fault:
                    faults.append(fault)
    finally:
        for each in tries:
            each.add_done_callback(_abandon)
            each.cancel()
    words = " ".join(fault.message for fault in faults)
    # If any node refused the login, waiting does not help.
    refusal = next((fault for fault in faults if isinstance(fault, BrokerRefused)), None)
    raise BrokerRefused(words, remedy=refusal.remedy) if refusal else BrokerUnavailable(words)


def _abandon(attempt: asyncio.Task[Connection]) -> None:
    """Drops a connection that has opened although another connection is used."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort()


async def _opened(node: pika.URLParameters) -> Connection:
    connection = Connection(node)
    await connection.opened()
    return connection


class Connection:
    """A connection, open until the future `lost` is done, whose result is the reason, as a phrase."""

    def __init__(self, node: pika.URLParameters) -> None:
        """Starts connecting. `open_connection` waits for the result."""
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.counting: dict[str, Channel] = {}  # the channels of `topology.find`, by queue
        self._address = f"RabbitMQ at {node.host}:{node.port}"
        self._opened: asyncio.Future[None] = loop.create_future()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._pika = PikaConnection(
            node,
            on_open_callback=lambda _: resolve(self._opened, None),
            on_open_error_callback=lambda _, error: self._end(error),
            on_close_callback=lambda _, error: self._end(error),
            custom_ioloop=loop,
        )
        self._pika.add_on_connection_blocked_callback(lambda *_: self._unblocked.clear())
        self._pika.add_on_connection_unblocked_callback(lambda *_: self._unblocked.set())

    async def opened(self) -> None:
        try:
            # pika has no timeout of its own for a name server that does not answer.
            async with asyncio.timeout(CONNECT_SECONDS + 1):
                await first_of(self._opened, self.lost)
        except BaseException as error:
            self.abort()
            if isinstance(error, TimeoutError):
                raise BrokerUnavailable(f"{self._address} cannot be reached: it did not answer in time.") from None
            raise
        if self.lost.done():
            words = self.lost.result()
            if remedy := REMEDIES.get(words):
                raise BrokerRefused(f"{self._address} refuses the connection: {words}.", remedy=remedy)
            raise BrokerUnavailable(f"{self._address} cannot be reached: {words}.")

    @property
    def is_blocked(self) -> bool:
        """Whether RabbitMQ blocks publishing, because RabbitMQ is short of memory or disk space."""
        return not self._unblocked.is_set()

    async def unblocked(self) -> None:
        """Waits until publishing is allowed. Also returns when the connection is lost."""
        await self._unblocked.wait()

    async def open_channel(self) -> Channel:
        if not self._pika.is_open:
            cause = self.lost.result() if self.lost.done() else "we are closing the connection"
            raise BrokerUnavailable(f"The connection to RabbitMQ is lost: {cause}.")
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel = Channel(self._pika.channel(on_open_callback=lambda _: resolve(opened, None)))
        await channel.wait(opened, "channel.open")
        return channel

    async def close(self, within_seconds: float = CLOSE_SECONDS) -> None:
        """Closes the connection. If RabbitMQ answers in time, everything written before has reached it. Idempotent."""
        if self._pika.is_open:
            self._pika.close()
        await first_of(self.lost, seconds=within_seconds)
        if not self.lost.done():
            self.abort()
            await first_of(self.lost, seconds=within_seconds)

    def abort(self) -> None:
        """Drops the connection without a closing handshake; `lost` is done soon after. Idempotent."""
        self._pika.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _end(self, error: BaseException) -> None:
        self._unblocked.set()
        resolve(self.lost, reason(error))


class Channel:
    """A channel, open until the future `closed` is done, whose result is the error. `raw`: pika's channel."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.closed: asyncio.Future[BrokerUnavailable] = asyncio.get_running_loop().create_future()
        raw.add_on_close_callback(lambda _, error: resolve(self.closed, channel_fault(error)))

    async def call(self, method: Callable[..., Any], /, **arguments: Any) -> Any:
        """Calls a method of pika that takes a `callback`, and returns RabbitMQ's answer."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            method(**arguments, callback=lambda given: resolve(answer, given.method))
        except exceptions.AMQPError as error:
            raise self.fault(error) from error
        return await self.wait(answer, method.__name__)

    async def find_queue(self, queue: str) -> Any:
        """RabbitMQ's answer about a queue. Repeats the call if the answer is a late 0 (see TRUSTED_SECONDS)."""
        loop = asyncio.get_running_loop()
        queries = 0
        while True:
            queries += 1
            called_at = loop.time()
            try:
                answer = await self.call(self.raw.queue_declare, queue=queue, passive=True)
            except ChannelClosed as fault:
                if fault.code != NOT_FOUND:
                    raise
                raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy="Run `dispatcher init`.") from fault
            if answer.message_count or loop.time() - called_at < TRUSTED_SECONDS or queries == MAX_QUEUE_QUERIES:
                return answer

    def ack(self, tags: Sequence[tuple[int, bool]]) -> None:
        """Acks deliveries in one write. `tags`: a delivery's tag, and whether the ack includes all before it."""
        if not self.raw.is_open:
            raise exceptions.ChannelWrongStateError
        self.raw.connection.emit(acks(self.raw.channel_number, tags))

    def write(self, frames: bytes) -> None:
        """Writes the frames of messages, together with all other frames of the event loop's current round."""
        if not self.raw.is_open:
            raise exceptions.ChannelWrongStateError
        self.raw.connection.emit((frames,))

    @property
    def most_body_octets(self) -> int:
        """The length of the longest body that fits into one frame, in octets."""
        return int(self.raw.connection.most_body_octets)

    async def close(self) -> None:
        if self.raw.is_open:
            self.raw.close()
        await first_of(self.closed, seconds=ANSWER_SECONDS)

    def fault(self, error: BaseException) -> BrokerUnavailable:
        """Translates an exception of pika. The error that closed the channel says more, so prefers that error."""
        return self.closed.result() if self.closed.done() else channel_fault(error)

    async def wait(self, answer: asyncio.Future[Any], what: str) -> Any:
        """Waits for RabbitMQ's answer to the call `what`. Raises BrokerUnavailable, or what closed the channel."""
        await first_of(answer, self.closed, seconds=ANSWER_SECONDS)
        if answer.done():
            return answer.result()
        if self.closed.done():
            raise self.closed.result()
        raise BrokerUnavailable(f"RabbitMQ did not answer the call `{what}` within {ANSWER_SECONDS:.0f} s.")


async def first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Waits until at least one future is done, or until `seconds` have passed (None: no limit). Cancels no future."""
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def resolve(future: asyncio.Future[T], value: T) -> None:
    """Sets the result of a future, unless the future is already done."""
    if not future.done():
        future.set_result(value)
