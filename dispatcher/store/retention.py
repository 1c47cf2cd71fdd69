"""What is forgotten, and when: content first, then whole emails, and their keys last.

Old emails leave with their weekly partition, whose dropping costs nothing however many they are; so content and emails
stay up to a week longer than their days. Before, each email of the week is looked at, which takes as long as it takes.

Three kinds of emails keep their content, their row and their weekly partition: pending, in flight, and undecided ones.
An undecided email is failed or held, and no operator has replayed, confirmed, released or discarded it. It is kept for
DISPATCHER_RETAIN_UNDECIDED_DAYS; the monitor warns a week before that. The other emails of such a week lose their
content row by row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from dispatcher.config import Settings
from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.store.connections import AsyncSession, unhurry
from dispatcher.store.statements import fetch

TURN: Final = "prune"
"""The name under which one session at a time prunes (see `turns`)."""
CODES_TURN: Final = "forget one-time codes"
"""The same for these alone: a week that is being looked through must not keep them."""
CONTENT_TABLES: Final = ("email_attachment", "email_content")
EMAIL_TABLES: Final = (*CONTENT_TABLES, "email_attempt", "email_log")
"""The log last: what it has no row of any more has nothing left anywhere."""
BATCH: Final = 1000
WARN_DAYS: Final = 7
"""How long before an undecided email's limit operators are warned."""
KINDS: Final = ("content", "erased_after_sending", "key", "replayed", "replay", "act")
"""What is forgotten by rows: emails' content, keys, what replays noted of their emails, replays, operators' acts."""


@dataclass(frozen=True, slots=True)
class Retention:
    """For how many days what is kept; 0 is for ever.

    Attributes:
        undecided_days: Content and row of a failed or held email that no operator has decided.
    """

    content_days: int
    emails_days: int
    keys_days: int
    audit_days: int = 0
    undecided_days: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """The retention settings. An undecided email is never kept for less time than a decided one."""
        undecided_days = settings.retain_undecided_days
        decided_days = settings.retain_content_days or settings.retain_emails_days
        return cls(
            settings.retain_content_days,
            settings.retain_emails_days,
            settings.retain_keys_days,
            settings.retain_audit_days,
            max(undecided_days, decided_days) if undecided_days else 0,
        )


@dataclass(frozen=True, slots=True)
class Expiring:
    """Undecided emails that are about to lose their content.

    Attributes:
        first_in_seconds: How soon the oldest may lose it; None if there is none, negative if its limit has passed.
    """

    emails: int
    first_in_seconds: float | None


async def count_expiring(session: AsyncSession, retention: Retention) -> Expiring | None:
    """Undecided emails that reach their limit within WARN_DAYS; None where they are kept for ever."""
    days = retention.undecided_days
    if not days:
        return None
    parameters = {"undecided_days": days, "warn_days": min(WARN_DAYS, days)}
    return (await fetch(session, "count_expiring", parameters, into=Expiring))[0]


@dataclass(frozen=True, slots=True)
class Pruned:
    """One step of pruning that was done.

    Attributes:
        what: `partition`, or one of `KINDS`.
        count: How many.
        name: The partition's.
    """

    what: str
    count: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A part of pruning that did not come to its end; the next round begins it again.

    Attributes:
        what: The table whose partitions were to go, or one of `KINDS`.
        fault: Why.
    """

    what: str
    fault: DispatcherError


class Pruning:
    """Forgets what is old, in steps that each commit: it may be ended at any time, and begun again."""

    def __init__(self, session: AsyncSession, retention: Retention) -> None:
        """
        Args:
            session: In autocommit, of a user that owns the tables; for this alone, as `prune` lets it wait (`unhurry`).
        """
        self._session = session
        self._retention = retention

    def forget_one_time_codes(self) -> AsyncIterator[Pruned]:
        """Deletes the content of sent emails that have `erase_after_sending`."""
        return self._forget("forget_one_time_codes", "erased_after_sending")

    async def prune(self) -> AsyncIterator[Pruned | Failed]:
        """Does everything that is due, step by step. A part that fails keeps no other from being done.

        Raises:
            StoreUnavailable: the session is lost.
        """
        await unhurry(self._session)
        faults: dict[str, DispatcherError] = {}
        for what, steps in self._parts():
            if _has_to_wait(what, faults):
                continue
            try:
                async for pruned in steps:
                    yield pruned
            except DispatcherError as fault:
                if self._session.closed:
                    raise
                faults[what] = fault
                yield Failed(what, fault)

    async def find_prunable_partitions(self) -> list[str]:
        """What `prune` would drop now."""
        await unhurry(self._session)
        names: dict[str, None] = {}
        for parent, days in self._due_tables():
            rows = await fetch(self._session, "list_prunable_partitions", self._limits(days) | {"parent": parent})
            names |= dict.fromkeys(row[0] for row in rows)
        return list(names)

    def _parts(self) -> list[tuple[str, AsyncIterator[Pruned]]]:
        kept = self._retention
        return [
            ("erased_after_sending", self.forget_one_time_codes()),
            *[(parent, self._drop(parent, days)) for parent, days in self._due_tables()],
            ("content", self._forget("forget_content", "content", kept.content_days)),
            ("key", self._forget("forget_keys", "key", kept.keys_days)),
            ("replayed", self._forget("forget_replayed", "replayed", kept.emails_days)),
            ("replay", self._forget("forget_replays", "replay", kept.emails_days)),
            ("act", self._forget("forget_acts", "act", kept.audit_days)),
        ]

    def _due_tables(self) -> list[tuple[str, int]]:
        due = [(parent, self._retention.content_days) for parent in CONTENT_TABLES]
        due += [(parent, self._retention.emails_days) for parent in EMAIL_TABLES]
        return [(parent, days) for parent, days in due if days]

    async def _drop(self, parent: str, days: int) -> AsyncIterator[Pruned]:
        while rows := await fetch(self._session, "prune_partition", self._limits(days) | {"parent": parent}):
            yield Pruned("partition", 1, rows[0][0])

    async def _forget(self, name: str, what: str, days: int | None = None) -> AsyncIterator[Pruned]:
        """Executes a statement until it deletes nothing; never if what it deletes is kept for ever."""
        limits = {} if days is None else self._limits(days)
        while days != 0 and (rows := await fetch(self._session, name, {**limits, "limit": BATCH})):
            yield Pruned(what, len(rows))

    def _limits(self, days: int) -> dict[str, int]:
        return {"days": days, "undecided_days": self._retention.undecided_days}


def _has_to_wait(what: str, faults: dict[str, DispatcherError]) -> bool:
    """Whether a part is left to the next round, because of what failed before it.

    A week that is to go as a whole, by a later round or by the tables' owner, is not emptied row by row meanwhile. And
    where somebody holds the tables, one request for their lock is enough: everybody waits behind it.
    """
    tables = faults.keys() & set(EMAIL_TABLES)
    if what == "content":
        return any(isinstance(faults[table], StoreUnavailable) for table in tables)
    if what == "email_log":
        return bool(tables)
    return what in tables or (what in EMAIL_TABLES and any(isinstance(faults[table], StoreBusy) for table in tables))
