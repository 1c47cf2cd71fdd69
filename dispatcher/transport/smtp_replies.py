"""What an SMTP server's reply means: (phase, code, enhanced code) → outcome. `docs/providers.md` shows it as a table.

The basic code decides between yes, not now and never (RFC 5321, section 4.2.1); the enhanced code (RFC 3463) says why
wherever there is one, since servers use 550 and 554 for nearly everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from dispatcher.domain.outcome import SOME_REFUSED, Accepted, Concern, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.scrub import scrub


class SmtpPhase(StrEnum):
    """How far an attempt has come; the value completes the sentence "the server closed the connection …"."""

    WAITING = "while waiting for a free connection"
    CONNECTING = "while connecting"
    MAIL = "at MAIL"
    RCPT = "at RCPT"
    DATA = "at DATA"
    BODY = "in the body"
    """Before its last byte: without the final dot nothing can be accepted (RFC 5321, section 4.1.1.4)."""
    FINAL = "after the body"
    """The final dot left, or may have: silence is `Uncertain`."""


@dataclass(frozen=True, slots=True)
class SmtpReply:
    """One reply, all of its lines.

    Attributes:
        code: 200 to 599.
        enhanced: Such as `5.1.1`; empty if there is none.
        text: The words behind the codes, lines as they came; neither scrubbed nor bounded.
    """

    code: int
    enhanced: str
    text: str

    @property
    def codes(self) -> str:
        """As our outcomes have it: `550 5.1.1` or `550`."""
        return f"{self.code} {self.enhanced}" if self.enhanced else str(self.code)

    @property
    def is_positive(self) -> bool:
        """Whether the server agreed: 2xx."""
        return 200 <= self.code < 300

    @property
    def is_transient(self) -> bool:
        """Whether the server refused for now: 4xx."""
        return 400 <= self.code < 500

    @property
    def is_permanent(self) -> bool:
        """Whether the server refused for good: 5xx."""
        return self.code >= 500

    @property
    def closes(self) -> bool:
        """Whether the server ends the connection with it (RFC 5321, section 3.8)."""
        return self.code == 421

    @property
    def blames_our_setup(self) -> bool:
        """Whether no email can pass before a person mends our credentials or TLS: RFC 4954, section 6; RFC 3207."""
        return self.code in (530, 534, 535, 538)


_ENHANCED: Final = re.compile(r"([245]\.[0-9]{1,3}\.[0-9]{1,3})(?: |$)")
_THROTTLED_CODES: Final = frozenset({"4.4.5", "4.7.28", "4.7.650", "4.7.651"})
"""Congestion (RFC 3463, section 3.5); Gmail's and Microsoft's words for a sender that is too fast."""
_THROTTLED_WORDS: Final = re.compile(
    r"throttl|slow down|rate exceeded|(?:rate|sending|message|connection)s?.(?:limit|quota)"
    r"|too (?:fast|many (?!recipients|hops|received))",
    re.IGNORECASE,
)
_GREYLISTED_WORDS: Final = re.compile(r"gr[ea]y.?list", re.IGNORECASE)
_TOO_LARGE_CODES: Final = ("5.3.4", "5.2.3")
_QUEUE_ID: Final = re.compile(r"(?:queued as |\bid=|^ok )([A-Za-z0-9][A-Za-z0-9._-]{3,99})(?=$|[\s;,)])", re.IGNORECASE)
"""Postfix and many more; Exim; Amazon SES."""


MOST_RUNS: Final = 10
"""Of refused recipients that stand together and were refused alike: as many are told."""


def reply_of(code: int, text: str) -> SmtpReply:
    """A reply from its basic code and everything behind it."""
    # An empty first line counts as a line: in a reply to EHLO the extensions begin with the second line.
    text = text.rstrip().lstrip(" \t")
    found = _ENHANCED.match(text)
    # RFC 2034, section 4: the enhanced code's class repeats the basic code's; else it is not one.
    if found is None or found[1][0] != str(code)[0]:
        return SmtpReply(code, "", text)
    return SmtpReply(code, found[1], text[found.end() :].lstrip(" \t"))


def refusal(reply: SmtpReply, phase: SmtpPhase) -> Outcome:
    """What a reply other than the expected one means for the email."""
    words = scrub(reply.text) or None
    if reply.is_transient:
        reason, concern = _transient_reason(reply, phase)
        return Deferred(reason, words, reply.codes, known_concern=concern)
    if reply.is_permanent:
        return Rejected(_permanent_reason(reply, phase), words, reply.codes)
    detail = f"unexpected reply {phase}" + (f": {words}" if words else "")
    if phase is SmtpPhase.FINAL:
        return Uncertain(detail, reply.codes)
    return Deferred(Reason.SERVER_ERROR, detail, reply.codes)


def acceptance(reply: SmtpReply, refused: Sequence[tuple[int, SmtpReply]]) -> Accepted:
    """The outcome of a positive final reply.

    Args:
        refused: The recipients that the server refused, by their position from 1; it took the rest.
    """
    queue_id = _QUEUE_ID.search(reply.text)
    detail = scrub(f"{reply.codes} {reply.text}")
    if refused:
        detail = f"{refused_recipients(refused)}; {detail}"
    return Accepted(queue_id[1] if queue_id else None, detail)


def no_recipient_left(refused: Sequence[tuple[int, SmtpReply]]) -> Outcome:
    """The outcome where the server refused every recipient: for now, if it refused any of them for now."""
    decisive = next((reply for _, reply in refused if not reply.is_permanent), refused[0][1])
    outcome = refusal(decisive, SmtpPhase.RCPT)
    if len(refused) == 1 or isinstance(outcome, Accepted | Uncertain):
        return outcome
    detail = f"{refused_recipients(refused)}; {outcome.detail}"
    return replace(outcome, detail=detail)


def refused_recipients(refused: Sequence[tuple[int, SmtpReply]]) -> str:
    """Which recipients were refused, by position and code: `refused recipients: 2 (550 5.1.1), 101-150 (452 4.5.3)`."""
    runs: list[tuple[int, int, str]] = []
    for position, reply in refused:
        if runs and runs[-1][1:] == (position - 1, reply.codes):
            runs[-1] = (runs[-1][0], position, reply.codes)
        else:
            runs.append((position, position, reply.codes))
    shown = [f"{first if first == last else f'{first}-{last}'} ({codes})" for first, last, codes in runs[:MOST_RUNS]]
    left = sum(last - first + 1 for first, last, _ in runs[MOST_RUNS:])
    return f"{SOME_REFUSED}{', '.join(shown)}{f' and {left} more' if left else ''}"


def _transient_reason(reply: SmtpReply, phase: SmtpPhase) -> tuple[Reason, Concern | None]:
    words = reply.text[:1000]
    if reply.enhanced.startswith(("4.1.", "4.2.")) or _GREYLISTED_WORDS.search(words):
        return Reason.RECIPIENT_DEFERRED, Concern.EMAIL
    # A refusal of RCPT is about the recipient, whatever it says. If many recipients get it, it is about the server.
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
    # 5.7.x on RCPT is policy: relaying denied, a blocklist; the address may be fine.
    return reply.enhanced.startswith(("5.1.", "5.2.")) or (reply.code in (550, 551, 553) and not reply.enhanced)
