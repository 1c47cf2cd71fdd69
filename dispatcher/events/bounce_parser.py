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
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.parser import BytesParser, HeaderParser
from email.policy import Compat32
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Final
from uuid import UUID

from dispatcher.domain.event import OF_TOPIC, Bounce, EventKind, ProviderEvent
from dispatcher.domain.provider_text import NAME_CHARACTERS, PRIVATE_WORD
from dispatcher.domain.scrub import scrub
from dispatcher.events.bounce_class import ENHANCED, REPLY, classify, is_vague
from dispatcher.events.bounce_text import (
    BLANK_LINES,
    MAX_TEXT_CHARACTERS,
    Explanation,
    decoded,
    field,
    is_text,
    kind_of_notice,
    with_newlines,
)
from dispatcher.events.contract import BOUNCE_PROVIDER
from dispatcher.store.address_hashes import normalised

MAX_RECIPIENTS: Final = 100
"""The most recipients about whom one message is read. Servers must accept so many (RFC 5321, section 4.5.3.1.8)."""
MAX_UNKNOWN_RECIPIENTS: Final = 50
"""The same, if the recipients of the email are unknown."""
MAX_LINES: Final = 5000
"""Only so many lines of a message are parsed, because Python's parser creates objects for each field and blank line."""
MAX_BOUNDARIES: Final = 30
"""How often the word `boundary` may occur in a message. A bounce has only a few parts. Python's parser compares each
line with the boundary of each enclosing part."""
_AT_MOST_LATER: Final = timedelta(days=1)
_AT_MOST_EARLIER: Final = timedelta(days=30)
"""The limits for the time in a notice's Date field, compared with the time of receipt. If the notice's time is later or
earlier than these limits allow, the time of receipt is used."""

_ACTIONS: Final = {
    "delayed": EventKind.DEFERRED,
    "delivered": EventKind.DELIVERED,
    "expanded": EventKind.DELIVERED,
    "relayed": EventKind.ACCEPTED,
    "2": EventKind.DELIVERED,
    "4": EventKind.DEFERRED,
}
"""The kind of event for each action of RFC 3464, section 2.3.3. Any other action means a failure. `relayed` means that
the email was passed to a server that sends no DSN. If there is no action, the first digit of the status decides."""
_OF_LIST: Final = "opt-out-list"
_FEEDBACK: Final = {
    "abuse": EventKind.COMPLAINED,
    "fraud": EventKind.COMPLAINED,
    "opt-out": EventKind.UNSUBSCRIBED,
    _OF_LIST: EventKind.UNSUBSCRIBED,
    "not-spam": EventKind.DELIVERED,
}
"""The kind of event for each type of feedback of RFC 5965, section 7.3, and RFC 6430. Reports of other types, such as
`auth-failure`, come from servers and not from recipients. They prove only that the provider accepted the email."""

_OF_OUTLOOK: Final = "X-HmXmrOriginalRecipient"
"""Outlook.com adds this field to the copy in a complaint, and may send the copy without a report."""
_NAMED_IN_REPORT: Final = ("Original-Rcpt-To", "Removal-Recipient", "Original-Recipient", "Final-Recipient")
_NAMED_IN_COPY: Final = (_OF_OUTLOOK, "X-Apparently-To", "X-Original-To", "Envelope-To", "Delivered-To")
"""The fields that servers add to an email when they deliver it. They name the mailbox that has the copy."""

_BLANK_LINES: Final = re.compile(rb"\n{3,}")
_OF_RECIPIENT: Final = ("Action", "Final-Recipient", "Original-Recipient")
_WORD: Final = re.compile(r"[a-z]+")
_XTEXT: Final = re.compile(r"(?:\+[0-9A-F]{2})+", re.IGNORECASE)
_UNITEXT: Final = re.compile(r"\\x\{([0-9A-F]{1,8})\}", re.IGNORECASE)
_DIAGNOSTIC_TYPE: Final = re.compile(r"^[\w.-]{1,40} ?; ?")
_REPORT_TYPES: Final = ("message/delivery-status", "message/global-delivery-status", "message/feedback-report")
Known = tuple[str, ...]
"""The addresses to which the email was sent, normalised."""


