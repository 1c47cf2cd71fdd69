"""One email's whole story: where it stands, every attempt, what people did, and its message on the DLQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import look, read
from dispatcher.ops.poison import plain
from dispatcher.store import stories
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import audit

LOOK_AT_MOST: Final = 10_000
"""Messages from the head of the DLQ among which an email's are looked for."""


@dataclass(frozen=True, slots=True)
class Story:
    """What is known about an email; private only in `content`.

    Attributes:
        email: Its row, by column.
        content: What it says and to whom, if that was asked for; None also if it was deleted.
    """

    email: dict[str, Any]
    attempts: list[dict[str, Any]]
    acts: list[dict[str, Any]]
    replays: list[dict[str, Any]]
    content: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A message on the DLQ that tells of an email.

    Attributes:
        position: From 0, at the head.
        is_stale: It tells of a failure that is over.
        x_death: What RabbitMQ noted if it dead-lettered the message itself.
    """

    position: int
    is_stale: bool
    failed_at: Any
    attempts: int
    headers: dict[str, Any]
    x_death: list[Any]


async def tell(session: AsyncSession, email_id: UUID, *, reveal: Act | None = None) -> Story | None:
    """An email's story; None if there is no such email.

    Args:
        reveal: Who wants to see its content, and why; on record before it is read.
    """
    email = await stories.find_email(session, email_id)
    if email is None:
        return None
    content = None
    if reveal:
        await audit(session, "reveal", actor=reveal.actor, reason=reveal.reason, email_id=email_id)
        content = await stories.reveal_content(session, email_id)
    return Story(
        email,
        await stories.list_attempts(session, email_id),
        await stories.list_acts(session, email_id),
        await stories.list_replays_of(session, email_id),
        content,
    )


async def find_messages(
    session: AsyncSession, dlq: DeadLetterQueue, email_id: UUID, at_most: int = LOOK_AT_MOST
) -> list[Message]:
    """The messages that tell of an email, among the first of the DLQ; nothing is removed."""
    named = str(email_id).encode()
    async with look(session, dlq, at_most) as looking:
        found = [each async for batch in looking.batches() for each in batch if named in each.body.lower()]
    return [
        Message(
            each.found.position,
            each.is_stale,
            each.letter.failed_at,
            each.letter.attempts,
            {name: value for name, value in headers.items() if name != "x-death"},
            headers.get("x-death", []),
        )
        for each in await read(session, found)
        if each.letter and each.letter.email_id == email_id
        for headers in [plain(each.found.properties.headers or {})]
    ]
