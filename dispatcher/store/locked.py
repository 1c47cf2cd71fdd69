"""Executes batched statements around emails whose rows are locked, or for which PostgreSQL refuses the statement.

A batched statement waits for every row in it, so one row that stays locked (a `psql` left open in the middle of a
transaction, for example) would delay all. No extra query is made while no row is locked. After a statement has waited
in vain, one query finds its locked emails. They are remembered, and checked before a batch takes them again. If
PostgreSQL refuses a statement, `store.apart` finds the emails to blame.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Final, Generic, TypeVar
from uuid import UUID

from dispatcher.domain.waiting import describe_holder
from dispatcher.errors import StatementRefused, StoreBusy
from dispatcher.store.apart import apart
from dispatcher.store.connections import BATCH_LOCK_SECONDS
from dispatcher.store.queries import ids_within
from dispatcher.store.statements import Source, fetch
from dispatcher.telemetry.log import get_log

REMEMBERED_SECONDS: Final = 60.0
"""Since it was last seen locked; whoever has an email in hand looks far more often."""
RETRY_REFUSED_SECONDS: Final = 10.0
"""Until the relay tries an email again that PostgreSQL has refused."""
MOST_NAMED: Final = 5
"""In one log line; somebody may have locked thousands."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
_NUMBER: Final = attrgetter("int")


@dataclass(frozen=True, slots=True)
class Around(Generic[T_co]):
    """What became of a batched statement.

    Attributes:
        answers: Its answers; several if the batch was split, none if it was executed for no email.
        locked: The emails for which it was not executed, because another transaction holds a lock on their rows.
        refused: The emails for which PostgreSQL refuses it, and why.
    """

    answers: Sequence[T_co]
    locked: set[UUID] = field(default_factory=set)
    refused: Mapping[UUID, StatementRefused] = field(default_factory=dict)

    @property
    def left(self) -> set[UUID]:
        """The emails for which the statement was not executed."""
        return self.locked | self.refused.keys()

    def rows(self: Around[Collection[R]]) -> list[R]:
        """The rows of all answers."""
        return [*chain.from_iterable(self.answers)]


class LockedRows:
    """What one process knows of locked emails."""

    def __init__(self, source: Source, *, retry_seconds: float = 0.0) -> None:
        """
        Args:
            retry_seconds: How long `around` leaves out an email that PostgreSQL has refused. For a loop that would
                try it at each look.
        """
        self._source = source
        self._retry_seconds = retry_seconds
        self._seen_at: dict[UUID, float] = {}
        self._refused: dict[UUID, tuple[float, StatementRefused]] = {}
        self._log = get_log()

    def __contains__(self, email_id: UUID) -> bool:
        return email_id in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)

    async def around(self, email_ids: Iterable[UUID], execute: Callable[[set[UUID]], Awaitable[T]]) -> Around[T]:
        """Executes a batched statement for these emails, except those that are locked or that PostgreSQL refuses.

        Raises:
            StoreBusy: the statement waits for another lock than those of these rows. Nothing was committed.
        """
        asked = set(email_ids)
        is_busy = False
        if asked and not (self._seen_at or self._refused):  # nearly always
            try:
                return Around([await execute(asked)])
            except StatementRefused:
                pass
            except StoreBusy:
                is_busy = True
        locked = await self.among(asked, is_busy=is_busy)

        async def execute_free(part: Sequence[UUID]) -> list[T]:
            free = set(part)
            try:
                return [await execute(free)]
            except StoreBusy:
                if is_busy and not locked:
                    raise
                locked.update(found := await self.among(free, is_busy=True))
                return [await execute(free - found)] if free > found else []

        refused = self._still_refused(asked)
        if not (free := asked - locked - refused.keys()):
            return Around([], locked, refused)
        answers, culprits = await apart(sorted(free, key=_NUMBER), execute_free)
        for email_id, error in culprits:
            self._refused[email_id] = time.monotonic(), error
            self._log.error("email.statement_failed", email_id=str(email_id), reason=error.message)
        return Around([*chain.from_iterable(answers)], locked, refused | dict(culprits))

    def _still_refused(self, email_ids: set[UUID]) -> dict[UUID, StatementRefused]:
        """Those of these emails that are not to be tried yet."""
        after = time.monotonic() - self._retry_seconds
        self._refused = {i: (at, error) for i, (at, error) in self._refused.items() if at > after}
        return {i: self._refused[i][1] for i in email_ids & self._refused.keys()} if self._refused else {}

    async def among(self, email_ids: Collection[UUID], *, is_busy: bool = False) -> set[UUID]:
        """Which of these are locked now, of those that were when we last looked.

        Args:
            is_busy: A statement has waited for them in vain: look at all of them.
        """
        if not (self._seen_at or is_busy):
            return set()
        self._forget_old()
        asked = set(email_ids) if is_busy else self._seen_at.keys() & set(email_ids)
        if not asked:
            return set()
        locked = {row[0] for row in await fetch(self._source, "find_locked", ids_within(asked))}
        new = locked - self._seen_at.keys()
        for email_id in asked - locked:
            self._seen_at.pop(email_id, None)
        self._seen_at |= dict.fromkeys(locked, time.monotonic())
        if new:
            await self._tell(new)
        return locked

    def _forget_old(self) -> None:
        before = time.monotonic() - REMEMBERED_SECONDS
        for email_id in [email_id for email_id, seen_at in self._seen_at.items() if seen_at < before]:
            del self._seen_at[email_id]

    async def _tell(self, email_ids: set[UUID]) -> None:
        rows = await fetch(self._source, "find_holders", {"age_seconds": BATCH_LOCK_SECONDS})
        fields = {
            "count": len(email_ids),
            "email_ids": [str(email_id) for email_id in sorted(email_ids)[:MOST_NAMED]],
            "lock_holders": [describe_holder(*row) for row in rows],
        }
        # A commit that waits for a standby keeps its rows locked, and no operator has to end its session.
        if rows and all(is_committing for *_, is_committing in rows):
            self._log.warning("store.commits_waiting", **fields)
        else:
            self._log.warning("email.locked", **fields)


def within(mapping: Mapping[UUID, T], email_ids: Collection[UUID]) -> Mapping[UUID, T]:
    """The part of a mapping that is about these emails."""
    return mapping if len(email_ids) == len(mapping) else {email_id: mapping[email_id] for email_id in email_ids}
