"""Parses email addresses: `local@domain`, `Display Name <local@domain>` or `"Display Name" <local@domain>`.

This module accepts fewer forms than RFC 5322. It refuses these, and most providers refuse them, too: local parts with
spaces or special characters, which need quotes (RFC 5321, section 4.1.2, advises against them), address literals such
as `[192.0.2.1]` (they bypass DNS), comments, groups, folding, and a comma or another special character in an unquoted
name. It accepts three forms that RFC 5321 does not have, because people have such addresses: letters of all scripts on
both sides of the @ (RFC 6531); dots at any place before the @, as Japanese carriers gave them; and more than 64 octets
before the @, as ticket systems use them. The receiving server decides about these. We do not use Python's
`email.utils.parseaddr`, because it guesses the meaning of a text that is not a valid address.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from dispatcher.domain.text import name_fault
from dispatcher.domain.values import dataclass

MAX_LOCAL_OCTETS: Final = 64
"""The longest part before the @ that every server must accept (RFC 5321, section 4.5.3.1.1), in bytes of UTF-8. This
module accepts longer parts."""
MAX_ADDRESS_OCTETS: Final = 254
"""The longest `local@domain`. RFC 5321 (section 4.5.3.1.3) allows a path of 256 octets, including its angle brackets.
This limit also keeps each domain below the limit of 255 octets for domains."""
MAX_LABEL_OCTETS: Final = 63
"""The longest part of a domain between two dots (RFC 1035, section 2.3.4). Measured in the form that DNS uses: Punycode
if the part is not ASCII."""
MAX_NAME_CHARACTERS: Final = 255
"""The longest display name. No standard sets a limit, but hardly any real name is longer. This limit keeps an address
far below the 998 octets of a header line."""
_MAX_TEXT_CHARACTERS: Final = 2 * MAX_NAME_CHARACTERS + MAX_ADDRESS_OCTETS + 10
"""The longest text that is parsed. Enough for an address, brackets, spaces, and a quoted name in which every character
is escaped."""

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_IN_ATOMS = r"A-Za-z0-9!#$%&'*+/=?^_`{|}~-"
_ATOM = rf"[{_IN_ATOMS}]+"
_ASCII_LOCAL: Final = re.compile(rf"{_ATOM}(?:\.{_ATOM})*")
_DOTTED_LOCAL: Final = re.compile(rf"\.*[{_IN_ATOMS}][.{_IN_ATOMS}]*")
_ASCII_DOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_PLAIN: Final = re.compile(rf"(?![^@]*=\?)({_ASCII_LOCAL.pattern})@({_ASCII_DOMAIN.pattern})")
_QUOTED_NAME: Final = re.compile(r'"((?:[^"\\]|\\.)*)" *<([^<>]*)>')
_ESCAPE: Final = re.compile(r"\\(.)")
_NEEDS_QUOTES: Final = re.compile(r'[()<>\[\]:;@\\,"]')
_SEPARATOR: Final = re.compile(r'[\s()<>\[\]:;@\\,".]')
_ASCII: Final = re.compile(r"[\x00-\x7f]+")
_HOST_CATEGORIES: Final = frozenset({"Ll", "Lu", "Lo", "Lm", "Mn", "Mc", "Nd"})
"""The Unicode categories of the characters that RFC 5892 (section 2.1, LetterDigits) allows in domain names."""
_HOST_EXCEPTIONS: Final = frozenset("\u06fd\u06fe\u0f0b\u3007")
"""Further characters that RFC 5892 (section 2.6) allows in domain names. U+3007 is the zero of Chinese and Japanese
numbers."""


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of one email address. `local` is as it is sent: in quotes if a dot is at its start or end, or follows
    another; if it is not ASCII, the provider must support SMTPUTF8. A `domain` that is not ASCII must be converted by
    IDNA (UTS 46) before it is sent to a server."""

    display_name: str
    local: str
    domain: str

    @property
    def spec(self) -> str:
        """The address without its display name: `local@domain`."""
        return f"{self.local}@{self.domain}"


