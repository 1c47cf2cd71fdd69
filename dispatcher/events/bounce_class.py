"""Decides from a server's refusal how permanent a bounce is: hard, soft or blocked.

A hard bounce stops later emails to the address, so a doubtful bounce is never hard. Many servers answer 5.1.1 (unknown
address) to everything. So words about the sender, a full mailbox or a temporary fault count more than the status code.
If several status codes contradict each other, the bounce is not hard.
"""

from __future__ import annotations

import re
from typing import Final

from dispatcher.domain.event import Bounce

ENHANCED: Final = re.compile(r"(?<![\d.])([245]\.[0-7]\.\d{1,3})(?!\d|\.\d)")
"""An enhanced status code (RFC 3463). Does not match a part of an IP address or of a version number."""
REPLY: Final = re.compile(r"(?<![\w.-])([45]\d\d)(?=[ -][\w#<(\[:]|$)")
"""An SMTP reply code (RFC 5321)."""
AFTER_DATA: Final = re.compile(r"end of data|to data command|after data|>>> data\s+<<< 5(?!03)", re.IGNORECASE)
"""Matches a text that says: a server accepted the recipient, and then refused the content."""

_HARD_CODES: Final = frozenset({"5.1.1", "5.1.2", "5.1.3", "5.1.6", "5.1.10"})
_BLOCKED_CODES: Final = frozenset({"5.1.7", "5.1.8"})
_VAGUE_CODES: Final = frozenset({"5.1.0", "5.1.351", "5.2.1", "5.3.0", "5.4.0", "5.4.4", "5.5.0"})
"""Servers send these codes, and all codes that end with `.0.0`, for many reasons. So the server's text decides."""
_CAUTIOUS: Final = (Bounce.BLOCKED, Bounce.SOFT, Bounce.HARD)

_NAME: Final = re.compile(r"[a-z][\w-]{0,62}\.[a-z]{2}", re.IGNORECASE)
"""A word that contains a host name. Such a word is ignored: the host `relay.example.com` says nothing about
relaying."""


def any_of(*phrases: str) -> re.Pattern[str]:
    """A pattern that matches any of the phrases (regular expressions), in upper or lower case."""
    return re.compile("|".join(phrases), re.IGNORECASE | re.MULTILINE)


_UNKNOWN_TO_MICROSOFT: Final = any_of(
    # According to the documentation of Microsoft 365 and of Outlook.com, these replies mean that the address does not
    # exist.
    r"5\.4\.1 .{0,320}recipient address rejected: access denied",
    r"5\.5\.0 .{0,20}requested action not taken: mailbox unavailable",
)
_BLOCKED: Final = any_of(
    r"spam|unsolicited|phish|virus|malware|content (reject|filter)",
    r"black ?-?list|block(ed|ing| ?-?list)|banned|\b[prsx]bl\b|dnsbl|reputation|polic(y|ies)",
    r"\bspf\b|\bdkim\b|dmarc|authenticat|reverse dns|\bptr\b",
    r"prohibited|unauthori[sz]ed|restricted|relay|refused due|preferences|not (allowed|permitted|authori[sz]ed)",
    r"(access|permission|delivery|sender|message|mail)\b.{0,20} denied",
    r"sender (address|verif|domain|id|is |not |rejected|refused)|verif\w+ failed",
    r"not accept(ing)? (mail|messages?|e-?mail) from",
)
_TEMPORARY: Final = any_of(
    r"quota|(mail ?box|mail ?folder|inbox|mail ?drop|storage|disk|account).{0,40}(\bfull\b|exceed|over)|\bis full\b",
    r"insufficient|out of (storage|space)|not enough|resources",
    r"too (large|big|many|long|old|busy)|(message|maximum).{0,20} size|size (limit|exceed)",
    r"exceeds? .{0,20}(limit|size|maximum)|\brate\b|gr[ae]y ?list|\bloop(s|ing)?\b|hop count",
    r"temporar|try(ing)? (again )?(later|in |after)|, try again|expired|time(d|s)? ?-?out|disabled|suspended|inactive",
    r"connection (was )?(refused|reset|lost|closed|dropped)|no route|unreachable|has not been able to",
    r"unable to (connect|establish)|could ?n.t (connect|establish)",
)
_OF_MAILBOX: Final = r"(user|recipient|mail ?box|account|address|alias|local ?part)"
_UNKNOWN_ADDRESS: Final = any_of(
    r"(unknown|no such) (user|recipient(?! or )|address|mail ?box|account|(or illegal )?alias|local ?part|person)",
    rf"{_OF_MAILBOX}(name)?( is)? unknown|(unknown|no such) (host|domain)|host unknown",
    r"(user|mail ?box|account|recipient|address|domain|host)\b.{0,80}"
    r"(not found|(not|n.t) be found|n.t found|(do|does|did)( not|n.t) exist|is not known|not known at|not listed in)",
    r"does( not|n.t) have an? .{0,40}account|no mail ?box (here|by that)|not our customer",
    r"no(t a)? (known|valid) (user|recipient|mail ?box|address)|invalid (recipient|mail ?box|user|address)",
    rf"{_OF_MAILBOX}( is| was)? (not exist|invalid|nonexistent|not recogni[sz]ed)|invalid .{{0,20}}userid",
    r"(mail ?box|account)( is| has been| was)? (deleted|closed|discontinued)",
    r"no (user|account|one) (here )?(by|with) that (name|address)",
    r"unrout(e)?able (mail )?(domain|address)|host or domain name not found|null ?mx|no smtp service",
    r"could ?n.t find (any host|a mail exchanger)|(bad|invalid) destination (mail ?box|host)",
)
_RULES: Final = (
    (_UNKNOWN_TO_MICROSOFT, Bounce.HARD),
    (_BLOCKED, Bounce.BLOCKED),
    (_TEMPORARY, Bounce.SOFT),
)


def classify(status: str | None, words: str, *, after_data: bool = False) -> Bounce:
    """How permanent a bounce is: hard, soft or blocked. `words`: what the servers said about the recipient.

    `after_data`: whether the server refused the email only after it had received the content. Some servers then say
    that the user is unknown; these words are ignored.
    """
    words = " ".join((status or "", *(word for word in words.split() if not _NAME.search(word))))
    for pattern, bounce in _RULES:
        if pattern.search(words):
            return bounce
    codes = ENHANCED.findall(words)
    if any(code.startswith("4") for code in (*codes, *REPLY.findall(words))):
        return Bounce.SOFT  # the receiving server refused only for now, but the sending server gave up
    specific = {_of_code(code) for code in codes if not is_vague(code)}
    if not specific:
        return Bounce.HARD if _UNKNOWN_ADDRESS.search(words) and not after_data else Bounce.SOFT
    return min(specific, key=_CAUTIOUS.index)


def says_why(words: str) -> bool:
    """Whether the words give a reason for the refusal: a status code or a known phrase."""
    patterns = (ENHANCED, REPLY, _UNKNOWN_ADDRESS, _BLOCKED, _TEMPORARY)
    return any(pattern.search(words) for pattern in patterns)


def is_vague(code: str) -> bool:
    """Whether the code does not say why the email was refused."""
    return code in _VAGUE_CODES or code.endswith(".0.0") or code.startswith("2")


def _of_code(code: str) -> Bounce:
    if code in _HARD_CODES:
        return Bounce.HARD
    return Bounce.BLOCKED if code.startswith("5.7.") or code in _BLOCKED_CODES else Bounce.SOFT
