"""Compares the DLQ with the database, and repairs the DLQ.

The database is the source of truth, so a repair changes no email. A missing dead letter becomes due again. Stale and
duplicate dead letters are removed. Dead letters whose email no longer exists are removed, too; the audit log keeps
the ids of those emails. Poison messages are only reported: an operator repairs or discards them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.domain.poison_id import poison_id
from dispatcher.monitor.dead_letters import MAX_PASSES, DlqEntry, classify, scan
from dispatcher.ops.acts import Act
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import audit, find_dead_lettered, republish_dead_letters


@dataclass(slots=True)
class Differences:
    """The differences between the DLQ and the database.

    Attributes:
        dead_letters: The number of emails with a current dead letter.
        missing: Failed and held emails without a dead letter.
        stale: Emails that were sent or replayed, failed again, or whose dead letter was discarded, per dead letter.
        duplicates: One entry for each current dead letter of an email after its first.
        orphans: Ids of emails that no longer exist, one entry per dead letter.
        fixed: Whether everything except the poison messages was repaired.
    """

    depth: int = 0
    dead_letters: int = 0
    missing: list[UUID] = field(default_factory=list)
    stale: list[UUID] = field(default_factory=list)
    duplicates: list[UUID] = field(default_factory=list)
    orphans: list[UUID] = field(default_factory=list)
    poison: list[str] = field(default_factory=list)
    fixed: bool = False

    @property
    def count(self) -> int:
        """The number of differences that can be repaired."""
        return len(self.missing) + len(self.stale) + len(self.duplicates) + len(self.orphans)

    def note(self, each: DlqEntry, seen: set[UUID]) -> bool:
        """Counts a message; returns whether it is a surplus dead letter: stale, duplicate or orphan.

        Adds the email of a current dead letter to `seen`.
        """
        if each.dead_letter is None or (each.is_poison and not each.is_orphan):
            self.poison.append(poison_id(each.found.body))
            return False
        email_id = each.dead_letter.email_id
        if each.is_orphan:
            self.orphans.append(email_id)
        elif each.is_stale:
            self.stale.append(email_id)
        elif email_id in seen:
            self.duplicates.append(email_id)
        else:
            seen.add(email_id)
            return False
        return True


async def reconcile(session: AsyncSession, dlq: DeadLetterQueue, act: Act | None = None) -> Differences:
    """Finds the differences between the DLQ and the database. With an act, also repairs and audits them. Idempotent."""
    # Read the rows before the queue. Every dead letter that these rows require was published before this read. So if
    # such a dead letter is not on the queue, it was lost. A dead letter that is published later is not reported as a
    # difference.
    announced = await find_dead_lettered(session)
    found = await _compare(session, dlq, announced)
    if act and found.count:
        await republish_dead_letters(session, {email_id: announced[email_id] for email_id in found.missing})
        # Write orphans (dead letters without an email) to the audit log before their removal: without the email's row,
        # a removed orphan cannot be published again.
        letters: dict[UUID | None, dict[str, int]] = {
            email_id: {"letters": count} for email_id, count in Counter(found.orphans).items()
        }
        await audit(session, "discard", letters, actor=act.actor, reason=act.reason)
        counts = {
            "missing": len(found.missing),
            "stale": len(found.stale),
            "duplicates": len(found.duplicates),
            "orphans": len(found.orphans),
        }
        await audit(session, "reconcile", {None: counts}, actor=act.actor, reason=act.reason)
        for _ in range(MAX_PASSES):
            if not await _remove(session, dlq, frozenset(found.orphans)):
                found.fixed = True
                break
    return found


async def _compare(session: AsyncSession, dlq: DeadLetterQueue, announced: Mapping[UUID, int]) -> Differences:
    found = Differences()
    seen: set[UUID] = set()
    async with scan(session, dlq) as opened:
        found.depth = opened.depth
        async for batch in opened.batches():
            for each in await classify(session, batch):
                found.note(each, seen)
    found.dead_letters = len(seen)
    found.missing = sorted(announced.keys() - seen)
    return found


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, orphans: Collection[UUID]) -> int:
    """Reads the DLQ once and removes surplus dead letters; returns how many it asked RabbitMQ to remove.

    Of the dead letters without an email, removes only those whose ids the audit log contains: `orphans`.
    """
    found = Differences()
    seen: set[UUID] = set()
    removed = 0
    async with scan(session, dlq) as opened:
        async for batch in opened.batches():
            for each in await classify(session, batch):
                is_on_record = each.dead_letter is not None and each.dead_letter.email_id in orphans
                if found.note(each, seen) and (is_on_record or not each.is_orphan):
                    opened.remove([each.found])
                    removed += 1
    return removed
