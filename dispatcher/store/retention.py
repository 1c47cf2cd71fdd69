"""Prunes old data: content first, then whole emails, and their message keys last.

To prune old emails, the pruner drops whole weekly partitions. This is fast for any number of emails, but content and
emails stay up to a week longer than configured. Before the pruner drops a partition, it checks each email in the
partition, which can take long.

Pending, waiting and in-flight emails are never pruned. Undecided emails are kept for DISPATCHER_RETAIN_UNDECIDED_DAYS:
an email is undecided if it is failed or held, and no operator has replayed, confirmed, released or discarded it. The
monitor warns a week before an undecided email is pruned. While an undecided email must be kept, its weekly partition is
not dropped. Instead, the pruner deletes the content of the other emails in the partition row by row.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from dispatcher.config import Settings
from dispatcher.domain.values import dataclass
from dispatcher.errors import DispatcherError, StoreBusy, StoreUnavailable
from dispatcher.store.connections import AsyncSession, disable_statement_timeout
from dispatcher.store.statements import Source, fetch, statement

LOCK_NAME: Final = "prune"
CODES_LOCK_NAME: Final = "forget one-time codes"
"""The named lock of the session that deletes one-time codes. It is a separate lock, so that the long check of a
partition does not delay this deletion."""
CONTENT_TABLES: Final = ("email_attachment", "email_content")
EMAIL_TABLES: Final = (*CONTENT_TABLES, "email_attempt", "email_event", "email_recipient", "email_log")
"""The order in which partitions are dropped. `email_log` is last, so that no other table contains rows of an email that
is no longer in `email_log`."""
BATCH: Final = 1000
WARN_DAYS: Final = 7
"""Operators are warned this many days before an undecided email is pruned."""
KINDS: Final = ("content", "erased_after_sending", "key", "replayed", "replay", "act", "outgoing_event", "stat")
"""What is pruned row by row."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How many days each kind of data is kept; 0 means for ever."""

    content_days: int
    emails_days: int
    keys_days: int
    audit_days: int = 0
    undecided_days: int = 0  # see the module's docstring
    events_days: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """The configured retention. Undecided emails are kept at least as long as the content of other emails."""
        undecided_days = settings.retain_undecided_days
        decided_days = settings.retain_content_days or settings.retain_emails_days
        return cls(
            settings.retain_content_days,
            settings.retain_emails_days,
            settings.retain_keys_days,
            settings.retain_audit_days,
            max(undecided_days, decided_days) if undecided_days else 0,
            settings.retain_events_days,
        )

    @property
    def expiring(self) -> dict[str, int]:
        """The parameters of `count_expiring`; empty if undecided emails are kept for ever."""
        days = self.undecided_days
        return {"undecided_days": days, "warn_days": min(WARN_DAYS, days)} if days else {}


@dataclass(frozen=True, slots=True)
class ExpiringEmails:
    """Undecided emails that will soon lose their content."""

    emails: int
    first_in_seconds: float | None  # until the oldest can lose its content; negative if overdue, None if there is none


@statement
async def count_expiring(source: Source, *, undecided_days: int, warn_days: int) -> ExpiringEmails: ...


