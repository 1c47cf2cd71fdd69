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
from dispatcher.errors import AnswerTooLarge, ProviderFault
from dispatcher.host.clock import steady_clock
from dispatcher.host.ledger import Ledger
from dispatcher.host.ledger_format import read_suspects
from dispatcher.host.ledger_reader import living_ledger
from dispatcher.providers.contract import Attempt, NoFreeConnection
from dispatcher.routing.breaker import FAILURES_IN_A_ROW
from dispatcher.store.leases import Lease
from dispatcher.worker.in_flight_email import TRANSITIONS, EmailEvent, EmailState, InFlightEmail, NotAllowed
from dispatcher.worker.record import LEAST_APART
from tests.worker.scripted import (
    Act,
    ScriptedPrompt,
    ScriptedProvider,
    accept,
    accept_when_let_go,
    answer,
    fail,
    leave_when_let_go,
    throttle_when_let_go,
)
from tests.worker.stage_bench import LONG_SECONDS, FakeStore, StageBench, run

LATER = Deferred(Reason.SERVER_ERROR, "later", "500")
THROTTLED = Deferred(Reason.THROTTLED, "slow down", "429", 600.0)


def test_every_state_can_be_reached_and_left_and_undefined_transitions_are_refused() -> None:
    assert set(TRANSITIONS.values()) == set(EmailState)
    assert {before for before, _ in TRANSITIONS} == set(EmailState) - {EmailState.DONE}
    lease = Lease(UUID(int=1), None, 1, 1, None, None)
    message = Delivery(1, 1, b"", redelivered=False)
    email = InFlightEmail(lease, message, OnUncertain.HOLD, confirmed_at=0.0, leased_until=0.0)

    with pytest.raises(NotAllowed, match="SEND is not allowed while the email is PREPARING"):
        email.on(EmailEvent.SEND)

    assert email.state is EmailState.PREPARING


def test_commit_the_lease_then_write_one_slot_then_send_then_ack() -> None:
    seen: list[tuple[Status, int]] = []

    async def scenario(bench: StageBench) -> None:
        async def look(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
            attempt.mark_on_wire()
            attempt.mark_on_wire()
            seen.append((bench.store.rows[email.email_id].status, bench.slots_in_use))
            return provider.accept(email.email_id)

        bench.provider.always = look
        bench.deliver(*bench.enqueue())
        await bench.pass_time(1)
        assert bench.slots_in_use == 0
        assert (living := living_ledger(bench.ledger.path)) is not None
        assert living.database_id == await bench.store.find_database_id()

    bench = run(scenario)

    assert seen == [(Status.SENDING, 1)]
    assert bench.words == ["lease", "record", "ack"]
    assert bench.pipeline.record.sent_count == 1


def test_an_email_is_a_suspect_only_while_it_is_rendered() -> None:
    seen: list[list[UUID]] = []

    async def scenario(bench: StageBench) -> None:
        def look() -> None:
            seen.append([suspect.email_id for suspect in read_suspects(bench.ledger.path.read_bytes())])

        async def render(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
            with attempt.rendering:
                look()
            look()
            return await accept(provider, email, attempt)

        bench.provider.always = render
        bench.deliver(*bench.enqueue())
        await bench.pass_time(1)

    assert [list(run(scenario).store.rows), []] == seen


def test_a_deferral_is_acked_at_once_and_retried_under_the_same_lease() -> None:
    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].append(answer(LATER))
        bench.deliver(email_id)
        await bench.pass_time()

    bench = run(scenario)

    assert bench.words == ["lease", "record", "ack", "record"]
    assert [row.token for row in bench.store.rows.values()] == [1]


def test_a_deferral_extends_the_lease_over_the_wait_before_the_retry() -> None:
    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].append(answer(Deferred(Reason.REFUSED, retry_after=500.0)))
        bench.deliver(email_id)
        await bench.pass_time(1)
        email = bench.pipeline.window.emails[email_id]
        assert email.state is EmailState.WAITING
        assert isinstance(email.work, asyncio.TimerHandle)
        # An outage of PostgreSQL during the whole wait loses no lease, and the worker knows this.
        lease_left = bench.store.lease_ends[email_id] - email.work.when()
        assert lease_left == pytest.approx(bench.settings.lease_seconds, abs=1)
        assert email.leased_until - steady_clock() > 500 + bench.settings.lease_seconds - 1

    run(scenario, retry_cap_seconds=600.0, lease_seconds=60.0)


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

    assert run(scenario).words == ["lease", "record", "ack"]


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
        assert (bench.store.rows[neighbour].status, bench.slots_in_use) == (Status.SENT, 1)
        bench.store.lose["record"].append(False)
        bench.store.refused.clear()
        await bench.pass_time()
        assert bench.slots_in_use == 0

    bench = run(scenario)

    assert set(bench.statuses()) == {Status.SENT}
    assert set(bench.provider.accepted.values()) == {1}
    assert bench.broker.settled == {1: "ack", 2: "ack"}


