"""`dispatcher init`: what the command creates, what it does not change, and how it fails."""

from __future__ import annotations

import pytest

from dispatcher.broker.topology import Topology
from tests.cli.commandline import CommandLine


@pytest.fixture
def prepared(prepared: CommandLine) -> CommandLine:
    return prepared.without_process


@pytest.fixture
def unprepared(unprepared: CommandLine) -> CommandLine:
    return unprepared.without_process


AWAY = "127.0.0.1:1"


def test_init_lists_its_changes_and_a_second_run_changes_nothing(
    unprepared: CommandLine, topology_names: Topology
) -> None:
    first, second = unprepared("init"), unprepared("init")

    assert (first.code, second.code) == (0, 0)
    lines = first.stdout.splitlines()
    assert "postgresql: applied migration 0001 baseline" in lines
    for name in topology_names.queues:
        assert f"rabbitmq: declared queue {name} (quorum, durable)" in lines
    assert second.stdout == "nothing to create: the tables are up to date, and the queues exist and are bound\n"
    assert first.stderr + second.stderr == ""


def test_json_lists_changes_by_server(unprepared: CommandLine) -> None:
    first, second = unprepared("init", "--json"), unprepared("init", "--json")

    assert len(first.json["changes"]["rabbitmq"]) == 5  # the exchange, three send queues, the DLQ
    assert second.json == {"changes": {"postgresql": [], "rabbitmq": []}, "plan": [], "faults": {}}


def test_queue_with_other_arguments_is_named_with_the_difference(prepared: CommandLine, topology: Topology) -> None:
    ended = prepared.having(DISPATCHER_QUEUE_TYPE="classic")("init")

    assert ended.code == 3
    assert topology.dlq in ended.stderr
    assert "x-queue-type is 'quorum', we need 'classic'" in ended.stderr


def test_one_unreachable_server_does_not_stop_the_preparation_of_the_other(unprepared: CommandLine) -> None:
    without_broker = unprepared.having(DISPATCHER_AMQP_URL=f"amqp://u:p@{AWAY}/")("init")
    afterwards = unprepared("init")

    assert without_broker.code == 3
    assert "postgresql: applied migration 0001 baseline" in without_broker.stdout
    assert without_broker.stderr.startswith("rabbitmq: RabbitMQ at 127.0.0.1:1 cannot be reached")
    assert "postgresql" not in afterwards.stdout


def test_two_unreachable_servers_are_both_named(unprepared: CommandLine) -> None:
    away = unprepared.having(
        DISPATCHER_DATABASE_URL=f"postgresql://u:p@{AWAY}/x", DISPATCHER_AMQP_URL=f"amqp://u:p@{AWAY}/"
    )

    ended = away("init")

    assert (ended.code, ended.stdout) == (1, "")
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["postgresql", "rabbitmq"]


def test_an_invalid_amqp_url_is_a_configuration_error(unprepared: CommandLine) -> None:
    ended = unprepared.having(DISPATCHER_AMQP_URL="amqp://u:p@mq/%2F?heartbeat=blue")("init")

    assert ended.code == 78
    assert ended.stderr.startswith("DISPATCHER_AMQP_URL")
