"""The least that each kind of RabbitMQ user needs, as the three expressions of a RabbitMQ permission.

An expression names the exchanges and queues that a user may configure (make, delete), write to (publish, bind) and read
(consume, bind from). `^$` is nothing; the default exchange, by which anybody could publish to any queue, is
`amq.default`, and nobody here may write to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dispatcher.broker.topology import Topology

NOTHING: Final = "^$"


@dataclass(frozen=True, slots=True)
class User:
    """A kind of user, and what it may do.

    Attributes:
        role: `producer`, `worker`, `operator` or `probe`.
        about: Who connects as it.
        tags: For the management API; RabbitMQ's own words.
    """

    role: str
    about: str
    configure: str = NOTHING
    write: str = NOTHING
    read: str = NOTHING
    tags: str = ""


def users_of(topology: Topology) -> list[User]:
    """The users that this topology wants, each with no permission more than it uses."""
    everything = _exactly(topology.exchange, topology.queue, topology.dlq)
    exchange = _exactly(topology.exchange)
    return [
        User("producer", "`dispatcher api`: publishes what it has just accepted", write=exchange),
        User("worker", "`dispatcher run`: publishes and sends", write=exchange, read=_exactly(topology.queue)),
        User(
            "operator",
            "a person: `dispatcher init` makes the queues, `dlq` reads and mends them",
            configure=everything,
            write=everything,
            read=everything,
        ),
        User("probe", "DISPATCHER_RABBITMQ_MANAGEMENT_URL: looks, and touches nothing", tags="monitoring"),
    ]


def _exactly(*names: str) -> str:
    """An expression that these names match, and no other."""
    escaped = [re.escape(name) for name in names]
    return f"^{escaped[0]}$" if len(escaped) == 1 else f"^({'|'.join(escaped)})$"
