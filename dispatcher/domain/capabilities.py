"""What a provider can carry, and what one email needs of it.

Each provider declares its `Capabilities` in its class. Routing asks before it chooses a provider.
`enqueue`, the HTTP API and the worker ask whether any configured provider could ever carry the email.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from dispatcher.domain.address import parse_address
from dispatcher.domain.email import Email
from dispatcher.domain.outgoing import OutgoingEmail

AnyEmail = Email | OutgoingEmail


class Need(Enum):
    """What an email may need of a provider."""

    TEMPLATES = auto()
    RECIPIENTS = auto()
    OCTETS = auto()
    SMTPUTF8 = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a provider can carry, as far as that is known before it is asked.

    A limit of None, and True where the provider alone can say, leave the judgement to the adapter and the provider.

    Attributes:
        copies: The most memory that reading and sending an attachment takes, as a multiple of its size. Measure it for
            each adapter: there is no safe default.
        templates: The provider fills in templates (`template_id`).
        smtputf8: The provider takes addresses with letters before the @ that are not ASCII.
        max_recipients: Over to, cc and bcc.
        max_octets: Of the whole email, encoded.
        delivers: Emails reach their recipients; else nobody is advised to use it.
    """

    copies: int
    templates: bool = False
    smtputf8: bool = True
    max_recipients: int | None = None
    max_octets: int | None = None
    delivers: bool = True

    def lacks(self, email: AnyEmail) -> Need | None:
        """The first need of the email that the provider cannot meet; None if it can carry the email."""
        if email.template_id is not None and not self.templates:
            return Need.TEMPLATES
        if self.max_recipients is not None and recipients_of(email) > self.max_recipients:
            return Need.RECIPIENTS
        # Bodies alone stay far below every limit (see email_rules.MAX_BODY_OCTETS).
        if self.max_octets is not None and email.attachments and octets_of(email) > self.max_octets:
            return Need.OCTETS
        if not self.smtputf8 and smtputf8_field(email) is not None:
            return Need.SMTPUTF8
        return None


def recipients_of(email: AnyEmail) -> int:
    """How many recipients the email has."""
    return len(email.to) + len(email.cc) + len(email.bcc)


def octets_of(email: AnyEmail) -> int:
    """How many octets the email has at least once it is encoded: attachments travel in Base64."""
    files = sum(len(file.content) for file in email.attachments)
    return files * 4 // 3 + len(email.text or "") + len(email.html or "")


def smtputf8_field(email: AnyEmail) -> str | None:
    """The first field with an address that needs SMTPUTF8 (RFC 6531); None if there is none."""
    if "".join((email.sender, *email.to, *email.cc, *email.bcc, *email.reply_to)).isascii():  # as nearly always
        return None
    return next((field for field, text in _addresses(email) if not _is_ascii(text)), None)


def _addresses(email: AnyEmail) -> Iterator[tuple[str, str]]:
    yield "from", email.sender
    for field in ("to", "cc", "bcc", "reply_to"):
        for text in getattr(email, field):
            yield field, text


def _is_ascii(address: str) -> bool:
    """Whether the part before the @ is; a name may have any letters, and a domain has an ASCII form."""
    return address.isascii() or parse_address(address).local.isascii()
