"""Tests what happens to an email after each outcome of its attempt, and that the worker's metrics and reports agree."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.telemetry import metrics
from tests.recovery.tally import counted
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedProvider, answer, fail

DEFER = answer(Deferred(Reason.REFUSED, "not now", "451 4.7.1"))
MAX_ATTEMPTS = 3
NOTHING: Final[Mapping[str, Any]] = {}


def invalid(reason: Reason, *, has_left: bool) -> Act:
    async def act(_provider: ScriptedProvider, _email: OutgoingEmail, attempt: Attempt) -> Outcome:
        if has_left:
            attempt.mark_on_wire()
        return Deferred(reason, "later", "4", retry_after="soon")  # type: ignore[arg-type]

    return act


class Case(NamedTuple):
    """What the provider does with an email before it accepts the email, and how the email and its attempts end. `row`
    and `first`: columns of the email and of its first attempt. `before`: columns that are set before the delivery."""

    acts: list[Act]
    status: str
    outcomes: str
    row: Mapping[str, Any] = NOTHING
    first: Mapping[str, Any] = NOTHING
    before: Mapping[str, Any] = NOTHING
    calls: int | None = None


UNSENDABLE: dict[str, object] = {"error_type": "content_deleted", "provider": "none"}
REJECTED = answer(Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1"))
SPENT: dict[str, object] = {"error_type": "refused", "last_error": "not now", "attempt_count": 3}
NUL_REJECTED = answer(Rejected(Reason.INVALID_CONTENT, "a NUL \0 and half a pair \ud83e here", "5\0\udc80"))
ERRORS = (ValueError("ann@example.org"), TimeoutError(), asyncio.CancelledError())
REASONS = (Reason.REFUSED, Reason.THROTTLED, Reason.SERVER_ERROR)
INTERNAL: dict[str, object] = {"error_type": "internal_error"}
UNKNOWN: dict[str, object] = {"error_type": "outcome_unknown"}
CASES = {
    "accepted": Case([], "sent", "accepted", {"provider": "scripted", "attempt_count": 1}, {"attempt_number": 1}),
    "deferred": Case([DEFER] * 2, "sent", "deferred deferred accepted", {"lease_token": 1, "error_type": None}),
    "without attempts left": Case([DEFER] * 3, "failed", "deferred deferred deferred", SPENT),
    "deferred for too long": Case([answer(Deferred(Reason.REFUSED, retry_after=3600.0))], "failed", "deferred"),
    "rejected": Case([REJECTED], "failed", "rejected", {"last_error": "no such user"}, {"provider_code": "550 5.1.1"}),
    "no answer": Case([answer(Uncertain("no answer"))], "held", "uncertain", UNKNOWN),
    "rejected with NUL": Case([NUL_REJECTED], "failed", "rejected"),
    "accepted with NUL": Case([answer(Accepted("id \0 \udfff", "words \0 \ud800"))], "sent", "accepted"),
    "content deleted": Case([], "failed", "rejected", UNSENDABLE, calls=0),
    "replayed": Case([DEFER] * 3, "failed", "deferred " * 3, {"attempt_count": 6}, {"attempt_number": 4}, {
        "attempt_count": 3, "attempt_base": 3,
    }),
    "maximum of its lane": Case([DEFER] * 2, "failed", "deferred deferred", before={"max_attempts": 2}),
    **{f"{e!r} before it is sent": Case([fail(e, after_leaving=False)], "sent", "deferred accepted", first=INTERNAL)
       for e in ERRORS},
    **{f"{e!r} after it is sent": Case([fail(e, after_leaving=True)], "held", "uncertain", first=UNKNOWN)
       for e in ERRORS},
    **{f"invalid {r} before": Case([invalid(r, has_left=False)], "sent", "deferred accepted", first=INTERNAL)
       for r in REASONS},
    **{f"invalid {r} after": Case([invalid(r, has_left=True)], "held", "uncertain", first=UNKNOWN) for r in REASONS},
}  # fmt: skip


async def test_each_outcome_ends_its_email_as_decided_and_affects_no_other(bench: Bench) -> None:
    bench.books.connection.execute("insert into lane_policy (lane, weight, max_attempts) values ('urgent', 50, 2)")
    email_ids = dict(zip(CASES, bench.books.enqueue(len(CASES)), strict=True))
    names = {email_id: name for name, email_id in email_ids.items()}
    for name, email_id in email_ids.items():
        bench.provider.script[email_id].extend(CASES[name].acts)
        if CASES[name].before:
            bench.books.change(email_id, **CASES[name].before)
    deleted = email_ids["content deleted"]
    bench.books.connection.execute("delete from email_content where email_id = %s", [deleted])
    (urgent,) = bench.books.enqueue(1, lane="urgent")
    bench.provider.script[urgent].extend([DEFER] * 2)
    worker = await bench.start(MAX_ATTEMPTS=str(MAX_ATTEMPTS))

    await bench.deliver([*names, urgent])

    await until(lambda: not {"pending", "sending"} & bench.books.statuses().keys())
    found = {names[row["email_id"]]: row for row in bench.books.rows() if row["email_id"] != urgent}
    attempts = {name: bench.books.attempts(email_id) for name, email_id in email_ids.items()}
    ends = {name: (row["status"], [each["outcome"] for each in attempts[name]]) for name, row in found.items()}
    assert ends == {name: (case.status, case.outcomes.split()) for name, case in CASES.items()}
    assert (bench.books.status(urgent), bench.books.row(urgent)["attempt_count"]) == ("failed", 2)
    for name, case in CASES.items():
        assert {column: found[name][column] for column in case.row} == case.row, name
        assert {column: attempts[name][0][column] for column in case.first} == case.first, name
        assert (found[name]["dead_letter_due_at"] is None) == (case.status == "sent"), name
        calls = len(case.outcomes.split()) if case.calls is None else case.calls
        assert bench.provider.calls.count(email_ids[name]) == calls, name
        assert all("example.org" not in (each["error"] or "") for each in attempts[name])
    accepted = attempts["accepted"][0]
    assert found["accepted"]["provider_message_id"] == f"<{email_ids['accepted']}>"
    assert (accepted["worker"], accepted["started_at"] <= accepted["finished_at"]) == (worker.name, True)
    assert bench.books.hourly()["accepted"] == sum(case.status == "sent" for case in CASES.values())
    assert found["rejected with NUL"]["last_error"]
    await until(lambda: worker.in_flight == 0)
    await bench.nothing_left_on_the_queue()
    assert not worker.ledger.exists()


@pytest.mark.parametrize("hosts", ["hold", "resend"])
async def test_an_email_without_an_answer_is_held_or_sent_again_by_policy(bench: Bench, hosts: str) -> None:
    bench.provider.always = answer(Uncertain("no answer"))
    await bench.start(ON_UNCERTAIN=hosts)
    expected = {bench.books.enqueue_one(on_uncertain=own): own or hosts for own in (None, "hold", "resend")}
    await bench.deliver(expected)

    await until(lambda: all(bench.books.outcomes(each) == ["uncertain"] for each in expected))

    for email_id, policy in expected.items():
        row = bench.books.row(email_id)
        is_held = policy == "hold"
        assert (row["status"], row["error_type"]) == ("held" if is_held else "pending", "outcome_unknown")
        assert (row["dead_letter_due_at"] is not None, row["publish_due_at"] is None) == (is_held, is_held)
    assert len(bench.provider.calls) == 3
    await bench.nothing_left_on_the_queue()


async def test_a_provider_that_never_answers_is_paused_before_the_whole_queue_is_held(bench: Bench) -> None:
    bench.provider.always = answer(Uncertain("no answer"))
    await bench.start(PREFETCH="5")
    await bench.enqueue(100)

    await until(lambda: bench.books.select("select from provider_state where state = 'open'"))

    assert bench.books.statuses()["held"] <= 20


ATTEMPTS: Final = {
    "attempts": metrics.ATTEMPTS,
    "emails": metrics.EMAILS,
    "retries": metrics.RETRIES,
    "held": metrics.HELD,
}
TIMED: Final = {
    "leases": metrics.LEASE_EMAILS,
    "lease_seconds": metrics.LEASE_SECONDS,
    "records": metrics.RECORD_EMAILS,
    "record_seconds": metrics.RECORD_SECONDS,
    "send_seconds": metrics.SEND_SECONDS,
    "end_to_end_seconds": metrics.END_TO_END_SECONDS,
}


async def test_attempts_retries_and_emails_are_counted_by_outcome(bench: Bench) -> None:
    greylisted, silent, _ = email_ids = bench.books.enqueue(3)
    bench.provider.script[greylisted].append(answer(Deferred(Reason.RECIPIENT_DEFERRED)))
    bench.provider.script[silent].append(answer(Uncertain("silence")))

    with counted(ATTEMPTS) as counts, counted(TIMED) as timed:
        await bench.start()
        await bench.deliver(email_ids)
        await bench.settled({"sent": 2, "held": 1})
        await bench.nothing_left_on_the_queue()

    assert counts == {
        ("attempts", "scripted", "deferred", "recipient_deferred"): 1,
        ("attempts", "scripted", "accepted", "none"): 2,
        ("attempts", "scripted", "uncertain", "outcome_unknown"): 1,
        ("retries", "scripted"): 1,
        ("emails", "scripted", "accepted"): 2,
        ("emails", "scripted", "uncertain"): 1,
        ("held", "no_answer"): 1,
    }
    assert {name for (name, *_), count in timed.items() if count} == TIMED.keys()


async def test_a_worker_reports_when_it_is_up_its_in_flight_emails_and_the_time_of_its_last_ack(bench: Bench) -> None:
    with counted({"in_flight": metrics.IN_FLIGHT}) as counts:
        worker, _ = await bench.begin(3)
        await until(lambda: counts == {("in_flight",): 3})
        before = worker.process_table.statuses()[0].served_seconds
        bench.provider.let_go()
        await until(lambda: not counts["in_flight",])

    assert before is None
    assert worker.process_table.statuses()[0].served_seconds is not None
