"""Replays: lists of emails that an operator sends again.

The list of a replay does not change after its creation. Each email is replayed in a separate commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch


class ReplayState(StrEnum):
    """The state of a replay. A replay that was interrupted, for example by a crash, is still `running`."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"


class ItemOutcome(StrEnum):
    """What a replay did with one email. Only emails with the outcome `replayed` were changed."""

    REPLAYED = "replayed"
    """The email is pending and due."""
    ALREADY_SENT = "already_sent"
    UNDER_WAY = "under_way"
    """The email is already pending, waiting or sending, for example because of another replay."""
    CANCELLED = "cancelled"
    """The email was cancelled, and is never sent."""
    EXPIRED = "expired"
    """The email has expired, and is never sent."""
    DISCARDED = "discarded"
    """An operator discarded the dead letter: after the replay was created, or earlier if the replay excludes such
    emails."""
    MAY_HAVE_ARRIVED = "may_have_arrived"
    """The email is held, or failed after an uncertain attempt, and the replay does not include such emails."""
    CONTENT_PRUNED = "content_pruned"
    """The email's content was deleted."""
    UNKNOWN = "unknown"
    """There is no such email."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The current state of a replay.

    Attributes:
        source: How the emails were selected: `filter`, `ids` or `queue`.
        selection: The filters by name, or the number of ids.
        per_second: The rate in emails per second; None for no limit.
        paced_with: The ids of replays that were running when this replay began, and include some of the same emails.
            All of these replays together send at the lowest of their rates.
        outcomes: The number of emails by outcome, without the emails that still wait.
        waiting: The number of emails that are not yet replayed or skipped.
        is_active: Whether a session is running the replay now. If not, a `running` replay was interrupted and can be
            resumed.
    """

    replay_id: int
    state: ReplayState
    source: str
    selection: Mapping[str, Any]
    include_held: bool
    per_second: float | None
    actor: str
    reason: str
    created_at: datetime
    changed_at: datetime
    paced_with: Sequence[int]
    outcomes: Mapping[ItemOutcome, int]
    waiting: int
    is_active: bool

    @property
    def total(self) -> int:
        """The number of emails in the replay."""
        return sum(self.outcomes.values()) + self.waiting

    @property
    def replayed(self) -> int:
        """The number of emails that were replayed."""
        return self.outcomes.get(ItemOutcome.REPLAYED, 0)

    @property
    def skipped(self) -> Mapping[ItemOutcome, int]:
        """The number of emails that were skipped, by outcome."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome is not ItemOutcome.REPLAYED}


@dataclass(frozen=True, slots=True)
class OverlappingReplay:
    """Another running replay that includes some of the same emails.

    Attributes:
        per_second: The rate in emails per second; None for no limit.
        emails: How many of the same emails still wait in the other replay.
    """

    replay_id: int
    actor: str
    reason: str
    per_second: float | None
    emails: int


async def create_replay(
    session: AsyncSession,
    email_ids: Sequence[UUID],
    *,
    source: str,
    selection: Mapping[str, Any],
    include_held: bool,
    per_second: float | None,
    actor: str,
    reason: str,
    force: bool,
) -> int:
    """Creates a replay with its list of emails, and an audit record. Returns the replay's id. Changes no email.

    Args:
        source, selection, per_second: See `Replay`.
        include_held: Whether to replay emails that may have arrived (held, or failed after an uncertain attempt).
        force: Whether the replay keeps its own rate, even if other running replays include some of the same emails.
    """
    parameters = {
        "email_ids": list(email_ids),
        "source": source,
        "selection": orjson.dumps(selection).decode(),
        "include_held": include_held,
        "per_second": per_second,
        "actor": actor,
        "reason": reason,
        "force": force,
    }
    return int((await fetch(session, "create_replay", parameters))[0][0])


async def replay_next(
    session: AsyncSession, replay_id: int, *, after: UUID | None = None
) -> tuple[UUID, ItemOutcome | None] | None:
    """Replays the next email of a replay, in one commit.

    Args:
        after: Continue after this email id. To skip a locked email, pass the id of that email.

    Returns:
        The email and its outcome. The outcome is None if another transaction has locked the row; the email then still
        waits. Instead of a pair, returns None if no email is left or the replay is not running.
    """
    rows = await fetch(session, "replay_next", {"replay_id": replay_id, "after": after})
    return (rows[0][0], rows[0][1] and ItemOutcome(rows[0][1])) if rows else None


async def find_overlaps(
    session: AsyncSession, *, email_ids: Sequence[UUID] = (), replay_id: int | None = None
) -> list[OverlappingReplay]:
    """Other running replays in which some of the given emails still wait.

    Args:
        replay_id: Also searches for the emails that still wait in this replay.
    """
    parameters = {"email_ids": list(email_ids), "replay_id": replay_id}
    return await fetch(session, "find_overlaps", parameters, into=OverlappingReplay)


async def save_overlaps(session: AsyncSession, replay_id: int) -> None:
    """Stores which running replays include some emails of this replay.

    From then on, these replays and this replay together send at the lowest of their rates.

    Does nothing if the replay was created or resumed with `force`.
    """
    replay_ids = [replay.replay_id for replay in await find_overlaps(session, replay_id=replay_id)]
    await fetch(session, "save_overlaps", {"replay_id": replay_id, "replay_ids": replay_ids})


async def find_pace(session: AsyncSession, replay_id: int) -> float | None:
    """The replay's current rate in emails per second; None for no limit.

    If the replay shares a rate with other replays, this is its part of that rate.
    """
    per_second: float | None = (await fetch(session, "find_pace", {"replay_id": replay_id}))[0][0]
    return per_second


async def has_emails_left(session: AsyncSession, replay_id: int) -> bool:
    """Whether the replay is running and has emails left."""
    return bool(await fetch(session, "find_unfinished_replay", {"replay_id": replay_id}))


async def finish_replay(session: AsyncSession, replay_id: int) -> bool:
    """Marks the replay as done if no email is left. Returns False if emails are left or the replay is not running."""
    return bool(await fetch(session, "finish_replay", {"replay_id": replay_id}))


async def stop_replay(session: AsyncSession, replay_id: int, *, actor: str, reason: str) -> bool:
    """Stops the replay, and adds an audit record. Returns False if the replay is not running."""
    return bool(await fetch(session, "stop_replay", {"replay_id": replay_id, "actor": actor, "reason": reason}))


async def resume_replay(
    session: AsyncSession, replay_id: int, *, per_second: float | None, actor: str, reason: str | None, force: bool
) -> bool:
    """Resumes a stopped or interrupted replay, and adds an audit record. Returns False for a done or unknown replay.

    Args:
        per_second: The new rate in emails per second; None keeps the rate.
        force: See `create_replay`.
    """
    parameters = {"replay_id": replay_id, "per_second": per_second, "actor": actor, "reason": reason, "force": force}
    return bool(await fetch(session, "resume_replay", parameters))


async def find_replay(session: AsyncSession, replay_id: int) -> Replay | None:
    """The current state of a replay; None if there is no such replay."""
    parameters = {"replay_id": replay_id, "before": None, "tenant_id": None, "limit": 1}
    rows = await fetch(session, "list_replays", parameters)
    return _replay(rows[0]) if rows else None


async def list_replays(
    session: AsyncSession, *, limit: int = 20, before: int | None = None, tenant_id: str | None = None
) -> list[Replay]:
    """The latest replays, newest first.

    Args:
        before: Only replays with lower ids.
        tenant_id: Only replays of this tenant's emails; None for all replays.
    """
    parameters = {"replay_id": None, "before": before, "tenant_id": tenant_id, "limit": limit}
    return [_replay(row) for row in await fetch(session, "list_replays", parameters)]


async def count_replayed_by_status(session: AsyncSession, replay_id: int, *, limit: int) -> dict[Status, int]:
    """The number of replayed emails by their current status.

    Args:
        limit: The most emails to count.
    """
    rows = await fetch(session, "count_replayed_by_status", {"replay_id": replay_id, "limit": limit})
    return {Status(status): count for status, count in rows}


async def has_running_replay(session: AsyncSession) -> bool:
    """Whether at least one replay is running or was interrupted."""
    return bool(await fetch(session, "has_running_replay"))


async def list_skipped(session: AsyncSession, replay_id: int, *, limit: int) -> list[tuple[UUID, ItemOutcome]]:
    """The first `limit` emails that the replay skipped, by id, and why."""
    rows = await fetch(session, "list_skipped", {"replay_id": replay_id, "limit": limit})
    return [(email_id, ItemOutcome(outcome)) for email_id, outcome in rows]


def _replay(row: tuple[Any, ...]) -> Replay:
    values = list(row)
    values[1] = ReplayState(values[1])
    counts = values[-2]
    values[-2:-1] = [{o: counts[o] for o in ItemOutcome if o in counts}, counts.get("waiting", 0)]
    return Replay(*values)
