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
from dispatcher.monitor.upkeep import Counting
from dispatcher.store.connections import connect_async
from dispatcher.store.retention import Pruner, Retention
from dispatcher.store.stats import count_round
from tests.events.scene import Scene, event
from tests.store.fixtures import EMPTY

NOW = datetime.now(UTC)
STATUSES = ("pending", "sent", "failed", "held", "cancelled", "suppressed")
EVENTS: tuple[EventKind | Bounce, ...] = (*(each for each in EventKind if each != EventKind.BOUNCED), *Bounce)
COLUMNS = {*STATUSES, *EVENTS, "bounced", *(f"bounced_{each}" for each in Bounce)}
COLUMNS -= {"pending", "cancelled", "accepted", "deferred", *Bounce}
Counts = dict[str, Counter[str]]


@pytest.fixture(autouse=True)
def begin(scene: Scene) -> None:
    """Nothing is counted or enqueued."""
    scene.books.connection.execute(EMPTY.encode())
    first = {"id": lowest_id_at(NOW - timedelta(days=7))}
    scene.books.connection.execute("insert into email_stat_progress (first_id, read_id) values (%(id)s, %(id)s)", first)


def make(scene: Scene, status: str, tenant: str, *tags: str) -> UUID:
    email_id = scene.books.enqueue_tried(tenant_id=tenant, tags=tags)[0]
    become(scene, email_id, status)
    return email_id


def become(scene: Scene, email_id: UUID, status: str, hours: int = 0) -> None:
    """Gives an email that is not sent another status, some hours ago."""
    if scene.books.status(email_id) == "sent":
        return
    at = datetime.now(UTC) - timedelta(hours=hours)
    changes: dict[str, Any] = {"sent_at": at, "provider": "sendgrid"} if status == "sent" else {"settled_at": at}
    changes |= {"status": "failed", "error_type": status} if status == "suppressed" else {"status": status}
    scene.books.change(email_id, **{"publish_due_at": None, "proven_by": None, "error_type": None, **changes})


async def count(scene: Scene, most: int = 100, seen: float = 0.0, *, crash: bool = False, **limits: Any) -> bool:
    """A round that may count every row until now, and some seconds more. Returns whether there is more to count."""
    until = "update email_stat_progress set next_xid = '3', next_until = clock_timestamp() + %s * interval '1 second'"
    scene.books.connection.execute(until, [seen])
    async with scene.pool.connection() as session, session.transaction(force_rollback=crash):
        found = await count_round(session, most=most, most_open=most, late_seconds=0, **limits)
    return found is not None and (found.has_more or found.has_more_open)


async def shown(scene: Scene, per: Per = Per.TENANT, days: float = 3) -> Counts:
    """The statistics by name."""
    async with scene.pool.connection() as session:
        rows = await run(session, ListStats(per=per, since=NOW - timedelta(days=days)), Who(Face.COMMAND))
    return {row.name: +Counter({name: getattr(row, name) for name in COLUMNS}) for row in rows}


def expected(scene: Scene, column: str) -> Counts:
    """The statistics, from the emails and the events themselves."""
    found: Counts = {}
    said: dict[UUID, set[str]] = {}
    for row in scene.books.select("select * from email_event where doubt is distinct from 'impossible'"):
        said.setdefault(row["email_id"], set()).update({row["kind"], f"bounced_{row['bounce']}"})
    for row in scene.books.select("select e.*, c.tags from email_log as e join email_content as c using (email_id)"):
        state = "suppressed" if row["error_type"] == "suppressed" else row["status"]
        events = said.get(row["email_id"], set()) if state == "sent" else set()
        name = (row["tags"] or ["(none)"])[0] if column == "tag" else row[column]
        found.setdefault(name, Counter()).update(COLUMNS & {state, *events})
    return {name: counts for name, counts in found.items() if counts}


EMAIL = st.tuples(st.sampled_from(STATUSES), st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]))
STEP = st.one_of(
    st.tuples(st.just("make"), st.lists(EMAIL, min_size=1, max_size=4)),
    st.tuples(st.just("become"), st.tuples(st.integers(0, 9), st.sampled_from(STATUSES), st.integers(0, 30))),
    st.tuples(st.just("tell"), st.lists(st.tuples(st.integers(0, 9), st.sampled_from(EVENTS)), min_size=1, max_size=4)),
    st.tuples(st.sampled_from(["count", "crash"]), st.integers(1, 5)),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(STEP, min_size=3, max_size=14))
