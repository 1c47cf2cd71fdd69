"""The parameters of SES v2's SendEmail and SendBulkEmail.

SendEmail takes an email's content in one of three forms. The email determines the form:

    template_id                        Template    SES writes subject and body
    a body, no headers, no files       Simple      SES builds the MIME message
    everything else                    Raw         we build the MIME message, or send the application's own

We encode the parameters ourselves, in a sixtieth of the time of botocore's serializer. A test compares our encoding
with botocore's.

SES replaces Message-ID and Date in all three forms. So SES's events identify the email by the tag `email_id`.

Several emails with the same template can be sent by one SendBulkEmail, with one entry for each email:
https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendBulkEmail.html. SES allows 50 entries per call, and 50
recipients per entry. We allow only 50 recipients per call, because SES's documentation does not say whether its limit
applies to the whole call, too. The entries share sender, reply-to and template. Each entry has its own template data,
headers and tags (including `email_id`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import orjson

from dispatcher.domain.address import Address, is_plain, parse_address
from dispatcher.domain.capabilities import octets_of, recipients_of
from dispatcher.domain.json_data import canonical_data
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.domain.text import body_fault
from dispatcher.providers.contract import BulkEntry, BulkLimits
from dispatcher.transport.body import Base64Body, Base64Content, Body
from dispatcher.transport.mime import render
from dispatcher.transport.mime_headers import (
    UnrenderableEmail,
    ascii_spec,
    checked_text,
    checked_type,
    header_field,
    mailbox,
)

MAX_RECIPIENTS: Final = 50
"""SES's limit for the recipients of an email, in To, Cc and Bcc together:
https://docs.aws.amazon.com/ses/latest/dg/quotas.html"""
MAX_OCTETS: Final = 40 * 1024 * 1024
"""SES's limit for an encoded email: https://docs.aws.amazon.com/ses/latest/dg/quotas.html"""
LIMITS: Final = BulkLimits(emails=50, recipients=MAX_RECIPIENTS, octets=8 * 1024 * 1024)
"""SES's limits for emails and recipients. The limit for octets is ours."""
MAX_DATA_CHARACTERS: Final = 262_144
"""The limit of TemplateData in boto3's model."""
MAX_HEADERS: Final = 15
MAX_HEADER_CHARACTERS: Final = 996
"""The limit for a header's name and value together. MAX_HEADERS and this limit apply to emails with a template and to
bulk entries: see API_MessageHeader, and MessageHeaderList in boto3's model."""
MAX_CONTENT_TYPE_CHARACTERS: Final = 78
"""The limit for attachments of an email with a template: AttachmentContentType in boto3's model."""
EMAIL_ID_TAG: Final = "email_id"

_NOT_IN_TAGS: Final = re.compile(r"[^A-Za-z0-9_-]")
_PRINTABLE: Final = re.compile(r"[ -~]+")

_PLACEHOLDER_PREFIX: Final = secrets.token_hex(24)
"""The prefix of the placeholders for files in a request that is not encoded yet; random, so no email can contain it."""

Parameters = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SesRequest:
    """A request before it is encoded: SES's parameters, with a placeholder for each file."""

    parameters: Parameters
    # what replaces the placeholders, in order: the attachments, or the whole MIME message
    files: Sequence[Base64Content | Base64Body] = ()

    @property
    def body(self) -> bytes | Body:
        """The parameters as JSON, in parts, so the files are not copied in memory."""
        try:
            encoded = orjson.dumps(self.parameters)
        except orjson.JSONEncodeError as error:
            # The email contains a lone surrogate. orjson's error message names only types, so it repeats nothing of the
            # email.
            raise UnrenderableEmail(Reason.INVALID_CONTENT, f"the email cannot be encoded as JSON: {error}") from None
        if not self.files:
            return encoded
        parts: list[bytes | Base64Content | Base64Body] = []
        for number, file in enumerate(self.files):
            before, encoded = encoded.split(_placeholder(number).encode())
            parts += (before, file)
        return Body((*parts, encoded))


