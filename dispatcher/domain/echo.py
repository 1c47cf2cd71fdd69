"""What a provider says about one email, without what it repeats of that email.

`scrub` knows an address by its at sign, and nothing of the email. A server may as well call the mailbox by its name
alone ("ann.lee: no such user"), quote the subject that it dislikes, a line of the body, or the code in it. What of its
words stands in the email is therefore left out: names of mailboxes and recipients, quotes of three words or more, the
whole of a short header or file name, and single words that look like a code or a token. That an operator loses a phrase
which both happened to use is the price.
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
"""So many words that stand together in the email, too, and so many characters, are a quote of it."""
NAME_CHARACTERS: Final = 3
"""Shorter names are in too many words."""
CODE_CHARACTERS: Final = 4
"""A word with a digit in it: a one-time code, an order's number. Reply codes have three."""
TOKEN_CHARACTERS: Final = 20
BODY_CHARACTERS: Final = 256 * 1024
"""Of a body, as much is compared."""

_WORD: Final = re.compile(r"\w+")
_TAG: Final = re.compile(r"<[^<>]{0,2000}>")
_CUT: Final = re.compile(r"\w+…$")


def without_echo(outcome: Outcome, email: OutgoingEmail) -> Outcome:
    """The outcome, its words without what they repeat of the email."""
    if not outcome.detail:
        return outcome
    # An acceptance is the common case and rarely repeats anything: then that is all that is looked for.
    if isinstance(outcome, Accepted) and not _names_somebody(outcome.detail.casefold(), email):
        return outcome
    ours, theirs = _ours(outcome.detail)
    words = ours + words_without_echo(theirs, email)
    return outcome if words == outcome.detail else replace(outcome, detail=words)


def _ours(detail: str) -> tuple[str, str]:
    """What we say ourselves of refused recipients, in positions and codes, and the provider's words."""
    if not detail.startswith(SOME_REFUSED):
        return "", detail
    ours, separator, theirs = detail.partition("; ")
    return ours + separator, theirs


def _names_somebody(folded: str, email: OutgoingEmail) -> bool:
    """Whether words hold a mailbox's name, or the subject."""
    if email.subject and email.subject.casefold() in folded:
        return True
    for addresses in (email.to, email.cc, email.bcc, email.reply_to):
        for address in addresses:
            local = address[address.rfind("<") + 1 : address.rfind("@")]
            if local.casefold() in folded and len(local) >= NAME_CHARACTERS:
                return True
    return False


def words_without_echo(words: str, email: OutgoingEmail) -> str:
    """A provider's scrubbed words, without what they repeat of the email."""
    # What was cut off in the middle of a word is no longer recognised.
    words = _CUT.sub("…", words)
    folded = words.casefold()
    for name in [each for each in _names(email) if len(each) >= NAME_CHARACTERS and each.casefold() in folded]:
        words = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", PRIVATE_WORD, words, flags=re.IGNORECASE)
    return _without_quotes(words, "\n".join(_plain(part) for part in _parts(email)))


def _names(email: OutgoingEmail) -> Iterator[str]:
    """What a mailbox or its owner is called, and the whole of what has few words."""
    for address in (email.sender, *email.to, *email.cc, *email.bcc, *email.reply_to):
        name, _, spec = address.rpartition("<")
        yield spec.partition("@")[0]
        yield name.strip(' "')
        if address is not email.sender:
            yield from _WORD.findall(name)
    yield email.subject
    yield from email.headers.values()
    for attachment in email.attachments:
        yield attachment.filename


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
    """Its words alone, so that line breaks, quotes and cases make no difference."""
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
    """How many words from here on are a quote; 0 for none."""
    length = QUOTED_WORDS
    while at + length <= len(plain) and f" {' '.join(plain[at : at + length])} " in email_words:
        length += 1
    length -= 1
    if length >= QUOTED_WORDS and len(" ".join(plain[at : at + length])) >= QUOTED_CHARACTERS:
        return length
    return int(_is_telling(plain[at]) and f" {plain[at]} " in email_words)


def _is_telling(word: str) -> bool:
    if len(word) < CODE_CHARACTERS:
        return False
    return len(word) >= TOKEN_CHARACTERS or any(character.isdigit() for character in word)
