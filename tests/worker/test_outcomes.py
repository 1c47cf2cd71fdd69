"""Tests what happens to an email after each outcome of its attempt."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.contract import Attempt
from dispatcher.routing.breaker import FIRST_OPEN_SECONDS
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept, answer, fail

DEFERRED = Deferred(Reason.REFUSED, "not now", "451 4.7.1")


async def test_accepted_is_sent_recorded_and_acked(bench: Bench) -> None:
    worker = await bench.start()
    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})

    row = bench.books.row(email_id)
    assert (row["provider"], row["provider_message_id"], row["attempt_count"]) == ("scripted", f"<{email_id}>", 1)
    (attempt,) = bench.books.attempts(email_id)
    assert (attempt["outcome"], attempt["worker"], attempt["attempt_number"]) == ("accepted", worker.name, 1)
    assert attempt["started_at"] <= attempt["finished_at"]
    assert bench.books.hourly() == {"accepted": 1}
    await until(lambda: worker.in_flight == 0)
    await bench.nothing_left_on_the_queue()
    assert not worker.ledger.exists()


async def test_hundreds_of_emails_are_sent_once_each_and_never_more_at_once_than_the_window(bench: Bench) -> None:
    await bench.start(PREFETCH="20")
    email_ids = await bench.enqueue(600)

    await bench.settled({"sent": 600})

    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert bench.provider.most_at_once <= 20
    assert bench.books.hourly() == {"accepted": 600}
    await bench.nothing_left_on_the_queue()


async def test_a_deferred_email_is_retried_under_the_same_lease(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.provider.script[email_id].extend([answer(DEFERRED), answer(DEFERRED)])
    await bench.start()
    await bench.deliver([email_id])

    await bench.settled({"sent": 1})

    assert bench.books.outcomes(email_id) == ["deferred", "deferred", "accepted"]
    assert [attempt["attempt_number"] for attempt in bench.books.attempts(email_id)] == [1, 2, 3]
    row = bench.books.row(email_id)
    assert (row["lease_token"], row["attempt_count"], row["error_type"]) == (1, 3, None)
    await bench.nothing_left_on_the_queue()


async def test_an_email_without_attempts_left_fails_with_the_last_error(bench: Bench) -> None:
    bench.provider.always = answer(DEFERRED)
    await bench.start(MAX_ATTEMPTS="3")
    (email_id,) = await bench.enqueue()

    await bench.settled({"failed": 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], row["last_error"], row["attempt_count"]) == ("refused", "not now", 3)
    assert row["dead_letter_due_at"] is not None
    assert bench.books.outcomes(email_id) == ["deferred"] * 3
    assert len(bench.provider.calls) == 3
    await bench.nothing_left_on_the_queue()


async def test_a_deferral_with_a_wait_beyond_the_limit_fails_the_email_at_once(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=3600.0))
    await bench.start()
    await bench.enqueue()

    await bench.settled({"failed": 1})

    assert len(bench.provider.calls) == 1


async def test_a_rejection_fails_the_email_at_once(bench: Bench) -> None:
    bench.provider.always = answer(Rejected(Reason.REJECTED_RECIPIENT, "no such user", "550 5.1.1"))
    await bench.start()
    (email_id,) = await bench.enqueue()

    await bench.settled({"failed": 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], row["last_error"]) == ("rejected_recipient", "no such user")
    assert row["dead_letter_due_at"] is not None
    assert bench.books.attempts(email_id)[0]["provider_code"] == "550 5.1.1"
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize(
    ("own", "hosts", "status"),
    [(None, "hold", "held"), (None, "resend", "pending"), ("hold", "resend", "held"), ("resend", "hold", "pending")],
)
async def test_an_email_without_an_answer_is_held_or_sent_again_by_policy(
    bench: Bench, own: str | None, hosts: str, status: str
) -> None:
    bench.provider.always = answer(Uncertain("no answer"))
    await bench.start(ON_UNCERTAIN=hosts)
    (email_id,) = await bench.enqueue(on_uncertain=own)

    await until(lambda: bench.books.outcomes(email_id) == ["uncertain"])

    row = bench.books.row(email_id)
    assert row["status"] == status
    assert (row["error_type"], row["dead_letter_due_at"] is None) == ("outcome_unknown", status == "pending")
    assert (row["publish_due_at"] is None) == (status == "held")
    assert len(bench.provider.calls) == 1
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("error", [ValueError("ann@example.org"), TimeoutError(), asyncio.CancelledError()], ids=repr)
async def test_an_adapter_that_fails_before_sending_uses_one_attempt(bench: Bench, error: BaseException) -> None:
    first, neighbour = bench.books.enqueue(2)
    bench.provider.script[first].append(fail(error, after_leaving=False))
    await bench.start()
    await bench.deliver([first, neighbour])

    await bench.settled({"sent": 2})

    assert bench.books.outcomes(first) == ["deferred", "accepted"]
    attempt = bench.books.attempts(first)[0]
    assert attempt["error_type"] == "internal_error"
    assert "example.org" not in attempt["error"]


@pytest.mark.parametrize("error", [ValueError("ann@example.org"), TimeoutError(), asyncio.CancelledError()], ids=repr)
async def test_an_email_whose_adapter_fails_after_sending_is_uncertain(bench: Bench, error: BaseException) -> None:
    bench.provider.always = fail(error, after_leaving=True)
    await bench.start()
    (email_id,) = await bench.enqueue()

    await bench.settled({"held": 1})

    assert bench.books.outcomes(email_id) == ["uncertain"]
    assert len(bench.provider.calls) == 1
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("reason", [Reason.REFUSED, Reason.THROTTLED, Reason.SERVER_ERROR])
@pytest.mark.parametrize("has_left", [False, True])
async def test_an_invalid_outcome_does_not_keep_its_email_forever(bench: Bench, reason: Reason, has_left: bool) -> None:
    async def err(_provider: ScriptedProvider, _email: OutgoingEmail, attempt: Attempt) -> Outcome:
        if has_left:
            attempt.mark_on_wire()
        return Deferred(reason, "later", "4", retry_after="soon")  # type: ignore[arg-type]

    strange, neighbour = bench.books.enqueue(2)
    bench.provider.script[strange].append(err)
    worker = await bench.start(ON_UNCERTAIN="resend")
    await bench.deliver([strange, neighbour])

    await until(lambda: bench.books.outcomes(strange))
    await until(lambda: bench.books.status(neighbour) == "sent" and worker.in_flight == 0)
    # An email on the wire is sent again by policy; an unsent email is retried under its lease.
    await until(lambda: bench.books.status(strange) == ("pending" if has_left else "sent"))
    assert bench.books.outcomes(strange) == (["uncertain"] if has_left else ["deferred", "accepted"])
    assert bench.books.attempts(strange)[0]["error_type"] == ("outcome_unknown" if has_left else "internal_error")


async def test_content_that_was_deleted_fails_the_email_without_a_call(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.books.connection.execute("delete from email_content")
    await bench.start()
    await bench.deliver([email_id])

    await bench.settled({"failed": 1})

    row = bench.books.row(email_id)
    assert (row["error_type"], row["provider"]) == ("content_deleted", "none")
    assert bench.provider.calls == []


@pytest.mark.parametrize(
    "outcome",
    [
        Rejected(Reason.INVALID_CONTENT, "a NUL \0 and half a pair \ud83e here", "5\0\udc80"),
        Accepted("id \0 \udfff", "words \0 \ud800"),
    ],
    ids=["rejected", "accepted"],
)
async def test_provider_text_that_the_database_cannot_store_does_not_stop_the_worker(
    bench: Bench, outcome: Outcome
) -> None:
    strange, neighbour = bench.books.enqueue(2)
    bench.provider.script[strange].append(answer(outcome))
    await bench.start()
    await bench.deliver([strange, neighbour])

    wanted = "sent" if isinstance(outcome, Accepted) else "failed"
    await until(lambda: (bench.books.status(strange), bench.books.status(neighbour)) == (wanted, "sent"))

    assert bench.books.row(strange)["last_error"]
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("after_leaving", [False, True])
async def test_a_provider_fault_uses_no_attempt_and_pauses_until_the_provider_works(
    bench: Bench, after_leaving: bool
) -> None:
    email_ids = bench.books.enqueue(3)
    bench.provider.always = fail(ProviderFault("scripted", "bad credentials"), after_leaving=after_leaving)
    worker = await bench.start()
    began_at = asyncio.get_running_loop().time()
    await bench.deliver(email_ids[:1])
    await until(lambda: bench.books.row(email_ids[0])["lease_token"] == 1 and bench.books.statuses() == {"pending": 3})

    row = bench.books.row(email_ids[0])
    assert (row["attempt_count"], row["error_type"], row["publish_due_at"] is None) == (0, None, False)
    assert bench.books.attempts(email_ids[0]) == []
    assert worker.in_flight == 0
    assert len(bench.provider.calls) == 1
    bench.provider.always = accept
    await bench.deliver(email_ids)
    took = asyncio.get_running_loop().time() - began_at
    assert len(bench.provider.calls) == 1 or took > FIRST_OPEN_SECONDS / 2, "it was called within the shortest pause"

    await bench.settled({"sent": 3})
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    await bench.nothing_left_on_the_queue()


async def test_after_a_definite_refusal_the_next_provider_is_tried_within_the_same_attempt(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = answer(Deferred(Reason.THROTTLED, "slow down", "429", 0.1))
    worker = await bench.start([first, second])
    (email_id,) = await bench.enqueue()

    await bench.settled({"sent": 1})

    (attempt,) = bench.books.attempts(email_id)
    assert (attempt["provider"], attempt["attempt_number"]) == ("second", 1)
    assert second.accepted[email_id] == 1
    await until(lambda: worker.in_flight == 0)


async def test_an_email_without_an_answer_never_goes_to_the_next_provider(bench: Bench) -> None:
    first, second = ScriptedProvider("first"), ScriptedProvider("second")
    first.always = answer(Uncertain("no answer"))
    await bench.start([first, second])
    await bench.enqueue(3)

    await bench.settled({"held": 3})

    assert second.calls == []


async def test_a_provider_that_never_answers_is_paused_before_the_whole_queue_is_held(bench: Bench) -> None:
    bench.provider.always = answer(Uncertain("no answer"))
    await bench.start(PREFETCH="5")
    await bench.enqueue(100)

    await until(lambda: bench.books.select("select from provider_state where state = 'open'"))

    assert bench.books.statuses()["held"] <= 20


async def test_after_a_replay_attempts_are_counted_from_zero_and_the_history_is_kept(bench: Bench) -> None:
    (email_id,) = bench.books.enqueue(1)
    bench.books.change(email_id, attempt_count=3, attempt_base=3)
    bench.provider.always = answer(Deferred(Reason.SERVER_ERROR, "later"))

    await bench.start(MAX_ATTEMPTS="2")
    await bench.deliver([email_id])

    await bench.settled({"failed": 1})
    assert [attempt["attempt_number"] for attempt in bench.books.attempts(email_id)] == [4, 5]


async def test_the_lanes_maximum_of_attempts_goes_before_the_hosts(bench: Bench) -> None:
    bench.books.connection.execute("insert into lane_policy (lane, weight, max_attempts) values ('urgent', 50, 2)")
    bench.provider.always = answer(DEFERRED)
    await bench.start(MAX_ATTEMPTS="4")
    urgent, normal = bench.books.enqueue(1, lane="urgent"), bench.books.enqueue(1)
    await bench.deliver([*urgent, *normal])

    await bench.settled({"failed": 2})

    assert [bench.books.row(each)["attempt_count"] for each in (*urgent, *normal)] == [2, 4]
