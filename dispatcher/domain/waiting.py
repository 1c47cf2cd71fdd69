"""Why an email waits: what has to happen before it is sent. Pure; `store.emails` collects the facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status

MOST_AHEAD: Final = 10_000
"""The count of emails ahead stops here: a larger number would not help anybody."""
MARKED_SECONDS: Final = 60.0
"""How long due emails may lack their mark as published; RabbitMQ's confirm is written within half a minute."""
_REASONS: Final = frozenset(Reason)


class Wait(StrEnum):
    """What a pending or sending email waits for."""

    LOCKED = "locked"
    """Another transaction holds a lock on its row."""
    NOT_DUE = "not_due"
    """It is due later: a worker could not use the provider that it needs, or had no memory for it."""
    NO_RELAY = "no_relay"
    """No relay publishes for the database."""
    UNPUBLISHED = "unpublished"
    """RabbitMQ has not confirmed its message."""
    NO_WORKER = "no_worker"
    """No worker runs."""
    PROVIDER_PAUSED = "provider_paused"
    """The provider throttles us, or asked us to wait until a certain time."""
    PROVIDER_REFUSES = "provider_refuses"
    """The provider refuses the account, the credentials or the set-up. An operator has to act."""
    PROVIDER_FAILS = "provider_fails"
    """The provider cannot be reached, or fails as a whole. Workers try it again by themselves."""
    QUEUED = "queued"
    """Other emails are ahead of it."""
    LEASED = "leased"
    """A worker has it under its lease, and sends it."""
    WORKER_LOST = "worker_lost"
    """The worker that leased it is gone; a relay will settle the lease."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A provider that some workers cannot use now.

    Attributes:
        state: The worst state that a worker reports: `open`, then `half_open`, then `paused`.
        workers: How many workers report one of these states.
        reason: Why, from the worker with the worst state: a `Reason`, or the provider's words, scrubbed; None if
            unknown.
        seconds_left: How long the state lasts; None if unknown.
    """

    provider: str
    state: str
    workers: int
    reason: str | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What PostgreSQL has about one pending or sending email, and about everything that it may wait for.

    Attributes:
        now: The time of PostgreSQL's clock. All instants here are PostgreSQL's.
        was_leased: Whether a worker has leased the email before.
        due_at: When its message must be on the send queue; None once RabbitMQ has confirmed the message.
        has_owner: Whether the worker that leased the email has a session.
        has_relay: Whether a relay publishes for the database.
        workers: The workers with a session, on all hosts.
        ahead: Pending emails that were enqueued before this one, `MOST_AHEAD` at most.
        ceilings: By provider, the most emails per second; only providers with a ceiling.
    """

    now: datetime
    status: Status
    was_leased: bool
    due_at: datetime | None
    locked_until: datetime
    error_type: str | None
    has_owner: bool
    has_relay: bool
    workers: int
    ahead: int
    troubles: Sequence[Trouble] = ()
    ceilings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why an email waits.

    Attributes:
        detail: A sentence for people, without names of hosts.
        until: When the wait ends at the latest, or when the next try is; None if unknown.
        ahead: For `QUEUED`, the number of emails ahead; else None.
    """

    reason: Wait
    detail: str
    until: datetime | None = None
    ahead: int | None = None


def why(
    facts: Facts, *, providers: Collection[str] = (), rescue_seconds: float = 0.0, holders: Sequence[str] = ()
) -> Waiting:
    """Why an email waits: the first condition on its way that is not met.

    Args:
        providers: The configured providers; empty if the caller does not know them.
        rescue_seconds: How long after its expiry the lease of a vanished worker is settled at the latest.
        holders: Sessions that may hold a lock on the email's row.
    """
    if holders:
        return Waiting(Wait.LOCKED, f"Another transaction holds a lock on its row: {'; '.join(holders)}.")
    if facts.status is Status.SENDING:
        return _of_lease(facts, rescue_seconds)
    return _of_publishing(facts) or _of_workers(facts, providers)


def _of_lease(facts: Facts, rescue_seconds: float) -> Waiting:
    if not facts.has_owner:
        settled_at = facts.locked_until + timedelta(seconds=rescue_seconds)
        return Waiting(
            Wait.WORKER_LOST, "The worker that leased it is gone; a relay will settle the lease.", settled_at
        )
    last = f" Its last attempt ended as {facts.error_type}." if facts.error_type else ""
    words = f"A worker has leased it, and renews the lease while it works.{last}{_also(facts)}"
    return Waiting(Wait.LEASED, words, facts.locked_until)