def parse_address(text: str) -> Address:
    """Parses a text into an address. Raises ValueError, which says why, and never quotes the text."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise ValueError("is too long to be an email address")
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        name, spec = split_name(text)
        local, domain = _split_spec(spec)
    else:
        name, (local, domain) = "", plain.groups()
    if domain.rpartition(".")[2].isdigit():
        raise ValueError("has a domain that ends in a number; use a domain name, not an IP address")
    local_octets = len(local) if local.isascii() else len(local.encode())
    if local_octets + 1 + len(ascii_host(domain)) > MAX_ADDRESS_OCTETS:
        raise ValueError(f"is longer than {MAX_ADDRESS_OCTETS} bytes without its display name")
    return Address(name, local, domain)


def is_plain(text: str) -> bool:
    """Whether the text is a plain ASCII `local@domain`, which needs no further parsing."""
    plain = _PLAIN.fullmatch(text)
    if plain is None or len(text) > MAX_ADDRESS_OCTETS:
        return False
    return not (text[-1].isdigit() and plain[2].rpartition(".")[2].isdigit())


def split_name(text: str) -> tuple[str, str]:
    """The display name without its quotes, and the rest, which should be `local@domain` but is not checked yet."""
    if not text:
        raise ValueError("is empty")
    if fault := name_fault(text):
        raise ValueError(fault)
    if text != text.strip():
        raise ValueError("starts or ends with a space; remove it")
    if not text.endswith(">"):
        return "", text
    name, spec = _split_quoted(text) if text.startswith('"') else _split_unquoted(text)
    if not name.strip():
        raise ValueError("has an empty name before the <; add a name, or give local@domain alone")
    if len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"has a display name longer than {MAX_NAME_CHARACTERS} characters")
    # An escape may hide the start of an encoded word, as in `=\?`. So this function also checks the unescaped name.
    if fault := name_fault(name):
        raise ValueError(fault)
    return name, spec


def _split_quoted(text: str) -> tuple[str, str]:
    quoted = _QUOTED_NAME.fullmatch(text)
    if quoted is None:
        raise ValueError('has unbalanced quotes or angle brackets; write it as "Name" <local@domain>')
    return _ESCAPE.sub(r"\1", quoted[1]), quoted[2]


def _split_unquoted(text: str) -> tuple[str, str]:
    name, bracket, spec = text[:-1].partition("<")
    if not bracket or "<" in spec or ">" in spec or ">" in name:
        raise ValueError("has unbalanced angle brackets; write it as Name <local@domain>")
    if _NEEDS_QUOTES.search(name):
        raise ValueError('has one of ( ) [ ] : ; @ , \\ " in its display name; put the name in double quotes')
    return name.rstrip(" "), spec


def _split_spec(spec: str) -> tuple[str, str]:
    """The local part and the domain. This function checks everything except their lengths."""
    if "<" in spec or ">" in spec:
        raise ValueError("has unbalanced angle brackets; write it as Name <local@domain>")
    if spec.count("@") != 1:
        raise ValueError("has more than one @" if "@" in spec else "has no @; write it as local@domain")
    local, _, domain = spec.partition("@")
    if len(local) > 2 and local[0] == local[-1] == '"':
        local = local[1:-1]
    if '"' in local or '"' in domain:
        raise ValueError("has quotes in local@domain; only the name, or the whole part before the @, may be in quotes")
    if any(character.isspace() for character in local + domain):
        raise ValueError("has a space inside local@domain; remove it")
    _check_local(local)
    _check_domain(domain)
    is_dotted = local.startswith(".") or local.endswith(".") or ".." in local
    return f'"{local}"' if is_dotted else local, domain


def _check_local(local: str) -> None:
    if not local:
        raise ValueError("has nothing before the @")
    # An encoded word has only characters that are allowed here. But some mail software would decode the word, and send
    # the email to the address that results.
    if "=?" in local:
        raise ValueError("has the start of an encoded word (RFC 2047) before the @, which is not allowed")
    # Check only the ASCII characters here: `encode` replaces each other character with "?", which the pattern allows.
    # The code below checks the other characters.
    if not _DOTTED_LOCAL.fullmatch(local.encode("ascii", "replace").decode()):
        raise ValueError("has a character before the @ that email addresses do not allow")
    if local.isascii():
        return
    foreign = _ASCII.sub("", local)
    if any(unicodedata.category(character)[0] in "ZC" for character in foreign):
        raise ValueError("has an invisible or unassigned character before the @")
    # A server may normalize the text. Then a fullwidth @ becomes @, and a Greek question mark becomes a semicolon.
    if _SEPARATOR.search(unicodedata.normalize("NFKC", foreign)):
        raise ValueError("has a character before the @ that looks like a separator, such as a fullwidth @")


def _check_domain(domain: str) -> None:
    if not domain:
        raise ValueError("has nothing after the @")
    if domain.startswith("["):
        raise ValueError("has an IP address in brackets after the @; use a domain name")
    if domain.isascii() and _ASCII_DOMAIN.fullmatch(domain):
        return
    for label in domain.split("."):
        _check_label(label)


def _check_label(label: str) -> None:
    if not label:
        raise ValueError("has a dot at the start or end of its domain, or two dots in a row")
    if label.startswith("-") or label.endswith("-"):
        raise ValueError("has a hyphen at the start or end of a part of its domain")
    # A label may not start with a combining mark, or contain a compatibility character such as the ligature `ﬁ`.
    is_composed = unicodedata.normalize("NFKC", label) == unicodedata.normalize("NFC", label)
    is_allowed = is_composed and unicodedata.category(label[0])[0] != "M" and all(map(_is_allowed_in_host, label))
    if not is_allowed:
        raise ValueError("has a character after the @ that domain names do not allow")
    # Check the label's length before the encoding, which takes quadratic time: a very long label would cost much CPU.
    # The Punycode of a label is never shorter than the label.
    if len(label) > MAX_LABEL_OCTETS or len(_ascii_label(label)) > MAX_LABEL_OCTETS:
        raise ValueError(f"has a part longer than {MAX_LABEL_OCTETS} bytes in its domain")


def _is_allowed_in_host(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "-"
    return unicodedata.category(character) in _HOST_CATEGORIES or character in _HOST_EXCEPTIONS


def ascii_host(domain: str) -> str:
    """The domain as in DNS: each label that is not ASCII as `xn--` and its Punycode. Does not apply the mappings of
    UTS 46."""
    return domain if domain.isascii() else ".".join(map(_ascii_label, domain.split(".")))


def _ascii_label(label: str) -> str:
    if label.isascii():
        return label
    return "xn--" + unicodedata.normalize("NFC", label.lower()).encode("punycode").decode()


_COMPANIES: Final = (
    ("gmail", re.compile(r"g(oogle)?mail\.com")),
    ("microsoft", re.compile(r"(hotmail|live|msn|outlook)(\.com?)?\.[a-z]{2,3}")),
    ("yahoo", re.compile(r"yahoo(\.com?)?\.[a-z]{2,3}|(aol|rocketmail|ymail)\.com")),
    ("apple", re.compile(r"(icloud|mac|me)\.com")),
)


def mailbox_provider_of(address: str | None) -> str:
    """`gmail`, `microsoft`, `yahoo`, `apple` or `other`, by the lower-case address's domain; or `unknown`."""
    if not address:
        return "unknown"
    domain = address.rpartition("@")[2]
    return next((name for name, domains in _COMPANIES if domains.fullmatch(domain)), "other")
