"""The standard library's parser finds every part of a rendered email."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from email import message_from_bytes
from email.header import decode_header, make_header
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.domain.address import parse_address
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.domain.text import body_fault, header_fault, name_fault
from dispatcher.transport.mime import render
from dispatcher.transport.mime_headers import UnrenderableEmail, text_field
from tests.providers.emails import an_email, parsed

ODD_TEXTS = (
    *("a" * 998, "word " * 190 + "end", "a  b" * 30, " leading and trailing ", "= ? =?utf-8 ?=", "é" * 500, ""),
    "x" * 70 + " é" * 40,
)
ODD_NAMES = ("名" * 255, "a" * 255, 'x"' * 127, "a b " * 63 + "c", "=?", "x=?y?=z")
header_texts = st.text(max_size=300).filter(lambda text: header_fault(text) is None)
names = st.text(min_size=1, max_size=255).filter(lambda text: text == text.strip() != "" and name_fault(text) is None)
bodies = st.text(max_size=800).filter(lambda text: body_fault(text) is None)
ODD = ["\r", "\n", "\r\n", ".", "..", "From ", " ", "\t", "=", "=\n", "é", "x" * 1200, "\x0b", "\x85", "\u2028"]
odd_bodies = st.lists(st.sampled_from(ODD)).map("".join)
locals_ = st.from_regex(r"[a-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}(\.[a-z0-9]{1,10})?", fullmatch=True).filter(
    lambda text: "=?" not in text
)
domains = st.sampled_from(
    ["example.com", "mail.example.co.uk", "bücher.example", "例え.example", "xn--bcher-kva.example"]
)


@st.composite
def addresses(draw: st.DrawFn) -> str:
    spec = f"{draw(locals_)}@{draw(domains)}"
    name = draw(st.none() | names)
    if name is None:
        return spec
    escaped = re.sub(r'(["\\])', r"\\\1", name)
    return f'"{escaped}" <{spec}>'


@settings(max_examples=40)
@given(
    addresses(),
    st.lists(addresses(), min_size=1, max_size=6),
    st.dictionaries(st.from_regex(r"X-[A-Z0-9-]{1,70}", fullmatch=True), header_texts, min_size=1, max_size=3),
    bodies | odd_bodies,
    st.none() | bodies | odd_bodies,
    st.lists(st.tuples(names, st.binary(max_size=500)), max_size=3),
)
@example("a@b.example", ["a@b.example"], {}, "x", None, [("<>", b""), ('"quoted"', b"")])
@example("a@b.example", ["a@b.example"], {f"X-{n}": value for n, value in enumerate(ODD_TEXTS)}, "x", None, [])
@example("a@b.example", ["a@b.example"], {}, "x", None, [(name, b"") for name in ODD_NAMES])
@example("a@b.example", ["a@b.example"], {}, "こんにちは\nさようなら\r", "<p>é\n", [])
def test_every_part_survives_a_round_trip_on_valid_and_reproducible_lines(
    sender: str, to: list[str], headers: dict[str, str], text: str, html: str | None, files: list[tuple[str, bytes]]
) -> None:
    subject = next(iter(headers.values()), "")
    attachments = tuple(OutgoingAttachment(name, "application/x-test", content) for name, content in files)
    outgoing = an_email(
        sender=sender, to=tuple(to), subject=subject, headers=headers, text=text, html=html, attachments=attachments
    )

    content = render(outgoing).content

    message = parsed(content)
    assert message["Subject"] == subject
    assert {name: message[name] for name in headers} == headers
    for field, texts in (("To", to), ("From", [sender])):
        wanted = [parse_address(each) for each in texts]
        found = message[field].addresses
        # Python's parser inserts a space between encoded words of a name, contrary to RFC 2047, section 6.2.
        assert [_unspaced(address.display_name) for address in found] == [_unspaced(a.display_name) for a in wanted]
        assert [address.username for address in found] == [address.local for address in wanted]
        assert all(address.domain.isascii() for address in found)
    assert _body(message, "plain") == _lines(text)
    assert html is None or _body(message, "html") == _lines(html)
    # Python's `get_filename` would also strip angle brackets and quotes that belong to a name.
    parts = [(part["Content-Disposition"].params["filename"], part) for part in message.iter_attachments()]
    assert [(name, part.get_payload(decode=True)) for name, part in parts] == files
    # An email is ASCII with CRLF line ends. Lines have at most 998 octets, and headers are folded.
    assert content.isascii()
    assert not re.search(rb"\r(?!\n)|(?<!\r)\n|\0", content)
    assert content.endswith(b"\r\n")
    lines = content.split(b"\r\n")
    assert max(map(len, lines)) <= 998
    assert all(len(line) <= 78 for line in lines if line.startswith((b" filename*", b" name*", b' name="=?')))
    assert render(outgoing).content == content
    for name, value in headers.items():
        *folded, last = text_field(name, value).split("\r\n")
        assert last == ""
        assert all(line.startswith(" ") and line.strip() for line in folded[1:])
        assert all(len(line) <= (78 if "=?utf-8?b?" in line else 998) for line in folded)


def _unspaced(name: str) -> str:
    return "".join(name.split())


def _body(message: Any, kind: str) -> str:
    """The text of a part. Asserts that it has CRLF line ends in every encoding (RFC 2046, section 4.1.1)."""
    text = message.get_body((kind,)).get_payload(decode=True).decode()
    assert not re.search(r"\r(?!\n)|(?<!\r)\n", text)
    return str(text.replace("\r\n", "\n"))


def _lines(text: str) -> str:
    """A text after mail transport: CRLF, CR and LF become the same line end, and the last line has a line end."""
    text = re.sub("\r\n?", "\n", text)
    return text if not text or text.endswith("\n") else text + "\n"


def test_a_body_that_contains_the_boundary_does_not_break_the_email() -> None:
    email_id = new_email_id()
    evil = "".join(f"--=_{kind}_{email_id.hex}{n}\n" for kind in ("mixed", "alternative") for n in ("", "--", "_1"))

    files = (OutgoingAttachment("a", "text/plain", b"x"),)
    message = parsed(render(an_email(email_id=email_id, text=evil, html=evil, attachments=files)).content)

    # The boundary depends on the email alone, so that an attempt of another process sends the same octets.
    assert message.get_boundary() == f"=_mixed_{email_id.hex}"
    assert _body(message, "plain") == evil
    assert _body(message, "html") == evil
    assert [part.get_filename() for part in message.iter_attachments()] == ["a"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Plain.\n", "7bit"),
        ("", "7bit"),
        ("x" * 998 + "\n", "7bit"),
        ("x" * 998 + "\n" + "y" * 998, "7bit"),
        ("x" * 999 + "\n", "quoted-printable"),
        ("short\n" * 500 + "x" * 999 + "\n" + "short\n" * 500, "quoted-printable"),
        ("Größe, Länge und manches andere, " * 30, "quoted-printable"),
        ("こんにちは", "base64"),
        ("bell \x07\n", "quoted-printable"),
    ],
)
def test_the_most_readable_encoding_that_every_server_passes_on_is_used(text: str, encoding: str) -> None:
    assert parsed(render(an_email(text=text)).content)["Content-Transfer-Encoding"] == encoding


def test_the_envelope_has_each_mailbox_once_in_order() -> None:
    rendered = render(
        an_email(
            sender="Shop <shop@bücher.example>",
            to=("Ann <ann@example.com>", "bob@example.com", '"ann"@example.com', "a..b@d.example"),
            cc=("ann@EXAMPLE.com", "Ann@example.com", '"a..b"@d.example'),
            bcc=("carl@bücher.example", "carl@xn--bcher-kva.example", "bob@example.com"),
        )
    )

    assert rendered.sender == "shop@xn--bcher-kva.example"
    assert rendered.recipients == (
        *("ann@example.com", "bob@example.com", '"a..b"@d.example', "Ann@example.com", "carl@xn--bcher-kva.example"),
    )
    assert not rendered.needs_smtputf8
    assert b'"a..b"@d.example\r\n' in rendered.content


@pytest.mark.parametrize("field", ["to", "cc", "bcc", "reply_to"])
def test_a_unicode_local_part_anywhere_needs_smtputf8_and_gets_one_copy(field: str) -> None:
    rendered = render(an_email(**{field: ("jos\u00e9@example.org", "jose\u0301@example.org")}))

    assert rendered.needs_smtputf8
    assert "jose\u0301@example.org" not in rendered.recipients


def test_the_date_is_when_the_email_was_enqueued_and_with_only_bcc_no_recipient_is_shown() -> None:
    created_at = datetime(2026, 11, 21, 9, 30, 15, 999_999, tzinfo=timezone(timedelta(hours=2)))

    message = parsed(render(an_email(created_at=created_at, to=(), bcc=("bob@example.com",))).content)

    assert message["Date"] == "Sat, 21 Nov 2026 07:30:15 +0000"
    assert (message["To"], message["Cc"]) == ("undisclosed-recipients:;", None)


PNG = (OutgoingAttachment("a.png", "image/png", b"x"),)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"text": "x"}, "text/plain"),
        ({"text": None, "html": "x"}, "text/html"),
        ({"text": None}, "text/plain"),
        ({"text": "x", "html": "x"}, "multipart/alternative [text/plain text/html]"),
        ({"attachments": PNG}, "multipart/mixed [text/plain image/png]"),
        (
            {"html": "x", "attachments": PNG},
            "multipart/mixed [multipart/alternative [text/plain text/html] image/png]",
        ),
    ],
)
def test_the_mime_structure_is_no_deeper_than_necessary(changes: dict[str, Any], shape: str) -> None:
    assert _shape(parsed(render(an_email(**changes)).content)) == shape


def _shape(part: Any) -> str:
    if not part.is_multipart():
        return str(part.get_content_type())
    return f"{part.get_content_type()} [{' '.join(_shape(child) for child in part.get_payload())}]"


@pytest.mark.parametrize("content_type", ["message/rfc822", "Multipart/mixed", "message/delivery-status"])
def test_an_attachment_is_never_parsed_as_parts_of_the_email(content_type: str) -> None:
    content = render(an_email(attachments=(OutgoingAttachment("a", content_type, b"\n.\n" * 99),))).content

    (part,) = parsed(content).iter_attachments()
    assert part.get_content_type() == "application/octet-stream"
    assert part.get_payload(decode=True) == b"\n.\n" * 99
    assert not re.search(rb"\r(?!\n)|(?<!\r)\n", content)


PDF_HEAD = "application/pdf\r\nContent-Transfer-Encoding: base64\r\nContent-Disposition: attachment;\r\n"
REPORT = 'Quarterly report, "final" version; of the shop for its partners.pdf'
ENCODED_NAME = 'application/pdf;\r\n name="=?utf-8?b?UmVjaG51bmcgZsO8ciBNw7xsbGVyLnBkZg==?="'


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("a.pdf", PDF_HEAD + ' filename="a.pdf"\r\n'),
        (REPORT, PDF_HEAD + ' filename="' + REPORT.replace('"', '\\"') + '"\r\n'),
        (
            "Rechnung für Müller.pdf",
            PDF_HEAD.replace("application/pdf", ENCODED_NAME)
            + " filename*=utf-8''Rechnung%20f%C3%BCr%20M%C3%BCller.pdf\r\n",
        ),
    ],
    ids=["short", "long", "not ASCII"],
)
def test_old_and_new_mail_programs_can_read_a_filename(name: str, head: str) -> None:
    content = render(an_email(attachments=(OutgoingAttachment(name, "application/pdf", b"x"),))).content

    assert head.encode() in content
    (part,) = parsed(content).iter_attachments()
    assert part.get_filename() == name
    old = list(message_from_bytes(content).walk())[-1]
    assert str(make_header(decode_header(str(old.get_param("name", name))))) == name


def test_no_line_of_quoted_printable_begins_with_a_dot_or_with_from() -> None:
    text = "ü.\n.\n..\n.signature\nFrom here\nFromage\n" + ".x" * 600 + "\n" + "From x" * 200 + "\n"

    content = render(an_email(text=text)).content

    assert b"\r\nContent-Transfer-Encoding: quoted-printable\r\n" in content
    body = content.partition(b"\r\n\r\n")[2].split(b"\r\n")
    assert not any(line.startswith((b".", b"From ")) for line in body)
    assert {b"=2E", b"=2E.", b"=2Esignature", b"=46rom here", b"Fromage"} <= set(body)
    assert max(map(len, body)) <= 76
    assert _body(parsed(content), "plain") == text


UNSUBSCRIBE = f"<https://mail.example.com/v1/unsubscribe/{'a' * 64}>"
NEXT = f"<https://example.com/u?next=?a={'1' * 60}>,"
UNICODE = "<https://mail.bücher.example/ü?x=ü y%20z>,<mailto:jörg@bücher.example?subject=ü>"
ESCAPED = "<https://mail.xn--bcher-kva.example/%C3%BC?x=%C3%BC%20y%20z>,"
ID = f"<{'1' * 60}@example.com>"
NOTIFY = "Disposition-Notification-To"


@pytest.mark.parametrize(
    ("name", "value", "lines"),
    [
        ("List-Unsubscribe", UNSUBSCRIBE, UNSUBSCRIBE),
        ("List-Unsubscribe", f"{NEXT} <mailto:u@example.com>", f"{NEXT}\r\n <mailto:u@example.com>"),
        ("List-Unsubscribe", UNICODE, f"{ESCAPED}\r\n <mailto:j%C3%B6rg@xn--bcher-kva.example?subject=%C3%BC>"),
        ("List-Unsubscribe-Post", "List-Unsubscribe=One-Click", "List-Unsubscribe=One-Click"),
        ("list-archive", f"<https://example.com/{'a' * 870}>", f"<https://example.com/{'a' * 870}>"),
        ("List-Id", "Angebote für Ann <o.example.com>", "=?utf-8?b?QW5nZWJvdGUgZsO8ciBBbm4=?= <o.example.com>"),
        ("References", f"{ID}<2@example.com> <=?3?=@example.com>", f"{ID}\r\n <2@example.com> <=?3?=@example.com>"),
        ("In-Reply-To", "<=?1@example.com>", "<=?1@example.com>"),
        ("Feedback-ID", "a:b=?c:d:shop", "a:b=?c:d:shop"),
        (
            NOTIFY,
            '"Müller, Z" <z@bücher.example>, bob@example.org',
            "=?utf-8?b?TcO8bGxlciwgWg==?=\r\n <z@xn--bcher-kva.example>, <bob@example.org>",
        ),
        ("X-Campaign", "a" * 200, "a" * 200),
        ("X-Campaign", "w " * 40 + "w", f"{'w ' * 31}w\r\n {'w ' * 8}w"),
    ],
)
def test_a_structured_header_has_no_encoded_word_where_none_is_read(name: str, value: str, lines: str) -> None:
    content = render(an_email(headers={name: value})).content.decode()

    written, _, rest = content.partition(f"\r\n{name}: {lines}\r\n")
    assert written != content
    assert not rest.startswith(" ")  # the field ends there: the next line does not continue it


def test_a_unicode_local_part_is_utf8_and_everything_else_is_ascii() -> None:
    to = tuple(f"Ёж {number} <ёж{number}@bücher.example>" for number in range(50))

    content = render(an_email(to=to, subject="Ёж", text="Ёж", html="<p>Ёж")).content

    assert "<ёж49@xn--bcher-kva.example>".encode() in content
    assert content.replace("ёж".encode(), b"").isascii()


@pytest.mark.parametrize(
    ("changes", "reason", "words", "value"),
    [
        ({"headers": {"References": "<1@xqzj.bücher.example>"}}, Reason.INVALID_CONTENT, "header References", "xqzj"),
        ({"to": ("ann@\u0378.example",)}, Reason.REJECTED_RECIPIENT, "", "\u0378"),
    ],
    ids=["a header that is not ASCII", "an invalid domain"],
)
def test_what_cannot_be_written_is_reported_without_its_value(
    changes: dict[str, Any], reason: Reason, words: str, value: str
) -> None:
    with pytest.raises(UnrenderableEmail, match=f"^{words}") as caught:
        render(an_email(**changes))

    assert caught.value.reason is reason
    assert value not in str(caught.value)
