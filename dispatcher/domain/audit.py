"""A record of the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.values import dataclass


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What an operator did, when and why. Contains no address."""

    audit_id: int
    acted_at: datetime
    actor: str
    action: str
    reason: str | None
    email_id: UUID | None
    replay_id: int | None
    detail: dict[str, Any] | None
