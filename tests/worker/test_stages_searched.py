"""Hypothesis searches for a run of a worker's stages that breaks a guarantee. The fakes can fail at any step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import FINISHED, Status
from dispatcher.providers.contract import Attempt
from dispatcher.worker import in_flight_email
from dispatcher.worker.in_flight_email import TRANSITIONS, EmailEvent, EmailState
from tests.worker.scripted import Act, ScriptedProvider, accept, accept_when_let_go, answer, fail, leave_when_let_go
from tests.worker.stage_bench import StageBench, run

Row = tuple[EmailState, EmailEvent]

MAX_ROUNDS: Final = 8
"""The number of times that released emails are published again. Each email is deferred fewer times."""


async def deaf(provider: ScriptedProvider, email: OutgoingEmail, _attempt: Attempt) -> Outcome:
    """Ignores cancellation, and rejects the email afterwards."""
    with suppress(asyncio.CancelledError):
        await provider.wait(email.email_id)
    return Rejected(Reason.INVALID_CONTENT, "no")


async def come_back(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    attempt.mark_on_wire()
    await asyncio.sleep(0)
    attempt.mark_not_sent()
    return await accept(provider, email, attempt)


ACTS: Final[Mapping[str, Act]] = {
    "accept": accept,
    "wait": accept_when_let_go,
    "wait inside": leave_when_let_go,
    "defer": answer(Deferred(Reason.SERVER_ERROR, "later", "500")),
    "throttle": answer(Deferred(Reason.THROTTLED, "slower", "429", 1.0)),
    "reject": answer(Rejected(Reason.INVALID_CONTENT, "no", "550")),
    "silence": answer(Uncertain("nothing came")),
    "raise": fail(ValueError("a bug"), after_leaving=False),
    "raise late": fail(ValueError("a bug"), after_leaving=True),
    "deaf": deaf,
    "come back": come_back,
}
UNKNOWN: Final = {"silence", "raise late"}
"""The acts after which the email may have been accepted. Then the email is held."""

numbers = st.integers(0, 5)
steps = st.one_of(
    st.tuples(st.just("deliver"), st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=3)),
    st.tuples(st.just("deliver_large"), st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=3)),
    st.tuples(st.just("deliver_again"), numbers),
    st.tuples(
        st.just("lose"),
        st.tuples(st.sampled_from(["lease", "record", "release", "is_recorded", "renew"]), st.booleans()),
    ),
    st.tuples(st.sampled_from(["lock", "refuse", "take_away"]), numbers),
    st.tuples(st.sampled_from(["unlock", "take_results", "let_go", "void", "age", "lose_channel"]), st.none()),
    st.tuples(st.just("pass"), st.sampled_from([0.001, 1.0, 100.0])),
)


class RandomRun:
    def __init__(self, bench: StageBench) -> None:
        self.bench = bench
        self.store = bench.store
        self.acts: dict[UUID, list[str]] = {}
        self.taken_away: set[UUID] = set()
        self.has_lost_leases = False

    def deliver(self, acts: list[str], octets_apart: int = 0) -> None:
        """Delivers one new email for each act. The provider first does the act with the email, and later accepts it."""
        email_ids = self.bench.enqueue(len(acts), octets_apart=octets_apart)
        for email_id, act in zip(email_ids, acts, strict=True):
            self.acts[email_id] = [act]
            self.bench.provider.script[email_id].append(ACTS[act])
        self.bench.deliver(*email_ids)

    def pick(self, number: int) -> list[UUID]:
        email_ids = list(self.acts)
        return [email_ids[number % len(email_ids)]] if email_ids else []

    def take(self, step: str, value: Any) -> None:
        getattr(self, step)(value)

    def deliver_large(self, acts: list[str]) -> None:
        """Delivers emails so large that only one fits into memory."""
        self.deliver(acts, octets_apart=self.bench.settings.worker_memory_mb * 600_000)

    def deliver_again(self, number: int) -> None:
        self.bench.deliver(*self.pick(number))

    def lose(self, what: tuple[str, bool]) -> None:
        """Loses the reply to the next statement of this name. The boolean says whether the statement commits."""
        name, commits = what
        self.store.lose[name].append(commits)
        self.has_lost_leases |= name == "lease"

    def lock(self, number: int) -> None:
        self.store.locked_ids.update(self.pick(number))

    def unlock(self, _: None) -> None:
        self.store.locked_ids.clear()

    def refuse(self, number: int) -> None:
        self.store.refused.update(self.pick(number))

    def take_results(self, _: None) -> None:
        self.store.refused.clear()

    def take_away(self, number: int) -> None:
        """Takes an email's lease away from the worker, as recovery does."""
        for email_id in self.pick(number):
            row = self.store.rows[email_id]
            if row.status is Status.SENDING:
                row.status, row.ours, row.token = Status.HELD, False, row.token + 1
                self.taken_away.add(email_id)

    def void(self, _: None) -> None:
        self.bench.void_leases()

    def age(self, _: None) -> None:
        """Makes all leases so old that the worker must renew them."""
        for email in self.bench.pipeline.window.emails.values():
            email.confirmed_at -= self.bench.settings.lease_seconds

    def let_go(self, _: None) -> None:
        self.bench.provider.let_go()

    def lose_channel(self, _: None) -> None:
        self.bench.broker.open.clear()
        self.bench.pipeline.lease.drop_unleased()

    def heal(self) -> None:
        self.store.lose.clear()
        for step in ("unlock", "take_results", "let_go"):
            self.take(step, None)

    def check(self) -> None:
        bench = self.bench
        assert not bench.faults, bench.faults
        assert all(times == 1 for times in bench.provider.accepted.values()), "accepted twice"
        for email in bench.pipeline.window.emails.values():
            if email.state in (EmailState.ON_THE_WIRE, EmailState.ANSWERED, EmailState.IN_DOUBT, EmailState.REFUSED):
                was_acked = bench.broker.settled.get(email.delivery.tag) == "ack"
                assert email.attempt_number > 1 or not was_acked, "acked before the commit"

    def check_end(self) -> None:
        """Asserts the conditions that must be true after the worker has stopped while PostgreSQL works."""
        self.check()
        bench, store = self.bench, self.store
        assert not bench.pipeline.window.emails
        assert not bench.slots_in_use
        for email_id, row in store.rows.items():
            # If the reply to a lease statement was lost, the worker may leave the lease for the relay to settle.
            assert row.status is not Status.SENDING or self.has_lost_leases, "leased for ever"
            if bench.provider.accepted[email_id]:
                cut_short = bench.is_cut_short and row.status is Status.HELD
                assert row.status is Status.SENT or cut_short, "accepted, and not sent"
            elif row.status is Status.HELD:
                unknown = UNKNOWN.intersection(self.acts[email_id])
                assert unknown or email_id in self.taken_away or bench.is_cut_short, "held without need"
            else:
                assert row.status is not Status.SENT, "sent, and never accepted"


