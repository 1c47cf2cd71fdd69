"""Headers that an email may not set: those that we or mail servers write, and those that command a provider.

Relays and providers take commands from an email's headers: recipients, a template, a sandbox, another account, a way
around the spam filter. Permission to write an email is no permission to command the account that sends it. So these
headers are refused, unless an operator allows one by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

_WRITTEN: Final = (
    # What we write ourselves, from the email's own fields.
    *("from", "to", "cc", "bcc", "reply-to", "subject", "date", "message-id", "mime-version", "content-*"),
    # The servers on the way write who sent the email, through whom, and who vouches for it. SendGrid writes X-SG-….
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
    # A mail client that resends an email writes these.
    "resent-*",
    # Old servers take recipients from this one.
    "apparently-to",
)
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
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
    # RFC 6758, RFC 7293, RFC 8689; MIXER (RFC 2156); and headers to which sendmail sends notices.
    "mail servers": (
        *("mt-priority", "require-recipient-valid-since", "tls-required", "deferred-delivery"),
        *("prevent-nondelivery-report", "errors-to", "return-receipt-to"),
    ),
}
"""The headers from which each provider or relay takes commands; `*` matches any end of a name. General names such as
`X-Campaign` and `X-Tag` are not here, though some relays take them for commands."""


def _told_apart(patterns: Collection[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Splits patterns into whole names and beginnings of names."""
    beginnings = tuple(pattern[:-1] for pattern in patterns if pattern.endswith("*"))
    return frozenset(pattern for pattern in patterns if not pattern.endswith("*")), beginnings


_WRITTEN_NAMES, _WRITTEN_BEGINNINGS = _told_apart(_WRITTEN)
_COMMAND_NAMES, _COMMAND_BEGINNINGS = _told_apart([pattern for patterns in COMMANDS.values() for pattern in patterns])


def is_written_by_others(name: str) -> bool:
    """Whether only we or mail servers may write a header, by its name in any case. No setting allows it."""
    lowered = name.lower()
    return lowered in _WRITTEN_NAMES or lowered.startswith(_WRITTEN_BEGINNINGS)


def header_name_fault(name: str, allowed: Collection[str] = ()) -> str | None:
    """Why an email may not set a header, as the end of a sentence that begins with its name; None if it may.

    Args:
        name: In any case.
        allowed: Names that the operator allows, in any case.
    """
    if is_written_by_others(name):
        return "is a header that an email may not set itself"
    lowered = name.lower()
    if lowered not in _COMMAND_NAMES and not lowered.startswith(_COMMAND_BEGINNINGS):
        return None
    if lowered in (each.lower() for each in allowed):
        return None
    return f"is a command to {_commanded(lowered)}; to allow it, add its name to DISPATCHER_ALLOWED_PROVIDER_HEADERS"


def headers_fault(headers: Mapping[str, str], allowed: Collection[str]) -> str | None:
    """Names the first header that the email may not have, and why; None if it may have all of them."""
    for name in headers:
        if fault := header_name_fault(name, allowed):
            return f"headers.{name} {fault}"
    return None


def _commanded(lowered: str) -> str:
    """Who takes commands from a header, by its name in lower case."""
    for who, patterns in COMMANDS.items():
        names, beginnings = _told_apart(patterns)
        if lowered in names or lowered.startswith(beginnings):
            return who
    raise AssertionError(lowered)
