"""The relay publishes due rows, and marks them only after the confirm. One relay leads. No row stops it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import orjson
import psycopg
import pytest
from pika import frame, spec
from structlog.testing import capture_logs

from dispatcher import enqueue
from dispatcher.broker import dead_letter, pointer
from dispatcher.broker.credit import EMPTY_EMAILS
from dispatcher.broker.outgoing import Outgoing
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.domain.status import Status
from dispatcher.host.process_table import ProcessSlot
from dispatcher.relay.dead_letters import DeadLetterPublisher
from dispatcher.relay.publish_loop import LeaderServices, PublishLoop
from dispatcher.store.connections import connect_async
from dispatcher.store.emails import find_facts
from dispatcher.store.figures import count_for_monitor
from dispatcher.store.leases import LeaseStore
from dispatcher.store.outbox import Outbox
from tests.broker.proxy import Proxy
from tests.relay.running import Relay, free_process_slot, leader, next_round
from tests.store.books import Books, Row, email
from tests.store.damaged_rows import LEASED, PAST, insert_damaged
from tests.store.results import result
from tests.store.steered_clock import SteeredClock
from tests.waiting import until, until_answer

HOUR = FOR_EVER = 3600.0
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_committed_emails_are_published_without_waiting_for_a_poll_and_are_no_longer_due(relay: Relay) -> None:
    await relay.start(poll_seconds=FOR_EVER)
    await relay.leads()
    answer = enqueue(relay.books.connection, email("ключ-🦊", correlation_id="request-1"), traceparent=TRACEPARENT)

    (message,) = await relay.rabbit.take_all(relay.settings.queue, 1)

    assert message.pointer == pointer.Pointer(answer.email_id, "ключ-🦊", "request-1", TRACEPARENT)
    assert message.properties.delivery_mode == 2
    assert b"example" not in message.body
    for _ in range(4):
        relay.books.enqueue_one()
        await relay.take(1)
    await until(lambda: not relay.due())
    row = relay.books.row(answer.email_id)
    assert (row["status"], row["published_at"] is None) == ("pending", False)


async def test_services_run_even_if_there_is_a_notification_in_each_round(relay: Relay) -> None:
    async def notify() -> None:
        while True:
            # PostgreSQL drops a notification if the same transaction has sent an equal one.
            relay.books.connection.execute(
                "select pg_notify('email_dispatcher_due', n::text) from generate_series(1, 50) as n"
            )
            await asyncio.sleep(0)

    await relay.start()
    await relay.leads()
    notifying = asyncio.create_task(notify())
    relay.books.enqueue_one(send_at=datetime.now(UTC) + timedelta(seconds=1))  # a service makes it pending then

    await relay.take(1)

    notifying.cancel()


async def test_batches_refused_at_the_same_time_stay_due_and_count_as_one_refusal(
    relay: Relay,
) -> None:
    """When a queue loses its quorum, RabbitMQ refuses all pending messages at the same time. The backoff must grow only
    once. A full queue refuses messages, too, and is easier to create."""
    queue = relay.settings.queue
    await relay.rabbit.delete_queue(queue)
    await relay.rabbit.declare_queue(queue, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await relay.rabbit.bind_queue(queue, relay.settings.exchange)
    async with Proxy(relay.settings.amqp_url) as proxy:
        await relay.start(replace(relay.settings, amqp_url=proxy.url))
        relay.books.enqueue_one()  # the relay publishes it after it has counted the messages on the queue
        await relay.take(1)
        proxy.freeze()
        for _ in range(6):
            relay.books.enqueue_one()
            await next_round(relay.books)

        with capture_logs() as logs:
            proxy.thaw()
            await until(lambda: [log for log in logs if log["event"] == "relay.unconfirmed" and log["count"] > 1])

    refused_at_first = [log for log in logs if log["event"] == "relay.unconfirmed" and log["count"] == 1]
    assert len(refused_at_first) == 1
    assert "relay.unroutable" not in {log["event"] for log in logs}
    assert relay.due()


async def test_only_confirmed_emails_are_marked_when_the_connection_breaks(relay: Relay) -> None:
    async with Proxy(relay.settings.amqp_url) as proxy:
        await relay.start(replace(relay.settings, amqp_url=proxy.url))
        relay.books.enqueue_one()
        await relay.take(1)
        await until(lambda: not relay.due())

        proxy.freeze()  # RabbitMQ receives no message, so it confirms none
        email_ids = relay.books.enqueue(4)
        await until(lambda: proxy.holds)
        proxy.cut()
        assert relay.due() == set(email_ids)
        proxy.thaw()

        await until(lambda: not relay.due())
    seen = set()
    while message := await relay.rabbit.take(relay.settings.queue):
        seen.add(message.pointer.email_id)
    assert seen == set(email_ids)


@pytest.mark.parametrize("status", [Status.FAILED, Status.HELD])
async def test_a_dead_letter_holds_enough_to_replay_and_nothing_private(
    relay: Relay, store: LeaseStore, status: Status
) -> None:
    books = relay.books
    answer = enqueue(
        books.connection,
        email(
            "order-17",
            tenant_id="tenant-1",
            correlation_id="request-1",
            sender="Private Sender <private-sender@example.com>",
            to="private-recipient@example.org",
            subject="Private subject",
            text="Private text",
            html="<p>Private html</p>",
            headers={"X-Private": "yes"},
        ),
        traceparent=TRACEPARENT,
    )
    (lease,) = await store.lease(books.keys([answer.email_id]), 60)
    await store.record([result(lease, status, error_type="refused", error="550 5.7.1 no")])

    await relay.start()

    (message,) = await relay.rabbit.take_all(relay.settings.dlq, 1)
    letter = dead_letter.decode(message.body)
    row = books.row(answer.email_id)
    assert (letter.email_id, letter.message_key, letter.tenant_id) == (answer.email_id, "order-17", "tenant-1")
    assert (letter.status, letter.error_type, letter.error) == (status, "refused", "550 5.7.1 no")
    assert (letter.attempts, letter.provider, letter.correlation_id) == (1, "smtp", "request-1")
    assert letter.created_at == row["created_at"]
    assert set(orjson.loads(message.body)) == {
        *("v", "email_id", "message_key", "tenant_id", "correlation_id", "status", "error_type", "error"),
        *("attempts", "provider", "created_at", "failed_at"),
    }
    everything = message.body + str(message.properties).encode()
    assert b"private" not in everything.lower()
    assert message.pointer.email_id == answer.email_id
    await until(lambda: books.row(answer.email_id)["dead_letter_due_at"] is None)
    assert books.status(answer.email_id) == status


async def test_dead_letters_follow_each_other_without_a_wait(relay: Relay, tables_url: str, store: LeaseStore) -> None:
    class Writer:
        is_open = True

        async def write(self, messages: Sequence[Outgoing]) -> list[bool]:
            return [True] * len(messages)

        def count(self, confirmed: Sequence[bool]) -> int:
            return len(confirmed)

    publisher = DeadLetterPublisher(cast("Any", Writer()), relay.settings.dlq)
    async with await connect_async(tables_url, name="relay", lock_seconds=0.2) as session:
        for _ in range(2):
            await relay.dead_letter(store)
            assert await publisher.publish_due(Outbox(session), is_last=False)
        locked, outbox = await relay.dead_letter(store), Outbox(session)
        with relay.books.locked(locked):
            assert [await publisher.publish_due(outbox, is_last=True) for _ in range(2)] == [True, False]


async def test_an_unroutable_dead_letter_stays_due_and_delays_no_pointer(relay: Relay, store: LeaseStore) -> None:
    await relay.rabbit.delete_queue(relay.settings.dlq)
    failed = await relay.dead_letter(store)
    await relay.start()

    pending = relay.books.enqueue_one()

    assert await relay.take(1) == [pending]
    assert relay.books.row(failed)["dead_letter_due_at"] is not None


async def test_one_of_two_relays_leads_and_the_other_takes_over_when_its_session_ends(relay: Relay) -> None:
    for _ in range(2):
        await relay.start()

    await until(lambda: len(relay.books.sessions("dispatcher relay")) == 2)
    first = await relay.leads()
    relay.books.connection.execute("select pg_terminate_backend(%s)", [first])
    second = await until(lambda: leader(relay.books) not in (None, first) and leader(relay.books))
    email_ids = relay.books.enqueue(5)

    assert set(await relay.take(5)) == set(email_ids)
    assert leader(relay.books) == second
    assert second in {row["pid"] for row in relay.books.sessions("dispatcher relay")}


OLD_LEADER = "select pg_try_advisory_lock(hashtext('email_dispatcher_relay'))"
"""How a relay of the release before becomes the leader."""


async def test_a_relay_waits_while_a_relay_of_the_release_before_leads(relay: Relay, tables_url: str) -> None:
    def sessions() -> list[Row]:
        return relay.books.sessions("dispatcher relay")

    with psycopg.connect(tables_url, autocommit=True) as old:
        assert old.execute(OLD_LEADER).fetchone() == (True,)
        await relay.start()
        await until(lambda: any("named_lock" in row["query"] for row in sessions()))
        assert leader(relay.books) == old.info.backend_pid

    await until(lambda: leader(relay.books) in {row["pid"] for row in sessions()})


async def test_losing_the_session_between_publishing_and_marking_causes_no_second_message(relay: Relay) -> None:
    email_id = relay.books.enqueue_one()
    with relay.books.locked(email_id):
        await relay.start()
        assert await relay.take(1) == [email_id]
        ended = {row["pid"] for row in relay.books.sessions("dispatcher relay")}
        relay.books.terminate("dispatcher relay")
        await until(lambda: {row["pid"] for row in relay.books.sessions("dispatcher relay")} - ended)
        await next_round(relay.books)

    await until(lambda: not relay.due())
    assert await relay.is_empty()


@asynccontextmanager
async def publishing(
    settings: Settings, slot: ProcessSlot | None = None, *, url: str = "", **options: Any
) -> AsyncIterator[tuple[PublishLoop, asyncio.Task[None]]]:
    """A relay without services that clears no due marks itself, and that is killed at the end of the block."""
    publisher = Publisher(url or settings.amqp_url, settings.exchange, name="test relay", **options)
    relay = PublishLoop(
        settings, publisher, lambda _: LeaderServices(), slot or free_process_slot(), mark_after_seconds=FOR_EVER
    )
    task = asyncio.create_task(relay.run())
    try:
        yield relay, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()


async def test_losing_the_relay_between_publishing_and_marking_causes_only_a_second_message(relay: Relay) -> None:
    email_id = relay.books.enqueue_one()
    async with publishing(relay.settings):
        assert await relay.take(1) == [email_id]

    await relay.start()

    assert await relay.take(1) == [email_id]
    await until(lambda: not relay.due())
    assert await relay.is_empty()


async def test_an_alarm_is_reported_until_rabbitmq_confirms_again(relay: Relay, tables_url: str) -> None:
    slot = free_process_slot()
    async with (
        Proxy(relay.settings.amqp_url) as proxy,
        publishing(relay.settings, slot, url=proxy.url, batch_seconds=0.3),
        await connect_async(tables_url, name="test") as session,
    ):

        async def is_unblocked() -> bool:
            return not (await count_for_monitor(session)).is_blocked

        relay.books.enqueue_one()
        await relay.take(1)
        await until(lambda: slot.confirm.seconds is None)
        proxy.freeze()
        *_, last = relay.books.enqueue(EMPTY_EMAILS + 10)  # more than the queue has room for
        await until(lambda: proxy.holds)
        proxy.tell_clients(frame.Method(0, spec.Connection.Blocked("low on memory")).marshal())

        await until(lambda: (slot.confirm.seconds or 0) > 2)  # long after the batches have timed out
        facts = await find_facts(session, last)
        assert facts is not None
        assert facts.is_blocked
        assert not await is_unblocked()

        proxy.thaw()
        proxy.tell_clients(frame.Method(0, spec.Connection.Unblocked()).marshal())
        await until(lambda: slot.confirm.seconds is None)
        await until_answer(is_unblocked)
        assert proxy.connections == 1


async def test_a_stopping_relay_publishes_what_the_queue_has_room_for_marks_it_and_exits(relay: Relay) -> None:
    async with publishing(relay.settings) as (stopping, task):
        await relay.leads()
        email_ids = set(relay.books.enqueue(EMPTY_EMAILS + 10))
        stopping.stop()
        await asyncio.wait_for(task, 20)

    assert len(relay.due()) == 10
    assert set(await relay.take(EMPTY_EMAILS)) == email_ids - relay.due()


async def test_an_email_due_later_is_published_then(relay: Relay) -> None:
    email_id = relay.books.enqueue_one()
    (now,) = relay.books.select("select clock_timestamp() as instant")
    due_at = now["instant"] + timedelta(seconds=0.4)
    relay.books.change(email_id, publish_due_at=due_at)
    await relay.start()

    assert await relay.take(1) == [email_id]
    await until(lambda: relay.books.row(email_id)["published_at"])
    assert relay.books.row(email_id)["published_at"] >= due_at


async def test_rows_due_before_postgresqls_clock_was_set_back_are_published_at_once_and_marked(
    clock: SteeredClock, relay: Relay, store: LeaseStore, tables_url: str
) -> None:
    clock.set(HOUR)
    with psycopg.connect(tables_url, autocommit=True) as producer:
        pending, failed = Books(producer).enqueue(2)
    (lease,) = await store.lease(relay.books.keys([failed]), 60)
    await store.record([result(lease, Status.FAILED)])
    clock.set(0.0)

    await relay.start()

    assert await relay.take(1) == [pending]
    (letter,) = await relay.rabbit.take_all(relay.settings.dlq, 1)
    assert letter.pointer.email_id == failed
    await until(lambda: not any(row["publish_due_at"] or row["dead_letter_due_at"] for row in relay.books.rows()))
    assert await relay.is_empty()
    assert await relay.rabbit.take(relay.settings.dlq) is None


async def test_a_leader_without_rabbitmq_hands_over_to_a_connected_relay(relay: Relay) -> None:
    async with Proxy(relay.settings.amqp_url) as proxy:
        await relay.start(replace(relay.settings, amqp_url=proxy.url))
        first = await relay.leads()
        await until(lambda: proxy.connections)
        await relay.start()
        await until(lambda: len(relay.books.sessions("dispatcher relay")) == 2)
        relay.books.enqueue(3)
        await relay.take(3)  # confirmed, but not marked yet

        proxy.sever()
        email_ids = relay.books.enqueue(5)

        assert set(await relay.take(5)) == set(email_ids)
        second = leader(relay.books)
        assert second not in (None, first)
        proxy.thaw()
        await until(lambda: not proxy.is_idle)
        assert leader(relay.books) == second


async def test_the_relay_publishes_wakes_and_recovers_all_other_emails_beside_every_damaged_row(
    relay: Relay,
) -> None:
    insert_damaged(relay.books)
    leased, due = relay.books.enqueue(2)
    scheduled = relay.books.enqueue_one(send_at=datetime.now(UTC) + timedelta(seconds=0.5))
    relay.books.change(leased, **LEASED, locked_until=PAST, publish_due_at=None)
    await relay.start(replace(relay.settings, lease_seconds=1.0))
    pid = await relay.leads()
    published: set[UUID] = set()

    async def are_published() -> bool:
        while message := await relay.rabbit.take(relay.settings.queue):
            published.add(message.pointer.email_id)
        return {due, scheduled} <= published

    await until_answer(are_published)
    await until(lambda: relay.books.status(leased) == "held")

    assert leader(relay.books) == pid
