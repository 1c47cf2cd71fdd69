"""What operators set for all hosts: lanes' policies, limits of tenants and recipient domains, pauses.

`store.controls` reads these settings from PostgreSQL.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeVar

from dispatcher.domain.status import OnUncertain
from dispatcher.domain.values import dataclass, field

MIN_LIMIT: Final = 0.001
"""The lowest weight, and the lowest ceiling per second. With a lower weight, the clocks of `domain.turns` would lose
precision."""
MAX_LIMIT: Final = 1_000_000
"""The highest weight, and the highest ceiling per second. The queries `list_lane_policies` and `list_tenant_limits`
contain both limits, too."""
MAX_CONCURRENT: Final = 100_000
"""The highest number of attempts at the same time that an operator can set for a recipient domain."""
MOST_WAITING: Final = 10_000
"""The emails that wait for a domain's ceiling, or because of a pause, are counted up to this number."""
LIMITED_PROVIDER: Final = "smtp"
"""The provider to which the ceilings of recipient domains apply. Other providers choose their own pace for each
domain."""


P = TypeVar("P", bound="Pause")
_PRIVATE: Final = re.compile(r" \([^()]*@[^()]*\)$|@.*$")


class PauseScope(StrEnum):
    """What a pause stops: everything, a lane, a tenant or a provider. The value of the column `pause.scope`."""

    ALL = "all"
    LANE = "lane"
    TENANT = "tenant"
    PROVIDER = "provider"


def login_of(actor: str) -> str:
    """The actor of an operator's act as tenants may read it: without the host or address, as in `ann@host`."""
    return _PRIVATE.sub("", actor)


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause that an operator began."""

    scope: PauseScope
    name: str  # the name of the lane, tenant or provider; empty if the scope is `all`
    # when the pause ends by itself, by PostgreSQL's clock; None if an operator must end the pause
    until: datetime | None
    reason: str
    actor: str  # who began the pause, such as `ann@host`
    began_at: datetime  # when the pause began, by PostgreSQL's clock

    @property
    def subject(self) -> str:
        return "everything" if self.scope is PauseScope.ALL else f"{self.scope} {self.name}"

    @property
    def login(self) -> str:
        """The actor's name without the host. Tenants may read this name, but not the host's name."""
        return login_of(self.actor)

    def describe(self) -> str:
        """A sentence such as `Tenant acme is paused until 2026-11-23 14:00 UTC by ann: maintenance.`"""
        until = f" until {self.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if self.until else ""
        return (
            f"{self.subject[0].upper()}{self.subject[1:]} is paused{until} by {self.login}: {self.reason.rstrip('.')}."
        )


@dataclass(frozen=True, slots=True)
class ListedPause(Pause):
    """A pause, and its effect."""

    # the due emails that wait because of it, counted up to `MOST_WAITING`; None for a provider's pause
    waiting: int | None = None
    # whether the tenant has emails, or the provider had one in the last 30 days; None for other pauses
    has_emails: bool | None = None

    @property
    def effect(self) -> str:
        """What the pause stops, in one sentence or two; a name without emails may be misspelt."""
        more = " or more" if (self.waiting or 0) >= MOST_WAITING else ""
        due = f"{self.waiting:,}{more} due email{_s(self.waiting)}" if self.waiting is not None else ""
        effect = f"{due} {'waits' if self.waiting == 1 else 'wait'} because of it." if due else ""
        when = "" if self.scope is PauseScope.TENANT else " in the last 30 days"
        warning = f"The {self.scope} {self.name!r} has no email{when}: check the name."
        return effect if self.has_emails is not False else f"{warning} {effect}".strip()

    def describe(self) -> str:
        """As `Pause.describe`, with the effect."""
        return f"{Pause.describe(self)} {self.effect}".strip()


def seen_by(pauses: Sequence[P], tenant_id: str | None) -> list[P]:
    """All pauses; or, for a tenant, only its own pause, with a login instead of an actor."""
    if tenant_id is None:
        return list(pauses)
    own = (PauseScope.TENANT, tenant_id)
    return [replace(each, actor=each.login) for each in pauses if (each.scope, each.name) == own]


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """What an operator set for a lane. None means that the host's setting applies."""

    lane: str
    # The lane's weight, relative to the other lanes that have emails. Lanes share the workers and the providers'
    # rates by their weights.
    weight: float
    on_uncertain: OnUncertain | None = None  # the policy for the lane's emails that have no policy of their own
    max_attempts: int | None = None  # the most attempts before an email fails or waits for a redelivery
    # for how many seconds an email may be redelivered, counted from when it became due or was last replayed; 0: never
    redeliver_seconds: float | None = None

    def describe(self) -> str:
        """A sentence such as `Lane bulk: weight 5, no redelivery.` Leaves out what is not set."""
        parts = [f"weight {self.weight:g}"]
        if self.on_uncertain is not None:
            parts.append(f"on uncertain {self.on_uncertain}")
        if self.max_attempts is not None:
            parts.append(f"at most {self.max_attempts} attempt{_s(self.max_attempts)}")
        if self.redeliver_seconds is not None:
            parts.append(f"redelivery for {self.redeliver_seconds:,g} s" if self.redeliver_seconds else "no redelivery")
        return f"Lane {self.lane}: {', '.join(parts)}."


