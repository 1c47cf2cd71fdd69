"""The body of SendEmail fits botocore's API model, and has exactly the octets that botocore's serializer writes. Our
Signature Version 4 equals botocore's signatures, and arrives at the server."""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import json
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any, Final

import botocore.session
import orjson
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator

from dispatcher.domain.outcome import Accepted, Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.errors import ProviderFault
from dispatcher.providers.ses.request import MAX_HEADERS, Parameters, bulk_entry_of, request_for
from dispatcher.providers.ses.signing import Signer
from dispatcher.transport.body import PIECE_OCTETS, Base64Content, Body, sha256_of
from dispatcher.transport.mime import render
from dispatcher.transport.mime_headers import UnrenderableEmail
from tests.providers.emails import an_email, send
from tests.providers.ses_place import ACCESS_KEY, REGION, SECRET_KEY, Ses, provider_for

LONG_TYPE = OutgoingAttachment("a", f"application/{'x' * 70}", b"")
MODEL = botocore.session.Session().get_service_model("sesv2").operation_model("SendEmail")
FILE = OutgoingAttachment("a.pdf", "application/pdf", b"%PDF")


def document_of(
    configuration_set: str | None = None, *, email: OutgoingEmail | None = None, **changes: Any
) -> Parameters:
    """The request's document. Asserts that botocore accepts the document and encodes it to the same bytes."""
    document: Parameters = orjson.loads(bytes(request_for(email or an_email(**changes), configuration_set).body))
    parameters = with_blobs(document)
    report = ParamValidator().validate(parameters, MODEL.input_shape)
    assert not report.has_errors(), report.generate_report()
    theirs = create_serializer("rest-json").serialize_to_request(parameters, MODEL)
    assert json.loads(theirs["body"]) == document
    assert theirs["headers"] == {"Content-Type": "application/json"}
    return document


def with_blobs(document: Parameters) -> Parameters:
    """The document as botocore's parameters, with files as octets."""
    parameters = copy.deepcopy(document)
    content = parameters["Content"]
    if "Raw" in content:
        content["Raw"]["Data"] = base64.b64decode(content["Raw"]["Data"], validate=True)
    for file in content.get("Template", {}).get("Attachments", ()):
        file["RawContent"] = base64.b64decode(file["RawContent"], validate=True)
    return parameters


FILE_FIELDS = {
    "FileName": "a.pdf",
    "ContentType": "application/pdf",
    "RawContent": base64.b64encode(b"%PDF").decode(),
    "ContentDisposition": "ATTACHMENT",
    "ContentTransferEncoding": "BASE64",
}
TEMPLATE = {"template_id": "welcome", "text": None}


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"text": None, "html": "<p>Hi"}, "Content Simple Body", {"Html": {"Data": "<p>Hi", "Charset": "UTF-8"}}),
        ({"to": (), "bcc": ("eve@example.com",)}, "Destination", {"BccAddresses": ["eve@example.com"]}),
        (
            {**TEMPLATE, "template_data": {"name": "Zoë", "items": [1, 2]}, "subject": ""},
            "Content Template",
            {"TemplateName": "welcome", "TemplateData": '{"items":[1,2],"name":"Zoë"}'},
        ),
        ({**TEMPLATE, "headers": {"X-A": "b"}}, "Content Template Headers", [{"Name": "X-A", "Value": "b"}]),
        ({**TEMPLATE, "attachments": (FILE,)}, "Content Template Attachments", [FILE_FIELDS]),
    ],
    ids=["simple", "no recipients", "template", "headers of a template", "files of a template"],
)
def test_each_form_has_its_own_fields_and_no_empty_ones(changes: dict[str, Any], path: str, expected: object) -> None:
    request = document_of(**changes)

    assert set(request) == {"FromEmailAddress", "Destination", "Content", "EmailTags"}
    assert reduce(lambda part, name: part[name], path.split(), request) == expected


def test_names_that_are_not_ascii_are_encoded_words_on_one_line() -> None:
    request = document_of(
        sender='"Müller, Söhne & Co. und noch viel mehr Leute als in eine Zeile passen" <a@bücher.example>'
    )

    sender = request["FromEmailAddress"]
    assert sender.isascii()
    assert sender.isprintable()
    assert sender.startswith("=?utf-8?b?")
    assert sender.endswith(" <a@xn--bcher-kva.example>")


