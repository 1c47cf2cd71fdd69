"""The sendgrid adapter: its outcomes, its waits, and its requests, which comply with SendGrid's documentation."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.header import decode_header, make_header
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sendgrid import SendGridAPIClient

from dispatcher.dev.http_apis import sendgrid_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.email import Email
from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.outcome import Accepted, Deferred
from dispatcher.domain.outgoing import Attachment, OutgoingAttachment, OutgoingEmail
from dispatcher.errors import InvalidEmail
from dispatcher.providers.sendgrid.request import body_of, http_headers_of
from dispatcher.providers.sendgrid.responses import outcome_of
from dispatcher.transport.http_response import HttpResponse
from tests.providers.emails import an_email
from tests.providers.http_outcomes import EMAIL_PARTS, FAULT, Case, HttpOutcomes
from tests.providers.http_places import SENDGRID_KEY, sendgrid_place

UNVERIFIED: Final = (
    "The from address does not match a verified Sender Identity. Mail cannot be sent until this error is resolved."
)
REPEATED: Final = "Each email address in the personalization block should be unique. We found [ann@example.com] twice."
PAGE: Final = Reply(504, b"<html><title>SendGrid - 504 Gateway Timeout</title></html>", {"Content-Type": "text/html"})
ECHO: Final = sendgrid_error(400, "ann@example.com <ann@example.com> is not ann%40example.com", "from ann@example.com")
IN_SANDBOX: Final = {"sandbox": True}


NEITHER: Final = "another 2xx, or a redirect (not followed)"
SENDER: Final = "400 or 403 that blames the sender"
RECIPIENT: Final = "400 that blames only recipients"
CONTENT: Final = "another 400, or 422"
REFUSED: Final = "another 4xx, such as 406"
ACCOUNT: Final = "401, another 403, 404, 405, 451"
SERVER: Final = "408, 500, 503 and other 5xx"
GATEWAY: Final = "502 or 504: a gateway got no response from SendGrid"

BAD_SENDER: Final = "rejected rejected_sender"
BAD_RECIPIENT: Final = "rejected rejected_recipient"
BAD_CONTENT: Final = "rejected invalid_content"
DOWN: Final = "deferred server_error"

TABLE: Final = [
    Case("202", "accepted", accepted=1),
    Case("200 without a body, in sandbox mode", "accepted", accepted=1, options=IN_SANDBOX, detail="sandbox mode"),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 unexpected with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html, titled 'Welcome'", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "titled 'Welcome'", accepted=1, options=IN_SANDBOX),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", "307 unexpected", accepted=1),
    Case(NEITHER, "uncertain", Reply(204), "204", "204 unexpected"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED, "from"), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(403, UNVERIFIED), "403", "verified Sender Identity"),
    Case(SENDER, BAD_SENDER, sendgrid_error(400, "no valid address", "from.email"), "400", "from.email: no"),
    Case(SENDER, BAD_SENDER, ECHO, "400", "<address>"),
    Case(RECIPIENT, BAD_RECIPIENT, sendgrid_error(400, "Does not contain a valid address.",
         "personalizations.0.to.0.email"), "400", "BadRequestsError personalizations.0.to.0.email: Does not"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(400, "The subject is required.", "subject"), "400", "subject: The"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(400, REPEATED, "personalizations.0"), "400", "[<address>] twice"),
    Case(CONTENT, BAD_CONTENT, Reply(400, b"<html>no</html>"), "400", "octets of no type"),
    Case(CONTENT, BAD_CONTENT, Reply(400, {"errors": "?"}), "400"),
    Case(CONTENT, BAD_CONTENT, Reply(400, {"errors": [1, None, {"message": 2}]}), "400"),
    Case(CONTENT, BAD_CONTENT, sendgrid_error(422, "no"), "422", "422 no"),
    Case("413", "rejected too_large", sendgrid_error(413, "content too large"), "413", "PayloadTooLargeError"),
    Case(REFUSED, "rejected refused", sendgrid_error(406, "Not Acceptable"), "406"),
    Case(REFUSED, "rejected refused", Reply(418), "418", "with an empty body"),
    Case(ACCOUNT, FAULT, key="SG.another", detail="UnauthorizedError The provided authorization grant is invalid"),
    Case(ACCOUNT, FAULT, sendgrid_error(401, "Maximum credits exceeded"), detail="Maximum credits exceeded"),
    Case(ACCOUNT, FAULT, sendgrid_error(401, "The key is not ann@example.com's"), detail="The key is not <address>"),
    Case(ACCOUNT, FAULT, sendgrid_error(403, "access forbidden"), detail="ForbiddenError access forbidden"),
    Case(ACCOUNT, FAULT, sendgrid_error(404, "not found"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(405, "method not allowed"), detail="DISPATCHER_SENDGRID_HOST"),
    Case(ACCOUNT, FAULT, sendgrid_error(451, "region"), detail="EU"),
    Case("429", "deferred throttled", sendgrid_error(429, "too many requests"), "429", "TooManyRequestsError"),
    Case(SERVER, DOWN, sendgrid_error(500, "internal server error"), "500", "InternalServerError"),
    Case(SERVER, DOWN, Reply(503, b"<html>"), "503", "ServiceUnavailableError"),
    Case(SERVER, DOWN, Reply(500, b"ann@example.com"), "500"),
    Case(SERVER, DOWN, Reply(599), "599"),
    Case(SERVER, DOWN, Reply(408), "408"),
    Case(GATEWAY, "uncertain", PAGE, "504", "GatewayTimeoutError with 58 octets of text/html"),
    Case(GATEWAY, "uncertain", Reply(502), "502", "502 with an empty body"),
]  # fmt: skip


class TestOutcomes(HttpOutcomes):
    section, table, place = "SendGrid", TABLE, staticmethod(sendgrid_place)
    secrets = (SENDGRID_KEY, *EMAIL_PARTS)
    message_id = r"\S{22}"
    resets = True
    refused = (
        ({"subject": ""}, "invalid_content", "subject"),
        ({"text": None}, "invalid_content", ""),
        ({"text": "", "html": ""}, "invalid_content", ""),
        ({"attachments": (OutgoingAttachment("empty", "text/plain", b""),)}, "invalid_content", ""),
        ({"text": "SG.abc123.def456 is our key"}, "invalid_content", ""),
        ({"html": "lone \udc80"}, "invalid_content", ""),
        ({"template_id": "d-1", "template_data": {"at": datetime.now(UTC).timetz}}, "invalid_content", ""),
        ({"headers": {"x-sg-eid": "1"}}, "invalid_content", ""),
        ({"headers": {"Reply-To": "a@example.com"}}, "invalid_content", ""),
        ({"to": ("a@-.example",)}, "rejected_recipient", ""),
    )
    checks = (
        (Behaviour(key=SENDGRID_KEY), "SendGrid accepts the API key, and the key may send; emails are delivered."),
        (Behaviour(key="SG.another"), "Check SENDGRID_API_KEY"),
        (Behaviour(Reply(200, {"scopes": ["user.profile.read"]})), "Give the key the scope mail.send"),
        (Behaviour(Reply(200, b"<html>")), "Give the key the scope mail.send"),
        (Behaviour(Reply(500, b"")), "unexpected response"),
    )


NOW: Final = "Sat, 21 Nov 2026 07:30:00 GMT"
NOW_SECONDS: Final = 1795246200


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {}, None),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW}, 40),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS - 40), "date": NOW}, 0),
        (429, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW, "retry-after": "60"}, 60),
        (429, {"retry-after": "7"}, 7),
        (429, {"retry-after": "Sat, 21 Nov 2026 07:31:00 GMT", "date": NOW}, 60),
        (429, {"x-ratelimit-reset": "soon", "retry-after": "-5"}, None),
        (429, {"x-ratelimit-reset": "9" * 4000}, None),
        (503, {"retry-after": "9"}, 9),
        (503, {"x-ratelimit-reset": str(NOW_SECONDS + 40), "date": NOW}, None),
    ],
)
def test_the_wait_comes_from_response_headers(status: int, headers: Mapping[str, str], seconds: float | None) -> None:
    outcome = outcome_of(HttpResponse(status, headers, b""))

    assert isinstance(outcome, Deferred)
    assert outcome.retry_after == seconds


def test_an_invalid_message_id_is_not_recorded() -> None:
    for text in ("", "a\x00b", "é", "x" * 1000):
        outcome = outcome_of(HttpResponse(202, {"x-message-id": text}, b""))

        assert outcome == Accepted(None)


async def test_python_sendgrids_own_client_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG, SendGrid's client logs the key and the whole email. We do not use this client, but an application in
    our process may use it."""
    caplog.set_level(logging.DEBUG)
    async with sendgrid_place(tmp_path) as place:
        client = SendGridAPIClient(SENDGRID_KEY, place.double.url)
        email = {"personalizations": [{"to": [{"email": "ann@example.com"}]}]}
        answer = await asyncio.to_thread(client.send, email)

    assert answer.status_code == 202
    assert [secret for secret in TestOutcomes.secrets if secret in caplog.text] == []


