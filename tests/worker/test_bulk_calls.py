"""A worker with real tables, queues and ledger makes bulk calls to a SendGrid double."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import cast
from uuid import UUID

import pytest

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault
from dispatcher.domain.outcome import Accepted, Outcome, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, Provider
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.providers.sendgrid_place import SendGridPlace, sendgrid_place
from tests.waiting import until
from tests.worker.bench import Bench, Worker
from tests.worker.scripted import ScriptedBulk, ScriptedProvider

COUNT = 100


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[SendGridPlace]:
    """The sendgrid adapter and a SendGrid double."""
    async with sendgrid_place(tmp_path / "double", Behaviour()) as opened:
        yield opened


@pytest.fixture
def provider(place: SendGridPlace) -> Provider:
    """The provider that the workers use: bulk calls to the double."""
    return with_bulk_calls(place.provider, COUNT)


def a_hundred(bench: Bench) -> list[UUID]:
    """Enqueues a hundred emails with one template, each to a different recipient."""
    return [
        bench.books.enqueue_one(
            to=f"customer-{number}@example.com", text=None, subject="", template_id="d-1", template_data={"n": number}
        )
        for number in range(COUNT)
    ]


def arrived(place: SendGridPlace) -> dict[UUID, int]:
    """The number of times that each email arrived, from the double's record."""
    return {UUID(email_id): times for email_id, times in place.times().items()}


def calls(place: SendGridPlace) -> int:
    return sum(place.double.begun.values())


