"""Creates failed and held emails with their dead letters, without a worker or a relay."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pika.spec import BasicProperties

from dispatcher.actions.batch import Batch
from dispatcher.actions.runner import Face, Who, run_batch
from dispatcher.broker.dead_letter import encode
from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.broker.topology import Topology
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import Source
from tests.broker.rabbit import Rabbit
from tests.store.books import Books

PERSISTENT = 2


class DeadEmails:
    def __init__(self, books: Books, rabbit: Rabbit, topology: Topology) -> None:
        self.books = books
        self.rabbit = rabbit
        self.topology = topology

    def create(self, count: int = 1, *, status: str = "failed", **columns: Any) -> list[UUID]:
        usual = {
            "status": status,
            "attempt_count": 3,
            "provider": "smtp",
            "error_type": "outcome_unknown" if status == "held" else "rejected",
            "last_error": "550 no such user",
            "publish_due_at": None,
            "published_at": datetime.now(UTC),
        }
        email_ids = self.books.enqueue(count)
        for email_id in email_ids:
            self.books.change(email_id, **{**usual, **columns})
        return email_ids

    def dead_letter(self, email_id: UUID, **fields: Any) -> bytes:
        row = self.books.row(email_id)
        given: dict[str, Any] = {
            "email_id": email_id,
            "tenant_id": row["tenant_id"],
            "message_key": row["message_key"],
            "correlation_id": row["correlation_id"],
            "status": Status(row["status"]),
            "error_type": row["error_type"],
            "error": row["last_error"],
            "attempts": row["attempt_count"],
            "provider": row["provider"],
            "created_at": row["created_at"],
            "failed_at": datetime.now(UTC),
        }
        return encode(DeadLetter(**{**given, **fields}))

    async def publish_dead_letters(self, email_ids: list[UUID], **fields: Any) -> None:
        for email_id in email_ids:
            await self.publish(self.dead_letter(email_id, **fields))

    async def publish(self, body: bytes, **properties: Any) -> None:
        await self.rabbit.publish(self.topology.dlq, body, BasicProperties(delivery_mode=PERSISTENT, **properties))

    def audit(self) -> list[dict[str, Any]]:
        return self.books.select("select * from operator_audit order by audit_id")


class Desk(DeadEmails):
    def __init__(self, session: AsyncSession, url: str, books: Books, dlq: Any, rabbit: Any, topology: Any) -> None:
        super().__init__(books, rabbit, topology)
        self.session = session
        self.url = url
        self.dlq: DeadLetterQueue = dlq


async def decide(source: Source, decision: Batch, *email_ids: UUID, actor: str = "ann@ops-1") -> list[str]:
    return [
        each.verdict
        async for judged in run_batch(source, decision, Who(Face.COMMAND, actor), email_ids)
        for each in judged
    ]
