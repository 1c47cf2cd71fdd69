"""Events reach a webhook at least once, signed and with the same id, whatever its receiver does meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

from dispatcher.actions.action import Action
from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.webhooks import EnableWebhook, ListRefused, ListWebhooks, ReplayWebhook, RotateWebhook
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import OutgoingKind
from dispatcher.domain.status import Status
from dispatcher.domain.webhook import SCHEDULE_SECONDS, Webhook, new_secret
from dispatcher.events.webhook_delivery import BATCH_EVENTS, CONCURRENT_POSTS, REFUSALS_IN_A_ROW, WebhookDelivery
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.transport.signed_post import trusting_context
from tests.monitor.receiver import Posted, Receiver, receiving, write_ca
from tests.store.books import Books
from tests.store.damage import disk_full
from tests.store.results import result
from tests.store.test_outgoing_events import add_webhook, announce, await_feed
from tests.waiting import until


@pytest.fixture
def other_receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running


@dataclass
class Deliverer:
    """The delivery of one monitor, with a clock that the test sets, and the receiver of its posts."""

    session: AsyncSession
    ca_file: Path
    receiver: Receiver
    books: Books
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, **options: Any) -> None:
        """Replaces the process: all that it had in memory is lost."""
        given = {"allow_private": True, "post_seconds": 10.0, "retry_seconds": 0.0, **options}
        context = trusting_context(self.ca_file)
        self.delivery = WebhookDelivery("", context=context, now=lambda: self.now, **given)

    async def add(self, url: str = "", tenant: str | None = "shop", **more: Any) -> int:
        return await add_webhook(self.session, url or self.receiver.url, tenant, **more)

    def announce(self, count: int = 1, tenant: str = "shop") -> list[UUID]:
        return announce(self.books.connection, tenant, count)

    async def start(self) -> list[asyncio.Task[None]]:
        return await self.delivery.start_rounds(self.session)

    async def round(self) -> bool:
        """Runs one round for each webhook that has something to deliver; returns whether there was one."""
        rounds = await self.start()
        await asyncio.gather(*rounds)
        return bool(rounds)

    async def run(self) -> None:
        """Runs rounds until no webhook has anything to deliver now."""
        while await self.round():
            pass

    async def act(self, action: Action[Any]) -> Any:
        return await run(self.session, action, Who(Face.COMMAND, "ann@ops-1"))

    async def next_attempt_at(self) -> datetime:
        return (await self.one()).next_attempt_at or self.now

    async def one(self) -> Webhook:
        (webhook,) = await self.act(ListWebhooks())
        assert isinstance(webhook, Webhook)
        return webhook

    def ids(self) -> list[UUID]:
        return ids(self.receiver)

    def answers(self, status: int) -> None:
        self.receiver.status_of = lambda _: status


def ids(receiver: Receiver) -> list[UUID]:
    return [UUID(each.headers["webhook-id"]) for each in receiver.posted]


def answering(event_id: UUID, status: int, others: int) -> Callable[[Posted], int]:
    """A receiver's answers: one status for an event, and another one for all others."""
    return lambda posted: status if posted.headers["webhook-id"] == str(event_id) else others


@pytest.fixture
async def monitor(
    tables_url: str, ca: trustme.CA, tmp_path: Path, receiver: Receiver, books: Books
) -> AsyncIterator[Deliverer]:
    async with await connect_async(tables_url, name="delivery") as session:
        opened = Deliverer(session, write_ca(ca, tmp_path), receiver, books)
        yield opened
        await opened.delivery.stop()


async def test_an_event_arrives_signed_and_without_content(monitor: Deliverer, store: LeaseStore) -> None:
    secret, books = new_secret(), monitor.books
    await monitor.add(secret=secret)
    email_id = books.enqueue_one(tenant_id="shop", correlation_id="order-7", metadata={"order": "7"})
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.FAILED, error_type="rejected_recipient", provider_code="550")])
    await_feed(books.connection)

    await monitor.run()

    (posted,) = monitor.receiver.posted
    assert Verifier(secret).verify(posted.body.decode(), dict(posted.headers)) == posted.json
    assert posted.json["type"] == "email.failed"
    at = posted.json["data"].pop("happened_at")
    assert datetime.fromisoformat(at) == datetime.fromisoformat(posted.json["timestamp"])
    assert posted.json["data"] == {
        "email_id": str(email_id),
        "tenant_id": "shop",
        "message_key": books.key(email_id),
        "correlation_id": "order-7",
        "metadata": {"order": "7"},
        "topic": None,
        "provider": "smtp",
        "reason": "rejected_recipient",
        "code": "550",
        "bounce": None,
        "happened_at": at,
    }
    assert b"@" not in posted.body


