"""What the leading relay does about emails after a host, RabbitMQ or a promoted standby has lost something.

After a host is lost with its ledgers, its emails are resent or held by policy, and no live worker loses a lease. If
RabbitMQ loses a message, the relay publishes the email again. If a promoted standby lacks the old primary's last
commits, only emails that may have been sent are held.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from dispatcher import enqueue
from dispatcher.broker import pointer
from dispatcher.cli.checks import CheckState, check_postgresql
from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.connections import Pool, connect_async, connected, make_pool, session
from dispatcher.store.leases import LeaseStore
from dispatcher.store.migrations import migrate
from dispatcher.store.settlement import find_leases
from dispatcher.store.timeline import Timeline
from tests.chaos.cluster import PostgresPair, private
from tests.recovery.lost_workers import EXPIRED, WORKER
from tests.recovery.tally import counted
from tests.relay.running import Relay, next_round, republish_lost
from tests.store.books import Books, email
from tests.store.damage import refused
from tests.store.results import lease_one, lease_some, result
from tests.store.steered_clock import SteeredClock
from tests.waiting import until

HOUR = 3600.0


async def take(relay: Relay, count: int, *, dead: bool) -> list[UUID]:
    """Takes so many messages from the send queue, or the DLQ; returns the emails."""
    messages = await relay.rabbit.take_all(relay.settings.dlq if dead else relay.settings.queue, count)
    return [message.pointer.email_id for message in messages]


@pytest.mark.parametrize(("policy", "status"), [("hold", "held"), ("resend", "pending")])
async def test_an_email_of_a_dead_host_is_judged_by_the_leading_hosts_policy(
    relay: Relay, books: Books, store: LeaseStore, policy: str, status: str
) -> None:
    email_id = (await lease_one(store, books)).email_id
    books.change(email_id, locked_until=EXPIRED)

    with counted() as counts:
        await relay.start(replace(relay.settings, on_uncertain=OnUncertain(policy), lease_seconds=1.0))
        taken = await take(relay, 1, dead=policy == "hold")

    assert counts == Counter({("rescued", "lease_expired"): 1, ("held", "lease_expired"): int(status == "held")})
    assert (taken, books.status(email_id)) == ([email_id], status)


async def test_after_a_long_outage_of_postgresql_live_workers_renew_before_recovery(
    relay: Relay, books: Books, store: LeaseStore
) -> None:
    living, gone = await lease_some(store, books, 2)
    for lease in (living, gone):
        books.change(lease.email_id, locked_until=EXPIRED)

    await relay.start(replace(relay.settings, lease_seconds=8.0))
    await until(lambda: books.sessions("dispatcher relay"))
    enqueue(books.connection, email("next"))
    # Once this message arrives, the relay leads and has run each service once. The relay then observes the leases for
    # three quarters of LEASE_SECONDS.
    await relay.take(1)

    assert await store.renew({living.email_id: living.token}, 60) == {living.email_id}
    await until(lambda: books.status(gone.email_id) == "held")
    assert books.status(living.email_id) == "sending"


async def test_without_rabbitmq_everything_stays_due_and_recovery_continues(
    relay: Relay, books: Books, store: LeaseStore
) -> None:
    due, expired = books.enqueue_one(), (await lease_one(store, books)).email_id
    books.change(expired, locked_until=EXPIRED)

    await relay.start(replace(relay.settings, amqp_url="amqp://nobody:secret@127.0.0.1:1/%2F", lease_seconds=1.0))

    await until(lambda: books.status(expired) == "held")
    assert books.row(due)["publish_due_at"] is not None


async def test_a_jump_of_postgresqls_clock_takes_no_lease_from_a_renewing_worker_of_another_host(
    clock: SteeredClock, relay: Relay, books: Books, store: LeaseStore, other_store: LeaseStore
) -> None:
    living, gone = await lease_some(store, books, 2)
    await relay.start(replace(relay.settings, lease_seconds=12.0))
    await next_round(books)

    clock.set(HOUR)

    while books.status(gone.email_id) == "sending":
        for _ in range(2):  # at least one of these rounds queries for leases
            await next_round(books)
        assert await store.renew({living.email_id: living.token}, 60) == {living.email_id}
        assert await other_store.lease(books.keys([living.email_id]), 60) == []
    assert books.statuses() == {"sending": 1, "held": 1}


async def test_an_email_overtaken_by_later_ones_is_published_again_while_the_queue_is_full(
    relay: Relay, books: Books, store: LeaseStore
) -> None:
    lost, being_sent, *waiting = books.enqueue(12)
    books.connection.execute("update email_log set publish_due_at = null, published_at = now() - interval '1 minute'")
    books.change(being_sent, published_at=datetime.now(UTC))
    await store.lease(books.keys([being_sent]), 60)
    for email_id in waiting:
        # This time is in the future, so the relay counts all of these emails as published later, even if the test is
        # slow.
        books.change(email_id, published_at=datetime.now(UTC) + timedelta(seconds=50))
        body = pointer.encode(pointer.Pointer(email_id, books.key(email_id)))
        await relay.rabbit.publish(relay.settings.queue, body)

    await relay.start(replace(relay.settings, lease_seconds=1.0))

    assert (await relay.take(len(waiting) + 1))[-1] == lost


async def test_a_lost_message_from_before_a_clock_jump_back_is_published_again(relay: Relay, books: Books) -> None:
    email_id = books.enqueue_one()
    books.change(email_id, publish_due_at=None, published_at=datetime.now(UTC) + timedelta(hours=1))

    with counted() as counts:
        await relay.start()
        assert await relay.take(1) == [email_id]
        await until(lambda: counts)

    assert counts == Counter({("rescued", "message_lost"): 1})


@pytest.mark.parametrize(("share_of_a_lease", "is_lost"), [(0.4, False), (0.6, True)])
async def test_a_message_counts_as_lost_half_a_lease_after_it_was_published(
    relay: Relay, books: Books, share_of_a_lease: float, is_lost: bool
) -> None:
    settings = replace(relay.settings, lease_seconds=HOUR)
    email_id = books.enqueue_one()
    published_at = datetime.now(UTC) - timedelta(seconds=share_of_a_lease * HOUR)
    books.change(email_id, publish_due_at=None, published_at=published_at)

    await republish_lost(settings)

    assert (books.row(email_id)["publish_due_at"] is not None) == is_lost


def was_promoted(books: Books, *, was_synchronous: bool = False) -> datetime:
    """Makes the relay see a promotion at the current time; returns that time."""
    (row,) = books.select(
        "insert into relay_timeline (timeline, is_synchronous) values (0, %s) returning noted_at", was_synchronous
    )
    noted_at: datetime = row["noted_at"]
    return noted_at


@pytest.mark.parametrize(("policy", "status"), [("hold", "held"), ("resend", "pending")])
async def test_emails_that_lost_commits_may_have_sent_are_judged_by_policy_with_a_reason(
    relay: Relay, books: Books, policy: str, status: str
) -> None:
    due, published = books.enqueue(2)
    books.change(published, publish_due_at=None, published_at=books.row(published)["created_at"])
    was_promoted(books)

    with capture_logs() as logs:
        await relay.start(replace(relay.settings, lease_seconds=1.0, on_uncertain=OnUncertain(policy)))
        taken = await take(relay, 2, dead=policy == "hold")

    assert set(taken) == {due, published}
    for email_id in (due, published):
        row = books.row(email_id)
        assert (row["status"], row["was_uncertain"], row["error_type"]) == (status, True, "outcome_unknown")
        assert "failed over" in row["last_error"]
    (told,) = [log for log in logs if log["event"] == "store.promoted"]
    assert (told["lossy"], told["leases"], told["messages"]) == (True, 0, 1)


@pytest.mark.parametrize("is_waiting", [False, True], ids=["released for later", "waiting"])
async def test_an_email_whose_later_time_had_come_may_have_been_sent_in_lost_commits(
    relay: Relay, books: Books, is_waiting: bool
) -> None:
    came, comes = books.enqueue(2)
    ago = was_promoted(books) - timedelta(seconds=10)
    books.connection.execute("update relay_timeline set noted_at = %s", (ago,))
    for email_id, seconds in ((came, 5), (comes, 100)):
        at = ago + timedelta(seconds=seconds)
        times = (
            {"status": "waiting", "publish_due_at": None, "wait_until": at} if is_waiting else {"publish_due_at": at}
        )
        books.change(email_id, created_at=ago - timedelta(minutes=1), **times)

    await relay.start(replace(relay.settings, lease_seconds=1.0))

    assert await take(relay, 1, dead=True) == [came]
    row = books.row(comes)
    assert (row["status"], row["publish_due_at"] is None) == ("waiting" if is_waiting else "pending", is_waiting)


async def test_after_a_promotion_no_statement_changes_more_emails_than_a_batch(tables_url: str, books: Books) -> None:
    books.enqueue(5)
    was_promoted(books)

    async with await connect_async(tables_url, name="relay") as session:
        promotion = await Timeline(session).follow(batch=2)

    assert promotion is not None
    assert promotion.message_count == 5
    assert not any(row["publish_due_at"] for row in books.rows())


async def test_an_email_enqueued_after_the_promotion_is_published_at_once(relay: Relay, books: Books) -> None:
    promoted_at = was_promoted(books)
    email_id = books.enqueue_one()
    assert books.row(email_id)["created_at"] > promoted_at

    await relay.start()

    assert await relay.take(1) == [email_id]


async def test_leases_from_before_the_promotion_are_recorded_by_their_workers_and_not_released_by_settlement(
    relay: Relay, books: Books, store: LeaseStore, pool: Pool
) -> None:
    living, dead = await lease_some(store, books, 2, seconds=1)
    was_promoted(books)
    await relay.start(replace(relay.settings, lease_seconds=1.0))
    await until(lambda: all("promotion" in row["locked_by"] for row in books.rows()))

    assert await store.renew({living.email_id: living.token}, 60) == {living.email_id}
    assert await store.record([result(living, Status.SENT)]) == {living.email_id}
    async with session(pool) as connection:
        assert await find_leases(connection, "worker-1") == []

    assert await take(relay, 1, dead=True) == [dead.email_id]
    assert "failed over" in books.row(dead.email_id)["last_error"]


async def test_the_promotion_of_a_synchronous_standby_leaves_nothing_in_doubt(
    relay: Relay, books: Books, store: LeaseStore
) -> None:
    due, leased = books.enqueue_one(), (await lease_one(store, books)).email_id
    was_promoted(books, was_synchronous=True)

    with capture_logs() as logs:
        await relay.start()
        assert await relay.take(1) == [due]

    assert books.row(leased)["locked_by"] == "worker-1"
    (told,) = [log for log in logs if log["event"] == "store.promoted"]
    assert not told["lossy"]


async def test_nothing_is_published_while_postgresql_refuses_to_mark_an_uncertain_lease(
    relay: Relay, books: Books
) -> None:
    leased, _ = books.enqueue(2)
    books.change(leased, status="sending", locked_by=WORKER, locked_until="9999-01-01 00:00+00", publish_due_at=None)
    was_promoted(books)

    with refused(books.connection, leased, "new.locked_by <> old.locked_by"), capture_logs() as logs:
        await relay.start()
        await until(lambda: sum(log["event"] == "store.connection_lost" for log in logs) > 1)

        assert await relay.is_empty()


@pytest.fixture
def pair() -> Iterator[PostgresPair]:
    """Separate servers for this test, with an asynchronous standby."""
    with (
        tempfile.TemporaryDirectory(prefix="dispatcher-pair-") as folder,
        private(PostgresPair, Path(folder) / "servers", print) as opened,
    ):
        opened.distrust_standby()
        with connected(opened.url) as connection:
            migrate(connection)
        yield opened


@pytest.mark.slow  # starts a primary and a standby
async def test_after_a_lossy_promotion_sent_emails_are_held_and_leased_or_queued_ones_are_sent(
    pair: PostgresPair, relay: Relay
) -> None:
    settings = replace(relay.settings, database_url=pair.url, lease_seconds=4.0)
    findings = await asyncio.to_thread(lambda: list(check_postgresql(settings)))
    (finding,) = [found for found in findings if found.subject == "PostgreSQL standbys"]
    assert finding.state is CheckState.WARNING
    await relay.start(settings)
    with pair.session(pair.primary) as connection:
        books = Books(connection)
        finished, in_hand, queued = books.enqueue(3)
        await until(lambda: all(row["published_at"] for row in books.rows()))
        await until(lambda: pair.says(pair.standby, "select count(*) = 3 from email_log where publish_due_at is null"))
        with pair.session(pair.standby) as standby:  # it gets no further commits
            standby.execute("alter system set primary_conninfo = ''")
            standby.execute("select pg_reload_conf()")
        await until(lambda: pair.says(pair.standby, "select count(*) = 0 from pg_stat_wal_receiver"))
        async with worker_of(pair) as store:
            leases = {lease.email_id: lease for lease in await store.lease(books.keys([finished, in_hand]), 60)}
            await store.record([result(leases[finished], Status.SENT)])
    messages = await relay.rabbit.take_all(
        settings.queue, 3
    )  # workers acked two messages as finished; one is still queued

    pair.end(pair.primary, signal.SIGINT)
    pair.promote()

    async with worker_of(pair) as store:
        assert await store.record([result(leases[in_hand], Status.SENT)]) == {in_hand}
        (message,) = [each for each in messages if each.pointer.email_id == queued]
        (lease,) = await store.lease({queued: message.pointer.message_key}, 60)
        assert await store.record([result(lease, Status.SENT)]) == {queued}
    with pair.session(pair.primary) as connection:
        books = Books(connection)
        await until(lambda: books.status(finished) == "held")
        assert books.statuses() == {"sent": 2, "held": 1}
        assert "failed over" in books.row(finished)["last_error"]


@asynccontextmanager
async def worker_of(pair: PostgresPair) -> AsyncIterator[LeaseStore]:
    async with make_pool(pair.url, name=WORKER, size=1) as pool:
        yield LeaseStore(pool, worker=WORKER, slot="slot-1")
