"""A stopping worker releases unsent emails, waits for the answers to emails on the wire, and loses no email."""

from __future__ import annotations

import asyncio

from dispatcher.broker.connection import CONNECT_SECONDS
from dispatcher.worker.process import CANCEL_SECONDS
from tests.waiting import until
from tests.worker.bench import Bench
from tests.worker.scripted import accept_when_let_go, leave_when_let_go


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
