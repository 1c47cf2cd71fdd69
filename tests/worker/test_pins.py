"""An email that a provider with idempotency keys may have accepted is tried again there, and nowhere else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.domain.outcome import Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ANYTHING, Act, ScriptedProvider, accept, answer

KEYED = replace(ANYTHING, idempotency_key_seconds=3600.0)
NO_ANSWER = answer(Uncertain("no answer"))
MAY_HAVE = "first may have accepted the email, but "
LAPSED = MAY_HAVE + "the email's idempotency key has expired, so another attempt could send a duplicate."
GONE = MAY_HAVE + ("this host no longer uses idempotency keys of first, so another attempt could send a duplicate.")


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


def pair(*acts: Act) -> tuple[ScriptedProvider, ScriptedProvider]:
    """A provider with keys, which acts in this way and then repeats its answer, and one without keys."""
    first, second = ScriptedProvider("first", KEYED), ScriptedProvider("second")
    remaining = list(acts)

    async def act(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        return await (remaining.pop(0) if remaining else repeat)(provider, email, attempt)

    first.always = act
    return first, second


@pytest.mark.parametrize("policy", ["hold", "resend"])
async def test_after_silence_the_email_is_tried_again_there_under_the_same_lease(bench: Bench, policy: str) -> None:
    first, second = pair(accept_by_key, accept_by_key)
    await bench.start([first, second], ON_UNCERTAIN=policy)

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})
    assert (first.accepted, second.calls) == ({email_id: 1}, [])
    assert bench.books.outcomes(email_id) == ["uncertain", "uncertain", "accepted"]
    row = bench.books.row(email_id)
    assert (row["provider"], row["pinned_at"], row["lease_token"]) == ("first", None, 1)


@pytest.mark.parametrize(
    ("refusal", "counted"),
    [(Deferred(Reason.SERVER_ERROR, "busy", "503"), 2), (Deferred(Reason.CONNECTION_FAILED, "refused"), 0)],
    ids=["server error", "connection failed"],
)
async def test_a_pinned_email_never_fails_over(bench: Bench, refusal: Deferred, counted: int) -> None:
    first, second = pair(NO_ANSWER, answer(refusal), answer(refusal))
    await bench.start([first, second])

    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})
    assert second.calls == []
    assert bench.books.outcomes(email_id) == ["uncertain", *["deferred"] * counted, "accepted"]


@pytest.mark.parametrize(
    ("acts", "detail", "calls"),
    [
        ([accept_by_key, answer(Rejected(Reason.INVALID_CONTENT, "422 no", "422"))], "422 no", 2),
        ([accept_by_key, answer(Rejected(Reason.TOO_LARGE, "the adapter refuses it"))], "the adapter refuses it", 2),
        ([accept_by_key, answer(Deferred(Reason.REFUSED, "tomorrow", "451", 86_400.0))], "tomorrow", 2),
        ([NO_ANSWER] * 3, "no answer", 3),
    ],
    ids=["rejected", "refused by the adapter", "deferred for too long", "no attempts left"],
)
async def test_a_refusal_or_the_last_attempt_of_a_pinned_email_does_not_end_the_doubt(
    bench: Bench, acts: list[Act], detail: str, calls: int
) -> None:
    first, second = pair(*acts)
    await bench.start([first, second], MAX_ATTEMPTS="3", ON_UNCERTAIN="resend" if calls == 3 else "hold")

    (email_id,) = await bench.enqueue()

    await bench.settled({"held": 1})
    row = bench.books.row(email_id)
    assert (row["error_type"], row["last_error"]) == ("outcome_unknown", detail)
    assert (first.calls, second.calls) == ([email_id] * calls, [])


async def test_the_pin_outlives_the_worker(bench: Bench) -> None:
    worker = await bench.start(pair(accept_by_key), RETRY_BASE_SECONDS="600", RETRY_CAP_SECONDS="600")
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
    [("hold", "held", 3600.0, LAPSED), ("resend", "sent", 3600.0, "250 ok"), ("hold", "held", None, GONE)],
    ids=["key expired, hold", "key expired, resend", "provider without keys"],
)
async def test_an_email_whose_key_has_expired_is_not_sent_but_judged_by_policy(
    bench: Bench, policy: str, status: str, key_seconds: float | None, detail: str
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
    assert first.accepted == ({email_id: 1} if status == "sent" else {})
    assert bench.books.row(email_id)["last_error"] == detail


async def test_a_pinned_email_waits_while_its_provider_is_paused(bench: Bench) -> None:
    first, second = pair(NO_ANSWER, answer(Deferred(Reason.THROTTLED, "slow down", "429", 1.5)))
    await bench.start([first, second])

    await bench.enqueue()

    await until(lambda: len(first.calls) >= 2)
    await until(lambda: bench.books.statuses() == {"pending": 1})
    assert second.calls == []
