"""Derives an email's outcome from an SMTP reply. `docs/providers.md` has the table.

The reply's basic code, such as 550, determines whether an email is accepted, deferred or rejected (RFC 5321, section
4.2.1). A quota or a rate is the exception: it defers the email whatever the code. The enhanced code, such as 5.1.1 (RFC
3463), and the words determine the reason (see `domain.provider_text`), because servers use 550 and 554 for nearly
everything. The reason also depends on the command that the server refused, such as RCPT.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final

from dispatcher.domain.outcome import (
    Accepted,
    AccountFault,
    Concern,
    Deferred,
    Outcome,
    PartialDelivery,
    Reason,
    Rejected,
    Uncertain,
    refused_recipients,
)
from dispatcher.domain.provider_text import SENDER, Cause, cause_of
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
    """One reply with all of its lines. `enhanced`: such as `5.1.1`, or empty. `text`: what follows the codes."""

    code: int
    enhanced: str
    text: str  # of any length; it can contain addresses

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
        """Whether our credentials, TLS settings or name in EHLO are refused (RFC 4954, section 6; RFC 3207)."""
        return self.code in (530, 534, 535, 538) or self.blames_our_name

    @property
    def blames_our_name(self) -> bool:
        """Whether the server refuses our name in EHLO, as Postfix does only at RCPT."""
        # 500, 502 and 503 concern the command and not its parameter; x.1.x concerns an address.
        is_refusal = self.code >= 400 and self.code not in (500, 502, 503) and self.enhanced[1:3] != ".1"
        return is_refusal and _OUR_NAME.search(self.text[:1000]) is not None

    @property
    def is_protocol_error(self) -> bool:
        """Whether the server did not understand the command, or expected a different one."""
        if self.code == 554:
            return self.enhanced == "5.5.1"
        return 500 <= self.code <= 504 and (not self.enhanced or self.enhanced.startswith("5.5."))

    @property
    def concerns_session(self) -> bool:
        """Whether the server refuses the command here. Servers also use 501 and 504 for the address in it."""
        return self.is_protocol_error and self.code not in (501, 504)

    @property
    def limits_transaction(self) -> bool:
        """Whether a recipient is refused only in this transaction, because it has too many recipients or domains."""
        is_limit = self.enhanced == "4.5.3" or self.codes == "452"
        return self.is_transient and (is_limit or _TRANSACTION_WORDS.search(self.text[:1000]) is not None)


_ENHANCED: Final = re.compile(r"([245]\.[0-9]{1,3}\.[0-9]{1,3})(?: |$)")
_FULL: Final = re.compile(r"^432\b|concurrent|connections|thread", re.IGNORECASE)
_OUR_NAME: Final = re.compile(r"(?<![\w.@+-])(?:helo|ehlo)(?![\w@+-]|\.\w)", re.IGNORECASE)
"""Matches HELO or EHLO, but not as a part of an address or a domain."""
_TRANSACTION_WORDS: Final = re.compile(
    r"\b(?:too many|maximum|limit)\b.{0,20}\brecipients\b"
    r"|\b(?:multiple|different|several|one|single)\b.{0,20}\bdomains?\b"
    r"|\b(?:one|single|per|another|separate|same)\b.{0,20}\b(?:transaction|message|session|envelope)\b",
    re.IGNORECASE,
)
MAX_TEXTS: Final = 8
"""So many different texts are read in the replies to the recipients of one email."""
_VARIES: Final = re.compile(r"[@\d]")
"""Matches a word that can differ although the reason is the same: an address, an id or a number."""
_GREYLISTED_WORDS: Final = re.compile(r"gr[ea]y.?list", re.IGNORECASE)
_TOO_LARGE_CODES: Final = ("5.3.4", "5.2.3")
_QUEUE_ID: Final = re.compile(r"(?:queued as |\bid=|^ok )([A-Za-z0-9][A-Za-z0-9._-]{3,99})(?=$|[\s;,)])", re.IGNORECASE)
"""Matches the server's id for the email, in the formats of Postfix and many other servers, of Exim, and of Amazon
SES."""


@lru_cache(maxsize=64)
def reply_of(code: int, text: str) -> SmtpReply:
    """Parses a reply. Most replies of a server have the same few texts, so the last ones are kept."""
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
    if reply.concerns_session and phase in (SmtpPhase.MAIL, SmtpPhase.RCPT, SmtpPhase.DATA):
        return Deferred(Reason.SERVER_ERROR, words, reply.codes)
    if reply.code >= 400:
        reason, concern, fault = _cause(reply, phase)
        if reply.is_transient or reason is Reason.THROTTLED:
            return Deferred(reason, words, reply.codes, known_concern=concern, fault=fault)
        return Rejected(reason, words, reply.codes, fault)
    detail = f"unexpected reply {phase}" + (f": {words}" if words else "")
    if phase is SmtpPhase.FINAL:
        return Uncertain(detail, reply.codes)
    return Deferred(Reason.SERVER_ERROR, detail, reply.codes)


def asks_for_fewer_connections(outcome: Outcome) -> bool:
    """Whether the server throttles us because we use too many connections at the same time."""
    if not isinstance(outcome, Deferred) or outcome.reason is not Reason.THROTTLED:
        return False
    return _FULL.search(f"{outcome.code} {outcome.detail}") is not None


def acceptance(
    reply: SmtpReply,
    refused: Sequence[tuple[int, SmtpReply]] = (),
    *,
    positions: Iterable[int] = (),
    unsupported: Collection[int] = (),
) -> Accepted | Deferred:
    """The outcome if the server's final reply accepts the email: for some recipients only, a partial delivery.

    `refused`: the recipients that the server refused: their positions, from 1, and the replies. `positions`: those of
    all recipients in the envelope. `unsupported`: those of the recipients whose addresses need SMTPUTF8, which the
    server does not support.
    """
    queue_id = _QUEUE_ID.search(reply.text)
    detail = scrub(f"{reply.codes} {reply.text}")
    if not (refused or unsupported):
        return Accepted(queue_id[1] if queue_id else None, detail)
    codes = {**dict.fromkeys(unsupported, "no SMTPUTF8"), **{position: each.codes for position, each in refused}}
    detail = f"{refused_recipients(codes)}; {detail}"
    judged = _judged(refused)
    final = {position: each.codes for position, each, outcome in judged if isinstance(outcome, Rejected)}
    again = [each for position, each, _ in judged if position not in final]
    if not (again or unsupported):
        return Accepted(queue_id[1] if queue_id else None, detail)
    may_follow = not again or any(each.limits_transaction for each in set(again))
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
    outcomes = [outcome for _, _, outcome in _judged(refused)]
    outcome = next((each for each in outcomes if not isinstance(each, Rejected)), outcomes[0])
    if len(refused) == 1 or isinstance(outcome, Accepted | Uncertain):
        return outcome
    listed = refused_recipients({position: reply.codes for position, reply in refused})
    return replace(outcome, detail=f"{listed}; {outcome.detail}")


def _judged(refused: Sequence[tuple[int, SmtpReply]]) -> list[tuple[int, SmtpReply, Outcome]]:
    """The refused recipients' positions, replies and outcomes. Replies that say the same are replaced by the first."""
    # A server may refuse 1,000 recipients, and to search a hostile text takes milliseconds. So after MAX_TEXTS
    # different texts, a reply counts as the first with the same codes, or as the first that defers, if there is one.
    judged: list[tuple[int, SmtpReply, Outcome]] = []
    by_words: dict[tuple[str, str], tuple[SmtpReply, Outcome]] = {}
    by_codes: dict[str, tuple[SmtpReply, Outcome]] = {}
    for position, reply in refused:
        words = " ".join(word for word in reply.text[:1000].split() if not _VARIES.search(word))
        found = by_words.get((reply.codes, words))
        if found is None and len(by_words) >= MAX_TEXTS:
            found = by_codes.get(reply.codes)
        if found is None:
            few = reply if len(by_words) < MAX_TEXTS else replace(reply, text="")
            found = by_words[reply.codes, words] = few, refusal(few, SmtpPhase.RCPT)
            if reply.codes not in by_codes or isinstance(by_codes[reply.codes][1], Rejected):
                by_codes[reply.codes] = found
        judged.append((position, *found))
    return judged


