"""Kills and freezes at every step of the protocol lose and duplicate no email: few by default, many in slow tests."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from tests.acceptance.harness import Host, emails, stop
from tests.steps.frozen import freeze
from tests.steps.kill_points import WORKER_STEPS, Step
from tests.steps.proof import prove, table


def test_kills_at_every_step_of_a_worker_and_some_of_the_relay_lose_and_duplicate_nothing(host: Host) -> None:
    proof = prove(host, kills=24, seed=1)

    assert {kill.step for kill in proof.kills} >= set(WORKER_STEPS)
    assert len(proof.kills) == 24
    proof.assert_balanced()


@pytest.mark.slow
def test_workers_frozen_past_their_leases_at_every_step_lose_and_duplicate_nothing(host: Host) -> None:
    proof = freeze(host, freezes=14, seed=1)

    assert {kill.step for kill in proof.kills} >= {*WORKER_STEPS, Step.IN_RELEASE}
    proof.assert_harmless()


def test_an_email_that_kills_its_worker_while_rendered_fails_and_stops_no_other(host: Host) -> None:
    poison, *_ = host.enqueue(emails(1, name="poison"))
    (host.folder / "poison").write_text(str(poison))
    host.sink()
    argv = [sys.executable, "-m", "tests.steps.poison", str(host.folder / "poison")]

    # The worker has one connection, so no other email is on the wire when the worker dies.
    run = host.program(argv, "run", env=host.environment(METRICS_ADDRESS="off", SMTP_CONNECTIONS=1))
    ids = host.enqueue(emails(200))

    books = host.await_finished(ids | {poison})
    stop(run)
    books.assert_balanced()
    assert books.counts == {"sent": 200, "failed": 1}
    assert host.rows()[poison].error_type == "worker_crashed"
    assert len(run.events("process.exited", exit_status="signal SIGKILL")) == 3
    assert [event["crashes"] for event in run.events("email.recovered", reason="worker_crashed")] == [1, 2, 3]


@pytest.mark.slow
def test_two_hundred_freezes_lose_and_duplicate_nothing(host: Host) -> None:
    freeze(host, freezes=200, seed=200).assert_harmless()


@pytest.mark.slow
def test_a_thousand_kills_lose_and_duplicate_nothing(host: Host) -> None:
    proof = prove(host, kills=1000, seed=1000)

    Console().print(table(proof))
    assert {kill.step for kill in proof.kills} == set(Step) - {Step.IN_RELEASE}
    assert len(proof.kills) == 1000
    proof.assert_balanced()
