"""The headers that an email may set, and the values of headers that mail software parses.

Certain headers make relays and providers add recipients, choose a template or an account, enable a sandbox, or bypass
the spam filter. Permission to send an email is not permission to control the account that sends it. So these headers,
and those that we or mail servers write, are refused unless an operator allows them by name.

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
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final

from dispatcher.domain.address import ascii_host, parse_address, split_name

_RESERVED: Final = (
    # We write these headers from the email's fields.
    *("from", "to", "cc", "bcc", "reply-to", "subject", "date", "message-id", "mime-version", "content-*"),
    # Mail servers write these headers: the sender, the path, and the authentication results. SendGrid writes X-SG-….
    *("sender", "return-path", "received", "received-spf", "authentication-results", "dkim-signature", "arc-*"),
    *(
        "domainkey-signature",
        "delivered-to",
        "envelope-to",
        "x-envelope-from",
        "x-envelope-to",
        "x-original-to",
        "x-sg-*",
    ),
    # A mail client writes these headers when it resends an email.
    "resent-*",
    # Old servers read recipients from the header Apparently-To.
    "apparently-to",
)
CONTROL_HEADERS: Final[Mapping[str, tuple[str, ...]]] = {
    "AhaSend": ("ahasend-*",),
    "Alibaba Direct Mail": ("x-alidm-*",),
    "Amazon SES": ("x-ses-*",),
    "Brevo": ("x-mailin-*", "x-sib-*", "idempotencykey", "sender.ip"),
    "Campaign Monitor": ("x-cmail-*",),
    "Contactlab": ("x-clab-*",),
    "Elastic Email": ("x-elasticemail-*", "istransactional", "poolname", "postback", "postback-*", "x-postback"),
    "Emailit": ("x-emailit-*",),
    "GreenArrow": ("x-greenarrow-*",),
    "Infobip": ("x-infobip-*",),
    "KumoMTA": ("x-kumo*",),
    "Lettermint": ("x-lettermint-*", "x-lm-*"),
    "MailChannels": ("x-mailchannels-*", "x-authuser"),
    "Mailchimp Transactional": ("x-mc-*",),
    "Maileroo": ("x-maileroo-*",),
    "MailerSend": ("x-mailersend-*",),
    "Mailgun": ("x-mailgun-*",),
    "Mailjet": ("x-mj-*", "x-mailjet-*"),
    "MailPace": ("x-mailpace-*",),
    "Mailtrap": ("x-mt-*",),
    "Microsoft Exchange": ("x-ms-*", "x-microsoft-antispam*", "x-forefront-*"),
    "Netcore": ("x-apiheader", "x-pepi*"),
    "Postal": ("x-postal-*",),
    "Postmark": ("x-pm-*",),
    "PowerMTA": ("x-virtual-mta", "x-job", "x-envid", "x-dkim-options", "x-pmta-*"),
    "Resend": ("resend-*", "x-resend-*"),
    "SendGrid": ("x-smtpapi",),
    "SMTP2GO": ("x-smtp2go*",),
    "SMTPeter": ("x-smtpeter-*",),
    "SocketLabs": ("x-xs*",),
    "SparkPost": ("x-msys-*",),
    "Tipimail": ("x-tm-*",),
    "UniOne": ("x-unione*",),
    "filters of outgoing mail": ("x-barracuda-*", "x-ironport-*", "x-mimecast-*", "x-proofpoint-*", "x-zix*"),
    # Headers of RFC 6758, RFC 7293, RFC 8689 and MIXER (RFC 2156), and headers that make sendmail send notices.
    "mail servers": (
        *("mt-priority", "require-recipient-valid-since", "tls-required", "deferred-delivery"),
        *("prevent-nondelivery-report", "errors-to", "return-receipt-to"),
    ),
}
"""The headers that control each provider or relay. A trailing `*` matches any ending. General names such as
`X-Campaign` and `X-Tag` are left out, although some relays obey them."""


def _split_patterns(patterns: Collection[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Splits patterns into full names and prefixes."""
    prefixes = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return frozenset(pattern for pattern in patterns if not pattern.endswith("*")), prefixes


_RESERVED_NAMES, _RESERVED_PREFIXES = _split_patterns(_RESERVED)
_CONTROL_NAMES, _CONTROL_PREFIXES = _split_patterns(
    [pattern for group in CONTROL_HEADERS.values() for pattern in group]
)


def is_reserved(name: str) -> bool:
    """Whether only we or mail servers may write this header. Ignores case. No setting lets an email set the header."""
    lowered = name.lower()
    return lowered in _RESERVED_NAMES or lowered.startswith(_RESERVED_PREFIXES)


def header_name_fault(name: str, allowed: Collection[str] = ()) -> str | None:
    """Why an email may not set a header, to put after its name; None if it may, or the operator allows it."""
    if is_reserved(name):
        return "cannot be set, because the dispatcher or a mail server writes it"
    lowered = name.lower()
    if lowered not in _CONTROL_NAMES and not lowered.startswith(_CONTROL_PREFIXES):
        return None
    if lowered in (each.lower() for each in allowed):
        return None
    return f"controls {_controlled(lowered)}; to allow it, add its name to DISPATCHER_ALLOWED_PROVIDER_HEADERS"


def headers_fault(headers: Mapping[str, str], allowed: Collection[str]) -> str | None:
    """The first header that the email may not set, with the reason; None if all headers are allowed."""
    for name in headers:
        if fault := header_name_fault(name, allowed):
            return f"headers.{name} {fault}"
    return None


def _controlled(lowered: str) -> str:
    """The provider or relay that a header controls, by the header's name in lower case."""
    for who, patterns in CONTROL_HEADERS.items():
        names, prefixes = _split_patterns(patterns)
        if lowered in names or lowered.startswith(prefixes):
            return who
    raise AssertionError(lowered)


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
