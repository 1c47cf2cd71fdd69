"""What becomes of MIME messages: as they arrive at an SMTP server that is not ours, and in the requests to the APIs."""

from __future__ import annotations

import base64
import itertools
import re
import time
from collections.abc import AsyncIterator
from email import message_from_bytes
from email.policy import default
from email.utils import parseaddr
from pathlib import Path
from typing import Any

import pytest

from dispatcher.dev.conformance import an_email
from dispatcher.dev.smtp_behaviour import SmtpBehaviour
from dispatcher.domain.email import Email
from dispatcher.domain.outcome import Accepted
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.errors import InvalidEmail
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from dispatcher.transport.mime import render
from tests.mime_corpus import CASES, FIELDS, RAW, Case, Meaning, hostile, leaf, lines, meaning, spec_of
from tests.providers.emails import outcome_text, send
from tests.providers.http_places import resend_place, sendgrid_place
from tests.providers.places import smtp_place
from tests.providers.ses_place import ses_place
from tests.providers.test_smtp_servers import RecordingHandler, aiosmtpd  # noqa: F401 - a fixture

SENT = [case for case in CASES if case.becomes in (FIELDS, RAW)]
API = "The API gets what a recipient must get"
NO_SUBJECT = ("subject empty",)


def outgoing(email: Email) -> OutgoingEmail:
    names = ("sender", "to", "cc", "bcc", "reply_to", "subject", "text", "html", "headers", "attachments", "calendar")
    return an_email(raw=email.raw, **{name: getattr(email, name) for name in names})


def expected(case: Case) -> Meaning:
    """What the message said to its recipients, before it was read."""
    said = meaning(case.message)
    # A group has no addresses, and a file without a name gets one.
    named = {"application/pdf": "attachment-1.pdf", "image/png": "attachment-1.png"}
    return said._replace(files=[(each[0] or named[each[1]], *each[1:]) for each in said.files])


@pytest.mark.parametrize("case", SENT, ids=lambda case: case.name)
def test_a_message_becomes_fields_or_is_kept_raw(case: Case) -> None:
    email = case.email()

    assert case.becomes == (FIELDS if email.raw is None else RAW)
    again = Email.from_json(email.to_json())
    assert again == email
    assert again.payload_hash() == email.payload_hash()
    if case.recipients is not None:
        specs = [parseaddr(each)[1] for each in (*email.to, *email.cc, *email.bcc)]
        assert specs == list(case.recipients)


@pytest.mark.parametrize("case", [case for case in CASES if case not in SENT], ids=lambda case: case.name)
def test_a_message_that_cannot_be_sent_is_refused_and_not_quoted(case: Case) -> None:
    with pytest.raises(InvalidEmail) as caught:
        case.email()

    assert case.becomes.removeprefix("refused: ") in str(caught.value)
    assert "example.org" not in str(caught.value)


@pytest.mark.parametrize(("name", "message", "becomes"), [(name, *each) for name, each in hostile().items()])
def test_a_hostile_message_takes_no_long_time_to_read(name: str, message: bytes, becomes: str) -> None:
    began_at = time.process_time()
    try:
        outcome = RAW if Email.from_mime(message, message_key=name).raw else FIELDS
    except InvalidEmail as error:
        outcome = error.reason

    assert outcome.endswith(becomes)
    assert time.process_time() - began_at < 4


def test_a_message_is_read_as_mail_software_reads_it_and_not_only_python() -> None:
    part = leaf("text/plain", b"\x93100 \x80\x94\r\n", charset="iso-8859-1", cte="8bit")
    email = Case("x", part, head=["List-Unsubscribe: <https://example.com/\r\n u?a>, <mailto:u@example.com>"]).email()

    assert email.text == "“100 €”\n"
    assert email.headers == {"List-Unsubscribe": "<https://example.com/u?a>, <mailto:u@example.com>"}


def as_raw(case: Case) -> bytes:
    """The message with what must leave it, and only that, removed: by a regular expression, not by our parser."""
    octets = case.message if b"\r\n" in case.message else case.message.replace(b"\n", b"\r\n")
    head, blank, body = octets.partition(b"\r\n\r\n")
    head = re.sub(rb"(?im)^(bcc|resent-bcc|return-path):[^\n]*\n([ \t][^\n]*\n)*", b"", head + b"\r\n")
    kept = head + blank[2:] + body
    return kept if kept.endswith(b"\r\n") else kept + b"\r\n"


