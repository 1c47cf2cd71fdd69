"""Kills and freezes at every step of the protocol, also between two transactions of an email, lose and duplicate no
email: few by default, many in slow tests."""

from __future__ import annotations

from functools import partial

import psycopg
import pytest

from tests.acceptance.harness import Host, emails, stop
from tests.steps.kill_points import WORKER_STEPS, KillPlan, Step
from tests.steps.proof import SETTINGS, freeze, prove, start
from tests.supervisor.program import eventually

KILLS = 14
RECIPIENTS = [f"{name}@example.org" for name in ("ann", "bob", "cem")]


def test_kills_at_every_step_of_a_worker_and_some_of_the_relay_lose_and_duplicate_nothing(host: Host) -> None:
    proof = prove(host, kills=20, seed=1)

    assert {kill.step for kill in proof.kills} >= set(WORKER_STEPS)
    assert len(proof.kills) == 20


def test_kills_between_the_transactions_of_an_email_send_no_duplicate_and_leave_no_recipient_out(host: Host) -> None:
    sink = host.sink("--recipients-per-transaction", "1")
    kill_plan = KillPlan(host.folder, seed=3)
    kill_plan.allow(KILLS, 0)
    run = start(host, kill_plan, **SETTINGS)
    to_all = partial(emails, to=lambda _: RECIPIENTS)
    ids = host.enqueue(to_all(60, name="first"))

    def all_are_killed() -> bool:
        if host.count_unfinished() < 30:
            ids.update(host.enqueue(to_all(30, name=f"more-{len(ids)}")))
        return len(kill_plan.kills()) >= KILLS

    eventually(all_are_killed, "the kills", seconds=120)
    eventually(lambda: host.count_unfinished() == 0, "the end of all emails", seconds=60)
    stop(run)

    assert {kill.step for kill in kill_plan.kills()} >= set(WORKER_STEPS)
    in_doubt = frozenset[object]().union(*(kill.on_the_wire for kill in kill_plan.kills()))
    with psycopg.connect(host.database_url) as connection:
        rows = connection.execute("select email_id, status, recipient_outcomes from dispatcher.email_log").fetchall()
    assert {row[0] for row in rows} == ids
    deliveries = sink.deliveries()
    for email_id, status, outcomes in rows:
        arrived = {address: deliveries[email_id, address] for address in RECIPIENTS if deliveries[email_id, address]}
        assert set(arrived.values()) <= {1}, (email_id, status, arrived)
        known = {RECIPIENTS[int(position) - 1] for position in outcomes or {}}
        assert known <= arrived.keys(), (email_id, status, arrived, outcomes)
        if status == "sent":
            assert arrived.keys() == set(RECIPIENTS), (email_id, arrived)
        else:
            assert (status, email_id in in_doubt) == ("held", True)
            assert len(arrived) - len(known) in (0, 1)


@pytest.mark.slow  # each freeze outlasts a lease
def test_two_hundred_freezes_past_the_leases_at_every_step_lose_and_duplicate_nothing(host: Host) -> None:
    proof = freeze(host, freezes=200, seed=200)

    assert {kill.step for kill in proof.kills} >= {*WORKER_STEPS, Step.IN_RELEASE}


@pytest.mark.slow  # a thousand kills and restarts
def test_a_thousand_kills_lose_and_duplicate_nothing(host: Host) -> None:
    proof = prove(host, kills=1000, seed=1000)

    assert {kill.step for kill in proof.kills} == set(Step) - {Step.IN_RELEASE}
    assert len(proof.kills) == 1000
