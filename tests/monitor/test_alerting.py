"""One of many hosts raises an alert once, sends reminders, and resolves the alert. Each channel works independently."""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from dispatcher.domain.alert import Kind
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.monitor.alert_words import summary
from tests.broker.proxy import Proxy
from tests.monitor.hosts import UNDECIDED_DAYS, RecordingChannel, accepts, host
from tests.store.books import Books
from tests.store.pausing import pause, resume
from tests.waiting import until

RAISED = "dead_letters raised"
RESOLVED = "dead_letters resolved"
SOON: dict[str, Any] = {"after_seconds": 0.1}
STORE_SECONDS = 3.0
"""How long a check waits for an unresponsive PostgreSQL. Even a busy PostgreSQL answers sooner."""


async def announced_in_table(books: Books, count: int) -> None:
    await until(lambda: books.count("alert_told") == count)


def insert_failed(books: Books, correlation_id: str | None, *, age: timedelta, due: bool = False) -> UUID:
    at = datetime.now(UTC) - age
    email_id = UUID(int=lowest_id_at(at).int + secrets.randbits(60))
    books.connection.execute(
        "insert into email_log (email_id, tenant_id, message_key, status, correlation_id, created_at, "
        "dead_letter_due_at) values (%s, 't', %s, 'failed', %s, %s, %s)",
        (email_id, uuid4().hex, correlation_id, at, at if due else None),
    )
    return email_id


@pytest.fixture
def due(books: Books) -> UUID:
    """An email whose message is published and that no worker has leased."""
    email_id = books.enqueue_one(tenant_id="t")
    books.change(email_id, publish_due_at=None)
    return email_id


def insert_provider_state(books: Books, state: str, reason: str, until_at: str | None = None) -> None:
    books.connection.execute(
        "insert into provider_state (provider, slot, state, reason, until_at) values ('smtp', 'a:w0', %s, %s, %s)",
        [state, reason, until_at],
    )


async def test_an_alert_is_raised_once_and_resolved_once(tables_url: str, books: Books) -> None:
    async with host(tables_url) as one:
        await one.check()
        await one.check(RAISED, messages=2)
        await announced_in_table(books, 1)
        await one.check(RAISED, messages=5)
        await one.check(RAISED, RESOLVED, messages=0)
        await announced_in_table(books, 0)
        alerts = await one.check(RAISED, RESOLVED, RAISED, messages=1)

    assert [alert.count for alert in alerts] == [2, 0, 1]
    assert len({notice.notice_id for notice in one.channel.accepted}) == 3


async def test_a_reminder_is_sent_after_the_reminder_interval(tables_url: str) -> None:
    async with host(tables_url, reminder_seconds=0) as one:
        await one.check(RAISED, messages=2)
        first, second = await one.check(RAISED, "dead_letters reminded", messages=2)

    assert first.raised_at == second.raised_at


async def test_one_of_several_hosts_alerts_and_another_replaces_a_dead_one(tables_url: str, books: Books) -> None:
    async with host(tables_url, name="a") as first:
        await first.check(RAISED, messages=2)
        await announced_in_table(books, 1)
        # Host b sends nothing: it is not the alerting host, or it finds the notice of host a in the database.
        async with host(tables_url, name="b") as second:
            await second.check(messages=2)
    # A later monitor, or the same one after a restart, repeats no notice, and knows when the alert was raised.
    async with host(tables_url, name="c") as third:
        await third.check(messages=2)
        third.depth.messages = 0
        resolved = await third.until_announced()

    assert third.channel.phases == [RESOLVED]
    assert resolved.raised_at == first.channel.accepted[0].alert.raised_at


async def test_another_host_alerts_at_once_after_an_orderly_stop(tables_url: str, books: Books) -> None:
    async with host(tables_url, name="a") as first, host(tables_url, name="b") as second:
        await first.check(RAISED, messages=1)
        await announced_in_table(books, 1)
        await first.store.leave()
        await second.check(messages=1)

        assert second.checks.alerts


async def test_a_failing_channel_is_retried_and_delays_no_other(tables_url: str) -> None:
    failing, working = RecordingChannel("failing", failures=3), RecordingChannel("working")
    async with host(tables_url, failing, working) as one:
        one.depth.messages = 1
        await one.run_once()
        await accepts(working, RAISED)
        await accepts(failing, RAISED)

    assert len(failing.refused) == 3
    assert {notice.notice_id for notice in failing.refused} == {failing.accepted[0].notice_id}


