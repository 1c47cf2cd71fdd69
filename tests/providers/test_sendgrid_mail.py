"""SendGrid request bodies comply with SendGrid's documentation and have the right fields."""

from __future__ import annotations

import base64
import email.header
import time
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sendgrid import SendGridAPIClient
from sendgrid.helpers import mail as helpers

from dispatcher.domain.email import Email
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.headers import is_reserved
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import Attachment, OutgoingAttachment, OutgoingEmail
from dispatcher.errors import InvalidEmail
from dispatcher.providers.sendgrid.request import body_of, http_headers_of
from dispatcher.transport.mime_headers import UnrenderableEmail
from tests.providers import sendgrid_schema
from tests.providers.emails import an_email


def document_of(outgoing: OutgoingEmail, *, sandbox: bool = False) -> dict[str, Any]:
    """The JSON of the request for this email, after a check against SendGrid's rules."""
    document: dict[str, Any] = orjson.loads(bytes(body_of(outgoing, sandbox=sandbox)))
    sendgrid_schema.check(document)
    return document


def test_the_document_equals_that_of_the_vendors_helpers() -> None:
    outgoing = an_email(
        to=("Ann <ann@example.com>",), cc=("cy@example.com",), bcc=("di@example.com",), reply_to=("h@example.org",),
        html="<p>Thank you.</p>", headers={"X-Campaign": "May"}, tags=("orders",),
        attachments=(OutgoingAttachment("data.csv", "text/csv", b"a;b"),),
    )  # fmt: skip
    mail = helpers.Mail(helpers.From("shop@example.org", "Shop"), subject=outgoing.subject)
    mail.reply_to = helpers.ReplyTo("h@example.org")
    mail.add_content(helpers.Content("text/plain", outgoing.text))
    mail.add_content(helpers.Content("text/html", outgoing.html))
    mail.add_header(helpers.Header("Message-ID", f"<{outgoing.email_id}@example.org>"))
    mail.add_header(helpers.Header("X-Campaign", "May"))
    mail.add_category(helpers.Category("orders"))
    content = base64.b64encode(b"a;b").decode()
    mail.add_attachment(helpers.Attachment(content, "data.csv", "text/csv", helpers.Disposition("attachment")))
    people = helpers.Personalization()
    people.add_to(helpers.To("ann@example.com", "Ann"))
    people.add_cc(helpers.Cc("cy@example.com"))
    people.add_bcc(helpers.Bcc("di@example.com"))
    people.add_custom_arg(helpers.CustomArg("email_id", str(outgoing.email_id)))
    mail.add_personalization(people)

    assert document_of(outgoing) == orjson.loads(orjson.dumps(mail.get()))


def test_the_headers_equal_those_of_the_vendors_client() -> None:
    theirs = SendGridAPIClient("SG.key").client.request_headers

    assert http_headers_of("SG.key") == {**theirs, "Content-Type": "application/json"}


def test_a_plain_email_has_the_documented_form() -> None:
    outgoing = an_email()

    assert document_of(outgoing) == {
        "from": {"email": "shop@example.org", "name": "Shop"},
        "subject": "Your order",
        "personalizations": [
            {"to": [{"email": "ann@example.com"}], "custom_args": {"email_id": str(outgoing.email_id)}}
        ],
        "content": [{"type": "text/plain", "value": "Thank you.\n"}],
        "headers": {"Message-ID": f"<{outgoing.email_id}@example.org>"},
    }


def test_with_bcc_alone_no_recipient_sees_another() -> None:
    outgoing = an_email(to=(), bcc=("di@example.com", "ed@example.com", "DI@example.com"), template_id="d-1",
                        template_data={"total": 5})  # fmt: skip

    people = document_of(outgoing)["personalizations"]

    arguments = {"custom_args": {"email_id": str(outgoing.email_id)}, "dynamic_template_data": {"total": 5}}
    assert people == [
        {"to": [{"email": "di@example.com"}], **arguments},
        {"to": [{"email": "ed@example.com"}], **arguments},
    ]


