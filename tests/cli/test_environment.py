"""Tests the warnings for variables that have our prefix but are not settings."""

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
def test_the_warning_for_an_unknown_variable_suggests_a_similar_setting(variable: str, closest: str | None) -> None:
    assert unknown_variables({variable: "1", "PATH": "/bin"}) == {variable: closest}


@pytest.mark.parametrize(
    "variable", ["DISPATCHER_WORKERS", "DISPATCHER_SMTP_URL_FILE", "DISPATCHER_CACHE_DIR", "DISPATCHER_DEV_DIR"]
)
def test_a_known_variable_gives_no_warning(variable: str) -> None:
    assert unknown_variables({variable: "1"}) == {}


def test_a_command_warns_of_an_unknown_variable_and_goes_on(settled: CommandLine) -> None:
    ended = settled.having(DISPATCHER_WORKRS="4")("status", "--json")

    assert ended.code == 0
    assert ended.stderr == "warning: DISPATCHER_WORKRS is not a setting; did you mean DISPATCHER_WORKERS?\n"
