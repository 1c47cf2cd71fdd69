"""An email as the body of SendGrid's `POST /v3/mail/send`, built with python-sendgrid's helpers.

SendGrid's description: https://www.twilio.com/docs/sendgrid/api-reference/mail-send/mail-send, its refusals:
…/mail-send/errors. What it refuses for certain is refused here; what it would misread is written so that it cannot:

    names of recipients   quoted where they hold a special: SendGrid takes a bare `Doe, Ann` for two addresses and drops
                          the email after accepting it (sendgrid-python#291); names of senders it quotes itself
    no `to`               it wants one: those in cc stand there instead; with bcc alone each gets a message of its own
    the same address      twice over to, cc, bcc is refused: the first stays
    categories            those tags that it takes: ASCII
    header values         encoded words where they are not ASCII, which SendGrid leaves to us
    custom args           per personalization, `email_id` alone: they are kept by SendGrid, readable to its staff
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from typing import Any, Final

import orjson
from sendgrid.helpers import mail as helpers

from dispatcher.domain.address import Address, parse_address
from dispatcher.domain.email_rules import RESERVED_HEADER_PREFIXES, RESERVED_HEADERS
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import Attachment, OutgoingEmail
from dispatcher.providers.mime_headers import UnrenderableEmail, ascii_domain, ascii_spec, checked, quoted, text_field

MAX_CATEGORIES: Final = 10
MAX_CATEGORY_CHARACTERS: Final = 255

_MISREAD_IN_NAMES: Final = re.compile(r'[()<>\[\]:;@\\,"]')
_WORD: Final = r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,127}"
_CONTENT_TYPE: Final = re.compile(rf"{_WORD}/{_WORD}")
_FOLD: Final = "\r\n "

Document = dict[str, Any]


def body_of(email: OutgoingEmail, *, sandbox: bool = False) -> bytes:
    """The request's body.

    Args:
        sandbox: SendGrid validates the email, and delivers it to nobody.

    Raises:
        UnrenderableEmail: SendGrid would refuse it, or enqueue should have; says which field, and nothing of its value.
    """
    try:
        return orjson.dumps(document_of(email, sandbox=sandbox))
    except orjson.JSONEncodeError as error:
        # A lone surrogate, or data for a template that is no JSON; orjson's words name types only.
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"the email is not JSON: {error}") from None


def document_of(email: OutgoingEmail, *, sandbox: bool = False) -> Document:
    """The body before it is encoded."""
    sender = _addresses("from", (email.sender,), Reason.REJECTED_SENDER)[0]
    envelopes = _envelopes(email)
    mail = helpers.Mail()
    mail.from_email = _mailbox(helpers.From, sender)
    _add_reply_to(mail, email.reply_to)
    _add_content(mail, email)
    mail.add_header(helpers.Header("Message-ID", f"<{email.email_id}@{ascii_domain(sender.domain)}>"))
    for name, value in email.headers.items():
        mail.add_header(helpers.Header(name, _header_value(name, value)))
    for tag in _categories(email.tags):
        mail.add_category(helpers.Category(tag))
    # The helpers put each one before those added earlier.
    for file in reversed(email.attachments):
        mail.add_attachment(_attachment(file))
    if sandbox:
        mail.mail_settings = helpers.MailSettings(sandbox_mode=helpers.SandBoxMode(enable=True))
    for _ in envelopes:
        mail.add_personalization(_personalization(email))
    document: Document = mail.get()
    # Given to the helpers, a thousand recipients cost 90 ms: they look for repeats in each pair, and we have none left.
    for personalization, envelope in zip(document["personalizations"], envelopes, strict=True):
        personalization.update(envelope)
    return document


def _addresses(field: str, texts: Iterable[str], reason: Reason) -> list[Address]:
    addresses = []
    for text in texts:
        try:
            address = parse_address(text)
            ascii_domain(address.domain)
        except ValueError as error:
            raise UnrenderableEmail(reason, f"{field} {error}") from None
        checked(f"a name in {field}", address.display_name)
        addresses.append(address)
    return addresses


def _envelopes(email: OutgoingEmail) -> list[Document]:
    """Who gets the email: one message to all, or with bcc alone a message to each."""
    seen: set[str] = set()
    to, cc, bcc = (
        [
            _mailbox(kind, address, is_recipient=True)
            for address in _addresses(field, texts, Reason.REJECTED_RECIPIENT)
            if _is_new(ascii_spec(address).lower(), seen)
        ]
        for field, texts, kind in (
            ("to", email.to, helpers.To),
            ("cc", email.cc, helpers.Cc),
            ("bcc", email.bcc, helpers.Bcc),
        )
    )
    if not (to or cc or bcc):
        raise UnrenderableEmail(Reason.REJECTED_RECIPIENT, "to, cc and bcc are empty")
    if not (to or cc):
        return [{"to": [mailbox.get()]} for mailbox in bcc]
    if not to:
        to, cc = cc, to
    fields = {"to": to, "cc": cc, "bcc": bcc}
    return [{field: [mailbox.get() for mailbox in listed] for field, listed in fields.items() if listed}]


def _is_new(spec: str, seen: set[str]) -> bool:
    """Whether an address comes for the first time; SendGrid looks at no letter's case when it counts repeats."""
    is_new = spec not in seen
    seen.add(spec)
    return is_new


