"""An SMTP server always defers some emails, and accepts all other emails. Tests which emails fail and which wait.

No relay runs in these tests, so the tests publish released emails again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from tests.providers.places import smtp_place
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import Act, accept

ATTEMPTS = 3


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


async def test_a_rate_limited_mailbox_does_not_delay_other_emails(bench: Bench, tmp_path: Path) -> None:
    async with smtp_place(tmp_path / "sink") as place:
        await bench.start([place.provider], MAX_ATTEMPTS=str(ATTEMPTS))
        (bad,) = await bench.enqueue(to="limited-1@bad.example")
        await until(lambda: bench.books.row(bad)["status"] == "failed")

        await bench.enqueue(20)

        await bench.settled({"sent": 20, "failed": 1})
        assert bench.books.row(bad)["attempt_count"] == ATTEMPTS
        assert bench.books.row(bad)["error_type"] == Reason.RECIPIENT_DEFERRED


@pytest.mark.parametrize("domains", [1, pytest.param(30, marks=pytest.mark.slow)])
async def test_thirty_recipients_that_the_server_cannot_look_up_do_not_stop_other_emails(
    bench: Bench, tmp_path: Path, domains: int
) -> None:
    async with smtp_place(tmp_path / "sink") as place:
        await bench.start([place.provider], MAX_ATTEMPTS=str(ATTEMPTS))
        for number in range(30):
            await bench.enqueue(to=f"unverified-{number}@bad{number % domains}.example")

        await bad_emails_fail_and_good_emails_are_sent(bench)


def refuse(outcome: Outcome | ProviderFault) -> Act:
    """Refuses emails to one recipient with this outcome, and accepts all other emails."""

    async def act(provider: object, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        if email.to != ("bad@bad.example",):
            return await accept(provider, email, attempt)  # type: ignore[arg-type]
        attempt.mark_on_wire()
        if isinstance(outcome, ProviderFault):
            raise outcome
        return outcome

    return act


@pytest.mark.parametrize(
    "outcome",
    [
        Deferred(Reason.THROTTLED, "slow down", "429"),
        Deferred(Reason.THROTTLED, "slow down", "429", retry_after=1.0),
        Deferred(Reason.SERVER_ERROR, "no", "500"),
        ProviderFault("scripted", "not from this sender"),
    ],
    ids=["429", "429 for a second", "500", "fault"],
)
async def test_an_email_that_always_causes_a_provider_wide_refusal_fails_alone(
    bench: Bench, outcome: Outcome | ProviderFault
) -> None:
    bench.provider.always = refuse(outcome)
    await bench.start(MAX_ATTEMPTS=str(ATTEMPTS))
    await bench.enqueue(to="bad@bad.example")

    await bad_emails_fail_and_good_emails_are_sent(bench)


async def test_a_single_email_does_not_fail_while_the_provider_throttles_everything(bench: Bench) -> None:
    bench.provider.always = refuse(Deferred(Reason.THROTTLED, "slow down", "429"))
    await bench.start(MAX_ATTEMPTS="1")
    (lone,) = await bench.enqueue(to="bad@bad.example")
    await until(lambda: len(bench.provider.calls) >= 2)
    assert bench.books.attempts(lone) == []
    bench.provider.always = accept

    await bench.settled({"sent": 1})
