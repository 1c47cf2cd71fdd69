"""Emails beyond the ceiling of a recipient domain leave the worker and wait. Emails to other domains do not wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from dispatcher.domain.outcome import Deferred, Reason
from dispatcher.worker.attempts import Attempts
from tests.waiting import until, until_answer
from tests.worker.bench import Bench
from tests.worker.scripted import ScriptedProvider, accept_when_let_go, answer

LIMITED = "ann@example.org"
OTHER = "bob@example.com"


def set_limit(bench: Bench, *, rate: float | None = None, slots: int | None = None) -> None:
    bench.books.connection.execute("delete from domain_limit")
    bench.books.connection.execute(
        "insert into domain_limit (domain, per_second, concurrent, tokens) values ('example.org', %s, %s, 1)",
        [rate, slots],
    )


@pytest.fixture
def smtp(bench: Bench) -> ScriptedProvider:
    bench.provider = ScriptedProvider("smtp")
    return bench.provider


async def test_emails_beyond_the_rate_wait_in_rows_and_others_are_sent(bench: Bench, smtp: ScriptedProvider) -> None:
    second = ScriptedProvider("sendgrid")
    set_limit(bench, rate=0.01)
    await bench.start([smtp, second], PREFETCH="8")

    limited = await bench.enqueue(40, to=LIMITED)
    others = await bench.enqueue(40, to=OTHER)
    both = await bench.enqueue(1, to=[OTHER, LIMITED])
    await bench.settled({"sent": 41, "waiting": 40})

    assert set(others) < set(smtp.accepted)
    assert set(smtp.accepted.values()) == {1}
    assert second.calls == [], "an email waits although another provider could send it"
    waiting = [bench.books.row(each) for each in [*limited, *both] if each not in smtp.accepted]
    assert {(row["wait_reason"], row["wait_domain"], row["attempt_count"]) for row in waiting} == {
        ("domain", "example.org", 0)
    }
    assert {(row["locked_by"], row["publish_due_at"]) for row in waiting} == {(None, None)}
    await bench.nothing_left_on_the_queue()


async def test_waiting_emails_have_places_per_lane_and_tenant_and_a_changed_ceiling_is_in_force_in_two_seconds(
    bench: Bench, smtp: ScriptedProvider
) -> None:
    set_limit(bench, rate=0.01)
    await bench.start()
    await bench.enqueue(1, to=LIMITED)
    await bench.settled({"sent": 1})
    many = await bench.enqueue(10, to=LIMITED, tenant_id="acme")
    await bench.settled({"sent": 1, "waiting": 10})
    (one,) = await bench.enqueue(1, to=LIMITED, tenant_id="other")
    await bench.settled({"sent": 1, "waiting": 11})

    due_times = sorted(bench.books.row(each)["wait_until"] for each in many)
    steps = [later - earlier for earlier, later in pairwise(due_times)]
    assert all(timedelta(seconds=79) < step < timedelta(seconds=81) for step in steps), "1.25 times the rate"
    assert bench.books.row(one)["wait_until"] < due_times[3], "the lanes take turns"

    bench.books.connection.execute("delete from domain_limit")

    async def is_sent() -> bool:
        (email_id,) = await bench.enqueue(1, to=LIMITED)
        await until(lambda: bench.books.status(email_id) in ("sent", "waiting"))
        return bench.books.status(email_id) == "sent"

    async with asyncio.timeout(2):
        await until_answer(is_sent)


async def test_each_retry_counts_and_keeps_the_number_of_attempts(bench: Bench, smtp: ScriptedProvider) -> None:
    set_limit(bench, rate=0.01)
    await bench.start()
    (email_id,) = bench.books.enqueue(1, to=LIMITED)
    smtp.script[email_id].append(answer(Deferred(Reason.RECIPIENT_DEFERRED, "greylisted", "451", 0.01)))

    await bench.deliver([email_id])
    await bench.settled({"waiting": 1})

    row = bench.books.row(email_id)
    assert (row["attempt_count"], row["wait_reason"]) == (1, "domain")
    assert bench.books.outcomes(email_id) == ["deferred"]


async def test_a_try_without_an_attempt_uses_up_no_token(
    bench: Bench, smtp: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_attempt = Attempts._try
    closed = iter([True])

    async def try_unless_closed(*arguments: Any) -> object:
        """The provider's breaker opens after the email has got its token, and closes again."""
        return None if next(closed, False) else await make_attempt(*arguments)

    monkeypatch.setattr(Attempts, "_try", try_unless_closed)
    set_limit(bench, rate=0.01)
    await bench.start()

    await bench.enqueue(1, to=LIMITED)
    await bench.settled({"sent": 1})
    assert next(closed, None) is None


async def test_a_draining_worker_releases_an_email_that_waits_for_a_slot(bench: Bench, smtp: ScriptedProvider) -> None:
    set_limit(bench, slots=1)
    smtp.always = accept_when_let_go
    worker = await bench.start()
    running, waiting = await bench.enqueue(2, to=LIMITED)
    await until(lambda: smtp.waiting and bench.books.statuses()["sending"] == 2)

    worker.begin_to_stop()
    await until(lambda: bench.books.statuses()["sending"] == 1)
    smtp.let_go()
    await asyncio.wait_for(worker.task, 30)

    (accepted,) = smtp.accepted
    assert bench.books.status(accepted) == "sent"
    (released,) = {running, waiting} - {accepted}
    assert (bench.books.status(released), bench.books.row(released)["attempt_count"]) == ("pending", 0)
