"""Reads what servers return to the envelope sender: delivery status notifications (DSN), feedback reports, and the free
text of older servers.

    multipart/report with message/delivery-status    RFC 3464: one event for each recipient
    multipart/report with message/feedback-report    RFC 5965 (ARF): a complaint, an unsubscription, or neither
    a text from a mail server                        one event for each recipient that the text names; one event
                                                     without a recipient if the text names no recipient
    anything else, such as an auto-reply             proof that the provider accepted the email, and no more

The caller has verified by a token that the message belongs to the email (`domain.bounce_address`). But everybody who
received the email knows the token, and can send a false bounce. So an event names only an address to which the email
was sent, and only an event that names such an address can be a hard bounce.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.parser import BytesParser, HeaderParser
from email.policy import compat32
from email.utils import parsedate_to_datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.echo import NAME_CHARACTERS, PRIVATE_WORD
from dispatcher.domain.provider_event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.scrub import scrub
from dispatcher.events.bounce_class import AFTER_DATA, ENHANCED, REPLY, classify, is_vague
from dispatcher.events.bounce_text import (
    BLANK_LINES,
    MAX_TEXT_CHARACTERS,
    about,
    decoded,
    explanation,
    field,
    is_text,
    kind_of_notice,
    place_of,
)
from dispatcher.store.address_hashes import normalised

PROVIDER: Final = "smtp"
MAX_RECIPIENTS: Final = 1000
"""The most blocks of a report that are read. A report has a block for each recipient, and no email has so many
recipients."""
MAX_BOUNDARIES: Final = 30
"""How often the word `boundary` may occur in a message. A bounce has only a few parts. Python's parser compares each
line with the boundary of each enclosing part, so parsing a message with many nested parts would take many seconds."""
MAX_BLANK_LINES: Final = 20_000
"""The most blank lines in one message. Consecutive blank lines count once. Python's parser creates an object for each
blank line of a delivery status."""
_AT_MOST_LATER: Final = timedelta(days=1)
_AT_MOST_EARLIER: Final = timedelta(days=30)
"""The limits for the time in a notice's Date field, compared with the time of receipt. If the notice's time is later or
earlier than these limits allow, the time of receipt is used."""

_ACTIONS: Final = {
    "delayed": EventKind.DEFERRED,
    "delivered": EventKind.DELIVERED,
    "expanded": EventKind.DELIVERED,
    "relayed": EventKind.ACCEPTED,
}
"""The kind of event for each action of RFC 3464, section 2.3.3. Any other action means a failure. `relayed` means that
the email was passed to a server that sends no DSN."""
_FEEDBACK: Final = {
    "abuse": EventKind.COMPLAINED,
    "fraud": EventKind.COMPLAINED,
    "opt-out": EventKind.UNSUBSCRIBED,
    "opt-out-list": EventKind.UNSUBSCRIBED,
    "not-spam": EventKind.DELIVERED,
}
"""The kind of event for each type of feedback of RFC 5965, section 7.3, and RFC 6430. Reports of other types, such as
`auth-failure`, come from servers and not from recipients. They prove only that the provider accepted the email."""

_LINE_ENDS: Final = re.compile(rb"(?:\r\n|\r|\n){2,}")
_WORD: Final = re.compile(r"[a-z]+")
_DIAGNOSTIC_TYPE: Final = re.compile(r"^[\w.-]{1,40} ?; ?")
_STATUS_TYPES: Final = ("message/delivery-status", "message/global-delivery-status")
Known = tuple[str, ...]
"""The addresses to which the email was sent, normalised."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What a message says about one recipient.

    Attributes:
        is_sent_to: Whether the refused address is the address to which the email was sent. False if, for example, a
            server forwarded the email to a different address, and this address was refused.
        status: The enhanced status code of the notice.
        words: What the servers said about the recipient.
        after_data: Whether the server refused the email only after it had received the content.
    """

    kind: EventKind
    recipient: str | None = None
    is_sent_to: bool = False
    status: str | None = None
    words: str = ""
    after_data: bool = False


def events_of(octets: bytes, email_id: UUID, recipients: Collection[str], received_at: datetime) -> list[ProviderEvent]:
    """The events that a returned message reports. The message arrived at the email's envelope sender.

    Returns at least one event, because the message proves that the provider accepted the email.

    Args:
        octets: The message, or its beginning.
        recipients: The addresses to which the email was sent; empty if they are unknown.
        received_at: When the message arrived here, with a time zone.

    Raises:
        ValueError, RecursionError: The message cannot be parsed.
    """
    if octets.lower().count(b"boundary") > MAX_BOUNDARIES:
        raise ValueError("the message has too many nested parts")
    octets, blank_lines = _LINE_ENDS.subn(b"\n\n", octets)
    if blank_lines > MAX_BLANK_LINES:
        raise ValueError("the message has too many blank lines")
    message = BytesParser(policy=compat32).parsebytes(octets)
    known = tuple(dict.fromkeys(map(normalised, recipients)))
    happened_at = _instant(message, received_at)
    findings = list(_findings(message, known))
    return [_event(each, email_id, known, happened_at) for each in findings or [_Finding(EventKind.ACCEPTED)]]


def _findings(message: Message, known: Known) -> Iterator[_Finding]:
    parts = list(_parts(message))
    for part in parts:
        if part.get_content_type() == "message/feedback-report":
            yield from _of_feedback(part, known)
            return
    text = explanation(parts)
    blocks = [block for part in parts for block in _status_blocks(part) if _is_of_recipient(block)][:MAX_RECIPIENTS]
    if blocks:
        for block in blocks:
            yield _of_block(block, text, known, is_only=len(blocks) == 1)
    else:
        yield from _of_text(message, text, known)


def _event(finding: _Finding, email_id: UUID, known: Known, happened_at: datetime) -> ProviderEvent:
    bounce = None
    if finding.kind is EventKind.BOUNCED:
        bounce = classify(finding.status, finding.words, after_data=finding.after_data)
        if bounce is Bounce.HARD and not finding.is_sent_to:
            bounce = Bounce.SOFT
    return ProviderEvent(
        email_id=email_id,
        provider=PROVIDER,
        kind=finding.kind,
        happened_at=happened_at,
        recipient=finding.recipient,
        bounce=bounce,
        code=_code(finding),
        detail=_detail(finding.words, known) or None,
    )


def _code(finding: _Finding) -> str | None:
    """Returns the first enhanced status code that is not vague.

    Searches the servers' words, then the notice's status. If all these codes are vague, returns the first of them. If
    there are none, returns the first SMTP reply code of a bounce or a deferral.
    """
    codes = [*ENHANCED.findall(finding.words), *([finding.status] if finding.status else [])]
    replies = REPLY.findall(finding.words) if finding.kind in (EventKind.BOUNCED, EventKind.DEFERRED) else []
    return next((code for code in codes if not is_vague(code)), None) or next(iter((*codes, *replies)), None)


def _detail(words: str, known: Known) -> str:
    """The server's words, without addresses and without the local parts of the recipients' addresses."""
    scrubbed = scrub(words)
    folded = scrubbed.lower()
    for local in (address.partition("@")[0] for address in known):
        if len(local) >= NAME_CHARACTERS and local in folded:
            scrubbed = re.sub(rf"(?<!\w){re.escape(local)}(?!\w)", PRIVATE_WORD, scrubbed, flags=re.IGNORECASE)
    return scrubbed


def _instant(message: Message, received_at: datetime) -> datetime:
    """The time in the notice's Date field; if it is missing or not plausible, the time at which the notice arrived."""
    with suppress(ValueError, TypeError, OverflowError):
        found = parsedate_to_datetime(field(message, "Date"))
        found = found if found.tzinfo else found.replace(tzinfo=UTC)
        if received_at - _AT_MOST_EARLIER <= found <= received_at + _AT_MOST_LATER:
            return found
    return received_at


