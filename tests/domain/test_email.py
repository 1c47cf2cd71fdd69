"""An `Email` is always valid. An error contains the name of the invalid field, but never its value."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
import warnings
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dispatcher.domain import email_rules as rules
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.capabilities import Capabilities, Requirement
from dispatcher.domain.email import Email, EmailOptions
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import Attachment, OutgoingAttachment, endings_of
from dispatcher.domain.sms import Sms
from dispatcher.domain.text import MAX_KEY_CHARACTERS, MAX_TENANT_CHARACTERS
from dispatcher.errors import InvalidEmail
from tests.mime_corpus import ics

PDF = Attachment("receipt.pdf", "application/pdf", b"%PDF")
LOGO = Attachment("logo.png", "image/png", b"PNG", content_id="logo")
MIB = 1024 * 1024
NOW = datetime.now(UTC)
LATER = NOW + timedelta(days=3)
END_OF_TIME = datetime(9999, 12, 31, 23, tzinfo=timezone(timedelta(hours=-12)))
DATA = {"name": "Ann", "lines": [{"price": 1.5, "paid": True, "note": None}]}
TEMPLATED: dict[str, Any] = {"text": None, "subject": "", "template_id": "d-1", "template_data": DATA}
BEGIN_OF_TIME = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=12)))


def an_email(**fields: Any) -> Email:
    plain = {"message_key": "order-17", "sender": "shop@example.com", "to": "ann@example.org", "subject": "Hi"}
    return Email(**{**plain, "text": "Hi", **fields})


def refusal(**fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidEmail) as caught:
        an_email(**fields)
    return caught.value.field, caught.value.reason


def test_an_empty_body_counts_as_absent() -> None:
    assert an_email(text="", html="<p>Hi</p>").text is None
    assert refusal(text="", html="")[0] == "text"
    assert refusal(text=None)[0] == "text"


@dataclasses.dataclass(frozen=True)
class Pdf(Attachment):
    """An attachment of an application, which can derive from ours because ours is frozen."""

    pages: int = 1


def test_an_email_and_its_files_are_immutable_and_an_email_can_be_compared_hashed_and_replaced() -> None:
    to, headers, attachments = ["ann@example.org"], {"X-Order": "17"}, [PDF]
    email = an_email(to=to, headers=headers, attachments=attachments)

    to.append("bob@example.org\r\n")
    headers["Bcc"] = "bob@example.org"
    attachments.clear()
    with pytest.raises(dataclasses.FrozenInstanceError):
        email.subject = "Other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pdf("invoice.pdf", "application/pdf", b"").filename = "../invoice.pdf"  # type: ignore[misc]
    with pytest.raises(TypeError):
        email.headers["X-Other"] = "1"  # type: ignore[index]
    same = an_email(headers={"X-Order": "17"}, attachments=[PDF])
    assert (email, hash(email)) == (same, hash(same))
    assert dataclasses.replace(email, subject="Other").subject == "Other"


def test_the_repr_shows_nothing_private() -> None:
    email = an_email(subject="SECRET", text="SECRET", html="SECRET", headers={"X-A": "SECRET"}, attachments=[PDF])

    assert "SECRET" not in repr(email)
    assert "example" not in repr(email)
    assert "order-17" in repr(email)


def nested(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, ...]] = {
    "message_key": (True, "", "k" * 256, "a\nb", "order-17 ", "a\u200bb", "a\ud800", 17, None),
    "correlation_id": (" r", "", "c" * 256, "c\x1b[31m"),
    "tenant_id": ("", "a b", "acme\n", "ácme", "-acme", "a" * 101),
    "sender": ("", "nobody", ["shop@example.com"], "shop@example.com\nBcc: x@example.com"),
    "to": ((), None, b"ann@example.org", {"ann@example.org"}, "nobody", ["ann@example.org"] * 1001),
    "to[1]": tuple(["ann@example.org", wrong] for wrong in ("nobody", 17, ["bob@example.org"], nested(100_000))),
    "cc[0]": (["nobody"],),
    "bcc[0]": (["nobody"],),
    "reply_to[0]": (["nobody"],),
    "reply_to": (["ann@example.org"] * 1001,),
    "subject": (
        *(None, "s" * 999, "Hi\r\nBcc: x@example.com", "Hi\x85Bcc: x@example.com", "Hi\u2028there", "Hi\tthere"),
        *("Hi\0", 1.5, "Hi \ud83d", "=?utf-8?q?Hi=0D=0ABcc=3A_x?=", "Re: =? utf-8?B?a?b c?=", "=??q??="),
    ),
    "text": (b"Hi", "a\0b", "a\ud800b", "a" * (10 * MIB + 1), "ü" * (5 * MIB + 1)),
    "html": ("a\0b", "ü\udfff"),
    "calendar": ("BEGIN:VCALENDAR", b"", {"content": "x"}),
    "headers": (None, [], [("X-A", "1")], {f"X-{number}": "1" for number in range(101)}),
    "headers.x-a": ({"X-A": "1", "x-a": "2"},),
    "headers.X-A": (
        *({"X-A": "1\r\nBcc: x@example.com"}, {"X-A": "1\n x"}, {"X-A": "v" * 999}, {"X-A": None}, {"X-A": ["1"]}),
    ),
    "headers.": ({"": "1"},),
    "headers.X A": ({"X A": "1"},),
    "headers.X-A:": ({"X-A:": "1"},),
    "headers.Bcc??": ({"Bcc\r\n": "1"},),
    "headers.X-Ä": ({"X-Ä": "1"},),
    f"headers.{'X' * 40}…": ({"X" * 77: "1"},),
    "headers.int": ({7: "1"},),
    "attachments": (PDF, [PDF] * 101),
    "attachments[1]": ([PDF, {"filename": "a"}], [PDF, OutgoingAttachment("../x", "a/b", b"")]),  # is not checked
    "attachments[1].content": ([Attachment("a", "a/b", bytes(13 * MIB))] * 2,),
    "tags": (["t"] * 11, ["t", "t"], {}),
    "tags[1]": (["t", ""],),
    "tags[0]": (["t" * 101], ["a\nb"], [1]),
    "metadata": (None, [("a", "1")], {str(number): "1" for number in range(21)}),
    "metadata.a b": ({"a b": "1"},),
    "metadata.a=b": ({"a=b": "1"},),
    f"metadata.{'x' * 40}…": ({"x" * 65: "1"},),
    "metadata.a": ({"a": ""}, {"a": "v" * 257}, {"a": 1}, {"a": "b\nc"}),
    "topic": ("", "News", "my news", "ä", "n" * 65, "-news", 1),
    "on_uncertain": (1, True, "HOLD"),
    "send_at": (
        *(LATER.replace(tzinfo=None), "2026-12-24T18:00:00Z", NOW + timedelta(days=367), END_OF_TIME, BEGIN_OF_TIME),
    ),
    "expires_at": (LATER.replace(tzinfo=None), NOW + timedelta(days=367)),
    "lane": ("", "Urgent", 1),
    "erase_after_sending": ("no", None, 1),
}


NO_DATA = (["not", "an", "object"], {1: "x"})
NO_JSON = (nested(40), nested(100_000), float("nan"), 2**60, "a\0b", "\ud800", object(), "y" * 300_000)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        *((field, {re.split(r"\W", field)[0]: wrong}) for field, values in REFUSED.items() for wrong in values),
        ("to", {"to": ["ann@example.org"] * 600, "cc": ["ann@example.org"] * 401}),
        ("html", {"text": "a" * (5 * MIB), "html": "ü" * (3 * MIB)}),
        ("expires_at", {"send_at": LATER, "expires_at": LATER}),
        *(
            ("raw", {"raw": wrong, "text": None})
            for wrong in ("x", b"x", b"Bcc: a@b.example\r\n\r\n", b"From: a@b.de\n\n")
        ),
        ("text", {"raw": b"From: shop@example.com\r\n\r\n"}),
        ("sender", {"raw": b"From: eve@example.com\r\n\r\n", "text": None}),
        ("calendar", TEMPLATED | {"calendar": Calendar(ics())}),
        *(("attachments[0].content_id", {"attachments": [LOGO], "html": html}) for html in (None, "cid:log", "logo")),
        ("attachments[1].content_id", {"attachments": [LOGO, LOGO], "html": "cid:logo"}),
        ("html", {"attachments": [LOGO], "html": "cid:logo cid:other"}),
        ("template_id", TEMPLATED | {"text": "hello"}),
        *(("template_id", TEMPLATED | {"template_id": wrong}) for wrong in ("", "a/b")),
        ("template_data", {"template_data": DATA}),
        *(("template_data", TEMPLATED | {"template_data": wrong}) for wrong in NO_DATA),
        *(("template_data", TEMPLATED | {"template_data": {"x": wrong}}) for wrong in NO_JSON),
    ],
)
def test_a_refusal_names_the_invalid_argument(field: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields)[0] == field


def test_a_mime_message_takes_every_argument_that_says_nothing_about_its_content() -> None:
    content = "sender to cc bcc reply_to subject text html template_id template_data headers attachments calendar raw"
    others = {*inspect.signature(Email).parameters} - {*content.split(), "message_key", "allowed_headers"}

    assert others == {*EmailOptions.__annotations__}
    with pytest.raises(TypeError, match="topic"):
        Email.from_mime(b"From: a@b.example\r\n\r\n", message_key="k", subject="s")  # type: ignore[call-arg]


FILE: dict[str, Any] = {"filename": "a", "content_type": "text/plain", "content": b""}
REFUSED_OF_FILES: dict[str, tuple[Any, ...]] = {
    "filename": (
        *("", "..", " .\u00a0", "../x", "a\\b", "a/b", "a" * 256, "\uff0e\uff0e\uff0fx", "\u2024\u200b.", "a\uff3cb"),
        *("a\r\nb", "\u202efdp.exe", 7, None),
    ),
    "content_type": (
        *("text", "", "text/plain\r\nX: y", "text/plain\n", None, "a/b; charset=utf-8", "Multipart/mixed"),
        "message/rfc822",
    ),
    "content": ("text", bytearray(b"x"), None),
    "content_id": ("", "<logo>", "cid:logo", "a b", "logo\r\nX: y", "ö", "x" * 201, 1),
}


@pytest.mark.parametrize(
    ("field", "wrong"), [(field, wrong) for field, values in REFUSED_OF_FILES.items() for wrong in values]
)
def test_an_invalid_attachment_cannot_be_made(field: str, wrong: Any) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Attachment(**{**FILE, field: wrong})

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "method", "words"),
    [
        ("", "", "content: must be one iCalendar object"),
        (ics().replace("END:VCALENDAR", "END:VCALENDAR\r\nX:1"), "", "content: must be one iCalendar object"),
        (ics() + ics(), "", "content: must be one iCalendar object, and has"),
        (ics().replace("END:VEVENT", "END:VTODO"), "", "content: has an END without its BEGIN"),
        (ics().replace("UID:", "UID "), "", "content: has a line that is not a property"),
        (ics(without="METHOD"), "", "content: needs a line METHOD with one of: PUBLISH, REQUEST"),
        (ics("FOO"), "", "content: needs a line METHOD"),
        (ics(without="VERSION"), "", "content: needs the lines VERSION:2.0 and PRODID"),
        (ics(of="VFOO"), "", "content: needs one of: VEVENT"),
        *((ics(without=each), "", f"content: has no {each} in VEVENT") for each in ("UID", "DTSTAMP", "ORGANIZER")),
        (ics(without="ATTENDEE"), "", "content: has no ATTENDEE in VEVENT, which METHOD:REQUEST needs"),
        (ics().replace("BEGIN:VEVENT", "BEGIN:V\r\n" * 9 + "BEGIN:VEVENT"), "", "content: has components in comp"),
        (ics(), "CANCEL", "method: must be REQUEST"),
        (ics() + "\0", "", "content: contains a NUL"),
        (None, "", "content: must be a string"),
    ],
)
def test_a_calendar_that_programs_would_ignore_cannot_be_made(text: Any, method: str, words: str) -> None:
    with pytest.raises(InvalidEmail) as caught:
        Calendar(text, method)

    assert str(caught.value).startswith(words)


def test_a_calendar_takes_its_method_from_its_text() -> None:
    assert Calendar(ics().replace("\r\n", "\n")) == Calendar("\ufeff" + ics("REQUEST"), "request")
    assert Calendar(ics().replace("SUMMARY:", "SUMMARY:a line\u2028and\x85another ")).method == "REQUEST"
    assert (Calendar(ics("CANCEL", without="ATTENDEE")).method, Calendar(ics()).content) == ("CANCEL", ics())


@pytest.mark.parametrize(
    "text",
    ["ann@example.org, bob@example.org", "Ann <ann@example.org>;bob@example.org", "a@x.org,b@x.org,c@x.org," * 1000],
)
def test_several_addresses_in_one_string_are_refused_with_a_hint(text: str) -> None:
    reason = "has several addresses in one string; give a list of addresses"

    assert refusal(to=text) == ("to", reason)
    assert refusal(to=["ann@example.org"], cc=["ann@example.org", text]) == ("cc[1]", reason)


def test_punctuation_that_resembles_a_list_or_an_encoded_word_is_accepted() -> None:
    assert an_email(subject="1+1=? Tell me (why?=) now").subject == "1+1=? Tell me (why?=) now"
    assert an_email(to='"Doe, Ann (a@b, c@d)" <ann@example.org>').to == ('"Doe, Ann (a@b, c@d)" <ann@example.org>',)
    assert refusal(to="Doe, Ann <ann@example.org>")[1].endswith("put the name in double quotes")


def test_an_email_with_erase_after_sending_is_stored_with_the_mark_among_its_tags() -> None:
    full = tuple(str(number) for number in range(rules.MAX_TAGS))
    plain, erased = an_email(tags=full), an_email(tags=full, erase_after_sending=True)
    earlier = an_email(tags=["one_time_code", "login"])  # as applications marked it in earlier releases

    assert [(each.erase_after_sending, each.stored_tags) for each in (plain, erased, earlier)] == [
        (False, full),
        (True, (*full, "one_time_code")),
        (True, ("one_time_code", "login")),
    ]
    assert erased.tags == full


@pytest.mark.parametrize(
    "name",
    [
        *("From", "SENDER", "to", "Cc", "Bcc", "Reply-To", "Subject", "Date", "Message-ID", "MIME-Version"),
        *("Content-Type", "content-transfer-encoding", "Return-Path", "Received", "DKIM-Signature", "Resent-To"),
        *("ARC-Seal", "Authentication-Results", "X-SG-EID", "X-Envelope-From", "Apparently-To"),
    ],
)
def test_a_header_that_we_or_mail_servers_write_cannot_be_set(name: str) -> None:
    reason = "cannot be set, because the dispatcher or a mail server writes it"
    assert refusal(headers={name: "x"}) == (f"headers.{name}", reason)
    assert refusal(headers={name: "x"}, allowed_headers=[name])[0] == f"headers.{name}"


@pytest.mark.parametrize(
    ("name", "who"),
    [
        *(("X-MC-Subaccount", "Mailchimp Transactional"), ("X-MSYS-API", "SparkPost"), ("x-smtpapi", "SendGrid")),
        *(("X-Mailgun-Drop-Message", "Mailgun"), ("X-PM-Message-Stream", "Postmark"), ("X-Job", "PowerMTA")),
        *(("X-SES-SOURCE-ARN", "Amazon SES"), ("X-MS-Exchange-Organization-SCL", "Microsoft Exchange")),
        *(("X-MJ-TemplateID", "Mailjet"), ("X-Sib-Sandbox", "Brevo"), ("TLS-Required", "mail servers")),
    ],
)
def test_a_header_that_controls_a_provider_must_be_allowed_by_name(name: str, who: str) -> None:
    reason = f"controls {who}; to allow it, add its name to DISPATCHER_ALLOWED_PROVIDER_HEADERS"

    assert refusal(headers={name: "x"}) == (f"headers.{name}", reason)
    assert refusal(headers={name: "x"}, template_id="d-1", text=None) == (f"headers.{name}", reason)
    assert refusal(headers={name: "x"}, allowed_headers=[name[:-1], f"{name[:-1]}*", "X-MC-Tags"])[1] == reason
    assert an_email(headers={name: "x"}, allowed_headers=[name.swapcase()]).headers == {name: "x"}


USEFUL = (
    *(("In-Reply-To", "<17@example.com>"), ("References", " ".join(f"<{n}@example.com>" for n in range(50)))),
    ("List-Unsubscribe", "<https://mail.example.com/u?next=?a=1>, <mailto:u@example.com?subject=ü>"),
    *(("List-Unsubscribe-Post", "List-Unsubscribe=One-Click"), ("Auto-Submitted", "auto-generated")),
    *(("List-Post", "NO"), ("List-Id", '"Angebote für Ann" <offers.example.com>'), ("List-Id", "<offers.example.com>")),
    ("Disposition-Notification-To", '"Müller, Zoë" <zoe@bücher.example>, bob@example.org'),
    *((name, "x") for name in ("X-Priority", "X-Mailer", "X-MSMail-Priority", "X-Mailing-List", "X-Tag")),
    *((name, "x") for name in ("X-Entity-Ref-ID", "X-Auto-Response-Suppress", "Feedback-ID", "BIMI-Selector")),
    *(("X-Campaign", "Grüße"), ("X-Order", "Größe 👨\u200d👩\u200d👧 \u2068שרה\u2069")),
)


@pytest.mark.parametrize(("name", "value"), USEFUL)
def test_a_header_that_applications_need_can_be_set_if_it_can_be_written_in_ascii(name: str, value: str) -> None:
    assert an_email(headers={name: value}).headers == {name: value}


def test_values_at_their_limits_are_accepted() -> None:
    email = an_email(
        message_key="ü" * MAX_KEY_CHARACTERS,
        tenant_id="t" * MAX_TENANT_CHARACTERS,
        to=["ann@example.org"] * rules.MAX_RECIPIENTS,
        subject="s" * rules.MAX_LINE_CHARACTERS,
        text="ü" * (rules.MAX_BODY_OCTETS // 4),
        html="h" * (rules.MAX_BODY_OCTETS // 2),
        headers={f"X-{number:074}": "v" * rules.MAX_LINE_CHARACTERS for number in range(rules.MAX_HEADERS)},
        attachments=[Attachment("f" * 255, "a/b", bytes(rules.MAX_ATTACHMENT_OCTETS // 100))] * rules.MAX_ATTACHMENTS,
        tags=[str(number) * 100 for number in range(rules.MAX_TAGS)],
        metadata={f"{number:064}": "ü" * 256 for number in range(rules.MAX_METADATA)},
    )
    largest = "h" * rules.MAX_BODY_OCTETS

    assert len(email.headers) == 100
    assert an_email(text=None, html=largest).html == largest
    assert refusal(text=None, html=largest + "h")[0] == "html"


@pytest.mark.parametrize("junk", ["", "\ud800", "@example.org", "<x> ", "=?utf-8?q?x?=", "\u202e", "x" * 300])
@pytest.mark.parametrize(
    "field", ["message_key", "sender", "subject", "text", "tenant_id", "correlation_id", "tags", "to", "headers"]
)
def test_a_refusal_never_quotes_the_value(field: str, junk: str) -> None:
    secret = f"xqzj\n\0{junk}"
    value: object = {"X-A": secret} if field == "headers" else [secret] if field in ("tags", "to") else secret

    assert "xqzj" not in "".join(refusal(**{field: value}))


@pytest.mark.parametrize(
    "message",
    [
        Email(message_key="k", sender="a@example.com", to="b@example.com", text="Hello", headers={"X-Order": "1"}),
        Email(message_key="k", sender="a@example.com", to="b@example.com", template_id="t", template_data={"a": [1]}),
        Sms(message_key="k", to="+4915112345678", text="Hello"),
    ],
)
def test_a_message_can_be_pickled_and_copied(message: Message) -> None:
    for copied in (pickle.loads(pickle.dumps(message)), copy.copy(message), copy.deepcopy(message)):  # noqa: S301
        assert copied == message
        assert copied.payload_hash() == message.payload_hash()
        assert type(copied.headers) is type(message.headers)
    assert dataclasses.asdict(message)["headers"] == message.headers


def test_times_are_kept_in_utc() -> None:
    zone = timezone(timedelta(hours=5, minutes=30))

    made = an_email(send_at=LATER.astimezone(zone), expires_at=LATER + timedelta(hours=1))

    assert made.send_at == LATER
    assert made.send_at is not None
    assert made.send_at.tzinfo is UTC
    assert made == an_email(send_at=LATER, expires_at=LATER + timedelta(hours=1))


@pytest.mark.parametrize(
    ("zone", "local", "fold", "taken"),
    [
        ("Europe/Berlin", "2026-03-29 02:30", 0, "03:30"),
        ("Europe/Berlin", "2026-03-29 02:30", 1, "01:30"),
        ("Europe/Berlin", "2026-03-29 03:00", 0, None),
        ("Europe/Berlin", "2026-10-25 02:30", 1, None),  # occurs twice
    ],
)
def test_a_time_that_its_zone_skips_is_reported_with_the_time_that_is_used(
    zone: str, local: str, fold: int, taken: str | None
) -> None:
    at = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone), fold=fold)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = an_email(send_at=at)

    assert made.send_at is not None
    expected = f"send_at: {local} does not exist in {zone}; {taken} is used instead."
    assert [str(each.message) for each in caught] == ([expected] if taken else [])
    assert f"{made.send_at.astimezone(ZoneInfo(zone)):%H:%M}" == (taken or local[-5:])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("List-Unsubscribe", "https://example.com/ü", "not ASCII"),
        ("List-Post", "NO (geschloßen)", "not ASCII"),
        ("List-Help", f"<https://example.com/{'ü' * 151}>", "900 characters"),
        ("list-archive", f"<https://example.com/{'a' * 900}>", "900 characters"),
        ("References", "<1@bücher.example>", "not ASCII"),
        ("In-Reply-To", f"<{'1' * 890}@example.com>", "900 characters"),
        ("List-Unsubscribe-Post", "List-Unsubscribe=One-Clïck", "not ASCII"),
        ("Precedence", "bülk", "not ASCII"),
        ("Auto-Submitted", "auto-generated (für Ann)", "not ASCII"),
        ("List-Id", "Angebote <büro.example.com>", "not ASCII"),
        ("List-Id", "Angebote für Ann", "not ASCII"),
        ("Disposition-Notification-To", "Zoë <zoë@example.com>", "not ASCII"),
        ("Disposition-Notification-To", "Müller, Zoë <zoe@example.com>", "no @"),
    ],
)
def test_a_value_that_no_mail_software_could_read_is_refused_at_enqueue(name: str, value: str, reason: str) -> None:
    field, words = refusal(headers={name: value})

    assert (field, reason in words) == (f"headers.{name}", True)
    assert not any(word in words for word in value.split())


EXE_FILES = (
    *("a.exe", "A.EXE", ".exe", "a.pdf.exe", "a.exe.", "a.exe. . ", "a.exe\u00a0\u3000", "a.exe\u2026"),
    *("a\uff0eexe", "a\ufe52exe", "a\u2024exe", "a.\uff45\uff58\uff45", "a.\U0001d41e\U0001d431\U0001d41e"),
    *("a.e\u200bxe", "a.exe\u200d", "a.exe\u00ad", "a.\ufeffexe", "a.e\ufe0fxe", "a.exe\U000e0041", "a.exe\u3164"),
    *("a.exe:b.pdf", "a.exe::$DATA", "a.pdf:b.exe", "C:a.exe", "a.exe\uff1ab.pdf", "a.exe :b"),
)
OTHER_FILES = ("exe", "a.exe.pdf", "exe.pdf", "a.e xe", "a", "", "Fwd: exe", "\u0435\u0445\u0435.pdf")


@pytest.mark.parametrize("name", EXE_FILES + OTHER_FILES)
def test_an_extension_is_found_however_it_is_written(name: str) -> None:
    assert ("exe" in endings_of(name)) is (name in EXE_FILES)


THREE_IN_ALL = {"cc": "ben@example.org", "bcc": "cleo@example.org"}
FILES = {"attachments": [Attachment("a", "a/b", bytes(300)), Attachment("b", "a/b", bytes(30))], "html": "x" * 40}
"""440 bytes of files in base64, and 40 bytes of HTML. The text of `an_email` adds 2 bytes."""


@pytest.mark.parametrize(
    ("fields", "limits", "need"),
    [
        ({}, {}, None),
        ({"template_id": "d-1", "text": None}, {}, Requirement.TEMPLATES),
        ({"template_id": "d-1", "text": None}, {"templates": True}, None),
        (THREE_IN_ALL, {"max_recipients": 3}, None),
        (THREE_IN_ALL, {"max_recipients": 2}, Requirement.RECIPIENTS),
        (FILES, {"max_octets": 482}, None),
        (FILES, {"max_octets": 481}, Requirement.OCTETS),
        ({"reply_to": "zoë@example.org"}, {}, None),
        ({"reply_to": "zoë@example.org"}, {"smtputf8": False}, Requirement.SMTPUTF8),
        ({"to": "Zoë <zoe@exämple.org>"}, {"smtputf8": False}, None),
    ],
)
def test_a_provider_can_send_an_email_within_its_limits(
    fields: dict[str, Any], limits: dict[str, Any], need: Requirement | None
) -> None:
    assert Capabilities(copies=1, **limits).unmet_requirement(an_email(**fields)) is need
