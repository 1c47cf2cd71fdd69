"""The history of one email, from the database. `ops.messages` finds the email's dead letters on the DLQ."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dispatcher.domain.lease_recovery import longest_recovery_seconds
from dispatcher.domain.values import dataclass, field
from dispatcher.domain.waiting import WaitExplanation, explain_wait
from dispatcher.ops.email_timeline import Moment, timeline
from dispatcher.store import emails
from dispatcher.store.connections import AsyncSession

if TYPE_CHECKING:
    from dispatcher.ops.acts import Act


@dataclass(frozen=True, slots=True)
class EmailHistory:
    """Everything that the database has about an email. Only `content` is private.

    Attributes:
        email: The email's row, by column.
        events: What providers reported after they accepted the email. Each event names its recipient by position,
            counted from 1.
        acts: The audited operator actions on the email.
        replays: The replays that included the email.
        waiting: Why the email is not sent yet; None unless the email is pending, waiting or sending.
        content: The content and recipients; None if the caller did not request them, or if they were deleted.
        timeline: Every instant that is known, oldest first.
    """

    email: dict[str, Any]
    attempts: list[dict[str, Any]]
    events: list[dict[str, Any]]
    acts: list[dict[str, Any]]
    replays: list[dict[str, Any]]
    waiting: WaitExplanation | None = None
    content: dict[str, Any] | None = None
    timeline: list[Moment] = field(default_factory=list)


async def find_history(
    session: AsyncSession,
    email_id: UUID,
    *,
    providers: Collection[str] = (),
    lease_seconds: float = 0.0,
    reveal: Act | None = None,
) -> EmailHistory | None:
    """The history of an email; None if there is no such email.

    Args:
        providers: The configured providers; empty if the caller does not have the settings.
        lease_seconds: The length of a lease.
        reveal: Who reads the content, and why; the audit log records this before the content is read. None to leave
            the content out.
    """
    email = await emails.find_email(session, email_id)
    if email is None:
        return None
    content = None
    if reveal:
        from dispatcher.store.failures import audit

        await audit(session, "reveal", actor=reveal.actor, reason=reveal.reason, email_id=email_id)
        content = await emails.reveal_content(session, email_id)
    attempts = await emails.list_attempts(session, email_id)
    events = await emails.list_events(session, email_id)
    acts = await emails.list_acts(session, email_id)
    replays = await emails.list_replays_of(session, email_id)
    return EmailHistory(
        email,
        attempts,
        events,
        acts,
        replays,
        await _why(session, email_id, providers, lease_seconds),
        content,
        timeline(email, attempts=attempts, events=events, acts=acts, replays=replays),
    )


async def _why(
    session: AsyncSession, email_id: UUID, providers: Collection[str], lease_seconds: float
) -> WaitExplanation | None:
    facts = await emails.find_facts(session, email_id)
    if facts is None:
        return None
    holders = await emails.find_holders(session, email_id)
    return explain_wait(
        facts, providers=providers, recovery_seconds=longest_recovery_seconds(lease_seconds), holders=holders
    )
