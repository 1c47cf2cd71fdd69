"""A worker makes bulk calls, and sends emails on idle connections without a task: with real tables, queues and ledger
to a SendGrid double, and with scripted faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Fault, Reply
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.status import Status
from dispatcher.providers.contract import Attempt, BulkCallRefused, BulkEntry, Provider
from dispatcher.worker.bulk_calls import with_bulk_calls
from tests.providers.http_places import SendGridPlace
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import Act, ScriptedBulk, ScriptedProvider, accept_and_never_answer, never_leave
from tests.worker.stage_bench import StageBench, run

COUNT = 100


@pytest.mark.parametrize("status", ["sent", "failed"])
async def test_a_drain_waits_for_bulk_calls_and_their_parts(bench: Bench, place: SendGridPlace, status: str) -> None:
    place.double.behaviour.latency_seconds = 0.3
    if status == "failed":
        place.double.behaviour.fault = sendgrid_error(400, "The template is not active.", field="template_id")
    template: dict[str, Any] = {"template_id": "d-1", "text": None, "subject": ""}
    await bench.deliver([bench.books.enqueue_one(to=f"customer-{n}@example.com", **template) for n in range(COUNT)])
    worker = await bench.start([with_bulk_calls(place.provider, COUNT)])
    await until(lambda: worker.in_flight > 1)

    await worker.stop()

    statuses = bench.books.statuses()
    assert statuses[status] > 1
    assert statuses[status] + statuses["pending"] == COUNT
    sent = {str(row["email_id"]): 1 for row in bench.books.rows() if row["status"] == "sent"}
    assert place.times() == sent
    assert not worker.ledger.exists()


async def warm(bench: Bench, *providers: Provider) -> None:
    """Starts a worker, and sends one email. Now a connection is idle, and the worker knows who is suppressed."""
    worker = await bench.start(providers)
    await bench.enqueue()
    await bench.settled({"sent": 1})
    await until(lambda: worker.in_flight == 0)


@pytest.mark.parametrize(
    ("fault", "outcomes", "others"),
    [
        (Fault.CLOSE, ["uncertain"], 0),
        (Reply(503), ["deferred", "accepted"], 0),
        (Reply(401, b"{}"), ["accepted"], 1),
    ],
    ids=["lost answer", "deferred", "refused key"],
)
async def test_an_email_that_is_not_accepted_on_an_idle_connection_is_handled_as_if_it_had_a_task(
    bench: Bench, place: SendGridPlace, fault: Fault | Reply, outcomes: list[str], others: int
) -> None:
    other = ScriptedProvider("other")
    await warm(bench, place.provider, *([other] if others else []))
    place.double.behaviour.fault, place.double.behaviour.times = fault, 1

    (email_id,) = await bench.enqueue()

    await until(lambda: bench.books.outcomes(email_id) == outcomes)
    await bench.settled({"sent": 1, "held": 1} if outcomes == ["uncertain"] else {"sent": 2})
    assert place.double.requests[str(email_id)] == len(outcomes)
    assert other.accepted[email_id] == others


class Scripted(ScriptedBulk):
    """Refuses every bulk call as a whole, after `let_go`, if `refuses`; defers all emails of the first call if
    `is_busy`. A bug makes it fail to render one email, or answer it with an invalid outcome."""

    def __init__(self, *, refuses: bool = False, is_busy: bool = False) -> None:
        super().__init__()
        self._is_busy = is_busy
        self.unrendered: UUID | None = None
        self.odd: UUID | None = None
        self._refuses = refuses

    def bulk_entry_of(self, email: OutgoingEmail) -> BulkEntry | None:
        if email.email_id == self.unrendered:
            raise KeyError("a mistake")
        return super().bulk_entry_of(email)

    async def send_bulk(self, parts: Sequence[BulkEntry], attempt: Attempt) -> Sequence[Outcome] | BulkCallRefused:
        if self._refuses:
            attempt.mark_on_wire()
            await self.wait(parts[0].content.email_id)
            return BulkCallRefused()
        if self._is_busy:
            self._is_busy = False
            attempt.mark_on_wire()
            return [Deferred(Reason.SERVER_ERROR, "busy", "503")] * len(parts)
        outcomes = await super().send_bulk(parts, attempt)
        assert not isinstance(outcomes, BulkCallRefused)
        odd = Accepted(cast(str, 42))
        return [odd if p.content.email_id == self.odd else o for p, o in zip(parts, outcomes, strict=True)]


@pytest.mark.parametrize("act", [accept_and_never_answer, never_leave], ids=["late", "before the drain"])
def test_emails_of_a_call_that_is_refused_during_a_drain_are_not_sent_again(act: Act) -> None:
    refusing = Scripted(refuses=True)
    refusing.always = act
    is_late = act is accept_and_never_answer

    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue(20))
        await bench.turns()
        assert (len(refusing.waiting), bench.slots_in_use) == (1, 20)
        if is_late:
            await bench.drain()
            assert bench.statuses() == {Status.HELD: 20}
        refusing.let_go()
        await bench.turns()
        assert (len(refusing.calls), bench.slots_in_use) == (0 if is_late else 20, 0)
        await bench.drain()

    bench = run(scenario, with_bulk_calls(refusing, COUNT), drain_seconds=0.1)

    assert (refusing.accepted, bench.statuses()) == ({}, {Status.HELD if is_late else Status.PENDING: 20})
    assert {row.attempts for row in bench.store.rows.values()} == {1 if is_late else 0}


def test_a_failed_bulk_call_counts_as_one_failure_of_the_provider() -> None:
    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        bench.deliver(*bench.enqueue(64))
        await bench.pass_time()

    with capture_logs() as logs:
        bench = run(scenario, with_bulk_calls(Scripted(is_busy=True), COUNT), prefetch=COUNT)

    assert bench.statuses() == {Status.SENT: 64}
    assert not [each for each in logs if each["event"] == "provider.paused"]


@pytest.mark.parametrize("field", ["unrendered", "odd"])
def test_an_adapter_bug_about_one_email_does_not_affect_the_others(field: str) -> None:
    provider = Scripted()

    async def scenario(bench: StageBench) -> None:
        await bench.turns()
        email_ids = bench.enqueue(20)
        setattr(provider, field, email_ids[7])
        bench.deliver(*email_ids)
        await bench.pass_time()
        assert (len(provider.calls), bench.slots_in_use) == (0, 0)
        ended = Status.FAILED if field == "unrendered" else Status.HELD
        expected = [ended if number == 7 else Status.SENT for number in range(20)]
        assert [bench.store.rows[each].status for each in email_ids] == expected

    run(scenario, with_bulk_calls(provider, COUNT), max_attempts=1)
