"""Stores the events that providers report, and settles the emails whose acceptance these events prove."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

from dispatcher.domain.address import mailbox_provider_of
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.domain.scrub import scrub
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import Recipient, SuppressionRules
from dispatcher.domain.values import dataclass
from dispatcher.store.address_hashes import AddressHasher, normalised
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch, statement

MAX_CODE_CHARACTERS: Final = 64
_ORDER: Final = attrgetter("email_id.int", "event_key")
_COLUMNS: Final = (
    *("email_ids", "event_keys", "providers", "kinds", "bounces", "address_hashes", "masked", "codes", "details"),
    *("happened_ats", "mailboxes", "doubts"),
)
"""The parameters of the statement `store_events`: one for each field of `EventRow`, in order."""


class EventRow(NamedTuple):
    """A row to insert into `email_event`. A tuple, because to create a dataclass would take four times as long."""

    email_id: UUID
    event_key: bytes
    provider: str
    kind: str
    bounce: str | None
    address_hash: bytes | None
    masked: str | None
    code: str | None
    detail: str | None
    happened_at: Any
    mailbox: str
    doubt: str | None = None

    @classmethod
    def of(cls, event: ProviderEvent, hasher: AddressHasher) -> EventRow:
        """Contains no address: the recipient is hashed and masked, and the detail is scrubbed."""
        address_hash = hasher.hash(event.recipient) if event.recipient else None
        address = normalised(event.recipient) if event.recipient else None
        return cls(
            email_id=event.email_id,
            event_key=event.key(address_hash),
            provider=event.provider,
            kind=event.kind.value,
            bounce=event.bounce and event.bounce.value,
            address_hash=address_hash,
            masked=Recipient(address, is_domain=False).masked if address else None,
            code=event.code[:MAX_CODE_CHARACTERS] if event.code else None,
            detail=scrub(event.detail) if event.detail else None,
            happened_at=event.happened_at,
            mailbox=mailbox_provider_of(address),
        )

    @property
    def may_suppress(self) -> bool:
        """Whether the event is a reason to suppress its recipient."""
        kinds = EventKind.COMPLAINED, EventKind.UNSUBSCRIBED
        return self.address_hash is not None and (self.kind in kinds or self.bounce in (Bounce.HARD, Bounce.SOFT))


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """What `store_events` did with the events that have the same provider, kind, bounce class and mailbox provider."""

    provider: str
    kind: EventKind
    bounce: Bounce | None
    mailbox: str
    given: int  # including duplicates
    new: int  # not stored before, without impossible events
    impossible: int  # new events whose email no worker can have sent through the provider
    unknown: int
    delivery_seconds: list[float]  # from acceptance to delivery, of each new event about a delivery
    settleable: list[UUID]  # what `settle_proven` can settle now; each StoredEvents of one call has the whole list

    @property
    def metric_kind(self) -> str:
        """The kind as a label of a metric, such as `delivered` or `bounced_hard`."""
        return f"{self.kind}_{self.bounce}" if self.bounce else self.kind

    @property
    def duplicates(self) -> int:
        return self.given - self.new - self.impossible - self.unknown


@dataclass(frozen=True, slots=True)
class SettledEmail:
    """An email whose status an event changed."""

    email_id: UUID
    correlation_id: str | None
    proven_by: str
    previous_status: Status
    status: Status


async def store_events(source: Source, rows: Sequence[EventRow], rules: SuppressionRules) -> list[StoredEvents]:
    """Stores events, marks the emails whose acceptance the events prove, and suppresses recipients, in one commit.
    Idempotent."""
    ordered = sorted(rows, key=_ORDER)
    parameters: dict[str, Any] = {
        **dict(zip(_COLUMNS, map(list, zip(*ordered, strict=True)), strict=True)),
        "lowest_id": ordered[0].email_id,
        "highest_id": ordered[-1].email_id,
        "suppress_on": [reason.value for reason in rules.reasons],
        "suppress_days": rules.days,
        "soft_bounces": rules.soft_bounces,
        "soft_bounce_days": rules.soft_bounce_days,
    }
    return await fetch(source, "store_events", parameters, into=StoredEvents)


async def settle_proven(source: Source, email_ids: Collection[UUID]) -> list[SettledEmail]:
    """Changes the status of emails whose acceptance an event has proven, usually to `sent`; a held email becomes
    `failed` if the provider accepted the email, and then dropped it. Leaves out emails that are locked or leased.
    Returns the changed ones."""
    if not email_ids:
        return []
    return await fetch(source, "settle_proven", ids_within(set(email_ids)), into=SettledEmail)


@statement
async def find_proven(source: Source, limit: int) -> list[UUID]: ...
@statement
async def fill_deliveries(source: Source, *, most: int) -> tuple[bool, int] | None: ...
@statement
async def list_sns_certificates(source: Source, limit: int) -> list[tuple[str, str]]: ...
@statement
async def store_sns_certificate(source: Source, url: str, pem: str, limit: int) -> None: ...


@dataclass(frozen=True, slots=True)
class EventCount:
    provider: str
    kind: str
    bounce: str | None
    events: int
    since: datetime


@statement
async def count_recent_events(source: Source, *, examined: int) -> list[EventCount]: ...