@pytest.mark.parametrize(
    "changes",
    [
        {"attachments": (FILE,)},
        {"headers": {"X-Campaign": "Grüße"}},
        {"subject": ""},
        {"text": ""},
        {"text": "", "html": ""},
    ],
)
def test_an_email_that_does_not_fit_simple_is_raw(changes: dict[str, Any]) -> None:
    email = an_email(bcc=("Eve <eve@example.com>",), cc=("Zoë <zoe@example.com>",), reply_to=("h@x.org",), **changes)

    request = with_blobs(document_of(email=email))

    assert request["Content"] == {"Raw": {"Data": render(email).content}}
    assert request["FromEmailAddress"] == "shop@example.org"
    assert request["Destination"] == {
        "ToAddresses": ["ann@example.com"],
        "CcAddresses": ["zoe@example.com"],
        "BccAddresses": ["eve@example.com"],
    }
    assert "ReplyToAddresses" not in request


@pytest.mark.parametrize("name", ["Bcc ", " X-SES-A", "X-A:", "X-A\r\nBcc", "X-\u017fES-A", ""])
def test_an_invalid_header_name_in_a_stored_email_is_rejected_alone_and_in_a_bulk_call(name: str) -> None:
    stored = an_email(template_id="welcome", text=None, headers={name: "eve"})

    with pytest.raises(UnrenderableEmail, match="contains an invalid name"):
        request_for(stored, None)
    assert bulk_entry_of(stored) is None


def test_tags_are_numbered_and_use_allowed_characters() -> None:
    email = an_email(tags=("welcome", "order.confirmed@shop", "Grüße", "a b"))

    assert document_of(email=email)["EmailTags"] == [
        {"Name": "email_id", "Value": str(email.email_id)},
        {"Name": "tag_1", "Value": "welcome"},
        {"Name": "tag_2", "Value": "order_confirmed_shop"},
        {"Name": "tag_3", "Value": "Gr__e"},
        {"Name": "tag_4", "Value": "a_b"},
    ]


def test_the_configuration_set_is_in_every_form() -> None:
    for changes in (
        {},
        {"attachments": (FILE,), "headers": {"X-A": "b"}, "tags": ("a",)},
        {"template_id": "welcome", "text": None},
    ):
        assert document_of("news", **changes)["ConfigurationSetName"] == "news"


def test_files_are_encoded_while_sending_and_are_in_memory_once() -> None:
    files = tuple(OutgoingAttachment(f"{number}", "application/pdf", bytes(range(256)) * 1000) for number in range(3))

    for form in ({"template_id": "welcome", "text": None}, {"text": "Hello"}):
        body = request_for(an_email(attachments=files, **form), None).body
        assert isinstance(body, Body)
        assert max(map(len, body.pieces())) <= PIECE_OCTETS
        assert len(bytes(body)) == len(body)
        document_of(attachments=files, **form)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        *(
            (Reason.INVALID_CONTENT, {"template_id": "welcome", "headers": headers})
            for headers in (
                {"X-Campaign": "Grüße"},
                {"X-Campaign": ""},
                {"X-Campaign": "x" * 990},
                {f"X-{number}": "x" for number in range(MAX_HEADERS + 1)},
                {"X-A": "1\r\nBcc: eve@example.com"},
            )
        ),
        (Reason.INVALID_CONTENT, {"template_id": "w", "attachments": (LONG_TYPE,)}),
        (Reason.INVALID_CONTENT, {"html": "lone \ud800 surrogate"}),
        (Reason.INVALID_CONTENT, {"template_id": "\ud800"}),
        (Reason.INVALID_CONTENT, {"template_id": "welcome", "subject": "Hello\r\nBcc: eve@example.com"}),
        (Reason.INVALID_CONTENT, {"template_id": "welcome", "headers": {"Return-Path": "<>"}}),
        (Reason.INVALID_CONTENT, {"template_id": "welcome", "headers": {"no name": "1"}}),
        (Reason.INVALID_CONTENT, {"template_id": "w", "attachments": (OutgoingAttachment("a", "nonsense", b"x"),)}),
        (Reason.INVALID_CONTENT, {"template_id": "w", "attachments": (OutgoingAttachment("a\r", "a/b", b"x"),)}),
        (Reason.REJECTED_RECIPIENT, {"template_id": "welcome", "to": ()}),
        (Reason.REJECTED_SENDER, {"template_id": "welcome", "sender": "nobody"}),
    ],
)
def test_every_form_refuses_what_mime_or_the_api_refuses(reason: Reason, changes: dict[str, Any]) -> None:
    with pytest.raises(UnrenderableEmail) as refusal:
        document_of(**changes)

    assert refusal.value.reason is reason