async def tell(bench: StageBench, script: list[tuple[str, Any]], *, stops_early: bool) -> None:
    random_run = RandomRun(bench)
    for step, value in script:
        if step == "pass":
            await bench.pass_time(value)
        else:
            random_run.take(step, value)
            await bench.turns()
        random_run.check()
    if stops_early:
        draining = asyncio.ensure_future(bench.drain())
        await bench.turns()
        bench.is_cut_short = True
        await bench.pass_time()  # the worker records answered emails, and holds emails without an answer
        random_run.heal()
        await bench.pass_time()
        await draining
    else:
        random_run.heal()
        for _ in range(MAX_ROUNDS):
            await bench.pass_time()
            bench.deliver(*(email_id for email_id, row in bench.store.rows.items() if row.status is Status.PENDING))
        await bench.pass_time()
        unfinished = {row.status for row in bench.store.rows.values()} - FINISHED
        assert not unfinished, "nothing goes wrong any more, and an email comes to no end"
        assert not bench.broker.open, "a message is neither acked nor given back"
        await bench.drain()
    random_run.check_end()


Script = tuple[list[tuple[str, Any]], bool]
"""The steps of a run, and whether the worker is stopped before all emails are finished."""


def play(script: Script) -> None:
    steps_, stops_early = script
    run(lambda bench: tell(bench, steps_, stops_early=stops_early), worker_memory_mb=64)


def search(examples: int, monkeypatch: pytest.MonkeyPatch) -> dict[Row, list[Script]]:
    """Tries this number of random runs. Returns for each row of the transition table the runs that used it."""
    used: set[Row] = set()
    found: dict[Row, list[Script]] = {}

    class Recorded(dict[Row, EmailState]):
        def __getitem__(self, row: Row) -> EmailState:
            used.add(row)
            return super().__getitem__(row)

    monkeypatch.setattr(in_flight_email, "TRANSITIONS", Recorded(TRANSITIONS))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.tuples(st.lists(steps, min_size=1, max_size=12), st.booleans()))
    def holds(script: Script) -> None:
        used.clear()
        play(script)
        for row in used & TRANSITIONS.keys():
            found.setdefault(row, []).append(script)

    holds()
    monkeypatch.undo()
    return found


def fails_without(row: Row, scripts: list[Script], monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        patch.delitem(cast("dict[Row, EmailState]", TRANSITIONS), row)
        for script in scripts:
            try:
                play(script)
            except (AssertionError, ExceptionGroup):
                return True
    return False


SOON_FOUND: Final = {
    (EmailState.WAITING, EmailEvent.RESUME),
    (EmailState.PREPARING, EmailEvent.MARK),
    (EmailState.MARKED, EmailEvent.SEND),
    (EmailState.ON_THE_WIRE, EmailEvent.ANSWER),
    (EmailState.ANSWERED, EmailEvent.RECORD),
    (EmailState.RECORDED, EmailEvent.FINISH),
}
BY_TESTS: Final = {
    # Random runs hardly ever reach these.
    (EmailState.MARKED, EmailEvent.UNMARK),
    (EmailState.IN_DOUBT, EmailEvent.REFUSE),
    (EmailState.REFUSED, EmailEvent.LOSE_REPLY),
    # Without these, the worker still loses and repeats nothing: it asks whether the email may wait or be stopped.
    (EmailState.RECORDED, EmailEvent.WAIT),
    (EmailState.PREPARING, EmailEvent.STOP),
    (EmailState.WAITING, EmailEvent.STOP),
    (EmailState.STOPPED, EmailEvent.ANSWER),
}
"""`test_stages` tests each of these transitions."""


def test_no_random_run_loses_an_email_or_sends_it_twice_and_the_common_rows_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = search(75, monkeypatch)

    assert [row for row in SOON_FOUND if not fails_without(row, found[row], monkeypatch)] == []


@pytest.mark.slow  # three minutes of one core
def test_no_random_run_of_a_long_search_does_either_and_every_row_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search(5_000, monkeypatch)

    unneeded = {row for row in list(TRANSITIONS) if not fails_without(row, found.get(row, [])[:300], monkeypatch)}
    assert unneeded <= BY_TESTS
