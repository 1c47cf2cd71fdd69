"""The guarantees of a worker's stages, tested with fakes instead of servers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest

from dispatcher.broker.consumer import Delivery
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.host.ledger import Ledger
from dispatcher.providers.contract import Attempt
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import TRANSITIONS, EmailEvent, EmailState, InFlightEmail, NotAllowed
from dispatcher.worker.record import LEAST_APART
from tests.worker.scripted import (
    ScriptedPrompt,
    ScriptedProvider,
    accept,
    accept_when_let_go,
    answer,
    leave_when_let_go,
)
from tests.worker.stage_bench import StageBench, run

LATER = Deferred(Reason.SERVER_ERROR, "later", "500")


def test_every_state_can_be_reached_and_left_and_undefined_transitions_are_refused() -> None:
    assert set(TRANSITIONS.values()) == set(EmailState)
    assert {before for before, _ in TRANSITIONS} == set(EmailState) - {EmailState.DONE}
    lease = Lease(UUID(int=1), None, 1, 1, None, None)
    message = Delivery(1, 1, b"", redelivered=False)
    email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)

    with pytest.raises(NotAllowed, match="SEND is not allowed while the email is PREPARING"):
        email.on(EmailEvent.SEND)

    assert email.state is EmailState.PREPARING


def test_commit_the_lease_then_write_the_slot_then_send_then_ack() -> None:
    seen: list[tuple[Status, int]] = []

    async def scenario(bench: StageBench) -> None:
        async def look(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
            attempt.mark_on_wire()
            seen.append((bench.store.rows[email.email_id].status, bench.slots_in_use))
            return provider.accept(email.email_id)

        bench.provider.always = look
        bench.deliver(*bench.enqueue())
        await bench.pass_time(1)

    bench = run(scenario)

    assert seen == [(Status.SENDING, 1)]
    assert [word for word, _ in bench.store.events] == ["lease", "record", "ack"]
    assert bench.pipeline.record.sent_count == 1


def test_a_deferral_is_acked_at_once_and_retried_under_the_same_lease() -> None:
    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].append(answer(LATER))
        bench.deliver(email_id)
        await bench.pass_time()

    bench = run(scenario)

    assert [word for word, _ in bench.store.events] == ["lease", "record", "ack", "record"]
    assert [row.token for row in bench.store.rows.values()] == [1]


@pytest.mark.parametrize("accepted", [LEAST_APART - 1, LEAST_APART])
def test_only_many_acceptances_are_recorded_apart_from_the_other_results_of_a_batch(accepted: int) -> None:
    async def scenario(bench: StageBench) -> None:
        deferred, *others = bench.enqueue(accepted + 1)
        bench.provider.script[deferred].append(answer(LATER))
        bench.deliver(*others, deferred)
        await bench.turns()

    bench = run(scenario, prefetch=4 * LEAST_APART)

    apart = [["accepted"] * accepted, ["deferred"]]
    assert bench.store.batches == (apart if accepted == LEAST_APART else [apart[0] + apart[1]])


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_result_whose_reply_is_lost_is_recorded_once(is_committed: bool) -> None:
    async def scenario(bench: StageBench) -> None:
        bench.store.lose["record"].append(is_committed)
        bench.store.lose["is_recorded"].append(False)
        bench.deliver(*bench.enqueue())
        await bench.pass_time()

    bench = run(scenario)

    assert [word for word, _ in bench.store.events] == ["lease", "record", "ack"]


def test_a_result_refused_while_in_doubt_waits_and_delays_no_other() -> None:
    async def scenario(bench: StageBench) -> None:
        refused, neighbour = bench.enqueue(2)
        bench.store.lose["record"].append(False)
        bench.deliver(refused)
        await bench.turns()
        bench.store.refused.add(refused)
        await bench.pass_time()
        assert bench.pipeline.window.emails[refused].state is EmailState.REFUSED
        bench.deliver(neighbour)
        await bench.pass_time()
        assert bench.store.rows[neighbour].status is Status.SENT
        bench.store.lose["record"].append(False)
        bench.store.refused.clear()
        await bench.pass_time()

    bench = run(scenario)

    assert set(bench.statuses()) == {Status.SENT}
    assert set(bench.provider.accepted.values()) == {1}


class VoidedMeanwhile(Ledger):
    """A ledger whose leases are all voided after a slot was written and before the worker checks the lease."""

    is_voided = False

    @property
    def voided_at(self) -> float:
        return float("inf") if self.is_voided and len(self._free) < self._slots else 0.0


def test_an_email_whose_lease_is_voided_after_its_slot_was_written_is_not_sent_and_its_slot_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VoidedMeanwhile, "is_voided", True)
    monkeypatch.setattr("tests.worker.stage_bench.Ledger", VoidedMeanwhile)

    async def scenario(bench: StageBench) -> None:
        bench.deliver(*bench.enqueue())
        await bench.pass_time(1)
        assert bench.slots_in_use == 0

    bench = run(scenario)

    assert bench.provider.accepted == {}
    assert [word for word, _ in bench.store.events] == ["lease", "release", "ack"]


def test_an_answer_of_an_adapter_that_ignored_the_stop_is_recorded() -> None:
    async def deaf(provider: ScriptedProvider, email: OutgoingEmail, _attempt: Attempt) -> Outcome:
        with suppress(asyncio.CancelledError):
            await provider.wait(email.email_id)
        return provider.accept(email.email_id)

    async def scenario(bench: StageBench) -> None:
        bench.provider.always = deaf
        bench.deliver(*bench.enqueue())
        await bench.turns()
        await bench.drain()

    bench = run(scenario)

    assert bench.statuses() == {Status.SENT: 1}


def test_a_drain_releases_unsent_and_waiting_emails_and_leases_no_more() -> None:
    async def scenario(bench: StageBench) -> None:
        inside, waits, late = bench.enqueue(3)
        bench.provider.script[inside].append(leave_when_let_go)
        bench.provider.script[waits].append(answer(replace(LATER, retry_after=60.0)))
        bench.deliver(inside, waits)
        await bench.pass_time(0.1)
        draining = asyncio.ensure_future(bench.drain())
        await asyncio.sleep(0)
        bench.deliver(late)
        await draining

    bench = run(scenario)

    assert [(row.status, row.attempts) for row in bench.store.rows.values()] == [
        (Status.PENDING, 0),
        (Status.PENDING, 1),
        (Status.PENDING, 0),
    ]
    assert bench.broker.settled == {1: "ack", 2: "ack"}
    assert bench.provider.accepted == {}


def test_a_drain_that_times_out_holds_emails_without_an_answer_and_ignores_late_answers() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        bench.deliver(*bench.enqueue())
        await bench.turns()
        await bench.drain()
        bench.provider.let_go()
        await bench.turns()

    bench = run(scenario)

    assert bench.statuses() == {Status.HELD: 1}
    assert len(bench.store.recorded) == 1


@pytest.mark.parametrize("outcome", [Accepted("id"), Rejected(Reason.INVALID_CONTENT, "no", "400")])
def test_attempts_without_a_task_give_back_the_slots_of_their_provider(outcome: Outcome) -> None:
    provider = ScriptedPrompt()

    async def scenario(bench: StageBench) -> None:
        for _ in range(2):
            bench.deliver(*bench.enqueue(bench.settings.prefetch))
            await bench.turns()
            for future in provider.begun[-bench.settings.prefetch :]:
                future.set_result(outcome)
            await bench.pass_time(1)

    bench = run(scenario, provider)

    assert len(provider.begun) == 2 * bench.settings.prefetch
    assert provider.calls == []


def test_an_attempt_that_cannot_begin_without_a_task_gives_back_its_slot() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.deliver(*bench.enqueue(bench.settings.prefetch))
        await bench.pass_time(1)

    bench = run(scenario, ScriptedPrompt(is_idle=False))

    assert bench.statuses() == {Status.SENT: bench.settings.prefetch}


def test_an_email_whose_lease_arrives_during_a_drain_is_released_and_not_sent() -> None:
    provider = ScriptedPrompt()

    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue())
        await asyncio.sleep(0)  # the lease statement was sent, and has no reply yet
        await bench.drain()

    bench = run(scenario, provider)

    assert [word for word, _ in bench.store.events] == ["lease", "release", "ack"]
    assert provider.begun == []


def test_a_drain_records_an_answer_that_arrived_just_before_it_began() -> None:
    provider = ScriptedPrompt()

    async def scenario(bench: StageBench) -> None:
        bench.deliver(*bench.enqueue())
        await bench.turns()
        provider.begun[0].set_result(Accepted("id"))
        await bench.drain()

    assert run(scenario, provider).statuses() == {Status.SENT: 1}


def test_no_more_emails_are_leased_than_the_window_has_room_for_and_waiting_emails_take_none() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        email_ids = bench.enqueue(bench.settings.prefetch + 8)
        for email_id in email_ids[:3]:
            bench.provider.script[email_id].append(answer(LATER))
        bench.deliver(*email_ids)
        await bench.turns()
        waiting = [email for email in bench.pipeline.window.emails.values() if email.state is EmailState.WAITING]
        assert len(waiting) == 3
        assert len(bench.provider.waiting) == bench.settings.prefetch
        assert bench.statuses() == {Status.SENDING: bench.settings.prefetch + 3, Status.PENDING: 5}

    run(scenario)


def test_a_second_message_of_an_in_flight_email_is_acked_and_leases_nothing() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        (email_id,) = bench.enqueue()
        bench.deliver(email_id, email_id)
        await bench.turns()
        assert bench.broker.settled == {2: "ack"}
        bench.provider.let_go()
        await bench.pass_time(1)

    bench = run(scenario)

    assert bench.broker.settled == {1: "ack", 2: "ack"}
    assert [word for word, _ in bench.store.events if word == "lease"] == ["lease"]


def test_a_message_that_points_to_an_unknown_email_is_rejected() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.deliver(UUID(int=5))
        bench.broker.open[99] = UUID(int=6)
        bench.pipeline.lease.take(Delivery(99, 1, b"garbage", redelivered=False))
        await bench.turns()

    assert run(scenario).broker.settled == {1: "reject", 99: "reject"}


def test_an_email_whose_lease_was_lost_before_sending_is_not_sent() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = leave_when_let_go
        (email_id,) = bench.enqueue()
        bench.deliver(email_id)
        await bench.turns()
        row = bench.store.rows[email_id]
        row.status, row.ours, row.token = Status.HELD, False, 7
        bench.pipeline.window.emails[email_id].confirmed_at = 0.0
        await bench.pass_time()
        assert not bench.provider.waiting
        assert not bench.pipeline.window.emails

    bench = run(scenario)

    assert bench.provider.accepted == {}
    assert bench.statuses() == {Status.HELD: 1}


def test_a_large_email_waits_for_memory_and_is_then_sent() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        octets = bench.settings.worker_memory_mb * 600_000
        first, second = bench.enqueue(2, octets_apart=octets)
        bench.deliver(first, second)
        await bench.turns()
        assert bench.pipeline.window.emails[second].state is EmailState.WAITING
        bench.provider.always = accept
        bench.provider.let_go()
        await bench.pass_time(1)

    assert run(scenario, worker_memory_mb=64).statuses() == {Status.SENT: 2}


@pytest.mark.parametrize(("large_octets", "at_once"), [(1_900_000, 2), (2_200_000, 1)])
def test_large_content_leaves_a_quarter_of_the_memory_to_light_content(large_octets: int, at_once: int) -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        # The provider needs six times the size of the content, and 24 of the 32 megabytes are for large content.
        for octets in (large_octets, 1000):
            bench.deliver(*bench.enqueue(2, octets_apart=octets))
        await bench.turns()
        assert len(bench.provider.waiting) == at_once + 2

    run(scenario, worker_memory_mb=32)
