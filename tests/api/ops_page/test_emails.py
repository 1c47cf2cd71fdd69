"""The pages Emails and Email: finding an email, its story, and decisions about it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from tests.api.ops_page.browsing import Browser, forms_of
from tests.api.running_api import Answer, make_key
from tests.store.books import Books

ANN = "ann@example.org"
HOSTS = "mail-7.internal"


def text_of(page: Answer) -> str:
    """The page's text, without tags and with single spaces."""
    main = page.body.decode().partition("<main")[2]
    return " ".join(re.sub(r"<[^>]*>", " ", main).split())


def links_of(page: Answer) -> list[str]:
    """The links in the page's content."""
    return re.findall(r'<a [^>]*href="([^"]*)"', page.body.decode().partition("<main")[2])


def held(books: Books, **columns: Any) -> UUID:
    """A held email of the default tenant."""
    email_id = books.enqueue_one()
    usual = {"status": "held", "attempt_count": 2, "error_type": "outcome_unknown", "publish_due_at": None}
    books.change(email_id, **{**usual, "provider": "ses", "was_uncertain": True, **columns})
    return email_id


def failed(books: Books, **columns: Any) -> UUID:
    """A failed email of the default tenant."""
    usual = {"status": "failed", "error_type": "rejected", "last_error": "550 no", "was_uncertain": False}
    return held(books, **{**usual, **columns})


def audit(books: Books) -> list[tuple[str, str, str]]:
    """Actor, action and reason of each audited act."""
    rows = books.select("select actor, action, reason from operator_audit order by audit_id")
    return [(row["actor"], row["action"], row["reason"]) for row in rows]


