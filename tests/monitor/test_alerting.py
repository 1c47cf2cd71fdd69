"""One of many hosts raises an alert once, sends reminders, and resolves the alert. Each channel works independently."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from structlog.testing import capture_logs

from dispatcher.domain.alert import Kind
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.monitor.alert_words import summary
from tests.broker.proxy import Proxy
from tests.monitor.hosts import DLQ, UNDECIDED_DAYS, Depth, Host, RecordingChannel, accepts, host
from tests.store.pausing import pause, resume
from tests.waiting import until, until_answer

RAISED = "dead_letters raised"
RESOLVED = "dead_letters resolved"
ALERT_AFTER_SECONDS = 0.1
STORE_SECONDS = 3.0
"""How long a check waits for an unresponsive PostgreSQL. Even a busy PostgreSQL answers sooner."""


@contextmanager
def tables(database_url: str) -> Iterator[psycopg.Connection]:
    """Opens a connection to the tables during the block."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


async def announced_in_table(database_url: str, count: int) -> None:
    """Waits until the table contains this number of announced alerts."""
    with tables(database_url) as connection:
        await until(lambda: connection.execute("select count(*) from alert_told").fetchone() == (count,))


def insert_failed(database_url: str, correlation_id: str | None, *, age: timedelta, due: bool = False) -> UUID:
    """Inserts an email that failed `age` ago."""
    at = datetime.now(UTC) - age
    email_id = UUID(int=lowest_id_at(at).int + secrets.randbits(60))
    with tables(database_url) as connection:
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key, status, correlation_id, created_at, "
            "dead_letter_due_at) values (%s, 't', %s, 'failed', %s, %s, %s)",
            (email_id, uuid4().hex, correlation_id, at, at if due else None),
        )
    return email_id


async def is_reconnected(*hosts: Host) -> bool:
    """Checks on each host; returns whether all hosts reached PostgreSQL. Each host then stores the notices that it sent
    during the outage."""
    for each in hosts:
        await each.check()
    return not any(each.state.is_alone for each in hosts)


async def test_an_empty_queue_raises_no_alert(tables_url: str) -> None:
    channel = RecordingChannel()
    async with host(tables_url, Depth(0), channel) as one:
        await one.check()
        await one.check()

    assert channel.accepted == []


async def test_an_alert_is_raised_once_and_resolved_once(tables_url: str) -> None:
    channel, depth = RecordingChannel(), Depth(2)
    async with host(tables_url, depth, channel) as one:
        await one.check()
        await accepts(channel, RAISED)
        await announced_in_table(tables_url, 1)
        depth.messages = 5
        await one.check()
        depth.messages = 0
        await one.check()
        await accepts(channel, RAISED, RESOLVED)
        await announced_in_table(tables_url, 0)
        depth.messages = 1
        await one.check()

        await accepts(channel, RAISED, RESOLVED, RAISED)

    assert [notice.alert.count for notice in channel.accepted] == [2, 0, 1]
    assert len({notice.notice_id for notice in channel.accepted}) == 3


async def test_a_reminder_is_sent_after_the_reminder_interval(tables_url: str) -> None:
    channel = RecordingChannel()
    async with host(tables_url, Depth(2), channel, reminder_seconds=0) as one:
        await one.check()
        await accepts(channel, RAISED)
        await one.check()
        await accepts(channel, RAISED, "dead_letters reminded")

    assert channel.accepted[0].alert.raised_at == channel.accepted[1].alert.raised_at


async def test_a_restarted_monitor_repeats_no_notice(tables_url: str) -> None:
    channel, depth = RecordingChannel(), Depth(2)
    async with host(tables_url, depth, channel) as one:
        await one.check()
        await accepts(channel, RAISED)
        await announced_in_table(tables_url, 1)

    async with host(tables_url, depth, channel) as again:
        await again.check()
        depth.messages = 0
        await again.check()
        await accepts(channel, RAISED, RESOLVED)

    assert channel.accepted[1].alert.raised_at == channel.accepted[0].alert.raised_at