async def test_a_channel_that_sent_no_raise_sends_no_resolution(tables_url: str) -> None:
    refusing, working = RecordingChannel("refusing", failures=1_000_000), RecordingChannel("working")
    async with host(tables_url, refusing, working) as one:
        one.depth.messages = 1
        await one.run_once()
        await until(lambda: refusing.refused)
        one.depth.messages = 0
        await one.run_once()
        await accepts(working, RAISED, RESOLVED)
        refusing.failures = 0
        await one.run_once()

    assert RESOLVED not in refusing.phases


async def test_a_failed_probe_raises_its_own_alert_and_resolves_none(tables_url: str) -> None:
    async with host(tables_url) as one:
        await one.check(RAISED, messages=2)
        _, failed = await one.check(RAISED, "probe_failed raised", messages=None)
        await one.check(RAISED, "probe_failed raised", "probe_failed resolved", messages=2)

    assert (failed.reason, failed.count) == ("RabbitMQ's management API answers 503 to <address>", None)


async def test_the_oldest_emails_are_named_without_addresses(tables_url: str, books: Books) -> None:
    insert_failed(books, "ann@example.org", age=timedelta(hours=21))
    for number in range(12):
        insert_failed(books, f"order-{number}", age=timedelta(hours=20 - number))

    async with host(tables_url) as one:
        (alert,) = await one.check(RAISED, messages=13)

    assert alert.oldest_age_seconds == pytest.approx(21 * 3600, abs=60)
    assert alert.correlation_ids == ("<address>", *(f"order-{number}" for number in range(9)))


async def test_emails_about_to_lose_their_content_raise_an_alert_until_decided(tables_url: str, books: Books) -> None:
    email_id = insert_failed(books, "order-17", age=timedelta(days=UNDECIDED_DAYS - 6))
    insert_failed(books, None, age=timedelta(days=UNDECIDED_DAYS - 8))
    books.connection.execute(
        "insert into email_content (email_id, sender, recipients, subject) "
        "select email_id, 'shop@example.com', '{}', 'Hello' from email_log"
    )
    async with host(tables_url) as one:
        (alert,) = await one.check("undecided_expiring raised")
        books.connection.execute("update email_log set status = 'sent' where email_id = %s", [email_id])
        await one.check("undecided_expiring raised", "undecided_expiring resolved")

    assert (alert.count, alert.correlation_ids) == (1, ())


async def test_nothing_sent_is_raised_with_its_reason_until_an_email_is_sent(
    tables_url: str, books: Books, due: UUID
) -> None:
    async with host(tables_url, **SOON) as one:
        alert = await one.until_announced()
        books.connection.execute("update email_log set status = 'sent'")
        await one.check("nothing_sent raised", "nothing_sent resolved")

    assert (alert.component, alert.count, alert.correlation_ids) == ("dispatcher", 1, ())
    assert "No worker runs on any host" in summary(one.channel.accepted[0])


@pytest.mark.parametrize(("scope", "name"), [("all", ""), ("lane", "normal"), ("tenant", "t"), ("provider", "smtp")])
async def test_what_an_operator_paused_raises_no_alert_and_does_after_the_end(
    tables_url: str, books: Books, due: UUID, scope: str, name: str
) -> None:
    if scope == "provider":
        insert_provider_state(books, "half_open", "connection_failed")
    pause(books.connection, scope, name)
    async with host(tables_url, **SOON) as one:
        give_up_at = time.monotonic() + 3 * SOON["after_seconds"]
        while time.monotonic() < give_up_at:
            await one.check()
        resume(books.connection)
        await one.until_announced()

    assert set(one.channel.phases) <= {"nothing_sent raised", "provider_unusable raised"}


async def test_a_reminder_is_sent_of_a_pause_without_an_end_that_lasts(tables_url: str, books: Books) -> None:
    pause(books.connection, "tenant", "acme")
    pause(books.connection, "lane", "bulk", seconds=7200)
    async with host(tables_url, reminder_seconds=3600) as one:
        await one.check()
        assert one.checks.alerts[Kind.PAUSED].is_firing is False
        books.connection.execute("update pause set began_at = began_at - interval '61 minutes'")
        await one.check("paused raised")
        resume(books.connection)
        await one.check("paused raised", "paused resolved")

    assert "Tenant acme is paused by ann" in summary(one.channel.accepted[0])