@dataclass(frozen=True, slots=True)
class PrunedStep:
    """One completed pruning step."""

    what: str  # `partition`, or one of `KINDS`
    count: int
    name: str | None = None


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A part of pruning that failed; the next round repeats it."""

    what: str
    fault: DispatcherError


class Pruner:
    """Prunes old data in steps. Each step commits, so the caller may interrupt and repeat pruning at any time."""

    def __init__(self, session: AsyncSession, retention: Retention) -> None:
        """`session` is in autocommit mode, of the role that owns the tables. Use it for nothing else: `prune` disables
        its statement timeout."""
        self._session = session
        self._retention = retention

    def delete_one_time_codes(self) -> AsyncIterator[PrunedStep]:
        return self._delete_rows("delete_one_time_codes", "erased_after_sending")

    async def prune(self) -> AsyncIterator[PrunedStep | FailedStep]:
        """Prunes everything that is due, and yields each step. Raises StoreUnavailable if the session is lost.

        A part that fails does not stop the other parts, except parts that must wait for it (see `_is_postponed`).
        """
        await disable_statement_timeout(self._session)
        faults: dict[str, DispatcherError] = {}
        for what, steps in self._parts():
            if _is_postponed(what, faults):
                continue
            try:
                async for pruned in steps:
                    yield pruned
            except DispatcherError as fault:
                if self._session.closed:
                    raise
                faults[what] = fault
                yield FailedStep(what, fault)

    async def find_prunable_partitions(self) -> list[str]:
        """The names of the partitions that `prune` would drop now."""
        await disable_statement_timeout(self._session)
        names: dict[str, None] = {}
        for parent, days in self._due_tables():
            rows = await fetch(self._session, "list_prunable_partitions", self._limits(days) | {"parent": parent})
            names |= dict.fromkeys(row[0] for row in rows)
        return list(names)

    def _parts(self) -> list[tuple[str, AsyncIterator[PrunedStep]]]:
        kept = self._retention
        return [
            ("erased_after_sending", self.delete_one_time_codes()),
            *[(parent, self._drop(parent, days)) for parent, days in self._due_tables()],
            ("content", self._delete_rows("delete_content", "content", kept.content_days)),
            ("key", self._delete_rows("delete_keys", "key", kept.keys_days)),
            ("replayed", self._delete_rows("delete_replay_items", "replayed", kept.emails_days)),
            ("replay", self._delete_rows("delete_replays", "replay", kept.emails_days)),
            ("act", self._delete_rows("delete_audit_records", "act", kept.audit_days)),
            ("outgoing_event", self._delete_events(kept.events_days)),
            ("stat", self._delete_rows("delete_stats", "stat")),
        ]

    def _due_tables(self) -> list[tuple[str, int]]:
        due = [(parent, self._retention.content_days) for parent in CONTENT_TABLES]
        due += [(parent, self._retention.emails_days) for parent in EMAIL_TABLES]
        return [(parent, days) for parent, days in due if days]

    async def _drop(self, parent: str, days: int) -> AsyncIterator[PrunedStep]:
        while rows := await fetch(self._session, "prune_partition", self._limits(days) | {"parent": parent}):
            yield PrunedStep("partition", 1, rows[0][0])

    async def _delete_rows(self, name: str, what: str, days: int | None = None) -> AsyncIterator[PrunedStep]:
        """Executes a statement until it deletes no row. Does nothing if `days` is 0 (keep for ever)."""
        limits = {} if days is None else self._limits(days)
        while days != 0 and (rows := await fetch(self._session, name, {**limits, "limit": BATCH})):
            yield PrunedStep(what, len(rows))

    async def _delete_events(self, days: int) -> AsyncIterator[PrunedStep]:
        """Deletes old events of the feed. Turns the feed off if no application has read it for `days`."""
        async for step in self._delete_rows("delete_outgoing_events", "outgoing_event", days):
            yield step
        if days:
            await fetch(self._session, "stop_unwanted_feed", {"days": days})

    def _limits(self, days: int) -> dict[str, int]:
        return {"days": days, "undecided_days": self._retention.undecided_days}


def _is_postponed(what: str, faults: dict[str, DispatcherError]) -> bool:
    """Whether to postpone a part to the next round, because an earlier part failed.

    `email_log` must wait for the other tables (see `EMAIL_TABLES`). If a table is locked, all later tables are
    postponed: while the pruner waits for a table's lock, all other sessions that need this table must wait, too.
    Content is not deleted row by row if the next round can probably drop its partition.
    """
    tables = faults.keys() & set(EMAIL_TABLES)
    if what == "content":
        return any(isinstance(faults[table], StoreUnavailable) for table in tables)
    if what == "email_log":
        return bool(tables)
    return what in tables or (what in EMAIL_TABLES and any(isinstance(faults[table], StoreBusy) for table in tables))