def request_for(email: OutgoingEmail, configuration_set: str | None) -> SesRequest:
    """The parameters of SendEmail. Raises UnrenderableEmail, which never quotes a value."""
    if recipients_of(email) > MAX_RECIPIENTS:
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, f"SES accepts at most {MAX_RECIPIENTS} recipients per email")
    if octets_of(email) > MAX_OCTETS:
        raise UnrenderableEmail(Reason.TOO_LARGE, f"SES accepts at most {MAX_OCTETS:,} octets per email")
    files: list[Base64Content | Base64Body] = []
    sender, reply_to = _sender(email.sender), _reply_to(email.reply_to)
    request: Parameters = {
        "EmailTags": _tags(email),
        "Destination": _destination(email, mailbox),
    }
    if configuration_set:
        request["ConfigurationSetName"] = configuration_set
    checked_text("subject", email.subject)
    if email.template_id is not None:
        request["Content"] = {"Template": _template(email, files)}
    elif email.subject and (email.text or email.html) and not (email.headers or email.attachments or email.calendar):
        bodies = {"Text": ("text", email.text), "Html": ("html", email.html)}
        body = {name: _text(field, text) for name, (field, text) in bodies.items() if text}
        request["Content"] = {"Simple": {"Subject": _text("subject", email.subject), "Body": body}}
    else:
        # For a raw email, SES takes the names of the sender and the recipients from the MIME message. The other fields
        # are only the envelope, which includes Bcc, so they contain addresses without names.
        mime = render(email)
        if len(mime.body) > MAX_OCTETS:
            raise UnrenderableEmail(Reason.TOO_LARGE, f"SES accepts at most {MAX_OCTETS:,} octets per email")
        request |= {
            "Content": {"Raw": {"Data": _placeholder_for(Base64Body(mime.body), files)}},
            "FromEmailAddress": mime.sender,
            "Destination": _destination(email, ascii_spec),
        }
        return SesRequest(request, files)
    request["FromEmailAddress"] = sender
    if reply_to:
        request["ReplyToAddresses"] = reply_to
    return SesRequest(request, files)


def bulk_entry_of(email: OutgoingEmail) -> BulkEntry | None:
    """The email as an entry of a bulk call; None if the email has no template, has files, or cannot be rendered."""
    recipients = recipients_of(email)
    if email.template_id is None or email.attachments or recipients > MAX_RECIPIENTS:
        return None
    try:
        data = canonical_data(email.template_data)
        parameters: Parameters = {
            "Destination": _destination(email, mailbox),
            "ReplacementTags": _tags(email),
            "ReplacementEmailContent": {"ReplacementTemplate": {"ReplacementTemplateData": data}},
        }
        if email.headers:
            parameters["ReplacementHeaders"] = _template_headers(email)
        entry = orjson.dumps(parameters)
        _common(email.sender, email.reply_to)
    except (UnrenderableEmail, orjson.JSONEncodeError, ValueError):
        return None
    if len(data) > MAX_DATA_CHARACTERS:
        return None
    return BulkEntry(
        key=(email.sender, email.reply_to, email.template_id),
        recipients=recipients,
        octets=len(entry),
        content=(email.sender, email.reply_to, email.template_id, entry),
    )


def bulk_request_for(parts: Sequence[BulkEntry], configuration_set: str | None) -> SesRequest:
    """The parameters of SendBulkEmail."""
    sender, reply_to, template_id, _ = parts[0].content
    request: Parameters = {
        **_common(sender, reply_to),
        "DefaultContent": {"Template": {"TemplateName": template_id, "TemplateData": "{}"}},
        "BulkEmailEntries": [orjson.Fragment(part.content[-1]) for part in parts],
    }
    if configuration_set:
        request["ConfigurationSetName"] = configuration_set
    return SesRequest(request)


def _common(sender: str, reply_to: Sequence[str]) -> Parameters:
    """The shared parameters of a SendBulkEmail."""
    common: Parameters = {"FromEmailAddress": _sender(sender)}
    if reply_to:
        common["ReplyToAddresses"] = _reply_to(reply_to)
    return common


def _tags(email: OutgoingEmail) -> list[dict[str, str]]:
    """SES's tags: `email_id`, then `tag_1` … with the email's own; `_` replaces characters that SES refuses."""
    tags = [{"Name": EMAIL_ID_TAG, "Value": str(email.email_id)}]
    for number, tag in enumerate(email.tags, 1):
        tags.append({"Name": f"tag_{number}", "Value": _NOT_IN_TAGS.sub("_", tag)})
    return tags