def _of_publishing(facts: Facts) -> Waiting | None:
    """Why its message is not on the send queue yet; None if it is there, or will be at once."""
    if facts.due_at is None:
        return None
    due_seconds = (facts.now - facts.due_at).total_seconds()
    # The HTTP API publishes by itself, and sets a due time a little ahead as a fallback. Only a worker postpones.
    if due_seconds < 0 and facts.was_leased:
        words = "A worker postponed it, because it could not use the provider that it needs, or had no memory for it."
        return Waiting(Wait.NOT_DUE, f"{words}{_also(facts)}", facts.due_at)
    if not facts.has_relay:
        return Waiting(Wait.NO_RELAY, "No relay publishes for this database: start `dispatcher run` on some host.")
    if due_seconds > MARKED_SECONDS:
        words = f"RabbitMQ has not confirmed its message for {due_seconds:.0f} s. Run `dispatcher doctor` to see why."
        return Waiting(Wait.UNPUBLISHED, words)
    return None


def _of_workers(facts: Facts, providers: Collection[str]) -> Waiting:
    if not facts.workers:
        return Waiting(Wait.NO_WORKER, "No worker runs on any host: start `dispatcher run`.")
    if away := unusable(facts, providers):
        first = min(away, key=lambda each: float("inf") if each.seconds_left is None else each.seconds_left)
        left = first.seconds_left
        until = None if left is None else facts.now + timedelta(seconds=max(0.0, left))
        return Waiting(_wait(first), " ".join(map(about, away)), until)
    limits = "".join(f" {name} gets at most {rate:g} emails per second." for name, rate in facts.ceilings.items())
    workers = f"{facts.workers:,} worker{'s send' if facts.workers > 1 else ' sends'}"
    words = f"{_count(facts.ahead)} ahead of it; {workers}.{limits}{_also(facts)}"
    return Waiting(Wait.QUEUED, words, ahead=facts.ahead)


def _count(ahead: int) -> str:
    if not ahead:
        return "No email is"
    more = " or more" if ahead >= MOST_AHEAD else ""
    return f"{ahead:,}{more} email{' is' if ahead == 1 else 's are'}"


def unusable(facts: Facts, providers: Collection[str]) -> list[Trouble]:
    """The providers that no worker can use; empty while a worker can use some provider."""
    away = [each for each in facts.troubles if each.workers >= facts.workers]
    return away if {each.provider for each in away} >= set(providers) else []


def _wait(trouble: Trouble) -> Wait:
    if trouble.state == "paused":
        return Wait.PROVIDER_PAUSED
    is_ours = trouble.reason is None or trouble.reason in _REASONS
    return Wait.PROVIDER_FAILS if is_ours else Wait.PROVIDER_REFUSES


def about(trouble: Trouble) -> str:
    """A sentence that says why a provider cannot be used."""
    match _wait(trouble):
        case Wait.PROVIDER_PAUSED:
            return f"{trouble.provider} asked us to wait ({trouble.reason or 'no reason given'})."
        case Wait.PROVIDER_REFUSES:
            return f"{trouble.provider} refuses us: {trouble.reason}"
        case _:
            probed = "; one email probes it" if trouble.state == "half_open" else ""
            return f"{trouble.provider} fails as a whole ({trouble.reason or 'no reason given'}){probed}."


def _also(facts: Facts) -> str:
    """Sentences about providers that some workers cannot use: they may be part of the reason."""
    return "".join(f" {about(each)}" for each in facts.troubles)


def describe_holder(
    pid: int | None, application: str | None, state: str | None, age_seconds: float | None, is_committing: bool
) -> str:
    """A session that may hold a lock, in words."""
    if pid is None:
        return "a prepared transaction (see pg_prepared_xacts)"
    age = "" if age_seconds is None else f", its transaction {age_seconds:.0f} s old"
    waits = ", its commit waits for a synchronous standby" if is_committing else ""
    return f"pid {pid} ({application or 'unnamed'}), {state or 'of another user'}{age}{waits}"
