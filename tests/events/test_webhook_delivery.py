"""Events reach a webhook at least once, signed and with the same id, whatever its receiver does meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import repeat
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
import trustme
from standardwebhooks.webhooks import Webhook as Verifier

from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.webhooks import EnableWebhook, ListWebhooks, ReplayWebhook, RotateWebhook
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.event import OutgoingKind
from dispatcher.domain.status import Status
from dispatcher.domain.webhook import SCHEDULE_SECONDS, Webhook, new_secret
from dispatcher.events.webhook_delivery import CONCURRENT_POSTS, REFUSALS_IN_A_ROW, WebhookDelivery
from dispatcher.host.name_lookup import resolve
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import AsyncSession, connect_async
from dispatcher.store.leases import LeaseStore
from dispatcher.transport.destination import Resolve
from dispatcher.transport.signed_post import trusting_context
from tests.monitor.receiver import Posted, Receiver, receiving, receiving_raw, write_ca
from tests.store.books import Books
from tests.store.results import result
from tests.store.test_outgoing_events import add_webhook, announce, await_feed, disk_full
from tests.waiting import until

OPERATOR: Final = Who(Face.COMMAND, "ann@ops-1")
DAY: Final = timedelta(days=1)


@pytest.fixture(scope="session")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running


@pytest.fixture
def other_receiver(ca: trustme.CA) -> Iterator[Receiver]:
    with receiving(ca, "127.0.0.1") as running:
        yield running


@dataclass
class Deliverer:
    """The delivery of one monitor, with a clock that the test sets."""

    session: AsyncSession
    ca_file: Path
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    allow_private: bool = True
    post_seconds: float = 10.0
    resolver: Resolve = resolve

    def __post_init__(self) -> None:
        self.delivery = self.started()

    def started(self) -> WebhookDelivery:
        """The delivery of a process that has just started."""
        return WebhookDelivery(
            "",
            allow_private=self.allow_private,
            context=trusting_context(self.ca_file),
            now=lambda: self.now,
            post_seconds=self.post_seconds,
            retry_seconds=0.0,
            resolver=self.resolver,
        )

    async def add(self, url: str, tenant: str | None = "shop", **more: Any) -> int:
        """Adds a webhook."""
        return await add_webhook(self.session, url, tenant, **more)

    async def round(self) -> bool:
        """Runs one round for each webhook that has something to deliver; returns whether there was one."""
        rounds = await self.delivery.start_rounds(self.session)
        await asyncio.gather(*rounds)
        return bool(rounds)

    async def run(self) -> None:
        """Runs rounds until no webhook has anything to deliver now."""
        while await self.round():
            pass

    async def one(self) -> Webhook:
        """The only webhook."""
        (webhook,) = await self.list()
        return webhook

    async def list(self) -> list[Webhook]:
        """All webhooks."""
        return await run(self.session, ListWebhooks(), OPERATOR)


@pytest.fixture
async def deliverer(tables_url: str, ca: trustme.CA, tmp_path: Path) -> AsyncIterator[Deliverer]:
    async with await connect_async(tables_url, name="delivery") as session:
        opened = Deliverer(session, write_ca(ca, tmp_path))
        yield opened
        await opened.delivery.stop()


def ids(posted: list[Posted]) -> list[UUID]:
    return [UUID(each.headers["webhook-id"]) for each in posted]


async def test_an_event_arrives_signed_and_without_content(
    deliverer: Deliverer, receiver: Receiver, store: LeaseStore, books: Books
) -> None:
    secret = new_secret()
    await deliverer.add(receiver.url, secret=secret)
    email_id = books.enqueue_one(tenant_id="shop", correlation_id="order-7")
    (lease,) = await store.lease(books.keys([email_id]), 60)
    await store.record([result(lease, Status.FAILED, error_type="rejected_recipient", provider_code="550")])
    await_feed(books.connection)

    await deliverer.run()

    (posted,) = receiver.posted
    assert Verifier(secret).verify(posted.body.decode(), dict(posted.headers)) == posted.json
    assert posted.json["type"] == "email.failed"
    at = posted.json["data"].pop("happened_at")
    assert datetime.fromisoformat(at) == datetime.fromisoformat(posted.json["timestamp"])
    assert posted.json["data"] == {
        "email_id": str(email_id),
        "tenant_id": "shop",
        "message_key": books.key(email_id),
        "correlation_id": "order-7",
        "provider": "smtp",
        "reason": "rejected_recipient",
        "code": "550",
        "bounce": None,
        "happened_at": at,
    }
    assert b"@" not in posted.body


async def test_a_webhook_that_asks_for_recipients_gets_those_of_the_event(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url, recipients=True)
    email_id = books.enqueue_one(tenant_id="shop", to=["Ann <ann@example.org>", "bob@example.org"])
    bob = (await AddressHasher.open(deliverer.session)).hash("bob@example.org")
    insert = b"insert into outgoing_event (kind, email_id, tenant_id, message_key, address_hash)"
    values = b"values ('sent', %s, 'shop', 'k', null), ('bounced', %s, 'shop', 'k', %s)"
    books.connection.execute(insert + values, [email_id, email_id, bob])
    await_feed(books.connection)

    await deliverer.run()

    found = {posted.json["type"]: posted.data["recipients"] for posted in receiver.posted}
    assert found == {"email.sent": ["Ann <ann@example.org>", "bob@example.org"], "email.bounced": ["bob@example.org"]}


async def test_a_webhook_gets_only_its_tenants_events_of_its_kinds(
    deliverer: Deliverer, receiver: Receiver, other_receiver: Receiver, books: Books
) -> None:
    announce(books.connection)  # before the webhooks were added
    await deliverer.add(receiver.url, kinds=[OutgoingKind.SENT])
    await deliverer.add(other_receiver.url, None, kinds=[OutgoingKind.HELD, OutgoingKind.SENT])
    ours, others = announce(books.connection), announce(books.connection, "other")
    held = announce(books.connection)
    books.connection.execute("update outgoing_event set kind = 'held' where event_id = any(%s)", [held])

    await deliverer.run()

    assert ids(receiver.posted) == ours
    assert sorted(ids(other_receiver.posted)) == sorted(ours + others + held)


async def test_after_a_rotation_both_secrets_verify_for_a_day(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    old = new_secret()
    webhook_id = await deliverer.add(receiver.url, secret=old)
    new = (await run(deliverer.session, RotateWebhook(webhook_id=webhook_id), OPERATOR)).secret
    announce(books.connection)
    await deliverer.run()
    books.connection.execute("update webhook set previous_until = clock_timestamp()")
    announce(books.connection)
    await deliverer.run()

    first, second = receiver.posted
    for secret in (old, new):
        Verifier(secret).verify(first.body.decode(), dict(first.headers))
    Verifier(new).verify(second.body.decode(), dict(second.headers))
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(old).verify(second.body.decode(), dict(second.headers))


async def test_a_receiver_that_is_down_for_a_day_gets_every_event_and_few_posts_meanwhile(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url)
    began_at = deliverer.now
    receiver.status_of = lambda _: 503
    events = announce(books.connection, count=300)
    await deliverer.run()
    while deliverer.now < began_at + DAY:
        deliverer.now = max(deliverer.now, (await deliverer.one()).next_attempt_at)
        events += announce(books.connection)
        if len(events) == 320:
            deliverer.delivery = deliverer.started()  # the process was killed: all that it had in memory is lost
        assert await deliverer.round()
    while_down = Counter(ids(receiver.posted))
    assert (await deliverer.one()).failing_since == began_at
    receiver.status_of = lambda _: 204

    deliverer.now += timedelta(hours=1)
    await deliverer.run()

    arrived = ids(receiver.posted)[while_down.total() :]
    assert sorted(arrived) == sorted(events)
    assert len(while_down) <= CONCURRENT_POSTS
    assert while_down.total() <= CONCURRENT_POSTS + 24 * 2 + 10
    assert (await deliverer.one()).failing_since is None


async def test_after_a_full_disk_an_event_is_delivered_again_with_the_same_id(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url)
    events = announce(books.connection, count=3)

    with disk_full(books.connection, "update on webhook"):
        await deliverer.round()
    await deliverer.run()

    assert Counter(ids(receiver.posted)) == Counter(dict.fromkeys(events, 2))
    assert (await deliverer.one()).failing_since is None


async def test_a_receiver_that_stays_down_is_disabled_after_27_hours_and_goes_on_where_it_stopped(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    webhook_id = await deliverer.add(receiver.url)
    began_at = deliverer.now
    receiver.status_of = lambda _: 503
    events = announce(books.connection, count=20)
    while (await deliverer.one()).state == "active":
        deliverer.now = max(deliverer.now, (await deliverer.one()).next_attempt_at)
        assert await deliverer.round()
    hours = (deliverer.now - began_at) / timedelta(hours=1)
    assert 27 <= hours < 29
    assert (await deliverer.one()).last_error == "the receiver answered 503"
    deliverer.now += DAY
    assert not await deliverer.round()
    receiver.status_of = lambda _: 204
    receiver.posted.clear()

    enabled = await run(deliverer.session, EnableWebhook(webhook_id=webhook_id), OPERATOR)
    shown = await deliverer.one()
    assert (enabled.state, enabled.retries, enabled.given_up) == (shown.state, shown.retries, shown.given_up)
    await deliverer.run()

    assert sorted(ids(receiver.posted)) == sorted(events)


async def test_one_refused_event_does_not_stop_the_others_and_is_tried_by_the_schedule(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url)
    began_at = deliverer.now
    bad, *good = announce(books.connection, count=50)
    receiver.status_of = lambda posted: 500 if posted.headers["webhook-id"] == str(bad) else 204

    await deliverer.run()
    assert sorted(ids(receiver.posted)) == sorted([bad, *good])
    attempts = 1
    while (await deliverer.one()).retries:
        (row,) = books.select("select due_at from webhook_retry")
        deliverer.now = row["due_at"]
        good += announce(books.connection)
        await deliverer.run()
        attempts += 1

    found = Counter(ids(receiver.posted))
    assert attempts == found.pop(bad) == len(SCHEDULE_SECONDS) + 1
    assert found == Counter(good)
    assert deliverer.now >= began_at + timedelta(hours=27)
    webhook = await deliverer.one()
    assert (webhook.state, webhook.given_up) == ("active", 1)


async def test_a_receiver_that_refuses_everything_stops_its_own_cursor(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url)
    receiver.status_of = lambda _: 500
    events = announce(books.connection, count=100)

    await deliverer.run()
    webhook = await deliverer.one()
    assert (webhook.retries, webhook.failing_since) == (0, deliverer.now)
    assert REFUSALS_IN_A_ROW <= len(receiver.posted) <= REFUSALS_IN_A_ROW + CONCURRENT_POSTS
    receiver.status_of = lambda _: 204
    receiver.posted.clear()
    deliverer.now = webhook.next_attempt_at
    await deliverer.run()

    assert sorted(ids(receiver.posted)) == sorted(events)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_a_refusal_and_is_not_followed(
    deliverer: Deliverer, receiver: Receiver, books: Books, status: int
) -> None:
    await deliverer.add(receiver.url)
    receiver.statuses = [status]
    announce(books.connection)

    await deliverer.run()

    assert len(receiver.posted) == 1
    assert (await deliverer.one()).last_error == f"the receiver answered {status}"
    assert (await deliverer.one()).retries == 1


async def test_a_receiver_that_is_gone_is_disabled_at_once(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    await deliverer.add(receiver.url)
    receiver.status_of = lambda _: 410
    announce(books.connection, count=50)

    await deliverer.run()

    assert len(receiver.posted) <= CONCURRENT_POSTS
    assert (await deliverer.one()).state == "disabled"


@pytest.mark.parametrize(("retry_after", "seconds"), [("120", 120.0), (None, 5.0), ("99999999", 86400.0)])
async def test_a_busy_receiver_is_left_alone_for_as_long_as_it_asks(
    deliverer: Deliverer, receiver: Receiver, books: Books, retry_after: str | None, seconds: float
) -> None:
    await deliverer.add(receiver.url)
    receiver.statuses, receiver.retry_after = [429], retry_after
    announce(books.connection)

    await deliverer.run()

    waits = (await deliverer.one()).next_attempt_at - deliverer.now
    assert seconds <= waits.total_seconds() <= seconds * 1.1
    assert len(receiver.posted) == 1


@pytest.mark.parametrize(
    ("retry_after", "seconds"),
    [
        ("999999999", 86400.0),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 86400.0),
        ("Mon, 1 Jan 99999999999999999999 00:00:00 GMT", 5.0),
    ],
)
async def test_a_receiver_that_accepts_some_events_cannot_stop_the_others_for_long(
    deliverer: Deliverer, receiver: Receiver, books: Books, retry_after: str, seconds: float
) -> None:
    await deliverer.add(receiver.url)
    first, *_ = announce(books.connection, count=5)
    receiver.status_of = lambda posted: 204 if posted.headers["webhook-id"] == str(first) else 429
    receiver.retry_after = retry_after

    await asyncio.wait_for(deliverer.round(), 4.0)

    waits = (await deliverer.one()).next_attempt_at - deliverer.now
    assert waits.total_seconds() == pytest.approx(seconds)


async def test_a_slow_receiver_delays_no_other_webhook(
    deliverer: Deliverer, receiver: Receiver, other_receiver: Receiver, books: Books
) -> None:
    receiver.released.clear()
    await deliverer.add(receiver.url)
    await deliverer.add(other_receiver.url)
    events = announce(books.connection, count=300)

    rounds = await deliverer.delivery.start_rounds(deliverer.session)
    await until(lambda: len(receiver.posted) == CONCURRENT_POSTS)
    while len(other_receiver.posted) < len(events):
        rounds += await deliverer.delivery.start_rounds(deliverer.session)
        await asyncio.sleep(0.01)

    assert len(receiver.posted) == CONCURRENT_POSTS
    receiver.released.set()
    await asyncio.gather(*rounds)


@pytest.mark.parametrize("head", ["HTTP/1.1 100 Continue", "HTTP/1.1 103 Early Hints" + "\r\nlink: x" * 600])
async def test_a_hostile_receiver_delays_no_other_tenant(
    deliverer: Deliverer, receiver: Receiver, books: Books, ca: trustme.CA, head: str
) -> None:
    hostile = f"{head}\r\n\r\n".encode()
    with receiving_raw(ca, lambda: repeat(hostile)) as attacker:
        for _ in range(5):
            await deliverer.add(attacker.url, "attacker")
        await deliverer.add(receiver.url)
        announce(books.connection, "attacker", count=50)
        events = announce(books.connection, count=50)

        await deliverer.run()

    assert sorted(ids(receiver.posted)) == sorted(events)
    *attackers, shop = await deliverer.list()
    assert (shop.failing_since, shop.last_error) == (None, None)
    assert all("answer" in (each.last_error or "") and each.failing_since for each in attackers)
    assert not any("no answer" in (each.last_error or "") for each in attackers)


async def test_a_round_resolves_the_host_once(deliverer: Deliverer, receiver: Receiver, books: Books) -> None:
    asked = []

    async def resolver(host: str, _port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"]

    deliverer.resolver = resolver
    deliverer.delivery = deliverer.started()
    await deliverer.add(receiver.url)
    for rounds in (1, 2):
        announce(books.connection, count=50)
        await deliverer.round()
        assert len(asked) == rounds

    assert len(receiver.posted) == 100


async def test_silent_name_servers_delay_only_their_own_webhook(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    answers: dict[str, asyncio.Future[Sequence[str]]] = {}

    async def resolver(host: str, port: int) -> Sequence[str]:
        if host == "127.0.0.1":
            return await resolve(host, port)
        assert host not in answers
        answers[host] = asyncio.get_running_loop().create_future()
        return await answers[host]

    deliverer.resolver = resolver
    deliverer.delivery = deliverer.started()
    silent = await deliverer.add("https://silent.example/")
    await deliverer.add(receiver.url)
    events = announce(books.connection, count=50)

    rounds = await deliverer.delivery.start_rounds(deliverer.session)
    await until(lambda: len(receiver.posted) == len(events))
    answers["silent.example"].set_exception(socket.gaierror(socket.EAI_AGAIN, "Try again"))
    await asyncio.gather(*rounds)

    errors = {each.id: each.last_error for each in await deliverer.list()}
    assert errors.pop(silent) == "the host name cannot be resolved (try again)"
    assert set(errors.values()) == {None}


async def test_a_look_up_that_takes_too_long_fails_the_round_and_the_next_round_asks_again(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    silent, asked = asyncio.Event(), []

    async def resolver(host: str, _port: int) -> Sequence[str]:
        asked.append(host)
        if len(asked) == 1:
            await silent.wait()
        return ["127.0.0.1"]

    deliverer.resolver, deliverer.post_seconds = resolver, 0.3
    deliverer.delivery = deliverer.started()
    await deliverer.add(receiver.url)
    events = announce(books.connection, count=20)

    await deliverer.run()
    webhook = await deliverer.one()
    deliverer.now, deliverer.post_seconds = webhook.next_attempt_at, 10.0
    deliverer.delivery = deliverer.started()
    await deliverer.run()
    silent.set()

    assert webhook.last_error == "no answer within 0.3 s"
    assert sorted(ids(receiver.posted)) == sorted(events)


async def test_a_receiver_that_does_not_answer_in_time_is_tried_again(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    deliverer.post_seconds = 0.3
    deliverer.delivery = deliverer.started()
    await deliverer.add(receiver.url)
    receiver.released.clear()
    (event,) = announce(books.connection)

    await deliverer.run()
    assert (await deliverer.one()).last_error == "no answer within 0.3 s"
    receiver.released.set()
    deliverer.now = (await deliverer.one()).next_attempt_at
    await deliverer.run()

    assert ids(receiver.posted) == [event, event]


async def test_events_of_one_email_arrive_in_order(deliverer: Deliverer, receiver: Receiver, books: Books) -> None:
    await deliverer.add(receiver.url)
    events = announce(books.connection, count=60)
    books.connection.execute("update outgoing_event set email_id = %s", [new_email_id()])

    await deliverer.run()

    assert ids(receiver.posted) == events


async def test_a_private_address_is_refused_without_a_connection(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    deliverer.allow_private = False
    deliverer.delivery = deliverer.started()
    await deliverer.add(receiver.url)
    announce(books.connection)

    await deliverer.run()

    assert receiver.posted == []
    error = (await deliverer.one()).last_error or ""
    assert "not public" in error
    assert "DISPATCHER_WEBHOOKS_ALLOW_PRIVATE" in error


async def test_a_replay_during_a_round_is_not_undone_by_the_round(
    deliverer: Deliverer, receiver: Receiver, books: Books
) -> None:
    webhook_id = await deliverer.add(receiver.url)
    before = datetime.now(UTC) - timedelta(minutes=1)
    earlier = announce(books.connection, count=3)
    await deliverer.run()
    receiver.released.clear()
    later = announce(books.connection)
    rounds = await deliverer.delivery.start_rounds(deliverer.session)
    await until(lambda: len(receiver.posted) == 4)
    await run(deliverer.session, ReplayWebhook(webhook_id=webhook_id, since=before), OPERATOR)
    receiver.released.set()
    await asyncio.gather(*rounds)
    receiver.posted.clear()

    await deliverer.run()

    assert sorted(ids(receiver.posted)) == sorted(earlier + later)
    audited = books.select("select action, detail from operator_audit where action <> 'webhook_add'")
    assert audited == [{"action": "webhook_replay", "detail": {"webhook": webhook_id}}]
