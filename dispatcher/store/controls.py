"""Reads what operators set for all hosts: lanes, tenants' limits, pauses."""

from __future__ import annotations

from typing import Final

from dispatcher.domain.controls import Controls, LanePolicy, Pause, TenantLimit
from dispatcher.store.statements import Source, fetch

READ_SECONDS: Final = 1.0
"""How often each process reads the controls, so that a change is in force on all hosts within two seconds."""


async def read_controls(source: Source) -> Controls:
    """Reads all controls.

    Raises:
        StoreUnavailable: PostgreSQL cannot be reached.
    """
    pauses = await fetch(source, "list_pauses", into=Pause)
    lanes = await fetch(source, "list_lane_policies", into=LanePolicy)
    tenants = await fetch(source, "list_tenant_limits", into=TenantLimit)
    return Controls(tuple(pauses), {each.lane: each for each in lanes}, {each.tenant_id: each for each in tenants})
