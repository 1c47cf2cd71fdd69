"""The relay publishes due rows, and marks them only after the confirm. One relay leads."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import orjson
import psycopg
import pytest
from pika import frame, spec
from structlog.testing import capture_logs

from dispatcher import enqueue
from dispatcher.broker import dead_letter, pointer
from dispatcher.broker.credit import EMPTY_EMAILS
from dispatcher.broker.publisher import Publisher
from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from dispatcher.domain.status import Status
from dispatcher.relay.publish_loop import LeaderServices, PublishLoop
from dispatcher.store.connections import connect_async
from dispatcher.store.emails import find_facts
from dispatcher.store.figures import count_for_monitor
from dispatcher.store.leases import LeaseStore
from tests.broker.proxy import Proxy
from tests.broker.rabbit import Rabbit
from tests.relay.running import MARK_AFTER_SECONDS, Start, free_process_slot, leader, next_round, settings_for
from tests.store.books import Books, email
from tests.store.results import result
from tests.store.steered_clock import SteeredClock
from tests.waiting import until, until_answer

EXPIRED = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600.0
FOR_EVER = HOUR
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_committed_email_is_published_and_no_longer_due(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings)
    await until(lambda: books.sessions("dispatcher relay"))
    answer = enqueue(books.connection, email("ключ-🦊", correlation_id="request-1"), traceparent=TRACEPARENT)

    (message,) = await rabbit.take_all(settings.queue, 1)

    assert message.pointer == pointer.Pointer(answer.email_id, "ключ-🦊", "request-1", TRACEPARENT)
    assert message.properties.delivery_mode == 2
    assert b"example" not in message.body
    await until(lambda: books.row(answer.email_id)["publish_due_at"] is None)
    row = books.row(answer.email_id)
    assert (row["status"], row["published_at"] is None) == ("pending", False)


async def test_more_than_a_batch_is_published_each_once(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    email_ids = books.enqueue(620)
    await start(settings)

    messages = await rabbit.take_all(settings.queue, 620)

    assert {message.pointer.email_id for message in messages} == set(email_ids)
    await until(lambda: not any(row["publish_due_at"] for row in books.rows()))


async def test_a_commit_is_published_without_waiting_for_the_next_poll(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings, poll_seconds=FOR_EVER)

    for _ in range(5):
        books.enqueue_one()
        await rabbit.take_all(settings.queue, 1)


async def test_services_run_even_if_there_is_a_notification_in_each_round(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    async def notify() -> None:
        while True:
            # PostgreSQL drops a notification if the same transaction has sent an equal one.
            books.connection.execute(
                "select pg_notify('email_dispatcher_due', n::text) from generate_series(1, 50) as n"
            )
            await asyncio.sleep(0)

    await start(settings)
    await until(lambda: books.sessions("dispatcher relay"))
    notifying = asyncio.create_task(notify())
    # A service makes the email pending when its time has come.
    enqueue(books.connection, email(send_at=datetime.now(UTC) + timedelta(seconds=1)))

    await rabbit.take_all(settings.queue, 1)

    notifying.cancel()


async def test_an_unroutable_message_stays_due_until_it_can_be_routed(
    start: Start, settings: Settings, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    await rabbit.delete_queue(topology.queue)
    email_ids = books.enqueue(3)
    with capture_logs() as logs:
        publishing = await start(settings)
        await until(lambda: "relay.unroutable" in {log["event"] for log in logs})
    publishing.stop()
    await until(lambda: not books.sessions("dispatcher relay"))
    assert all(row["publish_due_at"] and row["published_at"] is None for row in books.rows())

    await rabbit.declare_queue(topology.queue, **topology.arguments(topology.queue))
    await rabbit.bind_queue(topology.queue, topology.exchange)
    await start(settings)

    messages = await rabbit.take_all(topology.queue, 3)
    pointers = [each for message in messages for each in pointer.decode(message.body)]
    assert {each.email_id for each in pointers} == set(email_ids)


async def test_messages_that_a_queue_refuses_are_reported_as_unconfirmed_and_stay_due(
    start: Start, settings: Settings, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    """A full queue refuses messages like a queue without a quorum, and is easier to create."""
    await rabbit.delete_queue(topology.queue)
    await rabbit.declare_queue(topology.queue, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await rabbit.bind_queue(topology.queue, topology.exchange)
    books.enqueue(3)

    with capture_logs() as logs:
        await start(settings)
        await until(lambda: "relay.unconfirmed" in {log["event"] for log in logs})

    assert "relay.unroutable" not in {log["event"] for log in logs}
    assert any(row["publish_due_at"] for row in books.rows())


async def test_batches_refused_at_the_same_time_count_as_one_refusal(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    """When a queue loses its quorum, RabbitMQ refuses all pending messages at the same time. The backoff must grow only
    once."""
    await rabbit.delete_queue(topology.queue)
    await rabbit.declare_queue(topology.queue, **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await rabbit.bind_queue(topology.queue, topology.exchange)
    async with Proxy(servers.amqp_url) as proxy:
        await start(settings_for(proxy.url, tables_url, topology))
        books.enqueue_one()  # the relay publishes it after it has counted the messages on the queue
        await rabbit.take_all(topology.queue, 1)
        proxy.freeze()
        for _ in range(6):
            books.enqueue_one()
            await next_round(books)

        with capture_logs() as logs:
            proxy.thaw()
            await until(lambda: [log for log in logs if log["event"] == "relay.unconfirmed" and log["count"] > 1])

    refused_at_first = [log for log in logs if log["event"] == "relay.unconfirmed" and log["count"] == 1]
    assert len(refused_at_first) == 1


async def test_only_confirmed_emails_are_marked_when_the_connection_breaks(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit
) -> None:
    async with Proxy(servers.amqp_url) as proxy:
        await start(settings_for(proxy.url, tables_url, topology))
        books.enqueue_one()
        await rabbit.take_all(topology.queue, 1)
        await until(lambda: not any(row["publish_due_at"] for row in books.rows()))

        proxy.freeze()  # RabbitMQ receives no message, so it confirms none
        email_ids = books.enqueue(4)
        await until(lambda: proxy.holds)
        proxy.cut()
        assert all(books.row(email_id)["publish_due_at"] for email_id in email_ids)
        proxy.thaw()

        await until(lambda: not any(row["publish_due_at"] for row in books.rows()))
    seen = set()
    while message := await rabbit.take(topology.queue):
        seen.add(message.pointer.email_id)
    assert seen == set(email_ids)


async def test_an_email_leased_and_released_while_being_published_is_published_again(
    start: Start, servers: Servers, tables_url: str, topology: Topology, books: Books, rabbit: Rabbit, store: LeaseStore
) -> None:
    async with Proxy(servers.amqp_url) as proxy:
        await start(settings_for(proxy.url, tables_url, topology))
        books.enqueue_one()
        await rabbit.take_all(topology.queue, 1)
        proxy.freeze()
        email_id = books.enqueue_one()
        await until(lambda: proxy.holds)

        (lease,) = await store.lease(books.keys([email_id]), 60)
        await store.release({email_id: lease.token})
        proxy.thaw()

        messages = await rabbit.take_all(topology.queue, 2)
        assert {message.pointer.email_id for message in messages} == {email_id}
        await until(lambda: books.row(email_id)["publish_due_at"] is None)


@pytest.mark.parametrize("status", [Status.FAILED, Status.HELD])
async def test_a_dead_letter_holds_enough_to_replay_and_nothing_private(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, store: LeaseStore, status: Status
) -> None:
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

    await start(settings)

    (message,) = await rabbit.take_all(settings.dlq, 1)
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


async def test_an_unroutable_dead_letter_stays_due_and_delays_no_pointer(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, store: LeaseStore
) -> None:
    await rabbit.delete_queue(settings.dlq)
    (lease,) = await store.lease(books.keys([books.enqueue_one()]), 60)
    await store.record([result(lease, Status.FAILED)])
    await start(settings)

    pending = books.enqueue_one()
    (message,) = await rabbit.take_all(settings.queue, 1)

    assert message.pointer.email_id == pending
    assert books.row(lease.email_id)["dead_letter_due_at"] is not None


async def test_one_of_two_relays_leads_and_the_other_takes_over_when_its_session_ends(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    for _ in range(2):
        await start(settings)

    await until(lambda: len(books.sessions("dispatcher relay")) == 2)
    first = await until(lambda: leader(books))
    books.connection.execute("select pg_terminate_backend(%s)", [first])
    second = await until(lambda: leader(books) not in (None, first) and leader(books))
    email_ids = books.enqueue(5)

    messages = await rabbit.take_all(settings.queue, 5)
    assert {message.pointer.email_id for message in messages} == set(email_ids)
    assert leader(books) == second
    assert second in {row["pid"] for row in books.sessions("dispatcher relay")}


OLD_LEADER = "select pg_try_advisory_lock(hashtext('email_dispatcher_relay'))"
"""How a relay of the release before becomes the leader."""


async def test_a_relay_waits_while_a_relay_of_the_release_before_leads(
    start: Start, settings: Settings, books: Books, tables_url: str
) -> None:
    with psycopg.connect(tables_url, autocommit=True) as old:
        assert old.execute(OLD_LEADER).fetchone() == (True,)
        await start(settings)
        await until(lambda: any("named_lock" in row["query"] for row in books.sessions("dispatcher relay")))
        assert leader(books) == old.info.backend_pid

    await until(lambda: leader(books) in {row["pid"] for row in books.sessions("dispatcher relay")})


async def test_losing_the_session_between_publishing_and_marking_causes_no_second_message(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, tables_url: str
) -> None:
    email_id = books.enqueue_one()
    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_id)
        await start(settings)
        (message,) = await rabbit.take_all(settings.queue, 1)
        ended = {row["pid"] for row in books.sessions("dispatcher relay")}
        books.terminate("dispatcher relay")
        await until(lambda: {row["pid"] for row in books.sessions("dispatcher relay")} - ended)
        await next_round(books)

    await until(lambda: books.row(email_id)["publish_due_at"] is None)

    assert message.pointer.email_id == email_id
    assert await rabbit.take(settings.queue) is None


async def test_losing_the_relay_between_publishing_and_marking_causes_only_a_second_message(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, tables_url: str
) -> None:
    email_id = books.enqueue_one()
    publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
    with psycopg.connect(tables_url) as person:
        Books(person).lock(email_id)
        task = asyncio.create_task(
            PublishLoop(settings, publisher, lambda _: LeaderServices(), free_process_slot()).run()
        )
        messages = await rabbit.take_all(settings.queue, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()

    await start(settings)

    messages += await rabbit.take_all(settings.queue, 1)
    assert {message.pointer.email_id for message in messages} == {email_id}
    await until(lambda: books.row(email_id)["publish_due_at"] is None)
    assert await rabbit.take(settings.queue) is None


async def test_a_locked_email_is_published_once_and_delays_no_other(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, tables_url: str
) -> None:
    locked, other = books.enqueue(2)
    with psycopg.connect(tables_url) as person:
        Books(person).lock(locked)
        await start(settings)
        await rabbit.take_all(settings.queue, 2)
        await until(lambda: books.row(other)["publish_due_at"] is None)
        await next_round(books)
        assert books.row(locked)["publish_due_at"] is not None

    await until(lambda: books.row(locked)["publish_due_at"] is None)
    assert await rabbit.take(settings.queue) is None


async def test_a_relay_reports_how_long_it_has_waited_for_confirms(
    settings: Settings, books: Books, tables_url: str, topology: Topology
) -> None:
    process_slot = free_process_slot()
    async with Proxy(settings.amqp_url) as proxy:
        publisher = Publisher(proxy.url, settings.exchange, name="test relay")
        task = asyncio.create_task(PublishLoop(settings, publisher, lambda _: LeaderServices(), process_slot).run())
        books.enqueue_one()
        await until(lambda: books.rows()[0]["published_at"])
        assert process_slot.confirm.seconds is None
        proxy.freeze_node()
        books.enqueue_one()

        await until(lambda: (process_slot.confirm.seconds or 0) > 0.2)

        proxy.thaw()
        await until(lambda: process_slot.confirm.seconds is None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()


async def test_an_alarm_is_reported_until_rabbitmq_confirms_again(
    settings: Settings, books: Books, tables_url: str
) -> None:
    process_slot = free_process_slot()
    async with Proxy(settings.amqp_url) as proxy, await connect_async(tables_url, name="test") as session:
        publisher = Publisher(proxy.url, settings.exchange, name="test relay", batch_seconds=0.3)
        task = asyncio.create_task(PublishLoop(settings, publisher, lambda _: LeaderServices(), process_slot).run())
        books.enqueue_one()
        await until(lambda: books.rows()[0]["published_at"] and process_slot.confirm.seconds is None)
        proxy.freeze()
        *_, last = books.enqueue(EMPTY_EMAILS + 10)  # more than the queue has room for
        await until(lambda: proxy.holds)
        proxy.tell_clients(frame.Method(0, spec.Connection.Blocked("low on memory")).marshal())

        await until(lambda: (process_slot.confirm.seconds or 0) > 2)  # long after the batches have timed out
        facts = await find_facts(session, last)
        assert facts is not None
        assert facts.is_blocked
        assert (await count_for_monitor(session)).is_blocked

        proxy.thaw()
        proxy.tell_clients(frame.Method(0, spec.Connection.Unblocked()).marshal())
        await until(lambda: process_slot.confirm.seconds is None)

        async def is_unblocked() -> bool:
            return not (await count_for_monitor(session)).is_blocked

        await until_answer(is_unblocked)
        assert proxy.connections == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()


async def test_a_published_email_is_not_published_again_before_it_is_marked(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    await start(settings)
    first = books.enqueue_one()
    await rabbit.take_all(settings.queue, 1)

    others = [books.enqueue_one() for _ in range(4)]  # to publish these, the relay makes at least one more query
    messages = await rabbit.take_all(settings.queue, 4)

    assert {message.pointer.email_id for message in messages} == set(others)
    await until(lambda: not any(row["publish_due_at"] for row in books.rows()))
    assert await rabbit.take(settings.queue) is None
    assert books.row(first)["published_at"] is not None


async def test_the_relay_does_not_mark_an_email_that_was_leased(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, store: LeaseStore
) -> None:
    await start(settings)
    email_id = books.enqueue_one()
    await rabbit.take_all(settings.queue, 1)

    await store.lease(books.keys([email_id]), 60)
    leased = books.row(email_id)
    marked = books.enqueue_one()
    await until(lambda: books.row(marked)["publish_due_at"] is None)

    assert books.row(email_id) == leased


async def test_a_stopping_relay_publishes_what_the_queue_has_room_for_and_exits(
    settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    email_ids = books.enqueue(EMPTY_EMAILS + 10)
    publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
    publishing = PublishLoop(
        settings, publisher, lambda _: LeaderServices(), free_process_slot(), mark_after_seconds=MARK_AFTER_SECONDS
    )
    publishing_task = asyncio.create_task(publishing.run())
    await until(lambda: books.sessions("dispatcher relay"))

    await until(lambda: any(row["published_at"] for row in books.rows()))
    publishing.stop()
    await asyncio.wait_for(publishing_task, 20)
    await publisher.close()

    messages = await rabbit.take_all(settings.queue, EMPTY_EMAILS)
    published = {message.pointer.email_id for message in messages}
    assert len(published) == EMPTY_EMAILS
    assert published < set(email_ids)
    assert {row["email_id"] for row in books.rows() if row["publish_due_at"]} == set(email_ids) - published


async def test_a_stopping_relay_marks_published_emails_so_that_the_next_does_not_publish_them_again(
    settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    books.enqueue(3)
    publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")
    publishing = PublishLoop(
        settings, publisher, lambda _: LeaderServices(), free_process_slot(), mark_after_seconds=FOR_EVER
    )
    publishing_task = asyncio.create_task(publishing.run())
    await rabbit.take_all(settings.queue, 3)

    publishing.stop()
    await asyncio.wait_for(publishing_task, 20)
    await publisher.close()

    assert [row["publish_due_at"] for row in books.rows()] == [None] * 3


async def test_an_email_due_later_is_published_then(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    email_id = books.enqueue_one()
    (now,) = books.select("select clock_timestamp() as instant")
    due_at = now["instant"] + timedelta(seconds=0.4)
    books.change(email_id, publish_due_at=due_at)
    await start(settings)

    (message,) = await rabbit.take_all(settings.queue, 1)

    assert message.pointer.email_id == email_id
    await until(lambda: books.row(email_id)["published_at"])
    assert books.row(email_id)["published_at"] >= due_at


async def test_rows_due_before_postgresqls_clock_was_set_back_are_published_at_once_and_marked(
    clock: SteeredClock,
    start: Start,
    settings: Settings,
    books: Books,
    store: LeaseStore,
    rabbit: Rabbit,
    tables_url: str,
) -> None:
    clock.set(HOUR)
    with psycopg.connect(tables_url, autocommit=True) as producer:
        pending, failed = Books(producer).enqueue(2)
    (lease,) = await store.lease(books.keys([failed]), 60)
    await store.record([result(lease, Status.FAILED)])
    clock.set(0.0)

    await start(settings)

    (message,) = await rabbit.take_all(settings.queue, 1)
    (letter,) = await rabbit.take_all(settings.dlq, 1)
    assert (message.pointer.email_id, letter.pointer.email_id) == (pending, failed)
    await until(lambda: not any(row["publish_due_at"] or row["dead_letter_due_at"] for row in books.rows()))
    assert await rabbit.take(settings.queue) is None
    assert await rabbit.take(settings.dlq) is None


async def test_a_leader_without_rabbitmq_hands_over_to_a_connected_relay(
    start: Start,
    settings: Settings,
    servers: Servers,
    tables_url: str,
    topology: Topology,
    books: Books,
    rabbit: Rabbit,
) -> None:
    async with Proxy(servers.amqp_url) as proxy:
        await start(settings_for(proxy.url, tables_url, topology))
        first = await until(lambda: leader(books))
        await until(lambda: proxy.connections)
        await start(settings)
        await until(lambda: len(books.sessions("dispatcher relay")) == 2)
        books.enqueue(3)
        await rabbit.take_all(settings.queue, 3)  # confirmed, but not marked yet

        proxy.sever()
        email_ids = books.enqueue(5)

        messages = await rabbit.take_all(settings.queue, 5)
        assert {message.pointer.email_id for message in messages} == set(email_ids)
        second = leader(books)
        assert second not in (None, first)
        proxy.thaw()
        await until(lambda: not proxy.is_idle)
        assert leader(books) == second
