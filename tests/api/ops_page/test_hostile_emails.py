"""No text of an email, a provider, an operator or a link becomes markup on the pages Emails and Email."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote
from uuid import UUID

import psycopg
from psycopg import sql

from dispatcher.api.ops_page.plain_text import MAX_CHARACTERS, breakable, cut, plain, visible
from tests.api.ops_page.browsing import Browser
from tests.api.ops_page.hostile import LONG, MARK, SHORT, TEXTS, faults_of
from tests.store.books import Books


def write(books: Books, table: str, email_id: UUID, **columns: Any) -> None:
    """Inserts a row about an email, past the checks of the dispatcher."""
    names = sql.SQL(", ").join(map(sql.Identifier, ["email_id", *columns]))
    values = sql.SQL(", ").join(sql.Placeholder() * (len(columns) + 1))
    statement = sql.SQL("insert into {} ({}) values ({})").format(sql.Identifier(table), names, values)
    books.connection.execute(statement, [email_id, *columns.values()])


def hostile_email(books: Books, text: str) -> UUID:
    """A held email with the same text in every column that takes any text."""
    email_id = books.enqueue_one()
    short = text if text is SHORT else f"{SHORT}{email_id}"
    books.change(
        email_id,
        status="held",
        message_key=short,
        correlation_id=short,
        error_type=text,
        last_error=text,
        provider=text,
        provider_message_id=text,
        locked_by=text,
        attempt_count=1,
        publish_due_at=None,
    )
    names = {"worker": text, "provider": text, "error_type": text, "error": text, "provider_code": text}
    write(
        books,
        "email_attempt",
        email_id,
        attempt_number=1,
        outcome="uncertain",
        started_at="now",
        finished_at="now",
        **names,
    )
    write(books, "operator_audit", email_id, actor=text, action="discard", reason=text)
    statement = "update email_content set sender = %s, subject = %s, text_body = %s, html_body = %s where email_id = %s"
    books.connection.execute(statement, [text, text, text, text, email_id])
    many = psycopg.types.json.Jsonb
    statement = (
        "update email_content set recipients = %s, headers = %s, tags = %s, template_data = %s where email_id = %s"
    )
    given = [many({"to": [text], "cc": [f"{text}@x.example"]}), many({text: text}), many([text]), many({text: [text]})]
    books.connection.execute(statement, [*given, email_id])
    write(books, "email_attachment", email_id, position=1, filename=text, content_type=text, content=b"x")
    return email_id


async def test_hostile_texts_in_every_column_are_text(operator: Browser, books: Books) -> None:
    for text in (SHORT, LONG):
        email_id = hostile_email(books, text)
        pages = [await operator.get(f"/ops/emails/{email_id}"), await operator.get("/ops/emails?status=held")]
        pages += [await operator.get(f"/ops/emails/{email_id}/{name}") for name in ("confirm", "replay", "reveal")]
        pages.append(await operator.submit("/reveal", reason=text[:200]))

        assert [page.status for page in pages] == [200, 200, 200, 409, 200, 200], text[:60]
        for page in pages:
            assert faults_of(page) == [], text[:60]
            assert MARK in page.body.decode()


async def test_hostile_texts_in_links_and_forms_are_text(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one()
    for text in (SHORT, *TEXTS[:2], "x\0y", "%00", "../../etc/passwd", "x" * 1200):
        fields = ("q", "by", "status", "provider", "sender", "tag", "lane", "since", "until", "cursor", "tenant_id")
        page = await operator.get("/ops/emails?" + "&".join(f"{name}={quote(text)}" for name in fields))
        alone = await operator.get(f"/ops/emails?q={quote(text)}")
        assert (page.status, alone.status in (200, 400)) == (400, True), text[:60]
        for each in (page, alone):
            assert [fault for fault in faults_of(each) if "character" not in fault] == [], text[:60]
        for path in (f"/ops/emails/by-key/{quote(text)}", f"/ops/emails/{quote(text, safe='')}"):
            page = await operator.get(path)
            assert page.status in (404, 400), path[:60]
            assert faults_of(page) == []
        page = await operator.get(f"/ops/emails/{email_id}?done={quote(text)}")
        assert faults_of(page) == []
        await operator.get(f"/ops/emails/{email_id}/reschedule")
        page = await operator.submit("/reschedule", reason=text, send_at=text)
        assert page.status == 422
        assert [fault for fault in faults_of(page) if "character" not in fault] == []


def test_a_long_text_is_shortened_and_can_be_opened() -> None:
    html = plain("<b>" + "x" * 64_000)

    assert html.startswith('<details class="long"><summary><bdi>&lt;b&gt;xxx')
    assert "64,003 characters" in html
    assert html.count("x") > 64_000
    assert html.count("<wbr>") == 64_003 // 80
    assert "<details" not in plain("x" * 64_000, opens=False)
    assert cut("x" * (MAX_CHARACTERS + 7)).endswith("… (7 characters more)")


def test_a_long_word_can_be_broken_after_each_80_characters_outside_of_entities() -> None:
    assert breakable("<" * 161) == "<wbr>".join(["&lt;" * 80, "&lt;" * 80, "&lt;"])
    for text in ("", "W" * 80, "a word " * 100, "\0" * 3, f"{'W' * 80} {'W' * 80}\n"):
        assert breakable(text) == text
    assert breakable("x" * 200_000).replace("<wbr>", "") == "x" * 200_000


def test_characters_that_mislead_are_shown_as_escapes_and_joiners_stay() -> None:
    assert visible("a\u202eb\x00\x1b\ud800\u2066") == r"a\u202eb\x00\x1b\ud800\u2066"
    joined = "\U0001f469\u200d\U0001f4bb \u0928\u092e\u0938\u094d\u0924\u0947\n\t\u05e9"
    assert visible(joined) == joined
