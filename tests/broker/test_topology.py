"""What `init` creates and prints, which faults prevent `run` from starting, and what each user may do."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from urllib.parse import quote, urlsplit, urlunsplit

import pytest

from dispatcher.broker.connection import open_connection
from dispatcher.broker.faults import ACCESS_REFUSED, ChannelClosed
from dispatcher.broker.inspection import find_faults
from dispatcher.broker.management import Management
from dispatcher.broker.topology import DELIVERY_LIMIT, Topology, declare, depths, users_of, verify
from dispatcher.config import load
from dispatcher.dev.servers import Servers
from dispatcher.errors import TopologyError
from tests.broker.rabbit import Operator, Rabbit
from tests.waiting import DEADLINE_SECONDS


def test_all_names_come_from_the_settings_and_each_lane_has_a_send_queue_that_dead_letters_to_the_one_dlq() -> None:
    given = {"QUEUE": "q", "DLQ": "dlq", "LANES": "otp, normal", "QUEUE_TYPE": "classic"}
    topology = Topology.of(load({f"DISPATCHER_{name}": value for name, value in given.items()}))

    assert topology == Topology("email.dispatcher", "q", "dlq", "classic", lanes=("otp", "normal"))
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
async def test_declaring_twice_changes_nothing_and_what_was_declared_has_no_fault(
    amqp_url: str, management: Management, undeclared: Topology, queue_type: str
) -> None:
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
    assert await find_faults(management, topology) == []


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


async def test_other_arguments_and_an_exchange_of_another_type_are_refused(
    amqp_url: str, undeclared: Topology, rabbit: Rabbit
) -> None:
    with pytest.raises(TopologyError, match=r"exchange amq\.fanout.*: type is 'fanout', we need 'direct'"):
        await declare(amqp_url, replace(undeclared, exchange="amq.fanout"))

    await rabbit.delete_queue(undeclared.queue)
    await rabbit.declare_queue(undeclared.queue, **{"x-queue-type": "quorum"})
    with pytest.raises(TopologyError, match=f"queue {undeclared.queue}, with different arguments: x-.* is not set"):
        await declare(amqp_url, undeclared)


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


# Each recommended RabbitMQ user has exactly the permissions for its work.
PASSWORD = "only-für-this-test"
Act = Callable[[Rabbit, Topology], Awaitable[object]]
ACTS: dict[str, Act] = {
    "publish": lambda rabbit, ours: rabbit.publish(ours.queue, b"{}", exchange=ours.exchange),
    "publish to the DLQ": lambda rabbit, ours: rabbit.publish(ours.dlq, b"{}", exchange=ours.exchange),
    "publish without an exchange": lambda rabbit, ours: rabbit.publish(ours.dlq, b"{}"),
    "publish to another exchange": lambda rabbit, ours: rabbit.publish(ours.dlq, b"{}", exchange="amq.direct"),
    "take": lambda rabbit, ours: rabbit.take(ours.queue),
    "take from the DLQ": lambda rabbit, ours: rabbit.take(ours.dlq),
    "bind": lambda rabbit, ours: rabbit.bind_queue(ours.queue, ours.exchange),
    "bind the DLQ": lambda rabbit, ours: rabbit.bind_queue(ours.dlq, ours.exchange),
    "bind to another exchange": lambda rabbit, ours: rabbit.bind_queue(ours.queue, "amq.direct"),
    "declare a longer name": lambda rabbit, ours: rabbit.declare_queue(f"{ours.dlq}.x"),
    "declare a name that ends in ours": lambda rabbit, ours: rabbit.declare_queue(f"x.{ours.dlq}"),
    "declare a similar name": lambda rabbit, ours: rabbit.declare_queue(ours.dlq.replace(".", "-")),
    "delete another queue": lambda rabbit, ours: rabbit.delete_queue(f"{ours.dlq}.x"),
    "delete": lambda rabbit, ours: rabbit.delete_queue(ours.send_queues["bulk"]),
}
PRODUCES = {"publish", "publish to the DLQ"}
WORKS = PRODUCES | {"take", "take from the DLQ", "bind", "bind the DLQ"}
ALLOWED = {"producer": PRODUCES, "worker": WORKS, "probe": set(), "operator": WORKS | {"delete"}}
"""The acts that each role may do; the operator, who deletes a queue, is the last."""


class Account:
    """A user with the permissions of one role, on the real RabbitMQ."""

    def __init__(self, servers: Servers, operator: Operator, topology: Topology, role: str) -> None:
        (user,) = [user for user in users_of(topology) if user.role == role]
        self.name = f"test-{role}-{secrets.token_hex(4)}"
        permissions = {"configure": user.configure, "write": user.write, "read": user.read}
        operator.set_permissions(self.name, PASSWORD, tags=user.tags, **permissions)
        self.amqp_url = self._as_user(servers.amqp_url)
        self.management_url = self._as_user(servers.management_url)

    def _as_user(self, url: str) -> str:
        parts = urlsplit(url)
        return urlunsplit(parts._replace(netloc=f"{self.name}:{quote(PASSWORD)}@{parts.netloc.rpartition('@')[2]}"))

    def http_status(self, method: str, path: str, fields: object = None) -> int:
        return Operator(self.management_url).request(method, path, fields)[0]


@pytest.fixture
def accounts(servers: Servers, operator: Operator, topology_names: Topology) -> Iterator[dict[str, Account]]:
    made = {user.role: Account(servers, operator, topology_names, user.role) for user in users_of(topology_names)}
    yield made
    for account in made.values():
        assert operator.request("DELETE", f"/api/users/{account.name}")[0] < 300


async def test_each_user_may_do_its_work_and_nothing_else(accounts: dict[str, Account], undeclared: Topology) -> None:
    await declare(accounts["operator"].amqp_url, undeclared)
    for role, allowed in ALLOWED.items():
        account, done = accounts[role], set()
        if role != "operator":
            with pytest.raises(TopologyError, match="does not allow this user to declare exchange"):
                await declare(account.amqp_url, undeclared)
        await verify(account.amqp_url, undeclared)  # which needs no permission
        async with await open_connection(account.amqp_url, name="test") as connection:
            rabbit = Rabbit(connection)
            for name, act in ACTS.items():
                try:
                    await act(rabbit, undeclared)
                    done.add(name)
                except ChannelClosed as fault:
                    if fault.code != ACCESS_REFUSED:
                        raise

        assert (role, done) == (role, allowed)


async def test_only_a_probe_may_read_reports_and_it_may_change_nothing(
    accounts: dict[str, Account], topology: Topology
) -> None:
    probe = accounts["probe"]
    management = Management(probe.management_url, timeout_seconds=DEADLINE_SECONDS)
    assert await management.version()
    assert await find_faults(management, topology) == []
    assert await management.queue(topology.dlq) is not None

    dlq = f"/api/queues/%2F/{quote(topology.dlq, safe='')}"
    taking = {"count": 1, "ackmode": "ack_requeue_false", "encoding": "auto"}
    assert probe.http_status("DELETE", dlq) in (401, 403)
    assert probe.http_status("DELETE", f"{dlq}/contents") in (400, 401, 403)
    assert probe.http_status("POST", f"{dlq}/get", taking) in (400, 401, 403)
    assert probe.http_status("PUT", "/api/users/x", {"password": "x", "tags": ""}) in (401, 403)
    assert {accounts[role].http_status("GET", "/api/queues") for role in ("producer", "worker", "operator")} == {401}
