"""Statistics: each email and each kind of its events count once, however the rounds of counting fall or fail."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dispatcher.actions.runner import Face, Who, run
from dispatcher.actions.stats import ListStats
from dispatcher.domain.email_id import lowest_id_at
from dispatcher.domain.event import Bounce, EventKind
from dispatcher.domain.stats import Per
from dispatcher.monitor.upkeep import COUNT_PAUSE_SECONDS, Counting
from dispatcher.store.connections import connect_async
from dispatcher.store.retention import Pruner, Retention
from dispatcher.store.statements import fetch
from dispatcher.store.stats import count_round
from tests.events.scene import Scene, event

NOW = datetime.now(UTC)
EVENTS: tuple[EventKind | Bounce, ...] = (*(each for each in EventKind if each != EventKind.BOUNCED), *Bounce)
COLUMNS = ("sent", "failed", "held", "suppressed", "delivered", "opened", "clicked", "unsubscribed", "complained")
COLUMNS += ("rejected", "bounced", "bounced_hard", "bounced_soft", "bounced_blocked")
Counts = dict[str, dict[str, int]]


@pytest.fixture(autouse=True)
def _begin(scene: Scene) -> None:
    begin(scene)


def begin(scene: Scene) -> None:
    """Forgets all counts and emails."""
    for table in ("email_stat", "email_stat_open", "email_stat_progress", "email_log", "email_event", "email_content"):
        scene.books.connection.execute(f"delete from {table}".encode())
    scene.books.connection.execute(
        "insert into email_stat_progress (first_id, read_id) values (%(id)s, %(id)s)",
        {"id": lowest_id_at(NOW - timedelta(days=7))},
    )


def see_all(scene: Scene, seconds: float = 0.0) -> None:
    """Lets the next round read every row until now, and some seconds more."""
    scene.books.connection.execute(
        "update email_stat_progress set next_xid = '3', next_until = clock_timestamp() + %s * interval '1 second'",
        [seconds],
    )


async def count(scene: Scene, most: int = 100, *, late_seconds: float = -1, **limits: Any) -> bool:
    """A round of counting. Returns whether there is more to count."""
    async with scene.pool.connection() as session:
        found = await count_round(session, most=most, most_open=most, late_seconds=late_seconds, **limits)
    return found is not None and (found.has_more or found.has_more_open)


async def shown(scene: Scene, per: Per = Per.TENANT, **filters: Any) -> Counts:
    """The statistics by name, without zeros."""
    async with scene.pool.connection() as session:
        rows = await run(session, ListStats(per=per, **filters), Who(Face.COMMAND))
    counts = {row.name: {name: getattr(row, name) for name in COLUMNS if getattr(row, name)} for row in rows}
    return {name: found for name, found in counts.items() if found}


def expected(scene: Scene, column: str) -> Counts:
    """The statistics, from the emails and the events themselves."""
    found: dict[str, Counter[str]] = {}
    contents = {row["email_id"]: row["tags"] for row in scene.books.select("select email_id, tags from email_content")}
    said: dict[UUID, set[str]] = {}
    for row in scene.books.select("select * from email_event where doubt is distinct from 'impossible'"):
        said.setdefault(row["email_id"], set()).update({row["kind"], f"bounced_{row['bounce']}"})
    for row in scene.books.rows():
        name = (contents[row["email_id"]] or ["(none)"])[0] if column == "tag" else row[column] or "(none)"
        state = "suppressed" if row["error_type"] == "suppressed" else row["status"]
        events = said.get(row["email_id"], set()) if state == "sent" else set()
        found.setdefault(name, Counter()).update(each for each in {state, *events} if each in COLUMNS)
    return {name: dict(counts) for name, counts in found.items() if counts}


STATUSES = ("pending", "sent", "failed", "held", "cancelled", "suppressed")
EMAIL = st.tuples(st.sampled_from(STATUSES), st.sampled_from(["a", "b"]), st.sampled_from([(), ("x", "y"), ("y",)]))
STEP = st.one_of(
    st.tuples(st.just("enqueue"), st.lists(EMAIL, min_size=1, max_size=4)),
    st.tuples(st.just("change"), st.tuples(st.integers(0, 9), st.sampled_from(STATUSES), st.integers(0, 30))),
    st.tuples(st.just("tell"), st.lists(st.tuples(st.integers(0, 9), st.sampled_from(EVENTS)), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["count", "crash"]), st.integers(1, 5)),
)


def become(scene: Scene, email_id: UUID, status: str, hours: int = 0) -> None:
    """Gives an email that is neither sent nor cancelled another status, some hours ago."""
    if scene.books.status(email_id) in ("sent", "cancelled"):
        return
    at = datetime.now(UTC) - timedelta(hours=hours)
    error = "suppressed" if status == "suppressed" else None
    times: dict[str, Any] = {"sent_at": at, "provider": "sendgrid"} if status == "sent" else {"settled_at": at}
    real = "failed" if status == "suppressed" else status
    scene.books.change(email_id, status=real, error_type=error, publish_due_at=None, proven_by=None, **times)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(STEP, max_size=14))
async def test_the_counts_are_those_of_the_emails_and_events_after_any_rounds_changes_and_crashes(
    scene: Scene, steps: list[tuple[str, Any]]
) -> None:
    begin(scene)
    emails: list[UUID] = []
    for step, what in steps:
        if step == "enqueue":
            for status, tenant, tags in what:
                emails += scene.books.enqueue_tried(tenant_id=tenant, tags=tags)
                become(scene, emails[-1], status)
        elif step == "change" and what[0] < len(emails):
            become(scene, emails[what[0]], *what[1:])
        elif step == "tell":
            await scene.tell(*(event(emails[at], kind) for at, kind in what if at < len(emails)))
        elif step == "count":
            see_all(scene)
            await count(scene, what, late_seconds=0)
        elif step == "crash":
            see_all(scene)
            async with scene.pool.connection() as session, session.transaction(force_rollback=True):
                await count_round(session, most=what, most_open=what, late_seconds=0)

    see_all(scene, 1)
    while await count(scene, 3, late_seconds=0):
        pass
    for per in (Per.TENANT, Per.TAG, Per.LANE):
        assert await shown(scene, per) == expected(scene, "tenant_id" if per is Per.TENANT else per.value)
    by_hour, by_day = [await shown(scene, per, since=NOW - timedelta(days=3)) for per in (Per.HOUR, Per.DAY)]
    assert _summed(by_hour, 10) == _summed(by_day, 10)


def _summed(counts: Counts, characters: int) -> Counts:
    """The counts by the first characters of their names."""
    found: dict[str, Counter[str]] = {}
    for name, each in counts.items():
        found.setdefault(name[:characters], Counter()).update(each)
    return {name: dict(each) for name, each in found.items()}


async def test_rows_of_a_transaction_that_is_still_open_are_counted_after_its_commit(scene: Scene) -> None:
    sent, late = scene.books.enqueue_tried(2, tenant_id="a")
    become(scene, sent, "sent")
    become(scene, late, "sent")
    with psycopg.connect(scene.url) as slow:
        slow.execute("set search_path = dispatcher")
        slow.execute("delete from email_log where email_id = %s", [late])  # takes a transaction id
        await count(scene)  # notes which transactions are open
        for _ in range(2):
            await count(scene)
        assert await shown(scene) == {}
        slow.rollback()
    await count(scene)
    scene.books.connection.execute("update email_stat_progress set stored_until = stored_until + interval '2 seconds'")
    while await count(scene):
        pass
    await count(scene)

    assert await shown(scene) == {"a": {"sent": 2}}


async def test_only_one_host_counts_at_a_time_and_a_backlog_follows_at_once(scene: Scene) -> None:
    for email_id in scene.books.enqueue_tried(3, tenant_id="a"):
        become(scene, email_id, "sent")
    counting = Counting(scene.pool, most=1)
    see_all(scene, 60)
    async with await connect_async(scene.url, name="other") as other, other.transaction():
        await count_round(other, most=1, most_open=1, late_seconds=0)
        assert await counting.run_once() is None
    assert await counting.run_once() == COUNT_PAUSE_SECONDS

    assert await shown(scene) == {"a": {"sent": 2}}


async def test_an_hour_with_many_tags_and_tenants_keeps_the_largest_and_the_sum(scene: Scene) -> None:
    for number in range(30):
        tenant, tags = ("large", (f"tag-{number}",)) if number < 20 else (f"small-{number}", ())
        become(scene, scene.books.enqueue_tried(tenant_id=tenant, tags=tags)[0], "sent")
    for email_id in scene.books.enqueue_tried(5, tenant_id="large", tags=("receipt",)):
        become(scene, email_id, "sent")
    see_all(scene)
    await count(scene, most_rows=8, keep_rows=4)
    tags, tenants = await shown(scene, Per.TAG), await shown(scene)
    assert tags["receipt"] == {"sent": 5}
    assert tenants["large"]["sent"] >= 20
    assert all(scene.books.count("email_stat") <= 2 * 8 for _ in "once")

    # A late event of an email whose row is gone adds no row.
    rows = scene.books.count("email_stat")
    first = scene.books.rows()[0]["email_id"]
    await scene.tell(event(first, Bounce.HARD))
    see_all(scene)
    await count(scene, most_rows=8, keep_rows=4)
    assert scene.books.count("email_stat") == rows
    total = (await shown(scene, Per.LANE))["normal"]
    assert (total["sent"], total["bounced_hard"]) == (35, 1)


async def test_old_hours_are_deleted_before_old_days_which_still_have_the_counts(scene: Scene) -> None:
    email_id = scene.books.enqueue_tried(tenant_id="a")[0]
    become(scene, email_id, "sent")
    see_all(scene)
    await count(scene)
    for days, shift in ((50, 50), (401, 351)):
        scene.books.connection.execute(
            "update email_stat set begins_at = begins_at - %s * interval '24 hours'", [shift]
        )
        async with await connect_async(scene.url, name="pruner") as session:
            steps = [step.what async for step in Pruner(session, Retention(0, 0, 0)).prune()]
            assert "stat" in steps
        found = await shown(scene, since=NOW - timedelta(days=days, hours=2))
        assert found == ({"a": {"sent": 1}} if days == 50 else {})


async def test_a_pruned_email_is_forgotten_and_its_count_stays(scene: Scene) -> None:
    email_id = scene.books.enqueue_tried(tenant_id="a")[0]
    become(scene, email_id, "failed")
    see_all(scene)
    await count(scene)
    scene.books.connection.execute("delete from email_log")
    await count(scene)

    assert (await shown(scene), scene.books.count("email_stat_open")) == ({"a": {"failed": 1}}, 0)
    async with scene.pool.connection() as session:
        ((share, bounced),) = {
            (row.failed_percent, row.bounced_percent) for row in await run(session, ListStats(), Who(Face.COMMAND))
        }
        assert await fetch(session, "lock_stats")
    assert (share, bounced) == (100.0, None)
