"""An email as the body of SendGrid's `POST /v3/mail/send`: the document that python-sendgrid's helpers would build.

Built directly, because theirs takes an object per field: a sixth of all that a worker spends on an email. A test holds
the two against each other.

SendGrid's description: https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send, its refusals:
…/mail-send/errors. What it refuses for certain is refused here; what it would misread is written so that it cannot:

    names of recipients   quoted where they hold a special: SendGrid takes a bare `Doe, Ann` for two addresses and drops
                          the email after accepting it (sendgrid-python#291); names of senders it quotes itself
    no `to`               it wants one: those in cc stand there instead; with bcc alone each gets a message of its own
    the same address      twice over to, cc, bcc is refused: the first stays
    categories            those tags that it takes: ASCII
    header values         encoded words where they are not ASCII, which SendGrid leaves to us
    custom args           per personalization, `email_id` alone: they are kept by SendGrid, readable to its staff

Several emails of one template may share a request: a personalization each. SendGrid's limits, from
…/mail-send/limitations: 1,000 personalizations and 1,000 recipients in a request, and no address twice in it. What
stands outside the personalizations is common: sender, reply-to, template, categories. Message-ID, other headers,
subject, data and the argument `email_id` are each email's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from uuid import UUID

import orjson

from dispatcher.domain.address import Address, is_plain
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.providers.contract import CallLimits, Part
from dispatcher.transport.body import Body, InBase64
from dispatcher.transport.mime_headers import (
    UnrenderableEmail,
    addresses,
    ascii_domain,
    ascii_spec,
    checked,
    checked_type,
    quoted,
    settable,
    text_field,
)

LIMITS: Final = CallLimits(emails=1000, recipients=1000, octets=4 * 1024 * 1024)
"""SendGrid's; the octets are ours, so that one call does not keep the loop and the line for long."""
MAX_CATEGORIES: Final = 10
MAX_CATEGORY_CHARACTERS: Final = 255

_MISREAD_IN_NAMES: Final = re.compile(r'[()<>\[\]:;@\\,"]')
_FOLD: Final = "\r\n "
_API_KEY_BEGIN: Final = "SG."
_API_KEY: Final = re.compile(r"SG\.[0-9a-zA-Z]+\.[0-9a-zA-Z]+")

Document = dict[str, Any]


def body_of(email: OutgoingEmail, *, sandbox: bool = False) -> bytes | Body:
    """The request's body. With attachments it is in parts, so that they are never in memory a second time.

    Args:
        sandbox: SendGrid validates the email, and delivers it to nobody.

    Raises:
        UnrenderableEmail: SendGrid would refuse it, or enqueue should have; says which field, and nothing of its value.
    """
    try:
        body = orjson.dumps(document_of(email, sandbox=sandbox))
        return _with_attachments(body, email.attachments) if email.attachments else body
    except orjson.JSONEncodeError as error:
        # A lone surrogate, or data for a template that is no JSON; orjson's words name types only.
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"the email is not JSON: {error}") from None


def document_of(email: OutgoingEmail, *, sandbox: bool = False) -> Document:
    """The body before it is encoded, without attachments."""
    personalizations, _ = personalizations_of(email)
    document: Document = {
        "from": _origin(email.sender)[0],
        "personalizations": personalizations,
        "headers": headers_of(email),
    }
    if email.reply_to:
        _add_reply_to(document, email.reply_to)
    _add_content(document, email)
    if email.tags and (categories := _categories(email.tags)):
        document["categories"] = categories
    if sandbox:
        document["mail_settings"] = {"sandbox_mode": {"enable": True}}
    return document


@lru_cache(maxsize=256)
def _origin(text: str) -> tuple[Document, str]:
    """A sender as the document has it, and its domain as DNS has it. Kept, because few send many emails."""
    sender = _addresses("from", (text,), Reason.REJECTED_SENDER)[0]
    return _mailbox(sender), ascii_domain(sender.domain)


