"""The exchange and the two queues: declared by `init`, verified where a process starts, counted by `status`.

    exchange (direct, durable) ──queue's name──▶ send queue ──rejected──▶ exchange ──dlq's name──▶ DLQ

One exchange serves both queues, each bound by its own name. Declared once, in `init`: a declaration with other
arguments than those of an existing queue closes the channel, and what to do about it is a person's decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dispatcher.broker.connection import Connection, open_connection
from dispatcher.broker.faults import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, ChannelClosed
from dispatcher.config import Settings
from dispatcher.errors import TopologyError

DELIVERY_LIMIT: Final = 1_000_000
"""Attempts are counted by the database. RabbitMQ 4's default of 20 would dead-letter a worker's whole window of
innocent emails once 20 workers have died over it."""
_INIT: Final = "Run `dispatcher init`."
# As in: inequivalent arg 'x-queue-type' for queue 'q' in vhost '/': received the value 'quorum' of type 'longstr' but
# current is none
_DIFFERENCE: Final = re.compile(
    r"inequivalent arg '(?P<argument>[^']+)' for .*: received (?P<ours>.+) but current is (?P<theirs>.+)"
)
_VALUE: Final = re.compile(r"(?:the value )?('.*?')(?: of type '\w+')?")


@dataclass(frozen=True, slots=True)
class FoundQueue:
    """What RabbitMQ says of a queue at once.

    Attributes:
        messages: Those that wait; what consumers hold is not counted.
        consumers: Those that RabbitMQ gives messages to.
    """

    messages: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Topology:
    """What must exist on RabbitMQ.

    Attributes:
        queue: The send queue.
        dlq: The queue of dead letters.
        queue_type: `quorum` or `classic`, for both.
    """

    exchange: str
    queue: str
    dlq: str
    queue_type: str = "quorum"

    @classmethod
    def of(cls, settings: Settings) -> Topology:
        """The topology that an operator has set."""
        return cls(settings.exchange, settings.queue, settings.dlq, settings.queue_type)

    @property
    def queues(self) -> tuple[str, str]:
        """Both names, the DLQ first: the send queue refers to it."""
        return self.dlq, self.queue

    def arguments(self, queue: str) -> dict[str, Any]:
        """What one of the two queues is declared with."""
        arguments: dict[str, Any] = {"x-queue-type": self.queue_type}
        if self.queue_type == "quorum":
            arguments["x-delivery-limit"] = DELIVERY_LIMIT
        if queue == self.queue:
            arguments |= {"x-dead-letter-exchange": self.exchange, "x-dead-letter-routing-key": self.dlq}
            if self.queue_type == "quorum":
                # A dead letter leaves the send queue when the DLQ has confirmed it; needs this overflow, and 3.10.
                arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return arguments


async def declare(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> list[str]:
    """Makes whatever is missing; returns what was done, in words. A second call changes nothing.

    Raises:
        TopologyError: something exists with other arguments, or the user may not declare it.
        BrokerUnavailable: RabbitMQ cannot be reached.
    """
    async with await open_connection(amqp_url, name="dispatcher init", ca_file=ca_file) as connection:
        exchange = await _declare_exchange(connection, topology)
        return [exchange, *[await _declare_queue(connection, topology, queue) for queue in topology.queues]]


async def verify(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> None:
    """Makes sure that everything exists as `declare` makes it; creates nothing.

    A user who may not configure the queues cannot have their arguments compared; their existence is still verified. The
    bindings cannot be asked for by AMQP: a missing one shows as a message that the publisher gets back.

    Raises:
        TopologyError: something is missing or has other arguments; says what to do.
        BrokerUnavailable: RabbitMQ cannot be reached.
    """
    async with await open_connection(amqp_url, name="dispatcher verify", ca_file=ca_file) as connection:
        await verify_on(connection, topology)


async def verify_on(connection: Connection, topology: Topology) -> None:
    """The same on a connection that is open."""
    if not await _exchange_exists(connection, topology.exchange):
        raise TopologyError(f'RabbitMQ has no exchange "{topology.exchange}".', remedy=_INIT)
    for queue in topology.queues:
        if await _find(connection, queue) is None:
            raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy=_INIT)
        await _compare_queue(connection, topology, queue)


async def depths(amqp_url: str, topology: Topology, *, ca_file: Path | None = None) -> dict[str, int]:
    """How many messages wait on each queue; those that workers hold are not counted.

    Raises:
        TopologyError: a queue is missing.
        BrokerUnavailable: RabbitMQ cannot be reached.
    """
    async with await open_connection(amqp_url, name="dispatcher status", ca_file=ca_file) as connection:
        return {queue: found.messages for queue, found in (await find_queues(connection, topology)).items()}


async def find_queues(connection: Connection, topology: Topology) -> dict[str, FoundQueue]:
    """Both queues as they are now, the send queue first, on a connection that is open.

    Raises:
        TopologyError: a queue is missing.
        BrokerUnavailable: the connection is lost.
    """
    found = {}
    for queue in reversed(topology.queues):
        one = await _find(connection, queue)
        if one is None:
            raise TopologyError(f'RabbitMQ has no queue "{queue}".', remedy=_INIT)
        found[queue] = one
    return found


async def _declare_exchange(connection: Connection, topology: Topology) -> str:
    existed = await _exchange_exists(connection, topology.exchange)
    subject = f"exchange {topology.exchange}"
    channel = await connection.open_channel()
    declaration = {"exchange": topology.exchange, "exchange_type": "direct", "durable": True}
    try:
        await channel.call(channel.raw.exchange_declare, **declaration)
    except ChannelClosed as fault:
        raise _refusal(subject, "DISPATCHER_EXCHANGE", fault) from fault
    return f"{subject} was there already" if existed else f"declared {subject} (direct, durable)"


async def _declare_queue(connection: Connection, topology: Topology, queue: str) -> str:
    existed = await _find(connection, queue) is not None
    subject = f"queue {queue}"
    channel = await connection.open_channel()
    declaration = {"queue": queue, "durable": True, "arguments": topology.arguments(queue)}
    try:
        await channel.call(channel.raw.queue_declare, **declaration)
        binding = {"queue": queue, "exchange": topology.exchange, "routing_key": queue}
        await channel.call(channel.raw.queue_bind, **binding)
    except ChannelClosed as fault:
        raise _refusal(subject, _variable(topology, queue), fault) from fault
    return f"{subject} was there already" if existed else f"declared {subject} ({topology.queue_type}, durable)"


async def _compare_queue(connection: Connection, topology: Topology, queue: str) -> None:
    """Declares what exists: RabbitMQ compares the arguments and changes nothing."""
    channel = await connection.open_channel()
    declaration = {"queue": queue, "durable": True, "arguments": topology.arguments(queue)}
    try:
        await channel.call(channel.raw.queue_declare, **declaration)
    except ChannelClosed as fault:
        if fault.code != ACCESS_REFUSED:
            raise _refusal(f"queue {queue}", _variable(topology, queue), fault) from fault


async def _exchange_exists(connection: Connection, exchange: str) -> bool:
    channel = await connection.open_channel()
    try:
        await channel.call(channel.raw.exchange_declare, exchange=exchange, passive=True)
    except ChannelClosed as fault:
        if fault.code != NOT_FOUND:
            raise
        return False
    return True


async def _find(connection: Connection, queue: str) -> FoundQueue | None:
    """A queue as it is now; None if there is no such queue."""
    channel = await connection.open_channel()
    try:
        answer = await channel.find_queue(queue)
    except ChannelClosed as fault:
        if fault.code != NOT_FOUND:
            raise
        return None
    await channel.close()
    return FoundQueue(int(answer.message_count), int(answer.consumer_count))


def _refusal(subject: str, variable: str, fault: ChannelClosed) -> TopologyError:
    """RabbitMQ's refusal of a declaration, with what to do about it."""
    if fault.code == ACCESS_REFUSED:
        return TopologyError(
            f"RabbitMQ does not let this user declare {subject}.",
            remedy="Grant it, or run `dispatcher init` as a user who may.",
        )
    if fault.code != PRECONDITION_FAILED:
        return TopologyError(f"RabbitMQ refuses to declare {subject}: {fault.code} {fault.text}.")
    return TopologyError(
        f"RabbitMQ has {subject} already, with other arguments: {difference(fault.text)}.",
        remedy=f"Delete it once nothing waits there and run `dispatcher init`, or name another in {variable}.",
    )


def difference(text: str) -> str:
    """What RabbitMQ found different, such as `x-queue-type is 'classic', we need 'quorum'`; else its own words."""
    found = _DIFFERENCE.search(text)
    if found is None:
        return text
    return f"{found['argument']} is {_value(found['theirs'])}, we need {_value(found['ours'])}"


def _value(words: str) -> str:
    found = _VALUE.fullmatch(words.strip())
    return found[1] if found else words.strip().replace("none", "not set")


def _variable(topology: Topology, queue: str) -> str:
    return "DISPATCHER_QUEUE" if queue == topology.queue else "DISPATCHER_DLQ"
