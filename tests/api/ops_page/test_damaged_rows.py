"""Every page is shown beside damaged rows."""

from __future__ import annotations

import orjson

from tests.api.ops_page.browsing import Browser
from tests.store.books import Books
from tests.store.damaged_rows import insert_damaged


async def test_the_overview_the_search_and_each_email_are_shown_beside_damaged_rows(
    operator: Browser, books: Books
) -> None:
    ids = insert_damaged(books)
    paths = ["/ops/", "/ops/emails", "/ops/emails?q=ann@example.org", *(f"/ops/emails/{each}" for each in ids.values())]

    answers = {path: await operator.get(path) for path in paths}

    assert {path: answer.status for path, answer in answers.items() if answer.status != 200} == {}


async def test_the_overview_tolerates_the_fields_of_alerts_of_a_later_release(operator: Browser, books: Books) -> None:
    readable = {
        "kind": "dead_letters",
        "raised_at": "2026-11-28T10:00:00+00:00",
        "reason": "18 messages",
        "owner": "ann",
    }
    alerts = orjson.dumps([readable | {"owner": "ann"}, {"kind": "of_a_later_release"}, 7]).decode()
    books.connection.execute(
        "insert into alert_check (queue, host, checked_at, depth, alerts) values (%s, 'mail-7', now(), 1, %s)",
        [operator.api.settings.dlq, alerts],
    )

    page = await operator.get("/ops/")

    assert page.status == 200
    assert b"18 messages" in page.body
