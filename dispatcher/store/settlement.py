"""Finds and releases the leases of dead workers and the expired leases of frozen workers, for `dispatcher.recovery`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.outcome import Reason
from dispatcher.domain.retry import RetryLimits
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass, replace
from dispatcher.store.connections import AsyncSession
from dispatcher.store.leases import limits_in
from dispatcher.store.queries import ids_with, ids_within
from dispatcher.store.statements import Source, fetch, statement

_EVER: Final = 1e12
"""Seconds. The schema refuses a lease that ends after the year 9999."""


@dataclass(frozen=True, slots=True)
class FoundLease:
    """A lease, as the relay read it from PostgreSQL. `token` and `expired_at` together show whether the lease has
    changed since then."""

    email_id: UUID
    token: int  # see `Lease.token`
    worker: str
    expired_at: datetime  # when the lease ends or ended
    has_run_out: bool
    attempt_base: int  # the number of attempts before the email's last replay or redelivery
    pinned_seconds: float | None = None  # how long the email has been pinned to its provider; None if it is not
    # the email's own; None if there are none and redelivery is off, or if they were not read
    limits: RetryLimits | None = None


@dataclass(frozen=True, slots=True)
class CrashedEmail:
    """An email that a worker was rendering when the worker died."""

    email_id: UUID
    correlation_id: str | None
    status: Status  # `pending`; `failed` or `held` if the email has crashed too many workers
    crash_count: int


async def terminate_sessions(session: AsyncSession, worker: str) -> int:
    """Terminates the sessions of a dead worker, and returns their number. A session can take some time to end, so call
    this again until it returns 0. The worker can then commit nothing more."""
    return len(await fetch(session, "terminate_sessions", {"application_name": worker}))


@statement
async def find_recovered(source: Source, worker: str) -> dict[UUID, int]: ...


async def note_crashes(
    session: AsyncSession, worker: str, tokens: Mapping[UUID, int], most_crashes: int
) -> list[CrashedEmail]:
    """Counts a crash for each email that a dead worker was rendering, and makes the email pending. Skips locked rows.
    Returns the changed emails.

    If `most_crashes` workers have died while they rendered the email, it becomes held if an earlier attempt may have
    been accepted, and failed otherwise.
    """
    parameters = {
        **ids_with("lease_tokens", tokens),
        "worker": worker,
        "most_crashes": most_crashes,
        "error_type": Reason.WORKER_CRASHED.value,
        "error": "The worker died while it rendered this email.",
    }
    return await fetch(session, "note_crashes", parameters, into=CrashedEmail)


async def find_expiring(
    session: AsyncSession,
    workers: Collection[str],
    *,
    are_theirs: bool = True,
    within_seconds: float = 0.0,
    redeliver_seconds: float = 0.0,
) -> list[FoundLease]:
    """Leases that have expired by PostgreSQL's clock, or expire within `within_seconds`: the leases of these workers,
    or, unless `are_theirs`, of all other workers.

    `redeliver_seconds` is the host's setting: the redelivery of an email ends this many seconds after the email could
    first be sent; 0 for no redelivery.
    """
    parameters = {
        "workers": list(workers),
        "is_theirs": are_theirs,
        "within_seconds": within_seconds,
        "redeliver_seconds": redeliver_seconds,
    }
    rows = await fetch(session, "find_expiring", parameters)
    return [replace(FoundLease(*others), limits=limits_in(limits)) for *others, limits in rows]


async def find_leases(session: AsyncSession, worker: str) -> list[FoundLease]:
    """All leases of a worker, whenever they expire."""
    return await find_expiring(session, [worker], within_seconds=_EVER)


async def release_found(session: AsyncSession, leases: Sequence[FoundLease]) -> set[UUID]:
    """Releases leases that have not changed since they were found. Returns the ids of the released emails.

    The caller must be certain that no email was sent, or can still be sent, under one of these leases.
    """
    return {row[0] for row in await fetch(session, "release_found", as_found(leases))} if leases else set()


def as_found(leases: Sequence[FoundLease]) -> dict[str, Any]:
    """Parameters for a statement that changes each lease only if it has not changed since the relay read it."""
    by_id = {lease.email_id: lease for lease in leases}
    parameters = ids_within(by_id)
    ordered = [by_id[email_id] for email_id in parameters["email_ids"]]
    tokens, ends = [lease.token for lease in ordered], [lease.expired_at for lease in ordered]
    return {**parameters, "lease_tokens": tokens, "expired_ats": ends}


async def find_histories(
    session: AsyncSession, email_ids: Collection[UUID], *, redeliver_seconds: float
) -> dict[UUID, tuple[int, float | None, RetryLimits | None]]:
    """The `attempt_base`, `pinned_seconds` and `limits` of emails, by id; see `FoundLease` and `find_expiring`."""
    if not email_ids:
        return {}
    parameters = {**ids_within(email_ids), "redeliver_seconds": redeliver_seconds}
    rows = await fetch(session, "find_histories", parameters)
    return {email_id: (base, seconds, limits_in(limits)) for email_id, base, seconds, limits in rows}