ANN, BOB, CY = ({"email": f"{name}@example.com"} for name in ("ann", "bob", "cy"))
DI = {"email": "di@example.com"}
DATA = {"name": "Ann", "items": [{"price": 1.5}], "paid": True, "note": None}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            {"html": "<p>Hällo 🎉</p>", "text": "Hällo 🎉\r\n"},
            {
                "content": [
                    {"type": "text/plain", "value": "Hällo 🎉\r\n"},
                    {"type": "text/html", "value": "<p>Hällo 🎉</p>"},
                ]
            },
        ),
        (
            {
                "to": ("Ann <ann@example.com>", "bob@example.com"),
                "cc": ("Cy <cy@example.com>",),
                "bcc": ("di@example.com",),
            },
            {"to": [{**ANN, "name": "Ann"}, BOB], "cc": [{**CY, "name": "Cy"}], "bcc": [DI]},
        ),
        (
            {
                "to": ("ann@example.com", "ANN@Example.com", "bob@bücher.example"),
                "cc": ("ann@example.com", "cy@example.com", "bob@xn--bcher-kva.example"),
                "bcc": ("Cy@example.com", "di@example.com"),
            },
            {"to": [ANN, {"email": "bob@xn--bcher-kva.example"}], "cc": [CY], "bcc": [DI]},
        ),
        (
            {"to": (), "cc": ("cy@example.com",), "bcc": ("di@example.com",)},
            {"to": [CY], "bcc": [DI], "cc": None},
        ),
        *(
            ({"to": (f"{text} <ann@example.com>",)}, {"to": [{**ANN, "name": text}]})
            for text in (
                '"Doe, Ann"',
                '"Müller; Söhne"',
                '"Ann (work)"',
                r'"Ann \"A\" Doe"',
                "Dr. Ann O'Hara",
                "Кирилл",
            )
        ),
        (
            {"sender": '"Shop, Inc." <shop@example.org>', "reply_to": ('"Help, Desk" <h@example.org>',)},
            {
                "from": {"email": "shop@example.org", "name": "Shop, Inc."},
                "reply_to": {"email": "h@example.org", "name": "Help, Desk"},
            },
        ),
        (
            {"reply_to": ("Help <h@example.org>", "b@example.org", "H@example.org")},
            {"reply_to_list": [{"email": "h@example.org", "name": "Help"}, {"email": "b@example.org"}]},
        ),
        ({"tags": ("orders", "Grüße", "2026", "orders")}, {"categories": ["orders", "2026"]}),
        ({"tags": ("Grüße",)}, {"categories": None}),
        (
            {"subject": "", "text": None, "template_id": "d-123", "template_data": MappingProxyType(DATA)},
            {"template_id": "d-123", "dynamic_template_data": DATA, "subject": None, "content": None},
        ),
        ({"template_id": "d-123"}, {"dynamic_template_data": None, "mail_settings": None}),
    ],
    ids=[
        *("both bodies", "recipients", "a repeated address", "without to", "comma", "semicolon", "comment", "quotes"),
        *("apostrophe", "Cyrillic", "names of senders", "several reply_to", "tags", "no accepted tag", "template"),
        "template without data",
    ],
)
def test_each_field_is_written_so_that_sendgrid_reads_it(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    document = document_of(an_email(**changes))

    (people,) = document["personalizations"]
    assert {name: people.get(name) or document.get(name) for name in fields} == fields


def test_headers_are_ascii_on_one_line_and_keep_their_value() -> None:
    headers = {
        "X-Campaign": ("Grüße und Küsse " * 12).strip(),
        "List-Unsubscribe": "<https://example.org/u?x=1>",
        "X-Long": "word " * 30 + "end",
    }

    document = document_of(an_email(headers=headers))

    arrived = {name: _decoded(value) for name, value in document["headers"].items()}
    arrived.pop("Message-ID")
    assert arrived == headers


def _decoded(value: str) -> str:
    return str(email.header.make_header(email.header.decode_header(value)))


def test_attachments_keep_order_name_type_and_octets() -> None:
    files = (
        OutgoingAttachment("Rechnung für März.pdf", "application/pdf", bytes(range(256))),
        OutgoingAttachment("data.csv", "text/csv", b"a;b\r\n"),
        OutgoingAttachment("forwarded.eml", "message/rfc822", b"Subject: x\n\n"),
    )

    document = document_of(an_email(attachments=files))

    arrived = [(file["filename"], file["type"], base64.b64decode(file["content"])) for file in document["attachments"]]
    assert arrived == [
        ("Rechnung für März.pdf", "application/pdf", bytes(range(256))),
        ("data.csv", "text/csv", b"a;b\r\n"),
        ("forwarded.eml", "application/octet-stream", b"Subject: x\n\n"),
    ]
    assert {file["disposition"] for file in document["attachments"]} == {"attachment"}


def test_sandbox_mode_is_requested() -> None:
    assert document_of(an_email(), sandbox=True)["mail_settings"] == {"sandbox_mode": {"enable": True}}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        (Reason.INVALID_CONTENT, {"subject": ""}),
        (Reason.INVALID_CONTENT, {"text": None}),
        (Reason.INVALID_CONTENT, {"text": "", "html": ""}),
        (Reason.INVALID_CONTENT, {"attachments": (OutgoingAttachment("empty", "text/plain", b""),)}),
        (Reason.INVALID_CONTENT, {"text": "SG.abc123.def456 is our key"}),
        (Reason.INVALID_CONTENT, {"html": "lone \udc80"}),
        (Reason.INVALID_CONTENT, {"template_id": "d-1", "template_data": {"at": datetime.now(UTC).timetz}}),
        (Reason.INVALID_CONTENT, {"headers": {"x-sg-eid": "1"}}),
        (Reason.INVALID_CONTENT, {"headers": {"Reply-To": "a@example.com"}}),
        (Reason.REJECTED_RECIPIENT, {"to": ("a@-.example",)}),
    ],
)
def test_emails_that_sendgrid_would_refuse_are_rejected_before_sending(reason: Reason, changes: dict[str, Any]) -> None:
    with pytest.raises(UnrenderableEmail) as refused:
        body_of(an_email(**changes))

    assert refused.value.reason is reason
    assert "example" not in refused.value.message
    assert "abc123" not in refused.value.message


