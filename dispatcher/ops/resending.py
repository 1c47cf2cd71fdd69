"""Makes a corrected copy of an email: one transaction reads the email, enqueues the copy with the ordinary statement,
links both, and adds the audit record."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.email import Email
from dispatcher.domain.email_history import Resent
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, Attachment, OutgoingEmail
from dispatcher.domain.sms import SMS_CHANNEL, Sms
from dispatcher.domain.status import FINISHED, Status
from dispatcher.domain.text import MAX_KEY_CHARACTERS
from dispatcher.domain.values import dataclass
from dispatcher.errors import InvalidEmail
from dispatcher.producers import Acceptance, enqueue_many_async
from dispatcher.providers.capabilities import capabilities_of, capability_gap
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.enqueueing import draft, holders, key_parameters
from dispatcher.store.leases import read_content
from dispatcher.store.statements import fetch

Admit = Callable[[Message], Awaitable[None]]
"""Raises an error if the caller may not enqueue the email."""


class NotResent(Exception):
    """A copy was refused. `reason` is the name of the refusal in the action, whose words contain the `facts`."""

    def __init__(self, reason: str, **facts: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.facts = facts


@dataclass(frozen=True, slots=True)
class Resendable:
    """An email, locked; the row type of `lock_resendable`."""

    tenant_id: str
    message_key: str
    status: Status
    was_uncertain: bool
    was_partly_delivered: bool
    lane: str
    on_uncertain: str | None
    correlation_id: str | None
    expires_at: datetime | None
    has_content: bool
    metadata: Mapping[str, str] | None
    is_erased: bool
    ignore_suppression: bool

    @property
    def may_have_arrived(self) -> str:
        """Why a copy may repeat the email; empty if it cannot."""
        if self.status in (Status.SENT, Status.HELD):
            return f"The email is {self.status}"
        if self.was_partly_delivered:
            return "Some recipients have the email"
        return "The outcome of an attempt is unknown" if self.was_uncertain else ""


async def resend(
    session: AsyncSession,
    email_id: UUID,
    changes: Mapping[str, Any],
    settings: Settings,
    parameters: Mapping[str, Any],
    *,
    message_key: str | None,
    may_repeat: bool,
    admit: Admit | None,
) -> Resent | None:
    """Enqueues the copy, unless an earlier call has done so. None: the tenant has no such email.

    Args:
        changes: New values of `to`, `sender`, `subject` and `headers`.
        parameters: Of the statements: the email, its tenant, the actor and the reason.

    Raises:
        InvalidEmail: the copy would not be valid.
        NotResent: the copy was refused for another reason.
    """
    async with session.transaction():
        rows = await fetch(session, "lock_resendable", parameters, into=Resendable)
        if not rows:
            return None
        (found,) = rows
        if found.status not in FINISHED:
            raise NotResent("unfinished", status=found.status)
        content = await read_content(session, email_id) if found.has_content else None
        if content is None:
            raise NotResent("erased")
        key = message_key or copied_key(found.message_key, email_id, changes)
        copy = _copy(key, found, content, dict(changes), settings.allowed_provider_headers)
        (new,) = draft([copy])
        known = holders(await fetch(session, "find_by_key", key_parameters([new], set())))
        if new.key in known:
            copy_id, payload_hash = known[new.key]
            if payload_hash != new.payload_hash:
                raise NotResent("key")
            return Resent(copy_id, key, email_id, is_known=True)
        if (why := found.may_have_arrived) and not may_repeat:
            raise NotResent("may_repeat", why=why)
        if gap := capability_gap(copy, capabilities_of(settings.providers)):
            raise NotResent("incapable", fault=gap)
        with translated():
            (enqueued,) = await enqueue_many_async(session, [copy], report_conflicts=True)
        if enqueued.acceptance is not Acceptance.ACCEPTED:
            raise NotResent("expired" if enqueued.acceptance is Acceptance.EXPIRED else "key")
        if admit is not None:  # last, because it takes from a quota
            await admit(copy)
        linked = {"copy_id": enqueued.email_id, "changed": sorted(changes)}
        await fetch(session, "link_resent", {**parameters, **linked})
        return Resent(enqueued.email_id, key, email_id, is_known=False)


def _copy(
    key: str, found: Resendable, content: OutgoingEmail, changes: dict[str, Any], allowed_headers: Collection[str]
) -> Message:
    given: dict[str, Any] = {
        "message_key": key,
        **{name: getattr(content, name) for name in ("sender", "to", "text", "tags")},
        **{name: getattr(found, name) for name in ("tenant_id", "correlation_id", "on_uncertain", "lane")},
        **{name: getattr(found, name) for name in ("expires_at", "ignore_suppression")},
        "metadata": found.metadata or {},
        "erase_after_sending": found.is_erased,
    }
    if content.channel == SMS_CHANNEL:
        given |= changes
        if foreign := changes.keys() & {"subject", "headers"}:
            raise InvalidEmail(min(foreign), "is not part of an SMS")
        if len(given["to"]) != 1:
            raise InvalidEmail("to", "must be one number")
        return Sms(**{**given, "to": given["to"][0]})
    if content.channel != EMAIL_CHANNEL:
        raise InvalidEmail("channel", f"is {content.channel}; only emails and SMS can be resent")
    names = ("subject", "html", "template_id", "template_data", "cc", "bcc", "reply_to")
    given |= {name: getattr(content, name) for name in names}
    given["attachments"] = [
        Attachment(each.filename, each.content_type, each.content, each.content_id) for each in content.attachments
    ]
    if content.calendar is not None:
        given["calendar"] = Calendar(content.calendar.content, content.calendar.method)
    if content.raw is not None:
        if fixed := changes.keys() & {"sender", "subject", "headers"}:
            raise InvalidEmail(min(fixed), "cannot be changed in a raw email, which is sent as it is")
        given["raw"] = content.raw
    given["headers"] = _merged(content.headers, changes.pop("headers", {}))
    others = {"cc": (), "bcc": ()} if "to" in changes else {}
    return Email(**{**given, **others, **changes}, allowed_headers=allowed_headers)


def copied_key(message_key: str, email_id: UUID, changed: Mapping[str, Any]) -> str:
    """The message key of a copy: the same for the same email and the same changes."""
    mark = sha256(json.dumps([str(email_id), changed], sort_keys=True).encode()).hexdigest()[:16]
    end = f":resend-{mark}"
    return message_key[: MAX_KEY_CHARACTERS - len(end)] + end


def _merged(headers: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    names = {name.lower() for name in more}
    kept = {name: value for name, value in headers.items() if name.lower() not in names}
    return kept | {name: value for name, value in more.items() if value != ""}
