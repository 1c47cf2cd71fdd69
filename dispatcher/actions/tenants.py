"""List the tenants with their statistics, and set their rates and shares.

A tenant is an application or a customer that `dispatcher enqueue --tenant` or an API key names. Within a lane,
tenants take turns: a tenant with weight 2 sends twice as many emails as a tenant with weight 1, while both
have due emails. A tenant for which nothing is set has weight 1, and no ceiling for its emails per second.
"""

from __future__ import annotations

from typing import ClassVar

from dispatcher.actions.action import Change, Listing, Refusal, field
from dispatcher.domain.controls import TenantLimit
from dispatcher.domain.kinds import LIMIT, TENANT
from dispatcher.domain.stats import Tenant


class ListTenants(Listing[Tenant], name="tenants list", http="GET /v1/tenants", query="list_tenants"):
    """List tenants that sent emails in the last 7 days, and tenants whose rate or share was set, the largest first.

    At most 1,000. `24h` is the current hour and the 23 hours before, `7d` is today (in UTC) and the six days before.
    The shares are those of `stats`.
    """

    nothing = "No tenant sent an email in the last 7 days, and nothing is set. Counts are about two minutes old."
    missing: ClassVar = {"per_second": "no ceiling"}
    examples = ("tenants list", "tenants list --json | jq -r '.tenants[].tenant_id'")


class SetTenant(Change[TenantLimit], name="tenants set", http="PUT /v1/tenants/{tenant_id}", query="set_tenant_limit"):
    """Set a tenant's rate and share. All hosts apply them within two seconds. Values that you leave out stay."""

    tenant_id: str = field(TENANT, "The tenant.")
    per_second: float | None = field(LIMIT, "The most emails per second, all hosts together.", default=None)
    weight: float | None = field(
        LIMIT, "The share within a lane, relative to the other tenants that have due emails.", default=None
    )

    some_of = ("per_second", "weight")
    needs_reason = False
    tells_row = True
    done = "The tenant is changed. All hosts apply the change within two seconds."
    examples = ("tenants set acme --per-second 50 --weight 2",)


class UnsetTenant(
    Change[TenantLimit], name="tenants unset", http="DELETE /v1/tenants/{tenant_id}", query="unset_tenant_limit"
):
    """Delete a tenant's rate and share. The tenant then has weight 1, and no ceiling for its emails per second."""

    tenant_id: str = field(TENANT, "The tenant.")

    refusals = (
        Refusal("nothing-set", "not-found", "Nothing is set for tenant {tenant_id}.", "See `dispatcher tenants list`."),
    )
    needs_reason = False
    done = "The tenant has weight 1 and no ceiling again."
    examples = ("tenants unset acme",)


ACTIONS = (ListTenants, SetTenant, UnsetTenant)
