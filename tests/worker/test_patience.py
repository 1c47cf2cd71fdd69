"""A transient refusal is tried again for minutes. The emails that wait for a retry delay no other emails."""

from __future__ import annotations

from datetime import UTC, datetime

from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept

PREFETCH = 8
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

    # Every email of the backlog is due when its wait would have ended, with one attempt, and only once.
    rows = [bench.books.row(each) for each in backlog]
    assert {(row["status"], row["attempt_count"], row["dead_letter_due_at"]) for row in rows} == {("pending", 1, None)}
    assert min((row["publish_due_at"] - datetime.now(UTC)).total_seconds() for row in rows) > 200
    await bench.nothing_left_on_the_queue()
