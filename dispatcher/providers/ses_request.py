"""An email as SES v2's SendEmail wants it.

    template_id                        Template    SES writes subject and body
    a body, no headers, no files       Simple      SES builds the MIME
    everything else                    Raw         we do

SES overwrites Message-ID and Date in all three; it knows an email by the tag `email_id`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from dispatcher.domain.address import parse_address
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.domain.template_data import canonical_data
from dispatcher.providers.capabilities import SES_MAX_OCTETS, SES_MAX_RECIPIENTS
from dispatcher.providers.mime import RenderedEmail, render
from dispatcher.providers.mime_headers import UnrenderableEmail, ascii_spec, mailbox, settable

MAX_HEADERS: Final = 15
MAX_HEADER_CHARACTERS: Final = 996
"""Name and value together. Both of the API's own headers: API_MessageHeader, and MessageHeaderList in boto3's model."""
MAX_CONTENT_TYPE_CHARACTERS: Final = 78
"""Of the API's own attachments: AttachmentContentType in boto3's model."""
EMAIL_ID_TAG: Final = "email_id"

_NOT_IN_TAGS: Final = re.compile(r"[^A-Za-z0-9_-]")
_PRINTABLE: Final = re.compile(r"[ -~]+")

Parameters = dict[str, Any]


def request_for(email: OutgoingEmail, configuration_set: str | None) -> Parameters:
    """The parameters of `send_email`.

    Raises:
        UnrenderableEmail: SES would refuse it, or enqueue should have; says which field, and nothing of its value.
    """
    # Rendered in any case: that checks every field, costs a twentieth of boto3's call, and tells the size.
    rendered = render(email if email.template_id is None else replace(email, template_id=None))
    _check(email, rendered)
    request: Parameters = {"EmailTags": _tags(email)}
    if configuration_set:
        request["ConfigurationSetName"] = configuration_set
    if email.template_id is None and not _is_simple(email):
        return request | _raw(email, rendered)
    content = {"Simple": _simple(email)} if email.template_id is None else {"Template": _template(email)}
    request |= {
        "Content": content,
        "FromEmailAddress": mailbox_of(email.sender),
        "Destination": _destination(email, mailbox_of),
    }
    if email.reply_to:
        request["ReplyToAddresses"] = [mailbox_of(address) for address in email.reply_to]
    return request


def bulk_entry(email: OutgoingEmail, data: str) -> Parameters:
    """The email as an entry of `send_bulk_email`, its template's data as JSON.

    Raises:
        UnrenderableEmail: SES would refuse it.
        ValueError: enqueue should have.
    """
    _check_all_locals(email)
    entry: Parameters = {
        "Destination": _destination(email, mailbox_of),
        "ReplacementTags": _tags(email),
        "ReplacementEmailContent": {"ReplacementTemplate": {"ReplacementTemplateData": data}},
    }
    if email.headers:
        entry["ReplacementHeaders"] = _template_headers(email)
    return entry


def _check(email: OutgoingEmail, rendered: RenderedEmail) -> None:
    if recipients_of(email) > SES_MAX_RECIPIENTS:
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, f"SES takes at most {SES_MAX_RECIPIENTS} recipients")
    if len(rendered.body) > SES_MAX_OCTETS:
        raise UnrenderableEmail(Reason.TOO_LARGE, f"SES takes at most {SES_MAX_OCTETS} octets")
    if rendered.needs_smtputf8:
        _check_all_locals(email)


def _check_all_locals(email: OutgoingEmail) -> None:
    _check_locals("from", (email.sender,), Reason.REJECTED_SENDER)
    _check_locals("to, cc or bcc", (*email.to, *email.cc, *email.bcc), Reason.REJECTED_RECIPIENT)
    _check_locals("reply_to", email.reply_to, Reason.INVALID_CONTENT)


def _check_locals(field: str, addresses: Iterable[str], reason: Reason) -> None:
    if not all(parse_address(text).local.isascii() for text in addresses):
        raise UnrenderableEmail(reason, f"{field} has a part before the @ that is not ASCII, and SES has no SMTPUTF8")


def _tags(email: OutgoingEmail) -> list[dict[str, str]]:
    """Ours, and the email's as `tag_1`, `tag_2` …: SES has names with values, and few letters for both."""
    tags = [{"Name": EMAIL_ID_TAG, "Value": str(email.email_id)}]
    for number, tag in enumerate(email.tags, 1):
        tags.append({"Name": f"tag_{number}", "Value": _NOT_IN_TAGS.sub("_", tag)})
    return tags


def _is_simple(email: OutgoingEmail) -> bool:
    return bool(email.subject and (email.text or email.html) and not email.headers and not email.attachments)


def _simple(email: OutgoingEmail) -> Parameters:
    bodies = {"Text": email.text, "Html": email.html}
    return {"Subject": _text(email.subject), "Body": {name: _text(body) for name, body in bodies.items() if body}}


def _text(text: str) -> dict[str, str]:
    return {"Data": text, "Charset": "UTF-8"}


def _raw(email: OutgoingEmail, rendered: RenderedEmail) -> Parameters:
    """The names are in the MIME; here SES reads the envelope, Bcc included."""
    return {
        "Content": {"Raw": {"Data": rendered.content}},
        "FromEmailAddress": rendered.sender,
        "Destination": _destination(email, _spec),
    }


def _template(email: OutgoingEmail) -> Parameters:
    template: Parameters = {
        "TemplateName": email.template_id,
        "TemplateData": canonical_data(email.template_data),
    }
    if email.headers:
        template["Headers"] = _template_headers(email)
    if email.attachments:
        template["Attachments"] = [_template_attachment(file) for file in email.attachments]
    return template


def _template_headers(email: OutgoingEmail) -> list[dict[str, str]]:
    if len(email.headers) > MAX_HEADERS:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"SES takes at most {MAX_HEADERS} headers beside a template")
    for name, value in email.headers.items():
        settable(name)
        if not _PRINTABLE.fullmatch(value) or len(name) + len(value) > MAX_HEADER_CHARACTERS:
            raise UnrenderableEmail(
                Reason.INVALID_CONTENT,
                f"header {name} is empty, too long or not ASCII, which a template of SES cannot be",
            )
    return [{"Name": name, "Value": value} for name, value in email.headers.items()]


def _template_attachment(file: OutgoingAttachment) -> Parameters:
    if len(file.content_type) > MAX_CONTENT_TYPE_CHARACTERS:
        raise UnrenderableEmail(
            Reason.INVALID_CONTENT, f"SES takes content types of at most {MAX_CONTENT_TYPE_CHARACTERS} characters"
        )
    return {
        "FileName": file.filename,
        "ContentType": file.content_type,
        "ContentDisposition": "ATTACHMENT",
        "ContentTransferEncoding": "BASE64",
        "RawContent": file.content,
    }


def _destination(email: OutgoingEmail, form: Callable[[str], str]) -> dict[str, list[str]]:
    fields = {"ToAddresses": email.to, "CcAddresses": email.cc, "BccAddresses": email.bcc}
    return {name: [form(address) for address in addresses] for name, addresses in fields.items() if addresses}


def mailbox_of(text: str) -> str:
    """An address as in a header, on one line; raises ValueError if it is none."""
    return mailbox(parse_address(text)).replace("\r\n", "")


def _spec(text: str) -> str:
    return ascii_spec(parse_address(text))
