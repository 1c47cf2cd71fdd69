"""The DLQ against the database: what should be there and is not, and the other way round.

The database is the truth, so mending changes the queue and no email: a missing letter becomes due again, a stale or
double one is removed, and so is one whose email is gone, of which the record keeps the id. Other messages without an
email are told and left to a person.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.domain.poison_id import poison_id
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import MOST_LOOKS, Read, look, read
from dispatcher.store.connections import AsyncSession
from dispatcher.store.failures import announce_again, audit, audit_orphans, find_announced


@dataclass(slots=True)
class Differences:
    """What a look found.

    Attributes:
        depth: Messages on the DLQ.
        dead_letters: Of these, letters that tell of how their email stands.
        missing: Failed and held emails without a letter.
        stale: Letters of emails that were sent, replayed or discarded, or have failed again, one entry per letter.
        duplicates: Letters beyond an email's first, one entry per letter.
        orphans: Letters of emails that are gone, one entry per letter.
        poison: Other messages without an email, one entry per message.
        fixed: Whether all but the poison was mended.
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
        """Differences that can be mended."""
        return len(self.missing) + len(self.stale) + len(self.duplicates) + len(self.orphans)

    def note(self, each: Read, seen: set[UUID]) -> bool:
        """Counts a message, given the emails that had a letter before it; whether it is a letter too many."""
        if each.letter is None or (each.is_poison and not each.is_orphan):
            self.poison.append(poison_id(each.found.body))
            return False
        email_id = each.letter.email_id
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
    """Finds the differences, and mends them if it is somebody's act, on record; harmless to repeat.

    Raises as `letters.look` does.
    """
    # First the rows: a letter that was confirmed before is on the queue when we look, one that comes later is no
    # difference.
    announced = await find_announced(session)
    found = await _compare(session, dlq, announced)
    if act and found.count:
        await announce_again(session, {email_id: announced[email_id] for email_id in found.missing})
        # Before their letters go, of which nobody could make others.
        await audit_orphans(session, Counter(found.orphans), actor=act.actor, reason=act.reason)
        counts = {
            "missing": len(found.missing),
            "stale": len(found.stale),
            "duplicates": len(found.duplicates),
            "orphans": len(found.orphans),
        }
        await audit(session, "reconcile", actor=act.actor, reason=act.reason, detail=counts)
        for _ in range(MOST_LOOKS):
            if not await _remove(session, dlq, frozenset(found.orphans)):
                found.fixed = True
                break
    return found


async def _compare(session: AsyncSession, dlq: DeadLetterQueue, announced: Mapping[UUID, int]) -> Differences:
    found = Differences()
    seen: set[UUID] = set()
    async with look(session, dlq) as looking:
        found.depth = looking.depth
        async for batch in looking.batches():
            for each in await read(session, batch):
                found.note(each, seen)
    found.dead_letters = len(seen)
    found.missing = sorted(announced.keys() - seen)
    return found


async def _remove(session: AsyncSession, dlq: DeadLetterQueue, orphans: Collection[UUID]) -> int:
    """One look; takes off the DLQ what is too many, and returns how many it took off, or tried to.

    Args:
        orphans: The emails that are gone and on record; letters of others stay.
    """
    found = Differences()
    seen: set[UUID] = set()
    removed = 0
    async with look(session, dlq) as looking:
        async for batch in looking.batches():
            for each in await read(session, batch):
                is_on_record = each.letter is not None and each.letter.email_id in orphans
                if found.note(each, seen) and (is_on_record or not each.is_orphan):
                    looking.remove([each.found])
                    removed += 1
    return removed