def document_of(outgoing: OutgoingEmail) -> dict[str, Any]:
    """The JSON of the request for this email. Asserts the rules of SendGrid's documentation that concern any email:
    https://www.twilio.com/docs/sendgrid/api-reference/mail-send/errors."""
    document: dict[str, Any] = orjson.loads(bytes(body_of(outgoing)))
    people = [
        one for each in document["personalizations"] for field in ("to", "cc", "bcc") for one in each.get(field, ())
    ]
    everybody = [*people, document["from"], *document.get("reply_to_list", [document.get("reply_to", ANN)])]
    assert all(one["email"].isascii() for one in everybody)
    assert len({one["email"].lower() for one in people}) == len(people), "an address occurs twice"
    for name in (one["name"] for one in people if "name" in one):
        assert re.fullmatch(r'".*"|[^(),:;<>@[\]]+', name), "SendGrid would misread a name"
    assert all(value.isascii() for value in (*document["headers"].values(), *document.get("categories", ())))
    return document


def test_the_headers_equal_those_of_the_vendors_client() -> None:
    theirs = SendGridAPIClient("SG.key").client.request_headers

    assert http_headers_of("SG.key") == {**theirs, "Content-Type": "application/json"}


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
CSV = OutgoingAttachment("data.csv", "text/csv", b"a;b")
CSV_FILE = {"filename": "data.csv", "type": "text/csv", "content": "YTti", "disposition": "attachment"}
EML = OutgoingAttachment("Müll.eml", "message/rfc822", b"To: x\n\n")
EML_FILE = {**CSV_FILE, "filename": "Müll.eml", "type": "application/octet-stream", "content": "VG86IHgKCg=="}
NAMES = ('"Doe, Ann"', '"Müller; Söhne"', '"Ann (work)"', r'"Ann \"A\" Doe"', "Dr. Ann O'Hara", "Кирилл")
TEXT = {"type": "text/plain", "value": "Thank you.\n"}
DATA = {"name": "Ann", "items": [{"price": 1.5}], "paid": True, "note": None}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
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
        *(({"to": (f"{text} <ann@example.com>",)}, {"to": [{**ANN, "name": text}]}) for text in NAMES),
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
        ({"attachments": (EML, CSV)}, {"attachments": [EML_FILE, CSV_FILE]}),
        ({"html": "<p>"}, {"content": [TEXT, {"type": "text/html", "value": "<p>"}], "subject": "Your order"}),
    ],
    ids=[
        *("a repeated address", "without to", "comma", "semicolon", "comment", "quotes", "apostrophe", "Cyrillic"),
        *("several reply_to", "tags", "no accepted tag", "template"),
        *("template without data", "files", "two bodies"),
    ],
)
def test_each_field_is_written_so_that_sendgrid_reads_it(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    document = document_of(an_email(**changes))

    (people,) = document["personalizations"]
    assert {name: people.get(name) or document.get(name) for name in fields} == fields


_LETTERS = "aZ9 ,;:()<>@[].!?=&'*-_ßЖ例🎉é"
_WORDS = st.text(_LETTERS, min_size=1, max_size=40).map(str.strip).filter(lambda text: text.strip("."))
_ADDRESS = st.builds(
    "{}@{}.example".format,
    st.from_regex(r"[a-z0-9!#$%&'*+/^_`{|}~-]{1,10}", fullmatch=True),
    st.sampled_from(["a", "b", "bücher", "例え"]),
)
_MAILBOX = st.one_of(_ADDRESS, st.builds('"{}" <{}>'.format, _WORDS, _ADDRESS))
_LONG_WORDS = st.sampled_from((("Grüße und Küsse " * 12).strip(), "word " * 30 + "end"))


@settings(max_examples=20)
@given(
    sender=_MAILBOX,
    to=st.lists(_MAILBOX, min_size=1, max_size=4),
    cc=st.lists(_MAILBOX, max_size=3),
    bcc=st.lists(_MAILBOX, max_size=3),
    reply_to=st.lists(_MAILBOX, max_size=3),
    subject=_WORDS,
    text=_WORDS,
    headers=st.dictionaries(st.from_regex(r"X-[A-Za-z0-9-]{1,20}", fullmatch=True), _WORDS | _LONG_WORDS, max_size=3),
    tags=st.lists(_WORDS, max_size=10, unique=True),
    filename=_WORDS,
)
def test_every_email_that_enqueue_accepts_fits_sendgrids_rules(
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

    assert document["headers"].pop("Message-ID") == f"<{outgoing.email_id}@{document['from']['email'].split('@')[-1]}>"
    decoded = {name: str(make_header(decode_header(value))) for name, value in document["headers"].items()}
    assert decoded == dict(checked.headers)
