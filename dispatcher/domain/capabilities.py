"""What a provider supports, and what one email requires.

Each provider class declares its `Capabilities`. Routing checks the capabilities before it chooses a provider.
`enqueue`, the HTTP API and the worker check whether any configured provider can send the email.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Final

from dispatcher.domain.address import parse_address
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, OutgoingEmail
from dispatcher.domain.raw_mime import head_of
from dispatcher.domain.values import dataclass

AnyEmail = Message | OutgoingEmail


class Requirement(Enum):
    """A capability that an email may require from its provider."""

    CHANNEL = auto()
    TEMPLATES = auto()
    RAW = auto()
    CALENDAR = auto()
    INLINE_PARTS = auto()
    RECIPIENTS = auto()
    OCTETS = auto()
    SMTPUTF8 = auto()
    LOCAL_OCTETS = auto()
    EMPTY_SUBJECT = auto()
    EMPTY_FILES = auto()
    ONLY_BCC = auto()
    TEMPLATE_HEADERS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a provider supports, as far as this is certain before we send an email.

    Some capabilities depend on the provider's account. Then the limit here is None or the flag is True, and the adapter
    or the provider refuses an email that needs more.

    Attributes:
        channel: What the provider sends: `email`, `sms`, or a channel that a package adds.
        copies: Peak memory for reading and sending an attachment, as a multiple of the attachment's size. There is no
            default, because each adapter must be measured.
        templates: The provider renders templates (`template_id`).
        inline_parts: The provider sends attachments with a content id as inline images.
        calendar: The provider sends a calendar object as an alternative to the bodies and as a file.
        raw_mime: The provider sends a MIME message as it is (`raw`), to an envelope that may differ from its headers.
        smtputf8: The provider accepts addresses with non-ASCII characters before the @.
        max_recipients: The most recipients in to, cc and bcc together.
        max_octets: The most octets of the whole encoded email.
        max_local_octets: The most octets before the @ of an address. None: the recipient's server decides.
        refuses: What the provider refuses, although most providers accept it: keys of `UNUSUAL`.
        delivers: The provider delivers emails to their recipients; False for `capture`, which only writes files. Error
            messages recommend only providers that deliver.
        idempotency_key_seconds: How long the provider remembers an idempotency key (the email's id) after the first
            request. If a request with the same key and content follows, the provider repeats its first answer and
            delivers nothing. So after an `Uncertain` outcome, the email may be tried again at this provider. None if
            the provider has no idempotency keys.
    """

    copies: int
    channel: str = EMAIL_CHANNEL
    templates: bool = False
    inline_parts: bool = False
    calendar: bool = False
    raw_mime: bool = False
    smtputf8: bool = True
    max_recipients: int | None = None
    max_octets: int | None = None
    max_local_octets: int | None = None
    refuses: tuple[Requirement, ...] = ()
    delivers: bool = True
    idempotency_key_seconds: float | None = None

    def unmet_requirement(self, email: AnyEmail) -> Requirement | None:
        """The first requirement of the email that the provider does not meet; None if the provider can send the
        email."""
        if email.channel != self.channel:
            return Requirement.CHANNEL
        if email.template_id is not None and not self.templates:
            return Requirement.TEMPLATES
        if need := self._unmet_part(email) if email.attachments or email.calendar or email.raw else None:
            return need
        if self.max_recipients is not None and recipients_of(email) > self.max_recipients:
            return Requirement.RECIPIENTS
        if not self.smtputf8 and smtputf8_field(email) is not None:
            return Requirement.SMTPUTF8
        if self.max_local_octets is not None and long_local_field(email, self.max_local_octets) is not None:
            return Requirement.LOCAL_OCTETS
        # Nearly every email has a subject, `to`, and neither files nor headers. Such an email needs nothing unusual.
        if self.refuses and (
            email.attachments or email.headers or not email.to or not (email.subject or email.template_id)
        ):
            return next((need for need in self.refuses if UNUSUAL[need](email)), None)
        return None

    def _unmet_part(self, email: AnyEmail) -> Requirement | None:
        if email.raw is not None and not self.raw_mime:
            return Requirement.RAW
        if email.calendar is not None and not self.calendar:
            return Requirement.CALENDAR
        if not self.inline_parts and any(file.content_id is not None for file in email.attachments):
            return Requirement.INLINE_PARTS
        # An email without such parts is far below every provider's limit (see email_rules.MAX_BODY_OCTETS).
        return Requirement.OCTETS if self.max_octets is not None and octets_of(email) > self.max_octets else None


UNUSUAL: Final[Mapping[Requirement, Callable[[AnyEmail], bool]]] = {
    Requirement.EMPTY_SUBJECT: lambda email: not email.subject and email.template_id is None,
    Requirement.EMPTY_FILES: lambda email: not all(file.content for file in email.attachments),
    Requirement.ONLY_BCC: lambda email: len(email.bcc) > 1 and not (email.to or email.cc),
    Requirement.TEMPLATE_HEADERS: lambda email: (
        email.template_id is not None
        and (len(email.headers) > 15 or not all(value and value.isascii() for value in email.headers.values()))
    ),
}
"""Whether an email has what some providers refuse. Any email that does has files or headers, no `to`, or no subject."""


def recipients_of(email: AnyEmail) -> int:
    """The number of recipients in to, cc and bcc."""
    return len(email.to) + len(email.cc) + len(email.bcc)


def octets_of(email: AnyEmail) -> int:
    """A lower bound for the size of the encoded email, in octets. Attachments count as base64."""
    files = sum(len(file.content) for file in email.attachments)
    return files * 4 // 3 + len(email.text or "") + len(email.html or "") + len(email.raw or b"")


def smtputf8_field(email: AnyEmail) -> str | None:
    """The first field with an address that needs SMTPUTF8 (RFC 6531), or `raw` if its headers do; None if none does."""
    if email.raw is not None and not head_of(email.raw).isascii():
        return "raw"
    if "".join((email.sender, *email.to, *email.cc, *email.bcc, *email.reply_to)).isascii():  # the common case
        return None
    return next((field for field, text in _addresses(email) if not has_ascii_local_part(text)), None)


def long_local_field(email: AnyEmail, most: int) -> str | None:
    """The name of the first field with an address of more than `most` octets before the @; None if there is none."""
    texts = (email.sender, *email.to, *email.cc, *email.bcc, *email.reply_to)
    if max(map(len, texts)) < most and "".join(texts).isascii():  # the common case
        return None
    locals_of = ((field, text[text.rfind("<") + 1 : text.rfind("@")]) for field, text in _addresses(email))
    return next((field for field, local in locals_of if len(local.encode(errors="replace")) > most), None)


def _addresses(email: AnyEmail) -> Iterator[tuple[str, str]]:
    yield "from", email.sender
    for field in ("to", "cc", "bcc", "reply_to"):
        for text in getattr(email, field):
            yield field, text


def has_ascii_local_part(address: str) -> bool:
    """Whether the part before the @ is ASCII. Only this part needs SMTPUTF8: domains have an ASCII form, and display
    names are encoded."""
    return address.isascii() or parse_address(address).local.isascii()