async def test_a_webhook_that_asks_for_recipients_gets_those_of_the_event(monitor: Deliverer) -> None:
    await monitor.add(recipients=True)
    email_id = monitor.books.enqueue_one(tenant_id="shop", to=["Ann <ann@example.org>", "bob@example.org"])
    bob = (await AddressHasher.open(monitor.session)).hash("bob@example.org")
    insert = b"insert into outgoing_event (kind, email_id, tenant_id, message_key, address_hash)"
    values = b"values ('sent', %s, 'shop', 'k', null), ('bounced', %s, 'shop', 'k', %s)"
    monitor.books.connection.execute(insert + values, [email_id, email_id, bob])
    await_feed(monitor.books.connection)

    await monitor.run()

    found = {posted.json["type"]: posted.data["recipients"] for posted in monitor.receiver.posted}
    assert found == {"email.sent": ["Ann <ann@example.org>", "bob@example.org"], "email.bounced": ["bob@example.org"]}


async def test_a_webhook_gets_its_tenants_events_of_its_kinds(monitor: Deliverer, other_receiver: Receiver) -> None:
    monitor.announce()  # before the webhooks were added
    await monitor.add(kinds=[OutgoingKind.SENT])
    await monitor.add(other_receiver.url, None, kinds=[OutgoingKind.HELD, OutgoingKind.SENT])
    ours, others, held = monitor.announce(), monitor.announce(1, "other"), monitor.announce()
    monitor.books.connection.execute("update outgoing_event set kind = 'held' where event_id = any(%s)", [held])

    await monitor.run()

    assert monitor.ids() == ours
    assert sorted(ids(other_receiver)) == sorted(ours + others + held)


async def test_after_a_rotation_both_secrets_verify_for_a_day(monitor: Deliverer) -> None:
    old = new_secret()
    webhook_id = await monitor.add(secret=old)
    new = (await monitor.act(RotateWebhook(webhook_id=webhook_id))).secret
    monitor.announce()
    await monitor.run()
    monitor.books.connection.execute("update webhook set previous_until = clock_timestamp()")
    monitor.announce()
    await monitor.run()

    first, second = monitor.receiver.posted
    for secret in (old, new):
        Verifier(secret).verify(first.body.decode(), dict(first.headers))
    Verifier(new).verify(second.body.decode(), dict(second.headers))
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(old).verify(second.body.decode(), dict(second.headers))


async def test_after_a_full_disk_an_event_is_delivered_again_with_the_same_id(monitor: Deliverer) -> None:
    await monitor.add()
    events = monitor.announce(3)

    with disk_full(monitor.books.connection, "update on webhook for each row"):
        await monitor.round()
    await monitor.run()

    assert Counter(monitor.ids()) == Counter(dict.fromkeys(events, 2))
    assert (await monitor.one()).failing_since is None


async def test_a_receiver_that_stays_down_is_disabled_after_27_hours_and_goes_on_where_it_stopped(
    monitor: Deliverer,
) -> None:
    webhook_id = await monitor.add()
    began_at = monitor.now
    monitor.answers(503)
    events = monitor.announce(20)
    while (await monitor.one()).state == "active":
        monitor.now = max(monitor.now, await monitor.next_attempt_at())
        assert await monitor.round()
    assert 27 <= (monitor.now - began_at) / timedelta(hours=1) < 29
    assert (await monitor.one()).last_error == "the receiver answered 503"
    monitor.now += timedelta(days=1)
    assert not await monitor.round()
    monitor.answers(204)
    monitor.receiver.posted.clear()

    enabled = await monitor.act(EnableWebhook(webhook_id=webhook_id))
    shown = await monitor.one()
    assert (enabled.state, enabled.retries, enabled.given_up) == (shown.state, shown.retries, shown.given_up)
    await monitor.run()

    assert sorted(monitor.ids()) == sorted(events)


async def test_one_refused_event_does_not_stop_the_others_and_is_tried_by_the_schedule(monitor: Deliverer) -> None:
    webhook_id = await monitor.add()
    began_at = monitor.now
    bad, *good = monitor.announce(20)
    monitor.receiver.status_of = answering(bad, 500, others=204)

    await monitor.run()
    assert sorted(monitor.ids()) == sorted([bad, *good])
    attempts = 1
    while (await monitor.one()).retries:
        (refused,) = (await monitor.act(ListRefused(webhook_id=webhook_id))).rows
        assert (refused.id, refused.error) == (bad, "the receiver answered 500")
        monitor.now = refused.due_at
        good += monitor.announce()
        await monitor.run()
        attempts += 1

    found = Counter(monitor.ids())
    assert attempts == found.pop(bad) == len(SCHEDULE_SECONDS) + 1
    assert found == Counter(good)
    assert monitor.now >= began_at + timedelta(hours=27)
    webhook = await monitor.one()
    assert (webhook.state, webhook.given_up) == ("active", 1)


