"""The exchange and the queues. `init` declares them, `run` verifies them at its start, and `status` counts them.

    exchange (direct, durable) ──queue's name──▶ send queue ──rejected──▶ exchange ──dlq's name──▶ DLQ

Each lane has a send queue. One exchange serves all queues; the routing key is the queue's name. Only `init` declares
exchange and queues. If an existing queue has different arguments, RabbitMQ refuses the declaration and closes the
channel, and an operator must decide what to do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from dispatcher.broker.connection import Connection, open_connection
from dispatcher.broker.faults import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, ChannelClosed
from dispatcher.config import Settings
from dispatcher.domain.lanes import DEFAULT_LANES, send_queue
from dispatcher.domain.values import dataclass
from dispatcher.errors import TopologyError

DELIVERY_LIMIT: Final = 1_000_000
"""How many times RabbitMQ redelivers a message before it dead-letters the message. The number is high, because
PostgreSQL counts the attempts. With RabbitMQ 4's default of 20, RabbitMQ would dead-letter a whole prefetch window of
harmless emails after 20 workers died."""
_INIT: Final = "Run `dispatcher init`."
_NOTHING: Final = "^$"
"""A permission that matches nothing."""
# An example of RabbitMQ's text: inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received the value 'quorum'
# of type 'longstr' but current is none
_DIFFERENCE: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for .*: received (?P<ours>.+) but current is (?P<theirs>.+)"
)
_VALUE: Final = re.compile(r"(?:the value )?('.*?')(?: of type '\w+')?")


@dataclass(frozen=True, slots=True)
class FoundQueue:
    """The counts that RabbitMQ reports for a queue: ready messages, without those that are delivered, and consumers."""

    messages: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The exchange and queues that must exist on RabbitMQ."""

    exchange: str
    queue: str  # the normal lane's send queue; the names of the other send queues begin with it
    dlq: str
    queue_type: str = "quorum"  # `quorum` or `classic`, for all queues
    lanes: tuple[str, ...] = DEFAULT_LANES  # most urgent first

    @classmethod
    def of(cls, settings: Settings) -> Topology:
        return cls(settings.exchange, settings.queue, settings.dlq, settings.queue_type, settings.lanes)

    @property
    def send_queues(self) -> dict[str, str]:
        """The send queue of each lane, by lane, most urgent first."""
        return {lane: send_queue(self.queue, lane) for lane in self.lanes}

    @property
    def queues(self) -> tuple[str, ...]:
        """The names of all queues. The DLQ is first, because the send queues refer to the DLQ."""
        return self.dlq, *self.send_queues.values()

    def variable(self, queue: str) -> str:
        """The name of the setting that determines this queue's name."""
        return "DISPATCHER_DLQ" if queue == self.dlq else "DISPATCHER_QUEUE"

    def arguments(self, queue: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {"x-queue-type": self.queue_type}
        if self.queue_type == "quorum":
            arguments["x-delivery-limit"] = DELIVERY_LIMIT
        if queue != self.dlq:
            arguments |= {"x-dead-letter-exchange": self.exchange, "x-dead-letter-routing-key": self.dlq}
            if self.queue_type == "quorum":
                # With `at-least-once`, a dead letter leaves the send queue only after the DLQ has confirmed it. This
                # strategy needs `reject-publish` and RabbitMQ 3.10 or newer.
                arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return arguments


async def declare(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> list[str]:
    """Creates the exchange and the queues that are missing. Returns one line of text about each. Idempotent. Raises
    TopologyError if one exists with different arguments, or the user lacks the permission to declare it."""
    async with await open_connection(amqp_url, name="dispatcher init", ca_file=ca_file) as connection:
        existed = await _exchange_exists(connection, topology.exchange)
        channel = await connection.open_channel()
        declaration = {"exchange": topology.exchange, "exchange_type": "direct", "durable": True}
        with _refusals_of("exchange", topology.exchange, "DISPATCHER_EXCHANGE"):
            await channel.call(channel.raw.exchange_declare, **declaration)
        words = [_done(f"exchange {topology.exchange}", "direct", existed=existed)]
        for queue in topology.queues:
            existed = await _queue_exists(connection, queue)
            with _refusals_of("queue", queue, topology.variable(queue)):
                await _declare_queue(connection, topology, queue)
                await bind(connection, topology.exchange, queue)
            words.append(_done(f"queue {queue}", topology.queue_type, existed=existed))
        return words


async def bind(connection: Connection, exchange: str, queue: str) -> None:
    """Binds a queue to the exchange, with the queue's name as routing key. Idempotent."""
    channel = await connection.open_channel()
    await channel.call(channel.raw.queue_bind, queue=queue, exchange=exchange, routing_key=queue)
    await channel.close()


async def verify(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> None:
    """Checks that the exchange and the queues exist as `declare` creates them. Creates nothing.

    If the user lacks the permission to configure the queues, RabbitMQ does not compare the queues' arguments. This
    function then checks only that the queues exist. It cannot check bindings, because AMQP cannot query them. (If a
    binding is missing, RabbitMQ returns the messages that we publish, and the relay restores the binding.)
    """
    async with await open_connection(amqp_url, name="dispatcher verify", ca_file=ca_file) as connection:
        await _verify_on(connection, topology)


async def _verify_on(connection: Connection, topology: Topology) -> None:
    if not await _exchange_exists(connection, topology.exchange):
        raise TopologyError(f'RabbitMQ has no exchange "{topology.exchange}".', remedy=_INIT)
    for queue in topology.queues:
        await find(connection, queue)
        try:
            # For an existing queue, a declaration only compares the arguments, and changes nothing.
            await _declare_queue(connection, topology, queue)
        except ChannelClosed as fault:
            if fault.code != ACCESS_REFUSED:
                raise _refusal("queue", queue, topology.variable(queue), fault) from fault


async def depths(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> dict[str, int]:
    """The number of ready messages per queue, without those that are delivered and not yet acked."""
    async with await open_connection(amqp_url, name="dispatcher status", ca_file=ca_file) as connection:
        return {queue: found.messages for queue, found in (await _find_queues(connection, topology)).items()}


class QueueWatch:
    """Reads the counts of all queues over one connection. Verifies the topology after each connect."""

    def __init__(self, amqp_url: str, topology: Topology, *, name: str, ca_file: Path | None = None) -> None:
        self._open = partial(open_connection, amqp_url, name=name, ca_file=ca_file)
        self._topology = topology
        self._connection: Connection | None = None

    async def look(self) -> dict[str, FoundQueue]:
        """The current counts of all queues, by name. Raises TopologyError or BrokerUnavailable."""
        try:
            if self._connection is None:
                self._connection = await self._open()
                await _verify_on(self._connection, self._topology)
            return await _find_queues(self._connection, self._topology)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Closes the connection. The next `look` opens a new connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _find_queues(connection: Connection, topology: Topology) -> dict[str, FoundQueue]:
    """The current counts of all queues, the DLQ last."""
    dlq, *send_queues = topology.queues
    queues = (*send_queues, dlq)
    return dict(zip(queues, await asyncio.gather(*(find(connection, queue) for queue in queues)), strict=True))


async def find(connection: Connection, queue: str) -> FoundQueue:
    """The current counts of a queue. Each queue has a channel, because RabbitMQ closes that of a missing queue."""
    channel = connection.counting.get(queue)
    if channel is None or channel.closed.done():
        channel = connection.counting[queue] = await connection.open_channel()
    answer = await channel.find_queue(queue)
    return FoundQueue(int(answer.message_count), int(answer.consumer_count))


async def _queue_exists(connection: Connection, queue: str) -> bool:
    try:
        await find(connection, queue)
    except TopologyError:
        return False
    return True


async def _exchange_exists(connection: Connection, exchange: str) -> bool:
    channel = await connection.open_channel()
    try:
        await channel.call(channel.raw.exchange_declare, exchange=exchange, passive=True)
    except ChannelClosed as fault:
        if fault.code != NOT_FOUND:
            raise
        return False
    return True


async def _declare_queue(connection: Connection, topology: Topology, queue: str) -> None:
    channel = await connection.open_channel()
    arguments = topology.arguments(queue)
    await channel.call(channel.raw.queue_declare, queue=queue, durable=True, arguments=arguments)


def exactly(*names: str) -> str:
    """A regular expression that matches exactly these names."""
    escaped = [re.escape(name) for name in names]
    return f"^{escaped[0]}$" if len(escaped) == 1 else f"^({'|'.join(escaped)})$"


def _done(subject: str, kind: str, *, existed: bool) -> str:
    return f"{subject} already exists" if existed else f"declared {subject} ({kind}, durable)"


@contextmanager
def _refusals_of(kind: str, name: str, variable: str) -> Iterator[None]:
    """Raises a TopologyError if RabbitMQ refuses a declaration within the `with` block."""
    try:
        yield
    except ChannelClosed as fault:
        raise _refusal(kind, name, variable, fault) from fault


def _refusal(kind: str, name: str, variable: str, fault: ChannelClosed) -> TopologyError:
    """The error that reports RabbitMQ's refusal of a declaration, and the remedy."""
    subject = f"{kind} {name}"
    if fault.code == ACCESS_REFUSED:
        return TopologyError(
            f"RabbitMQ does not allow this user to declare {subject}.",
            remedy="Grant the permission (see `dispatcher topology users`), or run `dispatcher init` as another user.",
        )
    if fault.code != PRECONDITION_FAILED:
        return TopologyError(f"RabbitMQ refuses to declare {subject}: {fault.code} {fault.text}.")
    when = " when it is empty" if kind == "queue" else ""
    return TopologyError(
        f"RabbitMQ already has {subject}, with different arguments: {difference(fault.text)}.",
        remedy=f"Delete the {subject}{when}, and run `dispatcher init`. Or set a different name in {variable}.",
    )


def difference(text: str) -> str:
    """The difference that RabbitMQ's text reports: `x-queue-type is 'classic', we need 'quorum'`."""
    found = _DIFFERENCE.search(text)
    if found is None:
        return text
    return f"{found['argument']} is {_value(found['theirs'])}, we need {_value(found['ours'])}"


def _value(words: str) -> str:
    found = _VALUE.fullmatch(words.strip())
    return found[1] if found else words.strip().replace("none", "not set")


@dataclass(frozen=True, slots=True)
class User:
    """A user of RabbitMQ with its minimal permissions, and which process connects as this user, for which purpose."""

    # The regular expressions of a permission match the exchanges and queues that a user may configure (create, delete),
    # write (publish, bind) and read (consume, bind from). None of these users may write to the default exchange: a user
    # with this permission can publish to any queue.

    role: str
    about: str
    configure: str = _NOTHING
    write: str = _NOTHING
    read: str = _NOTHING
    tags: str = ""  # for the management API


def users_of(topology: Topology) -> list[User]:
    """The users of this topology, each with only the permissions that it needs."""
    everything = exactly(topology.exchange, *topology.send_queues.values(), topology.dlq)
    exchange = exactly(topology.exchange)
    return [
        User("producer", "`dispatcher api`: publishes the emails that it accepts", write=exchange),
        User(
            "worker",
            "`dispatcher run`: publishes and consumes, binds a queue that has lost its binding, and sweeps the DLQ",
            write=everything,
            read=everything,
        ),
        User(
            "operator",
            "an operator: `dispatcher init` creates the queues, `dispatcher dlq` reads and repairs the DLQ",
            configure=everything,
            write=everything,
            read=everything,
        ),
        User("probe", "DISPATCHER_RABBITMQ_MANAGEMENT_URL: reads reports, changes nothing", tags="monitoring"),
    ]
