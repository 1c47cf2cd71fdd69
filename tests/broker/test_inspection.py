"""The checks of RabbitMQ's report about our exchange and queues find everything that can lose messages."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from dispatcher.broker.inspection import (
    OfflineMembers,
    consumer_timeout_in,
    delivery_limit_in,
    find_faults,
    find_offline_members,
    offline_members_in,
)
from dispatcher.broker.management import Management
from dispatcher.broker.topology import DELIVERY_LIMIT, Topology, declare
from dispatcher.dev.servers import Servers
from tests.broker.rabbit import Operator, Rabbit
from tests.waiting import DEADLINE_SECONDS, until_answer


@pytest.fixture
def management(servers: Servers) -> Management:
    """The management API."""
    return Management(servers.management_url, timeout_seconds=DEADLINE_SECONDS)


async def fault_texts(management: Management, topology: Topology) -> list[str]:
    """The text of every fault."""
    return [str(fault) for fault in await find_faults(management, topology)]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_what_init_creates_has_no_fault(
    amqp_url: str, management: Management, undeclared: Topology, queue_type: str
) -> None:
    topology = replace(undeclared, queue_type=queue_type)
    await declare(amqp_url, topology)

    assert await fault_texts(management, topology) == []


async def test_every_missing_object_is_named(management: Management, topology_names: Topology) -> None:
    words = await fault_texts(management, topology_names)

    assert len(words) == 1 + len(topology_names.queues)
    for name in (topology_names.exchange, *topology_names.queues):
        assert any(f" {name} does not exist. Run `dispatcher init`." in one for one in words)


async def test_a_missing_binding_is_named(management: Management, topology: Topology, rabbit: Rabbit) -> None:
    await rabbit.unbind_queue(topology.dlq, topology.exchange)

    (words,) = await until_answer(lambda: fault_texts(management, topology))

    assert words.startswith(f"The queue {topology.dlq} is not bound to the exchange {topology.exchange}")


@pytest.mark.slow  # RabbitMQ reports a new policy after 5 seconds.
async def test_every_policy_that_loses_dead_letters_is_named(
    amqp_url: str, management: Management, undeclared: Topology, operator: Operator
) -> None:
    # A quorum queue of RabbitMQ 3.9 does not support message-ttl.
    topology = replace(undeclared, queue_type="classic")
    await declare(amqp_url, topology)
    definition = {"max-length": 10, "max-length-bytes": 1000, "message-ttl": 60_000, "expires": 60_000}

    with operator.policy(topology.dlq, definition):
        words = await fault_texts(management, topology)

    where = f"the policy {topology.dlq} sets"
    assert [one.removeprefix(f"The queue {topology.dlq} ").partition(". ")[0] for one in words] == [
        f"drops old messages: {where} message-ttl to 60000",
        f"is deleted when it is unused: {where} expires to 60000",
        f"drops its oldest messages when it is full: {where} max-length to 10",
        f"drops its oldest messages when it is full: {where} max-length-bytes to 1000",
    ]


async def test_a_full_queue_that_rejects_publishes_is_no_fault(
    amqp_url: str, management: Management, undeclared: Topology, rabbit: Rabbit
) -> None:
    await declare(amqp_url, undeclared)
    await rabbit.delete_queue(undeclared.dlq)
    refusing = {"x-queue-type": "classic", "x-max-length": 5, "x-overflow": "reject-publish"}
    await rabbit.declare_queue(undeclared.dlq, **refusing)
    await rabbit.bind_queue(undeclared.dlq, undeclared.exchange)

    assert await fault_texts(management, undeclared) == []


async def test_arguments_that_lose_dead_letters_are_named(
    management: Management, undeclared: Topology, rabbit: Rabbit, amqp_url: str
) -> None:
    await declare(amqp_url, undeclared)
    await rabbit.delete_queue(undeclared.dlq)
    await rabbit.declare_queue(undeclared.dlq, **{"x-queue-type": "classic", "x-message-ttl": 1000, "x-max-length": 5})
    await rabbit.bind_queue(undeclared.dlq, undeclared.exchange)

    words = await fault_texts(management, undeclared)

    assert [one.partition(": ")[2] for one in words] == [
        "its argument x-message-ttl is 1000. Remove this argument or policy, because it loses messages silently.",
        "its argument x-max-length is 5. Remove this argument or policy, because it loses messages silently.",
    ]


async def test_a_send_queue_without_dead_lettering_is_named(
    amqp_url: str, management: Management, undeclared: Topology, rabbit: Rabbit
) -> None:
    await declare(amqp_url, undeclared)
    await rabbit.delete_queue(undeclared.queue)
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}  # RabbitMQ 4 has a default of 20
    await rabbit.declare_queue(undeclared.queue, **arguments)
    await rabbit.bind_queue(undeclared.queue, undeclared.exchange)

    words = await fault_texts(management, undeclared)

    assert len(words) == 2
    assert f"dead-letter-exchange is not set but must be {undeclared.exchange}" in words[0]


@pytest.mark.parametrize(
    ("members", "online", "offline", "has_majority"),
    [
        (["a", "b", "c"], ["a", "c"], ("b",), True),
        (["a", "b", "c"], ["b"], ("a", "c"), False),
        (["a", "b"], ["a"], ("b",), False),
    ],
)
def test_a_quorum_queue_reports_its_offline_members_and_whether_it_has_a_majority(
    members: list[str], online: list[str], offline: tuple[str, ...], *, has_majority: bool
) -> None:
    found = offline_members_in({"name": "q", "members": members, "online": online})

    assert found == OfflineMembers("q", offline, has_majority=has_majority)


async def test_a_queue_with_all_members_online_is_not_reported(management: Management, topology: Topology) -> None:
    async def has_members() -> bool:
        return bool((await management.queue(topology.queue) or {}).get("members"))

    await until_answer(has_members)

    assert await find_offline_members(management, topology) == []
    assert offline_members_in({"name": "classic"}) is None


@pytest.mark.parametrize(
    ("argument", "policy", "default", "limit"),
    [
        (1_000_000, None, 20, 1_000_000),
        (1_000_000, 20, None, 20),
        (30, 1_000_000, None, 30),
        (None, 40, 20, 40),
        (None, None, 20, 20),
        (None, None, None, None),
        (-1, 20, 20, 20),
        (50, -1, 20, 50),
        (-1, None, 20, None),
    ],
)
def test_the_lowest_delivery_limit_counts(
    argument: int | None, policy: int | None, default: int | None, limit: int | None
) -> None:
    arguments = {} if argument is None else {"x-delivery-limit": argument}
    fields = {
        "arguments": {"x-queue-type": "quorum", **arguments},
        "effective_policy_definition": [] if policy is None else {"delivery-limit": policy},
    }

    assert delivery_limit_in(fields, default) == limit
    assert delivery_limit_in({**fields, "arguments": {"x-queue-type": "classic"}}, default) is None


@pytest.mark.slow  # RabbitMQ reports a new policy after 5 seconds.
@pytest.mark.parametrize("kind", ["policy", "operator_policy"])
async def test_a_low_delivery_limit_is_named_and_the_command_excludes_our_queues(
    management: Management, topology: Topology, operator: Operator, kind: str
) -> None:
    with operator.policy(topology.dlq, {"delivery-limit": 20}, kind=kind):
        (words,) = await fault_texts(management, topology)
        command = shlex.split(words.partition("exclude ours: ")[2])
        *options, name, pattern, definition = command[2:]
        priority = int(options[options.index("--priority") + 1])
        assert command[:2] == ["rabbitmqctl", f"set_{kind}"]
        with operator.policy(
            topology.dlq, json.loads(definition), kind=kind, name=topology.queue, pattern=pattern, priority=priority
        ):
            assert await fault_texts(management, topology) == []

    assert words.startswith(
        f"The queue {topology.dlq} loses dead letters that were delivered 20 times; a read is a delivery: its argument "
        f"x-delivery-limit is {DELIVERY_LIMIT} and the policy {topology.dlq} sets delivery-limit to 20."
    )
    assert name == "email-dispatcher"
    assert all(re.search(pattern, queue) for queue in topology.queues)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({"arguments": {}, "effective_policy_definition": []}, None),
        ({"arguments": {"x-consumer-timeout": 60000}, "effective_policy_definition": {"consumer-timeout": 1}}, 60.0),
        ({"effective_policy_definition": {"consumer-timeout": 90000}}, 90.0),
    ],
)
def test_the_consumer_timeout_comes_from_the_argument_or_the_policy(fields: dict[str, object], seconds: float) -> None:
    assert consumer_timeout_in(fields) == seconds