async def test_smtp_sends_raw_messages_unchanged_and_others_with_their_meaning(
    aiosmtpd: tuple[Any, RecordingHandler],  # noqa: F811
) -> None:
    provider, handler = aiosmtpd
    for case in SENT:
        email = outgoing(case.email())
        assert isinstance((await send(provider, email)).outcome, Accepted), case.name
        envelope = handler.envelopes.pop()
        assert isinstance(envelope.content, bytes)
        specs = [parseaddr(each)[1] for each in (*email.to, *email.cc, *email.bcc)]
        assert envelope.rcpt_tos == specs, case.name
        assert b"\nbcc:" not in envelope.content.lower(), case.name
        if case.becomes == RAW:
            ours = b"".join(
                line + b"\r\n"
                for line in envelope.content.split(b"\r\n")
                if str(email.email_id).encode() in line or line == b"Date: Sat, 21 Nov 2026 07:30:00 +0000"
            )
            assert envelope.content == ours + as_raw(case), case.name
            assert bool(ours) == ("no date" in case.name), case.name
        else:
            assert meaning(envelope.content) == expected(case), case.name
            assert envelope.content.isascii(), case.name


@pytest.mark.parametrize(
    ("name", "lacks", "outcome"),
    [
        ("signed in 8bit", "8BITMIME", "rejected invalid_content"),
        ("subject smtputf8, signed", "SMTPUTF8", "rejected rejected_recipient"),
        ("signed in 8bit", "SMTPUTF8", "accepted"),
        ("utf-8 in 8bit", "8BITMIME", "accepted"),
    ],
)
async def test_a_raw_message_is_not_changed_for_a_server_that_lacks_an_extension(
    name: str, lacks: str, outcome: str, tmp_path: Path
) -> None:
    email = outgoing(next(each for each in CASES if each.name == name).email())
    extensions = tuple({"PIPELINING", "8BITMIME", "SMTPUTF8"} - {lacks})
    async with smtp_place(tmp_path, SmtpBehaviour(extensions=extensions)) as place:
        assert outcome_text((await send(place.provider, email)).outcome) == outcome
        parameters = [each.parameters for each in place.sink.received]
    assert all(("8BITMIME" in each) is (email.raw is not None) for each in parameters)


async def test_ses_sends_both(tmp_path: Path) -> None:
    async with ses_place(tmp_path) as place:
        for case in SENT:
            email = outgoing(case.email())
            if gap := place.provider.capabilities.unmet_requirement(email):
                assert case.name == "subject smtputf8, signed", gap
                continue
            assert isinstance((await send(place.provider, email)).outcome, Accepted), case.name
            (sent,) = place.contents()[-1:]
            raw_lines = [len(line) for line in sent.split(b"\r\n")]
            assert max(raw_lines) <= 998, case.name
            if case.becomes == RAW:
                assert sent.endswith(as_raw(case)), case.name
                destination = place.double.received[-1]["Destination"]
                assert set(itertools.chain(*destination.values())) == {*email.to, *email.cc, *email.bcc}, case.name
            else:
                assert meaning(sent) == expected(case), case.name


@pytest.fixture(params=["sendgrid", "resend"])
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    places: dict[str, Any] = {"sendgrid": sendgrid_place, "resend": resend_place}
    async with places[request.param](tmp_path) as place:
        yield place


async def test_an_api_without_mime_gets_the_fields(api: Any) -> None:
    sent = 0
    for case in SENT:
        email = outgoing(case.email())
        if api.provider.capabilities.unmet_requirement(email) is not None:
            is_calendar = case.email().calendar is not None and api.provider.name == "resend"
            assert case.becomes == RAW or is_calendar or case.name in ("subject empty", "addresses undisclosed"), (
                case.name
            )
            continue
        assert isinstance((await send(api.provider, email)).outcome, Accepted), case.name
        document = api.double.received[-1]
        got, wanted = of_api(document), expected(case)
        people = document["personalizations"][0] if "personalizations" in document else document
        assert "bcc" not in people or case.name in ("addresses bcc", "more recipients"), case.name
        if wanted.mailboxes["to"]:
            assert got == wanted, case.name
        sent += 1
    assert sent > 70


