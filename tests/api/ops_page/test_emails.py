"""The pages Emails and Email: finding an email, its story, and decisions about it."""

from __future__ import annotations

import re
from email import message_from_bytes, policy

import pytest

from dispatcher import Attachment, Calendar
from dispatcher.api.ops_page.email_search import By, guess, read_form
from tests.api.ops_page.browsing import Browser, links_of, text_of
from tests.api.ops_page.rows import audited, dead_email, write
from tests.api.running_api import make_key
from tests.mime_corpus import ics
from tests.store.books import Books
from tests.store.damaged_rows import insert_damaged

ANN = "ann@example.org"
HOSTS = "mail-7.internal"


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("ann@example.org", (By.RECIPIENT, By.KEY, By.CORRELATION)),
        ("Ann Lee <Ann@Example.ORG>", (By.RECIPIENT, By.KEY, By.CORRELATION)),
        ("example.org", (By.KEY, By.DOMAIN, By.CORRELATION, By.ERROR)),
        ("@example.org", (By.DOMAIN,)),
        ("order-17-receipt", (By.KEY, By.CORRELATION, By.ERROR)),
        ("127.0.0.1", (By.KEY, By.CORRELATION, By.ERROR)),
        ("0199c0de-0000-7000-8000-000000000000", (By.ID, By.KEY, By.CORRELATION)),
        ("<script>alert(1)</script>", (By.KEY, By.CORRELATION, By.ERROR)),
    ],
)
def test_a_text_is_an_address_a_domain_an_id_a_key_or_a_correlation_id(text: str, kinds: tuple[By, ...]) -> None:
    assert guess(text) == kinds


def test_a_chosen_kind_must_fit_the_text_and_the_end_be_later_than_the_start() -> None:
    chosen = {"id": "email id", "recipient": "whole address", "domain": "not a domain"}
    for by, words in chosen.items():
        assert words in read_form({"q": "localhost", "by": by}, tenant_id=None).errors["q"]
    assert "longer than" in read_form({"q": "x" * 999}, tenant_id=None).errors["q"]
    assert "created_before" in read_form({"created_from": "1h", "created_before": "2h"}, tenant_id=None).errors