async def test_anns_receipt_is_two_steps_from_the_overview(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(to=ANN)
    books.enqueue(3, to="bob@example.net")

    overview = await operator.get("/ops/")
    assert [form.names() for form in forms_of(overview) if form.action == "/ops/emails"] == [["q"]]
    found = await operator.get(f"/ops/emails?q=+{ANN.upper()}")
    email = await operator.get(f"/ops/emails/{email_id}")

    assert [link for link in links_of(found) if str(email_id) in link] == [f"/ops/emails/{email_id}"]
    assert "1 email, by recipient" in text_of(found)
    assert "pending" in text_of(email)
    assert "enqueued" in text_of(email)
    assert ANN not in email.body.decode()
    assert "@example.org" in text_of(email)


async def test_a_name_that_only_one_email_has_leads_to_it(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(correlation_id="order-17")
    key = books.key(email_id)

    by_id = await operator.get(f"/ops/emails?q={email_id}")
    by_key = await operator.get(f"/ops/emails?q={key}")
    by_link = await operator.get(f"/ops/emails/by-key/{key}")
    by_domain = await operator.get("/ops/emails?q=example.org")
    by_correlation = await operator.get("/ops/emails?q=order-17")

    for answer in (by_id, by_key, by_link):
        assert (answer.status, answer.headers["location"]) == (303, f"/ops/emails/{email_id}")
    for answer in (by_domain, by_correlation):
        assert f"/ops/emails/{email_id}" in links_of(answer)


async def test_a_key_of_several_tenants_is_listed_with_its_tenants(operator: Browser, books: Books) -> None:
    ids = {name: books.enqueue_one(tenant_id=name) for name in ("bank", "shop")}
    books.connection.execute("update email_log set message_key = 'twin'")
    books.connection.execute("update email_idempotency set message_key = 'twin'")

    both = await operator.get("/ops/emails?q=twin")
    by_link = await operator.get("/ops/emails/by-key/twin")
    one = await operator.get("/ops/emails/by-key/twin?tenant_id=shop")

    assert all(f"/ops/emails/{email_id}" in links_of(both) for email_id in ids.values())
    assert by_link.headers["location"] == "/ops/emails?q=twin&by=key"
    assert one.headers["location"] == f"/ops/emails/{ids['shop']}"


async def test_filters_and_pages_are_in_the_url(operator: Browser, books: Books) -> None:
    books.enqueue(60)
    old = held(books, last_error="timeout")

    first = await operator.get("/ops/emails?status=pending&created_from=24h")
    (older,) = [link for link in links_of(first) if "after=" in link]
    second = await operator.get(older.replace("&amp;", "&"))
    by_held = await operator.get("/ops/emails?status=held&provider=ses&error_type=outcome_unknown&tenant_id=default")
    none = await operator.get("/ops/emails?lane=bulk")
    nobody = await operator.get("/ops/emails?q=eve@example.org")

    assert [len([link for link in links_of(page) if "emails/0" in link]) for page in (first, second)] == [50, 10]
    assert "status=pending" in older
    assert f"/ops/emails/{old}" in links_of(by_held)
    assert "No email matches the filters" in text_of(none)
    assert "No email has eve@example.org as a recipient" in text_of(nobody)


async def test_what_is_wrong_is_said_beside_its_field(operator: Browser) -> None:
    page = await operator.get("/ops/emails?q=%00&created_from=soon&status=lost&tenant_id=a%20b")

    html = page.body.decode()
    assert page.status == 400
    for name in ("q", "created_from", "status", "tenant_id"):
        assert f'id="{name}-error"' in html
        assert re.search(rf'id="{name}"[^>]*aria-describedby="[^"]*{name}-error"[^>]*aria-invalid="true"', html)


async def test_a_held_email_is_confirmed_with_a_reason(operator: Browser, books: Books) -> None:
    email_id = held(books)

    page = await operator.get(f"/ops/emails/{email_id}")
    ask = await operator.get(f"/ops/emails/{email_id}/confirm")
    without = await operator.submit("/confirm", reason=" ")
    done = await operator.submit("/confirm", reason="SES shows it as delivered")
    after = await operator.follow()

    assert "its status becomes sent" in text_of(page)
    assert "cannot be undone" in text_of(ask)
    assert without.status == 422
    assert "Reason is required." in text_of(without)
    assert done.status == 303
    assert "Done. The status of the email is now sent." in text_of(after)
    assert books.status(email_id) == "sent"
    ((actor, action, reason),) = audit(books)
    assert (action, reason) == ("confirm", "SES shows it as delivered")
    assert "ann" in actor


async def test_a_failed_email_is_replayed_at_once(operator: Browser, books: Books) -> None:
    email_id = failed(books)

    await operator.get(f"/ops/emails/{email_id}/replay")
    first = await operator.submit("/replay", reason="the provider is back")

    assert first.status == 303
    assert books.status(email_id) == "pending"
    after = text_of(await operator.follow())
    assert "Done. The email is pending, and will be sent again." in after
    assert "the provider is back" in after


async def test_an_email_that_may_have_arrived_is_replayed_only_after_a_warning(operator: Browser, books: Books) -> None:
    email_id = failed(books, was_uncertain=True)

    ask = await operator.get(f"/ops/emails/{email_id}/replay")
    await operator.submit("/replay", reason="the customer has nothing")

    assert "The recipient may get the email twice" in text_of(ask)
    assert books.status(email_id) == "pending"


async def test_a_form_that_is_sent_twice_decides_once(operator: Browser, books: Books) -> None:
    for decision, email_id in (("release", held(books)), ("replay", failed(books)), ("discard", failed(books))):
        form = await operator.get(f"/ops/emails/{email_id}/{decision}")
        first = await operator.submit(f"/{decision}", reason="a double click")
        operator.page = form
        second = await operator.submit(f"/{decision}", reason="a double click")

        assert (first.status, second.status) == (303, 303)
        assert first.headers["location"] == second.headers["location"]
    assert [action for _, action, _ in audit(books)].count("release") == 1
    assert [action for _, action, _ in audit(books)].count("discard") == 1


async def test_the_page_says_who_has_decided_meanwhile(operator: Browser, books: Books) -> None:
    email_id = held(books)
    form = await operator.get(f"/ops/emails/{email_id}/release")
    await operator.submit("/release", reason="ticket 1")
    books.change(email_id, status="sent", attempt_count=3)
    operator.page = form

    late = await operator.submit("/release", reason="ticket 2")
    again = await operator.get(f"/ops/emails/{email_id}/release")

    assert (late.status, again.status) == (409, 409)
    for page in (late, again):
        assert "Nothing was changed" in text_of(page)
        assert re.search(r"Latest decision: release ?, at .* by .*ann.* ticket 1", text_of(page))


async def test_a_form_for_an_earlier_failure_does_not_replay_a_later_one(operator: Browser, books: Books) -> None:
    email_id = failed(books)
    await operator.get(f"/ops/emails/{email_id}/replay")
    books.change(email_id, attempt_count=7)

    answer = await operator.submit("/replay", reason="ticket 1")

    assert answer.status == 409
    assert "changed since you opened the form" in text_of(answer)
    assert books.status(email_id) == "failed"


async def test_an_unsent_email_is_rescheduled_and_cancelled(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one()

    await operator.get(f"/ops/emails/{email_id}/reschedule")
    wrong = await operator.submit("/reschedule", reason="later", send_at="tomorrow")
    far = await operator.submit("/reschedule", reason="later", send_at="9999-01-01 00:00")
    soon = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d %H:%M}"
    done = await operator.submit("/reschedule", reason="later", send_at=soon)

    assert (wrong.status, far.status) == (422, 422)
    assert 'value="tomorrow"' in wrong.body.decode()
    assert (done.status, books.status(email_id)) == (303, "waiting")
    await operator.get(f"/ops/emails/{email_id}/cancel")
    assert (await operator.submit("/cancel", reason="the order was cancelled")).status == 303
    assert books.status(email_id) == "cancelled"
    assert "is never sent" in text_of(await operator.follow())


async def test_content_is_revealed_only_with_a_reason_on_record(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(to=ANN, subject="Code 4711", text="Secret text", html="<b onclick=x()>Secret html</b>")

    page = await operator.get(f"/ops/emails/{email_id}")
    await operator.get(f"/ops/emails/{email_id}/reveal")
    refused = await operator.submit("/reveal", reason="")
    unaudited = audit(books)
    revealed = await operator.submit("/reveal", reason="ticket 4711")

    assert (refused.status, unaudited) == (422, [])
    for answer in (page, refused):
        assert not any(word in answer.body.decode() for word in (ANN, "Code 4711", "Secret"))
    html = revealed.body.decode()
    assert all(word in html for word in (ANN, "Code 4711", "Secret text", "&lt;b onclick=x()&gt;Secret html"))
    assert "<b onclick" not in html
    assert [(action, reason) for _, action, reason in audit(books)] == [("reveal", "ticket 4711")]
    assert revealed.headers["cache-control"] == "no-store"


async def test_a_key_that_may_only_read_can_neither_act_nor_reveal(
    browser: Browser, books: Books, connection: psycopg.Connection
) -> None:
    email_id = held(books)
    await browser.sign_in(make_key(connection, scopes=["read"], tenant_id=None, name="viewer"))

    page = await browser.get(f"/ops/emails/{email_id}")
    asked = [await browser.get(f"/ops/emails/{email_id}/{name}") for name in ("confirm", "release", "reveal")]
    posted = [await browser.post(f"/ops/emails/{email_id}/{name}", {"reason": "x"}) for name in ("confirm", "reveal")]

    assert "may only read" in text_of(page)
    assert not [link for link in links_of(page) if link.endswith(("/confirm", "/reveal"))]
    assert {answer.status for answer in (*asked, *posted)} == {403}
    assert audit(books) == []


async def test_an_email_without_content_offers_no_replay(operator: Browser, books: Books) -> None:
    email_id = failed(books)
    books.connection.execute("delete from email_content where email_id = %s", [email_id])

    page = await operator.get(f"/ops/emails/{email_id}")
    ask = await operator.get(f"/ops/emails/{email_id}/replay")

    assert "cannot be sent again: its content was deleted" in text_of(page)
    assert ask.status == 409


async def test_the_story_refreshes_itself_until_the_email_is_finished(operator: Browser, books: Books) -> None:
    unfinished, finished = books.enqueue_one(), held(books)

    assert b"data-refresh" in (await operator.get(f"/ops/emails/{unfinished}")).body
    assert b"data-refresh" not in (await operator.get(f"/ops/emails/{finished}")).body


@pytest.fixture
async def tenants_operator(browser: Browser, connection: psycopg.Connection) -> Browser:
    """The browser of an operator of the tenant `shop`, signed in."""
    await browser.sign_in(make_key(connection, scopes=["operate"], tenant_id="shop", name="shop-desk"))
    return browser


async def test_another_tenants_email_is_found_on_no_route(tenants_operator: Browser, books: Books) -> None:
    decisions = ("replay", "confirm", "release", "reschedule", "cancel", "discard", "reveal")
    mine = books.enqueue_one(tenant_id="shop", to=ANN)
    page = await tenants_operator.get(f"/ops/emails/{mine}/cancel")
    token = re.findall(r'name="csrf_token" value="([^"]*)"', page.body.decode())[-1]
    others = [books.enqueue_one(tenant_id="bank", to=ANN, correlation_id="twin")]
    others += [held(books, tenant_id="bank"), failed(books, tenant_id="bank")]
    before = books.rows()

    for email_id in (*others, UUID("0199c0de-0000-7000-8000-000000000000")):
        paths = [f"/ops/emails/{email_id}", *(f"/ops/emails/{email_id}/{name}" for name in decisions)]
        answers = [await tenants_operator.get(path) for path in paths]
        answers += [
            await tenants_operator.post(
                path, {"csrf_token": token, "reason": "x", "attempts": "2", "send_at": "2026-12-01 10:00"}
            )
            for path in paths[1:]
        ]
        assert {answer.status for answer in answers} == {404}, email_id
    for name in map(str, (*others, *(books.key(each) for each in others), "twin")):
        page = await tenants_operator.get(f"/ops/emails?q={name}&tenant_id=bank")
        assert page.status == 200
        assert not any(f"/ops/emails/{each}" in page.body.decode() for each in others)
    assert (await tenants_operator.get(f"/ops/emails/by-key/{books.key(others[0])}?tenant_id=bank")).status == 404
    found = (await tenants_operator.get(f"/ops/emails?q={ANN}&tenant_id=bank")).body.decode()
    assert str(mine) in found
    assert str(others[0]) not in found
    assert books.rows() == before
    assert audit(books) == []


async def test_a_tenant_sees_neither_hosts_nor_the_words_of_the_services_operators(
    tenants_operator: Browser, books: Books
) -> None:
    email_id = held(books, locked_by=HOSTS)
    books.change(email_id, tenant_id="shop")
    books.connection.execute(
        "insert into email_attempt (email_id, attempt_number, worker, provider, started_at, finished_at, outcome) "
        "values (%s, 1, %s, 'ses', now(), now(), 'uncertain')",
        [email_id, HOSTS],
    )
    books.connection.execute(
        "insert into operator_audit (actor, action, reason, email_id) "
        "values ('root@mail-7', 'discard', 'shop owes', %s)",
        [email_id],
    )

    page = await tenants_operator.get(f"/ops/emails/{email_id}")
    await tenants_operator.get(f"/ops/emails/{email_id}/confirm")
    await tenants_operator.submit("/confirm", reason="the customer has it")
    own = await tenants_operator.follow()

    for answer in (page, own):
        assert not any(word in answer.body.decode() for word in (HOSTS, "mail-7", "owes"))
    assert "an operator" in text_of(page)
    assert "the customer has it" in text_of(own)
