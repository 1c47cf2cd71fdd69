"""MIME messages made from descriptions, and what they say, by Python's own parser.

Each case says what becomes of the message: `fields` of an email, `raw`, or the words of the error that refuses it. The
descriptions follow what mail programs, ticket systems, calendars and mail servers write.
"""

from __future__ import annotations

import base64
import binascii
import email.policy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.parser import BytesParser
from itertools import islice, product
from typing import Any, NamedTuple

from dispatcher import Email

FIELDS, RAW = "fields", "raw"
REPLACED = {"date", "message-id", "mime-version", "received", "return-path", "sender", "content-type", "bcc"}
REPLACED |= {"content-transfer-encoding", "from", "to", "cc", "reply-to", "subject", "user-agent"}
GREETING = "Guten Tag,\r\n\r\n.Grüße aus Köln — 100 €\r\nFrom here\r\n"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
HTML = '<p>Grüße</p><img src="cid:logo@shop">'

Part = bytes
"""A part: its headers, a blank line, and its content, with CRLF line ends."""


def leaf(kind: str, content: bytes | str, *more: str, cte: str = "", charset: str = "") -> Part:
    octets = content.encode(charset or "utf-8") if isinstance(content, str) else content
    if cte == "base64":
        octets = base64.encodebytes(octets).replace(b"\n", b"\r\n")
    elif cte == "quoted-printable":
        octets = binascii.b2a_qp(octets.replace(b"\r\n", b"\n")).replace(b"\n", b"\r\n")
    lines = [f"Content-Type: {kind}" + (f'; charset="{charset}"' if charset else "")]
    lines += [f"Content-Transfer-Encoding: {cte}"] if cte else []
    return "".join(f"{line}\r\n" for line in (*lines, *more)).encode() + b"\r\n" + octets


def multi(kind: str, *parts: Part, params: str = "", preamble: bytes = b"") -> Part:
    mark = f"=_{kind.replace('/', '_')}_{sum(map(len, parts))}".encode()
    head = f'Content-Type: multipart/{kind}; boundary="{mark.decode()}"{params}\r\n\r\n'.encode()
    return head + preamble + b"".join(b"--%b\r\n%b\r\n" % (mark, part) for part in parts) + b"--%b--\r\n" % mark


def body(text: str = GREETING, **given: Any) -> Part:
    return leaf("text/plain", text, **{"charset": "utf-8", "cte": "quoted-printable", **given})


def page(html: str = "<p>Grüße</p>\r\n", **given: Any) -> Part:
    return leaf("text/html", html, **{"charset": "utf-8", "cte": "base64", **given})


def file(name: str = 'filename="a.pdf"', kind: str = "application/pdf", content: bytes = PNG, *more: str) -> Part:
    return leaf(kind, content, f"Content-Disposition: attachment; {name}", *more, cte="base64")


def image(content_id: str = "logo@shop", *more: str, disposition: str = 'inline; filename="logo.png"') -> Part:
    lines = [f"Content-ID: <{content_id}>"] if content_id else []
    lines += [f"Content-Disposition: {disposition}"] if disposition else []
    return leaf("image/png", PNG, *lines, *more, cte="base64")


def ics(method: str = "REQUEST", *, of: str = "VEVENT", without: str = "") -> str:
    lines = ["BEGIN:VCALENDAR", "PRODID:-//Shop//Calendar//EN", "VERSION:2.0", f"METHOD:{method}", f"BEGIN:{of}"]
    lines += ["UID:17@shop.example", "DTSTAMP:20261201T100000Z", "DTSTART:20261224T170000Z", "SEQUENCE:1"]
    lines += ['ORGANIZER;CN="Shop: sales":mailto:shop@example.com', "ATTENDEE;RSVP=TRUE:mailto:ann@example.org"]
    lines += ["SUMMARY:Grüße und ein langer T", " itel", f"END:{of}", "END:VCALENDAR", ""]
    return "\r\n".join(line for line in lines if not (without and line.startswith(without)))


def calendar(method: str = "REQUEST", text: str | None = None, **given: Any) -> Part:
    kind = f"text/calendar; method={method}"
    return leaf(kind, ics(method) if text is None else text, **{"charset": "utf-8", "cte": "base64", **given})


