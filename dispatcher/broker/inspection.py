"""Finds faults of our exchange and queues that only RabbitMQ's HTTP API reports. Most of them would lose messages.

A queue's arguments, bindings and policies decide whether dead letters reach the DLQ and stay there. A policy has the
same effect as an argument. The field `effective_policy_definition` combines user policies and operator policies.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dispatcher.broker.management import Management, is_count
from dispatcher.broker.topology import DELIVERY_LIMIT, Topology, exactly
from dispatcher.domain.text import printable
from dispatcher.domain.values import dataclass
from dispatcher.errors import BrokerUnavailable, TopologyError

_INIT: Final = "Run `dispatcher init`."
_REMOVE: Final = "Remove this argument or policy, because it loses messages silently."
_REDECLARE: Final = "Delete the queue when it is empty, and run `dispatcher init`."
LEAST_DELIVERY_LIMIT: Final = 100_000
"""The lowest safe limit. Every read of the DLQ delivers each message. While another transaction locks an email's row,
the email's message is delivered about 60,000 times per day."""
DEFAULT_DELIVERY_LIMIT: Final = 20
"""The delivery limit of a quorum queue if nothing sets one. Before RabbitMQ 4, there was no default."""
_LENGTHS: Final = ("max-length", "max-length-bytes")
_TIMES: Final = {"message-ttl": "drops old messages", "expires": "is deleted when it is unused"}
CONSUMER_TIMEOUT_SECONDS: Final = 1800.0
"""RabbitMQ's default. The value in rabbitmq.conf cannot be queried."""
MAX_NAMED_NODES: Final = 9
MAX_SHOWN_CHARACTERS: Final = 100
_REFUSING: Final = ("reject-publish", "reject-publish-dlx")
"""The values of `overflow` with which a full queue rejects new messages. This loses nothing: the email of a rejected
message stays due, and a message that cannot be dead-lettered stays on the send queue."""


@dataclass(frozen=True, slots=True)
class _QueueReport:
    name: str
    fields: Mapping[str, Any]

    @property
    def arguments(self) -> Mapping[str, Any]:
        return _mapping(self.fields.get("arguments"))

    @property
    def policy(self) -> Mapping[str, Any]:
        return _mapping(self.fields.get("effective_policy_definition"))

    def sources(self, key: str) -> Iterator[str]:
        """A phrase about each argument and policy that sets the key, such as `its argument x-max-length is 5`."""
        if f"x-{key}" in self.arguments:
            yield f"its argument x-{key} is {_shown(self.arguments[f'x-{key}'])}"
        if key in self.policy:
            names = [self.fields.get(which) for which in ("policy", "operator_policy")]
            named = " and ".join(_shown(name) for name in names if name)
            yield f"the policy {named or 'of the queue'} sets {key} to {_shown(self.policy[key])}"

    def effective(self, key: str) -> Any:
        """The value that the queue uses for a key such as `max-length`. An argument takes precedence over a policy."""
        return self.arguments.get(f"x-{key}", self.policy.get(key))

    def remedy(self, key: str, topology: Topology, vhost: str) -> str:
        """How to remove the effect of what sets the key: an argument, policies, or a default of RabbitMQ."""
        if key not in self.policy:
            return _REMOVE if f"x-{key}" in self.arguments else _REDECLARE
        # Only the policy with the highest priority applies to a queue; the same for operator policies. So the remedy
        # applies a harmless policy to our queues, in place of the policy that applies to them now.
        kinds = {"policy": "set_policy", "operator_policy": "set_operator_policy"}
        words = ["-p", vhost, "--apply-to", "queues", "--priority", "999", "email-dispatcher"]
        words += [exactly(*topology.queues), json.dumps({"delivery-limit": DELIVERY_LIMIT})]
        commands = [
            shlex.join(["rabbitmqctl", command, *words]) for kind, command in kinds.items() if self.fields.get(kind)
        ]
        return f"{_REMOVE} If other queues need the policy, exclude ours: {' and '.join(commands)}"


async def find_faults(management: Management, topology: Topology) -> list[TopologyError]:
    """Every fault of the exchange, queues, bindings and policies, each with its remedy."""
    faults = []
    exchange, subject = await management.exchange(topology.exchange), f"The exchange {topology.exchange}"
    if exchange is None:
        faults.append(TopologyError(f"{subject} does not exist.", remedy=_INIT))
    elif exchange.get("type") != "direct" or not exchange.get("durable") or exchange.get("auto_delete"):
        remedy = "Delete the exchange and run `dispatcher init`, or set a different name in DISPATCHER_EXCHANGE."
        faults.append(TopologyError(f"{subject} must be direct, durable and not auto-delete.", remedy=remedy))
    default = None if (await management.version()).startswith("3.") else DEFAULT_DELIVERY_LIMIT
    for name in topology.queues:
        fields = await management.queue(name)
        if fields is None:
            faults.append(TopologyError(f"The queue {name} does not exist.", remedy=_INIT))
            continue
        bindings = [(one.get("source"), one.get("routing_key")) for one in await management.bindings(name)]
        if (topology.exchange, name) not in bindings:
            words = f"is not bound to the exchange {topology.exchange} with the queue's name as routing key."
            faults.append(TopologyError(f"The queue {name} {words}", remedy=_INIT))
        faults += _queue_faults(_QueueReport(name, fields), topology, management.vhost, default)
    return faults