async def test_the_counts_are_those_of_the_emails_and_events_after_any_rounds_changes_and_crashes(
    scene: Scene, steps: list[tuple[str, Any]]
) -> None:
    begin.__wrapped__(scene)  # type: ignore[attr-defined]
    emails = [make(scene, "sent", "a", "x"), make(scene, "failed", "b")]
    for step, what in steps:
        if step == "make":
            emails += [make(scene, *each) for each in what]
        elif step == "become":
            become(scene, emails[what[0] % len(emails)], *what[1:])
        elif step == "tell":
            await scene.tell(*(event(emails[at % len(emails)], kind) for at, kind in what))
        else:
            await count(scene, what, crash=step == "crash")
    while await count(scene, 3, 1):
        pass

    for per, column in ((Per.TENANT, "tenant_id"), (Per.TAG, "tag"), (Per.LANE, "lane")):
        assert {name: each for name, each in (await shown(scene, per)).items() if each} == expected(scene, column)
    by_day: Counts = {}
    for hour, counts in (await shown(scene, Per.HOUR)).items():
        by_day.setdefault(hour[:10], Counter()).update(counts)
    assert by_day == await shown(scene, Per.DAY)


async def test_emails_wait_for_older_transactions_and_a_backlog_for_no_round_of_another_host(scene: Scene) -> None:
    late, *_ = [make(scene, "sent", "a") for _ in range(3)]
    counting = Counting(scene.pool)
    with psycopg.connect(scene.url) as slow:
        slow.execute("update dispatcher.email_log set lane = lane where email_id = %s", [late])
        async with scene.pool.connection() as session:
            rounds = [await count_round(session, most=1, most_open=1, late_seconds=-9) for _ in range(3)]
        assert ([found and found.has_more for found in rounds], await shown(scene)) == ([False] * 3, {})
    assert await count(scene, 1, 1)
    async with await connect_async(scene.url, name="other") as other, other.transaction():
        await count_round(other, most=1, most_open=1, late_seconds=0)
        assert await counting.run_once() is None
    scene.books.connection.execute("update email_stat_progress set stored_until = stored_until + interval '1 minute'")
    await counting.run_once()
    assert await shown(scene) == {"a": {"sent": 3}}


async def test_events_count_that_a_host_of_an_earlier_release_stores(scene: Scene) -> None:
    counted, late = make(scene, "sent", "a"), make(scene, "sent", "a")
    await count(scene, 1)
    await scene.tell(event(counted), event(late))
    scene.books.connection.execute("update email_log set delivery = null")
    scene.books.connection.execute("insert into delivery_backfill (read_until) values (clock_timestamp())")
    await count(scene, seen=1)
    assert await shown(scene) == {"a": {"sent": 2, "delivered": 2}}


async def test_an_hour_with_many_tags_and_tenants_keeps_the_largest_rows_and_the_sum(scene: Scene) -> None:
    first, *_ = [make(scene, "sent", "large", f"tag-{number}") for number in range(20)]
    _ = [make(scene, "sent", f"small-{number}") for number in range(10)]
    _ = [make(scene, "sent", "large", "receipt") for _ in range(5)]
    await count(scene, seen=0.02, most_rows=8, keep_rows=4)
    assert (await shown(scene, Per.TAG))["receipt"] == {"sent": 5}
    assert (await shown(scene))["large"]["sent"] >= 22
    assert (rows := scene.books.count("email_stat")) <= 16

    await scene.tell(event(first, Bounce.HARD))  # an email whose row is gone adds no row
    await count(scene, most_rows=8, keep_rows=4)
    assert (await shown(scene, Per.LANE))["normal"] == {"sent": 35, "bounced": 1, "bounced_hard": 1}
    assert scene.books.count("email_stat") == rows


async def test_counts_outlive_their_emails_as_hours_for_35_days_and_as_days_for_400(scene: Scene) -> None:
    make(scene, "failed", "a")
    await count(scene, seen=1)
    scene.books.connection.execute("delete from email_log")
    await count(scene)
    assert (await shown(scene), scene.books.count("email_stat_open")) == ({"a": {"failed": 1}}, 0)

    for days, moved, kept in ((50, 50, {"a": {"failed": 1}}), (402, 352, {})):
        scene.books.connection.execute(
            "update email_stat set begins_at = begins_at - %s * interval '24 hours'", [moved]
        )
        async with await connect_async(scene.url, name="pruner") as session:
            assert "stat" in [step.what async for step in Pruner(session, Retention(0, 0, 0)).prune()]
        assert (await shown(scene, days=days), await shown(scene, Per.HOUR, days=days)) == (kept, {})
