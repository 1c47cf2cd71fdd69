"""An email as SendEmail's parameters; boto3's own model of the API judges their form."""

from __future__ import annotations

import json
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.mime import render
from dispatcher.providers.mime_headers import UnrenderableEmail
from dispatcher.providers.ses_bulk import part_of
from dispatcher.providers.ses_request import MAX_HEADERS, Parameters, request_for
from tests.providers.emails import an_email

FILE = OutgoingAttachment("a.pdf", "application/pdf", b"%PDF")


def valid_request(configuration_set: str | None = None, **changes: Any) -> Parameters:
    """The request, after boto3's model has found nothing wrong with it."""
    request = request_for(an_email(**changes), configuration_set)
    shape = botocore.session.Session().get_service_model("sesv2").operation_model("SendEmail").input_shape
    report = ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    return request


def test_a_plain_email_is_simple_content() -> None:
    email = an_email(
        html="<p>Thänk you", cc=("Bob <bob@example.com>",), bcc=("eve@example.com",), reply_to=("h@x.org",)
    )

    assert request_for(email, None) == {
        "FromEmailAddress": "Shop <shop@example.org>",
        "Destination": {
            "ToAddresses": ["ann@example.com"],
            "CcAddresses": ["Bob <bob@example.com>"],
            "BccAddresses": ["eve@example.com"],
        },
        "ReplyToAddresses": ["h@x.org"],
        "Content": {
            "Simple": {
                "Subject": {"Data": "Your order", "Charset": "UTF-8"},
                "Body": {
                    "Text": {"Data": "Thank you.\n", "Charset": "UTF-8"},
                    "Html": {"Data": "<p>Thänk you", "Charset": "UTF-8"},
                },
            }
        },
        "EmailTags": [{"Name": "email_id", "Value": str(email.email_id)}],
    }


def test_the_simple_form_is_valid_and_leaves_out_what_is_not_there() -> None:
    request = valid_request(text=None, html="<p>Hi")

    assert set(request["Content"]["Simple"]["Body"]) == {"Html"}
    assert set(request) == {"FromEmailAddress", "Destination", "Content", "EmailTags"}


def test_names_that_are_not_ascii_are_encoded_words_on_one_line() -> None:
    request = valid_request(
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
def test_what_simple_content_does_not_carry_is_raw(changes: dict[str, Any]) -> None:
    email = an_email(bcc=("Eve <eve@example.com>",), cc=("Zoë <zoe@example.com>",), reply_to=("h@x.org",), **changes)

    request = request_for(email, None)

    assert request["Content"] == {"Raw": {"Data": render(email).content}}
    assert request["FromEmailAddress"] == "shop@example.org"
    assert request["Destination"] == {
        "ToAddresses": ["ann@example.com"],
        "CcAddresses": ["zoe@example.com"],
        "BccAddresses": ["eve@example.com"],
    }
    assert "ReplyToAddresses" not in request


def test_the_raw_form_is_valid() -> None:
    valid_request(attachments=(FILE,), headers={"X-A": "b"}, tags=("a",))


def test_fields_without_recipients_are_left_out() -> None:
    request = valid_request(to=(), bcc=("eve@example.com",))

    assert request["Destination"] == {"BccAddresses": ["eve@example.com"]}


def test_a_template_gets_its_data() -> None:
    request = valid_request(
        template_id="welcome", template_data={"name": "Zoë", "items": [1, 2]}, text=None, subject=""
    )

    template = request["Content"]["Template"]
    assert set(template) == {"TemplateName", "TemplateData"}
    assert template["TemplateName"] == "welcome"
    assert json.loads(template["TemplateData"]) == {"name": "Zoë", "items": [1, 2]}


def test_headers_and_files_beside_a_template_are_the_apis_own() -> None:
    request = valid_request(template_id="welcome", text=None, headers={"X-Campaign": "spring"}, attachments=(FILE,))

    template = request["Content"]["Template"]
    assert template["Headers"] == [{"Name": "X-Campaign", "Value": "spring"}]
    assert template["Attachments"] == [
        {
            "FileName": "a.pdf",
            "ContentType": "application/pdf",
            "ContentDisposition": "ATTACHMENT",
            "ContentTransferEncoding": "BASE64",
            "RawContent": b"%PDF",
        }
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"headers": {"X-Campaign": "Grüße"}},
        {"headers": {"X-Campaign": ""}},
        {"headers": {"X-Campaign": "x" * 990}},
        {"headers": {f"X-{number}": "x" for number in range(MAX_HEADERS + 1)}},
        {"attachments": (OutgoingAttachment("a", f"application/{'x' * 70}", b""),)},
    ],
)
def test_what_the_api_does_not_take_beside_a_template_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnrenderableEmail) as refusal:
        request_for(an_email(template_id="welcome", text=None, **changes), None)

    assert refusal.value.reason is Reason.INVALID_CONTENT


def test_what_could_inject_headers_is_refused_beside_a_template_too() -> None:
    with pytest.raises(UnrenderableEmail):
        request_for(an_email(template_id="welcome", text=None, headers={"X-A": "1\r\nBcc: eve@example.com"}), None)


@pytest.mark.parametrize("name", ["Bcc ", " X-SES-A", "X-A:", "X-A\r\nBcc", "X-\u017fES-A", ""])
def test_a_row_with_a_name_that_no_header_has_spoils_neither_its_template_nor_a_call_with_others(name: str) -> None:
    stored = an_email(template_id="welcome", text=None, headers={name: "eve"})

    with pytest.raises(UnrenderableEmail, match="no header's name"):
        request_for(stored, None)
    assert part_of(stored) is None


def test_tags_are_numbered_and_made_of_what_ses_allows() -> None:
    email = an_email(tags=("welcome", "order.confirmed@shop", "Grüße", "a b"))

    assert request_for(email, None)["EmailTags"] == [
        {"Name": "email_id", "Value": str(email.email_id)},
        {"Name": "tag_1", "Value": "welcome"},
        {"Name": "tag_2", "Value": "order_confirmed_shop"},
        {"Name": "tag_3", "Value": "Gr__e"},
        {"Name": "tag_4", "Value": "a_b"},
    ]


def test_the_configuration_set_stands_in_every_form() -> None:
    for changes in ({}, {"attachments": (FILE,)}, {"template_id": "welcome", "text": None}):
        assert valid_request("news", **changes)["ConfigurationSetName"] == "news"


def test_fifty_recipients_are_taken() -> None:
    request = valid_request(to=[f"a{number}@example.com" for number in range(25)],
                            bcc=[f"b{number}@example.com" for number in range(25)])  # fmt: skip

    assert len(request["Destination"]["BccAddresses"]) == 25
