"""No text of an email, a provider, an operator, a message or a link becomes markup or misleads a reader of a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final
from urllib.parse import quote
from uuid import UUID

from psycopg.types.json import Jsonb

from dispatcher.api.ops_page.plain_text import visible
from tests.api.ops_page.browsing import Browser
from tests.api.ops_page.rows import event, write
from tests.api.running_api import Answer
from tests.store.books import Books

MARK: Final = "zqx"
"""Each text has this mark, so that a test can show that the page contains it."""
TEXTS: Final = (
    f"<script>{MARK}(1)</script>",
    f"</title></textarea></script><script src=//evil.example/{MARK}></script>",
    f'"><img src=x onerror={MARK}(1)>',
    f"' autofocus onfocus={MARK}(1) x='",
    f"<svg/onload={MARK}(1)>",
    f"javascript:{MARK}(1)//",
    f"{{{{ {MARK} }}}}{{% for x in {MARK} %}}",
    f"<iframe srcdoc='<script>{MARK}(1)</script>'></iframe>",
    f"<a href=data:text/html,{MARK}>click</a><base href=//evil.example><meta http-equiv=refresh content=0>",
    f"</bdi></code></td></table></main><form action=//evil.example><input name={MARK}>",
    f"--><!-- {MARK} <![CDATA[ ]]>",
    f"\u202egpj.{MARK}\u2066 \u2069 \u200f\u061c \u2028 \ufeff \x1b[31m \x07\x7f\x9b",
    f"hx-get=/ops hx-on:click={MARK}(1) <div hx-get=/ops/sign-out hx-trigger=load>{MARK}</div>",
)
SHORT: Final = " ".join(TEXTS)
LONG: Final = f"<script>{MARK}(1)</script>\u202e" + "<b>x" * 4_096
_MISLEADING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_OWN: Final = re.compile(r"(?:/ops(?:[/?].*)?|#main)")
_TAGS: Final = re.compile(
    "html|head|meta|title|link|script|body|a|header|div|button|span|form|label|input|nav|ul|ol|li|main|footer|h1|h2|h3"
    "|p|section|dl|dt|dd|table|caption|thead|tbody|tr|th|td|code|bdi|wbr|details|summary|time|strong|pre|datalist"
    "|option|select|br|textarea|dialog|kbd|fieldset|legend|iframe"
)


class _Checker(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if not _TAGS.fullmatch(tag):
            self.faults.append(f"element {tag}")
        if tag == "iframe" and dict(attrs).get("sandbox") != "":
            self.faults.append("a frame that may do something")
        for name, value in attrs:
            if name.startswith(("on", "hx-on")) or name in ("style", "srcdoc", "http-equiv"):
                self.faults.append(f"attribute {name}")
            if name in ("href", "src", "action", "hx-get") and not _OWN.fullmatch(value or ""):
                self.faults.append(f"{name} {value!r}")
            if MARK in name or (name in ("id", "class") and MARK in (value or "")):
                self.faults.append(f"attribute {name}={value!r}")
        if tag == "script" and not dict(attrs).get("src"):
            self.faults.append("script without source")

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"comment {data!r}")


def faults_of(page: Answer, *, misleading: bool = True) -> list[str]:
    """What a hostile text has achieved on a page: elements, attributes, foreign links, characters that mislead."""
    checker = _Checker()
    checker.feed(page.body.decode())
    checker.close()
    shown = checker.text.replace("\r", "") if misleading else ""
    return [*checker.faults, *(f"character {ord(found[0]):#x}" for found in _MISLEADING.finditer(shown))]


def hostile_email(books: Books, text: str) -> UUID:
    """A held email with the same text in every column that takes any text."""
    email_id = books.enqueue_one()
    short = text if text is SHORT else f"{SHORT}{email_id}"
    named = dict.fromkeys(("error_type", "last_error", "provider", "provider_message_id", "locked_by"), text)
    books.change(
        email_id, status="held", message_key=short, correlation_id=short, attempt_count=1, publish_due_at=None, **named
    )
    times = {"started_at": "now", "finished_at": "now"}
    names = dict.fromkeys(("worker", "provider", "error_type", "error", "provider_code"), text)
    write(books, "email_attempt", email_id=email_id, attempt_number=1, outcome="uncertain", **times, **names)
    write(books, "operator_audit", email_id=email_id, actor=text, action="discard", reason=text)
    given = {"to": [text], "cc": [f"{text}@x.example"]}, {text: text}, [text], {text: [text]}
    books.connection.execute(
        "update email_content set (sender, subject, text_body, html_body, recipients, headers, tags, template_data)"
        " = (%s, %s, %s, %s, %s, %s, %s, %s) where email_id = %s",
        [*[text] * 4, *map(Jsonb, given), email_id],
    )
    write(books, "email_attachment", email_id=email_id, position=1, filename=text, content_type=text, content=b"x")
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


async def test_hostile_texts_in_lists_are_text(operator: Browser, books: Books) -> None:
    email_id = hostile_email(books, SHORT)
    failed = hostile_email(books, f"{SHORT} ")
    books.change(failed, status="failed", error_type="refused")
    event(books, email_id, code=SHORT[:64], detail=SHORT)

    for path, shown in (("/events", email_id), ("/audit", email_id), ("/held", email_id), ("/dead-letters", failed)):
        page = await operator.get(f"/ops{path}")
        assert (page.status, faults_of(page)) == (200, []), path
        assert all(text in page.body.decode() for text in (MARK, f"/ops/emails/{shown}")), path
    for path in ("/held", "/dead-letters", "/replays/new"):
        page = await operator.get(f"/ops{path}?text=%3Cscript%3E{MARK}(1)%3C/script%3E%E2%80%AE&tenant_id=%00%01")
        assert (page.status, faults_of(page, misleading=False)) == (400, []), path


async def test_hostile_texts_in_links_and_forms_are_text(operator: Browser, books: Books) -> None:
    email_id = books.enqueue_one()
    for text in (SHORT, *TEXTS[:2], "x\0y", "%00", "../../etc/passwd", "x" * 1200):
        fields = ("q", "by", "status", "provider", "sender", "tag", "lane", "since", "until", "cursor", "tenant_id")
        page = await operator.get("/ops/emails?" + "&".join(f"{name}={quote(text)}" for name in fields))
        alone = await operator.get(f"/ops/emails?q={quote(text)}")
        assert (page.status, alone.status in (200, 400)) == (400, True), text[:60]
        assert faults_of(page, misleading=False) == faults_of(alone, misleading=False) == [], text[:60]
        for path in (f"/ops/emails/by-key/{quote(text)}", f"/ops/emails/{quote(text, safe='')}"):
            page = await operator.get(path)
            assert (page.status in (404, 400), faults_of(page)) == (True, []), path[:60]
        page = await operator.get(f"/ops/emails/{email_id}?done={quote(text)}")
        assert faults_of(page) == []
        await operator.get(f"/ops/emails/{email_id}/reschedule")
        page = await operator.submit("/reschedule", reason=text, send_at=text)
        assert (page.status, faults_of(page, misleading=False)) == (422, [])


def test_characters_that_mislead_are_shown_as_escapes_and_joiners_stay() -> None:
    assert visible("a\u202eb\x00\x1b\ud800\u2066") == r"a\u202eb\x00\x1b\ud800\u2066"
    joined = "\U0001f469\u200d\U0001f4bb \u0928\u092e\u0938\u094d\u0924\u0947\n\t\u05e9"
    assert visible(joined) == joined
