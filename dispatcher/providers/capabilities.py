"""What each provider can carry, and why no configured one can carry an email.

A table apart from the adapters, because `enqueue` and the HTTP API must not import their clients to look at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from dispatcher.domain.capabilities import (
    AnyEmail,
    Capabilities,
    Need,
    octets_of,
    recipients_of,
    smtputf8_field,
)
from dispatcher.domain.outcome import Reason

SENDGRID: Final = Capabilities(copies=2, templates=True, max_octets=30 * 1024 * 1024)
"""https://www.twilio.com/docs/sendgrid/api-reference/mail-send/limitations; its 1,000 recipients are ours, too."""
SES_MAX_RECIPIENTS: Final = 50
"""To, Cc and Bcc together: https://docs.aws.amazon.com/ses/latest/dg/quotas.html"""
SES_MAX_OCTETS: Final = 40 * 1024 * 1024
"""After encoding; the same page."""
SES: Final = Capabilities(
    copies=2, templates=True, smtputf8=False, max_recipients=SES_MAX_RECIPIENTS, max_octets=SES_MAX_OCTETS
)
SMTP: Final = Capabilities(copies=2)
"""A server names its size limit and SMTPUTF8 after EHLO."""
CAPTURE: Final = Capabilities(copies=4)
"""It writes a file at once."""

CAPABILITIES: Final[Mapping[str, Capabilities]] = MappingProxyType(
    {"sendgrid": SENDGRID, "ses": SES, "smtp": SMTP, "capture": CAPTURE}
)
_DELIVERS_TO_NOBODY: Final = "capture"

_REASONS: Final = {
    Need.TEMPLATES: Reason.INVALID_CONTENT,
    Need.RECIPIENTS: Reason.REJECTED_RECIPIENT,
    Need.OCTETS: Reason.TOO_LARGE,
    Need.SMTPUTF8: Reason.REJECTED_RECIPIENT,
}
_REMEDIES: Final = {
    Need.TEMPLATES: "set text or html",
    Need.RECIPIENTS: "split the email",
    Need.OCTETS: "attach less",
    Need.SMTPUTF8: "use another address",
}


@dataclass(frozen=True, slots=True)
class Uncarried:
    """Why no configured provider could ever carry an email.

    Attributes:
        field: The email's field that needs more than they have, as in its JSON.
        message: What the email needs, which providers have it, and which are configured.
        remedy: What to do about it.
        reason: What a worker fails the email with.
    """

    field: str
    message: str
    remedy: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def limits_of(configured: Mapping[str, Capabilities]) -> list[str]:
    """What emails may not have, because no configured provider can carry it, in words such as `a template`."""
    each = configured.values()
    limits = []
    if not any(one.templates for one in each):
        limits.append("a template")
    if not any(one.smtputf8 for one in each):
        limits.append("an address that needs SMTPUTF8")
    if recipients := _highest([one.max_recipients for one in each]):
        limits.append(f"more than {recipients:,} recipients")
    if octets := _highest([one.max_octets for one in each]):
        limits.append(f"more than {octets // 1024 // 1024} MiB")
    return limits


def _highest(limits: Sequence[int | None]) -> int | None:
    """None if one of them has no limit."""
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def capabilities_of(names: Iterable[str]) -> dict[str, Capabilities]:
    """What these providers declare, by name and in order."""
    return {name: CAPABILITIES[name] for name in names}


def uncarried(email: AnyEmail, configured: Mapping[str, Capabilities]) -> Uncarried | None:
    """Why none of the configured providers could ever carry the email; None if one could, or none is configured."""
    needs: list[Need] = []
    for capabilities in configured.values():
        need = capabilities.lacks(email)
        if need is None:
            return None
        if need not in needs:
            needs.append(need)
    return _explained(email, needs, configured) if needs else None


def _explained(email: AnyEmail, needs: list[Need], configured: Collection[str]) -> Uncarried:
    able = [
        name
        for name, capabilities in CAPABILITIES.items()
        if name != _DELIVERS_TO_NOBODY and capabilities.lacks(email) is None
    ]
    described = [_described(need, email) for need in needs]
    subjects, features = (" and ".join(words) for words in zip(*described, strict=True))
    verb = "needs" if len(needs) == 1 else "need"
    known = f"({', '.join(able)})" if able else "(none is known)"
    remedy = " and ".join(_REMEDIES[need] for need in needs)
    return Uncarried(
        field=_field(needs[0], email),
        message=f"{subjects} {verb} a provider with {features} {known}; configured: {', '.join(configured)}.",
        remedy=f"Add one to DISPATCHER_PROVIDERS, or {remedy}." if able else f"{remedy.capitalize()}.",
        reason=_REASONS[needs[0]],
    )


def _described(need: Need, email: AnyEmail) -> tuple[str, str]:
    """What in the email needs it, and what the provider must have."""
    match need:
        case Need.TEMPLATES:
            return "template_id", "templates"
        case Need.RECIPIENTS:
            return "the number of recipients", f"room for {recipients_of(email):,}"
        case Need.OCTETS:
            return "the size", f"room for {octets_of(email):,} octets"
        case Need.SMTPUTF8:
            return f"an address in {smtputf8_field(email)}", "SMTPUTF8"


def _field(need: Need, email: AnyEmail) -> str:
    match need:
        case Need.TEMPLATES:
            return "template_id"
        case Need.RECIPIENTS:
            return "to"
        case Need.OCTETS:
            return "attachments"
        case Need.SMTPUTF8:
            return smtputf8_field(email) or "email"
