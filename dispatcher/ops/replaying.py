"""Replays failed and held emails for an operator: sends each email again once, at a limited rate.

    preview ──▶ create ──▶ run ──▶ done
                            │ ▲
                       stop ▼ │ resume
                          stopped

`create` stores the list of emails. If the list has one email, the same commit replays it, and the replay is done.
Otherwise `create` changes no email, and `run` replays the emails one by one. One commit makes an email pending and due
and stores the outcome, so a later run continues exactly where an earlier run ended. If two replays include the same
email, the second replay finds the email pending or sending, and skips it. Overlapping replays share the lowest of their
rates equally, except replays created with `force`. If another transaction has locked an email's row, the email is
retried after all other emails. If the row stays locked, the run ends without this email and can be resumed. A monitor
removes the stale dead letters of the replayed emails from the DLQ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import orjson

from dispatcher.domain.failures import (
    DEFAULT_PER_SECOND,
    MIN_PER_SECOND,
    SAMPLE,
    ItemOutcome,
    OverlappingReplay,
    Replay,
    Selection,
)
from dispatcher.errors import DispatcherError
from dispatcher.ops.acts import Act
from dispatcher.store import failures, replays
from dispatcher.store.connections import BATCH_LOCK_SECONDS, AsyncSession
from dispatcher.store.named_locks import named_lock

_LOOK_AGAIN_SECONDS: Final = 0.1
_LONGEST_SLEEP_SECONDS: Final = 1.0
_PACE_SECONDS: Final = 1.0
"""How often a replay reads its rate from the database, in seconds."""

OnEmail = Callable[[UUID, ItemOutcome], None]


class ReplayBusy(DispatcherError):
    """Another process is running the replay."""


class SelectionGrown(DispatcherError):
    """A filter now selects more emails than the operator was shown."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What a replay would do now: how many emails would get each outcome, and the ids of the first of them."""

    counts: dict[ItemOutcome, int]
    samples: dict[ItemOutcome, list[UUID]]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def replayable(self) -> int:
        return self.counts.get(ItemOutcome.REPLAYED, 0)


@dataclass(frozen=True, slots=True)
class Ended:
    """The replay after one run, and how many emails are left because other transactions have locked their rows."""

    replay: Replay
    locked: int


async def preview(session: AsyncSession, selection: Selection, *, include_held: bool = False) -> Preview:
    """The dry run of a replay; changes nothing. Leaves out ids of emails that are no longer failed or held."""
    found = await failures.preview_dead(session, selection, include_held=include_held, sample=SAMPLE)
    return Preview({each.outcome: each.emails for each in found}, {each.outcome: each.sample for each in found})


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
    """Creates a replay with its list of emails, audited. A list of one email is replayed at once.

    If the selection has ids and no filter, all ids are included, whatever their emails' status. For each email that the
    replay skips, it records the reason. `per_second` is None for no limit. `source` says how the operator selected the
    emails: `filter`, `ids` or `queue`. With `filter`, the selection may also have ids: the emails that the operator was
    shown and confirmed. If the filter selects more than `at_most` emails, raises `SelectionGrown`.
    """
    ids = await _ids(session, selection)
    if at_most is not None and len(ids) > at_most:
        raise SelectionGrown(f"The filter now selects {len(ids):,} emails instead of {at_most:,}.")
    source = source or ("filter" if selection.email_ids is None else "ids")
    is_listed = source != "filter" and not selection.filters
    replay_id = await replays.create_replay(
        session,
        email_ids=ids,
        source=source,
        selection=orjson.dumps({"ids": len(ids)} if is_listed else selection.filters).decode(),
        include_held=include_held,
        per_second=per_second,
        actor=act.actor,
        reason=act.reason,
        force=force,
    )
    if len(ids) > 1:
        await replays.save_overlaps(session, replay_id=replay_id)
    return await replays.get_replay(session, replay_id)


async def _ids(session: AsyncSession, selection: Selection) -> Sequence[UUID]:
    if selection.email_ids is None or selection.filters:
        return await failures.find_dead_ids(session, selection)
    return list(dict.fromkeys(selection.email_ids))


async def overlaps(session: AsyncSession, selection: Selection) -> list[OverlappingReplay]:
    """The running replays that include some of the selected emails."""
    if not await replays.has_running_replay(session):  # saves reading and sending the ids of a large selection
        return []
    return await replays.find_overlaps(session, email_ids=await _ids(session, selection), replay_id=None)


async def run(
    session: AsyncSession, replay_id: int, *, on_email: OnEmail | None = None, lock_seconds: float = BATCH_LOCK_SECONDS
) -> Ended:
    """Replays the remaining emails at the replay's rate. Raises `ReplayBusy` if another process runs the replay.

    Returns when the replay is stopped, or when no emails are left except locked emails, for which it waits
    `lock_seconds` after all others are done. May be cancelled at any time without loss. If PostgreSQL is unreachable,
    call again to continue.
    """
    async with named_lock(session, f"replay {replay_id}") as is_ours:
        if not is_ours:
            raise ReplayBusy(f"Another process is running replay {replay_id}.")
        # Save the overlaps again, because other replays may have begun since `create` saved them.
        await replays.save_overlaps(session, replay_id=replay_id)
        locked = await _replay_all(session, replay_id, on_email, lock_seconds)
    return Ended(await replays.get_replay(session, replay_id), locked)


async def _replay_all(session: AsyncSession, replay_id: int, on_email: OnEmail | None, lock_seconds: float) -> int:
    """Replays emails until none is left, or until all remaining emails stay locked; returns how many stayed locked."""
    loop = asyncio.get_running_loop()
    give_up_at = None
    while True:
        settled, locked = await _replay_free(session, replay_id, on_email)
        if not locked:
            break
        if settled or give_up_at is None:
            give_up_at = loop.time() + lock_seconds
        elif loop.time() > give_up_at:
            break
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)  # PostgreSQL does not notify when a lock is released
    await replays.finish_replay(session, replay_id=replay_id)
    return locked


async def _replay_free(session: AsyncSession, replay_id: int, on_email: OnEmail | None) -> tuple[int, int]:
    """Tries each remaining email once; returns how many got an outcome, and how many were locked."""
    loop = asyncio.get_running_loop()
    pace = _Pace(session, replay_id)
    next_at = loop.time()
    settled = locked = 0
    email_id: UUID | None = None
    while found := await replays.replay_next(session, replay_id=replay_id, after=email_id):
        email_id, outcome = found
        if outcome is None:
            locked += 1
            continue
        settled += 1
        if on_email:
            on_email(email_id, ItemOutcome(outcome))
        if seconds := await pace.seconds():
            # Do not catch up after a delay, because that would cause a burst.
            next_at = max(next_at + seconds, loop.time() - seconds)
            await _sleep_until(next_at, session, replay_id)
    return settled, locked


async def _sleep_until(until: float, session: AsyncSession, replay_id: int) -> None:
    """Waits until the given time of the loop's clock, or until the replay is stopped or has no email left."""
    loop = asyncio.get_running_loop()
    while (seconds := until - loop.time()) > _LONGEST_SLEEP_SECONDS:
        await asyncio.sleep(_LONGEST_SLEEP_SECONDS)
        if not await replays.has_emails_left(session, replay_id=replay_id):
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
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + _PACE_SECONDS
            per_second = await replays.find_pace(self._session, replay_id=self._replay_id)
            self._seconds = 1 / max(per_second, MIN_PER_SECOND) if per_second else 0.0
        return self._seconds
