"""What each provider can carry, and why no configured one can carry an email."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dispatcher.config import BUILT_IN
from dispatcher.domain.capabilities import (
    AnyEmail,
    Capabilities,
    Need,
    octets_of,
    recipients_of,
    smtputf8_field,
)
from dispatcher.domain.outcome import Reason
from dispatcher.providers.registry import class_of


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
    return {name: class_of(name).capabilities for name in names}


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


def _explained(email: AnyEmail, needs: list[Need], configured: Mapping[str, Capabilities]) -> Uncarried:
    known = capabilities_of(BUILT_IN) | dict(configured)
    able = [name for name, one in known.items() if one.delivers and one.lacks(email) is None]
    lacking = [_shortage(need, email) for need in needs]
    subjects, features, remedy = (
        " and ".join(words) for words in zip(*((one.subject, one.feature, one.remedy) for one in lacking), strict=True)
    )
    verb = "needs" if len(needs) == 1 else "need"
    who = f"({', '.join(able)})" if able else "(none is known)"
    return Uncarried(
        field=lacking[0].field,
        message=f"{subjects} {verb} a provider with {features} {who}; configured: {', '.join(configured)}.",
        remedy=f"Add one to DISPATCHER_PROVIDERS, or {remedy}." if able else f"{remedy.capitalize()}.",
        reason=lacking[0].reason,
    )


class _Shortage(NamedTuple):
    """What of an email needs which feature of a provider, and what helps where no provider has it."""

    field: str
    subject: str
    feature: str
    remedy: str
    reason: Reason


def _shortage(need: Need, email: AnyEmail) -> _Shortage:
    match need:
        case Need.TEMPLATES:
            return _Shortage("template_id", "template_id", "templates", "set text or html", Reason.INVALID_CONTENT)
        case Need.RECIPIENTS:
            room = f"room for {recipients_of(email):,}"
            return _Shortage("to", "the number of recipients", room, "split the email", Reason.REJECTED_RECIPIENT)
        case Need.OCTETS:
            room = f"room for {octets_of(email):,} octets"
            return _Shortage("attachments", "the size", room, "attach less", Reason.TOO_LARGE)
        case Need.SMTPUTF8:
            field = smtputf8_field(email) or "email"
            return _Shortage(
                field, f"an address in {field}", "SMTPUTF8", "use another address", Reason.REJECTED_RECIPIENT
            )
