"""A connection to RabbitMQ: pika's callbacks made awaitable, its faults translated, its end told once.

    async with await open_connection(urls, name="relay") as connection:
        channel = await connection.open_channel()
        answer = await channel.call(channel.raw.queue_declare, queue="x", passive=True)

Pika's AsyncioConnection under the running loop; everything here belongs to that loop's thread, and to the process that
opened it: never across a fork.
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
"""After so long without an answer from one node the next is tried as well; whichever opens first is taken."""
ANSWER_SECONDS: Final = 30.0
"""For what is asked on a channel; declaring a quorum queue takes a vote of the cluster."""
CLOSE_SECONDS: Final = 5.0
DOUBTFUL_SECONDS: Final = 0.2
"""RabbitMQ says that a quorum queue is empty where it has heard nothing of it for 0.25 s (rabbit_quorum_queue:stat)."""
MOST_LOOKS: Final = 10
_DEFAULTS: Final = {
    "socket_timeout": CONNECT_SECONDS / 2,
    "stack_timeout": CONNECT_SECONDS,
    "connection_attempts": 1,
    "heartbeat": 10,
    # An alarm lasts as long as it lasts and heartbeats tell a dead broker from a blocked one; this is the backstop.
    "blocked_connection_timeout": 600.0,
}
"""What a URL's query may set otherwise, such as `?heartbeat=10`."""


def parameters(amqp_url: str, *, name: str = "", ca_file: Path | None = None) -> list[pika.URLParameters]:
    """How to connect to each node.

    Args:
        amqp_url: A URL, or the comma-separated URLs of a cluster's nodes.
        name: What RabbitMQ's management shows for the connection.
        ca_file: Certificates to trust instead of the system's, for amqps://.

    Raises:
        ConfigurationError: a URL cannot be used, or they name different virtual hosts.
        OSError: the certificates cannot.
    """
    found = [_parameters(url, name, ca_file) for url in addresses(amqp_url)]
    if len({each.virtual_host for each in found}) > 1:
        raise ConfigurationError(["DISPATCHER_AMQP_URL names different virtual hosts: name the same one in each URL."])
    return found


def _parameters(amqp_url: str, name: str, ca_file: Path | None) -> pika.URLParameters:
    try:
        found = pika.URLParameters(amqp_url)
    except (ValueError, TypeError, SyntaxError, OSError) as error:
        # Not the error's own words: they may quote the URL, with its password.
        mistake = f"DISPATCHER_AMQP_URL is not a usable AMQP URL ({type(error).__name__}): check it against"
        raise ConfigurationError([f"{mistake} amqp://user:password@host:5672/%2F?heartbeat=10."]) from None
    given = parse_qs(urlsplit(amqp_url).query)
    for option, value in _DEFAULTS.items():
        if option not in given:
            setattr(found, option, value)
    if found.ssl_options is not None and (ca_file is not None or "ssl_options" not in given):
        found.ssl_options = pika.SSLOptions(client_context(ca_file))
    found.client_properties = {"connection_name": name, "product": "Email Dispatcher", "version": VERSION}
    return found


def vhost_of(amqp_url: str) -> str:
    """The virtual host that a URL, or every URL of a list, names.

    Raises:
        ConfigurationError: a URL cannot be used.
    """
    return str(parameters(amqp_url)[0].virtual_host)


async def open_connection(amqp_url: str, *, name: str, ca_file: Path | None = None) -> Connection:
    """An open connection to one of the nodes that the URLs name, which are tried in random order.

    Raises:
        BrokerUnavailable: no node can be reached; says where and why.
        ConfigurationError: a URL cannot be used.
    """
    try:
        wanted = parameters(amqp_url, name=name, ca_file=ca_file)
    except OSError as error:
        # It was in order when the settings were read: somebody is replacing it.
        raise BrokerUnavailable(f"DISPATCHER_CA_FILE cannot be used now ({type(error).__name__}).") from error
    return await _first_opened(random.sample(wanted, len(wanted)))