async def test_events_of_emails_nobody_sent_raise_an_alert_for_a_day(tables_url: str, books: Books, due: UUID) -> None:
    async with host(tables_url) as one:
        await one.check()
        assert one.checks.alerts[Kind.IMPOSSIBLE_EVENTS].is_firing is False
        books.connection.execute(
            "insert into email_event (email_id, event_key, provider, kind, doubt, happened_at) "
            "select email_id, number::text::bytea, reporter, 'delivered', 'impossible', now() from email_log, "
            "(values (1, 'sendgrid'), (2, 'sendgrid'), (3, 'ses')) as reported (number, reporter)"
        )
        await one.check("impossible_events raised")
        books.connection.execute("update email_event set received_at = received_at - interval '25 hours'")
        await one.check("impossible_events raised", "impossible_events resolved")

    words = summary(one.channel.accepted[0])
    assert f"2 events of sendgrid in the last day, such as about email {due}; 1 event of ses" in words


async def test_emails_sent_at_intervals_raise_no_alert(tables_url: str, books: Books, due: UUID) -> None:
    async with host(tables_url, after_seconds=0.5) as one:
        give_up_at = time.monotonic() + 1.5
        while time.monotonic() < give_up_at:
            await one.check()
            books.connection.execute(
                "insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 'w0', 1) "
                "on conflict (hour, provider, outcome, slot) do update set email_count = email_hourly.email_count + 1"
            )


async def test_a_short_state_raises_no_alert_and_a_new_monitor_resolves_none(
    tables_url: str, books: Books, due: UUID
) -> None:
    async with host(tables_url, **SOON) as one:
        await one.until_announced()
        await announced_in_table(books, 1)
    async with host(tables_url, one.channel, after_seconds=3600) as again:
        await again.check("nothing_sent raised")
        await again.check("nothing_sent raised")

        assert Kind.NOTHING_SENT not in again.checks.alerts


async def test_an_unusable_provider_raises_an_alert_until_it_is_usable(tables_url: str, books: Books) -> None:
    insert_provider_state(books, "open", "SMTP refuses our credentials.", str(datetime.now(UTC) + timedelta(minutes=1)))
    async with host(tables_url, **SOON) as one:
        alert = await one.until_announced()
        books.connection.execute("update provider_state set state = 'closed'")
        await one.check("provider_unusable raised", "provider_unusable resolved")

    assert alert.component == "provider"
    assert "SMTP refuses our credentials." in (alert.reason or "")


async def test_a_vanished_host_raises_an_alert_and_an_orderly_stop_does_not(tables_url: str) -> None:
    async with host(tables_url, name="orderly") as orderly, host(tables_url, name="lost") as lost:
        await orderly.check()
        await lost.check()
        await orderly.store.leave()
    async with host(tables_url, name="watching", interval_seconds=0.01, **SOON) as one:
        alert = await one.until_announced()
        async with host(tables_url, name="lost") as back:
            await back.check()
            await one.check("host_vanished raised", "host_vanished resolved")

    assert (alert.reason or "").startswith("lost last reported at ")
    assert not [name for name in ("orderly", "watching") if name in (alert.reason or "")]


async def test_dead_letters_that_do_not_reach_the_queue_raise_an_alert(tables_url: str, books: Books) -> None:
    insert_failed(books, "order-1", age=timedelta(minutes=5), due=True)

    async with host(tables_url) as one:
        (alert,) = await one.check("dead_letters_unpublished raised")

    assert alert.oldest_age_seconds == pytest.approx(300, abs=60)


async def test_while_postgresql_is_away_each_host_alerts_and_stores_that_later(tables_url: str, books: Books) -> None:
    async with (
        Proxy(tables_url) as proxy,
        host(proxy.url, name="a", store_seconds=STORE_SECONDS) as first,
        host(proxy.url, name="b", store_seconds=STORE_SECONDS) as second,
    ):
        both = (first, second)
        for one in both:
            await one.check()
        proxy.freeze()
        await asyncio.gather(*(one.check(RAISED, messages=3) for one in both))
        alerts = await asyncio.gather(*(one.check(RAISED, messages=3) for one in both))
        assert all(alert.is_alone for (alert,) in alerts)
        proxy.thaw()
        for one in both:
            await one.until_reconnected()
        await announced_in_table(books, 1)
        for one in both:
            one.depth.messages = 0
            await one.run_once()
        await announced_in_table(books, 0)

    assert sorted(phase for one in both for phase in one.channel.phases) == [RAISED, RAISED, RESOLVED]