def test_an_email_whose_row_is_locked_while_on_the_wire_delays_no_other_and_is_recorded_when_it_is_free() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        locked, other = bench.enqueue(2)
        bench.deliver(locked, other)
        await bench.turns()
        bench.store.locked_ids.add(locked)
        bench.provider.let_go()
        await bench.pass_time()
        assert [bench.store.rows[each].status for each in (locked, other)] == [Status.SENDING, Status.SENT]
        assert (bench.slots_in_use, bench.broker.settled) == (1, {2: "ack"})
        bench.store.locked_ids.clear()
        await bench.pass_time()

    bench = run(scenario)

    assert (bench.statuses(), bench.broker.settled) == ({Status.SENT: 2}, {1: "ack", 2: "ack"})


class VoidedMeanwhile(Ledger):
    """A ledger whose leases are all voided after a slot was written and before the worker checks the lease."""

    is_voided = False

    @property
    def voided_at(self) -> float:
        return float("inf") if self.is_voided and len(self._free) < self._slots else 0.0


def test_an_email_whose_lease_is_voided_after_its_slot_was_written_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VoidedMeanwhile, "is_voided", True)
    monkeypatch.setattr("tests.worker.stage_bench.Ledger", VoidedMeanwhile)

    async def scenario(bench: StageBench) -> None:
        bench.deliver(*bench.enqueue())
        await bench.pass_time(1)
        assert bench.slots_in_use == 0

    bench = run(scenario)

    assert bench.provider.accepted == {}
    assert bench.words == ["lease", "release", "ack"]


@pytest.mark.parametrize("leaves", [False, True])
def test_an_adapter_that_ignored_the_stop_sends_nothing_afterwards_but_its_answer_is_recorded(leaves: bool) -> None:
    async def deaf(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        with suppress(asyncio.CancelledError):
            await provider.wait(email.email_id)
        if leaves:
            attempt.mark_on_wire()
        return provider.accept(email.email_id)

    async def scenario(bench: StageBench) -> None:
        bench.provider.always = deaf
        bench.deliver(*bench.enqueue())
        await bench.turns()
        await bench.drain()

    bench = run(scenario)

    assert bench.statuses() == ({Status.PENDING: 1} if leaves else {Status.SENT: 1})
    assert len(bench.provider.accepted) == (not leaves)


def test_a_drain_releases_unsent_and_waiting_emails_and_leases_no_more() -> None:
    async def scenario(bench: StageBench) -> None:
        inside, waits, late = bench.enqueue(3)
        bench.provider.script[inside].append(leave_when_let_go)
        bench.provider.script[waits].append(answer(Deferred(Reason.REFUSED, retry_after=50.0)))
        bench.deliver(inside, waits)
        await bench.pass_time(0.1)
        draining = asyncio.ensure_future(bench.drain())
        await asyncio.sleep(0)
        bench.deliver(late)
        await draining
        # The email is due when its wait would have ended, so a restart makes no attempt earlier.
        assert bench.store.delays == {inside: 0.0, waits: pytest.approx(50.0, abs=1)}

    bench = run(scenario, retry_cap_seconds=60.0)

    rows = [(row.status, row.attempts) for row in bench.store.rows.values()]
    assert rows == [(Status.PENDING, 0), (Status.PENDING, 1), (Status.PENDING, 0)]
    assert bench.broker.settled == {1: "ack", 2: "ack"}
    assert bench.provider.accepted == {}


@pytest.mark.parametrize("has_task", [True, False])
def test_a_drain_that_times_out_holds_emails_without_an_answer_and_ignores_late_answers(has_task: bool) -> None:
    provider = ScriptedPrompt(is_idle=not has_task)
    provider.always = accept_when_let_go

    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue())
        await bench.turns()
        await bench.drain()
        provider.let_go()
        for outcome in provider.begun:
            outcome.set_result(Accepted("id"))
        await bench.turns()

    bench = run(scenario, provider)

    assert bench.statuses() == {Status.HELD: 1}
    assert len(bench.store.recorded) == 1