def _mailbox(kind: type[Any], address: Address, *, is_recipient: bool = False) -> Any:
    # Its constructor would parse the address again, and guess.
    mailbox = kind()
    mailbox.email = ascii_spec(address)
    if name := address.display_name:
        mailbox.name = quoted(name) if is_recipient and _MISREAD_IN_NAMES.search(name) else name
    return mailbox


def _personalization(email: OutgoingEmail) -> Any:
    personalization = helpers.Personalization()
    personalization.add_custom_arg(helpers.CustomArg("email_id", str(email.email_id)))
    if email.template_id is not None:
        personalization.dynamic_template_data = dict(email.template_data)
    return personalization


def _add_reply_to(mail: Any, texts: Iterable[str]) -> None:
    seen: set[str] = set()
    addresses = _addresses("reply_to", texts, Reason.INVALID_CONTENT)
    mailboxes = [_mailbox(helpers.ReplyTo, one) for one in addresses if _is_new(ascii_spec(one).lower(), seen)]
    if len(mailboxes) == 1:
        mail.reply_to = mailboxes[0]
    elif mailboxes:
        # Not both: SendGrid takes either.
        mail.reply_to_list = mailboxes


def _add_content(mail: Any, email: OutgoingEmail) -> None:
    """Subject and bodies; a template may stand for any of them."""
    if email.template_id is not None:
        mail.template_id = helpers.TemplateId(email.template_id)
    elif not email.subject:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "subject is empty, and SendGrid takes none without")
    elif not (email.text or email.html):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "text and html are empty")
    if email.subject:
        mail.subject = helpers.Subject(checked("subject", email.subject))
    try:
        if email.text:
            mail.add_content(helpers.Content("text/plain", email.text))
        if email.html:
            mail.add_content(helpers.Content("text/html", email.html))
    except helpers.exceptions.ApiKeyIncludedException:
        raise UnrenderableEmail(
            Reason.INVALID_CONTENT, "text or html begins with what looks like a SendGrid API key"
        ) from None


def _header_value(name: str, value: str) -> str:
    if name.lower() in RESERVED_HEADERS or name.lower().startswith(RESERVED_HEADER_PREFIXES):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, f"headers holds {name}, which an email may not set itself")
    return text_field(name, value)[len(name) + 2 : -2].replace(_FOLD, " ")


def _categories(tags: Iterable[str]) -> list[str]:
    fit = [tag for tag in dict.fromkeys(tags) if tag.isascii() and 0 < len(tag) <= MAX_CATEGORY_CHARACTERS]
    return fit[:MAX_CATEGORIES]


def _attachment(file: Attachment) -> Any:
    if not _CONTENT_TYPE.fullmatch(checked("an attachment's content_type", file.content_type)):
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment's content_type is not a MIME type")
    filename = checked("an attachment's filename", file.filename)
    if not file.content:
        raise UnrenderableEmail(Reason.INVALID_CONTENT, "an attachment is empty, and SendGrid takes none")
    # RFC 2046, sections 5.1 and 5.2.1: these may not be in Base64, which SendGrid puts every attachment in.
    is_composite = file.content_type.lower().startswith(("message/", "multipart/"))
    return helpers.Attachment(
        helpers.FileContent(b64encode(file.content).decode("ascii")),
        helpers.FileName(filename),
        helpers.FileType("application/octet-stream" if is_composite else file.content_type),
        helpers.Disposition("attachment"),
    )