async def find_offline_members(management: Management, topology: Topology) -> list[OfflineMembers]:
    """Quorum queues with an offline member, the DLQ first. Classic queues have no members."""
    found = [offline_members_in(await management.queue(name) or {}) for name in topology.queues]
    return [offline for offline in found if offline is not None]


@dataclass(frozen=True, slots=True)
class OfflineMembers:
    """A quorum queue with offline members. A member is the copy of the queue on one node."""

    queue: str
    nodes: tuple[str, ...]  # at most MAX_NAMED_NODES
    has_majority: bool  # if False, the queue accepts and delivers no messages


def offline_members_in(fields: Mapping[str, Any]) -> OfflineMembers | None:
    """The offline members in the HTTP API's report about a queue; None if all members are online."""
    members, online = fields.get("members"), fields.get("online")
    if not isinstance(members, list) or not isinstance(online, list):
        return None
    running = {str(member) for member in online}
    absent = sorted(_shown(member) for member in members if str(member) not in running)
    if not absent:
        return None
    has_majority = 2 * (len(members) - len(absent)) > len(members)
    return OfflineMembers(_shown(fields.get("name")), tuple(absent[:MAX_NAMED_NODES]), has_majority)


def consumer_timeout_in(fields: Mapping[str, Any]) -> float | None:
    """How many seconds a delivery may stay unacked, by the HTTP API's report about a queue; None without a limit."""
    milliseconds = _QueueReport("", fields).effective("consumer-timeout")
    if milliseconds is None:
        return None
    if not is_count(milliseconds):
        raise BrokerUnavailable("RabbitMQ's management API reports a consumer timeout that is not a number.")
    return milliseconds / 1000


def delivery_limit_in(fields: Mapping[str, Any], default: int | None) -> int | None:
    """How many times RabbitMQ redelivers a message, by the HTTP API's report about a queue; None without a limit.

    The lowest of argument, policy and operator policy counts. RabbitMQ ignores a negative limit if another one is set.
    `default`: the limit of a quorum queue if nothing sets one. Classic queues have no limit.
    """
    queue = _QueueReport("", fields)
    if queue.arguments.get("x-queue-type") != "quorum":
        return None
    limits = [queue.arguments.get("x-delivery-limit"), queue.policy.get("delivery-limit")]
    found = [limit for limit in limits if type(limit) is int]
    return min((limit for limit in found if limit >= 0), default=None if found else default)


def _queue_faults(
    queue: _QueueReport, topology: Topology, vhost: str, default_limit: int | None
) -> Iterator[TopologyError]:
    fields, name = queue.fields, queue.name
    if not fields.get("durable") or fields.get("auto_delete") or fields.get("exclusive"):
        words = f"The queue {name} must be durable, and neither auto-delete nor exclusive, so that RabbitMQ keeps it."
        yield TopologyError(words, remedy="Delete the queue and run `dispatcher init`.")
    yield from _loss_faults(queue, topology, vhost)
    limit = delivery_limit_in(fields, default_limit)
    if limit is not None and limit < LEAST_DELIVERY_LIMIT:
        does = "loses dead letters" if name == topology.dlq else "dead-letters messages about emails"
        sources = " and ".join(queue.sources("delivery-limit")) or "no argument or policy raises RabbitMQ's default"
        words = f"The queue {name} {does} that were delivered {limit} times; a read is a delivery: {sources}."
        yield TopologyError(words, remedy=queue.remedy("delivery-limit", topology, vhost))
    if name == topology.dlq:
        return
    ours = {"dead-letter-exchange": topology.exchange, "dead-letter-routing-key": topology.dlq}
    for key, wanted in ours.items():
        if (found := queue.effective(key)) != wanted:
            shown = _shown(found or "not set")
            words = f"rejected messages do not reach the DLQ, because {key} is {shown} but must be {wanted}"
            yield TopologyError(f"The queue {name}: {words}.", remedy=_REDECLARE)


def _loss_faults(queue: _QueueReport, topology: Topology, vhost: str) -> Iterator[TopologyError]:
    for key, words in _TIMES.items():
        for source in queue.sources(key):
            remedy = queue.remedy(key, topology, vhost)
            yield TopologyError(f"The queue {queue.name} {words}: {source}.", remedy=remedy)
    if queue.effective("overflow") in _REFUSING:
        return
    for key in _LENGTHS:
        for source in queue.sources(key):
            words = f"The queue {queue.name} drops its oldest messages when it is full: {source}."
            yield TopologyError(words, remedy=queue.remedy(key, topology, vhost))


def _shown(value: object) -> str:
    """A reported value as a short printable text. A user of RabbitMQ who may set policies chooses the value."""
    text = printable(str(value)[: MAX_SHOWN_CHARACTERS + 1])
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def _mapping(value: object) -> Mapping[str, Any]:
    # RabbitMQ reports an empty definition as [].
    return value if isinstance(value, dict) else {}
