"""Replays: a person has failed emails sent again, once each, at a pace, and may stop half-way.

    preview ──▶ create ──▶ run ──▶ done
                            │ ▲
                       stop ▼ │ resume
                          stopped

`create` settles which emails and touches none. `run` takes them one by one: one commit makes an email pending and due
and notes so in the replay, so that whatever ends the runner, a later one goes on exactly there. Two replays that share
emails replay each of them once: the second finds it under way. They share the slowest of their paces equally, unless
one was made with `force`. An email whose row another transaction has locked is passed over
and tried again after the others; if it stays locked, the run ends without it, and can be resumed. The dead letters of
what was replayed are swept off the DLQ as the run goes, because they are stale then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from dispatcher.broker.dlq import DeadLetterQueue
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.ops.letters import sweep
from dispatcher.store import failures, replays
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession
from dispatcher.store.failures import Selection
from dispatcher.store.replays import ItemOutcome, Meeting, Replay
from dispatcher.store.turns import turn

DEFAULT_PER_SECOND: Final = 50.0
LEAST_PER_SECOND: Final = 0.01
"""The slowest pace. A replay holds a session of PostgreSQL until it ends."""
SAMPLE: Final = 5
SWEEP_SECONDS: Final = 5.0
_LOOK_AGAIN_SECONDS: Final = 0.1
_LONGEST_SLEEP_SECONDS: Final = 1.0
_PACE_SECONDS: Final = 1.0
"""How often a replay asks for its pace."""


_Note = Callable[[UUID, ItemOutcome], Awaitable[None]]


class ReplayBusy(DispatcherError):
    """Somebody else is at this replay."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a replay would do now.

    Attributes:
        counts: Emails by outcome.
        samples: The first ids of each.
    """

    counts: dict[ItemOutcome, int]
    samples: dict[ItemOutcome, list[UUID]]

    @property
    def total(self) -> int:
        """How many emails it would be about."""
        return sum(self.counts.values())

    @property
    def replayable(self) -> int:
        """How many it would replay."""
        return self.counts.get(ItemOutcome.REPLAYED, 0)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended.

    Attributes:
        locked: Emails that still wait, because somebody's transaction holds their rows.
        letters_removed: Dead letters that left the DLQ.
        letters_fault: Why some may be left there; None if none is.
    """

    replay: Replay
    locked: int
    letters_removed: int
    letters_fault: str | None


async def preview(session: AsyncSession, selection: Selection, *, include_held: bool = False) -> Preview:
    """The dry run: changes nothing. Ids that are no longer failed or held are left out of its counts."""
    found = await failures.preview_dead(session, selection, include_held=include_held, sample=SAMPLE)
    counts = {ItemOutcome(outcome): count for outcome, (count, _) in found.items()}
    return Preview(counts, {ItemOutcome(outcome): ids for outcome, (_, ids) in found.items()})


async def create(
    session: AsyncSession,
    selection: Selection,
    act: Act,
    *,
    include_held: bool = False,
    per_second: float | None = DEFAULT_PER_SECOND,
    source: str | None = None,
    force: bool = False,
) -> Replay:
    """Settles which emails, on record, and changes none of them.

    Every id that is given without a filter is part of it, whatever became of its email: the replay tells why it was
    skipped.

    Args:
        source: `filter`, `ids` or `queue`. With `filter`, the ids are those that the operator was shown and confirmed.
        force: Keep this pace, even if other replays have some of the same emails.
    """
    ids = await _ids(session, selection)
    source = source or ("filter" if selection.email_ids is None else "ids")
    is_listed = source != "filter" and not selection.filters
    replay_id = await replays.create_replay(
        session,
        ids,
        source=source,
        selection={"ids": len(ids)} if is_listed else selection.filters,
        include_held=include_held,
        per_second=per_second,
        actor=act.actor,
        reason=act.reason,
        force=force,
    )
    await replays.note_meetings(session, replay_id)
    return await _found(session, replay_id)


async def _ids(session: AsyncSession, selection: Selection) -> Sequence[UUID]:
    if selection.email_ids is None or selection.filters:
        return await failures.find_dead_ids(session, selection)
    return list(dict.fromkeys(selection.email_ids))


async def meetings(session: AsyncSession, selection: Selection) -> list[Meeting]:
    """The running replays that have some of this selection's emails."""
    return await replays.find_meetings(session, email_ids=await _ids(session, selection))


async def meetings_of(session: AsyncSession, replay_id: int) -> list[Meeting]:
    """The other running replays that have some of the emails this one has still to do."""
    return await replays.find_meetings(session, replay_id=replay_id)


async def find(session: AsyncSession, replay_id: int) -> Replay | None:
    """One replay as it stands; None if there is none."""
    return await replays.find_replay(session, replay_id)


async def stop(session: AsyncSession, replay_id: int, act: Act) -> Replay | None:
    """Lets a replay go no further than the email under way; harmless if it does not run. None if there is none."""
    await replays.stop_replay(session, replay_id, actor=act.actor, reason=act.reason)
    return await replays.find_replay(session, replay_id)


async def resume(
    session: AsyncSession,
    replay_id: int,
    *,
    actor: str,
    reason: str | None = None,
    per_second: float | None = None,
    force: bool = False,
) -> Replay | None:
    """Lets a stopped or interrupted one go on by the next `run`; harmless if it is done. None if there is none.

    Args:
        force: See `create`.
    """
    await replays.resume_replay(session, replay_id, per_second=per_second, actor=actor, reason=reason, force=force)
    return await replays.find_replay(session, replay_id)


