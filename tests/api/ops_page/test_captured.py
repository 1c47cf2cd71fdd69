"""The pages of captured emails, and what tests of applications use to read them."""

from __future__ import annotations

import asyncio
import re
import time
from base64 import b64decode
from dataclasses import replace
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import jsonschema
import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.conformance import a_text
from dispatcher.dev.testing import KEY_VARIABLE, CapturedMail, NotCaptured, fault_of
from dispatcher.domain.outcome import Accepted
from dispatcher.ops.captured import parse_name, read_captured
from dispatcher.providers.sms_capture import SmsCaptureProvider
from tests.api.ops_page.browsing import Browser, signed_in, text_of, token_of
from tests.api.running_api import UNREACHABLE_AMQP_URL, Api, make_key, running, settings_of
from tests.providers.emails import send
from tests.store.books import Books

PNG = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


@pytest.fixture
def maildir(tmp_path: Path) -> Path:
    (tmp_path / "mail" / "new").mkdir(parents=True)
    return tmp_path / "mail"


@pytest.fixture
def ops_settings(database_url: str, topology_names: Topology, maildir: Path) -> Settings:
    emails = {"PROVIDERS": "capture", "CAPTURE_DIR": str(maildir)}
    sms = {"SMS_PROVIDERS": "sms-capture", "SMS_CAPTURE_DIR": str(maildir.parent / "sms")}
    return settings_of(database_url, UNREACHABLE_AMQP_URL, topology_names, OPS="on", **emails, **sms)


def capture(maildir: Path, content: bytes | EmailMessage, *, folder: str = "new", flags: str = "") -> str:
    name = f"{uuid4()}.{time.time_ns()}.77.eml"
    (maildir / folder).mkdir(exist_ok=True)
    (maildir / folder / f"{name}{flags}").write_bytes(content if isinstance(content, bytes) else content.as_bytes())
    return name


def receipt() -> EmailMessage:
    """An email with HTML, a text, an image and an attachment; its texts are hostile."""
    email = EmailMessage()
    email["From"], email["To"], email["Subject"] = "Shop <shop@example.com>", "ann@example.org", "Grüße <b>&amp;"
    email.set_content("Thank you, Ann.")
    email.add_alternative('<p onclick="x()">Thank you</p><script>x()</script><img src="cid:logo">', subtype="html")
    html = email.get_payload()[1]  # type: ignore[index]
    html.add_related(PNG, "image", "png", cid="<logo>")  # type: ignore[union-attr]
    email.add_attachment(b"%PDF-1", maintype="application", subtype="pdf", filename="../../Rechnung \u202e fdp.exe")
    return email


async def test_the_list_is_bounded_and_pages_to_older_emails(operator: Browser, maildir: Path) -> None:
    for number in range(53):
        capture(maildir, f"Subject: number {number}.\n\n".encode())

    newest = (await operator.get("/ops/captured")).body.decode()
    (older,) = re.findall(r'href="(/ops/captured\?before=[0-9]+)"', newest)
    rest = (await operator.get(older)).body.decode()

    assert newest.count("<tr id=") == 50
    assert [number for number in range(53) if f"number {number}." in rest] == [0, 1, 2]


async def test_html_is_served_for_a_sandboxed_frame_that_loads_nothing_and_texts_as_text(
    operator: Browser, maildir: Path
) -> None:
    path = f"/ops/captured/{capture(maildir, receipt())}"

    page = await operator.get(path)
    html = await operator.get(f"{path}/html")
    text = (await operator.get(f"{path}?view=text")).body.decode()
    source = (await operator.get(f"{path}?view=source")).body.decode()

    assert re.search(rf'<iframe [^>]*sandbox="" src="{path}/html"', page.body.decode())
    assert page.headers["content-security-policy"].endswith("; frame-src 'self'")
    policy = html.headers["content-security-policy"].split("; ")
    assert {"sandbox", "default-src 'none'", "img-src data:", "form-action 'none'"} <= set(policy)
    assert not [directive for directive in policy if directive.startswith("script-src")]
    assert b'<img src="data:image/png;base64,iVBOR' in html.body
    assert "Thank you, Ann." in text
    assert "&lt;script&gt;x()&lt;/script&gt;" in source
    assert "<script>x()" not in source


def test_an_image_that_an_email_repeats_does_not_fill_the_memory(maildir: Path) -> None:
    email = EmailMessage()
    email.set_content('<img src="cid:logo">' * 100, subtype="html")
    email.add_related(bytes(2 * 1024 * 1024), "image", "png", cid="<logo>")
    name = parse_name(capture(maildir, email))
    assert name is not None

    shown = read_captured([maildir], name)

    assert shown is not None
    assert shown.framed is not None
    assert 10 < shown.framed.count("data:image/png") < 30


