"""The minimal permissions of each RabbitMQ user, as the three regular expressions of a RabbitMQ permission.

The expressions match the exchanges and queues that a user may configure (create, delete), write (publish, bind) and
read (consume, bind from). `^$` matches nothing. None of these users may write to the default exchange, `amq.default`:
a user with this permission can publish to any queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dispatcher.broker.topology import Topology, exactly

NOTHING: Final = "^$"


@dataclass(frozen=True, slots=True)
class User:
    """A user of RabbitMQ and its permissions. `about`: which process connects as this user, and for which purpose."""

    role: str
    about: str
    configure: str = NOTHING
    write: str = NOTHING
    read: str = NOTHING
    tags: str = ""  # for the management API


def users_of(topology: Topology) -> list[User]:
    """The users of this topology, each with only the permissions that it needs."""
    send_queues = topology.send_queues.values()
    everything = exactly(topology.exchange, *send_queues, topology.dlq)
    exchange = exactly(topology.exchange)
    return [
        User("producer", "`dispatcher api`: publishes the emails that it accepts", write=exchange),
        User(
            "worker",
            "`dispatcher run`: publishes and consumes, and binds a queue that has lost its binding",
            write=everything,
            read=exactly(topology.exchange, *send_queues),
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
