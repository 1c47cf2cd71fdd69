"""Replays: batches of emails that a person wants sent again, settled when they are made, done one commit at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import orjson

from dispatcher.store.connections import AsyncSession
from dispatcher.store.statements import fetch


class ReplayState(StrEnum):
    """Whether a replay may go on."""

    RUNNING = "running"
    STOPPED = "stopped"
    DONE = "done"


class ItemOutcome(StrEnum):
    """What became of one email of a replay; all but the first leave it as it was."""

    REPLAYED = "replayed"
    """It is pending and due."""
    ALREADY_SENT = "already_sent"
    UNDER_WAY = "under_way"
    """It is pending or sending: somebody replayed it before."""
    DISCARDED = "discarded"
    """Somebody discarded its dead letter: since the replay was made, or at any time where it was not made for such."""
    MAY_HAVE_ARRIVED = "may_have_arrived"
    """It is held, or failed after an attempt of which no answer came, and the replay is not for such."""
    CONTENT_PRUNED = "content_pruned"
    """What would have to be sent was deleted."""
    UNKNOWN = "unknown"
    """There is no such email."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay as it stands.

    Attributes:
        source: `filter`, `ids` or `queue`.
        selection: The filter, by name; or how many ids.
        per_second: Its pace; None for as fast as it goes.
        paced_with: Replays that ran over some of the same emails when it began: all share the slowest pace.
        outcomes: Its emails by outcome; those still to do left out.
        waiting: How many are still to do.
        is_active: Somebody is at it now; a running one that nobody attends was interrupted, and can be resumed.
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
        """How many emails it is about."""
        return sum(self.outcomes.values()) + self.waiting

    @property
    def replayed(self) -> int:
        """How many are pending and due because of it, or were."""
        return self.outcomes.get(ItemOutcome.REPLAYED, 0)

    @property
    def skipped(self) -> Mapping[ItemOutcome, int]:
        """Those that it left as they were, by why."""
        return {outcome: count for outcome, count in self.outcomes.items() if outcome is not ItemOutcome.REPLAYED}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Another running replay that has some of the same emails.

    Attributes:
        emails: How many of the same emails it has still to do.
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
    """Settles which emails a replay is about, on record; returns its id."""
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
    """Replays its next email, in one commit; None if none is left, or it does not run.

    Its outcome is None where somebody's transaction holds its row: it waits as before.

    Args:
        after: The email that was the last one: so a caller passes over those that are locked.
    """
    rows = await fetch(session, "replay_next", {"replay_id": replay_id, "after": after})
    return (rows[0][0], rows[0][1] and ItemOutcome(rows[0][1])) if rows else None


async def find_meetings(
    session: AsyncSession, *, email_ids: Sequence[UUID] = (), replay_id: int | None = None
) -> list[Meeting]:
    """Running replays that have some of these emails; or, with `replay_id`, of the emails it has still to do."""
    parameters = {"email_ids": list(email_ids), "replay_id": replay_id}
    return await fetch(session, "find_meetings", parameters, into=Meeting)


async def note_meetings(session: AsyncSession, replay_id: int) -> None:
    """Makes a replay share its pace with the running replays of the same emails, unless it was made with `force`."""
    met = [meeting.replay_id for meeting in await find_meetings(session, replay_id=replay_id)]
    await fetch(session, "note_meetings", {"replay_id": replay_id, "replay_ids": met})


async def find_pace(session: AsyncSession, replay_id: int) -> float | None:
    """The replay's pace now, in emails per second; None for no limit."""
    per_second: float | None = (await fetch(session, "find_pace", {"replay_id": replay_id}))[0][0]
    return per_second


async def goes_on(session: AsyncSession, replay_id: int) -> bool:
    """Whether it runs and something of it is left to do."""
    return bool(await fetch(session, "replay_goes_on", {"replay_id": replay_id}))


async def finish_replay(session: AsyncSession, replay_id: int) -> bool:
    """Notes that it is done, if it is."""
    return bool(await fetch(session, "finish_replay", {"replay_id": replay_id}))


async def stop_replay(session: AsyncSession, replay_id: int, *, actor: str, reason: str) -> bool:
    """Lets it go no further, on record; False if it does not run."""
    return bool(await fetch(session, "stop_replay", {"replay_id": replay_id, "actor": actor, "reason": reason}))


async def resume_replay(
    session: AsyncSession, replay_id: int, *, per_second: float | None, actor: str, reason: str | None, force: bool
) -> bool:
    """Lets it go on, on record; False if it is done, or there is none."""
    parameters = {"replay_id": replay_id, "per_second": per_second, "actor": actor, "reason": reason, "force": force}
    return bool(await fetch(session, "resume_replay", parameters))


async def find_replay(session: AsyncSession, replay_id: int) -> Replay | None:
    """One replay as it stands."""
    rows = await fetch(session, "list_replays", {"replay_id": replay_id, "limit": 1})
    return _replay(rows[0]) if rows else None


async def list_replays(session: AsyncSession, *, limit: int = 20) -> list[Replay]:
    """The latest ones."""
    return [_replay(row) for row in await fetch(session, "list_replays", {"replay_id": None, "limit": limit})]


async def list_skipped(session: AsyncSession, replay_id: int, *, limit: int) -> list[tuple[UUID, ItemOutcome]]:
    """The emails that it left as they were, and why."""
    rows = await fetch(session, "list_skipped", {"replay_id": replay_id, "limit": limit})
    return [(email_id, ItemOutcome(outcome)) for email_id, outcome in rows]


def _replay(row: tuple[Any, ...]) -> Replay:
    values = list(row)
    values[1] = ReplayState(values[1])
    counts = values[-2]
    values[-2:-1] = [{o: counts[o] for o in ItemOutcome if o in counts}, counts.get("waiting", 0)]
    return Replay(*values)
