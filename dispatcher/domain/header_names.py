"""Headers that an email may not set: headers that we or mail servers write, and headers that control a provider.

Certain headers make relays and providers add recipients, choose a template or an account, enable a sandbox, or bypass
the spam filter. Permission to send an email is not permission to control the account that sends it. So these headers
are refused unless an operator allows them by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

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