async def test_attachments_and_the_source_are_downloads_with_safe_names(operator: Browser, maildir: Path) -> None:
    name = capture(maildir, content := receipt().as_bytes())
    page = (await operator.get(f"/ops/captured/{name}")).body.decode()
    links = re.findall(rf'href="(/ops/captured/{name}/attachments/[0-9]+)"', page)

    files = [await operator.get(link) for link in links]
    source = await operator.get(f"/ops/captured/{name}/source.eml")

    assert [file.body for file in files] == [PNG, b"%PDF-1"]
    for file in files:
        assert file.headers["content-type"] == "application/octet-stream"
        assert file.headers["x-content-type-options"] == "nosniff"
        assert file.headers["content-disposition"].startswith("attachment; filename=")
        assert "sandbox" in file.headers["content-security-policy"]
    assert files[1].headers["content-disposition"].endswith("''Rechnung%20%20fdp.exe")
    assert (source.body, source.headers["content-disposition"][:10]) == (content, "attachment")


NAMES = ("..%2f..%2fsecret.eml", "%2e%2e/secret.eml", "{id}.1.1.eml%00", "{id}.99999999999999999999.1.eml")


async def test_no_name_and_no_link_leads_out_of_the_maildir(operator: Browser, maildir: Path) -> None:
    (maildir.parent / "secret.eml").write_bytes(b"Subject: secret\n\n")
    linked = capture(maildir, b"")
    (maildir / "new" / linked).unlink()
    (maildir / "new" / linked).symlink_to(maildir.parent / "secret.eml")
    links = [f"/ops/captured/{name.format(id=uuid4())}" for name in (*NAMES, linked)]
    paths = [link + rest for link in links for rest in ("", "/html", "/source.eml", "/attachments/0")]

    answers = {path: await operator.get(path) for path in paths}

    assert {path: answer.status for path, answer in answers.items()} == dict.fromkeys(paths, 404)
    assert b"secret" not in (await operator.get("/ops/captured")).body


DAMAGED = [
    b"",
    b"\0" * 1000,
    b"Subject: =?utf-8?b?a?=\nFrom: =?nope?q?x?=\n\n",
    b"Content-Type: multipart/mixed\n\n",
    b'Content-Type: multipart/mixed; boundary="b"\n\n--b\nContent-Type: message/rfc822\n\nSubject: x\n\ny\n--b--',
    b"Content-Type: text/html; charset=nope\nContent-Transfer-Encoding: base64\n\n%%%",
    b"Content-Disposition: attachment; filename*=nope'x'%ff\n\nx",
    b"Subject: " + b"x" * 100_000 + b"\n\n",
    b"Subject: =?utf-7?q?+2AA-?=\nContent-Type: text/plain; charset=utf-7\n\n+2AA-",
    b"".join(b"Content-Type: multipart/mixed; boundary=b%d\n\n--b%d\n" % (n, n) for n in range(600)),
    b"Content-Type: message/rfc822\n\n" * 400,
    b"To: " + b"(" * 30_000 + b"\nContent-Type: text/html\n\n<![<" + b"<a href='" * 200_000,
]


async def test_a_damaged_email_is_shown_and_searched_as_far_as_possible(
    operator: Browser, operator_key: str, maildir: Path
) -> None:
    names = [capture(maildir, content) for content in DAMAGED]
    views = ("", "?view=checks", "?view=headers")
    paths = ["", "?q=nothing", *(f"/{name}{query}" for name in names for query in views)]
    asked = ["?to=ann@example.org", "?text=x", *(f"/{name}" for name in names)]

    answers = {path: await operator.get(f"/ops/captured{path}") for path in paths}
    answers |= {path: await operator.api.get(f"/v1/captured{path}", token=operator_key) for path in asked}

    assert {path: answer.status for path, answer in answers.items()} == dict.fromkeys([*paths, *asked], 200)


async def test_only_operators_for_all_tenants_see_captured_emails(
    ops_api: Api, connection: psycopg.Connection, maildir: Path
) -> None:
    name = capture(maildir, receipt())
    paths = ("", f"/{name}", f"/{name}/html", f"/{name}/source.eml", f"/{name}/attachments/4")

    async def statuses(**columns: object) -> set[int]:
        browser = await signed_in(ops_api, make_key(connection, **columns))
        return {(await browser.get(f"/ops/captured{path}")).status for path in paths}

    assert await statuses(scopes=["operate"], tenant_id="shop") == {404}
    assert await statuses(scopes=["read"], tenant_id="shop") == {404}
    assert await statuses(scopes=["read"], tenant_id=None) == {403}


