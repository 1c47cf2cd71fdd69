"""Stores the events that providers report, and settles the emails whose acceptance these events prove.

Counts and logs what is stored, refused and left out. No content is logged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final
from uuid import UUID

from dispatcher.config import Settings
from dispatcher.domain.event import ProviderEvent
from dispatcher.domain.suppression import SuppressionReason, SuppressionRules
from dispatcher.domain.values import dataclass
from dispatcher.errors import StatementRefused, StoreBusy, StoreUnavailable
from dispatcher.events.contract import BOUNCE_PROVIDER, EventSink, ParsedEvents, Refusal, Skipped
from dispatcher.host.request_batcher import RequestBatcher
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.connections import Pool
from dispatcher.store.events import EventRow, SettledEmail, StoredEvents, settle_proven, store_events
from dispatcher.store.locked import LockedRows
from dispatcher.store.outbox import Outbox
from dispatcher.store.recipients import RECIPIENT_OCTETS, find_recipient_hashes
from dispatcher.telemetry import metrics
from dispatcher.telemetry.log import get_log

BATCH: Final = 500
"""The most events per statement; per batch, unless a single request has more; and the most emails per round of
`ProvenEmails`, during which the relay cannot publish."""
SETTLE_SECONDS: Final = 1.0
_STATEMENT_FAULTS: Final = "42"
"""The class of SQLSTATEs about a wrong statement, missing tables or missing privileges. An event cannot cause such an
error."""
_LOGGED: Final = (Skipped.MALFORMED, Skipped.UNKNOWN_KIND)
"""The reasons that are logged. The other reasons are normal, for example because another program sends through the same
account."""


@dataclass(frozen=True, slots=True)
class Stored:
    new: int = 0  # without impossible events
    duplicates: int = 0
    unknown: int = 0  # events whose email does not exist
    settled: int = 0  # emails whose status the events changed


class EmailsLocked(StoreBusy):
    """Events cannot be stored yet, because other transactions have locked their emails."""

    def __init__(self, email_ids: Collection[UUID]) -> None:
        super().__init__(f"Other transactions have locked the emails of some events ({len(email_ids)} emails).")
        self.email_ids = email_ids


class EventIntake:
    """Stores genuine events. A source verifies that an event comes from the provider before it calls `store`."""

    def __init__(self, pool: Pool, rules: SuppressionRules) -> None:
        self._pool = pool
        self._rules = rules
        self._hasher: AddressHasher | None = None
        self._locked = LockedRows(pool)

    async def store(self, events: Sequence[ProviderEvent]) -> Stored:
        """Stores events, and settles the emails whose acceptance these events prove. Idempotent.

        When this method returns, the events are committed. Only then may a source acknowledge them to the provider. An
        event that PostgreSQL refuses to store is logged and left out, because PostgreSQL would refuse it again.

        Raises EmailsLocked if other transactions have locked some of the emails: the events of all others are stored.
        Any other StoreUnavailable leaves unknown which events were stored: repeat the call, or let the provider do it.
        """
        if not events:
            return Stored()
        if self._hasher is None:
            self._hasher = await AddressHasher.open(self._pool)
        hasher = self._hasher
        new = duplicates = unknown = settled = 0
        locked: set[UUID] = set()
        rows = [EventRow.of(event, hasher) for event in events]
        for start in range(0, len(rows), BATCH):
            found, skipped = await self._store(rows[start : start + BATCH])
            locked |= skipped
            new += sum(each.new for each in found)
            duplicates += sum(each.duplicates for each in found)
            unknown += sum(each.unknown for each in found)
            settled += await self._settle(set(chain.from_iterable(each.settleable for each in found)))
        if locked:
            raise EmailsLocked(locked)
        return Stored(new, duplicates, unknown, settled)

    async def _store(self, rows: Sequence[EventRow]) -> tuple[list[StoredEvents], set[UUID]]:
        outcome = await self._locked.execute_unlocked(
            {row.email_id for row in rows},
            lambda free: self._execute([row for row in rows if row.email_id in free]),
        )
        if outcome.refused:
            metrics.EVENTS.add(len(outcome.refused), "unknown", "unknown", "refused", "unknown")
        found = outcome.rows()
        for each in found:
            labels = each.provider, each.metric_kind
            metrics.EVENTS.add(each.new, *labels, "new", each.mailbox)
            metrics.EVENTS.add(each.impossible, *labels, "impossible", each.mailbox)
            metrics.EVENTS.add(each.duplicates, *labels, "duplicate", each.mailbox)
            metrics.EVENTS.add(each.unknown, *labels, "unknown", each.mailbox)
            metrics.DELIVERY_SECONDS.observe_all(each.delivery_seconds, each.provider)
        return found, outcome.locked

    async def _execute(self, rows: Sequence[EventRow]) -> list[StoredEvents]:
        try:
            return await store_events(self._pool, await self._with_doubts(rows), self._rules)
        except StatementRefused as error:
            # The statement, a table or a privilege causes this error, and never an event. So leave out no event: with
            # StoreUnavailable, the source keeps all events for a later try.
            if (getattr(error.__cause__, "sqlstate", None) or "").startswith(_STATEMENT_FAULTS):
                raise StoreUnavailable(error.message) from error
            raise

    async def _with_doubts(self, rows: Sequence[EventRow]) -> list[EventRow]:
        """Marks events that must not suppress their recipient, because nothing proves the recipient."""
        assert self._hasher is not None
        emails = {row.email_id for row in rows if row.may_suppress}
        recipients = await find_recipient_hashes(self._pool, emails, self._hasher)

        def is_proven(row: EventRow) -> bool:
            # Each of several recipients can send a bounce to the bounce mailbox, and name another recipient in it.
            known = recipients.get(row.email_id, ())
            is_certain = row.provider != BOUNCE_PROVIDER or len(known) == 1
            return is_certain and (row.address_hash or b"")[:RECIPIENT_OCTETS] in known

        return [row._replace(doubt="recipient") if row.may_suppress and not is_proven(row) else row for row in rows]

    async def _settle(self, email_ids: Collection[UUID]) -> int:
        """Settles emails now, and returns how many. On failure, the leading relay settles them later."""
        with suppress(StoreUnavailable):
            outcome = await self._locked.execute_unlocked(email_ids, lambda free: settle_proven(self._pool, free))
            report_settled(settled := outcome.rows())
            return len(settled)
        return 0


def report_settled(settled: Iterable[SettledEmail]) -> None:
    for email in settled:
        metrics.SETTLED.add(1, email.proven_by, email.previous_status, email.status)
        get_log().info(
            "email.settled",
            email_id=str(email.email_id),
            correlation_id=email.correlation_id,
            provider=email.proven_by,
            previous_status=email.previous_status,
            status=email.status,
        )


class EventBatcher:
    """An `EventSink` that stores one batch at a time. The requests that arrive while a batch is being stored form the
    next batch. If another transaction has locked an email of a batch, only the requests about this email fail."""

    # Providers post hundreds of small requests per second. A transaction that stores ten events costs about as much as
    # a transaction that stores one event.

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._batcher = RequestBatcher(self._commit, size_of=len, most_size=BATCH)

    async def store(self, events: Sequence[ProviderEvent]) -> None:
        if events:
            (error,) = await self._batcher.submit([events])
            if error is not None:
                raise error

    async def _commit(self, requests: list[Sequence[ProviderEvent]]) -> list[None]:
        await self._sink.store([*chain.from_iterable(requests)])
        return [None] * len(requests)


class ProvenEmails:
    """Settles the emails that `EventIntake` could not settle. A service of the leading relay."""

    # `EventIntake` leaves an email to this service if a worker has leased the email, or if its process exits before the
    # email is settled.

    interval_seconds = SETTLE_SECONDS

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def run_once(self) -> None:
        report_settled(await self._outbox.settle_proven(BATCH))


def report_refusal(provider: str, refusal: Refusal) -> None:
    """Counts a request that is not genuine. Logs nothing, because the API logs the number of refusals once a minute."""
    metrics.EVENTS.add(1, provider, "unknown", "stale" if refusal is Refusal.STALE else "forged", "unknown")


def report_skipped(provider: str, parsed: ParsedEvents) -> None:
    """Counts the events that were left out. Logs the number of events that are malformed or of an unknown kind."""
    for why, count in parsed.skipped.items():
        metrics.EVENTS.add(count, provider, "unknown", why.value, "unknown")
    counts = {why.value: parsed.skipped[why] for why in _LOGGED if parsed.skipped[why]}
    if counts:
        get_log().warning("events.skipped", provider=provider, counts=counts)


def suppression_rules(settings: Settings) -> SuppressionRules:
    """Which events suppress a recipient, by the settings. `store_events` applies the rules."""
    return SuppressionRules(
        reasons=frozenset(SuppressionReason(name) for name in settings.suppress_on),
        days=settings.suppress_days,
        soft_bounces=settings.suppress_soft_bounces,
        soft_bounce_days=settings.suppress_soft_bounce_days,
    )
