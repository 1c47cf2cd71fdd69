"""Looks up what each provider supports, and explains why no configured provider supports an email."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from dispatcher.config import BUILT_IN
from dispatcher.domain.accounts import AccountRules
from dispatcher.domain.address import MAX_LOCAL_OCTETS
from dispatcher.domain.capabilities import (
    AnyEmail,
    Capabilities,
    Requirement,
    long_local_field,
    octets_of,
    recipients_of,
    smtputf8_field,
)
from dispatcher.domain.outcome import Reason
from dispatcher.domain.outgoing import EMAIL_CHANNEL
from dispatcher.domain.sms import SMS_CHANNEL
from dispatcher.domain.values import dataclass
from dispatcher.providers.registry import class_of


@dataclass(frozen=True, slots=True)
class CapabilityGap:
    """The reason why no configured provider can ever deliver an email."""

    field: str  # the first field that no configured provider supports, by its name in the email's JSON
    message: str
    remedy: str
    reason: Reason  # of an email that a worker fails because of the gap

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def unsupported_by_all(configured: Mapping[str, Capabilities]) -> list[str]:
    """The features that no configured provider supports, as text such as `a template`."""
    each = [one for one in configured.values() if one.channel == EMAIL_CHANNEL]
    limits = []
    if not any(one.templates for one in each):
        limits.append("a template")
    if not any(one.raw_mime for one in each):
        limits.append("raw MIME")
    if not any(one.calendar for one in each):
        limits.append("a calendar")
    if not any(one.inline_parts for one in each):
        limits.append("an inline image")
    if not any(one.smtputf8 for one in each):
        limits.append("an address that needs SMTPUTF8")
    if recipients := _highest([one.max_recipients for one in each]):
        limits.append(f"more than {recipients:,} recipients")
    if octets := _highest([one.max_octets for one in each]):
        limits.append(f"more than {octets // 1024 // 1024} MiB")
    return limits


def _highest(limits: Sequence[int | None]) -> int | None:
    """The highest of the limits; None if at least one provider has no limit."""
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def capabilities_of(names: Iterable[str]) -> dict[str, Capabilities]:
    """The capabilities of these providers, by name, in the given order."""
    return {name: class_of(name).capabilities for name in names}


def idempotency_keys_of(names: Iterable[str]) -> dict[str, float]:
    """How many seconds each of these providers remembers an idempotency key, without those that have none."""
    seconds = {name: one.idempotency_key_seconds for name, one in capabilities_of(names).items()}
    return {name: known for name, known in seconds.items() if known is not None}


def capability_gap(
    email: AnyEmail, configured: Mapping[str, Capabilities], rules: AccountRules | None = None
) -> CapabilityGap | None:
    """Why no configured provider can ever deliver the email; None if one can, or if none is configured. By `rules`, an
    email may use only some of them."""
    if rules and email.channel == EMAIL_CHANNEL:
        # An email that is not enqueued yet may have no lane, and an email that a worker sends has no tenant here.
        tenant, lane = getattr(email, "tenant_id", None), getattr(email, "lane", None)
        allowed = rules.allowed(configured, tenant=tenant, sender=email.sender, lane=lane)
        configured = {name: configured[name] for name in allowed}
    needs: list[Requirement] = []
    for capabilities in configured.values():
        need = capabilities.unmet_requirement(email)
        if need is None:
            return None
        if need not in needs:
            needs.append(need)
    # If at least one provider has the email's channel, do not mention that the others have another channel.
    needs = [need for need in needs if need is not Requirement.CHANNEL] or needs
    return _explained(email, needs, configured, " and to the email's rule" if rules else "") if needs else None


def _explained(
    email: AnyEmail, needs: list[Requirement], configured: Mapping[str, Capabilities], and_rule: str
) -> CapabilityGap:
    known = capabilities_of(BUILT_IN) | dict(configured)
    able = [name for name, one in known.items() if one.delivers and one.unmet_requirement(email) is None]
    lacking = [_shortage(need, email) for need in needs]
    subjects, features, remedy = (
        " and ".join(words) for words in zip(*((one.subject, one.feature, one.remedy) for one in lacking), strict=True)
    )
    verb = "needs" if len(needs) == 1 else "need"
    who = f"({', '.join(able)})" if able else "(none is known)"
    setting = "DISPATCHER_SMS_PROVIDERS" if email.channel == SMS_CHANNEL else "DISPATCHER_PROVIDERS"
    return CapabilityGap(
        field=lacking[0].field,
        message=f"{subjects} {verb} a provider with {features} {who}; configured: {', '.join(configured)}.",
        remedy=f"Add one to {setting}{and_rule}, or {remedy}." if able else f"{remedy.capitalize()}.",
        reason=lacking[0].reason,
    )


class _Shortage(NamedTuple):
    """A feature that an email needs, and the remedy if no provider has it."""

    field: str
    subject: str
    remedy: str
    feature: str = "support for it"
    reason: Reason = Reason.INVALID_CONTENT


_SHORTAGES: Final = {
    Requirement.CALENDAR: _Shortage("calendar", "a calendar", "remove the calendar", "calendar parts"),
    Requirement.INLINE_PARTS: _Shortage("attachments", "a content_id", "remove it", "inline images"),
    Requirement.TEMPLATES: _Shortage("template_id", "template_id", "set text or html", "templates"),
    Requirement.EMPTY_SUBJECT: _Shortage("subject", "an empty subject", "set a subject"),
    Requirement.EMPTY_FILES: _Shortage("attachments", "an attachment of 0 bytes", "remove the attachment"),
    Requirement.ONLY_BCC: _Shortage("bcc", "an email to several bcc recipients alone", "add a recipient to to or cc"),
    Requirement.TEMPLATE_HEADERS: _Shortage(
        "headers", "a header that is empty or not ASCII, or a 16th header, with a template,", "change the headers"
    ),
}
"""The shortages that are the same for every email."""


def _shortage(need: Requirement, email: AnyEmail) -> _Shortage:
    match need:
        case Requirement.CHANNEL:
            return _Shortage("channel", f"channel {email.channel}", "remove the message", "this channel")
        case Requirement.RECIPIENTS:
            feature = f"a limit of at least {recipients_of(email):,} recipients"
            return _Shortage("to", "the number of recipients", "split the email", feature, Reason.REJECTED_RECIPIENT)
        case Requirement.OCTETS:
            feature = f"a limit of at least {octets_of(email):,} octets"
            return _Shortage("attachments", "the email's size", "use smaller attachments", feature, Reason.TOO_LARGE)
        case Requirement.RAW:
            from dispatcher.domain.mime_in import why_raw  # here, because Python's parser takes long to import

            why = why_raw(email)
            subject = f"raw (the message is sent as it is, because it {why})"
            return _Shortage("raw", subject, "write the message without that", "raw MIME")
        case Requirement.SMTPUTF8:
            field, feature = smtputf8_field(email) or "email", "SMTPUTF8"
        case Requirement.LOCAL_OCTETS:
            field = long_local_field(email, MAX_LOCAL_OCTETS) or "email"
            feature = f"support for more than {MAX_LOCAL_OCTETS} bytes before the @"
        case _:
            return _SHORTAGES[need]
    subject = "a header in raw" if field == "raw" else f"an address in {field}"
    return _Shortage(field, subject, "use another address", feature, Reason.REJECTED_RECIPIENT)
