"""Changes of many emails on the page: a dry run, a reason, and what became of each."""

from __future__ import annotations

import csv
from uuid import UUID

import pytest

from dispatcher.api.ops_page import batches
from tests.api.ops_page.browsing import Browser, links_of, text_of
from tests.api.ops_page.rows import audited, dead_email
from tests.store.books import Books


@pytest.mark.parametrize(
    ("list_path", "path", "status", "then", "act"),
    [
        ("/dead-letters?error_type=refused", "/dlq/discard", "failed", "failed", "discard"),
        ("/held?error_type=outcome_unknown", "/held/confirm", "held", "sent", "confirm"),
        ("/held?error_type=outcome_unknown", "/held/release", "held", "pending", "release"),
        ("/emails?status=pending", "/cancel", "pending", "cancelled", "cancel"),
        ("/emails?status=pending", "/reschedule", "pending", "waiting", "reschedule"),
    ],
)
async def test_all_emails_that_a_list_shows_are_changed_after_a_dry_run(
    operator: Browser, books: Books, list_path: str, path: str, status: str, then: str, act: str
) -> None:
    def make(count: int) -> list[UUID]:
        return [books.enqueue_one() if status == "pending" else dead_email(books, status) for _ in range(count)]

    chosen = make(2)
    (other,) = [dead_email(books, "held" if status == "failed" else "failed", error_type="server_error")]
    (link, *_) = links_of(await operator.get(f"/ops{list_path}"), path)
    dry_run = await operator.get(link)
    more = {"send_in_seconds": "2h"} if act == "reschedule" else {}

    assert f"{status.capitalize()} 2" in text_of(dry_run)
    without_reason = await operator.submit(path, reason=" ", **more)
    make(1)
    operator.page = dry_run
    grown = await operator.submit(path, reason="ticket 4711", **more)
    assert (without_reason.status, grown.status, audited(books)) == (400, 409, [])
    assert "The filter now selects 3 emails" in text_of(grown)
    operator.page = grown
    changed = await operator.submit(path, reason="ticket 4711", **more)

    assert changed.status == 200
    assert "Nothing was changed" not in text_of(changed)
    assert [books.row(each)["status"] for each in chosen] == [then] * 2
    assert audited(books) == [(act, "ticket 4711")] * 3
    assert books.status(other) == ("held" if status == "failed" else "failed")


async def test_only_chosen_emails_are_changed_and_the_others_are_counted(operator: Browser, books: Books) -> None:
    first, second, left = [dead_email(books, "held") for _ in range(3)]
    await operator.get(f"/ops/held/confirm?email_ids={first}&email_ids={second}")
    books.change(second, status="pending")

    changed = await operator.submit("/held/confirm", reason="they answered")

    assert [books.status(each) for each in (first, second, left)] == ["sent", "pending", "held"]
    assert "1 confirmed; 1 of the chosen emails is not held" in text_of(changed)


async def test_large_changes_go_page_by_page(operator: Browser, books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MOST", 2)
    held = [dead_email(books, "held") for _ in range(3)]
    page = await operator.get("/ops/held/confirm")
    assert "Held 3 or more" in text_of(page)
    page = await operator.submit("/held/confirm", reason="they arrived")
    assert sum(books.status(each) == "sent" for each in held) == 2

    (link, *_) = links_of(page, "/held/confirm")
    await operator.get(link)
    done = await operator.submit("/held/confirm", reason="they arrived")

    assert "More emails match" not in text_of(done)
    assert {books.status(each) for each in held} == {"sent"}


async def test_a_list_is_a_file_of_its_rows_without_addresses_and_formulas(operator: Browser, books: Books) -> None:
    for number in range(3):
        email_id = dead_email(books, tenant_id="shop", last_error="=cmd()")
        books.change(email_id, message_key=f"+key-{number}")
    dead_email(books, tenant_id="bank")

    listed = await operator.get("/ops/dead-letters?tenant=shop&limit=25")
    (link,) = links_of(listed, ".csv")
    answer = await operator.get(link)

    names, *rows = csv.reader(answer.body.decode().splitlines())
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert [row["message_key"] for row in found] == ["'+key-2", "'+key-1", "'+key-0"]
    assert {(row["tenant_id"], row["error"]) for row in found} == {("shop", "'=cmd()")}
    assert answer.headers["content-disposition"].startswith('attachment; filename="dead-letters.csv"')
    _, act = books.select("select actor, action, detail from operator_audit order by audit_id")
    assert act["action"] == "export"
    assert act["detail"] == {"list": "dead-letters", "rows": 3, "is_cut": False, "filters": ["tenant_id"]}
    for path in ("/emails", "/held", "/events", "/audit"):
        assert (await operator.get(f"/ops{path}.csv")).body.decode().splitlines()[0].count(",") > 3, path
    assert (await operator.get("/ops/emails.csv?status=odd")).status == 400