def _text(field: str, text: str) -> dict[str, str]:
    if fault := body_fault(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"{field} {fault}")
    return {"Data": text, "Charset": "UTF-8"}


def _template(email: OutgoingEmail, files: list[Base64Content | Base64Body]) -> Parameters:
    template: Parameters = {
        "TemplateName": email.template_id,
        "TemplateData": canonical_data(email.template_data),
    }
    if email.headers:
        template["Headers"] = _template_headers(email)
    if email.attachments:
        template["Attachments"] = [_template_attachment(file, files) for file in email.attachments]
    return template


def _template_headers(email: OutgoingEmail) -> list[dict[str, str]]:
    if len(email.headers) > MAX_HEADERS:
        words = f"SES accepts at most {MAX_HEADERS} headers in an email with a template"
        raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
    for name, value in email.headers.items():
        header_field(name, value)
        if not _PRINTABLE.fullmatch(value) or len(name) + len(value) > MAX_HEADER_CHARACTERS:
            words = f"header {name} is empty, too long or not ASCII, which SES refuses in an email with a template"
            raise UnrenderableEmail(Reason.INVALID_CONTENT, words)
    return [{"Name": name, "Value": value} for name, value in email.headers.items()]


def _template_attachment(file: OutgoingAttachment, files: list[Base64Content | Base64Body]) -> Parameters:
    if len(checked_type(file.content_type)) > MAX_CONTENT_TYPE_CHARACTERS:
        limit = f"SES accepts at most {MAX_CONTENT_TYPE_CHARACTERS} characters"
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"an attachment's content_type is too long: {limit}")
    return {
        "FileName": checked_text("an attachment's filename", file.filename),
        "ContentType": file.content_type,
        **({"ContentDisposition": "ATTACHMENT"} if file.content_id is None else _inline(file.content_id)),
        "ContentTransferEncoding": "BASE64",
        "RawContent": _placeholder_for(Base64Content(file.content), files),
    }


def _inline(content_id: str) -> Parameters:
    return {"ContentDisposition": "INLINE", "ContentId": checked_text("a content_id", content_id)}


def _placeholder_for(file: Base64Content | Base64Body, files: list[Base64Content | Base64Body]) -> str:
    """Adds a file to `files`. Returns the file's placeholder, which `SesRequest.body` replaces with the content."""
    files.append(file)
    return _placeholder(len(files) - 1)


def _placeholder(number: int) -> str:
    return f"{_PLACEHOLDER_PREFIX}-{number}-"


def _destination(email: OutgoingEmail, form: Callable[[Address], str]) -> dict[str, list[str]]:
    destination = {}
    for name, field, texts in (
        ("ToAddresses", "to", email.to),
        ("CcAddresses", "cc", email.cc),
        ("BccAddresses", "bcc", email.bcc),
    ):
        if texts:
            destination[name] = [_address(field, text, Reason.REJECTED_RECIPIENT, form) for text in texts]
    if not destination:
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, "to, cc and bcc are empty")
    return destination


@lru_cache(maxsize=256)
def _sender(text: str) -> str:
    """The sender in the form of a header. Cached, because few senders send many emails."""
    return _address("from", text, Reason.REJECTED_SENDER, mailbox)


def _reply_to(texts: Sequence[str]) -> list[str]:
    return [_address("reply_to", text, Reason.INVALID_CONTENT, mailbox) for text in texts]


def _address(field: str, text: str, reason: Reason, form: Callable[[Address], str]) -> str:
    """Formats an address with `form`, on one line. Raises UnrenderableEmail if SES cannot use the address."""
    if is_plain(text):  # the usual case
        return text
    try:
        address = parse_address(text)
        formed = form(address).replace("\r\n", "")
    except ValueError as error:
        raise UnrenderableEmail(reason, f"{field} {error}") from None
    if not address.local.isascii():
        words = f"{field} has non-ASCII letters before the @, and SES does not support SMTPUTF8"
        raise UnrenderableEmail(reason, words)
    return formed
