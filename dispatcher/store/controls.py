"""Reads what operators set for all hosts: policies of lanes, limits of tenants and recipient domains, and pauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.domain.controls import MOST_WAITING, Controls, DomainLimit, LanePolicy, LaneRule, Pause, TenantLimit
from dispatcher.store.statements import Source, statement

READ_SECONDS: Final = 1.0
"""Each process looks for changes at this interval, so that a change is in force on all hosts within two seconds."""
MOST_DUE: Final = 10_000
"""Due emails of a lane and tenant are counted up to this number."""
MOST_PAIRS: Final = 100
"""The most pairs of a lane and a tenant whose due emails are counted."""


@dataclass(frozen=True, slots=True)
class Due:
    """The due emails of a tenant in a lane; the oldest of them became due `oldest_seconds` ago."""

    lane: str
    tenant_id: str
    emails: int
    oldest_seconds: float


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
            version = await find_controls_version(self._source)
        if version != self._version:
            self._controls = await read_controls(self._source)
            self._version = version
        return self._controls


async def read_controls(source: Source) -> Controls:
    return Controls(
        tuple(await list_pauses(source)),
        {each.lane: each for each in await list_lane_policies(source)},
        {each.tenant_id: each for each in await list_tenant_limits(source)},
        {each.domain: each for each in await list_domain_limits(source)},
    )


@statement
async def list_pauses(source: Source, *, email_id: UUID | None = None) -> list[Pause]: ...
@statement
async def find_paused_emails(
    source: Source, scopes: Sequence[str], names: Sequence[str], *, most: int = MOST_WAITING
) -> list[tuple[int | None, bool | None]]: ...
@statement
async def count_due(source: Source, *, pairs: int = MOST_PAIRS, most: int = MOST_DUE) -> list[Due]: ...
@statement
async def find_controls_version(source: Source) -> str: ...
@statement
async def list_lane_policies(source: Source) -> list[LanePolicy]: ...
@statement
async def list_lane_rules(source: Source) -> list[LaneRule]: ...
@statement
async def list_tenant_limits(source: Source) -> list[TenantLimit]: ...
@statement
async def list_domain_limits(source: Source) -> list[DomainLimit]: ...