async def run(
    session: AsyncSession,
    dlq: DeadLetterQueue | None,
    replay_id: int,
    *,
    on_email: Callable[[UUID, ItemOutcome], None] | None = None,
    lock_seconds: float = BATCH_LOCK_SECONDS,
) -> Ended:
    """Replays what is left, at its pace, until it is done, somebody stops it, or all that is left is locked.

    Cancelling it loses nothing. Without a DLQ, or while RabbitMQ is away, the dead letters stay until the next sweep.

    Args:
        lock_seconds: How long it waits for emails that are locked, once all others are done.

    Raises:
        ReplayBusy: somebody else runs it.
        StoreUnavailable: PostgreSQL is away; another call goes on.
    """
    async with turn(session, f"replay {replay_id}") as is_ours:
        if not is_ours:
            raise ReplayBusy(f"Replay {replay_id} is being run by somebody else.")
        await replays.note_meetings(session, replay_id)  # again: others may have begun since it was made
        sweeper = _Sweeper(session, dlq)

        async def note(email_id: UUID, outcome: ItemOutcome) -> None:
            if on_email:
                on_email(email_id, outcome)
            await sweeper.note(outcome)

        try:
            locked = await _replay_all(session, await _found(session, replay_id), note, lock_seconds)
        finally:
            await sweeper.finish()
    return Ended(await _found(session, replay_id), locked, sweeper.removed, sweeper.fault)


async def _replay_all(session: AsyncSession, replay: Replay, note: _Note, lock_seconds: float) -> int:
    """Goes through what is left until nothing is, or what is left stays locked; returns how many emails that are."""
    loop = asyncio.get_running_loop()
    give_up_at = None
    while True:
        settled, locked = await _replay_free(session, replay, note)
        if not locked:
            break
        if settled or give_up_at is None:
            give_up_at = loop.time() + lock_seconds
        elif loop.time() > give_up_at:
            break
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # PostgreSQL announces no lock's end
    await replays.finish_replay(session, replay.replay_id)
    return locked


async def _replay_free(session: AsyncSession, replay: Replay, note: _Note) -> tuple[int, int]:
    """Goes once through what is left; returns how many emails it settled, and how many it passed over as locked."""
    loop = asyncio.get_running_loop()
    pace = _Pace(session, replay.replay_id)
    next_at = loop.time()
    settled = locked = 0
    email_id: UUID | None = None
    while found := await replays.replay_next(session, replay.replay_id, after=email_id):
        email_id, outcome = found
        if outcome is None:
            locked += 1
            continue
        settled += 1
        await note(email_id, outcome)
        if seconds := await pace.seconds():
            # No burst after a sweep: time that went by is not made good.
            next_at = max(next_at + seconds, loop.time() - seconds)
            await _pause(session, replay.replay_id, next_at)
    return settled, locked


async def _pause(session: AsyncSession, replay_id: int, until: float) -> None:
    """Waits until this time of the loop's clock, or until the replay is stopped or has no email left."""
    loop = asyncio.get_running_loop()
    while (seconds := until - loop.time()) > _LONGEST_SLEEP_SECONDS:
        await asyncio.sleep(_LONGEST_SLEEP_SECONDS)
        if not await replays.goes_on(session, replay_id):
            return
    await asyncio.sleep(max(0.0, seconds))


class _Pace:
    """How fast a replay may go now. The pace changes when replays that share it begin or end."""

    def __init__(self, session: AsyncSession, replay_id: int) -> None:
        self._session = session
        self._replay_id = replay_id
        self._seconds = 0.0
        self._look_at = 0.0

    async def seconds(self) -> float:
        """The wait between two emails; 0 for no limit."""
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + _PACE_SECONDS
            per_second = await replays.find_pace(self._session, self._replay_id)
            self._seconds = 1 / max(per_second, LEAST_PER_SECOND) if per_second else 0.0
        return self._seconds


class _Sweeper:
    """Takes stale dead letters off the DLQ while a replay goes on, now and then and at its end."""

    def __init__(self, session: AsyncSession, dlq: DeadLetterQueue | None) -> None:
        self._session = session
        self._dlq = dlq
        self._replayed = 0
        self.removed = 0
        self.fault: str | None = None
        self._due_at = asyncio.get_running_loop().time() + SWEEP_SECONDS

    async def note(self, outcome: ItemOutcome) -> None:
        self._replayed += outcome is ItemOutcome.REPLAYED
        if self._replayed and asyncio.get_running_loop().time() >= self._due_at:
            await self._sweep()

    async def finish(self) -> None:
        if self._replayed:
            await self._sweep()

    async def _sweep(self) -> None:
        self._due_at = asyncio.get_running_loop().time() + SWEEP_SECONDS
        if self._dlq is None:
            self.fault = "RabbitMQ was not asked."
            return
        try:
            self.removed += await sweep(self._session, self._dlq)
            self._replayed, self.fault = 0, None
        except DispatcherError as error:
            self.fault = error.message


async def _found(session: AsyncSession, replay_id: int) -> Replay:
    replay = await replays.find_replay(session, replay_id)
    if replay is None:
        raise DispatcherError(f"There is no replay {replay_id}.", remedy="`dispatcher dlq replays` lists them.")
    return replay
