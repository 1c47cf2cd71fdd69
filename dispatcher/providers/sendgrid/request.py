"""SendGrid's `POST /v3/mail/send`: the headers and the document that python-sendgrid would send.

We build the document directly, because python-sendgrid creates an object for each field, which takes a sixth of a
worker's CPU for an email. Tests compare our headers and our document with python-sendgrid's.

SendGrid describes the request at https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send, and the errors
at …/mail-send/errors. This module rejects what SendGrid would refuse, and rewrites what SendGrid would misread:

    recipients' names     quoted if they contain a special character: SendGrid reads a bare `Doe, Ann` as two addresses
                          and drops the email after accepting it (sendgrid-python#291). SendGrid quotes senders' names
                          itself.
    no `to`               SendGrid requires `to`: the cc addresses become `to`. If there is only bcc, each recipient
                          gets a separate email.
    repeated addresses    SendGrid refuses an address that occurs twice in to, cc and bcc: only the first is kept
    categories            only the tags that SendGrid accepts: ASCII
    header values         encoded words if they are not ASCII, because SendGrid does not encode them
    inline images         the disposition `inline` and a `content_id`
    calendar              the last entry of `content`, whose type has the METHOD, and the attachment invite.ics, whose
                          type may have no parameters
    custom args           only `email_id`, in each personalization: SendGrid stores custom args, and its staff can read
                          them

Several emails with the same template can be sent in one request, with one personalization for each email. SendGrid's
limits, from …/mail-send/limitations: 1,000 personalizations and 1,000 recipients per request, and no address twice.
Fields outside the personalizations are shared: sender, reply-to, template, categories. Message-ID, other headers,
subject, template data and the argument `email_id` are separate for each email.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final, NamedTuple
from unicodedata import normalize
from uuid import UUID

import orjson

from dispatcher.domain.address import Address, is_plain
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.providers.contract import BulkEntry, BulkLimits
from dispatcher.transport.body import Body, with_attachments
from dispatcher.transport.mime import calendar_file
from dispatcher.transport.mime_headers import (
    UnrenderableEmail,
    addresses,
    ascii_domain,
    ascii_spec,
    checked_text,
    header_value,
    quoted,
    type_in_base64,
)

LIMITS: Final = BulkLimits(emails=1000, recipients=1000, octets=4 * 1024 * 1024)
"""SendGrid's limits for emails and recipients. The limit for octets is ours, so that one call does not block the loop
and the connection for long."""
MAX_CATEGORIES: Final = 10
MAX_CATEGORY_CHARACTERS: Final = 255

_MISREAD_IN_NAMES: Final = re.compile(r'[()<>\[\]:;@\\,"]')
_USER_AGENT: Final = f"sendgrid/{version('sendgrid')};python"
_API_KEY_BEGIN: Final = "SG."
_API_KEY: Final = re.compile(r"SG\.[0-9a-zA-Z]+\.[0-9a-zA-Z]+")

Document = dict[str, Any]


def http_headers_of(api_key: str) -> dict[str, str]:
    """The headers of python-sendgrid's client, without the import of python-sendgrid, which also loads cryptography."""
    return {
        "Authorization": f"Bearer {api_key}",
        "User-Agent": _USER_AGENT,
        "Accept": "application/json",
        "Content-Type": "application/json",
    }


def body_of(email: OutgoingEmail, *, sandbox: bool = False) -> bytes | Body:
    """The request body. A body with attachments is in parts, so the attachments are not copied in memory."""
    try:
        body = orjson.dumps(document_of(email, sandbox=sandbox))
        if not email.attachments and email.calendar is None:
            return body
        files = email.attachments if email.calendar is None else (calendar_file(email.calendar), *email.attachments)
        return with_attachments(body, [(_described(file), file.content) for file in files])
    except orjson.JSONEncodeError as error:
        # The email contains a lone surrogate, or template data that is not JSON. orjson's error message names only
        # types, so it repeats nothing of the email.
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"the email cannot be encoded as JSON: {error}") from None