def test_headers_that_sendgrid_reserves_are_refused_at_enqueue() -> None:
    for name in sendgrid_schema.RESERVED_HEADERS:
        assert is_reserved(name)


def test_a_thousand_recipients_do_not_block_the_loop() -> None:
    outgoing = an_email(to=tuple(f"person{number}@example.com" for number in range(1000)))

    started = time.process_time()
    document = orjson.loads(bytes(body_of(outgoing)))

    assert time.process_time() - started < 0.1
    assert len(document["personalizations"][0]["to"]) == 1000


_LETTERS = "aZ9 ,;:()<>@[].!?=&'*-_ßЖ例🎉é"
_WORDS = st.text(_LETTERS, min_size=1, max_size=40).map(str.strip).filter(lambda text: text.strip("."))
_ADDRESS = st.builds(
    "{}@{}.example".format,
    st.from_regex(r"[a-z0-9!#$%&'*+/^_`{|}~-]{1,10}", fullmatch=True),
    st.sampled_from(["a", "b", "bücher", "例え"]),
)
_MAILBOX = st.one_of(_ADDRESS, st.builds('"{}" <{}>'.format, _WORDS, _ADDRESS))


@settings(max_examples=40)
@given(
    sender=_MAILBOX,
    to=st.lists(_MAILBOX, min_size=1, max_size=4),
    cc=st.lists(_MAILBOX, max_size=3),
    bcc=st.lists(_MAILBOX, max_size=3),
    reply_to=st.lists(_MAILBOX, max_size=3),
    subject=_WORDS,
    text=_WORDS,
    headers=st.dictionaries(st.from_regex(r"X-[A-Za-z0-9-]{1,20}", fullmatch=True), _WORDS, max_size=3),
    tags=st.lists(_WORDS, max_size=10, unique=True),
    filename=_WORDS,
)
def test_every_email_that_enqueue_accepts_fits_sendgrids_schema(
    sender: str, to: list[str], cc: list[str], bcc: list[str], reply_to: list[str], subject: str, text: str,
    headers: dict[str, str], tags: list[str], filename: str,
) -> None:  # fmt: skip
    try:
        checked = Email(
            message_key="k", sender=sender, to=to, cc=cc, bcc=bcc, reply_to=reply_to, subject=subject, text=text,
            headers=headers, tags=tags, attachments=[Attachment(filename, "text/plain", b"x")],
        )  # fmt: skip
    except InvalidEmail:
        reject()
    fields = ("sender", "to", "cc", "bcc", "reply_to", "subject", "text", "headers", "tags", "attachments")
    outgoing = OutgoingEmail(
        email_id=new_email_id(), created_at=datetime.now(UTC), **{name: getattr(checked, name) for name in fields}
    )

    document = document_of(outgoing)

    arrived = {name: _decoded(value) for name, value in document["headers"].items() if name != "Message-ID"}
    assert arrived == dict(checked.headers)