@pytest.mark.parametrize("act", [accept_when_let_go, throttle_when_let_go])
def test_a_drain_waits_for_its_results_and_tries_no_other_provider_after_a_late_refusal(act: Act) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = act

    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.deliver(email_id)
        await bench.turns()
        bench.store.locked_ids.add(email_id)
        draining = asyncio.ensure_future(bench.drain())
        if act is throttle_when_let_go:
            await bench.pass_time()  # the drain has timed out, and cannot record `held` yet
        first.let_go()
        await bench.pass_time()
        assert (draining.done(), bench.slots_in_use) == (False, 1)
        bench.store.locked_ids.clear()
        await draining

    bench = run(scenario, first, second)

    assert bench.statuses() == {Status.SENT if act is accept_when_let_go else Status.HELD: 1}
    assert (second.calls, bench.broker.settled) == ([], {1: "ack"})


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


class FailingPrompt(ScriptedProvider):
    def __init__(self, *, is_marked: bool) -> None:
        super().__init__()
        self._is_marked = is_marked

    def begin(self, _: OutgoingEmail, attempt: Attempt) -> asyncio.Future[Outcome] | None:
        if self._is_marked:
            attempt.mark_on_wire()
        raise OSError


@pytest.mark.parametrize("is_marked", [True, False])
def test_an_error_after_the_slot_was_written_holds_the_email_and_before_leaves_it_to_a_task(is_marked: bool) -> None:
    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue())
        await bench.pass_time()

    bench = run(scenario, FailingPrompt(is_marked=is_marked))

    assert bench.statuses() == {Status.HELD if is_marked else Status.SENT: 1}
    assert (len(bench.provider.calls), bench.words) == (not is_marked, ["lease", "record", "ack"])


def test_an_email_whose_lease_arrives_during_a_drain_is_released_and_not_sent() -> None:
    provider = ScriptedPrompt()

    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue())
        await asyncio.sleep(0)  # the lease statement was sent, and has no reply yet
        await bench.drain()

    bench = run(scenario, provider)

    assert bench.words == ["lease", "release", "ack"]
    assert provider.begun == []


def test_a_drain_records_an_answer_that_arrived_just_before_it_began() -> None:
    provider = ScriptedPrompt()

    async def scenario(bench: StageBench) -> None:
        bench.deliver(*bench.enqueue())
        await bench.turns()
        provider.begun[0].set_result(Accepted("id"))
        await bench.drain()

    assert run(scenario, provider).statuses() == {Status.SENT: 1}


