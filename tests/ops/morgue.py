"""Failed and held emails as the worker and the relay leave them, without either."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pika.spec import BasicProperties

from dispatcher.broker.dead_letter import encode
from dispatcher.broker.topology import Topology
from dispatcher.domain.dead_letter import DeadLetter
from dispatcher.domain.status import Status
from tests.broker.rabbit import Rabbit
from tests.store.books import Books

PERSISTENT = 2


class Morgue:
    """Where this test's dead letters are."""

    def __init__(self, books: Books, rabbit: Rabbit, topology: Topology) -> None:
        self.books = books
        self.rabbit = rabbit
        self.topology = topology

    def bury(self, count: int = 1, *, status: str = "failed", **columns: Any) -> list[UUID]:
        """So many emails that failed or are held, after three attempts unless said otherwise."""
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

    def letter(self, email_id: UUID, **fields: Any) -> bytes:
        """An email's dead letter, as the relay writes it."""
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

    async def announce(self, email_ids: list[UUID], **fields: Any) -> None:
        """Puts their dead letters on the DLQ, in order."""
        for email_id in email_ids:
            await self.drop(self.letter(email_id, **fields))

    async def drop(self, body: bytes, **properties: Any) -> None:
        """Puts any bytes on the DLQ."""
        await self.rabbit.publish(self.topology.dlq, body, BasicProperties(delivery_mode=PERSISTENT, **properties))

    def audit(self) -> list[dict[str, Any]]:
        """Every act that is on record, the first one first."""
        return self.books.select("select * from operator_audit order by audit_id")
