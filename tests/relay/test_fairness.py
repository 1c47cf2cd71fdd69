"""Tenants take turns, ceilings and pauses hold, and each lane has its own shallow queue. Runs real relays."""

from __future__ import annotations

import time
from collections import Counter
from uuid import UUID

import pytest

from dispatcher.broker.credit import EMPTY_EMAILS
from dispatcher.broker.publisher import Publisher
from dispatcher.config import Settings
from dispatcher.recovery.lost_message import LostMessages
from dispatcher.relay.pointers import BATCH
from dispatcher.store.connections import connect_async
from dispatcher.store.outbox import Outbox
from tests.broker.rabbit import Rabbit
from tests.relay.running import Start, next_round
from tests.store.books import Books
from tests.waiting import until


def enqueue_in(books: Books, lane: str, count: int, tenant_id: str = "acme") -> list[UUID]:
    """Enqueues emails of a lane."""
    with books.connection.transaction():
        email_ids = books.enqueue(count, tenant_id=tenant_id)
        books.connection.execute("update email_log set lane = %s where email_id = any(%s)", [lane, email_ids])
    return email_ids


def pause(books: Books, scope: str, name: str) -> None:
    books.connection.execute(
        "insert into pause (scope, name, reason, actor) values (%s, %s, 'maintenance', 'test')", [scope, name]
    )


def due(books: Books, tenant_id: str) -> int:
    rows = books.select("select from email_log where tenant_id = %s and publish_due_at is not null", tenant_id)
    return len(rows)


async def test_a_queue_without_workers_gets_no_more_than_its_target(
    start: Start, settings: Settings, books: Books
) -> None:
    books.enqueue(3 * EMPTY_EMAILS)

    await start(settings)
    await until(lambda: due(books, "default") <= 2 * EMPTY_EMAILS)
    await next_round(books)

    # RabbitMQ may count messages after it has confirmed them: then the relay publishes one batch more.
    assert EMPTY_EMAILS <= 3 * EMPTY_EMAILS - due(books, "default") <= EMPTY_EMAILS + BATCH


async def test_a_quiet_tenant_is_published_before_the_backlog_of_a_noisy_one(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    books.enqueue(4 * EMPTY_EMAILS, tenant_id="noisy")
    quiet = set(books.enqueue(20, tenant_id="quiet"))

    await start(settings)

    first = await rabbit.take_all_within(settings.queue, 60)
    assert quiet <= {message.pointer.email_id for message in first}


async def test_tenants_with_a_backlog_are_served_by_weight(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    books.connection.execute("insert into tenant_limit (tenant_id, weight) values ('heavy', 3)")
    tenant_of = {
        email_id: tenant_id
        for tenant_id in ("heavy", "light")
        for email_id in books.enqueue(2 * EMPTY_EMAILS, tenant_id=tenant_id)
    }

    await start(settings)

    first = await rabbit.take_all_within(settings.queue, 400)
    assert Counter(tenant_of[message.pointer.email_id] for message in first) == {"heavy": 300, "light": 100}


async def test_a_tenants_ceiling_holds_and_delays_no_other_tenant(
    start: Start, settings: Settings, books: Books
) -> None:
    books.connection.execute("insert into tenant_limit (tenant_id, per_second) values ('slow', 20)")
    books.enqueue(100, tenant_id="slow")
    books.enqueue(100, tenant_id="other")
    began_at = time.monotonic()

    await start(settings)

    await until(lambda: due(books, "other") == 0)
    assert due(books, "slow") >= 100 - 20 * (time.monotonic() - began_at) - 1
    await until(lambda: due(books, "slow") <= 60)
    assert time.monotonic() - began_at >= 40 / 20


@pytest.mark.parametrize(("scope", "name"), [("tenant", "acme"), ("lane", "bulk"), ("all", "")])
async def test_nothing_paused_is_published_until_the_pause_ends(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit, scope: str, name: str
) -> None:
    pause(books, scope, name)
    paused = enqueue_in(books, "bulk", 2 * EMPTY_EMAILS, tenant_id="acme")
    others = enqueue_in(books, "normal", 10, tenant_id="other")

    await start(settings)
    if scope != "all":
        messages = await rabbit.take_all(settings.queue, 10)
        assert {message.pointer.email_id for message in messages} == set(others)
    await next_round(books)
    assert await rabbit.take(settings.queue_of("bulk")) is None
    assert due(books, "acme") == len(paused)

    books.connection.execute("delete from pause")
    assert await rabbit.take_all_within(settings.queue_of("bulk"), 10)


async def test_each_lane_is_published_to_its_own_queue_and_an_unknown_lane_to_the_normal_one(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    expected = {lane: set(enqueue_in(books, lane, 3)) for lane in ("urgent", "normal", "bulk")}
    expected["normal"] |= set(enqueue_in(books, "of_another_host", 3))

    await start(settings)

    for lane, email_ids in expected.items():
        messages = await rabbit.take_all(settings.queue_of(lane), len(email_ids))
        assert {message.pointer.email_id for message in messages} == email_ids


async def test_a_lane_whose_queue_is_full_delays_no_other_lane(
    start: Start, settings: Settings, books: Books, rabbit: Rabbit
) -> None:
    enqueue_in(books, "bulk", 2 * EMPTY_EMAILS)
    await start(settings)
    await until(lambda: due(books, "acme") == EMPTY_EMAILS)

    (urgent,) = enqueue_in(books, "urgent", 1)

    (message,) = await rabbit.take_all(settings.queue_of("urgent"), 1)
    assert message.pointer.email_id == urgent


async def test_a_lost_message_is_searched_in_the_queue_of_its_lane_alone(
    settings: Settings, books: Books, rabbit: Rabbit, tables_url: str
) -> None:
    lost, waits, paused = (enqueue_in(books, lane, 1)[0] for lane in ("urgent", "normal", "bulk"))
    books.connection.execute("update email_log set publish_due_at = null, published_at = now() - interval '1 hour'")
    await rabbit.publish(settings.queue, b"a message of another email")
    pause(books, "lane", "bulk")
    publisher = Publisher(settings.amqp_url, settings.exchange, name="test relay")

    async with await connect_async(tables_url, name="test relay") as session:
        await LostMessages(settings, Outbox(session), publisher.find).run_once()
    await publisher.close()

    assert [books.row(email_id)["publish_due_at"] is not None for email_id in (lost, waits, paused)] == [
        True,
        False,
        False,
    ]
