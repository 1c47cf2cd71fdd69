"""What RabbitMQ reports of our exchange and queues, judged: what AMQP cannot be asked for, and above all losses.

A queue's arguments, bindings and policies decide whether dead letters arrive and stay. A policy set by somebody else
counts as much as an argument of ours: `effective_policy_definition` has user's and operator's policies together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.broker.management import Management, is_figure
from dispatcher.broker.topology import Topology
from dispatcher.domain.text import printable
from dispatcher.errors import BrokerUnavailable, TopologyError

_INIT: Final = "Run `dispatcher init`."
_REMOVE: Final = "Remove it: messages would be lost without a word."
_LENGTHS: Final = ("max-length", "max-length-bytes")
_TIMES: Final = {"message-ttl": "drops messages that have waited", "expires": "deletes the queue when nobody uses it"}
CONSUMER_TIMEOUT_SECONDS: Final = 1800.0
"""RabbitMQ's default; what rabbitmq.conf says cannot be asked for."""
MOST_NAMED: Final = 9
MOST_CHARACTERS: Final = 100
_REFUSING: Final = ("reject-publish", "reject-publish-dlx")
"""A full queue that refuses loses nothing: what is refused stays due, or where it was."""


@dataclass(frozen=True, slots=True)
class _Queue:
    """A queue as RabbitMQ reports it."""

    name: str
    fields: Mapping[str, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        return _mapping(self.fields.get("arguments"))

    @property
    def policy(self) -> Mapping[str, Any]:
        return _mapping(self.fields.get("effective_policy_definition"))

    def sources(self, key: str) -> Iterator[str]:
        """Where it is set, in words."""
        if f"x-{key}" in self.arguments:
            yield f"its argument x-{key} is {_shown(self.arguments[f'x-{key}'])}"
        if key in self.policy:
            names = [self.fields.get(which) for which in ("policy", "operator_policy")]
            named = " and ".join(_shown(name) for name in names if name)
            yield f"the policy {named or 'of the queue'} sets {key} to {_shown(self.policy[key])}"

    def effective(self, key: str) -> Any:
        """What counts where argument and policy differ: the argument."""
        return self.arguments.get(f"x-{key}", self.policy.get(key))


def find_faults(management: Management, topology: Topology) -> list[TopologyError]:
    """Everything about exchange, queues, bindings and policies that must be mended, each with its remedy.

    Raises:
        BrokerUnavailable: the management API does not answer, or not to this user.
    """
    faults = [*_exchange_faults(management, topology)]
    for name in topology.queues:
        faults += _queue_faults(management, topology, name)
    return faults


def find_absent_members(management: Management, topology: Topology) -> list[Absence]:
    """The quorum queues that have a member offline, the DLQ first. Classic queues have no members.

    Raises:
        BrokerUnavailable: the management API does not answer, or not to this user.
    """
    found = (absence_in(management.queue(name) or {}) for name in topology.queues)
    return [absence for absence in found if absence is not None]


@dataclass(frozen=True, slots=True)
class Absence:
    """A quorum queue that has members offline.

    Attributes:
        absent: The nodes of the members that are offline, `MOST_NAMED` of them at most.
        is_lost: No majority is online: nothing can be published to the queue or consumed from it.
    """

    queue: str
    absent: tuple[str, ...]
    is_lost: bool


def absence_in(fields: Mapping[str, Any]) -> Absence | None:
    """The members of a queue that are offline, by the management API's report; None if all are online."""
    members, online = fields.get("members"), fields.get("online")
    if not isinstance(members, list) or not isinstance(online, list):
        return None
    here = {str(member) for member in online}
    absent = sorted(_shown(member) for member in members if str(member) not in here)
    if not absent:
        return None
    is_lost = 2 * (len(members) - len(absent)) <= len(members)
    return Absence(_shown(fields.get("name")), tuple(absent[:MOST_NAMED]), is_lost)


def consumer_timeout_in(fields: Mapping[str, Any]) -> float | None:
    """After how many seconds without an ack RabbitMQ closes a channel; None if the queue has no such limit.

    Raises:
        BrokerUnavailable: the reported value is no number of milliseconds.
    """
    milliseconds = _Queue("", fields).effective("consumer-timeout")
    if milliseconds is None:
        return None
    if not is_figure(milliseconds):
        raise BrokerUnavailable("RabbitMQ's management API reports a consumer timeout that is no number.")
    return milliseconds / 1000


def _exchange_faults(management: Management, topology: Topology) -> Iterator[TopologyError]:
    fields = management.exchange(topology.exchange)
    subject = f"The exchange {topology.exchange}"
    if fields is None:
        yield TopologyError(f"{subject} does not exist.", remedy=_INIT)
    elif fields.get("type") != "direct" or not fields.get("durable") or fields.get("auto_delete"):
        remedy = "Delete it and run `dispatcher init`, or name another in DISPATCHER_EXCHANGE."
        yield TopologyError(f"{subject} is not direct, durable and permanent.", remedy=remedy)


def _queue_faults(management: Management, topology: Topology, name: str) -> Iterator[TopologyError]:
    fields = management.queue(name)
    if fields is None:
        yield TopologyError(f"The queue {name} does not exist.", remedy=_INIT)
        return
    if not fields.get("durable") or fields.get("auto_delete") or fields.get("exclusive"):
        words = f"The queue {name} does not outlive a restart or its users."
        yield TopologyError(words, remedy="Delete it and run `dispatcher init`.")
    bindings = [(one.get("source"), one.get("routing_key")) for one in management.bindings(name)]
    if (topology.exchange, name) not in bindings:
        words = f"The queue {name} is not bound to the exchange {topology.exchange} by its own name."
        yield TopologyError(words, remedy=_INIT)
    queue = _Queue(name, fields)
    yield from _loss_faults(queue)
    if name == topology.queue:
        yield from _dead_lettering_faults(queue, topology)


def _loss_faults(queue: _Queue) -> Iterator[TopologyError]:
    for key, words in _TIMES.items():
        for source in queue.sources(key):
            yield TopologyError(f"The queue {queue.name} {words}: {source}.", remedy=_REMOVE)
    if queue.effective("overflow") in _REFUSING:
        return
    for key in _LENGTHS:
        for source in queue.sources(key):
            words = f"The queue {queue.name} drops its oldest messages when it is full: {source}."
            yield TopologyError(words, remedy=_REMOVE)


def _dead_lettering_faults(queue: _Queue, topology: Topology) -> Iterator[TopologyError]:
    ours = {"dead-letter-exchange": topology.exchange, "dead-letter-routing-key": topology.dlq}
    for key, wanted in ours.items():
        if (found := queue.effective(key)) != wanted:
            words = f"rejected messages go elsewhere: {key} is {_shown(found or 'not set')}, we need {wanted}"
            remedy = "Delete it once nothing waits there and run `dispatcher init`."
            yield TopologyError(f"The queue {queue.name}: {words}.", remedy=remedy)


def _shown(value: object) -> str:
    """A reported value as a short printable text: anybody who may set a policy may write any text into it."""
    text = printable(str(value)[: MOST_CHARACTERS + 1])
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _mapping(value: object) -> Mapping[str, Any]:
    # RabbitMQ reports an empty definition as [].
    return value if isinstance(value, dict) else {}