async def test_a_captured_sms_is_shown_beside_the_emails(operator: Browser, maildir: Path) -> None:
    capture(maildir, b"Subject: an email\n\n")
    sms = SmsCaptureProvider(maildir.parent / "sms")
    hostile = "4711 is your code. <script>x()</script>"
    assert isinstance((await send(sms, a_text(text=hostile))).outcome, Accepted)
    (path,) = (maildir.parent / "sms" / "new").iterdir()
    damaged = path.with_name(path.name.replace(path.name[:8], "0" * 8))
    damaged.write_bytes(b"{")

    listed = (await operator.get("/ops/captured")).body.decode()
    page = (await operator.get(f"/ops/captured/{path.name}")).body.decode()

    assert "an email" in listed
    assert "4711 is your code. &lt;script&gt;" in listed
    assert all(text in page for text in ("+4915112345678", "1 (GSM-7)", "&lt;script&gt;x()"))
    assert (await operator.get(f"/ops/captured/{damaged.name}")).status == 200


async def test_emails_are_searched_marked_as_read_and_deleted(operator: Browser, maildir: Path) -> None:
    name, other = capture(maildir, receipt()), capture(maildir, b"To: Bob <bob@example.org>\n\nhello")
    (maildir / "cur").mkdir()

    async def listed(query: str = "") -> list[str]:
        page = (await operator.get(f"/ops/captured{query}")).body.decode()
        return [found + unread for found, unread in re.findall(r'<tr id="captured-(.+?)"( class="unread")?>', page)]

    for words, found in (("THANK", name), ("bob@", other), ("grüße", name), ("hello", other), ("shop@", name)):
        assert await listed(f"?q={quote(words)}") == [f'{found} class="unread"'], words
    assert await listed("?q=nothing") == []

    await operator.get(f"/ops/captured/{name}")
    assert await listed() == [f'{other} class="unread"', name]
    await operator.get(f"/ops/captured/{name}")
    await operator.submit(f"{name}/delete")
    assert [await listed(), (await operator.get(f"/ops/captured/{name}")).status] == [[f'{other} class="unread"'], 404]
    await listed()
    await operator.submit("/captured/delete")
    assert await listed() == []


async def test_remote_images_are_loaded_only_when_asked_for(operator: Browser, maildir: Path) -> None:
    path = f"/ops/captured/{capture(maildir, receipt())}"
    (link,) = re.findall(r'href="([^"]+images=once)"', (await operator.get(path)).body.decode())

    (frame,) = re.findall(r'<iframe [^>]*src="([^"]+)"', (await operator.get(link)).body.decode())
    policy = (await operator.get(frame)).headers["content-security-policy"]

    assert "img-src data: https: http:;" in policy
    assert policy.startswith("sandbox; default-src 'none';")


async def test_a_test_email_is_enqueued_only_where_nothing_is_delivered(
    operator: Browser, maildir: Path, books: Books, ops_settings: Settings
) -> None:
    await operator.get("/ops/captured")
    await operator.submit("/captured/send", to="ann@example.org", subject="Hello")
    assert "is enqueued" in text_of(await operator.follow())
    assert books.select("select sender, subject from email_content") == [
        {"sender": "Test <test@example.com>", "subject": "Hello"}
    ]

    async with running(replace(ops_settings, providers=(*ops_settings.providers, "smtp"))) as api:
        operator.api = api
        page = await operator.get("/ops/captured")
        refused = await operator.post("/ops/captured/send", {"csrf_token": token_of(page), "to": "ann@example.org"})
    assert (b"Send a test" in page.body, refused.status) == (False, 409)


