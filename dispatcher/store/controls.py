"""Reads what operators set for all hosts: policies of lanes, limits of tenants and recipient domains, and pauses.

Also begins and ends pauses.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from dispatcher.domain.controls import Controls, DomainLimit, LanePolicy, Pause, PauseScope, TenantLimit
from dispatcher.store.connections import Session
from dispatcher.store.statements import Source, fetch, fetch_sync

READ_SECONDS: Final = 1.0
"""Each process looks for changes at this interval, so that a change is in force on all hosts within two seconds."""


class LatestControls:
    """Reads the controls again and again, for one process. After the first time, reads the tables only if something has
    changed. Otherwise, a call of `read` is one short statement."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.found: str | None = None  # the version that another statement has just found, for the next `read`
        self._version: str | None = None
        self._controls = Controls()

    async def read(self) -> Controls:
        """All controls, as `read_controls`; the same object as at the last call if nothing has changed."""
        # The version is read first: a change that is committed between the two reads is then found by the next call.
        version, self.found = self.found, None
        if version is None:
            ((version,),) = await fetch(self._source, "find_controls_version")
        if version != self._version:
            self._controls = await read_controls(self._source)
            self._version = version
        return self._controls


async def read_controls(source: Source) -> Controls:
    """Reads all controls.

    Raises:
        StoreUnavailable: PostgreSQL cannot be reached.
    """
    pauses = await list_pauses(source)
    lanes = await fetch(source, "list_lane_policies", into=LanePolicy)
    tenants = await fetch(source, "list_tenant_limits", into=TenantLimit)
    domains = await fetch(source, "list_domain_limits", into=DomainLimit)
    return Controls(
        tuple(pauses),
        {each.lane: each for each in lanes},
        {each.tenant_id: each for each in tenants},
        {each.domain: each for each in domains},
    )


async def list_pauses(source: Source) -> list[Pause]:
    """The pauses in force, in the order in which they began."""
    return await fetch(source, "list_pauses", into=Pause)


def list_pauses_sync(connection: Session) -> list[Pause]:
    """As `list_pauses`, on a synchronous connection."""
    return fetch_sync(connection, "list_pauses", into=Pause)


async def find_pauses_of(source: Source, email_id: UUID) -> list[Pause]:
    """The pauses in force that can stop an email: pauses of everything, of the email's lane, of its tenant, or of a
    provider (any provider, because each of them might have to send the email)."""
    return await fetch(source, "find_pauses_of", {"email_id": email_id}, into=Pause)


async def begin_pause(
    source: Source, scope: PauseScope, name: str, *, seconds: float | None, actor: str, reason: str
) -> Pause:
    """Begins a pause, and adds an audit record. If the pause is in force already, changes its end, reason and actor.

    Args:
        name: The name of the lane, tenant or provider; empty for `PauseScope.ALL`.
        seconds: How long the pause lasts from now; None if it lasts until `end_pause`.
    """
    parameters = {"scope": scope, "name": name, "seconds": seconds, "actor": actor, "reason": reason}
    (pause,) = await fetch(source, "begin_pause", parameters, into=Pause)
    return pause


async def end_pause(source: Source, scope: PauseScope, name: str, *, actor: str, reason: str) -> Pause | None:
    """Ends a pause, and adds an audit record. Returns the pause; None if it was not in force.

    If the scope is a provider, also ends the waits of workers that cannot use the provider.
    """
    parameters = {"scope": scope, "name": name, "actor": actor, "reason": reason}
    return next(iter(await fetch(source, "end_pause", parameters, into=Pause)), None)
