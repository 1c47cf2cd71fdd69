"""Show what operators did: who, when and why. The log cannot be changed, and contains no addresses.

A page examines at most 20,000 acts, so a search by a rare actor or action may need several pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from dispatcher.actions.action import Paged, field
from dispatcher.domain.audit import AuditEntry
from dispatcher.domain.kinds import EMAIL_ID, FILTER_TEXT, SINCE


class ListAudit(Paged[AuditEntry], name="audit list", http="GET /v1/audit", query="list_audit"):
    """List what operators did, newest first."""

    actor: str | None = field(FILTER_TEXT, "Only acts of this actor, such as ann@ops-1.", default=None)
    action: str | None = field(FILTER_TEXT, "Only acts of this kind, such as replay.", default=None)
    email_id: UUID | None = field(EMAIL_ID, "Only acts on this email.", default=None, option="--email")
    since: datetime | None = field(SINCE, "Only acts since this time: an age such as 2h, or a time.", default=None)

    key: ClassVar = {"acted_at": datetime, "audit_id": int}
    stops = "actor"
    constants: ClassVar = {"examined": 20_000}
    nothing = "No act matches."
    examples = ("audit list --since 2d", "audit list --actor ann@ops-1 --json | jq -r '.audit[].reason'")

    @classmethod
    def rows(cls) -> dict[str, type[Any]]:
        """Both statements."""
        return {"list_audit": AuditEntry, "list_audit_of_email": AuditEntry}

    async def run(self, source: Any, parameters: Mapping[str, Any]) -> Sequence[AuditEntry]:
        """The acts on one email by the index on its id, others by time."""
        from dispatcher.store.statements import fetch

        if self.email_id is None:
            return await super().run(source, parameters)
        return await fetch(source, "list_audit_of_email", parameters, into=AuditEntry)


ACTIONS = (ListAudit,)
