"""If PostgreSQL or RabbitMQ fails at the worst moment, no email is lost, sent twice, or held needlessly.

To make a failure happen at a given moment, a test locks a row. PostgreSQL then waits in the middle of a statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from dispatcher.dev.servers import Servers
from dispatcher.domain.outcome import Deferred, Reason, Rejected
from dispatcher.worker.process import POOL_SIZE
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Operator
from tests.store.books import Books, frozen_sessions
from tests.waiting import until, until_answer
from tests.worker.bench import Bench, Worker
from tests.worker.scripted import accept, accept_when_let_go, answer, throttle_when_let_go

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def postgres(tables_url: str) -> AsyncIterator[Proxy]:
    """A proxy to PostgreSQL that a test can interrupt. The server still completes running statements."""
    async with Proxy(tables_url) as running:
        yield running


class TestPostgresqlFailsBetweenAcceptanceAndRecord:
    """The provider accepted the email. The worker must record the acceptance once, and must not send the email
    again."""

    async def test_its_sessions_are_ended_during_the_record(self, bench: Bench, tables_url: str) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start()
        email_ids = await bench.enqueue(4)
        await until(lambda: len(bench.provider.waiting) == 4)
        with psycopg.connect(tables_url) as person:
            Books(person).lock(email_ids[-1])
            bench.provider.let_go()
            await until(lambda: bench.books.waiting_for_a_lock(worker.name))
            bench.books.terminate(worker.name)
            await until(lambda: not bench.books.waiting_for_a_lock(worker.name))
            assert bench.books.statuses() == {"sending": 4}

        await bench.settled({"sent": 4})
        assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
        assert [bench.books.outcomes(email_id) for email_id in email_ids] == [["accepted"]] * 4
        assert bench.books.hourly() == {"accepted": 4}
        await until(lambda: worker.in_flight == 0)
        await bench.nothing_left_on_the_queue()

    async def test_the_record_is_committed_and_its_reply_is_lost(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start(DATABASE_URL=postgres.url)
        email_ids = await bench.enqueue(4)
        await until(lambda: len(bench.provider.waiting) == 4)
        with psycopg.connect(tables_url) as person:
            Books(person).lock(email_ids[-1])
            bench.provider.let_go()
            await until(lambda: bench.books.waiting_for_a_lock(worker.name))
            postgres.freeze()
            postgres.cut()
        await bench.settled({"sent": 4})  # PostgreSQL completes the statement whose reply was lost
        postgres.thaw()

        await until(lambda: worker.in_flight == 0)
        assert [bench.books.outcomes(email_id) for email_id in email_ids] == [["accepted"]] * 4
        assert bench.books.hourly() == {"accepted": 4}
        await bench.nothing_left_on_the_queue()

    async def test_the_lease_expires_meanwhile_and_the_recovery_is_corrected(
        self, bench: Bench, postgres: Proxy
    ) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start(DATABASE_URL=postgres.url)
        (email_id,) = await bench.enqueue()
        await until(lambda: bench.provider.waiting)
        postgres.freeze()
        bench.provider.let_go()
        await until(lambda: bench.provider.accepted)
        bench.books.change(
            email_id, status="held", lease_token=2, locked_by=None, locked_until=EXPIRED, dead_letter_due_at=EXPIRED
        )
        postgres.thaw()

        await bench.settled({"sent": 1})
        assert bench.books.row(email_id)["dead_letter_due_at"] is None
        await until(lambda: worker.in_flight == 0)

    async def test_a_deferral_whose_recorded_reply_was_lost_is_retried(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        (email_id,) = bench.books.enqueue(1)
        bench.provider.script[email_id].append(answer(Deferred(Reason.REFUSED)))
        with psycopg.connect(tables_url) as person:
            worker = await bench.start(DATABASE_URL=postgres.url)
            person.execute("select from email_hourly for update")
            person.execute("lock table email_attempt in share mode")
            await bench.deliver([email_id])
            await until(lambda: bench.books.waiting_for_a_lock(worker.name))
            postgres.freeze()
            postgres.cut()
        await until(lambda: bench.books.outcomes(email_id) == ["deferred"])
        postgres.thaw()

        # The worker does not know whether it still has the lease, so it releases the email.
        await until(lambda: bench.books.row(email_id)["publish_due_at"] is not None)
        assert bench.books.row(email_id)["attempt_count"] == 1
        await bench.deliver([email_id])
        await bench.settled({"sent": 1})
        assert bench.books.outcomes(email_id) == ["deferred", "accepted"]


class TestPostgresqlFailsDuringTheLease:
    """An unsent email must not be held. An email on the wire must not be released."""

    @staticmethod
    async def interrupted_lease(bench: Bench, postgres: Proxy, person: psycopg.Connection[Any], worker: Worker) -> Any:
        """Cuts the worker's connection during a lease statement, which PostgreSQL completes later; returns the email's
        id."""
        email_id = bench.books.enqueue_one()
        Books(person).lock(email_id)
        await bench.deliver([email_id])
        await until(lambda: bench.books.waiting_for_a_lock(worker.name))
        postgres.freeze()
        postgres.cut()
        return email_id

    async def test_a_lease_committed_before_the_worker_reconnects_is_released_and_taken_again(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        worker = await bench.start(DATABASE_URL=postgres.url)
        with psycopg.connect(tables_url) as person:
            email_id = await self.interrupted_lease(bench, postgres, person, worker)
        await bench.settled({"sending": 1})
        postgres.thaw()

        await bench.settled({"sent": 1})
        row = bench.books.row(email_id)
        assert (row["attempt_count"], row["lease_token"]) == (1, 2)
        assert bench.provider.accepted == {email_id: 1}
        await bench.nothing_left_on_the_queue()

    async def test_a_lease_committed_after_the_worker_has_reconnected_is_found_and_released(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        worker = await bench.start(DATABASE_URL=postgres.url)
        with psycopg.connect(tables_url) as person:
            email_id = await self.interrupted_lease(bench, postgres, person, worker)
            postgres.thaw()
            # The interrupted statement and the worker's next statement both wait for the row lock.
            await until(lambda: len(waiting(bench.books, worker)) == 2)

        await bench.settled({"sent": 1})
        assert bench.books.row(email_id)["attempt_count"] == 1
        assert bench.provider.accepted == {email_id: 1}
        await bench.nothing_left_on_the_queue()

    async def test_a_worker_that_stops_meanwhile_leaves_no_lease_behind(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        worker = await bench.start(DATABASE_URL=postgres.url)
        with psycopg.connect(tables_url) as person:
            email_id = await self.interrupted_lease(bench, postgres, person, worker)
        await bench.settled({"sending": 1})
        worker.begin_to_stop()
        await asyncio.wait({worker.task}, timeout=0.3)
        postgres.thaw()
        await asyncio.wait_for(worker.task, 20)

        row = bench.books.row(email_id)
        assert (row["status"], row["attempt_count"], row["locked_by"]) == ("pending", 0, None)
        # The email's message was never acked, so another worker will lease the email.
        await bench.rabbit.take_all(bench.topology.queue, 1)

    async def test_a_lease_that_a_hanging_session_commits_after_the_worker_has_exited_is_left_to_the_relay(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        worker = await bench.start(DATABASE_URL=postgres.url)
        with psycopg.connect(tables_url) as person:
            email_id = await self.interrupted_lease(bench, postgres, person, worker)
            with frozen_sessions(bench.books, worker.name):
                person.rollback()
                postgres.thaw()
                await worker.stop()
                assert bench.books.status(email_id) == "pending"
        await bench.settled({"sending": 1})  # the thawed session has committed the lease

        # The relay releases a dead worker's leases that are not in its ledger (see tests/recovery/test_dead_worker.py).
        assert worker.ledger.exists()
        assert worker.in_flight == 0

    async def test_an_email_on_the_wire_whose_message_is_redelivered_is_not_released(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start(DATABASE_URL=postgres.url)
        (flying,) = await bench.enqueue()
        await until(lambda: bench.provider.waiting)
        first, cut_off = bench.books.enqueue(2)
        with psycopg.connect(tables_url) as person:
            Books(person).lock(cut_off)
            with psycopg.connect(tables_url) as other:
                # While the worker waits for one lease, its next batch grows to two messages: the redelivered message of
                # the email on the wire, and a message whose lease statement will be interrupted.
                Books(other).lock(first)
                await bench.deliver([first])
                await until(lambda: bench.books.waiting_for_a_lock(worker.name))
                await bench.deliver([flying, cut_off])
                await bench.all_are_delivered()
            await until(lambda: bench.books.status(first) == "sending")
            await until(lambda: bench.books.waiting_for_a_lock(worker.name))
            postgres.freeze()
            postgres.cut()
        postgres.thaw()

        await until(lambda: len(bench.provider.waiting) == 3)
        assert bench.books.row(flying)["lease_token"] == 1
        bench.provider.let_go()
        await bench.settled({"sent": 3})
        assert bench.provider.accepted == dict.fromkeys([flying, first, cut_off], 1)
        await bench.nothing_left_on_the_queue()

    async def test_a_release_whose_reply_is_lost_ends_in_one_more_lease_and_one_send(
        self, bench: Bench, postgres: Proxy, tables_url: str
    ) -> None:
        (email_id,) = bench.books.enqueue(1)
        bench.provider.script[email_id].append(throttle_when_let_go)
        worker = await bench.start(DATABASE_URL=postgres.url)
        await bench.deliver([email_id])
        await until(lambda: bench.provider.waiting)
        with psycopg.connect(tables_url) as person:
            Books(person).lock(email_id)
            bench.provider.let_go()
            await until(lambda: bench.books.waiting_for_a_lock(worker.name))
            postgres.freeze()
            postgres.cut()
        await bench.settled({"pending": 1})
        await bench.deliver([email_id])  # as the relay does with due emails
        await bench.all_are_delivered()
        postgres.thaw()

        await bench.settled({"sent": 1})
        assert bench.provider.accepted == {email_id: 1}
        await bench.nothing_left_on_the_queue()


class TestPostgresqlRefusesStatements:
    """PostgreSQL answers statements with errors."""

    async def test_the_worker_waits_for_a_read_only_server(self, bench: Bench) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start()
        (email_id,) = await bench.enqueue()
        await until(lambda: bench.provider.waiting)
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

    async def test_a_refused_result_loses_the_providers_text_and_does_not_affect_the_others(self, bench: Bench) -> None:
        bench.provider.always = answer(Rejected(Reason.REFUSED, "unspeakable"))
        with constraint(bench.books, "error is distinct from 'unspeakable'"):
            await bench.start()
            email_ids = bench.books.enqueue(5)
            bench.provider.script[email_ids[0]].append(accept)
            bench.provider.script[email_ids[4]].append(accept)
            await bench.deliver(email_ids)

            await bench.settled({"sent": 2, "failed": 3})
            assert bench.books.row(email_ids[1])["last_error"] is None
            assert bench.books.row(email_ids[1])["error_type"] == "refused"
            await bench.nothing_left_on_the_queue()

    async def test_a_result_that_is_always_refused_keeps_its_lease_until_it_expires_and_delays_nothing(
        self, bench: Bench
    ) -> None:
        bench.provider.always = answer(Rejected(Reason.REFUSED))
        with constraint(bench.books, "outcome <> 'rejected'"):
            worker = await bench.start(LEASE_SECONDS="5")
            refused, fine = bench.books.enqueue(2)
            bench.provider.script[fine].append(accept)
            await bench.deliver([refused, fine])

            await until(lambda: bench.books.status(fine) == "sent")
            await until(
                lambda: bench.books.select(
                    "select from email_log where status = 'sending' and locked_until < clock_timestamp()"
                )
            )
            assert bench.books.status(refused) == "sending"
            assert not worker.task.done()
            # When the process exits, the ledger still has the email, so that recovery can settle it.
            await worker.stop()
            assert worker.in_flight == 1

    async def test_a_result_that_is_refused_for_a_while_frees_its_slot_in_the_end(self, bench: Bench) -> None:
        bench.provider.always = answer(Rejected(Reason.REFUSED))
        worker = await bench.start(PREFETCH="1")

        def was_refused() -> bool:
            tried = [each for each in bench.books.sessions(worker.name) if each["query"].startswith("with result")]
            return any(each["state"] == "idle" for each in tried)

        with constraint(bench.books, "outcome <> 'rejected'"):
            (refused,) = await bench.enqueue()
            await until(was_refused)
            assert bench.books.status(refused) == "sending"
            await bench.enqueue()

        await bench.settled({"failed": 2})
        assert bench.books.outcomes(refused) == ["rejected"]
        await until(lambda: worker.in_flight == 0)
        await bench.nothing_left_on_the_queue()


class constraint:  # noqa: N801
    """Adds a constraint to the table `email_attempt` during the block."""

    def __init__(self, books: Books, rule: str) -> None:
        self._connection = books.connection
        self._rule = rule

    def __enter__(self) -> None:
        self._connection.execute(f"alter table email_attempt add constraint strict check ({self._rule})".encode())

    def __exit__(self, *_: object) -> None:
        self._connection.execute("alter table email_attempt drop constraint strict")


class TestRabbitmqUnreachable:
    """Delivery tags are void after their channel is closed. The rows contain the state of the emails."""

    @pytest.mark.parametrize("how", ["cut", "closed by force"])
    async def test_an_email_on_the_wire_is_sent_once_and_its_redelivered_message_is_acked(
        self, bench: Bench, broker: Proxy, servers: Servers, how: str
    ) -> None:
        bench.provider.always = accept_when_let_go
        worker = await bench.start(AMQP_URL=broker.url)
        email_ids = await bench.enqueue(5)
        await until(lambda: len(bench.provider.waiting) == 5)
        connections = broker.connections

        if how == "cut":
            broker.cut()
        else:
            operator = Operator(servers.management_url)
            await until_answer(lambda: asyncio.to_thread(operator.close_connection, worker.connection_name))
        await until(lambda: broker.connections > connections)
        neighbour = bench.books.enqueue_one()
        await bench.deliver([neighbour])
        await until(lambda: neighbour in bench.provider.waiting)
        bench.provider.let_go()

        await bench.settled({"sent": 6})
        assert bench.provider.accepted == dict.fromkeys([*email_ids, neighbour], 1)
        await bench.nothing_left_on_the_queue()

    async def test_delivered_unleased_messages_are_redelivered(self, bench: Bench, broker: Proxy) -> None:
        bench.provider.always = accept_when_let_go
        await bench.start(AMQP_URL=broker.url, PREFETCH="3")
        email_ids = await bench.enqueue(9)
        await until(lambda: len(bench.provider.waiting) == 3)

        broker.cut()
        bench.provider.let_go()

        await bench.settled({"sent": 9})
        assert bench.provider.accepted == dict.fromkeys(email_ids, 1)
        await bench.nothing_left_on_the_queue()

    async def test_retries_continue_without_rabbitmq(self, bench: Bench, broker: Proxy) -> None:
        (email_id,) = bench.books.enqueue(1)
        bench.provider.script[email_id].append(answer(Deferred(Reason.REFUSED, retry_after=0.3)))
        await bench.start(AMQP_URL=broker.url, RETRY_CAP_SECONDS="1")
        await bench.deliver([email_id])
        await until(lambda: bench.books.outcomes(email_id) == ["deferred"])

        broker.freeze()
        broker.cut()
        await bench.settled({"sent": 1})
        broker.thaw()

        assert bench.provider.accepted == {email_id: 1}
        await bench.nothing_left_on_the_queue()


def waiting(books: Books, worker: Worker) -> list[Any]:
    return [session for session in books.sessions(worker.name) if session["wait_event_type"] == "Lock"]


async def test_a_worker_reports_how_long_it_has_waited_for_a_commit(bench: Bench, tables_url: str) -> None:
    email_ids = bench.books.enqueue(2)
    await bench.deliver(email_ids)
    with psycopg.connect(tables_url) as person:
        person.execute("lock table email_log in share mode")
        worker = await bench.start(lock_seconds=0.1)

        await until(lambda: (worker.process_slot.commit.seconds or 0) > 0.5)

    await bench.settled({"sent": 2})
    await until(lambda: worker.process_slot.commit.seconds is None)


async def test_a_worker_reports_its_last_ack(bench: Bench) -> None:
    worker = await bench.start()
    (member,) = worker.process_table.statuses()
    assert member.served_seconds is None

    await bench.enqueue(1)

    await until(lambda: worker.process_table.statuses()[0].served_seconds is not None)
