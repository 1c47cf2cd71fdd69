"""An email that a provider with idempotency keys may have accepted is tried again there, and nowhere else."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ANYTHING, Act, ScriptedProvider, accept, answer

KEYED = replace(ANYTHING, idempotency_key_seconds=3600.0)
NO_ANSWER = answer(Uncertain("no answer"))
LAPSED = (
    "first may have accepted the email, but the email's idempotency key has expired, so another attempt could send a "
    "duplicate."
)
GONE = (
    "first may have accepted the email, but this host no longer uses idempotency keys of first, so another attempt "
    "could send a duplicate."
)


async def accept_by_key(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    """Accepts the email, unless it has accepted this key before, and gives no answer."""
    attempt.mark_on_wire()
    await asyncio.sleep(0)
    provider.accepted[email.email_id] = 1
    return Uncertain("no answer")


async def repeat(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
    """Answers as to the first request with this key; accepts the email if it has not."""
    outcome = await accept(provider, email, attempt)
    provider.accepted[email.email_id] = 1
    return outcome


def pair() -> tuple[ScriptedProvider, ScriptedProvider]:
    first, second = ScriptedProvider("first", KEYED), ScriptedProvider("second")
    first.always = repeat
    return first, second


async def start_with(bench: Bench, first: ScriptedProvider, second: ScriptedProvider, *acts: Act) -> UUID:
    """Starts a worker, and enqueues an email for which the first provider acts in this way."""
    remaining = list(acts)

    async def act(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        return await (remaining.pop(0) if remaining else repeat)(provider, email, attempt)

    first.always = act
    await bench.start([first, second])
    (email_id,) = await bench.enqueue()
    return email_id


@pytest.mark.parametrize("policy", ["hold", "resend"])
async def test_after_silence_the_email_is_tried_again_at_the_same_provider_under_the_same_lease(
    bench: Bench, policy: str
) -> None:
    first, second = pair()
    first.always = accept_by_key
    await bench.start([first, second], ON_UNCERTAIN=policy)
    (email_id,) = await bench.enqueue()
    await until(lambda: len(first.calls) >= 2)

    first.always = repeat

    await bench.settled({"sent": 1})
    assert (first.accepted, second.calls) == ({email_id: 1}, [])
    outcomes = [row["outcome"] for row in bench.books.attempts(email_id)]
    assert outcomes == ["uncertain"] * (len(outcomes) - 1) + ["accepted"]
    row = bench.books.row(email_id)
    assert (row["provider"], row["pinned_at"], row["lease_token"]) == ("first", None, 1)


async def test_without_keys_silence_is_held_as_before(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second", KEYED)
    first.always = NO_ANSWER
    await bench.start([first, second])

    await bench.enqueue()

    await bench.settled({"held": 1})
    assert (len(first.calls), second.calls) == (1, [])


@pytest.mark.parametrize(
    ("refusal", "counted"),
    [(Deferred(Reason.SERVER_ERROR, "busy", "503"), 2), (Deferred(Reason.CONNECTION_FAILED, "refused"), 0)],
    ids=["server error", "connection failed"],
)
async def test_a_pinned_email_never_fails_over(bench: Bench, refusal: Deferred, counted: int) -> None:
    first, second = pair()

    email_id = await start_with(bench, first, second, NO_ANSWER, answer(refusal), answer(refusal))

    await bench.settled({"sent": 1})
    assert second.calls == []
    outcomes = [row["outcome"] for row in bench.books.attempts(email_id)]
    assert outcomes == ["uncertain", *["deferred"] * counted, "accepted"]


@pytest.mark.parametrize(
    ("act", "detail"),
    [
        (answer(Rejected(Reason.INVALID_CONTENT, "422 validation_error: no", "422")), "422 validation_error: no"),
        (answer(Rejected(Reason.TOO_LARGE, "the adapter refuses it")), "the adapter refuses it"),
        (answer(Deferred(Reason.REFUSED, "come back tomorrow", "451", 86_400.0)), "come back tomorrow"),
    ],
    ids=["rejected", "refused by the adapter", "deferred for too long"],
)
async def test_a_refusal_of_a_pinned_email_does_not_end_the_doubt(bench: Bench, act: Act, detail: str) -> None:
    first, second = pair()

    email_id = await start_with(bench, first, second, accept_by_key, act)

    await bench.settled({"held": 1})
    row = bench.books.row(email_id)
    assert (row["error_type"], row["last_error"], second.calls) == ("outcome_unknown", detail, [])


async def test_an_email_is_held_when_its_attempts_are_used_up(bench: Bench) -> None:
    first, second = pair()
    first.always = NO_ANSWER
    await bench.start([first, second], MAX_ATTEMPTS="3", ON_UNCERTAIN="resend")

    (email_id,) = await bench.enqueue()

    await bench.settled({"held": 1})
    assert (first.calls, second.calls) == ([email_id] * 3, [])


async def test_the_pin_outlives_the_worker(bench: Bench) -> None:
    first, second = pair()
    first.always = accept_by_key
    worker = await bench.start([first, second], RETRY_BASE_SECONDS="600", RETRY_CAP_SECONDS="600")
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.books.row(email_id)["pinned_at"] is not None)

    await worker.stop()

    row = bench.books.row(email_id)
    assert (row["status"], row["provider"], row["attempt_count"]) == ("pending", "first", 1)
    again, other = pair()
    await bench.start([other, again])
    await bench.deliver([email_id])
    await bench.settled({"sent": 1})
    assert (again.calls, other.calls) == ([email_id], [])
    assert [row["provider"] for row in bench.books.attempts(email_id)] == ["first", "first"]


@pytest.mark.parametrize(
    ("policy", "status", "key_seconds", "detail"),
    [
        ("hold", "held", 3600.0, LAPSED),
        ("resend", "sent", 3600.0, None),
        ("hold", "held", None, GONE),
    ],
    ids=["key expired, hold", "key expired, resend", "provider without keys"],
)
async def test_an_email_whose_key_has_expired_is_not_sent_but_judged_by_policy(
    bench: Bench, policy: str, status: str, key_seconds: float | None, detail: str | None
) -> None:
    (email_id,) = bench.books.enqueue(1)
    pinned_at = datetime.now(UTC) - timedelta(minutes=61)
    bench.books.change(email_id, provider="first", attempt_count=1, was_uncertain=True, pinned_at=pinned_at)
    first = ScriptedProvider("first", replace(ANYTHING, idempotency_key_seconds=key_seconds))
    await bench.start([first], ON_UNCERTAIN=policy)

    await bench.deliver([email_id])

    if status == "sent":  # pending, and due for the relay, which this test does not run
        await until(lambda: bench.books.row(email_id)["status"] == "pending" and bench.books.attempts(email_id))
        assert bench.books.row(email_id)["pinned_at"] is None
        await bench.deliver([email_id])
    await bench.settled({status: 1})
    assert first.accepted == (Counter({email_id: 1}) if status == "sent" else Counter())
    row = bench.books.row(email_id)
    assert row["last_error"] == (detail or "250 ok")


async def test_a_pinned_email_waits_while_its_provider_is_paused(bench: Bench) -> None:
    first, second = pair()
    throttled = answer(Deferred(Reason.THROTTLED, "slow down", "429", 1.5))

    await start_with(bench, first, second, NO_ANSWER, throttled)

    await until(lambda: len(first.calls) >= 2)
    await until(lambda: bench.books.statuses() == {"pending": 1})
    assert second.calls == []
