"""Addresses: `local@domain`, `Display Name <local@domain>` or `"Display Name" <local@domain>`, and nothing else.

Narrower than RFC 5322 on purpose. Refused although the RFC has them: quoted local parts (RFC 5321, section 4.1.2,
advises against them), address literals such as `[192.0.2.1]` (they go round DNS), comments, groups, folding, and a
comma or other special in a name that is not quoted; providers refuse most of these too. Wider in one way: letters of
all scripts, in both halves (RFC 6531). Python's own `email.utils.parseaddr` guesses where we refuse, hence this module.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from dispatcher.domain.text import name_fault

MAX_LOCAL_OCTETS: Final = 64
"""RFC 5321, section 4.5.3.1.1; in UTF-8 where it is not ASCII."""
MAX_ADDRESS_OCTETS: Final = 254
"""RFC 5321, section 4.5.3.1.3: a path has 256 octets, with its angle brackets. Keeps the domain below its own 255."""
MAX_LABEL_OCTETS: Final = 63
"""RFC 1035, section 2.3.4; as it stands in DNS, that is in Punycode where it is not ASCII."""
MAX_NAME_CHARACTERS: Final = 255
"""No standard says; more is no name, and keeps an address far below a header line's 998 octets."""
_MAX_TEXT_CHARACTERS: Final = 2 * MAX_NAME_CHARACTERS + MAX_ADDRESS_OCTETS + 10
"""A quoted name of escapes only, an address, brackets and spaces: what is longer is refused unread."""

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ASCII_LOCAL: Final = re.compile(rf"{_ATOM}(?:\.{_ATOM})*")
_ASCII_DOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PLAIN: Final = re.compile(rf"(?![^@]*=\?)({_ASCII_LOCAL.pattern})@({_ASCII_DOMAIN.pattern})")
_QUOTED_NAME: Final = re.compile(r'"((?:[^"\\]|\\.)*)" *<([^<>]*)>')
_ESCAPE: Final = re.compile(r"\\(.)")
_NEEDS_QUOTES: Final = re.compile(r'[()<>\[\]:;@\\,"]')
_SEPARATOR: Final = re.compile(r'[\s()<>\[\]:;@\\,".]')
_ASCII: Final = re.compile(r"[\x00-\x7f]+")
_HOST_CATEGORIES: Final = frozenset({"Ll", "Lu", "Lo", "Lm", "Mn", "Mc", "Nd"})
"""What RFC 5892 (section 2.1, LetterDigits) builds domain names from."""
_HOST_EXCEPTIONS: Final = frozenset("\u06fd\u06fe\u0f0b\u3007")
"""Allowed besides (section 2.6), among them the zero of Chinese and Japanese numbers."""


@dataclass(frozen=True, slots=True)
class Address:
    """One mailbox.

    Attributes:
        display_name: Unquoted; empty if there is none.
        local: As given; ASCII or not (then the provider needs SMTPUTF8).
        domain: As given; one that is not ASCII needs IDNA (UTS 46) before it goes on the wire.
    """

    display_name: str
    local: str
    domain: str

    @property
    def spec(self) -> str:
        """`local@domain`."""
        return f"{self.local}@{self.domain}"


def parse_address(text: str) -> Address:
    """The address that a text holds.

    Raises:
        ValueError: with the reason, which never holds any of the text.
    """
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ValueError("is too long for an address")
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        name, spec = _split(text)
        local, domain = _halves(spec)
    else:
        name, (local, domain) = "", plain.groups()
    _check_domain_end(domain)
    _check_lengths(local, domain)
    return Address(name, local, domain)


def is_plain(text: str) -> bool:
    """Whether it is an ASCII `local@domain` and no more, which `parse_address` takes as it stands."""
    plain = _PLAIN.fullmatch(text)
    if plain is None or len(text) > MAX_ADDRESS_OCTETS:
        return False
    local, domain = plain.groups()
    return len(local) <= MAX_LOCAL_OCTETS and not domain.rpartition(".")[2].isdigit()


def _split(text: str) -> tuple[str, str]:
    """The name, unquoted, and what should be `local@domain`."""
    if not text:
        raise ValueError("is empty")
    if fault := name_fault(text):
        raise ValueError(fault)
    if text != text.strip():
        raise ValueError("begins or ends with a space")
    if not text.endswith(">"):
        return "", text
    name, spec = _split_quoted(text) if text.startswith('"') else _split_unquoted(text)
    if not name.strip():
        raise ValueError("has an empty name before the <")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"has a name of more than {MAX_NAME_CHARACTERS} characters")
    # An escape may have split an encoded word: `=\?`.
    if fault := name_fault(name):
        raise ValueError(fault)
    return name, spec