async def _first_opened(wanted: list[pika.URLParameters]) -> Connection:
    """A connection to the first node that opens one. A node that is silent delays the next one only briefly."""
    tries: set[asyncio.Task[Connection]] = set()
    faults: list[BrokerUnavailable] = []
    try:
        while wanted or tries:
            if wanted:
                tries.add(asyncio.create_task(_opened(wanted.pop())))
            patience = NEXT_NODE_SECONDS if wanted else None
            done, _ = await asyncio.wait(tries, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
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
    raise _summary(faults)


def _abandon(attempt: asyncio.Task[Connection]) -> None:
    """Drops a connection that opened although another was taken."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().abort()


async def _opened(wanted: pika.URLParameters) -> Connection:
    connection = Connection(wanted)
    await connection.opened()
    return connection


def _summary(faults: Sequence[BrokerUnavailable]) -> BrokerUnavailable:
    """The faults of all nodes as one: a refusal where a node refused us, because waiting does not mend that."""
    words = " ".join(fault.message for fault in faults)
    refusal = next((fault for fault in faults if isinstance(fault, BrokerRefused)), None)
    return BrokerRefused(words, remedy=refusal.remedy) if refusal else BrokerUnavailable(words)


class Connection:
    """A connection, open until `lost` is done.

    Attributes:
        lost: Done when it is closed, by whomever, with the reason as half a sentence.
    """

    def __init__(self, wanted: pika.URLParameters) -> None:
        """Begins to connect; `open_connection` waits for it."""
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self._place = f"RabbitMQ at {wanted.host}:{wanted.port}"
        self._opened: asyncio.Future[None] = loop.create_future()
        self._unblocked = asyncio.Event()
        self._unblocked.set()
        self._pika = PikaConnection(
            wanted,
            on_open_callback=lambda _: resolve(self._opened, None),
            on_open_error_callback=lambda _, error: self._end(error),
            on_close_callback=lambda _, error: self._end(error),
            custom_ioloop=loop,
        )
        self._pika.add_on_connection_blocked_callback(lambda *_: self._unblocked.clear())
        self._pika.add_on_connection_unblocked_callback(lambda *_: self._unblocked.set())

    async def opened(self) -> None:
        """Waits until it is open.

        Raises:
            BrokerUnavailable: it cannot be opened.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS + 1):  # a name server that is silent has no timeout in pika
                await first_of(self._opened, self.lost)
        except BaseException as error:
            self.abort()
            if isinstance(error, TimeoutError):
                raise BrokerUnavailable(f"{self._place} cannot be reached: it did not answer in time.") from None
            raise
        if self.lost.done():
            words = self.lost.result()
            if remedy := REMEDIES.get(words):
                raise BrokerRefused(f"{self._place} cannot be reached: {words}.", remedy=remedy)
            raise BrokerUnavailable(f"{self._place} cannot be reached: {words}.")

    @property
    def is_blocked(self) -> bool:
        """Whether RabbitMQ has told us to stop publishing: it is short of memory or disk."""
        return not self._unblocked.is_set()

    async def unblocked(self) -> None:
        """Waits until publishing is allowed; also returns when the connection is lost."""
        await self._unblocked.wait()

    async def open_channel(self) -> Channel:
        """A new channel.

        Raises:
            BrokerUnavailable: the connection is lost.
        """
        if not self._pika.is_open:
            cause = self.lost.result() if self.lost.done() else "we are closing it"
            raise BrokerUnavailable(f"The connection to RabbitMQ is lost: {cause}.")
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel = Channel(self._pika.channel(on_open_callback=lambda _: resolve(opened, None)))
        await channel.wait(opened, "channel.open")
        return channel

    async def close(self, within_seconds: float = CLOSE_SECONDS) -> None:
        """Closes it and its channels; a second call is harmless.

        What was written before has reached RabbitMQ, unless it does not answer in time.
        """
        if self._pika.is_open:
            self._pika.close()
        await first_of(self.lost, seconds=within_seconds)
        if not self.lost.done():
            self.abort()
            await first_of(self.lost, seconds=within_seconds)

    def abort(self) -> None:
        """Drops it without a word to RabbitMQ; `lost` is done soon after. A second call is harmless."""
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
    """A channel, open until `closed` is done.

    Attributes:
        raw: Pika's channel.
        closed: Done when it is closed, by whomever, with the fault.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.closed: asyncio.Future[BrokerUnavailable] = asyncio.get_running_loop().create_future()
        raw.add_on_close_callback(lambda _, error: resolve(self.closed, channel_fault(error)))

    async def call(self, ask: Callable[..., Any], /, **arguments: Any) -> Any:
        """RabbitMQ's answer to one of pika's methods that take a `callback`.

        Raises:
            ChannelClosed: RabbitMQ refused, and closed the channel.
            BrokerUnavailable: the connection is lost, or no answer came in time.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            ask(**arguments, callback=lambda given: resolve(answer, given.method))
        except exceptions.AMQPError as error:
            raise self.fault(error) from error
        return await self.wait(answer, ask.__name__)

    async def find_queue(self, queue: str) -> Any:
        """RabbitMQ's `message_count` and `consumer_count` of a queue.

        If a quorum queue has not answered RabbitMQ within a quarter of a second, RabbitMQ says that it is empty. So an
        empty queue is believed only if the answer comes at once. Otherwise RabbitMQ is asked again, a few times.

        Raises:
            TopologyError: there is no such queue.
            BrokerUnavailable: as `call` does.
        """
        loop = asyncio.get_running_loop()
        looks = 0
        while True:
            looks += 1
            asked_at = loop.time()
            try:
                answer = await self.call(self.raw.queue_declare, queue=queue, passive=True)
            except ChannelClosed as fault:
                if fault.code != NOT_FOUND:
                    raise
                raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy="Run `dispatcher init`.") from fault
            if answer.message_count or loop.time() - asked_at < DOUBTFUL_SECONDS or looks == MOST_LOOKS:
                return answer

    def ack(self, tags: Sequence[tuple[int, bool]]) -> None:
        """Acks deliveries, in one write: by tag, and True for those of all deliveries before it as well.

        Raises:
            AMQPError: it is closing, or closed.
        """
        if not self.raw.is_open:
            raise exceptions.ChannelWrongStateError
        self.raw.connection.emit(acks(self.raw.channel_number, tags))

    def write(self, frames: bytes) -> None:
        """Writes the frames of messages, at the end of the loop's round, with what else is written until then.

        Raises:
            AMQPError: it is closing, or closed.
        """
        if not self.raw.is_open:
            raise exceptions.ChannelWrongStateError
        self.raw.connection.emit((frames,))

    @property
    def most_body_octets(self) -> int:
        """Of a message that is one frame."""
        return int(self.raw.connection.most_body_octets)

    async def close(self) -> None:
        """Closes it; harmless if it is closed."""
        if self.raw.is_open:
            self.raw.close()
        await first_of(self.closed, seconds=ANSWER_SECONDS)

    def fault(self, error: BaseException) -> BrokerUnavailable:
        """Why the channel is closed, where pika raised on use of it."""
        return self.closed.result() if self.closed.done() else channel_fault(error)

    async def wait(self, answer: asyncio.Future[Any], what: str) -> Any:
        """An answer of RabbitMQ, unless the channel ends before it; raises as `call` does."""
        await first_of(answer, self.closed, seconds=ANSWER_SECONDS)
        if answer.done():
            return answer.result()
        if self.closed.done():
            raise self.closed.result()
        raise BrokerUnavailable(f"RabbitMQ did not answer {what} within {ANSWER_SECONDS:.0f} s.")


async def first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Waits until one of them is done, or for so long; cancels none."""
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def resolve(future: asyncio.Future[T], value: T) -> None:
    """Answers whoever waits; harmless where he waits no more."""
    if not future.done():
        future.set_result(value)
