"""Finds the messages on the DLQ that are about one email."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.domain.values import dataclass
from dispatcher.monitor.dead_letters import classify, scan
from dispatcher.ops.safe_text import json_value
from dispatcher.store.connections import AsyncSession


@dataclass(frozen=True, slots=True)
class DeadLetterMessage:
    """A dead letter on the DLQ.

    Attributes:
        position: The dead letter's position on the queue; 0 is the head.
        is_stale: Whether the dead letter is not about its email's current failure; see `dead_letters.is_current`.
        x_death: RabbitMQ's x-death header; empty unless RabbitMQ itself dead-lettered the message.
    """

    position: int
    is_stale: bool
    failed_at: Any
    attempts: int
    headers: dict[str, Any]
    x_death: list[Any]


async def find_messages(session: AsyncSession, dlq: DeadLetterQueue, email_id: UUID) -> list[DeadLetterMessage]:
    """The dead letters about an email, in the DLQ's order. Removes nothing."""
    named = str(email_id).encode()
    async with scan(session, dlq) as opened:
        found = [each async for batch in opened.batches() for each in batch if named in each.body.lower()]
    return [
        DeadLetterMessage(
            each.found.position,
            each.is_stale,
            each.dead_letter.failed_at,
            each.dead_letter.attempts,
            {name: value for name, value in headers.items() if name != "x-death"},
            headers.get("x-death", []),
        )
        for each in await classify(session, found)
        if each.dead_letter and each.dead_letter.email_id == email_id
        for headers in [json_value(each.found.properties.headers or {})]
    ]
