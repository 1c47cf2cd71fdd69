"""One email's whole story, as the database has it; `messages` finds what the DLQ holds of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dispatcher.domain.rescue import longest_rescue_seconds
from dispatcher.domain.waiting import Waiting, why
from dispatcher.store import emails
from dispatcher.store.connections import AsyncSession

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act


@dataclass(frozen=True, slots=True)
class Story:
    """What is known about an email; private only in `content`.

    Attributes:
        email: Its row, by column.
        waiting: Why the email is not sent yet; None unless it is pending or sending.
        content: What it says and to whom, if that was asked for; None also if it was deleted.
    """

    email: dict[str, Any]
    attempts: list[dict[str, Any]]
    acts: list[dict[str, Any]]
    replays: list[dict[str, Any]]
    waiting: Waiting | None = None
    content: dict[str, Any] | None = None


async def tell(
    session: AsyncSession,
    email_id: UUID,
    *,
    providers: Collection[str] = (),
    lease_seconds: float = 0.0,
    reveal: Act | None = None,
) -> Story | None:
    """An email's story; None if there is no such email.

    Args:
        providers: The configured providers; empty if the caller does not know them.
        lease_seconds: The length of a lease.
        reveal: Who wants to see its content, and why; on record before it is read.
    """
    email = await emails.find_email(session, email_id)
    if email is None:
        return None
    content = None
    if reveal:
        from dispatcher.store.failures import audit

        await audit(session, "reveal", actor=reveal.actor, reason=reveal.reason, email_id=email_id)
        content = await emails.reveal_content(session, email_id)
    return Story(
        email,
        await emails.list_attempts(session, email_id),
        await emails.list_acts(session, email_id),
        await emails.list_replays_of(session, email_id),
        await _why(session, email_id, providers, lease_seconds),
        content,
    )


async def _why(
    session: AsyncSession, email_id: UUID, providers: Collection[str], lease_seconds: float
) -> Waiting | None:
    facts = await emails.find_facts(session, email_id)
    if facts is None:
        return None
    holders = await emails.find_holders(session, email_id)
    return why(facts, providers=providers, rescue_seconds=longest_rescue_seconds(lease_seconds), holders=holders)