def test_an_email_stopped_before_the_first_step_of_its_task_is_released() -> None:
    provider = ScriptedPrompt(leaves=False)

    class LosesLeases(FakeStore):
        async def renew(self, leases: dict[UUID, int], lease_seconds: float) -> set[UUID]:  # noqa: ARG002
            for outcome in provider.begun:
                outcome.set_result(Deferred(Reason.REFUSED))
            await asyncio.sleep(0)  # one loop iteration, after which each answer has a task
            return set()

    async def scenario(bench: StageBench) -> None:
        bench.store.__class__ = LosesLeases
        bench.deliver(*bench.enqueue(3))
        await bench.turns()
        for email in bench.pipeline.window.emails.values():
            email.confirmed_at = 0.0
        await bench.pass_time()

    bench = run(scenario, provider)

    assert bench.words == ["lease"] * 3 + ["release"] * 3 + ["ack"] * 3
    assert {row.attempts for row in bench.store.rows.values()} == {0}


@pytest.mark.parametrize("act", [accept_when_let_go, answer(LATER)], ids=["on the wire", "waits for a retry"])
def test_a_second_message_of_an_in_flight_email_is_acked_and_hastens_nothing(act: Act) -> None:
    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].append(act)
        bench.deliver(email_id)
        await bench.turns()
        bench.deliver(email_id, email_id)
        await bench.turns()
        assert (bench.broker.settled[2], bench.broker.settled[3], len(bench.provider.calls)) == ("ack", "ack", 1)
        bench.provider.let_go()
        await bench.pass_time()

    bench = run(scenario)

    assert (bench.words.count("lease"), set(bench.broker.settled.values())) == (1, {"ack"})
    assert bench.statuses() == {Status.SENT: 1}


@pytest.mark.parametrize("is_renewed", [False, True])
def test_an_email_whose_lease_the_relay_voided_is_not_sent_before_its_lease_is_renewed(is_renewed: bool) -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = leave_when_let_go
        (email_id,) = bench.enqueue()
        bench.deliver(email_id)
        await bench.turns()
        bench.void_leases()
        if is_renewed:
            bench.pipeline.window.emails[email_id].confirmed_at -= bench.settings.lease_seconds
            await bench.pass_time()
        bench.provider.let_go()
        await bench.pass_time(1)
        assert (bench.store.rows[email_id].attempts, bench.slots_in_use) == (is_renewed, 0)
        bench.deliver(email_id)  # a lease that the worker takes from now on is valid
        await bench.pass_time(1)

    bench = run(scenario)

    assert bench.words.count("lease") == (1 if is_renewed else 2)
    assert (bench.statuses(), set(bench.provider.accepted.values())) == ({Status.SENT: 1}, {1})


def test_an_email_on_the_wire_is_not_released_if_the_reply_to_another_lease_of_its_batch_is_lost() -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = accept_when_let_go
        flying, other = bench.enqueue(2)
        bench.deliver(flying)
        await bench.turns()
        bench.store.lose["lease"].append(True)
        bench.deliver(flying, other)
        await bench.pass_time()
        assert (bench.store.rows[flying].token, bench.store.rows[other].token) == (1, 2)
        bench.provider.let_go()
        await bench.pass_time()

    bench = run(scenario)

    assert bench.statuses() == {Status.SENT: 2}
    assert set(bench.provider.accepted.values()) == {1}


def test_a_release_whose_reply_is_lost_ends_in_one_more_lease_and_one_send() -> None:
    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].append(answer(replace(THROTTLED, retry_after=1.0)))
        bench.store.lose["release"].append(True)
        bench.deliver(email_id)
        await bench.turns()
        bench.deliver(email_id)  # as the relay does with due emails
        await bench.pass_time()

    bench = run(scenario)

    assert bench.words == ["lease", "release", "ack", "lease", "record", "ack"]
    assert set(bench.provider.accepted.values()) == {1}