async def test_emails_of_one_lease_batch_are_sent_in_bulk_calls_with_separate_attempts(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    email_ids = a_hundred(bench)
    await bench.deliver(email_ids)
    await bench.start([provider])

    await bench.settled({"sent": COUNT})

    assert arrived(place) == dict.fromkeys(email_ids, 1)
    assert calls(place) < COUNT / 3
    assert all(bench.books.outcomes(email_id) == ["accepted"] for email_id in email_ids)
    assert bench.books.hourly() == {"accepted": COUNT}
    await bench.nothing_left_on_the_queue()


async def test_a_culprit_fails_alone_and_uses_no_other_emails_attempt(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    place.double.behaviour.culprits = {"customer-37@example.com": "Does not contain a valid address."}
    email_ids = a_hundred(bench)
    await bench.deliver(email_ids)
    worker = await bench.start([provider])

    await bench.settled({"sent": COUNT - 1, "failed": 1})

    culprit = email_ids[37]
    assert bench.books.outcomes(culprit) == ["rejected"]
    assert arrived(place) == {email_id: 1 for email_id in email_ids if email_id != culprit}
    assert {row["attempt_count"] for row in bench.books.rows()} == {1}
    await until(lambda: worker.in_flight == 0)
    await bench.nothing_left_on_the_queue()


async def test_a_lost_answer_holds_only_the_emails_of_that_call(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    place.double.behaviour.fault, place.double.behaviour.times = Fault.CLOSE, 1
    email_ids = a_hundred(bench)
    await bench.deliver(email_ids)
    await bench.start([provider])

    await until(lambda: bench.books.statuses()["sent"] + bench.books.statuses()["held"] == COUNT)

    (first, *_) = place.double.received
    lost = {UUID(one["custom_args"]["email_id"]) for one in first["personalizations"]}
    assert {row["email_id"] for row in bench.books.rows() if row["status"] == "held"} == lost
    assert arrived(place) == dict.fromkeys(email_ids, 1)
    await bench.nothing_left_on_the_queue()


async def test_429_releases_all_emails_of_the_call_without_using_an_attempt(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    place.double.behaviour.throttle(3600)
    email_ids = a_hundred(bench)
    await bench.deliver(email_ids)
    worker = await bench.start([provider])

    await until(lambda: calls(place) > 0)
    await bench.settled({"pending": COUNT})

    await worker.stop()  # until then, a late lease statement may still commit
    assert bench.books.statuses() == {"pending": COUNT}
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}
    assert not arrived(place)


async def test_a_failed_bulk_call_counts_as_one_failure_of_the_provider(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    place.double.behaviour.fault, place.double.behaviour.times = sendgrid_error(503, "not now"), 3
    email_ids = a_hundred(bench)
    await bench.deliver(email_ids)
    await bench.start([provider])

    await bench.settled({"sent": COUNT})

    states = {row["state"] for row in bench.books.select("select state from provider_state")}
    assert states == {"closed"}
    burnt = {UUID(email_id): times for email_id, times in place.double.requests.items()}
    assert {row["email_id"]: row["attempt_count"] for row in bench.books.rows()} == burnt
    assert arrived(place) == dict.fromkeys(email_ids, 1)


async def drained_on_the_wire(bench: Bench, provider: Provider) -> Worker:
    """Drains a worker while a hundred emails are in bulk calls; returns the stopped worker."""
    await bench.deliver(a_hundred(bench))
    worker = await bench.start([provider])
    await until(lambda: worker.in_flight > 1)
    worker.begin_to_stop()
    await asyncio.wait_for(worker.task, 20)
    return worker


async def test_a_drain_waits_for_bulk_calls_on_the_wire(bench: Bench, place: SendGridPlace, provider: Provider) -> None:
    place.double.behaviour.latency_seconds = 0.5

    worker = await drained_on_the_wire(bench, provider)

    statuses = bench.books.statuses()
    assert statuses["sent"] > 1
    assert statuses["sent"] + statuses["pending"] == COUNT
    assert arrived(place) == {row["email_id"]: 1 for row in bench.books.rows() if row["status"] == "sent"}
    assert not worker.ledger.exists()


async def test_a_drain_waits_for_the_smaller_calls_after_a_refused_bulk_call(
    bench: Bench, place: SendGridPlace, provider: Provider
) -> None:
    place.double.behaviour.latency_seconds = 0.2
    place.double.behaviour.fault = sendgrid_error(400, "The template is not active.", field="template_id")

    worker = await drained_on_the_wire(bench, provider)

    statuses = bench.books.statuses()
    assert statuses["failed"] > 1
    assert statuses["failed"] + statuses["pending"] == COUNT
    assert not worker.ledger.exists()


class RefusesWholeCalls(ScriptedBulk):
    """Refuses every bulk call as a whole, after `let_go`."""

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        attempt.mark_on_wire()
        await self.wait(parts[0].content.email_id)
        return BulkCallRefused()


async def test_an_email_that_a_drain_has_concluded_is_not_sent_again_when_its_call_is_refused_late(
    bench: Bench,
) -> None:
    refusing = RefusesWholeCalls()
    refusing.always = _send_without_an_answer
    worker = await bench.start([with_bulk_calls(refusing, COUNT)], DRAIN_SECONDS="0.1")
    await bench.enqueue(10)
    await until(lambda: refusing.waiting and worker.in_flight == 10)
    worker.begin_to_stop()
    await bench.settled({"held": 10})

    refusing.let_go()
    await asyncio.wait_for(worker.task, 20)

    assert refusing.accepted == {}
    assert bench.books.statuses() == {"held": 10}


async def test_emails_of_a_refused_call_are_released_if_the_worker_stops_then(
    bench: Bench,
) -> None:
    refusing = RefusesWholeCalls()
    refusing.always = _never_send
    worker = await bench.start([with_bulk_calls(refusing, COUNT)])
    await bench.enqueue(20)
    await until(lambda: refusing.waiting and worker.in_flight > 1)

    refusing.let_go()
    await until(lambda: len(refusing.calls) == 20)
    in_flight = worker.in_flight
    await worker.stop()

    assert in_flight == 0
    assert bench.books.statuses() == {"pending": 20}
    assert {row["attempt_count"] for row in bench.books.rows()} == {0}


async def _never_send(_provider: ScriptedProvider, _email: OutgoingEmail, _attempt: Attempt) -> Outcome:
    await asyncio.Event().wait()
    return Rejected(Reason.REFUSED)


async def _send_without_an_answer(_provider: ScriptedProvider, _email: OutgoingEmail, attempt: Attempt) -> Outcome:
    attempt.mark_on_wire()
    await asyncio.Event().wait()
    return Rejected(Reason.REFUSED)


class FailsToRenderOne(ScriptedBulk):
    """Accepts bulk calls, but a bug makes it fail to render one email."""

    def __init__(self) -> None:
        super().__init__()
        self.stumbling_block: UUID | None = None

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        if email.email_id == self.stumbling_block:
            raise KeyError("a mistake")
        return super().bulk_entry_of(email)


async def test_an_adapter_bug_about_one_email_does_not_affect_the_others(bench: Bench) -> None:
    tripping = FailsToRenderOne()
    email_ids = [bench.books.enqueue_one() for _ in range(20)]
    tripping.stumbling_block = email_ids[7]
    await bench.deliver(email_ids)
    await bench.start([with_bulk_calls(tripping, COUNT)], MAX_ATTEMPTS="1")

    await bench.settled({"sent": 19, "failed": 1})

    assert bench.books.outcomes(email_ids[7]) == ["deferred"]
    assert tripping.accepted == {email_id: 1 for email_id in email_ids if email_id != email_ids[7]}


class AnswersInvalidly(ScriptedBulk):
    """Accepts bulk calls, but returns an invalid outcome for one email."""

    def __init__(self) -> None:
        super().__init__()
        self.odd: UUID | None = None

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome]:
        attempt.mark_on_wire()
        email_ids = [part.content.email_id for part in parts]
        taken = [self.accept(email_id) for email_id in email_ids]
        return [
            Accepted(cast(str, 42)) if email_id == self.odd else each
            for email_id, each in zip(email_ids, taken, strict=True)
        ]


async def test_an_invalid_acceptance_holds_only_its_own_email(bench: Bench) -> None:
    odd = AnswersInvalidly()
    email_ids = [bench.books.enqueue_one() for _ in range(20)]
    odd.odd = email_ids[7]
    await bench.deliver(email_ids)
    worker = await bench.start([with_bulk_calls(odd, COUNT)])

    await bench.settled({"sent": 19, "held": 1})

    assert bench.books.outcomes(email_ids[7]) == ["uncertain"]
    await until(lambda: worker.in_flight == 0)
