"""If PostgreSQL or RabbitMQ fails at the worst moment, no email is lost, sent twice, or held needlessly.

To make a failure happen at a given moment, a test locks a row. PostgreSQL then waits in the middle of a statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg
import pytest

from dispatcher.broker.connection import CONNECT_SECONDS
from dispatcher.dev.servers import Servers
from dispatcher.domain.outcome import Deferred, Reason, Rejected
from dispatcher.worker.process import CANCEL_SECONDS, POOL_SIZE
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator
from tests.store.books import frozen_sessions
from tests.store.damage import constraint
from tests.waiting import until, until_answer
from tests.worker.bench import Bench, Worker
from tests.worker.scripted import accept, accept_when_let_go, answer


@pytest.mark.parametrize("is_ended", [True, False], ids=["sessions ended during the record", "reply lost"])
async def test_an_acceptance_is_recorded_once_despite_an_outage(bench: Bench, postgres: Proxy, is_ended: bool) -> None:
    worker, email_ids = await bench.begin(4, DATABASE_URL=postgres.url)
    with bench.books.locked(email_ids[-1]):
        bench.provider.let_go()
        await bench.blocked(worker)
        if is_ended:
            bench.books.terminate(worker.name)
            await until(lambda: not bench.books.waiting_for_a_lock(worker.name))
            assert bench.books.statuses() == {"sending": 4}
        else:
            postgres.freeze()
            postgres.cut()
    await bench.settled({"sent": 4})  # if the reply is lost, PostgreSQL completes the statement
    postgres.thaw()

    await until(lambda: worker.in_flight == 0)
    assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
    assert [bench.books.outcomes(email_id) for email_id in email_ids] == [["accepted"]] * 4
    assert bench.books.hourly() == {"accepted": 4}
    await bench.nothing_left_on_the_queue()


@contextmanager
def locked_email(bench: Bench) -> Iterator[tuple[UUID, psycopg.Connection]]:
    email_id = bench.books.enqueue_one()
    with bench.books.locked(email_id) as person:
        yield email_id, person


async def interrupt_lease(bench: Bench, postgres: Proxy, worker: Worker, email_id: UUID) -> None:
    """Cuts the worker's connection during a lease statement, which PostgreSQL completes later."""
    await bench.deliver([email_id])
    await bench.blocked(worker)
    postgres.freeze()
    postgres.cut()


@pytest.mark.parametrize("is_late", [False, True], ids=["before the worker reconnects", "after it has reconnected"])
async def test_an_interrupted_lease_is_released_and_taken_again(bench: Bench, postgres: Proxy, is_late: bool) -> None:
    worker = await bench.start(DATABASE_URL=postgres.url)
    with locked_email(bench) as (email_id, _):
        await interrupt_lease(bench, postgres, worker, email_id)
        if is_late:
            postgres.thaw()
            # The interrupted statement and the worker's next statement both wait for the row lock.
            sessions = bench.books.sessions
            await until(lambda: [each["wait_event_type"] for each in sessions(worker.name)].count("Lock") == 2)
    if not is_late:
        await bench.settled({"sending": 1})
        postgres.thaw()

    await bench.settled({"sent": 1})
    row = bench.books.row(email_id)
    assert (row["attempt_count"], is_late or row["lease_token"] == 2) == (1, True)
    await bench.each_is_sent_once([email_id])


async def test_a_worker_that_stops_during_an_interrupted_lease_leaves_no_lease(bench: Bench, postgres: Proxy) -> None:
    worker = await bench.start(DATABASE_URL=postgres.url)
    with locked_email(bench) as (email_id, _):
        await interrupt_lease(bench, postgres, worker, email_id)
    await bench.settled({"sending": 1})
    worker.begin_to_stop()
    await asyncio.wait({worker.task}, timeout=0.3)
    postgres.thaw()
    await asyncio.wait_for(worker.task, 20)

    row = bench.books.row(email_id)
    assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
    # The email's message was never acked, so another worker will lease the email.
    await bench.rabbit.take_all(bench.topology.queue, 1)


async def test_a_lease_committed_after_the_workers_exit_is_left_to_the_relay(bench: Bench, postgres: Proxy) -> None:
    worker = await bench.start(DATABASE_URL=postgres.url)
    with locked_email(bench) as (email_id, person):
        await interrupt_lease(bench, postgres, worker, email_id)
        with frozen_sessions(bench.books, worker.name):
            person.rollback()
            postgres.thaw()
            await worker.stop()
            assert bench.books.status(email_id) == "pending"
    await bench.settled({"sending": 1})  # the thawed session has committed the lease

    # The relay releases a dead worker's leases that are not in its ledger (see tests/recovery/test_dead_worker.py).
    assert worker.ledger.exists()
    assert worker.in_flight == 0