def _cause(reply: SmtpReply, phase: SmtpPhase) -> tuple[Reason, Concern | None, AccountFault | None]:
    """The reason for a refusal, what it concerns if the reason does not show this, and the fault of our account."""
    if reply.is_transient and _GREYLISTED_WORDS.search(reply.text[:1000]):
        return Reason.RECIPIENT_DEFERRED, Concern.EMAIL, None
    cause = cause_of(reply.text, reply.enhanced)
    if phase is SmtpPhase.MAIL and cause is Cause.RECIPIENT and reply.is_permanent:
        cause = SENDER  # the server has not seen a recipient yet
    fault = cause if isinstance(cause, AccountFault) else None
    if fault and phase in (SmtpPhase.CONNECTING, SmtpPhase.MAIL) and not fault.by_sender:
        fault = replace(fault, in_a_row=1)
    if cause is Cause.RATE or (fault and fault.seconds):
        return Reason.THROTTLED, None, fault
    if reply.is_permanent:
        return _permanent_reason(reply, phase, cause), None, fault
    if reply.enhanced.startswith(("4.1.", "4.2.")) and fault is None:
        return Reason.RECIPIENT_DEFERRED, Concern.EMAIL, None
    # A refusal of RCPT usually concerns only the recipient. But if the server refuses many recipients in this way, the
    # server is the cause.
    if phase is SmtpPhase.RCPT and not reply.closes and fault is None:
        return Reason.RECIPIENT_DEFERRED, Concern.EITHER, None
    return Reason.SERVER_ERROR, None, fault


def _permanent_reason(reply: SmtpReply, phase: SmtpPhase, cause: Cause | AccountFault | None) -> Reason:
    if reply.enhanced in _TOO_LARGE_CODES:
        return Reason.TOO_LARGE
    if reply.enhanced.startswith("5.6."):
        return Reason.INVALID_CONTENT
    if cause is Cause.RECIPIENT or (cause is None and phase is SmtpPhase.RCPT and reply.code in (551, 553)):
        return Reason.REJECTED_RECIPIENT
    if cause is None and reply.code == 552 and not reply.enhanced:
        return Reason.TOO_LARGE
    return Reason.REJECTED_SENDER if isinstance(cause, AccountFault) and cause.by_sender else Reason.REFUSED
