"""A stopping worker releases unsent emails, waits for the answers to emails on the wire, and loses no email."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from dispatcher.broker.connection import CONNECT_SECONDS
from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt
from dispatcher.worker.process import CANCEL_SECONDS
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import (
    ScriptedProvider,
    accept_and_never_answer,
    accept_when_let_go,
    answer,
    leave_when_let_go,
)


async def test_unsent_emails_are_released_and_due_and_use_no_attempt(bench: Bench) -> None:
    worker, email_ids = await bench.begin(5, leave_when_let_go)

    await worker.stop()

    assert bench.provider.accepted == {}
    for email_id in email_ids:
        row = bench.books.row(email_id)
        assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
        assert row["publish_due_at"] is not None
    assert not worker.ledger.exists()
    await bench.nothing_left_on_the_queue()


async def test_unsent_emails_are_not_sent_while_a_drain_waits_for_a_lease(bench: Bench) -> None:
    worker, _ = await bench.begin(1, leave_when_let_go)
    (locked_id,) = bench.books.enqueue(1)
    with bench.locked(locked_id):
        await bench.deliver([locked_id])
        await bench.blocked(worker)

        worker.begin_to_stop()
        await until(lambda: not bench.provider.waiting)

        assert bench.books.waiting_for_a_lock(worker.name)
    await asyncio.wait_for(worker.task, 20)
    assert bench.provider.accepted == {}


async def test_a_drain_records_emails_on_the_wire_and_leaves_all_other_messages_with_the_broker(bench: Bench) -> None:
    bench.provider.always = accept_when_let_go
    worker = await bench.start(PREFETCH="2")
    email_ids = await bench.enqueue(6)
    await until(lambda: len(bench.provider.waiting) == 2 and worker.process_slot.is_up)

    worker.begin_to_stop()
    await bench.enqueue(3)
    bench.provider.let_go()
    await asyncio.wait_for(worker.task, 20)

    assert bench.books.statuses() == {"sent": 2, "pending": 7}
    assert set(bench.provider.accepted) < set(email_ids)
    assert not worker.ledger.exists()
    await bench.rabbit.take_all(bench.topology.queue, 7)


async def test_an_email_without_an_answer_in_time_is_uncertain(bench: Bench) -> None:
    bench.provider.always = accept_and_never_answer
    worker = await bench.start(DRAIN_SECONDS="0.2")
    hold, resend = bench.books.enqueue(1) + bench.books.enqueue(1, on_uncertain="resend")
    await bench.deliver([hold, resend])
    await until(lambda: len(bench.provider.accepted) == 2)

    await worker.stop()

    assert [bench.books.status(each) for each in (hold, resend)] == ["held", "pending"]
    assert bench.books.outcomes(hold) == ["uncertain"]
    assert bench.books.row(hold)["dead_letter_due_at"] is not None
    assert not worker.ledger.exists()
    await bench.nothing_left_on_the_queue()


async def test_an_email_that_waits_for_a_retry_is_released_without_using_the_next_attempt(bench: Bench) -> None:
    bench.provider.always = answer(Deferred(Reason.REFUSED, retry_after=50.0))
    worker = await bench.start(RETRY_CAP_SECONDS="60")
    (email_id,) = await bench.enqueue()
    await until(lambda: bench.books.outcomes(email_id) == ["deferred"])

    await worker.stop()

    row = bench.books.row(email_id)
    assert (row["status"], row["attempt_count"]) == ("pending", 1)
    # The email is due when its wait would have ended, so a restart makes no attempt earlier.
    assert 30 < (row["publish_due_at"] - datetime.now(UTC)).total_seconds() < 60
    await bench.nothing_left_on_the_queue()


@pytest.mark.parametrize("reason", [Reason.REFUSED, Reason.THROTTLED])
async def test_an_adapter_that_answers_after_the_drain_timed_out_does_not_stop_the_drain(
    bench: Bench, reason: Reason
) -> None:
    slow, other = bench.books.enqueue(2)
    heard: list[bool] = []

    async def slow_to_stop(provider: ScriptedProvider, email: OutgoingEmail, attempt: Attempt) -> Outcome:
        try:
            await provider.wait(email.email_id)
        except asyncio.CancelledError:
            await until(lambda: bench.books.status(slow) == "pending")
            heard.append(True)
        return Deferred(reason, "given up")

    bench.provider.script[slow].append(slow_to_stop)
    bench.provider.always = accept_when_let_go
    worker = await bench.start(DRAIN_SECONDS="0.1")
    await bench.deliver([slow, other])
    await until(lambda: bench.provider.waiting == {slow, other})
    with bench.locked(other):  # the drain waits for this lock, so the adapter ends first
        worker.begin_to_stop()
        await until(lambda: heard)
        await asyncio.wait({worker.task}, timeout=0.1)
    await asyncio.wait_for(worker.task, 20)

    row = bench.books.row(slow)
    assert (row["status"], row["attempt_count"], row["publish_due_at"] is None) == ("pending", 0, False)
    assert bench.books.outcomes(slow) == []
    assert bench.books.status(other) == "held"
    assert not worker.ledger.exists()


async def test_a_rabbitmq_that_accepts_connections_and_never_answers_does_not_delay_the_stop(bench: Bench) -> None:
    connected = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        worker = await bench.start(AMQP_URL=f"amqp://guest:guest@127.0.0.1:{port}/")
        await asyncio.wait_for(connected.wait(), 10)

        worker.begin_to_stop()

        # The worker stops in far less time than the connect timeout.
        await asyncio.wait_for(worker.task, CONNECT_SECONDS - CANCEL_SECONDS)
