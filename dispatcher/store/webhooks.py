"""Stores webhooks, and the results of deliveries to webhooks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from dispatcher.domain.event import OutgoingEvent, OutgoingKind
from dispatcher.domain.values import dataclass, field
from dispatcher.domain.webhook import WebhookState
from dispatcher.store.outgoing_events import Position, event_of
from dispatcher.store.statements import Source, fetch, statement

MAX_RETRIES: Final = 1000
"""The most events of one webhook that wait for a retry. If a receiver refuses more events, the webhook's cursor does
not move, and all later events wait."""


@dataclass(frozen=True, slots=True)
class DueWebhook:
    """A webhook that has something to deliver."""

    webhook_id: int
    url: str = field(repr=False)
    tenant_id: str | None
    kinds: frozenset[OutgoingKind]
    with_recipients: bool
    secrets: list[str] = field(repr=False)  # newest first; after a rotation, also the previous secret
    position: Position  # of the last event of the feed that was delivered or stored as refused
    revision: int  # changes whenever an operator changes the webhook; see `save_deliveries`
    failing_since: datetime | None
    delivered_at: datetime | None
    retries: int


class DueRetry(NamedTuple):
    """An event that the receiver refused, and whose next attempt is due."""

    failed_at: datetime  # when the receiver refused it first
    event: OutgoingEvent


@dataclass(frozen=True, slots=True)
class RefusedEvent:
    """An event that a receiver refused."""

    event_id: UUID
    failed_at: datetime  # for the first time
    due_at: datetime | None  # the next attempt; None if every attempt was made
    error: str


@dataclass(frozen=True, slots=True)
class Deliveries:
    """The results of one round of deliveries to a webhook."""

    position: Position
    state: WebhookState
    failing_since: datetime | None
    next_attempt_at: datetime
    last_error: str | None
    delivered_at: datetime | None
    delivered_ids: Sequence[UUID]
    refused: Sequence[RefusedEvent]


async def find_due_webhooks(source: Source, *, now: datetime, busy: Collection[int]) -> list[DueWebhook]:
    """The webhooks that have something to deliver, without those in `busy`."""
    parameters = {"now": now, "busy": list(busy), "most_retries": MAX_RETRIES}
    return [
        DueWebhook(
            webhook_id, url, tenant_id, _kinds(kinds), with_recipients, secrets, Position(made_in, number), *rest
        )
        for webhook_id, url, tenant_id, kinds, with_recipients, secrets, made_in, number, *rest in await fetch(
            source, "find_due_webhooks", parameters
        )
    ]


def _kinds(texts: Sequence[str]) -> frozenset[OutgoingKind]:
    # Leave out kinds of events that this release does not have: a later release may have stored them.
    return frozenset(kind for kind in OutgoingKind if kind.value in texts)


async def find_due_retries(source: Source, webhook_id: int, *, now: datetime, limit: int) -> list[DueRetry]:
    """Refused events whose next attempt is due, longest due first."""
    rows = await fetch(source, "find_due_retries", {"webhook_id": webhook_id, "now": now, "limit": limit})
    return [DueRetry(row[0], event_of(row[1:])) for row in rows]


async def save_deliveries(source: Source, webhook: DueWebhook, results: Deliveries) -> bool:
    """Saves the results of one round of deliveries. Returns False, and saves nothing, if an operator changed or removed
    the webhook during the round. The next round then delivers the same events again."""
    refused = results.refused
    parameters: dict[str, Any] = {
        "webhook_id": webhook.webhook_id,
        "revision": webhook.revision,
        "made_in": str(results.position.made_in),
        "position": results.position.number,
        "state": str(results.state),
        "failing_since": results.failing_since,
        "next_attempt_at": results.next_attempt_at,
        "last_error": results.last_error,
        "delivered_at": results.delivered_at,
        "delivered_ids": list(results.delivered_ids),
        "refused_ids": [each.event_id for each in refused],
        "failed_ats": [each.failed_at for each in refused],
        "due_ats": [each.due_at for each in refused],
        "errors": [each.error for each in refused],
    }
    return bool(await fetch(source, "save_deliveries", parameters))


@statement
async def restore_feed(source: Source) -> bool: ...
