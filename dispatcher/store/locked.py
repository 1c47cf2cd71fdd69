"""Executes batched statements, and leaves out emails that are locked, or for which PostgreSQL refuses the statement.

A batched statement waits for the lock of each of its rows. So one row that stays locked (for example by a `psql`
session that was left in a transaction) would delay the whole batch. After a statement has run into the lock timeout,
one query finds its locked emails. The process remembers these emails, and checks them before a batch includes them
again. While no row is locked, no such query is made. If PostgreSQL refuses a statement, `store.bisection` finds the
emails that cause the error.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Final, Generic, TypeVar
from uuid import UUID

from dispatcher.domain.values import dataclass, field
from dispatcher.domain.waiting import describe_holder
from dispatcher.errors import StatementRefused, StoreBusy
from dispatcher.store.bisection import bisect_batch, report_refused
from dispatcher.store.connections import BATCH_LOCK_SECONDS
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch
from dispatcher.telemetry.log import get_log

REMEMBERED_SECONDS: Final = 60.0
"""How long an email is remembered after it was last found locked or refused. If a batch includes a locked email sooner,
its row is checked again. If PostgreSQL refuses an email again sooner, this is not logged again."""
RETRY_REFUSED_SECONDS: Final = 10.0
"""How long the relay waits before it retries an email for which PostgreSQL refused a statement."""
MAX_NAMED: Final = 5
"""The most email ids in one log line, because a transaction may lock thousands of rows."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
_NUMBER: Final = attrgetter("int")


@dataclass(frozen=True, slots=True)
class BatchOutcome(Generic[T_co]):
    """The result of a batched statement."""

    answers: Sequence[T_co]  # several if the batch was split, none if every email was left out
    locked: set[UUID] = field(default_factory=set)  # left out, because another transaction has locked their rows
    refused: Mapping[UUID, StatementRefused] = field(default_factory=dict)

    @property
    def skipped(self) -> set[UUID]:
        """The emails that were left out."""
        return self.locked | self.refused.keys()

    def rows(self: BatchOutcome[Collection[R]]) -> list[R]:
        return [*chain.from_iterable(self.answers)]


class LockedRows:
    """Executes batched statements, and remembers the locked and the refused emails that this process has found."""

    def __init__(self, source: Source, *, retry_seconds: float = 0.0) -> None:
        """`retry_seconds`: how long `execute_unlocked` leaves out an email after PostgreSQL refused a statement for it.
        Set this in a loop that would otherwise retry the email in each iteration."""
        self._source = source
        self._retry_seconds = retry_seconds
        self._seen_at: dict[UUID, float] = {}
        self._refused: dict[UUID, tuple[float, StatementRefused]] = {}
        self._log = get_log()

    def __contains__(self, email_id: UUID) -> bool:
        return email_id in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)

    async def execute_unlocked(
        self, email_ids: Iterable[UUID], execute: Callable[[set[UUID]], Awaitable[T]]
    ) -> BatchOutcome[T]:
        """Executes a batched statement for these emails, except those that are locked or refused.

        `execute` executes the statement for some of the emails, and can be called several times. Raises StoreBusy, and
        has committed nothing, if the statement waited too long for a lock, but none of these rows is locked.
        """
        asked = set(email_ids)
        is_busy = False
        if asked and not (self._seen_at or self._refused):  # nearly always
            try:
                return BatchOutcome([await execute(asked)])
            except StatementRefused:
                pass
            except StoreBusy:
                is_busy = True
        locked = await self.find_locked(asked, is_busy=is_busy)

        async def execute_free(part: Sequence[UUID]) -> list[T]:
            free = set(part)
            try:
                return [await execute(free)]
            except StoreBusy:
                if is_busy and not locked:
                    raise
                locked.update(found := await self.find_locked(free, is_busy=True))
                return [await execute(free - found)] if free > found else []

        refused = self._still_refused(asked)
        if not (free := asked - locked - refused.keys()):
            return BatchOutcome([], locked, refused)
        answers, culprits = await bisect_batch(sorted(free, key=_NUMBER), execute_free)
        for email_id, error in culprits:
            if email_id not in self._refused:
                report_refused(email_id, error.message)
            self._refused[email_id] = time.monotonic(), error
        return BatchOutcome([*chain.from_iterable(answers)], locked, refused | dict(culprits))

    def _still_refused(self, email_ids: set[UUID]) -> dict[UUID, StatementRefused]:
        """The errors of the emails for which PostgreSQL refused a statement less than `retry_seconds` ago."""
        now = time.monotonic()
        self._refused = {i: (at, error) for i, (at, error) in self._refused.items() if at > now - REMEMBERED_SECONDS}
        after = now - self._retry_seconds
        return {i: error for i, (at, error) in self._refused.items() if i in email_ids and at > after}

    async def find_locked(self, email_ids: Collection[UUID], *, is_busy: bool = False) -> set[UUID]:
        """The given emails that are locked now. Checks only emails that were found locked before, unless a statement
        for the given emails ran into the lock timeout (`is_busy`)."""
        if not (self._seen_at or is_busy):
            return set()
        before = time.monotonic() - REMEMBERED_SECONDS
        self._seen_at = {email_id: seen_at for email_id, seen_at in self._seen_at.items() if seen_at >= before}
        asked = set(email_ids) if is_busy else self._seen_at.keys() & set(email_ids)
        if not asked:
            return set()
        locked = {row[0] for row in await fetch(self._source, "find_locked", ids_within(asked))}
        new = locked - self._seen_at.keys()
        for email_id in asked - locked:
            self._seen_at.pop(email_id, None)
        self._seen_at |= dict.fromkeys(locked, time.monotonic())
        if new:
            await self._log_locked(new)
        return locked

    async def _log_locked(self, email_ids: set[UUID]) -> None:
        rows = await fetch(self._source, "find_holders", {"age_seconds": BATCH_LOCK_SECONDS})
        fields = {
            "count": len(email_ids),
            "email_ids": [str(email_id) for email_id in sorted(email_ids)[:MAX_NAMED]],
            "lock_holders": [describe_holder(*row) for row in rows],
        }
        # All these sessions wait for a standby to confirm a commit, and keep the rows locked until then. Log a
        # different event, because an operator should not end these sessions.
        if rows and all(is_committing for *_, is_committing in rows):
            self._log.warning("store.commits_waiting", **fields)
        else:
            self._log.warning("email.locked", **fields)


def subset(mapping: Mapping[UUID, T], email_ids: Collection[UUID]) -> Mapping[UUID, T]:
    """The entries of a mapping for these emails."""
    return mapping if len(email_ids) == len(mapping) else {email_id: mapping[email_id] for email_id in email_ids}
