"""Replays failed and held emails for an operator: sends each email again once, at a limited rate.

    preview ──▶ create ──▶ run ──▶ done
                            │ ▲
                       stop ▼ │ resume
                          stopped

`create` stores the list of emails and changes no email. `run` replays the emails one by one. One commit makes an email
pending and due and stores the outcome, so a later run continues exactly where an earlier run ended. If two replays
include the same email, the replays overlap: the second replay finds the email pending or sending, and skips it.
Overlapping replays share the lowest of their rates equally, except replays created with `force`. If another
transaction has locked an email's row, the email is retried after all other emails. If the row stays locked, the run
ends without this email and can be resumed. During the run, the stale dead letters of the replayed emails are removed
from the DLQ.
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
from dispatcher.ops.dead_letters import sweep
from dispatcher.store import failures, replays
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession
from dispatcher.store.failures import Selection
from dispatcher.store.named_locks import named_lock
from dispatcher.store.replays import ItemOutcome, OverlappingReplay, Replay

DEFAULT_PER_SECOND: Final = 50.0
MIN_PER_SECOND: Final = 0.01
"""The lowest rate in emails per second. Slower replays would occupy their PostgreSQL session for too long."""
SAMPLE: Final = 5
SWEEP_SECONDS: Final = 5.0
_LOOK_AGAIN_SECONDS: Final = 0.1
_LONGEST_SLEEP_SECONDS: Final = 1.0
_PACE_SECONDS: Final = 1.0
"""How often a replay reads its rate from the database, in seconds."""


_Note = Callable[[UUID, ItemOutcome], Awaitable[None]]


class ReplayBusy(DispatcherError):
    """Another process is running the replay."""


class SelectionGrown(DispatcherError):
    """A filter now selects more emails than the operator was shown."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a replay would do now.

    Attributes:
        counts: How many emails would get each outcome.
        samples: The ids of the first emails with each outcome.
    """

    counts: dict[ItemOutcome, int]
    samples: dict[ItemOutcome, list[UUID]]

    @property
    def total(self) -> int:
        """The number of emails in the replay."""
        return sum(self.counts.values())

    @property
    def replayable(self) -> int:
        """The number of emails that the replay would make pending."""
        return self.counts.get(ItemOutcome.REPLAYED, 0)


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of one run of a replay.

    Attributes:
        replay: The replay's state after the run.
        locked: The number of emails that were not replayed because other transactions have locked their rows.
        dead_letters_removed: The number of dead letters removed from the DLQ.
        dead_letters_fault: Why stale dead letters may remain on the DLQ; None if none remain.
    """

    replay: Replay
    locked: int
    dead_letters_removed: int
    dead_letters_fault: str | None


async def preview(session: AsyncSession, selection: Selection, *, include_held: bool = False) -> Preview:
    """The dry run of a replay; changes nothing. Leaves out ids of emails that are no longer failed or held."""
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
    at_most: int | None = None,
) -> Replay:
    """Creates a replay with its list of emails, audited. Changes no email.

    If the selection has ids and no filter, all ids are included, whatever their emails' status. For each email that the
    replay skips, it records the reason.

    Args:
        include_held: Whether to replay emails that may have arrived (held, or failed after an uncertain attempt).
        per_second: The rate in emails per second; None for no limit.
        source: How the operator selected the emails: `filter`, `ids` or `queue`. With `filter`, the selection may also
            have ids: the emails that the operator was shown and confirmed.
        force: Whether the replay keeps its own rate even if a running replay includes some of the same emails.
        at_most: The number of emails that the operator was shown; None if the operator was shown the emails themselves.

    Raises:
        SelectionGrown: the filter selects more than `at_most` emails. No replay was created.
    """
    ids = await _ids(session, selection)
    if at_most is not None and len(ids) > at_most:
        raise SelectionGrown(f"The filter now selects {len(ids):,} emails instead of {at_most:,}.")
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
    await replays.save_overlaps(session, replay_id)
    return await _found(session, replay_id)


async def _ids(session: AsyncSession, selection: Selection) -> Sequence[UUID]:
    if selection.email_ids is None or selection.filters:
        return await failures.find_dead_ids(session, selection)
    return list(dict.fromkeys(selection.email_ids))