async def test_ten_hosts_send_one_alert_and_another_takes_over_from_a_dead_one(tables_url: str) -> None:
    channels, depth = [RecordingChannel() for _ in range(10)], Depth(2)
    async with host(tables_url, depth, channels[0], name="a") as first:
        await first.check()
        await accepts(channels[0], RAISED)
        await announced_in_table(tables_url, 1)
        # Host b sends nothing: it is not the alerting host, or it finds the notice of host a in the database.
        async with host(tables_url, depth, channels[1], name="b") as second:
            await second.check()
            assert channels[1].accepted == []
    depth.messages = 0

    async with host(tables_url, depth, channels[2], name="c") as third:

        async def is_resolved() -> bool:
            await third.check()
            return bool(channels[2].accepted)

        await until_answer(is_resolved)

    assert [notice for channel in channels for notice in channel.phases] == [RAISED, RESOLVED]


async def test_another_host_alerts_at_once_after_an_orderly_stop(tables_url: str) -> None:
    channels = RecordingChannel(), RecordingChannel()
    async with (
        host(tables_url, Depth(1), channels[0], name="a") as first,
        host(tables_url, Depth(1), channels[1], name="b") as b,
    ):
        await first.check()
        await accepts(channels[0], RAISED)
        await announced_in_table(tables_url, 1)
        await first.store.leave()
        await b.check()

        assert b.checks.alerts
    assert channels[1].accepted == []


async def test_a_failing_channel_is_retried_and_delays_no_other(tables_url: str) -> None:
    failing, working = RecordingChannel("failing", failures=3), RecordingChannel("working")
    async with host(tables_url, Depth(1), failing, working) as one:
        await one.check()
        await accepts(working, RAISED)
        await accepts(failing, RAISED)

    assert len(failing.refused) == 3
    assert {notice.notice_id for notice in failing.refused} == {failing.accepted[0].notice_id}


async def test_a_channel_that_sent_no_raise_sends_no_resolution(tables_url: str) -> None:
    refusing, depth = RecordingChannel("refusing", failures=1_000_000), Depth(1)
    working = RecordingChannel("working")
    async with host(tables_url, depth, refusing, working) as one:
        await one.check()
        await until(lambda: refusing.refused)
        depth.messages = 0
        await one.check()
        await accepts(working, RAISED, RESOLVED)
        refusing.failures = 0
        await one.check()

    assert [phase for phase in refusing.phases if phase == RESOLVED] == []


async def test_a_failed_probe_raises_its_own_alert_and_resolves_none(tables_url: str) -> None:
    channel, depth = RecordingChannel(), Depth(2)
    async with host(tables_url, depth, channel) as one:
        await one.check()
        await accepts(channel, RAISED)
        depth.messages = None
        await one.check()
        await accepts(channel, RAISED, "probe_failed raised")
        depth.messages = 2
        await one.check()
        await accepts(channel, RAISED, "probe_failed raised", "probe_failed resolved")

    failed = channel.accepted[1].alert
    assert failed.reason == "RabbitMQ's management API answers 503 to <address>"
    assert failed.count is None


async def test_the_oldest_emails_are_named(tables_url: str) -> None:
    channel = RecordingChannel()
    for number in range(12):
        insert_failed(tables_url, f"order-{number}", age=timedelta(hours=20 - number))

    async with host(tables_url, Depth(12), channel) as one:
        await one.check()
        await accepts(channel, RAISED)

    alert = channel.accepted[0].alert
    assert alert.oldest_age_seconds == pytest.approx(20 * 3600, abs=60)
    assert alert.correlation_ids == tuple(f"order-{number}" for number in range(10))


