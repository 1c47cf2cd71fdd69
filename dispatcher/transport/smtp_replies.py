"""Derives an email's outcome from an SMTP reply. `docs/providers.md` has the table.

The reply's basic code, such as 550, determines whether an email is accepted, deferred or rejected (RFC 5321, section
4.2.1). The enhanced code, such as 5.1.1 (RFC 3463), determines the reason, because servers use 550 and 554 for nearly
everything. The reason also depends on the command that the server refused, such as RCPT.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from dispatcher.domain.outcome import (
    Accepted,
    Concern,
    Deferred,
    Outcome,
    PartialDelivery,
    Reason,
    Rejected,
    Uncertain,
    refused_recipients,
)
from dispatcher.domain.scrub import scrub


class SmtpPhase(StrEnum):
    """How far an attempt has got. The values complete sentences such as "the server closed the connection at MAIL"."""

    WAITING = "while waiting for a free connection"
    CONNECTING = "while connecting"
    MAIL = "at MAIL"
    RCPT = "at RCPT"
    DATA = "at DATA"
    BODY = "in the body"
    """The body is being sent. A server accepts nothing before the final dot (RFC 5321, section 4.1.1.4)."""
    FINAL = "after the body"
    """The final dot was sent, or may have been: no reply means `Uncertain`."""


@dataclass(frozen=True, slots=True)
class SmtpReply:
    """One reply with all of its lines.

    Attributes:
        code: The basic code, 200 to 599.
        enhanced: The enhanced code, such as `5.1.1`; empty if there is none.
        text: The text after the codes, as the server sent it. It can have any length, and contain addresses.
    """

    code: int
    enhanced: str
    text: str

    @property
    def codes(self) -> str:
        """The codes as they appear in outcomes: `550 5.1.1`, or `550` without an enhanced code."""
        return f"{self.code} {self.enhanced}" if self.enhanced else str(self.code)

    @property
    def is_positive(self) -> bool:
        return 200 <= self.code < 300

    @property
    def is_transient(self) -> bool:
        return 400 <= self.code < 500

    @property
    def is_permanent(self) -> bool:
        return self.code >= 500

    @property
    def closes(self) -> bool:
        """Whether the server closes the connection after this reply (RFC 5321, section 3.8)."""
        return self.code == 421

    @property
    def blames_our_setup(self) -> bool:
        """Whether the server refuses every email until our credentials or TLS settings are corrected.

        See RFC 4954, section 6, and RFC 3207.
        """
        return self.code in (530, 534, 535, 538)

    @property
    def is_protocol_error(self) -> bool:
        """Whether the server did not understand the command, or expected a different one."""
        if self.code == 554:
            return self.enhanced == "5.5.1"
        return 500 <= self.code <= 504 and (not self.enhanced or self.enhanced.startswith("5.5."))

    @property
    def concerns_session(self) -> bool:
        """Whether the server refuses the command here, and not the address in it. Servers also use 501 and 504 for
        addresses."""
        return self.is_protocol_error and self.code not in (501, 504)

    @property
    def is_final(self) -> bool:
        """Whether the server refuses this email or this recipient for good."""
        return self.is_permanent and not self.concerns_session

    @property
    def limits_transaction(self) -> bool:
        """Whether a recipient is refused only in this transaction, because it has too many recipients or domains."""
        is_limit = self.enhanced == "4.5.3" or self.codes == "452"
        return self.is_transient and (is_limit or _TRANSACTION_WORDS.search(self.text[:1000]) is not None)


_ENHANCED: Final = re.compile(r"([245]\.[0-9]{1,3}\.[0-9]{1,3})(?: |$)")
_THROTTLED_CODES: Final = frozenset({"4.4.5", "4.7.28", "4.7.650", "4.7.651"})
"""Congestion (RFC 3463, section 3.5), and the codes that Gmail and Microsoft use for a sender that is too fast."""
_THROTTLED_WORDS: Final = re.compile(
    r"throttl|slow down|rate exceeded|(?:rate|sending|message|connection)s?.(?:limit|quota)"
    r"|too (?:fast|many (?!recipients|hops|received))",
    re.IGNORECASE,
)
_TRANSACTION_WORDS: Final = re.compile(
    r"\b(?:too many|maximum|limit)\b.{0,20}\brecipients\b"
    r"|\b(?:multiple|different|several|one|single)\b.{0,20}\bdomains?\b"
    r"|\b(?:one|single|per|another|separate|same)\b.{0,20}\b(?:transaction|message|session|envelope)\b",
    re.IGNORECASE,
)
_GREYLISTED_WORDS: Final = re.compile(r"gr[ea]y.?list", re.IGNORECASE)
_TOO_LARGE_CODES: Final = ("5.3.4", "5.2.3")
_QUEUE_ID: Final = re.compile(r"(?:queued as |\bid=|^ok )([A-Za-z0-9][A-Za-z0-9._-]{3,99})(?=$|[\s;,)])", re.IGNORECASE)
"""Matches the server's id for the email, in the formats of Postfix and many other servers, of Exim, and of Amazon
SES."""


def reply_of(code: int, text: str) -> SmtpReply:
    """Parses a reply from its basic code and the text after the code."""
    # Keep an empty first line: in a reply to EHLO, the extensions begin on the second line.
    text = text.rstrip().lstrip(" \t")
    found = _ENHANCED.match(text)
    # RFC 2034, section 4: an enhanced code has the same class as the basic code. A code of another class is ordinary
    # text.
    if found is None or found[1][0] != str(code)[0]:
        return SmtpReply(code, "", text)
    return SmtpReply(code, found[1], text[found.end() :].lstrip(" \t"))


def refusal(reply: SmtpReply, phase: SmtpPhase) -> Outcome:
    """The outcome for the email if the server sent this reply instead of the expected one."""
    words = scrub(reply.text) or None
    if reply.is_transient:
        reason, concern = _transient_reason(reply, phase)
        return Deferred(reason, words, reply.codes, known_concern=concern)
    if reply.concerns_session and phase in (SmtpPhase.MAIL, SmtpPhase.RCPT, SmtpPhase.DATA):
        return Deferred(Reason.SERVER_ERROR, words, reply.codes)
    if reply.is_permanent:
        return Rejected(_permanent_reason(reply, phase), words, reply.codes)
    detail = f"unexpected reply {phase}" + (f": {words}" if words else "")
    if phase is SmtpPhase.FINAL:
        return Uncertain(detail, reply.codes)
    return Deferred(Reason.SERVER_ERROR, detail, reply.codes)


def acceptance(
    reply: SmtpReply,
    refused: Sequence[tuple[int, SmtpReply]] = (),
    *,
    positions: Iterable[int] = (),
    unsupported: Collection[int] = (),
) -> Accepted | Deferred:
    """The outcome if the server's final reply accepts the email.

    If some recipients need a further attempt, because the server refused them for now or does not support their
    addresses, the outcome is a partial delivery.

    Args:
        refused: The recipients that the server refused: their positions, from 1, and the replies. The server accepted
            all other recipients.
        positions: The positions of all recipients in the envelope.
        unsupported: The positions of the recipients whose addresses need SMTPUTF8, which the server does not support.
    """
    queue_id = _QUEUE_ID.search(reply.text)
    detail = scrub(f"{reply.codes} {reply.text}")
    codes = {**dict.fromkeys(unsupported, "no SMTPUTF8"), **{position: each.codes for position, each in refused}}
    if codes:
        detail = f"{refused_recipients(codes)}; {detail}"
    again = [each for _, each in refused if not each.is_final]
    if not (again or unsupported):
        return Accepted(queue_id[1] if queue_id else None, detail)
    may_follow = not again or any(each.limits_transaction for each in again)
    final = {position: each.codes for position, each in refused if each.is_final}
    return Deferred(
        Reason.RECIPIENT_DEFERRED if again else Reason.REJECTED_RECIPIENT,
        detail,
        again[0].codes if again else None,
        retry_after=0.0 if may_follow else None,
        known_concern=Concern.EMAIL,
        partial=PartialDelivery({**dict.fromkeys(set(positions).difference(codes)), **final}),
    )


def no_recipient_left(refused: Sequence[tuple[int, SmtpReply]]) -> Outcome:
    """The outcome if the server refused every recipient. Defers the email if at least one refusal is temporary."""
    decisive = next((reply for _, reply in refused if not reply.is_final), refused[0][1])
    outcome = refusal(decisive, SmtpPhase.RCPT)
    if len(refused) == 1 or isinstance(outcome, Accepted | Uncertain):
        return outcome
    detail = f"{_listed(refused)}; {outcome.detail}"
    return replace(outcome, detail=detail)


def _listed(refused: Sequence[tuple[int, SmtpReply]]) -> str:
    return refused_recipients({position: reply.codes for position, reply in refused})


def _transient_reason(reply: SmtpReply, phase: SmtpPhase) -> tuple[Reason, Concern | None]:
    words = reply.text[:1000]
    if reply.enhanced.startswith(("4.1.", "4.2.")) or _GREYLISTED_WORDS.search(words):
        return Reason.RECIPIENT_DEFERRED, Concern.EMAIL
    # A refusal of RCPT usually concerns only the recipient, so ignore the reply's text. But if the server refuses many
    # recipients in this way, the server is the cause.
    if phase is SmtpPhase.RCPT and not reply.closes:
        return Reason.RECIPIENT_DEFERRED, Concern.EITHER
    is_throttled = reply.enhanced in _THROTTLED_CODES or _THROTTLED_WORDS.search(words)
    return Reason.THROTTLED if is_throttled else Reason.SERVER_ERROR, None


def _permanent_reason(reply: SmtpReply, phase: SmtpPhase) -> Reason:
    if reply.enhanced in _TOO_LARGE_CODES or (reply.code == 552 and not reply.enhanced):
        return Reason.TOO_LARGE
    if reply.enhanced.startswith("5.6."):
        return Reason.INVALID_CONTENT
    if phase is SmtpPhase.MAIL and (reply.code in (550, 551, 553, 554) or reply.enhanced.startswith("5.1.")):
        return Reason.REJECTED_SENDER
    if phase is SmtpPhase.RCPT and _blames_recipient(reply):
        return Reason.REJECTED_RECIPIENT
    return Reason.REFUSED


def _blames_recipient(reply: SmtpReply) -> bool:
    # 5.7.x at RCPT is policy (relaying denied, a blocklist), so the address may be valid.
    return reply.enhanced.startswith(("5.1.", "5.2.")) or (reply.code in (550, 551, 553) and not reply.enhanced)