async def overlaps(session: AsyncSession, selection: Selection) -> list[OverlappingReplay]:
    """The running replays that include some of the selected emails."""
    if not await replays.has_running_replay(session):
        return []
    return await replays.find_overlaps(session, email_ids=await _ids(session, selection))


async def overlaps_of(session: AsyncSession, replay_id: int) -> list[OverlappingReplay]:
    """All other running replays that include some of this replay's remaining emails."""
    return await replays.find_overlaps(session, replay_id=replay_id)


async def find(session: AsyncSession, replay_id: int) -> Replay | None:
    """The current state of a replay; None if there is no replay with this id."""
    return await replays.find_replay(session, replay_id)


async def stop(session: AsyncSession, replay_id: int, act: Act) -> Replay | None:
    """Stops a replay after its current email; returns its state, or None if there is no such replay. Idempotent."""
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
    """Lets the next call of `run` (below) continue a stopped or interrupted replay.

    Returns the replay's state; None if there is no such replay. Idempotent. Has no effect on a replay that is done.

    Args:
        per_second: The new rate; None keeps the rate.
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
    """Replays the remaining emails at the replay's rate.

    Returns when the replay is stopped, or when no emails are left except locked emails.

    May be cancelled at any time without loss.

    Args:
        dlq: If None, or while RabbitMQ is unreachable, stale dead letters stay on the DLQ until a later sweep.
        on_email: Called after each email with its outcome.
        lock_seconds: How long to wait for locked emails after all other emails are done.

    Raises:
        ReplayBusy: another process is running the replay.
        StoreUnavailable: PostgreSQL is unreachable; call again to continue.
    """
    async with named_lock(session, f"replay {replay_id}") as is_ours:
        if not is_ours:
            raise ReplayBusy(f"Another process is running replay {replay_id}.")
        # Save the overlaps again, because other replays may have begun since `create` saved them.
        await replays.save_overlaps(session, replay_id)
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
    """Replays emails until none is left, or until all remaining emails stay locked; returns how many stayed locked."""
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
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # PostgreSQL does not notify when a lock is released
    await replays.finish_replay(session, replay.replay_id)
    return locked


async def _replay_free(session: AsyncSession, replay: Replay, note: _Note) -> tuple[int, int]:
    """Tries each remaining email once; returns how many got an outcome, and how many were locked."""
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
            # If a sweep has delayed the replay, do not catch up, because that would cause a burst.
            next_at = max(next_at + seconds, loop.time() - seconds)
            await _sleep_until(next_at, session, replay.replay_id)
    return settled, locked


async def _sleep_until(until: float, session: AsyncSession, replay_id: int) -> None:
    """Waits until the given time of the loop's clock, or until the replay is stopped or has no email left."""
    loop = asyncio.get_running_loop()
    while (seconds := until - loop.time()) > _LONGEST_SLEEP_SECONDS:
        await asyncio.sleep(_LONGEST_SLEEP_SECONDS)
        if not await replays.has_emails_left(session, replay_id):
            return
    await asyncio.sleep(max(0.0, seconds))


class _Pace:
    """The current rate of a replay, which changes when overlapping replays begin or end."""

    def __init__(self, session: AsyncSession, replay_id: int) -> None:
        self._session = session
        self._replay_id = replay_id
        self._seconds = 0.0
        self._look_at = 0.0

    async def seconds(self) -> float:
        """The wait between two emails; 0 if the rate is not limited."""
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + _PACE_SECONDS
            per_second = await replays.find_pace(self._session, self._replay_id)
            self._seconds = 1 / max(per_second, MIN_PER_SECOND) if per_second else 0.0
        return self._seconds


class _Sweeper:
    """Removes stale dead letters from the DLQ while a replay runs: every few seconds, and at the end."""

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
            self.fault = "RabbitMQ was not contacted."
            return
        try:
            self.removed += await sweep(self._session, self._dlq)
            self._replayed, self.fault = 0, None
        except DispatcherError as error:
            self.fault = error.message


async def _found(session: AsyncSession, replay_id: int) -> Replay:
    replay = await replays.find_replay(session, replay_id)
    if replay is None:
        raise DispatcherError(
            f"There is no replay {replay_id}.", remedy="Run `dispatcher dlq replays` to see all replays."
        )
    return replay