def _split_quoted(text: str) -> tuple[str, str]:
    quoted = _QUOTED_NAME.fullmatch(text)
    if quoted is None:
        raise ValueError('has unbalanced quotes or brackets; it should look like "Name" <local@domain>')
    return _ESCAPE.sub(r"\1", quoted[1]), quoted[2]


def _split_unquoted(text: str) -> tuple[str, str]:
    name, bracket, spec = text[:-1].partition("<")
    if not bracket or "<" in spec or ">" in spec or ">" in name:
        raise ValueError("has unbalanced angle brackets")
    if _NEEDS_QUOTES.search(name):
        raise ValueError('has a name with one of ( ) [ ] : ; @ , \\ " in it; put the name in double quotes')
    return name.rstrip(" "), spec


def _halves(spec: str) -> tuple[str, str]:
    """Both halves of `local@domain`, each valid but for its length."""
    if "<" in spec or ">" in spec:
        raise ValueError("has unbalanced angle brackets")
    if '"' in spec:
        raise ValueError("has quotes in the address itself, which is not supported")
    if any(character.isspace() for character in spec):
        raise ValueError("contains a space in the address itself")
    if spec.count("@") != 1:
        raise ValueError("has more than one @" if "@" in spec else "has no @")
    local, _, domain = spec.partition("@")
    _check_local(local)
    _check_domain(domain)
    return local, domain


def _check_local(local: str) -> None:
    if not local:
        raise ValueError("has nothing before the @")
    # Made of allowed characters only, and yet mail software decodes it, into another address if the sender likes.
    if "=?" in local:
        raise ValueError("has the beginning of an encoded word before the @")
    if local.startswith(".") or local.endswith(".") or ".." in local:
        raise ValueError("has a misplaced dot before the @")
    # Each non-ASCII character becomes a "?", which is allowed there: they are judged below.
    if not _ASCII_LOCAL.fullmatch(local.encode("ascii", "replace").decode()):
        raise ValueError("has a character before the @ that is not allowed there")
    if local.isascii():
        return
    foreign = _ASCII.sub("", local)
    if any(unicodedata.category(character)[0] in "ZC" for character in foreign):
        raise ValueError("has an invisible or unassigned character before the @")
    # A fullwidth @ or a Greek question mark becomes @ or ; as soon as anything on the way normalises the text.
    if _SEPARATOR.search(unicodedata.normalize("NFKC", foreign)):
        raise ValueError("has a look-alike of a separator before the @")


def _check_domain(domain: str) -> None:
    if not domain:
        raise ValueError("has nothing after the @")
    if domain.startswith("["):
        raise ValueError("has an address literal after the @; a domain name is needed")
    if domain.isascii() and _ASCII_DOMAIN.fullmatch(domain):
        return
    for label in domain.split("."):
        _check_label(label)


def _check_label(label: str) -> None:
    if not label:
        raise ValueError("has a misplaced dot after the @")
    if label.startswith("-") or label.endswith("-"):
        raise ValueError("has a domain label that begins or ends with a hyphen")
    if not all(_stands_in_host(character) for character in label) or not _is_composed(label):
        raise ValueError("has a character after the @ that is not allowed in a domain name")
    # Punycode is never shorter than the text, and costs the square of its length.
    if len(label) > MAX_LABEL_OCTETS or _label_octets(label) > MAX_LABEL_OCTETS:
        raise ValueError(f"has a domain label of more than {MAX_LABEL_OCTETS} octets")


def _stands_in_host(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "-"
    return unicodedata.category(character) in _HOST_CATEGORIES or character in _HOST_EXCEPTIONS


def _is_composed(label: str) -> bool:
    """Whether a label begins with no mark and holds no compatibility character, such as a ligature."""
    composed = unicodedata.normalize("NFC", label)
    return unicodedata.category(label[0])[0] != "M" and unicodedata.normalize("NFKC", label) == composed


def _check_domain_end(domain: str) -> None:
    if domain.rpartition(".")[2].isdigit():
        raise ValueError("has a number where a domain name ends; an IP address is not supported")


def _check_lengths(local: str, domain: str) -> None:
    local_octets = len(local) if local.isascii() else len(local.encode())
    if local_octets > MAX_LOCAL_OCTETS:
        raise ValueError(f"has more than {MAX_LOCAL_OCTETS} octets before the @")
    if local_octets + 1 + _domain_octets(domain) > MAX_ADDRESS_OCTETS:
        raise ValueError(f"has more than {MAX_ADDRESS_OCTETS} octets in its address")


def _domain_octets(domain: str) -> int:
    if domain.isascii():
        return len(domain)
    return sum(_label_octets(label) + 1 for label in domain.split(".")) - 1


def _label_octets(label: str) -> int:
    """A label's length in DNS: Punycode with its prefix where it is not ASCII (IDNA's mappings aside)."""
    if label.isascii():
        return len(label)
    return len("xn--") + len(unicodedata.normalize("NFC", label.lower()).encode("punycode"))
