"""Kills at every step of the protocol, a few at each; a thousand where there is time."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.acceptance.harness import Host
from tests.steps.aims import WORKER_STEPS, Step
from tests.steps.proof import prove, table


def test_deaths_at_every_step_of_a_worker_and_some_of_the_relay_lose_and_repeat_nothing(host: Host) -> None:
    proof = prove(host, kills=24, seed=1)

    assert {kill.step for kill in proof.kills} >= set(WORKER_STEPS)
    assert len(proof.kills) == 24
    proof.assert_balanced()


@pytest.mark.slow
def test_a_thousand_deaths_lose_and_repeat_nothing(host: Host) -> None:
    proof = prove(host, kills=1000, seed=1000)

    Console().print(table(proof))
    assert set(Step) == {kill.step for kill in proof.kills}
    assert len(proof.kills) == 1000
    proof.assert_balanced()