async def test_the_worker_waits_for_a_read_only_server(bench: Bench) -> None:
    worker, (email_id,) = await bench.begin()
    name = bench.books.connection.info.dbname
    bench.books.connection.execute(f"alter database {name} set default_transaction_read_only = on".encode())
    try:
        bench.books.terminate(worker.name)
        bench.provider.let_go()
        sessions: set[int] = set()

        def has_tried_three_times() -> bool:
            # Each try closes one of the worker's three sessions, because a read-only session never recovers.
            sessions.update(each["pid"] for each in bench.books.sessions(worker.name))
            return len(sessions) >= POOL_SIZE + 3

        await until(has_tried_three_times)
        assert not worker.task.done()
        assert bench.books.status(email_id) == "sending"
    finally:
        bench.books.connection.execute(f"alter database {name} reset default_transaction_read_only".encode())

    await bench.settled({"sent": 1})
    assert bench.provider.accepted == {email_id: 1}


async def test_a_refused_result_loses_the_providers_text_and_does_not_affect_the_others(bench: Bench) -> None:
    bench.provider.always = answer(Rejected(Reason.REFUSED, "unspeakable"))
    with constraint(bench.books.connection, "error is distinct from 'unspeakable'"):
        await bench.start()
        email_ids = bench.books.enqueue(5)
        bench.provider.script[email_ids[0]].append(accept)
        bench.provider.script[email_ids[4]].append(accept)
        await bench.deliver(email_ids)

        await bench.settled({"sent": 2, "failed": 3})
        assert bench.books.row(email_ids[1])["last_error"] is None
        assert bench.books.row(email_ids[1])["error_type"] == "refused"
        await bench.nothing_left_on_the_queue()


async def test_a_result_that_is_always_refused_keeps_its_lease_until_its_end_and_delays_nothing(bench: Bench) -> None:
    bench.provider.always = answer(Rejected(Reason.REFUSED))
    expired = "select from email_log where status = 'sending' and locked_until < clock_timestamp()"
    with constraint(bench.books.connection, "outcome <> 'rejected'"):
        worker = await bench.start(LEASE_SECONDS="4")
        refused, fine = bench.books.enqueue(2)
        bench.provider.script[fine].append(accept)
        await bench.deliver([refused, fine])

        await until(lambda: bench.books.status(fine) == "sent")
        await until(lambda: bench.books.select(expired))
        assert bench.books.status(refused) == "sending"
        assert not worker.task.done()
        # When the process exits, the ledger still has the email, so that recovery can settle it.
        await worker.stop()
        assert worker.in_flight == 1


@pytest.mark.parametrize("is_forced", [False, True], ids=["a bundle, cut", "messages, closed by force"])
async def test_without_rabbitmq_emails_on_the_wire_are_sent_once_and_their_redelivered_messages_are_acked(
    bench: Bench, broker: Proxy, servers: Servers, is_forced: bool
) -> None:
    worker, _ = await bench.begin(0, AMQP_URL=broker.url)
    email_ids = bench.books.enqueue(5)
    await (bench.deliver if is_forced else bench.deliver_together)(email_ids)
    await until(lambda: len(bench.provider.waiting) == 5)
    connections = broker.connections

    if is_forced:
        operator = Operator(servers.management_url)
        await until_answer(lambda: asyncio.to_thread(operator.close_connection, worker.connection_name))
    else:
        broker.cut()
    await until(lambda: broker.connections > connections)
    neighbour = bench.books.enqueue_one()
    await bench.deliver([neighbour])
    await until(lambda: neighbour in bench.provider.waiting)
    bench.provider.let_go()

    await bench.each_is_sent_once([*email_ids, neighbour])


async def test_without_rabbitmq_retries_continue_and_unleased_messages_return(bench: Bench, broker: Proxy) -> None:
    retried, *_ = email_ids = bench.books.enqueue(9)
    bench.provider.script[retried].append(answer(Deferred(Reason.REFUSED, retry_after=0.3)))
    bench.provider.script[retried].append(accept)
    bench.provider.always = accept_when_let_go
    await bench.start(AMQP_URL=broker.url, PREFETCH="3", RETRY_CAP_SECONDS="1")
    await bench.deliver(email_ids)
    await until(lambda: len(bench.provider.waiting) == 3 and bench.books.outcomes(retried) == ["deferred"])

    broker.freeze()
    broker.cut()
    await until(lambda: bench.books.status(retried) == "sent")
    broker.thaw()
    bench.provider.let_go()

    await bench.each_is_sent_once(email_ids)


async def test_a_worker_reports_how_long_it_has_waited_for_a_commit(bench: Bench, tables_url: str) -> None:
    email_ids = bench.books.enqueue(2)
    await bench.deliver(email_ids)
    with psycopg.connect(tables_url) as person:
        person.execute("lock table email_log in share mode")
        worker = await bench.start(lock_seconds=0.1)

        await until(lambda: (worker.process_slot.commit.seconds or 0) > 0.5)

    await bench.settled({"sent": 2})
    await until(lambda: worker.process_slot.commit.seconds is None)


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
