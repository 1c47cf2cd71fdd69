"""Tenants take turns, ceilings and pauses hold, and each lane has its own shallow queue, which may be missing. Emails
share a message only if many are due and workers are fast. Runs real relays."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from dispatcher.broker.credit import EMPTY_EMAILS
from dispatcher.broker.topology import Topology, declare
from dispatcher.relay.pointers import BATCH
from dispatcher.store.leases import LeaseStore
from tests.broker.takers import StartTaker
from tests.relay.running import Relay, next_round, republish_lost
from tests.store.books import Books
from tests.store.pausing import pause, resume
from tests.waiting import until

BACKLOG = BATCH + 100
IDLE_PER_SECOND = 150
"""More transactions than an idle relay commits per second."""


def enqueue_in(books: Books, lane: str, count: int, tenant_id: str = "acme") -> list[UUID]:
    with books.connection.transaction():
        email_ids = books.enqueue(count, tenant_id=tenant_id)
        books.connection.execute("update email_log set lane = %s where email_id = any(%s)", [lane, email_ids])
    return email_ids


async def test_a_queue_without_workers_gets_no_more_than_its_target_and_delays_no_other_lane(relay: Relay) -> None:
    enqueue_in(relay.books, "bulk", EMPTY_EMAILS + BATCH + 100)
    await relay.start()
    await until(lambda: len(relay.due("acme")) <= BATCH + 100)

    (urgent,) = enqueue_in(relay.books, "urgent", 1, "other")

    assert await relay.take(1, "urgent") == [urgent]
    await next_round(relay.books)
    # RabbitMQ may count messages after it has confirmed them: then the relay publishes one batch more.
    assert 100 <= len(relay.due("acme")) <= BATCH + 100


async def test_tenants_with_a_backlog_are_served_by_weight(relay: Relay) -> None:
    relay.books.connection.execute("insert into tenant_limit (tenant_id, weight) values ('heavy', 3)")
    heavy, light = (set(relay.books.enqueue(BACKLOG, tenant_id=tenant_id)) for tenant_id in ("heavy", "light"))

    await relay.start()

    first = set(await relay.take_some(400))
    assert (len(first & heavy), len(first & light)) == (300, 100)


async def test_a_tenants_ceiling_holds_and_delays_no_other_tenant(relay: Relay) -> None:
    relay.books.connection.execute("insert into tenant_limit (tenant_id, per_second) values ('slow', 20)")
    relay.books.enqueue(100, tenant_id="slow")
    relay.books.enqueue(100, tenant_id="other")
    began_at = time.monotonic()

    await relay.start()

    await until(lambda: not relay.due("other"))
    assert len(relay.due("slow")) >= 100 - 20 * (time.monotonic() - began_at) - 1
    await until(lambda: len(relay.due("slow")) <= 60)
    assert time.monotonic() - began_at >= 40 / 20


@pytest.mark.parametrize(("scope", "name"), [("tenant", "acme"), ("lane", "bulk"), ("all", "")])
async def test_nothing_paused_is_published_until_the_pause_ends(relay: Relay, scope: str, name: str) -> None:
    pause(relay.books.connection, scope, name)
    paused = enqueue_in(relay.books, "bulk", BACKLOG)
    others = enqueue_in(relay.books, "normal", 10, tenant_id="other")

    await relay.start()
    if scope != "all":
        assert set(await relay.take(10)) == set(others)
    await next_round(relay.books)
    assert await relay.is_empty("bulk")
    assert relay.due("acme") == set(paused)

    resume(relay.books.connection)
    assert await relay.take_some(10, "bulk")


async def test_each_lane_is_published_to_its_own_queue_and_an_unknown_lane_to_the_normal_one(relay: Relay) -> None:
    expected = {lane: set(enqueue_in(relay.books, lane, 3)) for lane in ("urgent", "normal", "bulk")}
    expected["normal"] |= set(enqueue_in(relay.books, "of_another_host", 3))

    await relay.start()

    for lane, email_ids in expected.items():
        assert set(await relay.take(len(email_ids), lane)) == email_ids


async def test_a_lost_message_is_searched_in_the_queue_of_its_lane_alone(relay: Relay) -> None:
    emails = [enqueue_in(relay.books, lane, 1)[0] for lane in ("urgent", "normal", "bulk")]
    relay.books.connection.execute(
        "update email_log set publish_due_at = null, published_at = now() - interval '1 hour'"
    )
    await relay.rabbit.publish(relay.settings.queue, b"a message of another email")
    pause(relay.books.connection, "lane", "bulk")

    await republish_lost(relay.settings)

    assert relay.due() == {emails[0]}


# Queues without a binding, and missing queues.
async def test_beside_a_missing_queue_the_relay_goes_on_with_the_other_lanes_and_does_not_poll_faster(
    relay: Relay, topology: Topology
) -> None:
    def committed() -> int:
        (row,) = relay.books.select("select xact_commit from pg_stat_database where datname = current_database()")
        return int(row["xact_commit"])

    missing = relay.settings.queue_of("bulk")
    await relay.rabbit.delete_queue(missing)
    waiting = set(enqueue_in(relay.books, "bulk", 20, "news"))
    with capture_logs() as logs:
        await relay.start()
        began_at, before = time.monotonic(), committed()
        await until(lambda: time.monotonic() > began_at + 2.5)  # PostgreSQL counts a transaction up to a second late
        assert committed() - before < IDLE_PER_SECOND * (time.monotonic() - began_at)
    reason = next(log["reason"] for log in logs if log["event"] == "relay.unroutable")
    assert f"no queue '{missing}'" in reason
    assert "Run `dispatcher init`" in reason

    urgent = enqueue_in(relay.books, "urgent", 20)
    assert set(await relay.take(20, "urgent")) == set(urgent)
    assert relay.due("news") == waiting
    assert not any(row["published_at"] for row in relay.books.rows() if row["email_id"] in waiting)

    await declare(relay.settings.amqp_url, topology)
    await until(lambda: not relay.due("news"))
    assert set(await relay.take(20, "bulk")) == waiting


async def test_queues_without_a_binding_are_bound_again(relay: Relay, topology: Topology, store: LeaseStore) -> None:
    queue = relay.settings.queue_of("bulk")
    for unbound in (queue, topology.dlq):
        await relay.rabbit.unbind_queue(unbound, topology.exchange)
    ids = enqueue_in(relay.books, "bulk", 20, "news")
    failed = await relay.dead_letter(store)

    with capture_logs() as logs:
        await relay.start()
        assert set(await relay.take(20, "bulk")) == set(ids)

    (returned,) = [log for log in logs if log["event"] == "relay.unroutable" and log["queue"] == queue]
    assert returned["count"] == 20
    assert "has bound it now" in returned["reason"]
    (message,) = await relay.rabbit.take_all(topology.dlq, 1)
    assert message.pointer.email_id == failed


# Bundles. Workers with so small a window count as fast if they take some hundred emails per second.
async def test_fast_workers_share_large_messages_of_a_backlog_and_then_small_batches_and_single_emails(
    relay: Relay, start_taker: StartTaker
) -> None:
    most, backlog = 16, 4000
    takers = [await start_taker(relay.settings.amqp_url, relay.settings.queue) for _ in range(2)]

    async def take(emails: int) -> Counter[int]:
        """Waits until workers have taken so many more emails; returns how many each has taken of them."""
        before = [taker.emails for taker in takers]
        await until(lambda: sum(taker.emails for taker in takers) == sum(before) + emails)
        return Counter({at: taker.emails - before[at] for at, taker in enumerate(takers)})

    relay.books.enqueue(backlog)
    await relay.start(replace(relay.settings, bundle_emails=most, prefetch=4))
    assert min((await take(backlog)).values()) > backlog / 4
    assert most / 2 < max(size for taker in takers for size in taker.sizes) <= most

    relay.books.enqueue(40)
    assert min((await take(40)).values()) >= 10

    messages = sum(len(taker.sizes) for taker in takers)
    for _ in range(5):
        relay.books.enqueue_one()
        await take(1)
    assert sum(len(taker.sizes) for taker in takers) == messages + 5