async def test_a_name_that_only_one_email_has_leads_to_it(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(correlation_id="order-17")
    key = books.key(email_id)

    for path in (f"?q={email_id}", f"?q={key}", f"/by-key/{key}"):
        answer = await operator.get(f"/ops/emails{path}")
        assert (answer.status, answer.headers["location"]) == (303, f"/ops/emails/{email_id}")
    for text in ("example.org", "order-17"):
        assert f"/ops/emails/{email_id}" in links_of(await operator.get(f"/ops/emails?q={text}"))


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
    old = dead_email(books, "held", provider="ses")

    first = await operator.get("/ops/emails?status=pending&created_from=24h")
    (older,) = links_of(first, "after=")
    second = await operator.get(older)
    by_held = await operator.get("/ops/emails?status=held&provider=ses&error_type=outcome_unknown&tenant_id=default")
    none = await operator.get("/ops/emails?lane=bulk")
    nobody = await operator.get("/ops/emails?q=eve@example.org")
    order = await operator.get("/ops/emails?q=order%3D4711")

    assert [len(links_of(page, "emails/0")) for page in (first, second)] == [50, 10]
    assert "status=pending" in older
    assert f"/ops/emails/{old}" in links_of(by_held)
    assert "No email matches the filters" in text_of(none)
    assert "No email has eve@example.org as a recipient" in text_of(nobody)
    assert len(links_of(order, "metadata=order%3D4711")) == 1


async def test_every_email_is_shown_and_answered_beside_damaged_rows(operator: Browser, books: Books) -> None:
    ids = {str(email_id) for email_id in insert_damaged(books).values()} | {str(books.enqueue_one())}
    # The relay's tests need keys of 20 MB. Lists of such keys would take most of the time of this test.
    shorten = "update email_log set message_key = left(message_key, 100000) where length(message_key) > 100000"
    books.connection.execute(shorten)
    token = make_key(books.connection, tenant_id="default")
    paths = ["/ops/", "/ops/emails", "/ops/emails?q=ann@example.org", *(f"/ops/emails/{each}" for each in ids)]

    pages = {path: (await operator.get(path)).status for path in paths}
    singles = {each: (await operator.api.get(f"/v1/emails/{each}", token=token)).json.get("id") for each in ids}

    assert {path: status for path, status in pages.items() if status != 200} == {}
    assert singles == {each: each for each in ids}
    for query in ("limit=200", "recipient=ann@example.org&limit=200"):
        listed = (await operator.api.get(f"/v1/emails?{query}", token=token)).json
        assert {email["id"] for email in listed["emails"]} == ids


async def test_a_failed_email_is_replayed_and_the_form_warns_if_it_may_have_arrived(
    operator: Browser, books: Books
) -> None:
    for was_uncertain in (False, True):
        email_id = dead_email(books, was_uncertain=was_uncertain)

        ask = await operator.get(f"/ops/emails/{email_id}/replay")
        done = await operator.submit("/replay", reason="the provider is back")
        after = text_of(await operator.follow())

        assert ("The recipient may get the email twice" in text_of(ask)) is was_uncertain
        assert (done.status, books.status(email_id)) == (303, "pending")
        assert "Done. The email is pending, and will be sent again." in after
        assert "the provider is back" in after


async def test_a_form_that_is_sent_twice_decides_once(operator: Browser, books: Books) -> None:
    for decision, status in (("release", "held"), ("replay", "failed"), ("discard", "failed")):
        email_id = dead_email(books, status)
        form = await operator.get(f"/ops/emails/{email_id}/{decision}")
        first = await operator.submit(f"/{decision}", reason="a double click")
        operator.page = form
        second = await operator.submit(f"/{decision}", reason="a double click")

        assert (first.status, second.status) == (303, 303)
        assert first.headers["location"] == second.headers["location"]
    assert [action for action, _ in audited(books)].count("release") == 1
    assert [action for action, _ in audited(books)].count("discard") == 1


async def test_the_page_says_who_has_decided_meanwhile(operator: Browser, books: Books) -> None:
    email_id = dead_email(books, "held")
    form = await operator.get(f"/ops/emails/{email_id}/release")
    await operator.submit("/release", reason="ticket 1")
    books.change(email_id, status="sent", attempt_count=3)
    operator.page = form

    late = await operator.submit("/release", reason="ticket 2")
    again = await operator.get(f"/ops/emails/{email_id}/release")

    for page in (late, again):
        assert page.status == 409
        assert "Nothing was changed" in text_of(page)
        assert re.search(r"Latest decision: release ?, at .* by .*ann.* ticket 1", text_of(page))


async def test_a_form_for_an_earlier_failure_does_not_replay_a_later_one(operator: Browser, books: Books) -> None:
    email_id = dead_email(books)
    await operator.get(f"/ops/emails/{email_id}/replay")
    books.change(email_id, attempt_count=7)

    answer = await operator.submit("/replay", reason="ticket 1")

    assert (answer.status, books.status(email_id)) == (409, "failed")
    assert "changed since you opened the form" in text_of(answer)


async def test_content_is_revealed_only_with_a_reason_on_record(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one(to=ANN, subject="Code 4711", text="Secret text", html="<b onclick=x()>Secret html</b>")

    page = await operator.get(f"/ops/emails/{email_id}")
    await operator.get(f"/ops/emails/{email_id}/reveal")
    refused = await operator.submit("/reveal", reason="")
    unaudited = audited(books)
    revealed = await operator.submit("/reveal", reason="ticket 4711")

    assert (refused.status, unaudited) == (422, [])
    for answer in (page, refused):
        assert not any(word in answer.body.decode() for word in (ANN, "Code 4711", "Secret"))
    html = revealed.body.decode()
    assert all(word in html for word in (ANN, "Code 4711", "Secret text", "&lt;b onclick=x()&gt;Secret html"))
    assert "<b onclick" not in html
    assert audited(books) == [("reveal", "ticket 4711")]
    assert revealed.headers["cache-control"] == "no-store"


async def test_revealed_content_is_seen_as_the_recipient_sees_it_for_some_minutes_by_who_revealed_it(
    operator: Browser, shop_operator: Browser, books: Books
) -> None:
    files = [Attachment("Rechnung № 1.pdf", "application/pdf", b"%PDF")]
    email_id = books.enqueue_one(tenant_id="shop", html="<b>Hello</b>", attachments=files)
    await operator.get(f"/ops/emails/{email_id}/reveal")
    revealed = await operator.submit("/reveal", reason="ticket 4711")
    links = {link.rsplit("/", 1)[1]: link for link in links_of(revealed, "/revealed/")}
    (frame,) = re.findall(r'<iframe [^>]*src="([^"]+)"', revealed.body.decode())

    html = await operator.get(frame)
    source = await operator.get(links["source.eml"])
    attachment = await operator.get(links["0"])

    assert html.body == b"<b>Hello</b>"
    assert html.headers["content-security-policy"].startswith("sandbox; default-src 'none';")
    message = message_from_bytes(source.body, policy=policy.default)
    assert (message["Subject"], [part.get_filename() for part in message.iter_attachments()]) == (
        "Receipt",
        ["Rechnung № 1.pdf"],
    )
    assert (attachment.body, attachment.headers["content-disposition"][:10]) == (b"%PDF", "attachment")
    other = books.enqueue_one(tenant_id="shop")
    unrevealed = [frame.replace(str(email_id), str(other)), f"/ops/emails/{email_id}/revealed/attachments/{'9' * 5000}"]
    assert [(await operator.get(path)).status for path in unrevealed] == [404, 404]
    assert (await shop_operator.get(frame)).status == 404
    books.connection.execute("set dispatcher.prune_audit to on")
    books.connection.execute("update operator_audit set acted_at = acted_at - interval '11 minutes'")
    assert (await operator.get(frame)).status == 404


async def test_inline_images_are_shown_and_a_raw_message_is_named(operator: Browser, books: Books) -> None:
    files = [Attachment("a.png", "image/png", b"PNG", content_id="logo")]
    fields = books.enqueue_one(html='<img src="cid:logo">', attachments=files, calendar=Calendar(ics()))
    message = b"From: shop@example.com\r\nX-Own: 1\r\n\r\nHi\r\n"
    raw = books.enqueue_one(raw=message, text=None)
    await operator.get(f"/ops/emails/{fields}/reveal")
    shown = (await operator.submit("/reveal", reason="ticket 4711")).body.decode()
    (frame,) = re.findall(r'<iframe [^>]*src="([^"]+)"', shown)
    await operator.get(f"/ops/emails/{raw}/reveal")
    named = (await operator.submit("/reveal", reason="ticket 4712")).body.decode()

    assert (await operator.get(frame)).body == b'<img src="data:image/png;base64,UE5H">'
    assert all(words in shown for words in ("<dt>Inline image 1</dt>", "text/calendar; method=REQUEST"))
    assert "<dt>Raw</dt>" in named
    assert "<dt>Attachment" not in named
    source = await operator.get(f"/ops/emails/{raw}/revealed/source.eml")
    assert source.body.endswith(message)


async def test_another_tenants_email_is_not_found_by_any_name(shop_operator: Browser, books: Books) -> None:
    mine = books.enqueue_one(tenant_id="shop", to=ANN)
    other = books.enqueue_one(tenant_id="bank", to=ANN, correlation_id="twin")

    for name in (str(other), books.key(other), "twin"):
        page = await shop_operator.get(f"/ops/emails?q={name}&tenant_id=bank")
        assert (page.status, f"/ops/emails/{other}" in page.body.decode()) == (200, False)
    assert (await shop_operator.get(f"/ops/emails/by-key/{books.key(other)}?tenant_id=bank")).status == 404
    found = (await shop_operator.get(f"/ops/emails?q={ANN}&tenant_id=bank")).body.decode()
    assert (str(mine) in found, str(other) in found) == (True, False)


async def test_a_tenant_sees_neither_hosts_nor_the_words_of_operators(shop_operator: Browser, books: Books) -> None:
    email_id = dead_email(books, "held", locked_by=HOSTS, tenant_id="shop")
    attempt = {"attempt_number": 1, "worker": HOSTS, "provider": "ses", "outcome": "uncertain"}
    write(books, "email_attempt", email_id=email_id, started_at="now", finished_at="now", **attempt)
    write(books, "operator_audit", email_id=email_id, actor="root@mail-7", action="discard", reason="shop owes")

    page = await shop_operator.get(f"/ops/emails/{email_id}")
    await shop_operator.get(f"/ops/emails/{email_id}/confirm")
    await shop_operator.submit("/confirm", reason="the customer has it")
    own = await shop_operator.follow()

    for answer in (page, own):
        assert not any(word in answer.body.decode() for word in (HOSTS, "mail-7", "owes"))
    assert "an operator" in text_of(page)
    assert "the customer has it" in text_of(own)