def of_api(document: dict[str, Any]) -> Meaning:
    """What a request says, by SendGrid's and Resend's documentation of its fields."""
    people = document.get("personalizations", [document])[0]
    replies = document.get("reply_to_list", document.get("reply_to", []))
    boxes = {"from": [document["from"]], "to": people.get("to", []), "cc": people.get("cc", [])}
    boxes["reply-to"] = replies if isinstance(replies, list) else [replies]
    bodies = {each["type"]: each["value"] for each in document.get("content", ())}
    (method, text), *_ = [
        *((kind.partition("method=")[2], lines(bodies[kind])) for kind in bodies if kind.startswith("text/calendar;")),
        ("", ""),
    ]
    if bodies:  # SendGrid's order: text, HTML, others
        order = ["text/plain", "text/html", f"text/calendar; method={method}"]
        assert list(bodies) == [each for each in order if each in bodies]
    files = []
    for each in document.get("attachments", ()):
        kind, content = each.get("type") or each["content_type"], base64.b64decode(each["content"])
        assert ";" not in kind
        assert each.get("disposition", "inline") == ("inline" if "content_id" in each else "attachment") or (
            "type" not in each
        )
        if each["filename"] == "invite.ics" and text:
            assert (kind, lines(content.decode())) == ("application/ics", text)
            continue
        files.append((each["filename"], kind, content, each.get("content_id", "")))
    headers = {name.lower(): decoded(value) for name, value in document.get("headers", {}).items()}
    headers.pop("message-id", None)
    return Meaning(
        document.get("subject", ""),
        {name: [_mailbox(each) for each in listed] for name, listed in boxes.items()},
        headers,
        lines(bodies.get("text/plain") or document.get("text", "")),
        lines(bodies.get("text/html") or document.get("html", "")),
        (method, text),
        files,
    )


def decoded(value: str) -> str:
    return " ".join(str(default.header_factory("X", value)).split())


def _mailbox(each: dict[str, str] | str) -> tuple[str, str]:
    if isinstance(each, str):
        name, spec = parseaddr(each)
    else:
        name, spec = each.get("name", ""), each["email"]
        name = parseaddr(f"{name} <a@b>")[0] if name.startswith('"') else name
    return name, spec_of(spec)


@pytest.mark.parametrize("method", ["REQUEST", "CANCEL", "REPLY"])
def test_an_invitation_is_an_alternative_and_a_file(method: str) -> None:
    """RFC 6047, section 2.4: the parameter `method` equals METHOD; `charset` is given. RFC 5546, section 3.2: the
    component has a UID, DTSTAMP, ORGANIZER and ATTENDEE. Outlook (MS-OXCMAIL, 2.1.3.3.8) reads the last child of
    multipart/alternative, in Base64."""
    case = next(
        each for each in CASES if each.name == {"REQUEST": "invitation", "CANCEL": "cancellation"}.get(method, "answer")
    )
    message = message_from_bytes(render(outgoing(case.email())).content, policy=default)
    alternative, attached = message.iter_parts()
    first, *_, last = alternative.iter_parts()
    assert first.get_content_type() == "text/plain"
    assert dict(last["content-type"].params) == {"charset": "utf-8", "method": method}
    assert last["content-transfer-encoding"] == "base64"
    assert last.get_content_disposition() is None
    text = last.get_content()
    assert text.replace("\r\n", "\n") == attached.get_content().decode().replace("\r\n", "\n")
    assert (attached.get_content_type(), attached.get_filename()) == ("application/ics", "invite.ics")
    unfolded = re.sub(r"\r?\n[ \t]", "", text).splitlines()
    names = [re.split("[:;]", line)[0] for line in unfolded]
    assert unfolded[names.index("METHOD")] == f"METHOD:{method}"
    assert {"UID", "DTSTAMP", "DTSTART", "ORGANIZER", "ATTENDEE", "SEQUENCE"} <= set(names)
    assert b"\n" not in attached.get_content().replace(b"\r\n", b"")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pgp signed", "raw (the message is sent as it is, because it has a part multipart/signed"),
        (
            "fewer recipients",
            "because it names recipients in To or Cc who do not get it) needs a provider with raw MIME (ses, smtp)",
        ),
        ("invitation", "a calendar needs a provider with calendar parts (sendgrid, ses, smtp); configured: resend."),
    ],
)
def test_what_no_provider_can_send_is_refused_with_the_reason(name: str, words: str) -> None:
    email = next(each for each in CASES if each.name == name).email()
    gap = capability_gap(email, capabilities_of(["resend"]))
    assert words in str(gap)
    assert capability_gap(email, capabilities_of(["resend", "smtp"])) is None