async def test_a_receiver_that_refuses_everything_stops_its_own_cursor(monitor: Deliverer) -> None:
    await monitor.add()
    monitor.answers(500)
    events = monitor.announce(30)

    await monitor.run()
    webhook = await monitor.one()
    assert (webhook.retries, webhook.failing_since) == (0, monitor.now)
    assert REFUSALS_IN_A_ROW <= len(monitor.receiver.posted) <= REFUSALS_IN_A_ROW + CONCURRENT_POSTS
    monitor.answers(204)
    monitor.receiver.posted.clear()
    monitor.now = await monitor.next_attempt_at()
    await monitor.run()

    assert sorted(monitor.ids()) == sorted(events)


async def test_a_receiver_that_is_gone_is_disabled_at_once(monitor: Deliverer) -> None:
    await monitor.add()
    monitor.answers(410)
    monitor.announce(50)

    await monitor.run()

    assert len(monitor.receiver.posted) <= CONCURRENT_POSTS
    webhook = await monitor.one()
    assert (webhook.last_error, webhook.state, webhook.retries) == ("the receiver answered 410", "disabled", 0)


@pytest.mark.parametrize(
    ("accepts_one", "retry_after", "seconds"),
    [
        (False, "120", 120.0),
        (False, None, 5.0),
        (False, "99999999", 86400.0),
        (True, "999999999", 86400.0),  # it cannot stop the other events for longer
        (True, "Fri, 31 Dec 9999 23:59:59 -2359", 86400.0),
        (True, "Mon, 1 Jan 99999999999999999999 00:00:00 GMT", 5.0),
    ],
)
async def test_a_busy_receiver_is_left_alone_for_as_long_as_it_asks_but_at_most_a_day(
    monitor: Deliverer, accepts_one: bool, retry_after: str | None, seconds: float
) -> None:
    await monitor.add()
    first, *_ = monitor.announce(5)
    monitor.receiver.status_of = answering(first, 204 if accepts_one else 429, others=429)
    monitor.receiver.retry_after = retry_after

    await asyncio.wait_for(monitor.round(), 4.0)
    posts = len(monitor.receiver.posted)
    await monitor.run()

    waits = (await monitor.next_attempt_at() - monitor.now).total_seconds()
    assert seconds <= waits <= seconds * (1.0 if accepts_one else 1.1) + 0.001
    assert len(monitor.receiver.posted) == posts


async def test_a_slow_receiver_delays_no_other_webhook(monitor: Deliverer, other_receiver: Receiver) -> None:
    monitor.receiver.released.clear()
    await monitor.add()
    await monitor.add(other_receiver.url)
    events = monitor.announce(BATCH_EVENTS + 10)

    rounds = await monitor.start()
    await until(lambda: len(monitor.receiver.posted) == CONCURRENT_POSTS)
    while len(other_receiver.posted) < len(events):
        rounds += await monitor.start()
        await asyncio.sleep(0.01)

    assert len(monitor.receiver.posted) == CONCURRENT_POSTS
    monitor.receiver.released.set()
    await asyncio.gather(*rounds)


async def test_a_receiver_that_does_not_answer_in_time_is_tried_again(monitor: Deliverer) -> None:
    monitor.restart(post_seconds=0.3)
    await monitor.add()
    monitor.receiver.released.clear()
    (event,) = monitor.announce()

    await monitor.run()
    assert (await monitor.one()).last_error == "no answer within 0.3 s"
    monitor.receiver.released.set()
    monitor.now = await monitor.next_attempt_at()
    await monitor.run()

    assert monitor.ids() == [event, event]


async def test_events_of_one_email_arrive_in_order(monitor: Deliverer) -> None:
    await monitor.add()
    events = monitor.announce(20)
    monitor.books.connection.execute("update outgoing_event set email_id = %s", [new_email_id()])

    await monitor.run()

    assert monitor.ids() == events


async def test_a_private_address_is_refused_without_a_connection(monitor: Deliverer) -> None:
    monitor.restart(allow_private=False)
    await monitor.add()
    monitor.announce()

    await monitor.run()

    assert monitor.receiver.posted == []
    error = (await monitor.one()).last_error or ""
    assert "not public" in error
    assert "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE" in error


async def test_a_replay_during_a_round_is_not_undone_by_the_round(monitor: Deliverer) -> None:
    webhook_id = await monitor.add()
    before = datetime.now(UTC) - timedelta(minutes=1)
    earlier = monitor.announce(3)
    await monitor.run()
    monitor.receiver.released.clear()
    later = monitor.announce()
    rounds = await monitor.start()
    await until(lambda: len(monitor.receiver.posted) == 4)
    await monitor.act(ReplayWebhook(webhook_id=webhook_id, since=before))
    monitor.receiver.released.set()
    await asyncio.gather(*rounds)
    monitor.receiver.posted.clear()

    await monitor.run()

    assert sorted(monitor.ids()) == sorted(earlier + later)
    audited = monitor.books.select("select action, detail from operator_audit where action <> 'webhook_add'")
    assert audited == [{"action": "webhook_replay", "detail": {"webhook": webhook_id}}]
