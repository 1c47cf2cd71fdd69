"""Removes everything from a provider's error text that repeats a part of the email.

`scrub` gets only the text, so it recognizes addresses only by their at sign. A server may also repeat the mailbox name
alone ("ann.lee: no such user"), the subject, a line of the body, or a code from the body. This module therefore
compares the text with the email. It removes names of mailboxes and recipients, quotes of three words or more, whole
short headers and file names, and single words that look like a code or a token. The disadvantage: if the email and the
provider use the same phrase by chance, the operator does not see the phrase.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from dispatcher.domain.outcome import SOME_REFUSED, Accepted, Outcome
from dispatcher.domain.outgoing import OutgoingEmail

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
    ours, theirs = _split_detail(outcome.detail)
    words = ours + words_without_echo(theirs, email)
    return outcome if words == outcome.detail else replace(outcome, detail=words)


def _split_detail(detail: str) -> tuple[str, str]:
    """Splits the text into our list of refused recipients (positions and codes only) and the provider's text."""
    if not detail.startswith(SOME_REFUSED):
        return "", detail
    ours, separator, theirs = detail.partition("; ")
    return ours + separator, theirs


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
    return _without_quotes(words, "\n".join(_plain(part) for part in _parts(email)))


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


def _plain(text: str) -> str:
    """The words of a text, case-folded, without line breaks and punctuation."""
    return f" {' '.join(_WORD.findall(text.casefold()))} "


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
    return int(_looks_like_code(plain[at]) and f" {plain[at]} " in email_words)


def _looks_like_code(word: str) -> bool:
    if len(word) < CODE_CHARACTERS:
        return False
    return len(word) >= TOKEN_CHARACTERS or any(character.isdigit() for character in word)
