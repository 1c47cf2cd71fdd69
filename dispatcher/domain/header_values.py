"""The values of headers that mail software parses: lists of URLs, message ids, tokens, addresses.

Mail software decodes an encoded word (RFC 2047) only in free text and in the name of an address or a list. Elsewhere,
an encoded word would be part of a URL or an id. So these values become ASCII, or are refused:

    URLS           <https://example.com/u?x=1>, <mailto:u@example.com>    percent-encoded; hosts as in DNS (Punycode)
    MESSAGE_IDS    <1@example.com> <2@example.com>                        must be ASCII
    TOKENS         List-Unsubscribe=One-Click                             must be ASCII
    LIST_ID        Offers <offers.example.com>                            only the name may have other characters
    ADDRESSES      Ann <ann@example.org>, bob@example.org                 only names and domains may have them
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

from dispatcher.domain.address import ascii_host, parse_address, split_name

MAX_WORD_CHARACTERS: Final = 900
"""A longer word cannot be folded below RFC 5322's limit of 998 octets for a line, which also contains the name."""


HeaderKind = Enum("HeaderKind", "URLS MESSAGE_IDS TOKENS LIST_ID ADDRESSES")
_NAMES: Final = {
    HeaderKind.URLS: "list-unsubscribe list-subscribe list-help list-post list-owner list-archive archived-at",
    HeaderKind.MESSAGE_IDS: "references in-reply-to supersedes obsoletes original-message-id",
    HeaderKind.TOKENS: (
        "list-unsubscribe-post auto-submitted precedence x-auto-response-suppress feedback-id importance priority "
        "x-priority x-msmail-priority sensitivity expires reply-by disposition-notification-options autocrypt"
    ),
    HeaderKind.LIST_ID: "list-id",
    HeaderKind.ADDRESSES: "disposition-notification-to x-confirm-reading-to mail-followup-to mail-reply-to",
}
HEADER_KINDS: Final = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""The kinds of headers by name, in lower case. Every other header contains free text."""

_URL: Final = re.compile(r"<([^<>]*)>")
_HOST: Final = re.compile(r"((?:[^:/?#]+:)?//(?:[^/?#]*@)?|mailto:[^?]*@)([^/?#:]+)", re.IGNORECASE)
_NOT_IN_URLS: Final = re.compile(r"[^!#-;=?-~]+")
_COMMA: Final = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*\Z)')
"""Matches a comma that is not in quotes."""


def named_parts(kind: HeaderKind, value: str) -> list[tuple[str, str]]:
    """The parts of a value of this kind, which commas separate: each is a name (perhaps empty), which a header may
    encode, and the ASCII text that follows. Raises ValueError, which says why, and never quotes the value."""
    if kind is HeaderKind.URLS:
        value = _URL.sub(_ascii_url, value).replace(">,<", ">, <")
    elif kind is HeaderKind.MESSAGE_IDS:
        value = value.replace("><", "> <")
    parts = [("", " ".join(value.split()))] if value.isascii() else list(_foreign_parts(kind, value))
    if any(len(word) > MAX_WORD_CHARACTERS for _, text in parts for word in text.split(" ")):
        raise ValueError(f"contains more than {MAX_WORD_CHARACTERS} characters without a space; shorten it")
    return parts


def _foreign_parts(kind: HeaderKind, value: str) -> list[tuple[str, str]]:
    """The parts of a value that is not ASCII."""
    if kind is HeaderKind.ADDRESSES:
        found = [parse_address(text.strip()) for text in _COMMA.split(value)]
        parts = [(each.display_name, f"<{each.local}@{ascii_host(each.domain)}>") for each in found]
    elif kind is HeaderKind.LIST_ID and value.endswith(">"):
        phrase, list_id = split_name(value)
        parts = [(phrase, f"<{list_id}>")]
    else:
        parts = [("", value)]
    if not all(text.isascii() for _, text in parts):
        raise ValueError("contains a character that is not ASCII, where mail software does not decode it; remove it")
    return parts


def _ascii_url(found: re.Match[str]) -> str:
    url = found[1].strip()
    if not url.isascii() and (host := _HOST.match(url)):
        url = f"{host[1]}{ascii_host(host[2])}{url[host.end() :]}"
    return f"<{_NOT_IN_URLS.sub(lambda part: ''.join(f'%{octet:02X}' for octet in part[0].encode()), url)}>"


def header_value_fault(name: str, value: str) -> str | None:
    """Why a header cannot contain the value: a phrase to put after the header's name. None if it can."""
    if (kind := HEADER_KINDS.get(name.lower())) is not None:
        try:
            named_parts(kind, value)
        except ValueError as error:
            return str(error)
    return None