@dataclass(frozen=True, slots=True)
class Lane(LanePolicy):
    """A lane, and what is in force for it. If operators set nothing, the policy contains only the default weight."""

    share: float = 0.0  # the lane's part of the workers and rates while all lanes have emails, from 0 to 1
    queue: str = ""  # the name of the lane's send queue
    senders: tuple[str, ...] = ()  # the senders whose emails are in this lane (see `LaneRule`)


@dataclass(frozen=True, slots=True)
class DeletedLane:
    """What is no longer set: the policy of a lane, or the lane of a sender."""

    lane: str
    sender: str | None


@dataclass(frozen=True, slots=True)
class LaneRule:
    """Assigns a sender's emails to a lane. If an email or its API key names a lane, that lane is used instead."""

    sender: str  # an address, or a domain in the form `@example.com`; in lower case
    lane: str


@dataclass(frozen=True, slots=True)
class TenantLimit:
    """What an operator set for a tenant."""

    tenant_id: str
    weight: float = 1.0  # the tenant's weight within a lane, relative to the other tenants that have due emails
    # the tenant's ceiling: the most emails per second, all hosts together; None: no limit
    per_second: float | None = None

    def describe(self) -> str:
        """A sentence such as `Tenant acme: weight 2, at most 50 emails per second.`"""
        ceiling = "no ceiling" if self.per_second is None else f"at most {self.per_second:g} emails per second"
        return f"Tenant {self.tenant_id}: weight {self.weight:g}, {ceiling}."


ASSUMED_SECONDS: Final = 1.0
"""The assumed length of an attempt at a recipient domain, until the first attempt was measured."""
MIN_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class DomainLimit:
    """What an operator set for a recipient domain. Limits only attempts through the provider `smtp`."""

    # In lower case; an internationalized domain as A-labels (`xn--…`). Its subdomains are not limited.
    domain: str
    per_second: float | None = None  # the most emails per second, all hosts together; None: no limit
    concurrent: int | None = None  # the most attempts at the same time, all hosts together; None: no limit
    # the mean length of the latest attempts, which workers measure; None until the first one
    attempt_seconds: float | None = None

    @property
    def pace(self) -> float:
        """How many emails per second the ceilings allow, by the measured length of attempts."""
        seconds = ASSUMED_SECONDS if self.attempt_seconds is None else max(self.attempt_seconds, MIN_SECONDS)
        speed = math.inf if self.concurrent is None else self.concurrent / seconds
        return speed if self.per_second is None else min(self.per_second, speed)

    def describe(self) -> str:
        """A clause such as `example.org may get 5 emails per second, 2 at the same time`."""
        rate = "" if self.per_second is None else f"{self.per_second:g} email{_s(self.per_second)} per second"
        most = "" if self.concurrent is None else f"{self.concurrent:,}{'' if rate else f' email{_s(self.concurrent)}'}"
        slots = f"{most} at the same time" if most else ""
        return f"{self.domain} may get {', '.join(filter(None, (rate, slots)))}"


@dataclass(frozen=True, slots=True)
class LimitedDomain(DomainLimit):
    """A domain that has ceilings, and the emails that wait for them."""

    waiting: int = 0  # the number of emails that wait for these ceilings, counted up to `MOST_WAITING`

    def describe(self) -> str:
        """A sentence such as `12 emails wait: example.org may get 5 emails per second.`"""
        more = " or more" if self.waiting >= MOST_WAITING else ""
        wait = "email waits" if self.waiting == 1 else "emails wait"
        return f"{self.waiting:,}{more} {wait}: {DomainLimit.describe(self)}."


def _s(count: float) -> str:
    return "" if count == 1 else "s"


@dataclass(frozen=True, slots=True)
class Controls:
    """Everything that operators set, as read at one moment. Contains no pause that has ended."""

    pauses: tuple[Pause, ...] = ()
    # the policies that operators set, by lane
    lanes: Mapping[str, LanePolicy] = field(default_factory=lambda: MappingProxyType({}))
    # the limits that operators set, by tenant id
    tenants: Mapping[str, TenantLimit] = field(default_factory=lambda: MappingProxyType({}))
    domains: Mapping[str, DomainLimit] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def paused_tenants(self) -> tuple[str, ...]:
        return tuple(pause.name for pause in self.pauses if pause.scope is PauseScope.TENANT)

    @property
    def paused_lanes(self) -> tuple[str, ...]:
        """The names of the lanes with a pause of their own. A pause of everything does not count."""
        return tuple(pause.name for pause in self.pauses if pause.scope is PauseScope.LANE)

    def pause_of_lane(self, lane: str) -> Pause | None:
        """The pause that stops this lane: a pause of everything, or of the lane. None if the lane is not paused."""
        return self._find(PauseScope.ALL, "") or self._find(PauseScope.LANE, lane)

    def pause_of_tenant(self, tenant_id: str) -> Pause | None:
        return self._find(PauseScope.TENANT, tenant_id)

    def _find(self, scope: PauseScope, name: str) -> Pause | None:
        return next((pause for pause in self.pauses if pause.scope is scope and pause.name == name), None)