SIGNATURE = leaf("application/pgp-signature", b"-----BEGIN PGP SIGNATURE-----\r\n\r\niQ==\r\n", cte="7bit")
FORWARDED = leaf("message/rfc822", b"From: a@example.com\r\nSubject: x\r\n\r\nx\r\n")
DKIM = "DKIM-Signature: v=1; a=rsa-sha256; d=example.com; s=k; h=from:to:subject;\r\n bh=MTIz; b=YWJj"


@dataclass(frozen=True)
class Case:
    """`head`: instead of, or in addition to, the usual headers; a name that begins with - leaves a usual one out."""

    name: str
    part: Part
    becomes: str = FIELDS
    head: Sequence[str | bytes] = ()
    recipients: Sequence[str] | None = None
    change: Callable[[bytes], bytes] = field(default=lambda octets: octets)

    @property
    def message(self) -> bytes:
        usual = {
            "from": "From: Shop <shop@example.com>",
            "to": "To: Ann <ann@example.org>",
            "subject": "Subject: Your order",
            "date": "Date: Tue, 01 Dec 2026 10:00:00 +0000",
            "message-id": "Message-ID: <17@shop.example>",
            "mime-version": "MIME-Version: 1.0",
        }
        given = [line.encode() if isinstance(line, str) else line for line in self.head]
        left_out = {re.split(rb"[:]", line.lstrip(b"-"))[0].decode().lower() for line in given}
        lines = [line.encode() for name, line in usual.items() if name not in left_out]
        lines += [line for line in given if not line.startswith(b"-")]
        return self.change(b"".join(line + b"\r\n" for line in lines) + self.part)

    def email(self) -> Email:
        return Email.from_mime(self.message, message_key=self.name, recipients=self.recipients, topic="news")