async def test_undecided_emails_about_to_lose_their_content_raise_an_alert_until_decided(
    tables_url: str,
) -> None:
    channel = RecordingChannel()
    email_id = insert_failed(tables_url, "order-17", age=timedelta(days=UNDECIDED_DAYS - 6))
    insert_failed(tables_url, None, age=timedelta(days=UNDECIDED_DAYS - 8))
    with tables(tables_url) as connection:
        connection.execute(
            "insert into email_content (email_id, sender, recipients, subject) "
            "select email_id, 'shop@example.com', '{}', 'Hello' from email_log"
        )
    async with host(tables_url, Depth(0), channel) as one:
        await one.check()
        await accepts(channel, "undecided_expiring raised")
        with tables(tables_url) as connection:
            connection.execute("update email_log set status = 'sent' where email_id = %s", [email_id])
        await one.check()
        await accepts(channel, "undecided_expiring raised", "undecided_expiring resolved")

    assert channel.accepted[0].alert.count == 1
    assert channel.accepted[0].alert.correlation_ids == ()


def enqueue_due(database_url: str) -> None:
    """Enqueues an email whose message is published and that no worker has leased."""
    with tables(database_url) as connection:
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key) values (gen_random_uuid(), 't', %s)",
            [uuid4().hex],
        )


async def check_until_announced(one: Host, channel: RecordingChannel) -> None:
    """Checks until an alert is announced."""

    async def is_announced() -> bool:
        await one.check()
        return bool(channel.accepted)

    await until_answer(is_announced)


async def test_nothing_sent_is_raised_with_its_reason_until_an_email_is_sent(tables_url: str) -> None:
    channel = RecordingChannel()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), channel, after_seconds=ALERT_AFTER_SECONDS) as one:
        await check_until_announced(one, channel)
        with tables(tables_url) as connection:
            connection.execute("update email_log set status = 'sent'")
        await one.check()
        await accepts(channel, "nothing_sent raised", "nothing_sent resolved")

    alert = channel.accepted[0].alert
    assert (alert.component, alert.count, alert.correlation_ids) == ("dispatcher", 1, ())
    assert summary(channel.accepted[0]) == (
        "1 email is due, but none is sent: No worker runs on any host: start `dispatcher run`"
    )


@pytest.mark.parametrize(("scope", "name"), [("all", ""), ("lane", "normal"), ("tenant", "t"), ("provider", "smtp")])
async def test_what_an_operator_paused_raises_no_alert_and_does_after_the_end(
    tables_url: str, scope: str, name: str
) -> None:
    channel = RecordingChannel()
    enqueue_due(tables_url)
    with tables(tables_url) as connection:
        connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at) "
            "values ('smtp', 'a:w0', 'half_open', 'connection_failed', null)"
        )
        connection.execute("delete from provider_state where %s <> 'provider'", [scope])
        pause(connection, scope, name)
        async with host(tables_url, Depth(0), channel, after_seconds=ALERT_AFTER_SECONDS) as one:
            give_up_at = time.monotonic() + 5 * ALERT_AFTER_SECONDS
            while time.monotonic() < give_up_at:
                await one.check()
            assert channel.accepted == []
            resume(connection)
            await check_until_announced(one, channel)

    assert set(channel.phases) <= {"nothing_sent raised", "provider_unusable raised"}


async def test_a_reminder_is_sent_of_a_pause_without_an_end_that_lasts(tables_url: str) -> None:
    channel = RecordingChannel()
    with tables(tables_url) as connection:
        pause(connection, "tenant", "acme")
        pause(connection, "lane", "bulk", seconds=7200)
        async with host(tables_url, Depth(0), channel, reminder_seconds=3600) as one:
            await one.check()
            assert one.checks.alerts[Kind.PAUSED].is_firing is False
            connection.execute("update pause set began_at = began_at - interval '61 minutes'")
            await one.check()
            await accepts(channel, "paused raised")
            resume(connection)
            await one.check()
            await accepts(channel, "paused raised", "paused resolved")

    assert summary(channel.accepted[0]) == (
        "a pause without an end time is still in force: Tenant acme is paused by ann: maintenance"
    )


