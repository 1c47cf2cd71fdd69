"""Replays: lists of emails that an operator sends again.

The list of a replay does not change after its creation. Each email is replayed in a separate commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from dispatcher.domain.failures import ItemOutcome, OverlappingReplay, Replay
from dispatcher.domain.status import Status
from dispatcher.store.statements import Source, statement


@statement
async def create_replay(
    session: Source,
    *,
    email_ids: Sequence[UUID],
    source: str,
    selection: str,
    include_held: bool,
    per_second: float | None,
    actor: str,
    reason: str,
    force: bool,
) -> int: ...
@statement
async def replay_next(
    source: Source, *, replay_id: int, after: UUID | None
) -> tuple[UUID, ItemOutcome | None] | None: ...
@statement
async def has_running_replay(source: Source) -> bool: ...
@statement
async def find_overlaps(
    source: Source, *, email_ids: Sequence[UUID], replay_id: int | None
) -> list[OverlappingReplay]: ...
@statement
async def save_overlaps(source: Source, *, replay_id: int) -> None: ...
@statement
async def find_pace(source: Source, *, replay_id: int) -> float | None: ...
@statement
async def has_emails_left(source: Source, *, replay_id: int) -> bool: ...
@statement
async def finish_replay(source: Source, *, replay_id: int) -> bool: ...
@statement
async def list_replays(
    source: Source, *, replay_id: int | None = None, after_id: int | None, tenant_id: str | None, limit: int
) -> list[Replay]: ...
@statement
async def list_skipped(source: Source, *, replay_id: int, limit: int) -> dict[UUID, ItemOutcome]: ...
@statement
async def count_replayed_by_status(source: Source, *, replay_id: int, limit: int) -> dict[Status, int]: ...


async def get_replay(source: Source, replay_id: int) -> Replay:
    """The current state of a replay that exists."""
    (found,) = await list_replays(source, replay_id=replay_id, after_id=None, tenant_id=None, limit=1)
    return found
