"""The leases and rescued emails of workers that died, or that are frozen past their leases; see `recovery`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.store.connections import AsyncSession
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.statements import fetch


@dataclass(frozen=True, slots=True)
class FoundLease:
    """A lease as the relay finds it in PostgreSQL.

    Attributes:
        token: Fences every write under this lease.
        worker: Whose it is.
        expired_at: Its end; with the token it tells whether anything came of the lease since.
        has_run_out: Whether PostgreSQL's clock is past its end.
        attempt_base: How many attempts the email had when it was last replayed.
    """

    email_id: UUID
    token: int
    worker: str
    expired_at: datetime
    has_run_out: bool
    attempt_base: int


@dataclass(frozen=True, slots=True)
class Crashed:
    """An email that a worker was rendering when it died.

    Attributes:
        status: `pending`, or `failed` where too many have died of it.
        crash_count: How many have died of it.
    """

    email_id: UUID
    correlation_id: str | None
    status: Status
    crash_count: int


async def terminate_sessions(session: AsyncSession, worker: str) -> int:
    """Ends the sessions of a dead worker; returns how many there were. At zero, nothing of it can commit any more."""
    return len(await fetch(session, "terminate_sessions", {"application_name": worker}))


async def find_leases(session: AsyncSession, worker: str) -> list[FoundLease]:
    """The leases of a worker."""
    return await fetch(session, "find_leases", {"worker": worker}, into=FoundLease)


async def find_rescued(session: AsyncSession, worker: str) -> dict[UUID, int]:
    """The emails of this worker that a rescue holds and that have not changed since: the lease's token by id."""
    return dict(await fetch(session, "find_rescued", {"worker": worker}))


async def note_crashes(
    session: AsyncSession, worker: str, tokens: Mapping[UUID, int], most_crashes: int
) -> list[Crashed]:
    """Gives back what a dead worker was rendering, tokens by id, and fails what has killed that many; not in vain.

    Those that somebody has locked stay.
    """
    parameters = {
        **ids_with("lease_tokens", tokens),
        "worker": worker,
        "most_crashes": most_crashes,
        "error_type": Reason.WORKER_CRASHED.value,
        "error": "The worker died while it rendered this email.",
    }
    return await fetch(session, "note_crashes", parameters, into=Crashed)


async def find_expiring(
    session: AsyncSession, workers: Collection[str], *, are_theirs: bool = True, within_seconds: float = 0.0
) -> list[FoundLease]:
    """Leases that have run out by PostgreSQL's clock, or do so within some seconds.

    Args:
        are_theirs: The leases of these workers; else of all others.
    """
    parameters = {"workers": list(workers), "is_theirs": are_theirs, "within_seconds": within_seconds}
    return await fetch(session, "find_expiring", parameters, into=FoundLease)


async def release_found(session: AsyncSession, leases: Sequence[FoundLease]) -> set[UUID]:
    """Gives back leases under which nothing left nor can leave; returns the ids of those that nothing came of since."""
    return {row[0] for row in await fetch(session, "release_found", as_found(leases))} if leases else set()


def as_found(leases: Sequence[FoundLease]) -> dict[str, Any]:
    """The parameters of statements that change leases only as they were found; one lease at least."""
    by_id = {lease.email_id: lease for lease in leases}
    parameters = ids_within(by_id)
    ordered = [by_id[email_id] for email_id in parameters["email_ids"]]
    tokens, ends = [lease.token for lease in ordered], [lease.expired_at for lease in ordered]
    return {**parameters, "lease_tokens": tokens, "expired_ats": ends}


async def find_attempt_bases(session: AsyncSession, email_ids: Collection[UUID]) -> dict[UUID, int]:
    """How many attempts each of these had when it was last replayed; those that never were are left out."""
    return {} if not email_ids else dict(await fetch(session, "find_attempt_bases", ids_within(email_ids)))