async def test_events_about_emails_that_no_worker_sent_raise_an_alert_for_a_day(tables_url: str) -> None:
    channel = RecordingChannel()
    enqueue_due(tables_url)
    with tables(tables_url) as connection:
        (email_id,) = connection.execute("select email_id from email_log").fetchone() or ()
        async with host(tables_url, Depth(0), channel) as one:
            await one.check()
            assert one.checks.alerts[Kind.IMPOSSIBLE_EVENTS].is_firing is False
            connection.execute(
                "insert into email_event (email_id, event_key, provider, kind, doubt, happened_at) "
                "select email_id, number::text::bytea, reporter, 'delivered', 'impossible', now() from email_log, "
                "(values (1, 'sendgrid'), (2, 'sendgrid'), (3, 'ses')) as reported (number, reporter)"
            )
            await one.check()
            await accepts(channel, "impossible_events raised")
            connection.execute("update email_event set received_at = received_at - interval '25 hours'")
            await one.check()
            await accepts(channel, "impossible_events raised", "impossible_events resolved")

    assert summary(channel.accepted[0]) == (
        "events arrive about emails that no worker sent: "
        f"2 events of sendgrid in the last day, such as about email {email_id}; "
        f"1 event of ses in the last day, such as about email {email_id}"
    )


async def test_emails_sent_at_intervals_raise_no_alert(tables_url: str) -> None:
    channel = RecordingChannel()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), channel, after_seconds=0.5) as one:
        give_up_at = time.monotonic() + 1.5
        while time.monotonic() < give_up_at:
            await one.check()
            with tables(tables_url) as connection:
                connection.execute(
                    "insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 'w0', 1) "
                    "on conflict (hour, provider, outcome, slot) do update "
                    "set email_count = email_hourly.email_count + 1"
                )

    assert channel.accepted == []


async def test_a_short_state_raises_no_alert_and_a_new_monitor_resolves_none(tables_url: str) -> None:
    channel = RecordingChannel()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), channel, after_seconds=ALERT_AFTER_SECONDS) as one:
        await check_until_announced(one, channel)
        await announced_in_table(tables_url, 1)
    async with host(tables_url, Depth(0), channel, after_seconds=3600) as again:
        await again.check()
        await again.check()

        assert Kind.NOTHING_SENT not in again.checks.alerts
    assert channel.phases == ["nothing_sent raised"]


async def test_an_unusable_provider_raises_an_alert_until_it_is_usable(tables_url: str) -> None:
    channel = RecordingChannel()
    with tables(tables_url) as connection:
        connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at) "
            "values ('smtp', 'a:w0', 'open', 'SMTP refuses our credentials.', now() + interval '1 min')"
        )
        async with host(tables_url, Depth(0), channel, after_seconds=ALERT_AFTER_SECONDS) as one:
            await check_until_announced(one, channel)
            connection.execute("update provider_state set state = 'closed'")
            await one.check()
            await accepts(channel, "provider_unusable raised", "provider_unusable resolved")

    assert channel.accepted[0].alert.reason == (
        "smtp refuses all emails: SMTP refuses our credentials. To try it at once: `dispatcher resume provider smtp`."
    )
    assert channel.accepted[0].alert.component == "provider"


async def test_a_vanished_host_raises_an_alert_and_an_orderly_stop_does_not(
    tables_url: str,
) -> None:
    channel = RecordingChannel()
    async with (
        host(tables_url, Depth(0), RecordingChannel(), name="orderly") as orderly,
        host(tables_url, Depth(0), RecordingChannel(), name="lost") as lost,
    ):
        await orderly.check()
        await lost.check()
        await orderly.store.leave()
    async with host(
        tables_url, Depth(0), channel, name="watching", after_seconds=ALERT_AFTER_SECONDS, interval_seconds=0.01
    ) as one:
        await check_until_announced(one, channel)
        async with host(tables_url, Depth(0), RecordingChannel(), name="lost") as back:
            await back.check()
            await one.check()
            await accepts(channel, "host_vanished raised", "host_vanished resolved")

    reason = channel.accepted[0].alert.reason or ""
    assert reason.startswith("lost last reported at ")
    assert "orderly" not in reason
    assert "watching" not in reason