CHARSETS = {
    "us-ascii": "Thank you.\r\n", "utf-8": "Grüße 🎉\r\n", "iso-8859-1": "Grüße\r\n", "iso-8859-15": "100 €\r\n",
    "windows-1252": "“100 €”\r\n", "koi8-r": "Привет\r\n", "shift_jis": "注文\r\n", "gb2312": "订单\r\n",
    "big5": "訂單\r\n", "euc-kr": "주문\r\n", "iso-2022-jp": "注文\r\n", "utf-16": "Grüße\r\n",
}  # fmt: skip
SUBJECTS = {
    "q": "=?utf-8?q?Gr=C3=BC=C3=9Fe?=", "b": "=?UTF-8?B?R3LDvMOfZQ==?=", "latin": "=?iso-8859-1?Q?Gr=FC=DFe_=5F?=",
    "split": "=?utf-8?q?Gr=C3=BC?=\r\n =?utf-8?q?=C3=9Fe?= und\r\n mehr", "empty": "", "folded": "a\r\n b\r\n\tc",
    "smtputf8": "Grüße", "colon": "Re: Fwd: 10:00", "japanese": "=?iso-2022-jp?B?GyRCQ21KOBsoQg==?=",
    "long": "Order " + "number " * 60,
}  # fmt: skip
FILENAMES = {
    "plain": 'filename="a b.pdf"', "token": "filename=a.pdf", "rfc2231": "filename*=utf-8''Gr%C3%BC%C3%9Fe.pdf",
    "sections": "filename*0=\"long-\";\r\n filename*1=\"name.pdf\"", "word": 'filename="=?utf-8?q?Gr=C3=BC?="',
    "none": "size=3", "dated": 'filename="a.pdf"; size=264; creation-date="Tue, 01 Dec 2026 10:00:00 GMT"',
}  # fmt: skip
ADDRESSES = {
    "quoted": ("To", '"Doe, Ann" <ann@example.org>'), "word": ("To", "=?utf-8?q?=C3=84nn?= <ann@example.org>"),
    "several": ("To", "Ann <ann@example.org>,\r\n bob@example.org"), "idn": ("To", "ann@xn--bcher-kva.example"),
    "comment": ("To", "ann@example.org (Ann)"), "undisclosed": ("To", "undisclosed-recipients:;"),
    "cc": ("Cc", "Bob <bob@example.org>"), "bcc": ("Bcc", "Bob <bob@example.org>"),
    "reply": ("Reply-To", "r@example.com"),
    "escaped": ("To", r'"A \"B\" \\ C" <ann@example.org>'), "dots": ("To", '"a..b"@example.org'),
}  # fmt: skip
HEADERS = {
    "list": "List-Unsubscribe: <https://example.com/" + "u" * 120 + ">,\r\n <mailto:u@example.com>",
    "one-click": "List-Unsubscribe-Post: List-Unsubscribe=One-Click", "auto": "Auto-Submitted: auto-generated",
    "references": "References: <1@example.com>\r\n\t<2@example.com>", "own": "X-Order: 17", "priority": "X-Priority: 1",
    "received": "Received: from a by b; Tue, 01 Dec 2026 10:00:00 +0000\r\nReceived: from b by c",
    "return": "Return-Path: <x@example.com>", "sender": "Sender: shop@example.com",
    "encoded": "X-Campaign: =?utf-8?q?Fr=C3=BChling?=", "list-id": "List-ID: Offers <offers.example.com>",
}  # fmt: skip
RAW_HEADERS = {
    "dkim": DKIM, "arc": "ARC-Seal: i=1; a=rsa-sha256; cv=none; d=example.com; s=k; b=YQ==",
    "twice": "X-A: 1\r\nX-A: 2",
    "other sender": "Sender: Eve <eve@example.com>", "disposition": "Content-Language: de",
    "broken word": "X-Broken: =?x-unknown?q?=FF?=", "return and dkim": f"Return-Path: <x@example.com>\r\n{DKIM}",
    "bcc and dkim": f"Bcc: Bob <bob@example.org>,\r\n carol@example.org\r\n{DKIM}",
    "two to": "To: a@example.org\r\nTo: b@example.org",
}  # fmt: skip
STRUCTURES: dict[str, tuple[Part, str]] = {
    "html": (page(), FIELDS),
    "text and html": (multi("alternative", body(), page()), FIELDS),
    "preamble": (multi("alternative", body(), page(), preamble=b"This is MIME.\r\n"), FIELDS),
    "html before text": (multi("alternative", page(), body()), RAW),
    "amp": (multi("alternative", body(), leaf("text/x-amp-html", "<html amp4email>"), page()), RAW),
    "inline image": (multi("related", page(HTML), image(), params='; type="text/html"'), FIELDS),
    "image by name only": (multi("related", page(HTML), image(disposition="")), FIELDS),
    "text and html with image": (multi("alternative", body(), multi("related", page(HTML), image())), FIELDS),
    "outlook's order": (multi("related", multi("alternative", body(), page(HTML)), image()), FIELDS),
    "image and file": (multi("mixed", multi("related", page(HTML), image()), file()), FIELDS),
    "image in mixed": (multi("mixed", page(HTML), image()), FIELDS),
    "gmail's file with an id": (multi("mixed", body(), file('filename="a.pdf"', "application/pdf", PNG,
                                "Content-ID: <f_1>", "X-Attachment-Id: f_1")), FIELDS),
    "image that nothing shows": (multi("related", page(), image()), RAW),
    "image without an id": (multi("related", page(HTML), image(""), image()), RAW),
    "image by location": (multi("related", page(HTML), image("logo@shop", "Content-Location: x.png")), RAW),
    "inline between texts": (multi("mixed", body(), image("", disposition="inline"), body("Bye\r\n")), RAW),
    "footer": (multi("mixed", body(), leaf("text/plain", "-- \r\nlist\r\n")), RAW),
    "file": (multi("mixed", body(), file()), FIELDS),
    "two files": (multi("mixed", multi("alternative", body(), page()), file(), file('filename="b.pdf"')), FIELDS),
    "csv": (multi("mixed", body(), file('filename="a.csv"', 'text/csv; charset="utf-8"', b"a;b\r\n1;2\n")), FIELDS),
    "latin csv": (multi("mixed", body(), file('filename="a.csv"', "text/csv; charset=latin1", b"\xfc")), RAW),
    "named by type": (multi("mixed", body(), leaf('application/pdf; name="a.pdf"', PNG, cte="base64")), FIELDS),
    "file without a text": (file(), RAW),
    "mixed in mixed": (multi("mixed", multi("mixed", body(), file()), file()), RAW),
    "forwarded": (multi("mixed", body(), FORWARDED), RAW),
    "described file": (multi("mixed", body(), file('filename="a"', "a/b", b"x", "Content-Description: x")), RAW),
    "invitation": (multi("alternative", body(), page(), calendar()), FIELDS),
    "invitation with file": (multi("mixed", multi("alternative", body(), calendar()), file('filename="invite.ics"',
                             "application/ics", ics().encode())), FIELDS),
    "invitation in 8bit": (multi("alternative", body(), calendar(cte="8bit")), FIELDS),
    "invitation with image": (multi("alternative", body(), multi("related", page(HTML), image()), calendar()), FIELDS),
    "cancellation": (multi("alternative", body(), calendar("CANCEL")), FIELDS),
    "answer": (multi("alternative", body(), calendar("REPLY")), FIELDS),
    "invitation that contradicts itself": (multi("alternative", body(), calendar("CANCEL", ics("REQUEST"))), RAW),
    "invitation without organizer": (multi("alternative", body(), calendar(text=ics(without="ORGANIZER"))), RAW),
    "invitation as file only": (multi("mixed", body(), file('filename="i.ics"', "text/calendar; method=REQUEST",
                                ics().encode())), RAW),
    "calendar file": (multi("mixed", body(), file('filename="i.ics"', "text/calendar", ics().encode())), FIELDS),
    "pgp signed": (multi("signed", body(), SIGNATURE, params="; micalg=pgp-sha256"), RAW),
    "smime signed": (multi("signed", multi("alternative", body(), page()), file('filename="smime.p7s"',
                     "application/pkcs7-signature")), RAW),
    "signed with dots": (multi("signed", leaf("text/plain", ".\r\n..\r\n.x\r\nFrom x\r\n"), SIGNATURE), RAW),
    "signed in 8bit": (multi("signed", leaf("text/plain", GREETING, cte="8bit", charset="utf-8"), SIGNATURE), RAW),
    "encrypted": (multi("encrypted", leaf("application/pgp-encrypted", "Version: 1\r\n"),
                  leaf("application/octet-stream", "-----BEGIN PGP MESSAGE-----\r\n"),
                  params='; protocol="application/pgp-encrypted"'), RAW),
    "smime encrypted": (leaf("application/pkcs7-mime; smime-type=enveloped-data", PNG, cte="base64"), RAW),
    "bounce": (multi("report", body(), leaf("message/delivery-status", "Reporting-MTA: dns; a\r\n"), FORWARDED), RAW),
    "digest": (multi("digest", FORWARDED, FORWARDED), RAW),
    "flowed": (leaf("text/plain; format=flowed", "a \r\nb\r\n", charset="us-ascii"), RAW),
    "unknown charset": (leaf("text/plain", b"x\r\n", charset="x-unknown"), RAW),
    "wrong charset": (leaf('text/plain; charset="utf-8"', b"\xff\r\n", cte="8bit"), RAW),
    "uuencode": (leaf("text/plain", "begin 644 a\r\n#0V%T\r\n`\r\nend\r\n", cte="x-uuencode"), RAW),
    "broken base64": (leaf("text/plain", "!!!!!", cte="", charset="utf-8").replace(b"\r\n\r\n",
                      b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"), RAW),
    "without its end": (multi("mixed", body(), file()).removesuffix(b"--\r\n"), RAW),
    "empty": (leaf("text/plain", ""), RAW),
    "long lines": (leaf("text/html", f"<p>{'x' * 3000}</p>\r\n", charset="us-ascii"), FIELDS),
    "no mime": (b"\r\nHello\r\n.\r\n", FIELDS),
}  # fmt: skip


def unix(octets: bytes) -> bytes:
    return octets.replace(b"\r\n", b"\n")


def _cases() -> Iterator[Case]:
    for charset, text in CHARSETS.items():
        plain = "7bit" if charset in ("us-ascii", "iso-2022-jp") else "8bit"
        for cte in ["base64"] if charset == "utf-16" else (plain, "base64"):
            yield Case(f"{charset} in {cte}", leaf("text/plain", text, charset=charset, cte=cte))
    yield from (Case(f"subject {name}", body(), head=[f"Subject: {text}"]) for name, text in SUBJECTS.items())
    for name, parameter in FILENAMES.items():
        yield Case(f"filename {name}", multi("mixed", body(), file(parameter)))
    yield from (Case(f"addresses {name}", body(), head=[f"{at}: {text}"],
                     recipients=["z@example.org"] if name == "undisclosed" else None)
                for name, (at, text) in ADDRESSES.items())  # fmt: skip
    yield from (Case(f"header {name}", body(), head=[line]) for name, line in HEADERS.items())
    yield from (Case(f"header {name}", body(), RAW, [line]) for name, line in RAW_HEADERS.items())
    yield from (Case(name, part, becomes) for name, (part, becomes) in STRUCTURES.items())
    yield Case("unix line ends", STRUCTURES["two files"][0], change=unix)
    yield Case("unix line ends, signed", STRUCTURES["pgp signed"][0], RAW, change=unix)
    yield Case("no end of line", body(), RAW, [DKIM], change=lambda octets: octets.removesuffix(b"\r\n"))
    yield Case("no date, no id, signed", STRUCTURES["pgp signed"][0], RAW, ["-Date", "-Message-ID"])
    yield Case("more recipients", body(), recipients=["ann@example.org", "bob@example.org"])
    yield Case("fewer recipients", body(), RAW, ["Cc: bob@example.org"], ["ann@example.org"])
    yield Case("other recipients", body(), RAW, ["Bcc: bob@example.org"], ["carol@example.org"])
    yield Case("a group", body(), RAW, ["To: friends: ann@example.org, bob@example.org;"])
    yield Case("resent", body(), RAW, ["Resent-From: x@example.com", "Resent-Bcc: y@example.org"], ["ann@example.org"])
    signed = STRUCTURES["pgp signed"][0]
    yield Case("subject smtputf8, signed", signed, RAW, ["Subject: Grüße"])
    for name, words, part, head, change in (
        ("no from", "exactly one header From", body(), ["-From"], None),
        ("two from", "exactly one header From", body(), ["From: a@example.com\r\nFrom: b@example.com"], None),
        ("two from, with a space", "exactly one header From", body(), ["X-A : 1", "From : b@example.com"], None),
        ("two authors", "exactly one header From", body(), ["From: a@example.com, b@example.com"], None),
        ("no recipient", "no recipient", body(), ["-To"], None),
        ("resent without recipients", "recipients", body(), ["Resent-To: a@example.org"], None),
        ("latin head", "neither ASCII nor UTF-8", body(), [b"Subject: Gr\xfc\xdfe"], None),
        ("no header", "not a header", body(), ["this is no header"], None),
        ("control header", "controls Amazon SES", body(), ["X-SES-CONFIGURATION-SET: x"], None),
        ("control header, signed", "controls SendGrid", signed, ["X-SMTPAPI: {}"], None),
        ("apparently-to", "must not be sent", signed, ["Apparently-To: a@example.org"], None),
        ("nul, signed", "NUL", signed, [], lambda octets: octets.replace(b"Gru", b"\0") + b"\0\r\n"),
        ("bare cr, signed", "bare CR", signed, [], lambda octets: octets + b"a\rb\r\n"),
        ("long line, signed", "998", signed, [], lambda octets: octets + b"x" * 999 + b"\r\n"),
        ("long head, signed", "65536", signed, ["X-A: " + "a " * 33000], None),
        ("bad address", "to[0]", body(), ["To: ann@[192.0.2.1]"], None),
    ):  # fmt: skip
        yield Case(name, part, f"refused: {words}", head, change=change or (lambda octets: octets))


CASES = list(_cases())


class Meaning(NamedTuple):
    """What a recipient gets."""

    subject: str
    mailboxes: dict[str, list[tuple[str, str]]]
    headers: dict[str, str]
    text: str
    html: str
    calendar: tuple[str, str]
    files: list[tuple[str, str, bytes, str]]  # name, type, content, content id


def meaning(octets: bytes) -> Meaning:
    """What a MIME message says, by Python's parser. Leaves out invite.ics, whose content is the calendar's."""
    message: EmailMessage = BytesParser(policy=email.policy.default).parsebytes(octets)
    head = octets.split(b"\r\n\r\n", 1)[0].split(b"\n\n", 1)[0]
    headed: Any = email.message_from_string(head.decode(), policy=email.policy.default)
    boxes = {
        name: [
            (each.display_name, spec_of(each.addr_spec))
            for value in headed.get_all(name, [])
            for each in value.addresses
        ]
        for name in ("from", "to", "cc", "reply-to")
    }
    names = {name.lower() for name in headed} - REPLACED
    headers = {name: " ".join(str(headed[name]).split()) for name in names}
    texts = {"text/plain": "", "text/html": ""}
    calendar, files = ("", ""), []
    leaves = [part for part in message.walk() if not part.is_multipart()]
    for part in leaves:
        kind, name = part.get_content_type(), part.get_filename()
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        if kind in texts and not name:
            texts[kind] += lines(content.decode(str(part.get_param("charset", "us-ascii"))))
        elif kind == "text/calendar" and not name and part.get_param("method"):
            calendar = str(part.get_param("method")), lines(content.decode("utf-8"))
        else:
            content_id = str(part.get("content-id", "")).strip("<> ")
            files.append((name or "", kind, content, content_id))
    used = re.findall(r"cid:([^\"]+)", texts["text/html"])
    kept = [(*each[:3], each[3] if each[3] in used else "") for each in files]
    kept = [each for each in kept if not (calendar[1] and lines(each[2].decode("utf-8", "replace")) == calendar[1])]
    subject = str(headed["subject"] or "").replace("\t", " ").strip()
    return Meaning(subject, boxes, headers, texts["text/plain"], texts["text/html"], calendar, kept)


def lines(text: str) -> str:
    return text.replace("\r\n", "\n").rstrip("\n")


def spec_of(spec: str) -> str:
    """The address with the domain as in DNS, and without quotes."""
    local, _, domain = spec.replace('"', "").rpartition("@")
    return f"{local}@{domain.encode('idna').decode()}"


def hostile() -> dict[str, tuple[bytes, str]]:
    """Messages for which Python's parser would take minutes, and what becomes of them."""
    head = b"From: shop@example.com\r\nTo: ann@example.org\r\n"
    many = b"Content-Type: multipart/mixed; boundary=b\r\n\r\n" + b"--b\r\n\r\nx\r\n" * 100_000 + b"--b--\r\n"
    nested = b"".join(b"Content-Type: multipart/mixed; boundary=b%d\r\n\r\n--b%d\r\n" % (n, n) for n in range(2000))
    long = "too long for its addresses"
    letters = product(b"abcdefghijklmnopqrstuvwxyz", repeat=3)
    many_headers = b"".join(b"%c%c%c:\r\n" % each for each in islice(letters, 10_800))
    return {
        "many headers": (head + many_headers + b"\r\nx\r\n", RAW),
        "punycode": (head + leaf("text/plain", b"b" * 300_000, charset="punycode", cte="base64"), RAW),
        **{
            f"addresses {each!r}": (head.replace(b"To: ", b"To: " + each * (50_000 // len(each))) + b"\r\nx\r\n", long)
            for each in (b'"@"', b'"@"\r\n ', b'"@,"', b'(,)"@"', b'(a"b)c",@" ', b".@", b"a@b, ")
        },
        "many parts": (head + many, RAW),
        "nested parts": (head + nested, RAW),
        "emails in emails": (head + b"Content-Type: message/rfc822\r\n\r\n" * 3000, RAW),
        "empty lines": (head + b"\r\n" * 6_000_000, RAW),
        "a long type": (head + b"Content-Type: text/plain" + b";\r\n a=b" * 8_000 + b"\r\n\r\nx\r\n", RAW),
        "comments": (head.replace(b"To: ", b"To: " + b"(a)\r\n " * 8_000) + b"\r\nx\r\n", long),
        "quotes": (head.replace(b"To: ", b"To: " + b'"a"\r\n ' * 8_000) + b"\r\nx\r\n", long),
    }
