"""The messages on the DLQ that tell of one email."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.ops.letters import look, read
from dispatcher.ops.plain import plain
from dispatcher.store.connections import AsyncSession


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


async def find_messages(session: AsyncSession, dlq: DeadLetterQueue, email_id: UUID) -> list[Message]:
    """The messages that tell of an email, in the DLQ's order; nothing is removed."""
    named = str(email_id).encode()
    async with look(session, dlq) as looking:
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
