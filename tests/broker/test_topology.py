"""Tests what `init` creates and prints, and which faults prevent `run` from starting."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit, urlunsplit

import pytest

from dispatcher.broker.topology import DELIVERY_LIMIT, Topology, declare, depths, difference, verify
from dispatcher.config import load
from dispatcher.errors import TopologyError
from tests.broker.rabbit import Operator, Rabbit


def test_all_names_come_from_the_settings() -> None:
    settings = load({"DISPATCHER_QUEUE": "a.send", "DISPATCHER_DLQ": "a.dlq", "DISPATCHER_QUEUE_TYPE": "classic"})

    assert Topology.of(settings) == Topology("email.dispatcher", "a.send", "a.dlq", "classic")


def test_each_lane_of_the_settings_has_a_send_queue_that_dead_letters_to_the_one_dlq() -> None:
    topology = Topology.of(load({"DISPATCHER_QUEUE": "q", "DISPATCHER_DLQ": "dlq", "DISPATCHER_LANES": "otp, normal"}))

    assert topology.send_queues == {"otp": "q.otp", "normal": "q"}
    assert topology.queues == ("dlq", "q.otp", "q")
    assert topology.arguments("q.otp") == topology.arguments("q")
    assert topology.variable("q.otp") == "DISPATCHER_QUEUE"


def test_a_quorum_queue_dead_letters_at_least_once_and_has_no_low_delivery_limit() -> None:
    topology = Topology("x", "x.send", "x.dlq")

    assert topology.arguments("x.send") == {
        "x-queue-type": "quorum",
        "x-dead-letter-exchange": "x",
        "x-dead-letter-routing-key": "x.dlq",
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
        "x-delivery-limit": DELIVERY_LIMIT,
    }
    assert topology.arguments("x.dlq") == {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_declaring_twice_changes_nothing(amqp_url: str, undeclared: Topology, queue_type: str) -> None:
    topology = replace(undeclared, queue_type=queue_type)

    assert await declare(amqp_url, topology) == [
        f"declared exchange {topology.exchange} (direct, durable)",
        *[f"declared queue {queue} ({queue_type}, durable)" for queue in topology.queues],
    ]
    assert await declare(amqp_url, topology) == [
        f"exchange {topology.exchange} already exists",
        *[f"queue {queue} already exists" for queue in topology.queues],
    ]
    await verify(amqp_url, topology)


async def test_declare_creates_only_missing_objects(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    await rabbit.publish(topology.dlq, b"kept")
    await rabbit.delete_queue(topology.queue)

    words = await declare(amqp_url, topology)

    assert [line for line in words if line.startswith("declared")] == [
        f"declared queue {topology.queue} (quorum, durable)"
    ]
    assert await depths(amqp_url, topology) == {**dict.fromkeys(topology.send_queues.values(), 0), topology.dlq: 1}


async def test_a_queue_with_different_arguments_is_refused_with_the_difference(
    amqp_url: str, topology: Topology, rabbit: Rabbit
) -> None:
    other = replace(topology, dlq=f"{topology.dlq}.2")

    for check in (declare, verify):
        with pytest.raises(TopologyError) as refusal:
            await check(amqp_url, replace(topology, queue_type="classic"))
        assert topology.dlq in refusal.value.message
        assert "x-queue-type is 'quorum', we need 'classic'" in refusal.value.message
        assert "DISPATCHER_DLQ" in (refusal.value.remedy or "")

    words = rf"dead-letter-routing-key is '{topology.dlq}', we need '{other.dlq}'.*DISPATCHER_QUEUE"
    with pytest.raises(TopologyError, match=words):
        await declare(amqp_url, other)
    await rabbit.delete_queue(other.dlq)


async def test_a_queue_without_dead_lettering_is_refused(amqp_url: str, undeclared: Topology, rabbit: Rabbit) -> None:
    await rabbit.declare_queue(undeclared.queue, **{"x-queue-type": "quorum"})

    with pytest.raises(TopologyError, match=f"queue {undeclared.queue}, with different arguments: x-.* is not set"):
        await declare(amqp_url, undeclared)


async def test_an_exchange_of_another_type_is_refused(amqp_url: str, undeclared: Topology) -> None:
    with pytest.raises(TopologyError, match=r"exchange amq\.fanout.*: type is 'fanout', we need 'direct'"):
        await declare(amqp_url, replace(undeclared, exchange="amq.fanout"))


async def test_a_missing_object_is_named_with_the_remedy(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    for missing in (topology.send_queues["bulk"], topology.dlq):
        await rabbit.delete_queue(missing)
        for check in (verify, depths):
            with pytest.raises(TopologyError, match=f'no queue "{missing}". Run `dispatcher init`'):
                await check(amqp_url, topology)
        await declare(amqp_url, topology)
    await rabbit.delete_queue(topology.dlq)

    await rabbit.delete_exchange(topology.exchange)
    with pytest.raises(TopologyError, match=f'no exchange "{topology.exchange}". Run `dispatcher init`'):
        await verify(amqp_url, topology)


async def test_verify_creates_nothing(amqp_url: str, undeclared: Topology) -> None:
    for _ in range(2):
        with pytest.raises(TopologyError, match="no exchange"):
            await verify(amqp_url, undeclared)


async def test_depths_count_ready_messages(amqp_url: str, topology: Topology, rabbit: Rabbit) -> None:
    for _ in range(3):
        await rabbit.publish(topology.queue, b"one")

    found = await depths(amqp_url, topology)
    assert found == {**dict.fromkeys(topology.queues, 0), topology.queue: 3}


async def test_a_user_who_may_not_configure_can_verify_but_not_declare(
    amqp_url: str, topology: Topology, operator: Operator
) -> None:
    user = topology.exchange
    own = r"test\..*"
    operator.set_permissions(user, "pässword", read=own, write=own)
    parts = urlsplit(amqp_url)
    url = urlunsplit(parts._replace(netloc=f"{user}:p%C3%A4ssword@{parts.netloc.rpartition('@')[2]}"))

    await verify(url, topology)
    with pytest.raises(TopologyError, match="does not allow this user to declare exchange"):
        await declare(url, topology)

    operator.delete_user(user)


def test_an_unknown_form_of_refusal_is_passed_on() -> None:
    assert difference("PRECONDITION_FAILED - something new") == "PRECONDITION_FAILED - something new"
