"""Webhooks for applications: secrets, signatures (https://www.standardwebhooks.com), and when to try again."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from secrets import token_bytes
from typing import Final
from uuid import UUID

from dispatcher.domain.values import dataclass, field

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - a prefix
SIGNATURE_PREFIX: Final = "v1,"
_SECRET_OCTETS: Final = 32
_HOUR: Final = 3600.0

SCHEDULE_SECONDS: Final = (*(5.0, 300.0, 1800.0), *(hours * _HOUR for hours in (2, 5, 10, 14, 20, 24, 27)))
"""When an event is posted again, in seconds after its first attempt."""
LONGEST_PROBE_SECONDS: Final = 1800.0
"""The longest wait between two attempts to reach a receiver that accepts nothing. Each time, at most a few events are
posted. All later events wait until the receiver accepts these."""
JITTER: Final = 0.1
"""Each wait is longer by a random share, at most this share, so that the events of an outage are not all posted again
at the same instant."""
LONGEST_RETRY_AFTER_SECONDS: Final = 24 * _HOUR
"""A receiver that asks for a longer wait is tried again after this time."""


MAX_WEBHOOKS: Final = 20
"""The most webhooks of a tenant, because each webhook may use several connections at the same time."""
MAX_URL_CHARACTERS: Final = 2000
PREVIOUS_SECRET_HOURS: Final = 24
"""After a rotation, deliveries are also signed with the previous secret for this time."""


class WebhookState(StrEnum):
    """Whether a webhook gets events; the value of `webhook.state`."""

    ACTIVE = "active"
    DISABLED = "disabled"
    """The webhook's receiver accepted nothing for about 27 hours, or answered 410. An operator may enable the webhook
    again."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A webhook, as operators see it."""

    id: int
    url: str
    tenant_id: str | None  # the tenant whose events the webhook gets; None for all tenants
    events: Sequence[str]  # the types of the events that the webhook gets, such as `email.sent`
    recipients: bool  # whether the events contain recipients' addresses
    state: WebhookState
    # the time since which the receiver has accepted no event; None if the receiver accepts events
    failing_since: datetime | None
    next_attempt_at: datetime | None  # None: at once
    last_error: str | None
    delivered_at: datetime | None
    created_at: datetime
    # the age of the oldest event that was neither delivered nor stored for a retry; None if there is no such event
    lag_seconds: float | None
    retries: int  # the number of refused events that wait for another attempt
    given_up: int  # the number of events that the receiver refused at every attempt, while it accepted other events

    def describe(self) -> str:
        return f"Webhook {self.id} is {self.state}: {self.url}"


@dataclass(frozen=True, slots=True)
class NewWebhook(Webhook):
    """A webhook with a new secret, which signs its events. The secret is not shown again."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class RefusedDelivery:
    """An event that a webhook's receiver refused, and has not accepted since. `due_at` is None if it was given up."""

    failed_at: datetime  # the first attempt
    type: str
    email_id: UUID
    message_key: str
    error: str  # what the receiver answered to the last attempt
    due_at: datetime | None
    id: UUID


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """Where to post a webhook's events, and the secrets that sign them, newest first."""

    id: int
    url: str = field(repr=False)
    secrets: list[str] = field(repr=False)


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(token_bytes(_SECRET_OCTETS)).decode()


def digests(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes | bytearray) -> list[bytes]:
    """One signature of a message per secret."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    return [hmac.digest(base64.b64decode(secret.removeprefix(SECRET_PREFIX)), signed, "sha256") for secret in secrets]


def signature(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The value of the header `webhook-signature`: one signature per secret, separated by spaces."""
    found = digests(secrets, message_id, timestamp, body)
    return " ".join(SIGNATURE_PREFIX + base64.b64encode(digest).decode() for digest in found)


def next_attempt(failed_at: datetime, now: datetime, *, draw: float) -> datetime | None:
    """When to post an event again; None if every attempt was made."""
    elapsed = (now - failed_at).total_seconds()
    for seconds in SCHEDULE_SECONDS:
        if seconds > elapsed:
            return now + timedelta(seconds=(seconds - elapsed) * (1 + JITTER * draw))
    return None


def next_probe(failing_since: datetime, now: datetime, *, retry_after_seconds: float, draw: float) -> datetime | None:
    """When to post again to a receiver that accepts nothing; None if the receiver has failed for too long."""
    scheduled = next_attempt(failing_since, now, draw=draw)
    if scheduled is None:
        return None
    probe = now + timedelta(seconds=LONGEST_PROBE_SECONDS * (1 + JITTER * draw))
    asked = now + timedelta(seconds=retry_after_seconds)
    return max(min(scheduled, probe), asked)
