"""Alerts over their life: told once by one of many hosts, again after a while, and over; by each channel for itself."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.alerts.wording import summary
from dispatcher.domain.alert import Kind
from dispatcher.domain.email_id import lowest_id_at
from tests.broker.proxy import Proxy
from tests.maintenance.hosts import DLQ, UNDECIDED_DAYS, Depth, Ear, Host, hears, host
from tests.waiting import until, until_answer

RAISED = "dead_letters raised"
RESOLVED = "dead_letters resolved"
LASTING_SECONDS = 0.1
STORE_SECONDS = 3.0
"""What a PostgreSQL that is silent costs a look; one that is only busy answers sooner."""


@contextmanager
def tables(database_url: str) -> Iterator[psycopg.Connection]:
    """A look into the tables, or a hand in them."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


async def entered(database_url: str, count: int) -> None:
    """Waits until so many alerts stand as told."""
    with tables(database_url) as connection:
        await until(lambda: connection.execute("select count(*) from alert_told").fetchone() == (count,))


def insert_failed(database_url: str, correlation_id: str | None, *, age: timedelta, due: bool = False) -> UUID:
    """An email that failed so long ago."""
    at = datetime.now(UTC) - age
    email_id = UUID(int=lowest_id_at(at).int + secrets.randbits(60))
    with tables(database_url) as connection:
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key, status, correlation_id, created_at, "
            "dead_letter_due_at) values (%s, 't', %s, 'failed', %s, %s, %s)",
            (email_id, uuid4().hex, correlation_id, at, at if due else None),
        )
    return email_id


async def is_back(*hosts: Host) -> bool:
    """Whether PostgreSQL answers all of these when they look, in which case what they told meanwhile is entered."""
    for each in hosts:
        await each.look()
    return not any(each.book.is_alone for each in hosts)


async def test_an_empty_queue_is_nothing_to_tell(tables_url: str) -> None:
    ear = Ear()
    async with host(tables_url, Depth(0), ear) as one:
        await one.look()
        await one.look()

    assert ear.heard == []


async def test_a_state_is_told_once_while_it_lasts_and_when_it_is_over(tables_url: str) -> None:
    ear, depth = Ear(), Depth(2)
    async with host(tables_url, depth, ear) as one:
        await one.look()
        await hears(ear, RAISED)
        await entered(tables_url, 1)
        depth.messages = 5
        await one.look()
        depth.messages = 0
        await one.look()
        await hears(ear, RAISED, RESOLVED)
        await entered(tables_url, 0)
        depth.messages = 1
        await one.look()

        await hears(ear, RAISED, RESOLVED, RAISED)

    assert [notice.alert.count for notice in ear.heard] == [2, 0, 1]
    assert len({notice.notice_id for notice in ear.heard}) == 3


async def test_it_is_told_again_after_the_reminder_s_time(tables_url: str) -> None:
    ear = Ear()
    async with host(tables_url, Depth(2), ear, reminder_seconds=0) as one:
        await one.look()
        await hears(ear, RAISED)
        await one.look()
        await hears(ear, RAISED, "dead_letters reminded")

    assert ear.heard[0].alert.raised_at == ear.heard[1].alert.raised_at


async def test_a_monitor_that_is_born_again_tells_nothing_twice(tables_url: str) -> None:
    ear, depth = Ear(), Depth(2)
    async with host(tables_url, depth, ear) as one:
        await one.look()
        await hears(ear, RAISED)
        await entered(tables_url, 1)

    async with host(tables_url, depth, ear) as again:
        await again.look()
        depth.messages = 0
        await again.look()
        await hears(ear, RAISED, RESOLVED)

    assert ear.heard[1].alert.raised_at == ear.heard[0].alert.raised_at


async def test_ten_hosts_send_one_alert_and_another_takes_over_from_one_that_is_gone(tables_url: str) -> None:
    ears, depth = [Ear() for _ in range(10)], Depth(2)
    async with host(tables_url, depth, ears[0], name="a") as first:
        await first.look()
        await hears(ears[0], RAISED)
        await entered(tables_url, 1)
        # Which may be the one that looks by now.
        async with host(tables_url, depth, ears[1], name="b") as second:
            await second.look()
            assert ears[1].heard == []
    depth.messages = 0

    async with host(tables_url, depth, ears[2], name="c") as third:

        async def told() -> bool:
            await third.look()
            return bool(ears[2].heard)

        await until_answer(told)

    assert [notice for ear in ears for notice in ear.phases] == [RAISED, RESOLVED]


async def test_a_host_that_stops_leaves_the_watch_to_others_at_once(tables_url: str) -> None:
    ears = Ear(), Ear()
    async with (
        host(tables_url, Depth(1), ears[0], name="a") as first,
        host(tables_url, Depth(1), ears[1], name="b") as b,
    ):
        await first.look()
        await hears(ears[0], RAISED)
        await entered(tables_url, 1)
        await first.store.leave()
        await b.look()

        assert b.watch.alerts
    assert ears[1].heard == []