async def test_the_api_finds_reads_and_deletes_captured_emails(ops_api: Api, operator_key: str, maildir: Path) -> None:
    name, other = capture(maildir, receipt()), capture(maildir, b"To: joann@example.org\nSubject: b\n\n")

    async def call(path: str, method: str = "GET") -> Any:
        answer = await ops_api.call(method, f"/v1/captured{path}", token=operator_key)
        return answer.json if answer.status == 200 else (answer.status, answer.code)

    page = await call("?limit=1")
    rest = await call(f"?limit=1&before={page['next']}")
    message = await call(f"/{name}")

    assert [each["id"] for each in (*page["captured"], *rest["captured"])] == [other, name]
    assert [each["id"] for each in (await call("?to=Ann@example.org"))["captured"]] == [name]
    assert (message["subject"], message["recipients"], message["text"]) == (
        "Grüße <b>&amp;", ["ann@example.org"], "Thank you, Ann.\n"
    )  # fmt: skip
    assert [b64decode(each["content"]) for each in message["attachments"]] == [PNG, b"%PDF-1"]
    assert [each["subject"] for each in message["findings"]] == ["<script>", "<img> without alt"]
    schemas = (await ops_api.get("/openapi.json")).json["components"]
    jsonschema.validate(message, {"$ref": "#/components/schemas/CapturedMessage", "components": schemas})
    assert (await call("?limit=0")) == (await call("?after=yesterday")) == (400, "invalid-parameter")
    assert await call(f"/{name}", "DELETE") == {"deleted": 1}
    assert await call(f"/{name}", "DELETE") == await call(f"/{name}") == (404, "not-found")
    assert (await call("", "DELETE"), (await call(""))["captured"]) == ({"deleted": 1}, [])


async def test_only_operators_of_all_tenants_on_a_machine_for_development_use_the_api(
    ops_api: Api, operator_key: str, ops_settings: Settings, connection: psycopg.Connection, maildir: Path
) -> None:
    capture(maildir, receipt())

    async def code(token: str | None = operator_key, api: Api = ops_api, **named: Any) -> str | None:
        return (await api.get("/v1/captured", token=token, **named)).code

    assert await code() is None
    assert await code(None) == "unauthorized"
    for columns in ({"scopes": ["operate"]}, {"scopes": ["read", "send", "content"], "tenant_id": None}):
        assert await code(make_key(connection, **columns)) == "insufficient-scope"
    for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "192.0.2.1"}, {"Sec-Fetch-Site": "cross-site"}):
        assert await code(headers=headers) == "host-forbidden"
    delivers = (*ops_settings.providers, "smtp")
    for changed in ({"ops": False}, {"api_allow_anonymous": False}, {"providers": delivers}, {"providers": ("smtp",)}):
        async with running(replace(ops_settings, **changed)) as api:
            assert await code(api=api) == "not-found", changed


async def test_a_test_waits_for_an_email_and_reads_its_link_code_and_attachments(
    ops_api: Api, operator_key: str, maildir: Path
) -> None:
    capture(maildir, b"To: ann@example.org\nSubject: before the test\n\n")
    mail = CapturedMail(ops_api.url, operator_key)
    reset = EmailMessage()
    reset["To"], reset["Subject"] = "Ann <ann@example.org>", "Reset your password"
    reset.set_content("Order 4711001 of 2026-12-01: your code is 123456.")
    reset.add_alternative('<a href="https://example.com/r?a=1&amp;b=2">Reset <b>password</b></a>', subtype="html")

    waiting = asyncio.create_task(asyncio.to_thread(mail.wait_for, to="ann@example.org", timeout_seconds=30))
    await asyncio.to_thread(mail.all)  # the waiting request does not block other requests
    capture(maildir, reset)
    email = await waiting
    with pytest.raises(NotCaptured, match=r"(?s)other@.*within 0 s.*to ann@example.org: Reset your password"):
        await asyncio.to_thread(mail.wait_for, to="other@example.org", timeout_seconds=0)
    later = capture(maildir, receipt())
    second = await asyncio.to_thread(mail.wait_for, text="thank you", after=email)

    assert (email.subject, email.code(), email.link("reset password")) == (
        "Reset your password", "123456", "https://example.com/r?a=1&b=2"
    )  # fmt: skip
    with pytest.raises(NotCaptured, match="Its links: 'Reset password'"):
        email.link("Unsubscribe")
    assert (second.id, second.attachments[1].content) == (later, b"%PDF-1")
    assert [each.id for each in await asyncio.to_thread(mail.all)] == [second.id, email.id]
    await asyncio.to_thread(mail.clear)
    assert list((maildir / "new").iterdir()) == []
    mail.close()


async def test_the_fixture_says_why_it_cannot_read_captured_emails(
    ops_api: Api, operator_key: str, ops_settings: Settings
) -> None:
    """The name of the variable, or of the command, that is the remedy."""
    async with running(replace(ops_settings, ops=False)) as api:
        assert "dispatcher dev up" in str(await asyncio.to_thread(fault_of, api.url, operator_key))
    assert "dispatcher api" in str(await asyncio.to_thread(fault_of, "http://127.0.0.1:1", None))
    assert KEY_VARIABLE in str(await asyncio.to_thread(fault_of, ops_api.url, None))
    assert await asyncio.to_thread(fault_of, ops_api.url, operator_key) is None
