"""The body of SendEmail fits botocore's API model, and has exactly the octets that botocore's serializer writes."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import botocore.session
import orjson
import pytest
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator

from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.providers.ses.request import MAX_HEADERS, Parameters, bulk_entry_of, request_for
from dispatcher.transport.body import PIECE_OCTETS, Body
from dispatcher.transport.mime import render
from dispatcher.transport.mime_headers import UnrenderableEmail
from tests.providers.emails import an_email

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


def test_a_plain_email_is_simple_content_without_empty_fields() -> None:
    request = document_of(text=None, html="<p>Hi")

    assert set(request["Content"]["Simple"]["Body"]) == {"Html"}
    assert set(request) == {"FromEmailAddress", "Destination", "Content", "EmailTags"}


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


def test_fields_without_recipients_are_left_out() -> None:
    assert document_of(to=(), bcc=("eve@example.com",))["Destination"] == {"BccAddresses": ["eve@example.com"]}


def test_a_template_gets_its_data() -> None:
    request = document_of(template_id="welcome", template_data={"name": "Zoë", "items": [1, 2]}, text=None, subject="")

    template = request["Content"]["Template"]
    assert set(template) == {"TemplateName", "TemplateData"}
    assert template["TemplateName"] == "welcome"
    assert json.loads(template["TemplateData"]) == {"name": "Zoë", "items": [1, 2]}


def test_headers_and_files_of_a_template_use_the_apis_fields() -> None:
    request = document_of(template_id="welcome", text=None, headers={"X-Campaign": "spring"}, attachments=(FILE,))

    template = request["Content"]["Template"]
    assert template["Headers"] == [{"Name": "X-Campaign", "Value": "spring"}]
    assert template["Attachments"] == [
        {
            "FileName": "a.pdf",
            "ContentType": "application/pdf",
            "ContentDisposition": "ATTACHMENT",
            "ContentTransferEncoding": "BASE64",
            "RawContent": base64.b64encode(b"%PDF").decode(),
        }
    ]


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