async def test_a_channel_that_fails_is_tried_again_and_delays_no_other(tables_url: str) -> None:
    failing, well = Ear("failing", failures=3), Ear("well")
    async with host(tables_url, Depth(1), failing, well) as one:
        await one.look()
        await hears(well, RAISED)
        await hears(failing, RAISED)

    assert len(failing.refused) == 3
    assert {notice.notice_id for notice in failing.refused} == {failing.heard[0].notice_id}


async def test_who_never_heard_of_a_state_does_not_hear_of_its_end(tables_url: str) -> None:
    deaf, depth = Ear("deaf", failures=1_000_000), Depth(1)
    well = Ear("well")
    async with host(tables_url, depth, deaf, well) as one:
        await one.look()
        await until(lambda: deaf.refused)
        depth.messages = 0
        await one.look()
        await hears(well, RAISED, RESOLVED)
        deaf.failures = 0
        await one.look()

    assert [phase for phase in deaf.phases if phase == RESOLVED] == []


async def test_a_probe_that_fails_is_told_and_says_nothing_of_the_dead_letters(tables_url: str) -> None:
    ear, depth = Ear(), Depth(2)
    async with host(tables_url, depth, ear) as one:
        await one.look()
        await hears(ear, RAISED)
        depth.messages = None
        await one.look()
        await hears(ear, RAISED, "probe_failed raised")
        depth.messages = 2
        await one.look()
        await hears(ear, RAISED, "probe_failed raised", "probe_failed resolved")

    failed = ear.heard[1].alert
    assert failed.reason == "RabbitMQ's management API answers 503 to <address>"
    assert failed.count is None


async def test_the_oldest_are_named(tables_url: str) -> None:
    ear = Ear()
    for number in range(12):
        insert_failed(tables_url, f"order-{number}", age=timedelta(hours=20 - number))

    async with host(tables_url, Depth(12), ear) as one:
        await one.look()
        await hears(ear, RAISED)

    alert = ear.heard[0].alert
    assert alert.oldest_age_seconds == pytest.approx(20 * 3600, abs=60)
    assert alert.correlation_ids == tuple(f"order-{number}" for number in range(10))


async def test_undecided_emails_that_are_about_to_lose_their_content_are_an_alert_until_somebody_decides(
    tables_url: str,
) -> None:
    ear = Ear()
    email_id = insert_failed(tables_url, "order-17", age=timedelta(days=UNDECIDED_DAYS - 6))
    insert_failed(tables_url, None, age=timedelta(days=UNDECIDED_DAYS - 8))
    with tables(tables_url) as connection:
        connection.execute(
            "insert into email_content (email_id, sender, recipients, subject) "
            "select email_id, 'shop@example.com', '{}', 'Hello' from email_log"
        )
    async with host(tables_url, Depth(0), ear) as one:
        await one.look()
        await hears(ear, "undecided_expiring raised")
        with tables(tables_url) as connection:
            connection.execute("update email_log set status = 'sent' where email_id = %s", [email_id])
        await one.look()
        await hears(ear, "undecided_expiring raised", "undecided_expiring resolved")

    assert ear.heard[0].alert.count == 1
    assert ear.heard[0].alert.correlation_ids == ()


def enqueue_due(database_url: str) -> None:
    """An email that RabbitMQ has, and no worker."""
    with tables(database_url) as connection:
        connection.execute(
            "insert into email_log (email_id, tenant_id, message_key) values (gen_random_uuid(), 't', %s)",
            [uuid4().hex],
        )


async def look_until_told(one: Host, ear: Ear) -> None:
    """Looks until something has lasted."""

    async def is_told() -> bool:
        await one.look()
        return bool(ear.heard)

    await until_answer(is_told)


async def test_nothing_sent_while_emails_are_due_is_an_alert_with_its_reason_until_one_is_sent(tables_url: str) -> None:
    ear = Ear()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), ear, after_seconds=LASTING_SECONDS) as one:
        await look_until_told(one, ear)
        with tables(tables_url) as connection:
            connection.execute("update email_log set status = 'sent'")
        await one.look()
        await hears(ear, "nothing_sent raised", "nothing_sent resolved")

    alert = ear.heard[0].alert
    assert (alert.component, alert.count, alert.correlation_ids) == ("dispatcher", 1, ())
    assert summary(ear.heard[0]) == (
        "1 email is due, but none is sent: No worker runs on any host: start `dispatcher run`"
    )


async def test_emails_sent_one_after_the_other_raise_no_alert(tables_url: str) -> None:
    ear = Ear()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), ear, after_seconds=0.5) as one:
        give_up_at = time.monotonic() + 1.5
        while time.monotonic() < give_up_at:
            await one.look()
            with tables(tables_url) as connection:
                connection.execute(
                    "insert into email_hourly values (date_trunc('hour', now(), 'UTC'), 'smtp', 'accepted', 'w0', 1) "
                    "on conflict (hour, provider, outcome, slot) do update "
                    "set email_count = email_hourly.email_count + 1"
                )

    assert ear.heard == []


