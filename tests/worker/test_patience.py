"""A transient refusal is tried again for minutes. The emails that wait for a retry delay no other emails."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dispatcher.dev.smtp_behaviour import SmtpBehaviour, SmtpFault, Step
from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.provider_text import RELAY
from dispatcher.providers.contract import Attempt
from dispatcher.store.instants import AHEAD_SECONDS
from tests.providers.places import smtp_place
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept

PREFETCH = 8
UNCLEAR = Rejected(Reason.REFUSED, "Rule 7 says no", "550")
GREYLISTED = Deferred(Reason.RECIPIENT_DEFERRED, "Greylisted", "451 4.7.1")


async def greylist_one_domain(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    return GREYLISTED if email.to == ("ann@grey.example",) else await accept(provider, email, attempt)


async def test_a_backlog_that_is_greylisted_at_one_domain_does_not_delay_emails_to_other_domains(bench: Bench) -> None:
    bench.provider.always = greylist_one_domain
    worker = await bench.start(PREFETCH=str(PREFETCH), RETRY_BASE_SECONDS="600", RETRY_CAP_SECONDS="600")
    backlog = await bench.enqueue(5 * PREFETCH, to="ann@grey.example")
    await until(lambda: set(bench.provider.calls) == set(backlog))

    fresh = await bench.enqueue(3 * PREFETCH)

    await until(lambda: set(bench.provider.accepted) == set(fresh))
    await bench.settled({"sent": 3 * PREFETCH, "sending": PREFETCH - 1, "pending": 4 * PREFETCH + 1})
    assert [len(bench.books.outcomes(each)) for each in backlog] == [1] * len(backlog)

    await worker.stop()

    # The relay would publish an email at once if its due mark were further ahead.
    rows = [bench.books.row(each) for each in backlog]
    assert {(row["status"], row["attempt_count"], row["dead_letter_due_at"]) for row in rows} == {("pending", 1, None)}
    waits = [(row["publish_due_at"] - datetime.now(UTC)).total_seconds() for row in rows]
    assert 200 < min(waits) < max(waits) < AHEAD_SECONDS
    await bench.nothing_left_on_the_queue()


async def reject_one_domain(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    return UNCLEAR if email.to == ("ann@bad.example",) else await accept(provider, email, attempt)


@pytest.mark.parametrize("words", ["unknown", "known"])
async def test_a_backlog_that_is_rejected_at_one_domain_does_not_stop_emails_to_other_domains(
    bench: Bench, words: str
) -> None:
    async def reject(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        outcome = await reject_one_domain(provider, email, attempt)
        return replace(outcome, fault=RELAY) if isinstance(outcome, Rejected) and words == "known" else outcome

    bench.provider.always = reject
    await bench.start(PREFETCH=str(PREFETCH))
    backlog = await bench.enqueue(300, to="ann@bad.example")
    await until(lambda: bench.provider.calls != [])

    fresh = await bench.enqueue(3 * PREFETCH)

    await until(lambda: set(bench.provider.accepted) == set(fresh), seconds=180)
    assert not set(backlog) & set(bench.provider.accepted)


async def test_an_undecided_email_waits_first_in_the_worker_and_then_for_any_worker(bench: Bench) -> None:
    bench.provider.always = reject_one_domain
    await bench.start()

    (email_id,) = await bench.enqueue(to="ann@bad.example")

    await until(lambda: len(bench.provider.calls) == 4 and bench.books.statuses() == {"pending": 1})
    row = bench.books.row(email_id)
    assert 2 < (row["publish_due_at"] - datetime.now(UTC)).total_seconds() < 8
    assert (bench.books.attempts(email_id), row["attempt_count"]) == ([], 0)
    await bench.nothing_left_on_the_queue()


async def test_an_undecided_email_that_expires_before_its_next_try_is_released(bench: Bench) -> None:
    bench.provider.always = reject_one_domain
    await bench.start()
    (email_id,) = bench.books.enqueue(1, to="ann@bad.example")
    bench.books.change(email_id, expires_at=datetime.now(UTC) + timedelta(seconds=2))

    await bench.deliver([email_id])

    await until(lambda: len(bench.provider.calls) > 0 and bench.books.statuses() == {"pending": 1})
    assert bench.books.row(email_id)["error_type"] is None
    await bench.nothing_left_on_the_queue()


UNOPENED: dict[str, dict[Step, str]] = {
    "421": {Step.CONNECT: "421 4.3.2 busy"},
    "450": {Step.CONNECT: "450 4.7.1 try later"},
    "451": {Step.CONNECT: "451 4.7.1 Greylisted"},
    "452": {Step.CONNECT: "452 4.3.1 insufficient storage"},
    "554": {Step.CONNECT: "554 5.3.2 no SMTP service here"},
    "closed": {Step.CONNECT: SmtpFault.CLOSE},
    "garbage": {Step.CONNECT: "HTTP/1.1 400 Bad Request"},
    "EHLO 421": {Step.EHLO: "421 4.3.2 busy"},
    "EHLO 451": {Step.EHLO: "451 4.3.0 no"},
    "EHLO reset": {Step.EHLO: SmtpFault.RESET},
}


@pytest.mark.parametrize("script", UNOPENED.values(), ids=UNOPENED)
async def test_a_refused_connection_greeting_or_ehlo_uses_no_attempt(
    bench: Bench, tmp_path: Path, script: dict[Step, str]
) -> None:
    async with smtp_place(tmp_path / "sink", SmtpBehaviour(script=script, times=1)) as place:
        await bench.start([place.provider], MAX_ATTEMPTS="1")

        (email_id,) = await bench.enqueue()

        await bench.settled({"sent": 1})
        assert bench.books.outcomes(email_id) == ["accepted"]


async def test_a_single_email_waits_for_an_unreachable_provider_and_status_says_why(
    bench: Bench, tmp_path: Path
) -> None:
    async with smtp_place(tmp_path / "sink", SmtpBehaviour(script={Step.CONNECT: SmtpFault.RESET})) as place:
        await bench.start([place.provider], MAX_ATTEMPTS="1")

        (email_id,) = await bench.enqueue()

        await until(lambda: bench.books.statuses() == {"pending": 1} and bool(unusable(bench)))
        ((provider, state, reason),) = unusable(bench)
        assert (provider, state) == ("smtp", "open")
        assert reason == "connection_failed: the server closed the connection while connecting"
        assert (bench.books.attempts(email_id), bench.books.row(email_id)["attempt_count"]) == ([], 0)

        place.sink.behaviour.script = {}
        await bench.deliver([email_id])

        await bench.settled({"sent": 1})
        assert bench.books.outcomes(email_id) == ["accepted"]


def unusable(bench: Bench) -> list[tuple[str, str, str]]:
    """The providers that a worker cannot use, as other hosts read them: name, state, reason."""
    rows = bench.books.select("select provider, state, reason from provider_state where state = 'open'")
    return [(row["provider"], row["state"], row["reason"]) for row in rows]