def _parts(message: Message) -> Iterator[Message]:
    """The parts that are not multipart, in order. A returned copy of the email is one part, whatever it contains."""
    payload = message.get_payload()
    if message.get_content_maintype() == "multipart" and isinstance(payload, list):
        for part in payload:
            if isinstance(part, Message):
                yield from _parts(part)
    else:
        yield message


# Delivery status notifications.


def _status_blocks(part: Message) -> Iterator[Message]:
    """The groups of fields of a delivery status; none if the part is not a delivery status.

    Python's library parses only `message/delivery-status` completely. This function also parses the groups that the
    library leaves as text: in `message/global-delivery-status` (RFC 6533), all groups except the first; in a delivery
    status in Base64, all groups. It also reads a delivery status that a gateway has converted to plain text.
    """
    payload = part.get_payload()
    if part.get_content_type() in _STATUS_TYPES and isinstance(payload, list):
        blocks = [block for block in payload if isinstance(block, Message)]
        yield from blocks
        for block in blocks:
            body = block.get_payload()
            if isinstance(body, str) and body.strip():
                encoding = field(part, "Content-Transfer-Encoding").lower()
                yield from _groups(_from_base64(body) if encoding == "base64" else body)
    elif is_text(part) and "final-recipient:" in (text := decoded(part)).lower():
        yield from _groups(text)


