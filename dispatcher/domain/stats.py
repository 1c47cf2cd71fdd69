"""Statistics: how many emails were sent, failed, bounced and so on, and the shares of them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dispatcher.domain.controls import TenantLimit
from dispatcher.domain.values import dataclass


class Per(StrEnum):
    """What statistics are grouped by. Days and hours are in UTC."""

    DAY = "day"
    HOUR = "hour"
    TENANT = "tenant"
    LANE = "lane"
    PROVIDER = "provider"
    TAG = "tag"


@dataclass(frozen=True, slots=True)
class Stats:
    """The emails of a day, an hour, a tenant, a lane, a provider or a tag.

    Attributes:
        failed_percent: Of the sent and the failed emails; None if there is none. The other shares are of the sent
            emails.
        bounced: Emails that bounced, in whichever way. An email counts once for each kind of event.
        suppressed: Failed emails whose recipients are suppressed; they are not among `failed`.
        rejected: Emails that the provider accepted, and later did not send.
    """

    name: str
    sent: int
    failed: int
    failed_percent: float | None
    bounced: int
    bounced_percent: float | None
    complained: int
    complained_percent: float | None
    held: int
    suppressed: int
    delivered: int
    opened: int
    clicked: int
    unsubscribed: int
    bounced_hard: int
    bounced_soft: int
    bounced_blocked: int
    rejected: int


@dataclass(frozen=True, slots=True)
class SplitCount:
    """The sent emails of an hour or a day, and of one tenant, lane or provider."""

    begins_at: datetime
    name: str
    sent: int


@dataclass(frozen=True, slots=True)
class Tenant(TenantLimit):
    """A tenant, and its statistics of the last 24 hours and of 7 days. The shares are those of `Stats`."""

    sent_24h: int = 0
    failed_percent_24h: float | None = None
    bounced_percent_24h: float | None = None
    complained_percent_24h: float | None = None
    sent_7d: int = 0
    failed_percent_7d: float | None = None
    bounced_percent_7d: float | None = None
    complained_percent_7d: float | None = None
