"""What a row of a list of the operators' page says about an email: who, what, and how it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.event import Delivery
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass, field, replace
from dispatcher.store.queries import ids_within
from dispatcher.store.recipients import fetch_readable, masked_recipients
from dispatcher.store.statements import Source, fetch

_WORD: Final = re.compile(r"\S+")
_MOST_BULLETS: Final = 7


@dataclass(frozen=True, slots=True)
class EmailLine:
    """An email in a list.

    `error`: None if a provider accepted the email. `due_at`: of a waiting email. `recipients` and the fields after it
    are empty if the content was deleted. `subject` is as DISPATCHER_OPS_SUBJECT says.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    status: Status
    delivery: Delivery | None
    lane: str
    channel: str
    error_type: str | None
    error: str | None
    attempt_count: int
    provider: str | None
    created_at: datetime
    due_at: datetime | None
    recipients: Sequence[str] = ()
    subject: str | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    sender_domain: str | None = None


def masked(subject: str) -> str:
    """The first letter of each word, and bullets. A word with a digit may be a code, so it has only bullets."""

    def mask(word: re.Match[str]) -> str:
        text = word[0]
        shown = "" if any(each.isdigit() for each in text) else text[0]
        return shown + "•" * min(len(text) - len(shown), _MOST_BULLETS)

    return _WORD.sub(mask, subject)


async def find_lines(source: Source, email_ids: Sequence[UUID], subjects: str) -> list[EmailLine]:
    """The emails, in this order; `subjects` is DISPATCHER_OPS_SUBJECT. Leaves out emails that do not exist, and content
    that cannot be read."""
    if not email_ids:
        return []
    lines = {each.email_id: each for each in await fetch(source, "find_lines", ids_within(email_ids), into=EmailLine)}
    if recipients := await masked_recipients(source, email_ids):
        for email_id, subject, tags, metadata, domain in await fetch_readable(
            source, "find_subjects", recipients.keys()
        ):
            lines[email_id] = replace(
                lines[email_id],
                recipients=recipients[email_id],
                subject=None
                if not subject or subjects == "off"
                else subject
                if subjects == "shown"
                else masked(subject),
                tags=[each for each in tags if isinstance(each, str)] if isinstance(tags, list) else (),
                metadata=metadata if isinstance(metadata, dict) else {},
                sender_domain=domain,
            )
    return [lines[each] for each in email_ids if each in lines]
