"""The body of Resend's `POST /emails`: https://resend.com/docs/api-reference/emails/send-email

Two attempts for the same email must have the same body, or Resend refuses the second attempt (409). So the body depends
only on the email.

This module rejects what Resend would refuse, and rewrites what Resend would misread:

    names          quoted if they contain a special character
    no `to`        Resend requires `to`: cc addresses, or a single bcc, become `to`. Several recipients that are all bcc
                   would see each other, so such an email is rejected, and routing tries the next provider.
    header values  encoded words if they are not ASCII
    inline images  `content_id`. Resend has no alternatives, so it sends no calendar.
    tags           `email_id`, then tag_1, tag_2 …, with `_` for each character that Resend does not allow
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import orjson

from dispatcher.domain.address import is_plain
from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.transport.body import Body, with_attachments
from dispatcher.transport.mime_headers import (
    UnrenderableEmail,
    addresses,
    ascii_spec,
    checked_text,
    header_value,
    quoted,
    type_in_base64,
)

MAX_RECIPIENTS: Final = 50
MAX_OCTETS: Final = 40 * 1024 * 1024
"""Resend's limit for an email, including its attachments in Base64."""
MAX_TAGS: Final = 10
MAX_TAG_CHARACTERS: Final = 256

_SPECIAL_IN_NAMES: Final = re.compile(r'[()<>\[\]:;@\\,."]')
_NOT_IN_TAGS: Final = re.compile(r"[^A-Za-z0-9_-]")

Document = dict[str, Any]


def body_of(email: OutgoingEmail) -> bytes | Body:
    """The request body. A body with attachments is in parts, so the attachments are not copied in memory."""
    try:
        body = orjson.dumps(document_of(email), option=orjson.OPT_SORT_KEYS)
        files = [(_described(file), file.content) for file in email.attachments]
        return with_attachments(body, files) if files else body
    except orjson.JSONEncodeError as error:
        # The email contains a lone surrogate, or template data that is not JSON. orjson's error message names only
        # types, so it repeats nothing of the email.
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"the email cannot be encoded as JSON: {error}") from None


def document_of(email: OutgoingEmail) -> Document:
    """The request's JSON document as a Python object, without attachments."""
    tags = [_NOT_IN_TAGS.sub("_", tag)[:MAX_TAG_CHARACTERS] for tag in dict.fromkeys(email.tags) if tag]
    document: Document = {
        "from": _mailboxes("from", (email.sender,), Reason.REJECTED_SENDER)[0],
        **_recipients(email),
        "tags": [
            {"name": "email_id", "value": str(email.email_id)},
            *({"name": f"tag_{number}", "value": value} for number, value in enumerate(tags[:MAX_TAGS], 1)),
        ],
    }
    if email.reply_to:
        document["reply_to"] = _mailboxes("reply_to", email.reply_to, Reason.INVALID_CONTENT)
    if email.headers:
        document["headers"] = {name: header_value(name, value) for name, value in email.headers.items()}
    _add_content(document, email)
    return document


def _recipients(email: OutgoingEmail) -> Document:
    if recipients_of(email) > MAX_RECIPIENTS:
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, f"to, cc and bcc have more than {MAX_RECIPIENTS} recipients")
    to, cc, bcc = (
        _mailboxes(field, texts, Reason.REJECTED_RECIPIENT)
        for field, texts in (("to", email.to), ("cc", email.cc), ("bcc", email.bcc))
    )
    if not to and cc:
        to, cc = cc, []
    elif not to and len(bcc) == 1:
        to, bcc = bcc, []
    if not to:
        words = "to and cc are empty, and Resend requires a recipient that is not bcc"
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, words)
    return {field: found for field, found in (("to", to), ("cc", cc), ("bcc", bcc)) if found}


def _mailboxes(field: str, texts: Sequence[str], reason: Reason) -> list[str]:
    if all(map(is_plain, texts)):  # the usual case
        return list(texts)
    found = []
    for address in addresses(field, texts, reason):
        name, spec = checked_text(f"a name in {field}", address.display_name), ascii_spec(address)
        shown = quoted(name) if _SPECIAL_IN_NAMES.search(name) else name
        found.append(f"{shown} <{spec}>" if name else spec)
    return found


def _add_content(document: Document, email: OutgoingEmail) -> None:
    """Adds the subject and the bodies, or the template, which replaces the bodies."""
    if email.subject:
        document["subject"] = checked_text("subject", email.subject)
    if email.template_id is not None:
        document["template"] = {"id": email.template_id, "variables": dict(email.template_data)}
    elif not email.subject:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "subject is empty, and Resend requires a subject")
    elif not (email.text or email.html):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text and html are empty")
    else:
        document |= {field: body for field, body in (("text", email.text), ("html", email.html)) if body}


def _described(file: OutgoingAttachment) -> Document:
    """The fields of an attachment except its content."""
    content_type = type_in_base64(file.content_type)
    filename = checked_text("an attachment's filename", file.filename)
    if not file.content:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment is empty, which Resend refuses")
    inline = {} if file.content_id is None else {"content_id": checked_text("a content_id", file.content_id)}
    return {"content_type": content_type, "filename": filename, **inline}