def document_of(email: OutgoingEmail, *, sandbox: bool = False) -> Document:
    """The request's JSON document as a Python object, without attachments."""
    personalizations, _ = personalizations_of(email)
    document: Document = {
        "from": _origin(email.sender)[0],
        "personalizations": personalizations,
        "headers": headers_of(email),
    }
    if email.reply_to:
        seen: set[str] = set()
        addresses = _addresses("reply_to", email.reply_to, Reason.INVALID_CONTENT)
        mailboxes = [_mailbox(one) for one in addresses if _is_new(_spelling(one), seen)]
        # SendGrid accepts either `reply_to` or `reply_to_list`, not both.
        document |= {"reply_to": mailboxes[0]} if len(mailboxes) == 1 else {"reply_to_list": mailboxes}
    _add_content(document, email)
    if email.tags:
        tags = dict.fromkeys(email.tags)
        fit = [tag for tag in tags if tag.isascii() and 0 < len(tag) <= MAX_CATEGORY_CHARACTERS]
        if fit:
            document["categories"] = fit[:MAX_CATEGORIES]
    if sandbox:
        document["mail_settings"] = {"sandbox_mode": {"enable": True}}
    return document


@lru_cache(maxsize=256)
def _origin(text: str) -> tuple[Document, str]:
    """The sender as a JSON object, and the sender's domain in ASCII. Cached, because few senders send many emails."""
    sender = _addresses("from", (text,), Reason.REJECTED_SENDER)[0]
    return _mailbox(sender), ascii_domain(sender.domain)


def _addresses(field: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    found = addresses(field, texts, reason)
    for address in found:
        checked_text(f"a name in {field}", address.display_name)
    return found


def personalizations_of(email: OutgoingEmail) -> tuple[list[Document], set[str]]:
    """One personalization for all recipients, or one for each if all are bcc; and the addresses, in lower case, because
    SendGrid ignores case when it searches for repeated addresses."""
    common: Document = {"custom_args": {"email_id": email.email_id}}  # no `str(…)`: orjson encodes a UUID faster
    if email.template_id is not None and email.template_data:
        common["dynamic_template_data"] = dict(email.template_data)
    if len(email.to) == 1 and not (email.cc or email.bcc) and is_plain(email.to[0]):  # the usual case
        return [{"to": [{"email": email.to[0]}], **common}], {email.to[0].lower()}
    seen: set[str] = set()
    return [{**envelope, **common} for envelope in _envelopes(email, seen)], seen


def _envelopes(email: OutgoingEmail, seen: set[str]) -> list[Document]:
    to, cc, bcc = (_recipients("to", email.to, seen), _recipients("cc", email.cc, seen),
                   _recipients("bcc", email.bcc, seen))  # fmt: skip
    if not (to or cc or bcc):
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, "to, cc and bcc are empty")
    if not (to or cc):
        return [{"to": [mailbox]} for mailbox in bcc]
    if not to:
        to, cc = cc, to
    fields = {"to": to, "cc": cc, "bcc": bcc}
    return [{field: listed for field, listed in fields.items() if listed}]


def _recipients(field: str, texts: Sequence[str], seen: set[str]) -> list[Document]:
    if not texts:
        return []
    if all(map(is_plain, texts)):  # the usual case
        return [{"email": text} for text in texts if _is_new(text.lower(), seen)]
    addresses = _addresses(field, texts, Reason.REJECTED_RECIPIENT)
    return [_mailbox(one, is_recipient=True) for one in addresses if _is_new(_spelling(one), seen)]


def _spelling(address: Address) -> str:
    """The form of an address that all its spellings share: in lower case, composed."""
    return normalize("NFC", ascii_spec(address).lower())


def _is_new(spec: str, seen: set[str]) -> bool:
    """Whether an address occurs for the first time; adds the address to `seen`."""
    is_new = spec not in seen
    seen.add(spec)
    return is_new


def _mailbox(address: Address, *, is_recipient: bool = False) -> Document:
    name = address.display_name
    if not name:
        return {"email": ascii_spec(address)}
    return {
        "email": ascii_spec(address),
        "name": quoted(name) if is_recipient and _MISREAD_IN_NAMES.search(name) else name,
    }