def _addresses(field: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    found = addresses(field, texts, reason)
    for address in found:
        checked(f"a name in {field}", address.display_name)
    return found


def personalizations_of(email: OutgoingEmail) -> tuple[list[Document], set[str]]:
    """Who gets the email, and what is theirs: one message to all, or with bcc alone a message to each.

    Beside them the addresses, in lower case: SendGrid looks at no letter's case when it counts repeats.

    Raises:
        UnrenderableEmail: see `body_of`.
    """
    common: Document = {"custom_args": {"email_id": email.email_id}}  # orjson writes ids, quicker than `str`
    if email.template_id is not None and email.template_data:
        common["dynamic_template_data"] = dict(email.template_data)
    if len(email.to) == 1 and not (email.cc or email.bcc) and is_plain(email.to[0]):  # as most are
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
    if all(map(is_plain, texts)):  # as most are
        return [{"email": text} for text in texts if _is_new(text.lower(), seen)]
    addresses = _addresses(field, texts, Reason.REJECTED_RECIPIENT)
    return [_mailbox(one, is_recipient=True) for one in addresses if _is_new(ascii_spec(one).lower(), seen)]


def _is_new(spec: str, seen: set[str]) -> bool:
    """Whether an address comes for the first time."""
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


def _add_reply_to(document: Document, texts: Sequence[str]) -> None:
    seen: set[str] = set()
    addresses = _addresses("reply_to", texts, Reason.INVALID_CONTENT)
    mailboxes = [_mailbox(one) for one in addresses if _is_new(ascii_spec(one).lower(), seen)]
    # Not both: SendGrid takes either.
    if len(mailboxes) == 1:
        document["reply_to"] = mailboxes[0]
    else:
        document["reply_to_list"] = mailboxes


def _add_content(document: Document, email: OutgoingEmail) -> None:
    """Subject and bodies; a template may stand for any of them."""
    if email.template_id is not None:
        document["template_id"] = email.template_id
    elif not email.subject:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "subject is empty, and SendGrid takes none without")
    elif not (email.text or email.html):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text and html are empty")
    if email.subject:
        document["subject"] = checked("subject", email.subject)
    content = []
    if email.text:
        content.append({"type": "text/plain", "value": _body(email.text)})
    if email.html:
        content.append({"type": "text/html", "value": _body(email.html)})
    if content:
        document["content"] = content


def _body(text: str) -> str:
    # Where python-sendgrid looks for one, which it sends nowhere.
    if text.startswith(_API_KEY_BEGIN) and _API_KEY.match(text):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text or html begins with what looks like a SendGrid API key")
    return text


def headers_of(email: OutgoingEmail) -> dict[str, str]:
    """The email's headers, Message-ID included; raises UnrenderableEmail as `body_of` does."""
    headers = {"Message-ID": f"<{email.email_id}@{_origin(email.sender)[1]}>"}
    if email.headers:
        headers |= {name: _header_value(name, value) for name, value in email.headers.items()}
    return headers


def _header_value(name: str, value: str) -> str:
    return text_field(settable(name), value)[len(name) + 2 : -2].replace(_FOLD, " ")


def _categories(tags: Iterable[str]) -> list[str]:
    fit = [tag for tag in dict.fromkeys(tags) if tag.isascii() and 0 < len(tag) <= MAX_CATEGORY_CHARACTERS]
    return fit[:MAX_CATEGORIES]


def _with_attachments(body: bytes, files: Sequence[OutgoingAttachment]) -> Body:
    """The body with attachments as its last member; Base64 needs no escapes in JSON."""
    parts: list[bytes | InBase64] = []
    before = body[:-1] + b',"attachments":['
    for file in files:
        described = orjson.dumps(_described(file))
        parts += (before + described[:-1] + b',"content":"', InBase64(file.content))
        before = b'"},'
    return Body((*parts, b'"}]}'))


def _described(file: OutgoingAttachment) -> Document:
    """An attachment without its content."""
    content_type = checked_type(file.content_type)
    filename = checked("an attachment's filename", file.filename)
    if not file.content:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment is empty, and SendGrid takes none")
    # RFC 2046, sections 5.1 and 5.2.1: these may not be in Base64, which SendGrid puts every attachment in.
    is_composite = content_type.lower().startswith(("message/", "multipart/"))
    return {
        "type": "application/octet-stream" if is_composite else content_type,
        "filename": filename,
        "disposition": "attachment",
    }


class Personalized(NamedTuple):
    """What an email adds to a call.

    Attributes:
        common: The request's fields outside the personalizations, as JSON with its braces.
        personalizations: As JSON; several where the email has nobody but bcc.
    """

    common: bytes
    personalizations: tuple[bytes, ...]


def part_of(email: OutgoingEmail, *, sandbox: bool) -> Part | None:
    """The email as part of a call; None where it has no template, has more than it, or cannot be rendered."""
    if email.template_id is None or email.attachments or email.text or email.html:
        return None
    try:
        common = _common(email.sender, email.reply_to, email.template_id, email.tags, sandbox)
        messages, addresses = personalizations_of(email)
        own = _own(email)
        personalizations = tuple([orjson.dumps(message | own) for message in messages])
    except (UnrenderableEmail, orjson.JSONEncodeError):
        return None
    return Part(
        key=common,
        recipients=len(addresses),
        octets=sum(map(len, personalizations)),
        content=Personalized(common, personalizations),
        addresses=frozenset(addresses),
    )


def body_of_call(parts: Sequence[Part]) -> bytes:
    """The request's body."""
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


def _own(email: OutgoingEmail) -> dict[str, object]:
    """What stands in the request itself where the email travels alone."""
    own: dict[str, object] = {"headers": headers_of(email)}
    if email.subject:
        own["subject"] = checked("subject", email.subject)
    return own