@pytest.mark.parametrize("act", [leave_when_let_go, answer(replace(LATER, retry_after=50.0))], ids=["unsent", "waits"])
def test_an_email_whose_lease_was_lost_before_sending_or_before_the_retry_is_not_sent(act: Act) -> None:
    async def scenario(bench: StageBench) -> None:
        bench.provider.always = act
        (email_id,) = bench.enqueue()
        bench.deliver(email_id)
        await bench.turns()
        row = bench.store.rows[email_id]
        row.status, row.ours, row.token = Status.HELD, False, 7
        bench.pipeline.window.emails[email_id].confirmed_at = 0.0
        await bench.pass_time()
        assert not bench.provider.waiting
        assert not bench.pipeline.window.emails

    bench = run(scenario, retry_cap_seconds=60.0)

    assert (bench.provider.accepted, len(bench.provider.calls)) == ({}, 1)
    assert (bench.statuses(), bench.broker.settled) == ({Status.HELD: 1}, {1: "ack"})


async def wait_for_a_connection(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    await provider.wait(email.email_id)
    attempt.connection_acquired()
    return await accept(provider, email, attempt)


@pytest.mark.parametrize("has_second", [False, True])
@pytest.mark.parametrize(
    "act",
    [answer(THROTTLED), fail(ProviderFault("first", "bad credentials"), after_leaving=True)],
    ids=["429", "fault"],
)
def test_emails_that_wait_for_a_connection_are_not_sent_if_their_provider_is_paused(act: Act, has_second: bool) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = wait_for_a_connection

    async def scenario(bench: StageBench) -> None:
        refused, *others = bench.enqueue(20)
        first.script[refused].append(act)
        bench.deliver(*others)
        await bench.turns()
        assert first.waiting == set(others)
        bench.deliver(refused)
        await bench.turns()
        first.let_go()
        await bench.pass_time(1)

    bench = run(scenario, *([first, second] if has_second else [first]))

    rows = {(row.status, row.attempts) for row in bench.store.rows.values()}
    assert rows == {(Status.SENT, 1) if has_second else (Status.PENDING, 0)}
    assert (first.accepted, set(second.accepted.values())) == ({}, {1} if has_second else set())


def test_the_wait_for_a_connection_takes_no_time_from_the_attempt() -> None:
    seconds_left: list[float] = []

    async def wait_for_long(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        await asyncio.sleep(LONG_SECONDS)
        attempt.connection_acquired()
        seconds_left.append(attempt.deadline - asyncio.get_running_loop().time())
        return await accept(provider, email, attempt)

    async def scenario(bench: StageBench) -> None:
        bench.provider.always = wait_for_long
        bench.deliver(*bench.enqueue())
        await bench.pass_time(2 * LONG_SECONDS)

    bench = run(scenario, send_timeout_seconds=5.0)

    assert (bench.statuses(), seconds_left) == ({Status.SENT: 1}, [5.0])


def test_an_email_that_gets_no_connection_waits_again_and_uses_no_attempt() -> None:
    tries = 2 * FAILURES_IN_A_ROW

    async def scenario(bench: StageBench) -> None:
        (email_id,) = bench.enqueue()
        bench.provider.script[email_id].extend([fail(NoFreeConnection(), after_leaving=False)] * tries)
        bench.deliver(email_id)
        await bench.pass_time()

    bench = run(scenario)

    assert (bench.words, len(bench.provider.calls)) == (["lease", "record", "ack"], tries + 1)
    assert [row.attempts for row in bench.store.rows.values()] == [1]


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


@pytest.mark.parametrize("fault", [MemoryError(), AnswerTooLarge("too little memory")], ids=["Python", "libpq"])
def test_an_email_is_released_if_the_host_has_no_memory_for_its_content(fault: Exception) -> None:
    class Starved(FakeStore):
        async def read_content(self, email_id: UUID) -> OutgoingEmail | None:
            if faults:
                raise faults.pop()
            return await super().read_content(email_id)

    faults = [fault]

    async def scenario(bench: StageBench) -> None:
        bench.store.__class__ = Starved
        (email_id,) = bench.enqueue(octets_apart=1000)
        bench.deliver(email_id)
        await bench.pass_time(1)
        bench.deliver(email_id)
        await bench.pass_time(1)

    bench = run(scenario)

    assert bench.words == ["lease", "release", "ack", "lease", "record", "ack"]
    assert bench.statuses() == {Status.SENT: 1}