class _Fields(Compat32):
    """Cuts long header fields, because to parse 100,000 parameters takes a second; and reads UTF-8 (RFC 6532)."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        return name, value[:MAX_TEXT_CHARACTERS].encode("utf-8", "surrogateescape").decode("utf-8", "replace")


_FIELDS: Final = _Fields()


@dataclass(frozen=True, slots=True)
class _Finding:
    kind: EventKind
    recipient: str | None = None
    is_sent_to: bool = False  # False if, for example, a server forwarded the email, and the address there was refused
    status: str | None = None  # the enhanced status code of the notice
    words: str = ""  # what the servers said about the recipient
    after_data: bool = False  # whether the server refused the email only after it had received the content


def events_of(octets: bytes, email_id: UUID, recipients: Collection[str], received_at: datetime) -> list[ProviderEvent]:
    """The events, at least one, that a message to the email's envelope sender reports: it proves the acceptance.

    `recipients`: the addresses to which the email was sent; empty if they are unknown. Raises ValueError or
    RecursionError if the message cannot be parsed.
    """
    if octets.lower().count(b"boundary") > MAX_BOUNDARIES:
        raise ValueError("the message has too many nested parts")
    lines = _BLANK_LINES.sub(b"\n\n", with_newlines(octets)).split(b"\n", MAX_LINES)[:MAX_LINES]
    message = BytesParser(policy=_FIELDS).parsebytes(b"\n".join(lines))
    known = tuple(dict.fromkeys(map(normalised, recipients)))
    happened_at = _instant(message, received_at)
    # The sender of the message chooses its date. So a different date makes no second event on the day of receipt.
    day = received_at.astimezone(UTC).date().isoformat()
    findings = list(_findings(message, known)) or [_Finding(EventKind.ACCEPTED)]
    most = max(MAX_TEXT_CHARACTERS // len(findings), 160)  # so that all words together take a bounded time
    findings = [replace(each, words=each.words[:most]) for each in findings]
    return [_event(each, email_id, known, happened_at, day) for each in findings]


def _findings(message: Message, known: Known) -> Iterator[_Finding]:
    parts = list(_parts(message))
    copies = list(_copies(parts))
    report = next((part for part in parts if part.get_content_type() == "message/feedback-report"), None)
    if report is not None or (
        message.get_content_type() != "multipart/report" and any(_OF_OUTLOOK in copy for copy in copies)
    ):
        yield _of_feedback(report, copies, known)
        return
    explanation = Explanation(parts)
    most = min(len(known) or MAX_UNKNOWN_RECIPIENTS, MAX_RECIPIENTS)
    found = (block for part in parts for block in _status_blocks(part) if any(name in block for name in _OF_RECIPIENT))
    if blocks := list(islice(found, most)):
        for block in blocks:
            yield _of_block(block, explanation, known, is_only=len(blocks) == 1)
    else:
        yield from _of_text(message, explanation, known)


def _event(finding: _Finding, email_id: UUID, known: Known, happened_at: datetime, day: str) -> ProviderEvent:
    # The code is the first enhanced status code of the words and the notice, rather a clear one; or an SMTP reply code.
    codes = [*ENHANCED.findall(finding.words), *([finding.status] if finding.status else [])]
    replies = REPLY.findall(finding.words) if finding.kind in (EventKind.BOUNCED, EventKind.DEFERRED) else []
    code = next((each for each in codes if not is_vague(each)), None) or next(iter((*codes, *replies)), None)
    bounce = None
    if finding.kind is EventKind.BOUNCED:
        bounce = classify(finding.status, finding.words, after_data=finding.after_data)
        if bounce is Bounce.HARD and not finding.is_sent_to:
            bounce = Bounce.SOFT
    return ProviderEvent(
        email_id=email_id,
        provider=BOUNCE_PROVIDER,
        kind=finding.kind,
        happened_at=happened_at,
        recipient=finding.recipient,
        bounce=bounce,
        code=code,
        detail=_detail(finding.words, known) or None,
        distinction=f"{day} {bounce or ''}",
        is_dated=False,
    )


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
    """The groups of fields of a delivery status; none if the part is not a delivery status."""
    # Python's library parses only `message/delivery-status` completely. This function also parses the groups that the
    # library leaves as text: in `message/global-delivery-status` (RFC 6533), all groups except the first; in a delivery
    # status in Base64, all groups. It also reads a delivery status that a gateway has converted to plain text.
    payload = part.get_payload()
    if part.get_content_type() in _REPORT_TYPES and isinstance(payload, list):
        blocks = [block for block in payload if isinstance(block, Message)]
        yield from blocks
        for block in blocks:
            if body := decoded(block).strip():
                if field(part, "Content-Transfer-Encoding").lower() == "base64":
                    try:
                        body = with_newlines(base64.b64decode(body)).decode("utf-8", "replace")
                    except binascii.Error:
                        continue
                yield from _groups(body)
    elif is_text(part) and "final-recipient:" in (text := decoded(part)).lower():
        yield from _groups(text)


def _groups(text: str) -> Iterator[Message]:
    return map(HeaderParser(policy=_FIELDS).parsestr, BLANK_LINES.split(text))


def _of_block(block: Message, explanation: Explanation, known: Known, *, is_only: bool) -> _Finding:
    found = ENHANCED.search(field(block, "Status"))
    status = found[1] if found else None
    words = _DIAGNOSTIC_TYPE.sub("", field(block, "Diagnostic-Code"))
    action = _WORD.match(field(block, "Action").lower())
    kind = _ACTIONS.get(action[0] if action else (status or "5")[0], EventKind.BOUNCED)
    # If a block's original and final address differ, a server has forwarded the email, and the block reports what
    # became of it there.
    original, final = (_address_in(field(block, f"{name}-Recipient"), known) for name in ("Original", "Final"))
    recipient = next((each for each in (final, original) if each in known), None)
    is_sent_to = original in ("", final) if recipient == final else recipient is not None and not final
    if kind is EventKind.BOUNCED and not words and (not status or is_vague(status)):
        words = explanation.about(final) or (explanation.text if is_only else "")
    return _Finding(kind, recipient, is_sent_to, status, words, explanation.is_after_data)


def _address_in(value: str, known: Known) -> str:
    """The address of a field such as `rfc822; <ann@example.org>`, normalised; empty if it contains no address."""
    # Decodes xtext (`ann+2Bnews@…`, RFC 3461) and unitext (`j\x{F6}rg@…`, RFC 6533), if this makes a known address.
    address = value.rpartition(";")[2].strip("\"' ")
    if "@" not in address:
        return ""
    plain = _XTEXT.sub(lambda each: bytes.fromhex(each[0].replace("+", "")).decode("utf-8", "replace"), address)
    plain = _UNITEXT.sub(lambda each: bytes.fromhex(each[1].zfill(8)).decode("utf-32-be", "replace"), plain)
    forms = [normalised(address), normalised(plain)]
    return next((form for form in forms if form in known), forms[0])


# Feedback reports.


def _copies(parts: Sequence[Message]) -> Iterator[Message]:
    """The headers of the returned email."""
    for part in parts:
        payload = part.get_payload()
        if part.get_content_maintype() == "message" and isinstance(payload, list) and isinstance(payload[0], Message):
            yield payload[0]
        elif part.get_content_subtype() == "rfc822-headers":
            yield HeaderParser(policy=_FIELDS).parsestr(decoded(part))


def _of_feedback(part: Message | None, copies: Sequence[Message], known: Known) -> _Finding:
    kind, addresses, code = EventKind.COMPLAINED, set[str](), None
    if part is not None:
        report = next((block for block in _status_blocks(part) if "Feedback-Type" in block), part)
        feedback = field(report, "Feedback-Type").lower()
        kind, code = _FEEDBACK.get(feedback, EventKind.ACCEPTED), OF_TOPIC if feedback == _OF_LIST else None
        addresses = _addresses_in([report], _NAMED_IN_REPORT, known)
    if addresses.isdisjoint(known):
        addresses = _addresses_in(copies, _NAMED_IN_COPY, known).intersection(known) or addresses
    # A report often conceals the recipient. If the email has several recipients, such a report does not show which
    # recipient complained, so the event names no recipient.
    found = [each for each in known if each in addresses] or known
    recipient = found[0] if len(found) == 1 and len(addresses) <= 1 else None
    return _Finding(kind, recipient, is_sent_to=recipient is not None, status=code)


def _addresses_in(blocks: Sequence[Message], names: Sequence[str], known: Known) -> set[str]:
    values = (str(value) for block in blocks for name in names for value in block.get_all(name, [])[:MAX_RECIPIENTS])
    return {_address_in(value, known) for value in values} - {""}


# Notices without a structure.


def _of_text(message: Message, explanation: Explanation, known: Known) -> Iterator[_Finding]:
    failed = {_address_in(each, known) for each in field(message, "X-Failed-Recipients").split(",")}
    named = [address for address in known if address in failed or explanation.names(address)][:MAX_RECIPIENTS]
    kind = kind_of_notice(message, explanation, names_recipient=bool(named))
    if kind is None:
        return
    for address in named:
        words = explanation.about(address) or (explanation.text if len(named) == 1 else "")
        yield _Finding(kind, address, is_sent_to=True, words=words, after_data=explanation.is_after_data)
    if not named:
        yield _Finding(kind, words=explanation.text)
