"""Visitors of the operators' page."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.api.ops_page.page_errors import PageError
from dispatcher.ops.acts import Act


@dataclass(frozen=True, slots=True)
class Visitor:
    """A signed-in visitor, and what the visitor may see and do."""

    key_id: str  # the API key's id; empty if the visitor signed in without a key
    name: str  # the actor in the audit log
    tenant_id: str | None  # whose emails the visitor sees; None for all tenants
    may_act: bool  # and see addresses; otherwise the visitor may only read
    label: str = ""  # a short name for the page's header

    @property
    def share(self) -> str:
        """Identifies the visitor for limits per tenant. A visitor who sees all tenants has limits of its own."""
        return self.name if self.tenant_id is None else self.tenant_id

    def act(self, reason: str) -> Act:
        """An act of this visitor, for the audit log. Raises DispatcherError if the reason is empty."""
        return Act.of(self.name, reason)

    def sees(self, tenant_id: str) -> bool:
        return self.tenant_id is None or self.tenant_id == tenant_id


def require_operate(visitor: Visitor) -> None:
    """Raises PageError if the visitor may only read. The error says how the visitor can get the right to act."""
    if visitor.may_act:
        return
    if visitor.key_id:
        raise PageError(403, "This API key may only read.", "Sign in with a key that has the scope operate.")
    raise PageError(
        403,
        "You may only read.",
        "Ask an administrator for the right to act, which the settings DISPATCHER_OPS_OIDC_CLAIM and "
        "DISPATCHER_OPS_OIDC_OPERATE define. Then sign in again.",
    )