# Signatures.
URL: Final = "https://email.eu-west-1.amazonaws.com/v2/email/outbound-emails"
LARGE_FILE: Final = OutgoingAttachment("a.pdf", "application/pdf", bytes(300_000))
HEADERS: Final = {"Content-Type": "application/json", "Host": "email.eu-west-1.amazonaws.com", "User-Agent": "x"}


@pytest.mark.parametrize("token", [None, "a/session+token=="])
def test_botocores_signer_gives_equal_signatures_each_day(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The derived key is cached only for the same day and the same credentials."""
    body = b'{"Content":{}}'
    now = [""]
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: datetime.fromisoformat(now[0]))
    for key in ("one", "two"):
        credentials = ReadOnlyCredentials("AKIDEXAMPLE", key, token, None)
        signer = Signer(credentials, "ses", REGION, HEADERS, lambda: datetime.fromisoformat(f"{now[0]}Z").timestamp())
        for instant in ("2026-11-22T23:59:59", "2026-11-23T00:00:00", "2026-11-23T00:00:01", "2026-11-22T23:59:59"):
            now[0] = instant
            theirs = AWSRequest("POST", URL, HEADERS, body)
            SigV4Auth(credentials, "ses", REGION).add_auth(theirs)

            assert signer.sign("POST", URL, hashlib.sha256(body).hexdigest()) == dict(theirs.headers.items())


def test_a_botocore_that_signs_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SigV4Auth, "canonical_request", lambda *_: "POST\n/\n20261123T000000Z\ndigest")
    signer = Signer(ReadOnlyCredentials("AKIDEXAMPLE", "secret", None, None), "ses", REGION, HEADERS)

    with pytest.raises(ProviderFault, match="botocore"):
        signer.sign("POST", URL, hashlib.sha256(b"").hexdigest())


async def test_a_large_bodys_digest_does_not_block_the_loop() -> None:
    body = Body((b"{", Base64Content(bytes(range(256)) * 4000), b"}"))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    digest = await sha256_of(body)
    counting.cancel()

    assert digest == hashlib.sha256(bytes(body)).hexdigest()
    assert turns > 10


@pytest.mark.parametrize(
    ("changes", "token"),
    [({}, "a/session+token=="), ({"attachments": (LARGE_FILE,)}, None)],
    ids=["small, with a token", "large, without a token"],
)
async def test_requests_arrive_with_botocores_signature(
    changes: dict[str, Any], token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ses = Ses()
    async with provider_for(ses, {"AWS_SESSION_TOKEN": token} if token else None) as provider:
        sending = await send(provider, an_email(**changes))

    assert isinstance(sending.outcome, Accepted)
    ((headers, body),) = ses.requests
    theirs = AWSRequest("POST", f"http://{headers['Host']}/v2/email/outbound-emails", data=body)
    for name in ("Content-Type", "Host"):
        theirs.headers[name] = headers[name]
    signed_at = datetime.strptime(headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: signed_at)
    SigV4Auth(ReadOnlyCredentials(ACCESS_KEY, SECRET_KEY, token, None), "ses", REGION).add_auth(theirs)
    assert abs(datetime.now(UTC) - signed_at) < timedelta(minutes=1)
    assert headers["Authorization"] == theirs.headers["Authorization"]
    assert headers.get("X-Amz-Security-Token") == token
