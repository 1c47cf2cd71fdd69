"""What a provider's error text says, and what it must not repeat.

Servers use 550 and 554 for nearly everything, so only the words show whether a refusal concerns one recipient, or our
account, host or sender: one vocabulary for all providers. A wrong match does little harm: routing believes an account
fault only if other emails are refused, too (see `routing.evidence`).

`scrub` gets only the text, so it recognizes addresses only by their at sign. A server may also repeat the mailbox name
alone ("ann.lee: no such user"), the subject, a line of the body, or a code from the body. So the text is compared with
the email: names of mailboxes and recipients, quotes of three words or more, whole short headers and file names, and
single words that look like a code or a token are removed. The disadvantage: if the email and the provider use the same
phrase by chance, the operator does not see the phrase.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from dispatcher.domain.outcome import SOME_REFUSED, Accepted, AccountFault, Outcome
from dispatcher.domain.outgoing import OutgoingEmail

QUOTA_SECONDS: Final = 3600.0
"""How long a provider is not tried after its quota is used up, if its answer names no shorter time."""


class Cause(Enum):
    """A cause of a refusal that is not a fault of our account."""

    RECIPIENT = auto()
    """The recipient: unknown, full, busy, or with a policy of its own."""
    RATE = auto()
    """The rate at which we send now."""


QUOTA: Final = AccountFault(
    "Wait until the quota resets, ask the provider for a higher quota, or add a second provider.", QUOTA_SECONDS
)
STOPPED: Final = AccountFault("Ask the provider why this account may not send: suspended, unpaid, or not yet approved.")
LOGIN: Final = AccountFault("Check the user, the password and the port in DISPATCHER_SMTP_URL.")
RELAY: Final = AccountFault("Log in (DISPATCHER_SMTP_URL), or let the server relay emails from this host.")
HOST: Final = AccountFault("Check this host's IP address, its reverse DNS and name, and whether blocklists list it.")
SENDER: Final = AccountFault(
    "Verify the sender's address or domain at the provider, or let this account send as this sender.",
    by_sender=True,
)

_LEFT_OUT: Final = re.compile(r"<[^<>]*>|[^\s@]{0,64}@\S*|recipient address rejected:", re.IGNORECASE)
"""Addresses, because their parts can look like words, and what Postfix writes before the words of a policy service."""

_CODES: Final[dict[str, Cause | AccountFault]] = {
    code: cause
    for cause, codes in (
        (Cause.RECIPIENT, "2.2 2.121 2.122"),
        (Cause.RATE, "7.28 7.500 7.650 7.651 4.4.5"),
        (QUOTA, "5.4.5 1.90 7.232 7.233 7.705"),
        (STOPPED, "7.501 7.502 7.503 7.708"),
        (LOGIN, "7.57"),
        (RELAY, "7.64"),
        (HOST, "7.25 7.511"),
        (SENDER, "1.7 1.8 7.26 7.27 7.30 7.60 7.750"),
    )
    for code in codes.split()
}
"""By enhanced code, mostly without its class: RFC 3463, and the codes of Gmail and Exchange Online."""
_OF_RECIPIENT: Final = re.compile(r"[45]\.(?:1\.[12346]|1\.10|2\.\d+)$")

_NO: Final = r"(?:not |no longer|does(?: not|n't)|un(?:known|verified|available|routeable|auth)|invalid|inactive|disab)"
_MAY: Final = r"(?:allowed|permitted|authori[sz]ed|enabled|approved)"
_STOP: Final = r"(?:suspend|paus|disab|deactivat|restrict|block|lock|frozen|terminat)"
_REFUSED: Final = r"(?:reject|den[iy]|block|ban|refus|prohibit|forbid|disallow|not )"
_PERIOD: Final = r"(?:the |last |past |an? |one |\d+ ?)*(?:second|minute|min|hour|day|week|month|24)"
_RULES: Final = rf"""
recipient you (?:tried|are trying) to (?:reach|contact)
recipient receiving (?:e?mail|messages)
recipient \brecipient(?:'s)? (?:\w+ ){{0,3}}(?:polic|spam|filter|prefer|quota|inbox|mailbox|rate|limit)
recipient recipient (?:\w+ ){{0,2}}(?:do(?:es)?(?: not|n't)|has) (?:accept|block)
recipient (?:mailbox|inbox|storage|disk)\W+(?:\w+\W+){{0,4}}?(?:full|quota|exceed|over)
quota     submissionquota|\bper {_PERIOD}\W+(?:limit|quota)
quota     (?:daily|hourly|weekly|monthly|24.hour)\b.{{0,50}}(?:quota|limit|exceed|maximum|reached)
quota     (?:quota|limit|exceed\w*|maximum|max|many)\b.{{0,60}}?\b(?:per|an?|every|each|in|last|within) {_PERIOD}
quota     (?:limit|quota)\b.{{0,40}}\b(?:reached|today)
quota     \bquota\b.{{0,30}}(?:exceed|used)|credits? (?:exceed|exhaust|limit|used)
quota     exceed\w*\b.{{0,50}}\bquota
quota     (?:sending|submission|outgoing|outbound|relay|account)\W(?:(?!rate)\w+\W){{0,2}}limit
rate      throttl|slow down|unusual rate|concurrent|\bTSS\d\d
rate      too (?:fast|quickly|frequent|much (?:e?mail|traffic))
rate      too many (?:\w+ ){{0,2}}(?:messages|e?mails|connections|sessions|requests|transactions|attempts)
rate      \brates?\W(?:\w+\W+){{0,3}}(?:limit|quota|exceed|control)
rate      (?:exceed|limit)\w*\b.{{0,30}}\brate\b
rate      (?:message|connection|thread|session)s?.(?:limit|quota)
stopped   \b(?:sending|out(?:going|bound)|your (?:\w+ )?(?:account|domain)|this account)\b.{{0,60}}{_STOP}
stopped   account\b.{{0,40}}(?:suspend|not (?:active|{_MAY}))
stopped   (?:domain|account|user|you) (?:\S+ ){{0,2}}not {_MAY} to send(?! (?:as|from|on behalf))
stopped   (?:insufficient|not enough) (?:credit|balance|fund)
stopped   unpaid|billing|payment (?:required|overdue|fail)|testing emails|sandbox
sender    \b(?:dmarc|spf|dkim)\b
login     unauthenticated|not authenticated|log ?in (?:first|to)|before.smtp
login     \bauth\w* (?:is |was )?(?:required|needed|first|not enabled)
login     (?:must|please|need to|requires?|have to)(?: \w+){{0,2}} (?:auth|log ?in|start ?tls)
relay     \brelay\w*\b.{{0,30}}{_REFUSED}
relay     (?:unable|unauthori[sz]ed|can ?not|can't|not)\b.{{0,30}}\brelay
relay     rcpthosts
host      (?:client host|\b(?:helo|ehlo|ip|ptr)\b|reverse dns)\b.{{0,90}}(?:{_REFUSED}|{_NO}|list|require)
host      {_REFUSED}\w*\b.{{0,40}}\b(?:ip|your (?:host|server|network))\b
host      \b(?:black|block|deny).?list|spamhaus|\b(?:dns[bw]l|rbl)\b|(?:poor|low|bad) reputation
sender    \b(?:sender|from|return.path|envelope)\b.{{0,60}}(?:{_REFUSED}|{_NO}|must|mismatch)
sender    (?:not|un).?verified|verified sender|send (?:as|on behalf)
sender    not {_MAY} to send
recipient \b(?:user|recipient|mailbox|account|address|destination)\W+(?:[^\s,;]+ ){{0,4}}?(?:{_NO}|full|over)
recipient (?:un(?:known|routeable)|invalid|bad|no such) (?:\w+ )?(?:user|recipient|mailbox|address|local|account)
recipient no (?:mailbox|valid recip)|nosuchuser|over ?quota
"""
"""One rule per line: the cause, and a pattern for the words. The first match decides. A quota or a rate comes early,
because words about it often mention accounts and senders."""
_NAMES: Final[dict[str, Cause | AccountFault]] = dict(
    zip(
        ("recipient", "rate", "quota", "stopped", "login", "relay", "host", "sender"),
        (Cause.RECIPIENT, Cause.RATE, QUOTA, STOPPED, LOGIN, RELAY, HOST, SENDER),
        strict=True,
    )
)
_TABLE: Final = tuple(
    (_NAMES[name], words) for name, words in (rule.split(maxsplit=1) for rule in _RULES.strip().splitlines())
)
_NAMED: Final = re.compile(
    r"\b(?:in|after|for|within|per|every|last|an?|next)\s+(?:the\s+)?(\d{0,5})\s*(second|minute|min\b|hour|day)",
    re.IGNORECASE,
)
_SECONDS: Final = {"second": 1.0, "minute": 60.0, "min": 60.0, "hour": 3600.0, "day": 86_400.0}


def cause_of(words: str, enhanced: str = "") -> Cause | AccountFault | None:
    """The cause of a refusal, by the provider's text and its enhanced code (or empty); None if no rule matches."""
    words = _LEFT_OUT.sub("", words[:1000])
    found = _CODES.get(enhanced) or _CODES.get(enhanced.partition(".")[2]) or _by_words(words, enhanced)
    if not isinstance(found, AccountFault) or found != QUOTA:
        return found
    # The time that the words name, at most QUOTA_SECONDS.
    named = [float(count or 1) * _SECONDS[unit.lower()] for count, unit in _NAMED.findall(words)]
    return replace(found, seconds=min([QUOTA_SECONDS, *(seconds for seconds in named if seconds >= 1)]))


def _by_words(words: str, enhanced: str) -> Cause | AccountFault | None:
    is_of_recipient = _OF_RECIPIENT.match(enhanced) is not None
    for cause, pattern in _TABLE:  # `re` compiles a pattern at its first use: all of them would take 6 ms of each start
        # A code about the recipient outweighs all words except those about a quota or a rate.
        if is_of_recipient and cause not in (Cause.RECIPIENT, QUOTA, Cause.RATE):
            return Cause.RECIPIENT
        if re.search(pattern, words, re.IGNORECASE):
            return cause
    return None


PRIVATE_WORD: Final = "<private>"

QUOTED_WORDS: Final = 3
QUOTED_CHARACTERS: Final = 12
"""A run of at least QUOTED_WORDS words and this many characters that also occurs in the email counts as a quote."""
NAME_CHARACTERS: Final = 3
"""Minimum length of a name to remove. Shorter names occur inside too many ordinary words."""
CODE_CHARACTERS: Final = 4
"""Minimum length of a word to remove if it contains a digit, such as a one-time code or an order number. Reply codes
have only three characters, so they stay."""
TOKEN_CHARACTERS: Final = 20
"""A word of at least this length counts as a token, even without a digit."""
BODY_CHARACTERS: Final = 256 * 1024
"""Only the first part of each body, up to this length, is compared."""

_WORD: Final = re.compile(r"\w+")
_TAG: Final = re.compile(r"<[^<>]{0,2000}>")
_CUT: Final = re.compile(r"\w+…$")


def without_echo(outcome: Outcome, email: OutgoingEmail) -> Outcome:
    """The outcome without any text that repeats a part of the email."""
    if not outcome.detail:
        return outcome
    # Fast path: acceptances are common and rarely repeat anything, so only names and the subject are searched.
    if isinstance(outcome, Accepted) and not _names_recipient_or_subject(outcome.detail.casefold(), email):
        return outcome
    # Keep our list of refused recipients, which has positions and codes only, before the provider's text.
    is_listed = outcome.detail.startswith(SOME_REFUSED)
    ours, separator, theirs = outcome.detail.partition("; ") if is_listed else ("", "", outcome.detail)
    words = ours + separator + words_without_echo(theirs, email)
    return outcome if words == outcome.detail else replace(outcome, detail=words)


def _names_recipient_or_subject(folded: str, email: OutgoingEmail) -> bool:
    if email.subject and email.subject.casefold() in folded:
        return True
    for addresses in (email.to, email.cc, email.bcc, email.reply_to):
        for address in addresses:
            local = _local_part(address[address.rfind("<") + 1 :])
            mailbox = local.partition("+")[0]
            name = mailbox if len(mailbox) >= NAME_CHARACTERS else local
            if name.casefold() in folded and len(name) >= NAME_CHARACTERS:
                return True
    return False


def words_without_echo(words: str, email: OutgoingEmail) -> str:
    """The provider's scrubbed text, without anything that repeats a part of the email."""
    # `scrub` may have cut the last word. Remove a word that was cut: the code below finds only whole words.
    words = _CUT.sub("…", words)
    folded = words.casefold()
    for name in [each for each in _names(email) if len(each) >= NAME_CHARACTERS and each.casefold() in folded]:
        words = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", PRIVATE_WORD, words, flags=re.IGNORECASE)
    # The words of the email, case-folded, without line breaks and punctuation.
    plain = (" ".join(_WORD.findall(part.casefold())) for part in _parts(email))
    return _without_quotes(words, "\n".join(f" {part} " for part in plain))


def _names(email: OutgoingEmail) -> Iterator[str]:
    """The parts of the email that are compared as a whole: names of mailboxes and of people, the subject, header values
    and file names."""
    for address in (email.sender, *email.to, *email.cc, *email.bcc, *email.reply_to):
        name, _, spec = address.rpartition("<")
        local = _local_part(spec)
        yield local
        yield local.partition("+")[0]  # without its tag, because a server may repeat the mailbox's own name
        yield name.strip(' "')
        if address is not email.sender:
            yield from _WORD.findall(name)
    yield email.subject
    yield from email.headers.values()
    for attachment in email.attachments:
        yield attachment.filename


def _local_part(spec: str) -> str:
    return spec.partition("@")[0].strip('"').lstrip("+")


def _parts(email: OutgoingEmail) -> Iterator[str]:
    yield email.subject
    yield from email.headers.values()
    for attachment in email.attachments:
        yield attachment.filename
    yield (email.text or "")[:BODY_CHARACTERS]
    yield _TAG.sub(" ", (email.html or "")[:BODY_CHARACTERS])
    if email.calendar is not None:
        yield email.calendar.content[:BODY_CHARACTERS]
    if email.raw is not None:
        yield _TAG.sub(" ", email.raw[:BODY_CHARACTERS].decode("utf-8", "replace"))
    yield from _texts(email.template_data)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def _without_quotes(words: str, email_words: str) -> str:
    found = list(_WORD.finditer(words))
    plain = [match[0].casefold() for match in found]
    kept, copied_until, at = [], 0, 0
    while at < len(found):
        length = _quoted_length(plain, at, email_words)
        if length:
            kept += [words[copied_until : found[at].start()], PRIVATE_WORD]
            copied_until = found[at + length - 1].end()
        at += length or 1
    return "".join([*kept, words[copied_until:]])


def _quoted_length(plain: list[str], at: int, email_words: str) -> int:
    """The number of words, starting at `at`, that quote the email; 0 if no quote starts at `at`."""
    length = QUOTED_WORDS
    while at + length <= len(plain) and f" {' '.join(plain[at : at + length])} " in email_words:
        length += 1
    length -= 1
    if length >= QUOTED_WORDS and len(" ".join(plain[at : at + length])) >= QUOTED_CHARACTERS:
        return length
    word = plain[at]
    has_digit = any(character.isdigit() for character in word)
    is_code = len(word) >= TOKEN_CHARACTERS or (len(word) >= CODE_CHARACTERS and has_digit)
    return int(is_code and f" {word} " in email_words)