async def test_a_name_that_two_hosts_share_for_a_while_is_logged_once(tables_url: str) -> None:
    with capture_logs() as logs:
        async with (
            host(tables_url, Depth(0), name="alerting", after_seconds=0.2, interval_seconds=0.01) as alerting,
            host(tables_url, Depth(0), name="alone") as alone,
            host(tables_url, Depth(0), name="twin") as one,
            host(tables_url, Depth(0), name="twin") as other,
        ):
            for each in (alerting, alone, one, other):
                await each.check()

            async def is_logged() -> bool:
                await alerting.check()
                return bool(shared_names(logs))

            assert not shared_names(logs)
            await until_answer(is_logged)
            await alerting.check()

    assert shared_names(logs) == ["twin"]


def shared_names(logs: list[MutableMapping[str, Any]]) -> list[str]:
    """The hosts of the events `host.name_shared`."""
    return [entry["host"] for entry in logs if entry["event"] == "host.name_shared"]


async def test_addresses_in_correlation_ids_are_removed(tables_url: str) -> None:
    channel = RecordingChannel()
    insert_failed(tables_url, "ann@example.org", age=timedelta(hours=1))

    async with host(tables_url, Depth(1), channel) as one:
        await one.check()
        await accepts(channel, RAISED)

    assert channel.accepted[0].alert.correlation_ids == ("<address>",)


async def test_dead_letters_that_do_not_reach_the_queue_raise_an_alert(tables_url: str) -> None:
    channel = RecordingChannel()
    insert_failed(tables_url, "order-1", age=timedelta(minutes=5), due=True)

    async with host(tables_url, Depth(0), channel) as one:
        await one.check()
        await accepts(channel, "dead_letters_unpublished raised")

    assert channel.accepted[0].alert.oldest_age_seconds == pytest.approx(300, abs=60)


async def test_while_postgresql_is_unreachable_each_host_alerts_and_stores_that_later(tables_url: str) -> None:
    channels, depth = (RecordingChannel(), RecordingChannel()), Depth(0)
    async with (
        Proxy(tables_url) as proxy,
        host(proxy.url, depth, channels[0], name="a", store_seconds=STORE_SECONDS) as first,
        host(proxy.url, depth, channels[1], name="b", store_seconds=STORE_SECONDS) as b,
    ):
        for one in (first, b):
            await one.check()
        proxy.freeze()
        depth.messages = 3
        for _ in range(2):
            await asyncio.gather(first.check(), b.check())
            for channel in channels:
                await accepts(channel, RAISED)
        assert all(channel.accepted[0].alert.is_alone for channel in channels)
        proxy.thaw()
        await until_answer(lambda: is_reconnected(first, b))
        await announced_in_table(tables_url, 1)
        depth.messages = 0
        await first.check()
        await b.check()
        await announced_in_table(tables_url, 0)

    assert sorted(phase for channel in channels for phase in channel.phases) == [RAISED, RAISED, RESOLVED]


async def test_an_alert_that_ends_while_postgresql_is_unreachable_is_resolved_later(tables_url: str) -> None:
    channel, depth = RecordingChannel(), Depth(1)
    async with Proxy(tables_url) as proxy, host(proxy.url, depth, channel, store_seconds=STORE_SECONDS) as one:
        await one.check()
        await accepts(channel, RAISED)
        await until_answer(lambda: is_reconnected(one))
        await announced_in_table(tables_url, 1)
        proxy.freeze()
        depth.messages = 0
        await one.check()
        await accepts(channel, RAISED, RESOLVED)
        proxy.thaw()
        await until_answer(lambda: is_reconnected(one))
        await announced_in_table(tables_url, 0)
    assert channel.phases == [RAISED, RESOLVED]
    assert channel.accepted[0].alert.queue == DLQ