def _add_content(document: Document, email: OutgoingEmail) -> None:
    """Adds the subject, the bodies and the template's id. With a template, subject and bodies are optional."""
    if email.template_id is not None:
        document["template_id"] = email.template_id
    elif not email.subject:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "subject is empty, and SendGrid requires a subject")
    elif not (email.text or email.html):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text and html are empty")
    if email.subject:
        document["subject"] = checked_text("subject", email.subject)
    content = []
    if email.text:
        content.append({"type": "text/plain", "value": _body(email.text)})
    if email.html:
        content.append({"type": "text/html", "value": _body(email.html)})
    if (calendar := email.calendar) is not None:
        method = checked_text("the calendar's method", calendar.method)
        content.append({"type": f"text/calendar; method={method}", "value": calendar.content})
    if content:
        document["content"] = content


def _body(text: str) -> str:
    # Do not send an API key to a recipient. python-sendgrid makes the same check.
    if text.startswith(_API_KEY_BEGIN) and _API_KEY.match(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text or html begins with a SendGrid API key; remove the key")
    return text


def headers_of(email: OutgoingEmail) -> dict[str, str]:
    """The email's headers, including Message-ID."""
    email_id = orjson.dumps(email.email_id)[1:-1].decode()  # `str` takes three times as long
    headers = {"Message-ID": f"<{email_id}@{_origin(email.sender)[1]}>"}
    if email.headers:
        headers |= {name: header_value(name, value) for name, value in email.headers.items()}
    return headers


def _described(file: OutgoingAttachment) -> Document:
    """The fields of an attachment except its content."""
    content_type = type_in_base64(file.content_type)
    filename = checked_text("an attachment's filename", file.filename)
    if not file.content:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment is empty, which SendGrid refuses")
    if file.content_id is not None:
        content_id = checked_text("a content_id", file.content_id)
        return {"type": content_type, "filename": filename, "disposition": "inline", "content_id": content_id}
    return {"type": content_type, "filename": filename, "disposition": "attachment"}


class Personalized(NamedTuple):
    """What one email contributes to a bulk call, as JSON."""

    common: bytes  # the fields outside the personalizations, which are equal for all emails of the call
    personalizations: tuple[bytes, ...]  # several only if all recipients are bcc


def bulk_entry_of(email: OutgoingEmail, *, sandbox: bool) -> BulkEntry | None:
    """The email as an entry of a bulk call; None if it has no template, has content, or cannot be rendered."""
    if email.template_id is None or email.attachments or email.text or email.html:
        return None
    try:
        common = _common(email.sender, email.reply_to, email.template_id, email.tags, sandbox)
        messages, addresses = personalizations_of(email)
        # The email's own headers and subject are inside the personalization in a bulk call, otherwise outside.
        own: Document = {"headers": headers_of(email)}
        if email.subject:
            own["subject"] = checked_text("subject", email.subject)
        personalizations = tuple([orjson.dumps(message | own) for message in messages])
    except (UnrenderableEmail, orjson.JSONEncodeError):
        return None
    return BulkEntry(
        key=common,
        recipients=len(addresses),
        octets=sum(map(len, personalizations)),
        content=Personalized(common, personalizations),
        addresses=frozenset(addresses),
    )


def bulk_body_of(parts: Sequence[BulkEntry]) -> bytes:
    """The body of a bulk call."""
    contents: list[Personalized] = [part.content for part in parts]
    people = b",".join(each for content in contents for each in content.personalizations)
    return b"".join((b'{"personalizations":[', people, b"],", contents[0].common[1:]))


@lru_cache(maxsize=256)
def _common(sender: str, reply_to: tuple[str, ...], template_id: str, tags: tuple[str, ...], sandbox: bool) -> bytes:
    pattern = OutgoingEmail(
        email_id=UUID(int=0),
        created_at=datetime.fromtimestamp(0, UTC),
        sender=sender,
        to=("nobody@example.org",),
        subject="",
        template_id=template_id,
        reply_to=reply_to,
        tags=tags,
    )
    document = document_of(pattern, sandbox=sandbox)
    del document["personalizations"], document["headers"]
    return orjson.dumps(document)
