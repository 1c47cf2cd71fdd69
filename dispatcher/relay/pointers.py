"""Publishes the messages of due emails, and later clears the due marks that no lease has cleared.

    due ─scan─▶ unconfirmed ─▶ confirmed ─▶ a lease has cleared the due mark: forgotten
                    │                  └─▶ no lease has cleared it for a while: the relay clears it, a batch per round
                    └ not confirmed: still due

A worker that leases an email must write the email's row anyway, and clears the due mark in the same write. While
workers keep up, this happens milliseconds after the confirm. If the relay cleared the marks first, each row would be
written twice, and the worker would wait for row locks. So the relay remembers each confirmed email with its due time,
and skips the email while the due time is unchanged. If the email becomes due again, it has a different due time.

The relay scans the due rows in one of two ways. In each scan, `Shares` chooses which of the found emails are published:

- In order: while all due rows fit into one page, each round reads all of them, longest due first. If a transaction that
  is open for long makes this slow, most rounds leave out rows that were due before the last complete scan: that scan
  has read them. A row is committed later than it is due. So a round still reads the LATE_SECONDS before that scan, and
  a complete scan follows at most COMPLETE_SECONDS later, for rows of longer transactions.
- By tenant: during a backlog, the relay finds the tenants that have due emails. Each batch reads from each tenant only
  as many rows as the tenant has turns. The next batch continues at the due time at which the tenant's last batch ended.
  From time to time, the relay reads all rows before these due times again. So it finds rows that were committed late,
  with an earlier due time, and forgets emails that are no longer due. After such a read, the relay waits 50 times as
  long as the read took (1 / CHECK_SHARE), but at most MARK_AFTER_SECONDS, before the next.

The list of remembered emails outlives the database session, but not the process. If a relay exits before it has cleared
all marks, the next relay publishes the remembered emails again, although their messages are still on the queues and in
prefetch windows. A second message is harmless: a worker cannot lease the email again, and acks the message.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.broker.confirmed import ConfirmedMessages
from dispatcher.errors import BrokerUnavailable
from dispatcher.relay.shares import Shares
from dispatcher.store.instants import EARLIEST, LATEST
from dispatcher.store.outbox import DuePointer, DueRange, Outbox, Tenant

BATCH: Final = 500
"""The most emails per round, and the most due marks per statement. While the relay remembers more emails than this, it
scans by tenant."""
MARK_AFTER_SECONDS: Final = 5.0
"""How long the relay waits before it clears a due mark itself. Workers that keep up lease the email sooner, and the
lease also clears the mark. The wait is far below the 60 seconds after which an alert reports unpublished emails."""
CONFIRM_SECONDS: Final = 0.05
"""The longest wait for confirms, while many messages are unconfirmed. The wait is short, because a queue for which
RabbitMQ confirms no message must not delay the other lanes."""
COMPLETE_SHARE: Final = 1 / 10
"""Without a backlog, the relay spends about this share of its time on complete scans. A complete scan usually takes
less than a millisecond, and then nearly every scan is complete."""
COMPLETE_SECONDS: Final = 0.9
"""The longest time between two complete scans, so that an email of a long transaction waits at most a second longer."""
LATE_SECONDS: Final = 1.0
"""How much later than it is due a row may be committed so that every scan finds it."""
LIST_SHARE: Final = 1 / 50
"""During a backlog, the relay spends at most this share of its time on finding the tenants that have due emails."""
CHECK_SHARE: Final = 1 / 50
"""During a backlog, the relay spends at most this share of its time on reading published emails again."""


class PointerPublisher:
    """Publishes due emails, and remembers each until its due mark is cleared. Not for several tasks at once. While
    `has_backlog`, the next scan is by tenant, so a batch that is not full may leave due emails."""

    def __init__(
        self,
        shares: Shares,
        *,
        mark_after_seconds: float = MARK_AFTER_SECONDS,
        check_share: float = CHECK_SHARE,
        complete_share: float = COMPLETE_SHARE,
    ) -> None:
        """`mark_after_seconds` after the confirm, the relay clears a due mark that no lease has cleared. It spends at
        most `check_share` of its time on reading published emails again. `complete_share`: see COMPLETE_SHARE."""
        self._shares = shares
        self._mark_after_seconds = mark_after_seconds
        self._check_share = check_share
        self._complete_share = complete_share
        self._unconfirmed: dict[UUID, datetime] = {}
        self._confirmed = ConfirmedMessages()
        self._published_until: dict[Tenant, datetime] = {}  # by tenant: the latest due time of its published emails
        self._checked_at = 0.0
        self._calls: set[asyncio.Task[None]] = set()
        # When the last complete scan began, when the next is due, and the first due time that later scans have found.
        self._completed_at = self._complete_due_at = 0.0
        self._read_since = LATEST
        # The following fields are the state of `_scan_by_tenant`.
        self.has_backlog = False
        # Tenants that had due rows when the tenants were last listed, and whose rows were not all read since.
        self._waiting: dict[Tenant, None] = {}
        # By tenant: the due time at which the next read begins, and how many rows with this due time were read.
        self._resume_from: dict[Tenant, tuple[datetime, int]] = {}
        self._list_due_at = 0.0
        self._check_due_at = 0.0
        self._wait_seconds = math.inf

    @property
    def has_unconfirmed(self) -> bool:
        return bool(self._unconfirmed)

    @property
    def wait_seconds(self) -> float:
        return self._wait_seconds

    async def publish_due(self, outbox: Outbox, *, is_last: bool = False) -> int:
        """Starts to publish a batch of due emails. Returns the number of emails in the batch.

        If `is_last`, scans the due rows from the beginning: 0 then means that no email may be published now. Raises
        BrokerUnavailable if an earlier batch could not be published; all unconfirmed emails are still due.
        """
        await self._wait_for_confirms()
        if is_last:
            self._list_due_at = self._check_due_at = self._complete_due_at = 0.0
        self._wait_seconds = math.inf
        new = [] if self.has_backlog else await self._scan_in_order(outbox)
        if self.has_backlog:
            new = await self._scan_by_tenant(outbox)
        self._start_publishing(new)
        # Usually, a lease clears the due mark. Clear the mark here only if RabbitMQ confirmed the message at least
        # `mark_after_seconds` before the last check, and this check found the email still due. Clear at most one batch
        # of marks, so that scans and leases wait only briefly.
        if due := self._confirmed.to_mark(self._checked_at - self._mark_after_seconds, BATCH):
            await self._mark(outbox, due)
        return len(new)

    async def wait_confirmed(self) -> None:
        """Waits until RabbitMQ has confirmed or refused every message. Raises BrokerUnavailable."""
        if self._calls:
            await asyncio.wait(self._calls)
        self._note_ended()

    async def mark_all(self, outbox: Outbox) -> None:
        """Clears the due marks of all confirmed emails, in batches. If cancelled, keeps what is cleared so far."""
        left = list(self._confirmed.to_mark(math.inf, len(self._confirmed)).items())
        for start in range(0, len(left), BATCH):
            await self._mark(outbox, dict(left[start : start + BATCH]))

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    async def _scan_in_order(self, outbox: Outbox) -> list[DuePointer]:
        """Reads the due rows. If they do not fit into one page, returns none: the scans by tenant begin."""
        began_at = time.monotonic()
        most = BATCH + len(self._unconfirmed) + len(self._confirmed)
        is_complete = began_at >= self._complete_due_at
        rows = await outbox.find_publish_due(
            most, None if is_complete else began_at - self._completed_at + LATE_SECONDS
        )
        if len(rows) == most or len(self._confirmed) > BATCH:
            self.has_backlog = True
            self._list_due_at = self._check_due_at = 0.0
            return []
        if is_complete:
            self._checked_at = self._completed_at = began_at
            ended_at = time.monotonic()
            self._complete_due_at = ended_at + min((ended_at - began_at) / self._complete_share, COMPLETE_SECONDS)
            self._published_until, self._read_since, since = {}, LATEST, EARLIEST
        else:  # all scans after a complete scan begin at the same due time, which is not later than that of their rows
            since = self._read_since = min(self._read_since, rows[0].due_at if rows else LATEST)
        self._confirmed.retain({row.email_id: row.due_at for row in rows}, since=since)
        self._published_until |= {row.tenant: row.due_at for row in rows if self._is_known(row)}
        found: dict[Tenant, list[DuePointer]] = {}
        for row in rows:
            if not self._is_known(row):
                found.setdefault(row.tenant, []).append(row)
        order = self._shares.allot({tenant: len(new) for tenant, new in found.items()}, BATCH)
        self._wait_seconds = self._shares.wait_seconds
        if len(order) == BATCH or self._wait_seconds < math.inf:
            self._complete_due_at = 0.0  # the next scan must find the rows that are left, however long they are due
        return _in_turn(order, found)

    async def _scan_by_tenant(self, outbox: Outbox) -> list[DuePointer]:
        """Reads from each tenant only as many due rows as the tenant has turns."""
        is_listed = time.monotonic() >= self._list_due_at
        if is_listed:
            await self._list_tenants(outbox)
        while self._waiting:
            order = self._shares.allot(dict.fromkeys(self._waiting, BATCH), BATCH)
            self._wait_seconds = self._shares.wait_seconds
            if not order:  # no waiting tenant may publish now
                return []
            if new := await self._read(outbox, order):
                return new
        if not is_listed:
            self._wait_seconds = max(0.0, self._list_due_at - time.monotonic())
        elif len(self._confirmed) <= BATCH and not self._shares.paused_lanes:
            self.has_backlog = False
            self._resume_from.clear()
        return []

    async def _list_tenants(self, outbox: Outbox) -> None:
        began_at = time.monotonic()
        tenants = await outbox.find_due_tenants(self._shares.paused_lanes)
        listed_at = time.monotonic()
        self._waiting = dict.fromkeys(tenants)
        self._resume_from = {
            tenant: at
            for tenant, at in self._resume_from.items()
            if tenant in self._waiting or tenant in self._published_until
        }
        self._list_due_at = listed_at + min((listed_at - began_at) / LIST_SHARE, self._mark_after_seconds)
        if listed_at >= self._check_due_at:
            await self._check_published(outbox)

    async def _check_published(self, outbox: Outbox) -> None:
        """Reads again up to each tenant's last published email: forgets emails that are no longer due. If a row is new,
        because it was committed late, the tenant's next read begins at this row."""
        self._checked_at = time.monotonic()
        most = BATCH + len(self._unconfirmed) + len(self._confirmed)
        ranges = [DueRange(tenant, EARLIEST, until, most) for tenant, until in self._published_until.items()]
        found = await self._find(outbox, ranges) if ranges else {}
        cut_at = [rows[-1].due_at for rows in found.values() if len(rows) == most]
        due = {row.email_id: row.due_at for rows in found.values() for row in rows}
        self._confirmed.retain(due, until=min(cut_at, default=LATEST))
        for tenant, rows in found.items():
            if late := next((row for row in rows if not self._is_known(row)), None):
                self._resume_from[tenant] = late.due_at, sum(row.due_at == late.due_at for row in rows)
        self._published_until = {tenant: until for tenant, until in self._published_until.items() if tenant in found}
        now = time.monotonic()
        self._check_due_at = now + min((now - self._checked_at) / self._check_share, self._mark_after_seconds)

    async def _read(self, outbox: Outbox, order: list[Tenant]) -> list[DuePointer]:
        """Reads from each tenant as many due rows as it has turns in `order`. Gives back the turns that are left."""
        turns = Counter(order)
        ranges = []
        for tenant, emails in turns.items():
            since, known = self._resume_from.get(tenant, (EARLIEST, 0))
            ranges.append(DueRange(tenant, since, LATEST, emails + known))
        read = await self._find(outbox, ranges)
        found: dict[Tenant, list[DuePointer]] = {}
        for each in ranges:
            rows, wanted = read.get(each.tenant, []), turns[each.tenant]
            new = [row for row in rows if not self._is_known(row)][:wanted]
            if rows:
                last = new[-1] if len(new) == wanted else rows[-1]
                self._resume_from[each.tenant] = last.due_at, sum(row.due_at == last.due_at for row in rows)
            if len(rows) < each.most:
                del self._waiting[each.tenant]
            if len(new) < wanted:
                self._shares.give_back(each.tenant, wanted - len(new))
            found[each.tenant] = new
        return _in_turn(order, found)

    async def _find(self, outbox: Outbox, ranges: Sequence[DueRange]) -> dict[Tenant, list[DuePointer]]:
        found: dict[Tenant, list[DuePointer]] = {}
        for row in await outbox.find_due_of_tenants(ranges):
            found.setdefault(row.tenant, []).append(row)
        return found

    def _is_known(self, row: DuePointer) -> bool:
        return self._unconfirmed.get(row.email_id) == row.due_at or self._confirmed.contains(row.email_id, row.due_at)

    def _start_publishing(self, rows: list[DuePointer]) -> None:
        by_lane: dict[str, list[DuePointer]] = {}
        # By tenant: the due time of its last row, which is the latest: the rows are in the order of their due times.
        latest: dict[Tenant, datetime] = {}
        for row in rows:
            by_lane.setdefault(row.lane, []).append(row)
            self._unconfirmed[row.email_id] = latest[row.tenant] = row.due_at
        for tenant, due_at in latest.items():
            self._published_until[tenant] = max(due_at, self._published_until.get(tenant, due_at))
        for batch in by_lane.values():
            self._calls.add(asyncio.create_task(self._publish_batch(batch)))

    async def _publish_batch(self, rows: list[DuePointer]) -> None:
        confirmed: Sequence[bool] = [False] * len(rows)
        try:
            confirmed = await self._shares.queue_of(rows[0].lane).publish(rows)
        finally:
            for row in rows:
                # Forget the row, unless the email became due again and is being published a second time.
                due_at = self._unconfirmed.pop(row.email_id, None)
                if due_at is not None and due_at != row.due_at:
                    self._unconfirmed[row.email_id] = due_at
            due = {row.email_id: row.due_at for row, is_confirmed in zip(rows, confirmed, strict=True) if is_confirmed}
            self._confirmed.add(due, time.monotonic())
            if not all(confirmed):
                # Unconfirmed emails are still due. The scan has already passed their due times, so begin again.
                self._list_due_at = self._check_due_at = self._complete_due_at = 0.0

    async def _wait_for_confirms(self) -> None:
        """If more than BATCH emails are unconfirmed, waits for RabbitMQ's answers, but only for CONFIRM_SECONDS."""
        self._note_ended()
        until = time.monotonic() + CONFIRM_SECONDS
        while len(self._unconfirmed) > BATCH and (seconds := until - time.monotonic()) > 0:
            await asyncio.wait(self._calls, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._note_ended()

    def _note_ended(self) -> None:
        ended = [call for call in self._calls if call.done()]
        self._calls.difference_update(ended)
        faults = [fault for call in ended if (fault := call.exception())]
        for fault in faults:
            if not isinstance(fault, BrokerUnavailable):
                raise fault
        if faults:
            raise faults[0]

    async def _mark(self, outbox: Outbox, due: Mapping[UUID, datetime]) -> None:
        locked = await outbox.mark_published(due)
        self._confirmed.discard(due, time.monotonic(), locked=locked)


def _in_turn(order: list[Tenant], found: Mapping[Tenant, Sequence[DuePointer]]) -> list[DuePointer]:
    """The found emails, in the order of their tenants' turns."""
    if len(found) == 1:
        (alone,) = found.values()
        return list(alone[: len(order)])
    rows = {tenant: iter(new) for tenant, new in found.items()}
    return [row for tenant in order if (row := next(rows[tenant], None)) is not None]