def _groups(text: str) -> Iterator[Message]:
    for group in BLANK_LINES.split(text.replace("\r\n", "\n")):
        yield HeaderParser(policy=compat32).parsestr(group)


def _from_base64(text: str) -> str:
    try:
        return base64.b64decode(text).decode("utf-8", "replace")
    except binascii.Error:
        return ""


def _is_of_recipient(block: Message) -> bool:
    return "Action" in block or "Final-Recipient" in block or "Original-Recipient" in block


def _of_block(block: Message, text: str, known: Known, *, is_only: bool) -> _Finding:
    found = ENHANCED.search(field(block, "Status"))
    status = found[1] if found else None
    words = _DIAGNOSTIC_TYPE.sub("", field(block, "Diagnostic-Code"))[:MAX_TEXT_CHARACTERS]
    action = _WORD.match(field(block, "Action").lower())
    kind = _ACTIONS.get(action[0], EventKind.BOUNCED) if action else _kind_of(status)
    recipient, is_sent_to = _recipient_of(block, known)
    if kind is EventKind.BOUNCED and not words and (not status or is_vague(status)):
        words = about(_address_in(field(block, "Final-Recipient")), text) or (text if is_only else "")
    return _Finding(kind, recipient, is_sent_to, status, words, bool(AFTER_DATA.search(text)))


def _kind_of(status: str | None) -> EventKind:
    """The kind of event for a delivery status without the field `Action`, from the first digit of the status code."""
    return {"2": EventKind.DELIVERED, "4": EventKind.DEFERRED}.get((status or "5")[0], EventKind.BOUNCED)


def _recipient_of(block: Message, known: Known) -> tuple[str | None, bool]:
    """Returns the recipient that a block of a delivery status is about, and `is_sent_to` (see `_Finding`).

    A block names an original and a final address. If they differ, a server has forwarded the email to the final
    address, and the block reports what became of it there. The recipient is None if the email was sent to neither
    address.
    """
    original, final = (_address_in(field(block, f"{name}-Recipient")) for name in ("Original", "Final"))
    if final in known:
        return final, original in ("", final)
    return (original, not final) if original in known else (None, False)


def _address_in(value: str) -> str:
    """The address of a field such as `rfc822; <ann@example.org>`, normalised; empty if it contains no address."""
    address = value.rpartition(";")[2].strip("\"' ")
    return normalised(address) if "@" in address else ""


# Feedback reports.


def _of_feedback(part: Message, known: Known) -> Iterator[_Finding]:
    payload = part.get_payload()
    report = payload[0] if isinstance(payload, list) and payload else part
    assert isinstance(report, Message)
    kind = _FEEDBACK.get(field(report, "Feedback-Type").lower(), EventKind.ACCEPTED)
    addresses = {_address_in(str(value)) for value in report.get_all("Original-Rcpt-To", [])}
    # A report often conceals the recipient. If the email has several recipients, such a report does not show which
    # recipient complained, so the event names no recipient.
    found = [each for each in known if each in addresses] or known
    recipient = found[0] if len(found) == 1 and len(addresses) <= 1 else None
    yield _Finding(kind, recipient, is_sent_to=recipient is not None)


# Notices without a structure.


def _of_text(message: Message, text: str, known: Known) -> Iterator[_Finding]:
    failed = {_address_in(each) for each in field(message, "X-Failed-Recipients").split(",")} - {""}
    named = [address for address in known if address in failed or place_of(address, text) >= 0]
    kind = kind_of_notice(message, text, names_recipient=bool(named))
    if kind is None:
        return
    after_data = bool(AFTER_DATA.search(text))
    for address in named:
        reason = about(address, text) or (text if len(named) == 1 else "")
        yield _Finding(kind, address, is_sent_to=True, words=reason, after_data=after_data)
    if not named:
        yield _Finding(kind, words=text)
