"""A server refuses emails, at any step and in any words. If the server is at fault, no email fails, and the emails go
to the next provider. If a recipient is at fault, only its email fails. Emails that wait for a retry delay no others.

No relay runs in these tests, so released emails stay pending until a test publishes them again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from dispatcher.config.values import SmtpServer
from dispatcher.dev.smtp_behaviour import SmtpBehaviour, Step
from dispatcher.dev.smtp_sink import running_sink
from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.providers.smtp import SmtpProvider, SmtpSettings
from dispatcher.store.instants import AHEAD_SECONDS
from tests.providers.places import smtp_place
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedProvider, accept, answer

DOMAINS = 10
BACKLOG = 60
PREFETCH = 8
ATTEMPTS = 3
TOO_MANY = "550 Domain example.com has exceeded the max emails per hour (101/100) allowed"
NO_CREDITS = "535 5.7.8 Authentication failed: Maximum credits exceeded"
FAULTS = {
    "greeting, blocked host": (Step.CONNECT, "554 5.7.1 Your IP is blocked", "Your IP is blocked", 0),
    "login, no credits": (Step.AUTH, NO_CREDITS, "refuses the login", 0),
    "MAIL, sender": (Step.MAIL, "553 5.7.1 Sender address rejected: not owned by user", "not owned by", 0),
    "RCPT, hourly quota": (Step.RCPT, TOO_MANY, "max emails per hour", 3000),
    "RCPT, relay": (Step.RCPT, "554 5.7.1 Relay access denied", "Relay access denied", 0),
    "RCPT, unknown words": (Step.RCPT, "550 Rule 7 says no", "Rule 7 says no", 0),
    "RCPT, too fast": (Step.RCPT, "450 4.7.1 Error: too much mail", "throttled", 0),
    "after the body, unknown words": (Step.END, "554 5.7.1 Rule 7 says no", "Rule 7 says no", 0),
}
"""What the server does, a part of the reason that operators are told, and for how many seconds it lasts at least."""
WITH_SECOND = ("login, no credits", "RCPT, unknown words", "after the body, unknown words")


def backlog(bench: Bench, count: int = BACKLOG) -> list[UUID]:
    """Enqueues emails of one sender, to ten domains in turn."""
    return [bench.books.enqueue_one(to=f"ann@shop{number % DOMAINS}.example") for number in range(count)]


def reasons(bench: Bench) -> list[tuple[str, float]]:
    """Why the worker does not use a provider, and for how many seconds."""
    rows = bench.books.select(
        "select reason, extract(epoch from until_at - changed_at)::float8 as seconds from provider_state"
        " where state <> 'closed'"
    )
    return [(row["reason"], row["seconds"] or 0.0) for row in rows]


@pytest.mark.parametrize(
    ("case", "has_second"), [*((case, False) for case in FAULTS), *((case, True) for case in WITH_SECOND)]
)
async def test_a_refused_backlog_waits_or_fails_over(case: str, has_second: bool, bench: Bench, tmp_path: Path) -> None:
    step, reply, told, lasts = FAULTS[case]
    login = ("user", "password") if step is Step.AUTH else None
    second = ScriptedProvider("second")
    async with running_sink(tmp_path / "sink", SmtpBehaviour(script={step: reply}, login=login)) as sink:
        smtp = SmtpProvider(SmtpSettings(url=SmtpServer("127.0.0.1", sink.port, "none", *(login or ()))))
        await bench.start([smtp, second] if has_second else [smtp])
        await bench.deliver(backlog(bench))

        (reason,) = await until(lambda: reasons(bench))
        if case == "RCPT, too fast":  # a short pause, after which a few emails are tried again
            assert set(bench.books.statuses()) <= {"pending", "sending"}
        else:
            await bench.settled({"sent" if has_second else "pending": BACKLOG})
        assert set(second.accepted.values()) == ({1} if has_second else set())
        assert (told in reason[0], reason[1] >= lasts, sink.received) == (True, True, [])
        assert not bench.books.select("select error_type from every_attempt where outcome = 'rejected'")


async def test_an_email_that_both_providers_refuse_fails_alone(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    await bench.start([first, second])
    (bad,) = bench.books.enqueue(1, to="bad@bad.example")
    for provider in (first, second):
        provider.script[bad].extend([answer(Rejected(Reason.REFUSED, "Rule 7 says no", "550"))] * 9)
    await bench.deliver([bad])
    await until_answer(bench.enqueue, lambda _: bench.books.status(bad) == "failed")
    assert (first.calls.count(bad), second.calls.count(bad)) == (2, 1)
    await until(lambda: set(bench.books.statuses()) == {"failed", "sent"})
    assert reasons(bench) == []


async def bad_emails_fail_and_good_emails_are_sent(bench: Bench) -> None:
    """Keeps enqueueing good emails, and publishes due emails like a relay, until all bad emails have failed. Then
    asserts that all good emails are sent."""

    async def it_is_so() -> bool:
        await bench.enqueue()
        await bench.deliver([row["email_id"] for row in bench.books.rows() if row["status"] == "pending"])
        return bench.books.statuses()["failed"] == len(bad)

    bad = [row["email_id"] for row in bench.books.rows() if row["status"] != "sent"]
    await bench.enqueue(20)
    await until_answer(it_is_so)
    await until(lambda: set(bench.books.statuses()) == {"failed", "sent"})
    assert {row["attempt_count"] for row in bench.books.rows() if row["status"] == "sent"} == {1}
    assert {row["attempt_count"] for row in bench.books.rows() if row["status"] == "failed"} == {ATTEMPTS}


@pytest.mark.parametrize("domains", [1, pytest.param(30, marks=pytest.mark.slow)])
async def test_thirty_unverified_recipients_stop_no_other_emails(bench: Bench, tmp_path: Path, domains: int) -> None:
    async with smtp_place(tmp_path / "sink") as place:
        await bench.start([place.provider], MAX_ATTEMPTS=str(ATTEMPTS))
        for number in range(30):
            await bench.enqueue(to=f"unverified-{number}@bad{number % domains}.example")

        await bad_emails_fail_and_good_emails_are_sent(bench)


def refuse(outcome: Outcome | ProviderFault) -> Act:
    """Refuses emails to one recipient with this outcome, and accepts all other emails."""

    async def act(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        if email.to != ("bad@bad.example",):
            return await accept(provider, email, attempt)
        attempt.mark_on_wire()
        if isinstance(outcome, ProviderFault):
            raise outcome
        return outcome

    return act


SLOW_DOWN = Deferred(Reason.THROTTLED, "slow down", "429")
UNCLEAR = Rejected(Reason.REFUSED, "Rule 7 says no", "550")


@pytest.mark.parametrize(
    "outcome",
    [
        SLOW_DOWN,
        replace(SLOW_DOWN, retry_after=1.0),
        Deferred(Reason.SERVER_ERROR, "no", "500"),
        ProviderFault("scripted", "not from this sender"),
    ],
    ids=["429", "429 for a second", "500", "fault"],
)
async def test_the_cause_of_provider_wide_refusals_fails_alone(bench: Bench, outcome: Outcome | ProviderFault) -> None:
    bench.provider.always = refuse(outcome)
    await bench.start(MAX_ATTEMPTS=str(ATTEMPTS))
    await bench.enqueue(to="bad@bad.example")

    await bad_emails_fail_and_good_emails_are_sent(bench)


async def test_a_backlog_that_is_greylisted_at_one_domain_does_not_delay_emails_to_other_domains(bench: Bench) -> None:
    bench.provider.always = refuse(Deferred(Reason.RECIPIENT_DEFERRED, "Greylisted", "451 4.7.1"))
    worker = await bench.start(PREFETCH=str(PREFETCH), RETRY_BASE_SECONDS="600", RETRY_CAP_SECONDS="600")
    greylisted = await bench.enqueue(5 * PREFETCH, to="bad@bad.example")
    await until(lambda: set(bench.provider.calls) == set(greylisted))

    fresh = await bench.enqueue(3 * PREFETCH)

    await until(lambda: set(bench.provider.accepted) == set(fresh))
    await bench.settled({"sent": 3 * PREFETCH, "sending": PREFETCH - 1, "pending": 4 * PREFETCH + 1})
    assert [len(bench.books.outcomes(each)) for each in greylisted] == [1] * len(greylisted)

    await worker.stop()

    # The relay would publish an email at once if its due mark were further ahead.
    rows = [bench.books.row(each) for each in greylisted]
    assert {(row["status"], row["attempt_count"], row["dead_letter_due_at"]) for row in rows} == {("pending", 1, None)}
    waits = [(row["publish_due_at"] - datetime.now(UTC)).total_seconds() for row in rows]
    assert 200 < min(waits) < max(waits) < AHEAD_SECONDS
    await bench.nothing_left_on_the_queue()


async def test_an_undecided_email_waits_first_in_the_worker_and_then_for_any_worker(bench: Bench) -> None:
    bench.provider.always = refuse(UNCLEAR)
    await bench.start()

    (email_id,) = await bench.enqueue(to="bad@bad.example")

    await until(lambda: len(bench.provider.calls) == 4 and bench.books.statuses() == {"pending": 1})
    row = bench.books.row(email_id)
    assert 2 < (row["publish_due_at"] - datetime.now(UTC)).total_seconds() < 8
    assert (bench.books.attempts(email_id), row["attempt_count"]) == ([], 0)
    await bench.nothing_left_on_the_queue()
