"""The pages of captured emails."""

from __future__ import annotations

import re
import time
from base64 import b64decode
from email.message import EmailMessage
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from dispatcher.broker.topology import Topology
from dispatcher.config import Settings
from dispatcher.dev.conformance import a_text
from dispatcher.domain.outcome import Accepted
from dispatcher.providers.sms_capture import SmsCaptureProvider
from tests.api.ops_page.browsing import Browser, signed_in
from tests.api.running_api import UNREACHABLE_AMQP_URL, Api, make_key, settings_of
from tests.providers.emails import send

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
]


async def test_a_damaged_email_is_shown_as_far_as_possible(operator: Browser, maildir: Path) -> None:
    names = [capture(maildir, content) for content in DAMAGED]
    paths = ["", *(f"/{name}{query}" for name in names for query in ("", "?view=source"))]

    answers = {path: await operator.get(f"/ops/captured{path}") for path in paths}

    assert {path: answer.status for path, answer in answers.items()} == dict.fromkeys(paths, 200)


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
