"""A process reads the controls again only after something has changed."""

from __future__ import annotations

from dispatcher.store.connections import Pool
from dispatcher.store.controls import LatestControls, count_due
from tests.store.books import Books
from tests.store.pausing import pause
from tests.waiting import until_answer

WRITES = [
    "insert into pause (scope, name, reason, actor) values ('all', '', 'maintenance', 'ann')",
    "update pause set reason = 'it takes longer'",
    "delete from pause where scope = 'all'",
    "insert into lane_policy (lane, weight) values ('bulk', 2)",
    "update lane_policy set weight = 3",
    "delete from lane_policy",
    "insert into tenant_limit (tenant_id, weight, per_second) values ('acme', 1, 5)",
    "update tenant_limit set per_second = 6",
    "delete from tenant_limit; insert into tenant_limit (tenant_id, per_second) values ('other', 6)",
    "delete from tenant_limit",
    "insert into domain_limit (domain, per_second) values ('example.org', 5)",
    "update domain_limit set attempt_seconds = 0.4",
    "delete from domain_limit",
]


async def test_each_change_is_found(pool: Pool, books: Books) -> None:
    latest = LatestControls(pool)
    found = await latest.read()

    for write in WRITES:
        books.connection.execute(write.encode())
        before, found = found, await latest.read()
        assert found != before, write
        assert await latest.read() is found, "without a change, the tables are not read again"

    # The deletion of a pause that has ended changes nothing.
    books.connection.execute(
        "insert into pause (scope, name, reason, actor, began_at, until_at)"
        " values ('all', '', 'over', 'ann', now() - interval '2 hours', now() - interval '1 hour')"
    )
    found = await latest.read()
    books.connection.execute("delete from pause")
    assert await latest.read() is found


async def test_a_pause_that_ends_by_itself_is_found(pool: Pool, books: Books) -> None:
    pause(books.connection, "tenant", "acme", seconds=1)
    latest = LatestControls(pool)
    assert (await latest.read()).pause_of_tenant("acme") is not None
    await until_answer(latest.read, lambda found: found.pauses == ())


async def test_due_emails_are_counted_for_each_lane_and_tenant(pool: Pool, books: Books) -> None:
    for tenant_id, normal, urgent in (("a", 1, 2), ("b", 3, 0)):
        for lane, emails in (("normal", normal), ("urgent", urgent)):
            for email_id in books.enqueue(emails, tenant_id=tenant_id):
                books.change(email_id, lane=lane)

    found = await count_due(pool)

    assert [(due.emails, due.lane, due.tenant_id) for due in found] == [
        (3, "normal", "b"),
        (2, "urgent", "a"),
        (1, "normal", "a"),
    ]