async def test_a_short_state_raises_no_alert_and_a_new_monitor_resolves_none(tables_url: str) -> None:
    ear = Ear()
    enqueue_due(tables_url)
    async with host(tables_url, Depth(0), ear, after_seconds=LASTING_SECONDS) as one:
        await look_until_told(one, ear)
        await entered(tables_url, 1)
    async with host(tables_url, Depth(0), ear, after_seconds=3600) as again:
        await again.look()
        await again.look()

        assert Kind.NOTHING_SENT not in again.watch.alerts
    assert ear.phases == ["nothing_sent raised"]


async def test_a_provider_that_workers_cannot_use_is_an_alert_until_they_can(tables_url: str) -> None:
    ear = Ear()
    with tables(tables_url) as connection:
        connection.execute(
            "insert into provider_state (provider, slot, state, reason, until_at) "
            "values ('smtp', 'a:w0', 'open', 'SMTP refuses our credentials.', now() + interval '1 min')"
        )
        async with host(tables_url, Depth(0), ear, after_seconds=LASTING_SECONDS) as one:
            await look_until_told(one, ear)
            connection.execute("update provider_state set state = 'closed'")
            await one.look()
            await hears(ear, "provider_unusable raised", "provider_unusable resolved")

    assert ear.heard[0].alert.reason == "smtp refuses us: SMTP refuses our credentials."
    assert ear.heard[0].alert.component == "provider"


async def test_a_host_that_vanishes_is_an_alert_until_it_is_back_and_one_that_stops_in_order_is_none(
    tables_url: str,
) -> None:
    ear = Ear()
    async with (
        host(tables_url, Depth(0), Ear(), name="orderly") as orderly,
        host(tables_url, Depth(0), Ear(), name="lost") as lost,
    ):
        await orderly.look()
        await lost.look()
        await orderly.store.leave()
    async with host(
        tables_url, Depth(0), ear, name="watching", after_seconds=LASTING_SECONDS, interval_seconds=0.01
    ) as one:
        await look_until_told(one, ear)
        async with host(tables_url, Depth(0), Ear(), name="lost") as back:
            await back.look()
            await one.look()
            await hears(ear, "host_vanished raised", "host_vanished resolved")

    reason = ear.heard[0].alert.reason or ""
    assert reason.startswith("lost last reported at ")
    assert "orderly" not in reason
    assert "watching" not in reason


async def test_addresses_in_correlation_ids_are_taken_out(tables_url: str) -> None:
    ear = Ear()
    insert_failed(tables_url, "ann@example.org", age=timedelta(hours=1))

    async with host(tables_url, Depth(1), ear) as one:
        await one.look()
        await hears(ear, RAISED)

    assert ear.heard[0].alert.correlation_ids == ("<address>",)


async def test_dead_letters_that_do_not_reach_the_queue_are_told_by_their_growing_age(tables_url: str) -> None:
    ear = Ear()
    insert_failed(tables_url, "order-1", age=timedelta(minutes=5), due=True)

    async with host(tables_url, Depth(0), ear) as one:
        await one.look()
        await hears(ear, "dead_letters_unpublished raised")

    assert ear.heard[0].alert.oldest_age_seconds == pytest.approx(300, abs=60)


async def test_while_postgresql_is_away_each_host_tells_for_itself_and_enters_it_afterwards(tables_url: str) -> None:
    ears, depth = (Ear(), Ear()), Depth(0)
    async with (
        Proxy(tables_url) as proxy,
        host(proxy.url, depth, ears[0], name="a", store_seconds=STORE_SECONDS) as first,
        host(proxy.url, depth, ears[1], name="b", store_seconds=STORE_SECONDS) as b,
    ):
        for one in (first, b):
            await one.look()
        proxy.freeze()
        depth.messages = 3
        for _ in range(2):
            await asyncio.gather(first.look(), b.look())
            for ear in ears:
                await hears(ear, RAISED)
        assert all(ear.heard[0].alert.is_alone for ear in ears)
        proxy.thaw()
        await until_answer(lambda: is_back(first, b))
        await entered(tables_url, 1)
        depth.messages = 0
        await first.look()
        await b.look()
        await entered(tables_url, 0)

    assert sorted(phase for ear in ears for phase in ear.phases) == [RAISED, RAISED, RESOLVED]


async def test_an_alert_that_ends_while_postgresql_is_away_is_over_afterwards(tables_url: str) -> None:
    ear, depth = Ear(), Depth(1)
    async with Proxy(tables_url) as proxy, host(proxy.url, depth, ear, store_seconds=STORE_SECONDS) as one:
        await one.look()
        await hears(ear, RAISED)
        await until_answer(lambda: is_back(one))
        await entered(tables_url, 1)
        proxy.freeze()
        depth.messages = 0
        await one.look()
        await hears(ear, RAISED, RESOLVED)
        proxy.thaw()
        await until_answer(lambda: is_back(one))
        await entered(tables_url, 0)
    assert ear.phases == [RAISED, RESOLVED]
    assert ear.heard[0].alert.queue == DLQ
