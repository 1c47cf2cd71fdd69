"""What is forgotten, and when: content first, then whole emails, and their keys last.

Old emails leave with their weekly partition, which costs nothing however many they are; so content and emails stay up
to a week longer than their days. Nothing that is pending or being sent is ever forgotten, nor anything of its week
dropped: finished emails of such a week lose their content by rows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.config import Settings
from dispatcher.store.connections import AsyncSession, translated
from dispatcher.store.queries import query

TURN: Final = "prune"
"""The name under which one session at a time prunes (see `turns`)."""
CONTENT_TABLES: Final = ("email_attachment", "email_content")
EMAIL_TABLES: Final = (*CONTENT_TABLES, "email_attempt", "email_log")
"""The log last: what it has no row of any more has nothing left anywhere."""
BATCH: Final = 1000
KINDS: Final = ("content", "one_time_code", "key", "replayed", "replay", "act")
"""What is forgotten by rows: emails' content, keys, what replays noted of their emails, replays, operators' acts."""


@dataclass(frozen=True, slots=True)
class Retention:
    """For how many days what is kept; 0 is for ever."""

    content_days: int
    emails_days: int
    keys_days: int
    audit_days: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Retention:
        """What an operator has set."""
        return cls(
            settings.retain_content_days,
            settings.retain_emails_days,
            settings.retain_keys_days,
            settings.retain_audit_days,
        )


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


class Pruning:
    """Forgets what is old, in steps that each commit: it may be ended at any time, and begun again."""

    def __init__(self, session: AsyncSession, retention: Retention) -> None:
        """
        Args:
            session: In autocommit, of a user that owns the tables.
        """
        self._session = session
        self._retention = retention

    async def forget_one_time_codes(self) -> AsyncIterator[Pruned]:
        """Deletes the content of one-time codes that are sent."""
        async for count in self._repeat("forget_one_time_codes"):
            yield Pruned("one_time_code", count)

    async def prune(self) -> AsyncIterator[Pruned]:
        """Does everything that is due, step by step."""
        async for pruned in self.forget_one_time_codes():
            yield pruned
        for parent, days in self._due_tables():
            while rows := await self._fetch("prune_partition", {"parent": parent, "days": days}):
                yield Pruned("partition", 1, rows[0][0])
        kept = self._retention
        for steps in (
            self._forget("forget_content", "content", kept.content_days),
            self._forget("forget_keys", "key", kept.keys_days),
            self._forget("forget_replayed", "replayed", kept.emails_days),
            self._forget("forget_replays", "replay", kept.emails_days),
            self._forget("forget_acts", "act", kept.audit_days),
        ):
            async for pruned in steps:
                yield pruned

    async def find_prunable_partitions(self) -> list[str]:
        """What `prune` would drop now."""
        names: dict[str, None] = {}
        for parent, days in self._due_tables():
            rows = await self._fetch("list_prunable_partitions", {"parent": parent, "days": days})
            names |= dict.fromkeys(row[0] for row in rows)
        return list(names)

    def _due_tables(self) -> list[tuple[str, int]]:
        due = [(parent, self._retention.content_days) for parent in CONTENT_TABLES]
        due += [(parent, self._retention.emails_days) for parent in EMAIL_TABLES]
        return [(parent, days) for parent, days in due if days]

    async def _forget(self, name: str, what: str, days: int) -> AsyncIterator[Pruned]:
        if days:
            async for count in self._repeat(name, days=days):
                yield Pruned(what, count)

    async def _repeat(self, name: str, **parameters: Any) -> AsyncIterator[int]:
        while rows := await self._fetch(name, {**parameters, "limit": BATCH}):
            yield len(rows)

    async def _fetch(self, name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        with translated():
            cursor = await self._session.execute(query(name), parameters)
            return await cursor.fetchall()
