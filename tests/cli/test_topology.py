"""`dispatcher topology users`: the printed commands, quoted for a shell."""

from __future__ import annotations

import re
import shlex

from tests.cli.commandline import CommandLine


def _commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line and not line.startswith("#")]


def test_users_are_printed_as_commands_and_no_server_is_needed(bare: CommandLine) -> None:
    ended = bare("topology", "users")

    assert (ended.code, ended.stderr) == (0, "")
    exchange, everything = (
        r"^email\.dispatcher$",
        "^({0}|{0}\\.send\\.urgent|{0}\\.send|{0}\\.send\\.bulk|{0}\\.dlq)$".format(r"email\.dispatcher"),
    )
    granting = ["rabbitmqctl", "set_permissions", "-p", "/"]
    assert _commands(ended.stdout) == [
        ["rabbitmqctl", "add_user", "dispatcher_producer"],
        [*granting, "dispatcher_producer", "^$", exchange, "^$"],
        ["rabbitmqctl", "add_user", "dispatcher_worker"],
        [*granting, "dispatcher_worker", "^$", everything, everything],
        ["rabbitmqctl", "add_user", "dispatcher_operator"],
        [*granting, "dispatcher_operator", everything, everything, everything],
        ["rabbitmqctl", "add_user", "dispatcher_probe"],
        [*granting, "dispatcher_probe", "^$", "^$", "^$"],
        ["rabbitmqctl", "set_user_tags", "dispatcher_probe", "monitoring"],
    ]


def test_names_are_quoted_for_the_shell_and_escaped_for_regular_expressions(bare: CommandLine) -> None:
    odd = "shop's $(mail) | .*"
    named = bare.having(DISPATCHER_QUEUE=odd, DISPATCHER_AMQP_URL="amqp://app:mq-secret@mq.example:5672/shop%20mail")

    ended = named("topology", "users", "--prefix", "shop_")
    listed = named("topology", "users", "--json").json

    (worker,) = [words for words in _commands(ended.stdout) if words[1:5:3] == ["set_permissions", "shop_worker"]]
    assert worker[3] == listed["vhost"] == "shop mail"
    assert re.fullmatch(worker[-1], odd)
    assert not re.fullmatch(worker[-1], "shop's $(mail) | xx")
    assert "mq-secret" not in ended.stdout + ended.stderr
    assert [user["name"] for user in listed["users"]][1] == "dispatcher_worker"
