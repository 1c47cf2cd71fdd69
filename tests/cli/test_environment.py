"""Variables that carry our prefix and that nobody reads."""

from __future__ import annotations

import pytest

from dispatcher.cli.environment import unknown_variables
from tests.cli.commandline import CommandLine


@pytest.mark.parametrize(
    ("variable", "closest"),
    [
        ("DISPATCHER_WORKER", "DISPATCHER_WORKERS"),
        ("DISPATCHER_AMPQ_URL", "DISPATCHER_AMQP_URL"),
        ("DISPATCHER_PROVIDER", "DISPATCHER_PROVIDERS"),
        ("DISPATCHER_WORKERS_FILE", "DISPATCHER_WORKERS"),
        ("DISPATCHER_QQQQQQQ", None),
    ],
)
def test_unknown_variable_is_found_with_the_closest_known_name(variable: str, closest: str | None) -> None:
    assert unknown_variables({variable: "1", "PATH": "/bin"}) == {variable: closest}


@pytest.mark.parametrize(
    "variable", ["DISPATCHER_WORKERS", "DISPATCHER_SMTP_URL_FILE", "DISPATCHER_CACHE_DIR", "DISPATCHER_DEV_DIR"]
)
def test_known_variable_is_not_warned_about(variable: str) -> None:
    assert unknown_variables({variable: "1"}) == {}


def test_commands_warn_and_go_on(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_WORKRS="4")("status", "--json")

    assert ended.code == 0
    assert ended.stderr == "warning: DISPATCHER_WORKRS is no setting; did you mean DISPATCHER_WORKERS?\n"
