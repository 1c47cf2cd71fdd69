"""Explains why an email waits: what has to happen before it is sent. No I/O; `store.emails` collects the facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from dispatcher.domain.controls import DomainLimit, Pause, PauseScope
from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status
from dispatcher.domain.values import dataclass, field

MAX_AHEAD_COUNT: Final = 10_000
"""The count of emails ahead stops at this number. A larger number would not help an operator."""
MARKED_SECONDS: Final = 60.0
"""If an email stays due for longer, RabbitMQ has probably not confirmed its message. The due mark is usually cleared
within half a minute after the confirm."""
OPERATOR: Final = "paused_by_operator"
"""The state of a provider that an operator paused."""
BLOCKED_WORDS: Final = (
    "RabbitMQ accepts no messages, because it is short of memory or disk space (an alarm). Emails wait in PostgreSQL, "
    "and none is lost."
)
_REASONS: Final = frozenset(Reason)
_FAILURES: Final = frozenset({Reason.CONNECTION_FAILED, Reason.SERVER_ERROR, Reason.TIMEOUT_BEFORE_SEND})
"""Reasons that a code and words may follow, although the provider refuses nothing."""
_NO_RELAY: Final = "No relay runs for this database: start `dispatcher run` on a host."


class WaitReason(StrEnum):
    """What a pending, waiting or sending email waits for."""

    SCHEDULED = "scheduled"
    """The email is scheduled for later."""
    REDELIVERY = "redelivery"
    """The provider deferred the email, and a worker tries to send the email again later."""
    DOMAIN = "domain"
    """The ceiling of a recipient domain is reached."""
    LOCKED = "locked"
    """Another transaction holds a lock on the email's row."""
    PAUSED = "paused"
    """An operator paused everything, the email's lane or tenant, or every provider that could send it."""
    NOT_DUE = "not_due"
    """The email is due later: it was deferred, or a worker could not use a provider that the email needs, or had no
    memory for the email."""
    NO_RELAY = "no_relay"
    """No relay publishes for the database."""
    UNPUBLISHED = "unpublished"
    """RabbitMQ has not confirmed the email's message, or accepts no messages because of a memory or disk alarm."""
    NO_WORKER = "no_worker"
    """No worker runs."""
    PROVIDER_PAUSED = "provider_paused"
    """The provider throttles us, or asked us to wait until a certain time."""
    PROVIDER_REFUSES = "provider_refuses"
    """The provider refuses the account, the credentials or the configuration. An operator has to act."""
    PROVIDER_FAILS = "provider_fails"
    """The provider cannot be reached, or fails for every email. Workers try the provider again automatically."""
    QUEUED = "queued"
    """Other emails are ahead of this email."""
    LEASED = "leased"
    """A worker has leased the email. It sends the email, or waits to try it again."""
    WORKER_LOST = "worker_lost"
    """The worker that leased the email has ended; a relay will recover the email."""


@dataclass(frozen=True, slots=True)
class ProviderProblem:
    """A provider that at least one worker cannot use now. `state` is the worst in any worker: `open`, `half_open` or
    `paused` (throttled), or `OPERATOR`. `reason` is a `Reason`, alone or with code and words, or scrubbed text."""

    provider: str
    state: str
    workers: int
    reason: str | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Facts:
    """What PostgreSQL records about a pending, waiting or sending email, and about all that it may wait for.

    All times are by PostgreSQL's clock. `due_at` is None after RabbitMQ has confirmed the message; `wait_until`, unless
    the email waits. `has_owner`: the worker that leased the email has a database session. `ahead` is counted up to
    `MAX_AHEAD_COUNT`. `wait_reason` is `scheduled`, `redelivery` or `domain`, also if the email has waited. `ceilings`
    are by provider. Pauses of providers are in `troubles`.
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
    wait_until: datetime | None = None
    wait_reason: str | None = None
    attempt_count: int = 0
    provider: str | None = None
    wait_domain: str | None = None
    domain_per_second: float | None = None
    domain_concurrent: int | None = None
    is_blocked: bool = False
    troubles: Sequence[ProviderProblem] = ()
    ceilings: Mapping[str, float] = field(default_factory=dict)
    pauses: Sequence[Pause] = ()


@dataclass(frozen=True, slots=True)
class WaitExplanation:
    """Why an email waits. `detail` is a sentence without host names; `because`, its clause after "because" if the email
    waits until a planned time; `until`, the latest end of the wait or the time of the next try; `ahead` is for
    `QUEUED`."""

    reason: WaitReason
    detail: str
    until: datetime | None = None
    ahead: int | None = None
    because: str | None = None


def explain_wait(
    facts: Facts, *, providers: Collection[str] = (), recovery_seconds: float = 0.0, holders: Sequence[str] = ()
) -> WaitExplanation:
    """Why an email waits: the first condition for sending it that is not met, in a fixed order.

    `providers` is empty if the caller does not know them. `holders`: sessions that may hold a lock on the row.
    """
    if holders:
        words = f"Another transaction holds a lock on the email's row: {'; '.join(holders)}."
        return WaitExplanation(WaitReason.LOCKED, words)
    if facts.pauses and facts.status is Status.PENDING:
        first = facts.pauses[0]
        return WaitExplanation(WaitReason.PAUSED, first.describe(), first.until)
    if facts.status is Status.SENDING:
        return _of_lease(facts, recovery_seconds)
    if facts.wait_until is not None and (facts.wait_until > facts.now or facts.has_relay):
        return _of_schedule(facts, facts.wait_until)
    return _of_publishing(facts) or _of_workers(facts, providers)


def _of_schedule(facts: Facts, until: datetime) -> WaitExplanation:
    because = "it is scheduled"
    reason = WaitReason.SCHEDULED
    if facts.wait_reason == WaitReason.REDELIVERY:
        reason = WaitReason.REDELIVERY
        why = f": {facts.error_type}" if facts.error_type else ""
        because = f"{facts.provider or 'the provider'} deferred it (attempt {facts.attempt_count}{why})"
    if facts.wait_reason == WaitReason.DOMAIN and facts.wait_domain is not None:
        limit = DomainLimit(facts.wait_domain, facts.domain_per_second, facts.domain_concurrent)
        has_ceiling = limit.per_second is not None or limit.concurrent is not None
        reason = WaitReason.DOMAIN
        because = limit.describe() if has_ceiling else f"{limit.domain} had a ceiling, which was removed"
    return WaitExplanation(reason, f"The email waits because {because}.", until, because=because)


def _of_lease(facts: Facts, recovery_seconds: float) -> WaitExplanation:
    if not facts.has_owner:
        latest = datetime.max.replace(tzinfo=facts.locked_until.tzinfo)
        settled_at = facts.locked_until + min(timedelta(seconds=recovery_seconds), latest - facts.locked_until)
        words = "The worker that leased the email has ended; a relay will recover the email."
        return WaitExplanation(WaitReason.WORKER_LOST, words, settled_at)
    words = f"A worker has leased the email. It sends the email, or waits to try it again.{_last(facts)}{_also(facts)}"
    return WaitExplanation(WaitReason.LEASED, words, facts.locked_until)


def _of_publishing(facts: Facts) -> WaitExplanation | None:
    """Why the email's message is not on the send queue; None if the message is on the queue, or is about to be
    published."""
    if facts.wait_until is not None:
        return WaitExplanation(WaitReason.NO_RELAY, _NO_RELAY)
    if facts.due_at is None:
        return None
    due_seconds = (facts.now - facts.due_at).total_seconds()
    # There are two reasons for a due time in the future. Either a worker postponed the email after it had leased the
    # email. Or the HTTP API publishes the message itself; the relay publishes it at the due time if the API has failed.
    if due_seconds < 0 and facts.was_leased:
        words = (
            "A worker postponed the email: the email was deferred, or the worker could not use a suitable provider, or "
            f"had no memory for the email.{_last(facts)}{_also(facts)}"
        )
        return WaitExplanation(WaitReason.NOT_DUE, words, facts.due_at)
    if not facts.has_relay:
        return WaitExplanation(WaitReason.NO_RELAY, _NO_RELAY)
    if facts.is_blocked:
        return WaitExplanation(WaitReason.UNPUBLISHED, f"{BLOCKED_WORDS} Run `dispatcher doctor`.")
    # If other emails are ahead, a long wait is normal: the relay keeps the queues short, so many due emails wait in
    # PostgreSQL.
    if due_seconds > MARKED_SECONDS and not facts.ahead:
        words = f"RabbitMQ has not confirmed the email's message for {due_seconds:.0f} s. Run `dispatcher doctor`."
        return WaitExplanation(WaitReason.UNPUBLISHED, words)
    return None


def _of_workers(facts: Facts, providers: Collection[str]) -> WaitExplanation:
    if not facts.workers:
        return WaitExplanation(WaitReason.NO_WORKER, "No worker runs on any host: start `dispatcher run`.")
    if blocked := find_unusable(facts, providers):
        first = min(blocked, key=lambda each: float("inf") if each.seconds_left is None else each.seconds_left)
        left = first.seconds_left
        until = None if left is None else facts.now + timedelta(seconds=max(0.0, left))
        return WaitExplanation(_wait_reason(first), " ".join(map(describe_problem, blocked)), until)
    limits = "".join(f" {name} gets at most {rate:g} emails per second." for name, rate in facts.ceilings.items())
    workers = f"{facts.workers:,} worker{'s send' if facts.workers > 1 else ' sends'}"
    words = f"{_count(facts.ahead)} ahead of it; {workers}.{limits}{_also(facts)}"
    return WaitExplanation(WaitReason.QUEUED, words, ahead=facts.ahead)


def _count(ahead: int) -> str:
    if not ahead:
        return "No email is"
    more = " or more" if ahead >= MAX_AHEAD_COUNT else ""
    return f"{ahead:,}{more} email{' is' if ahead == 1 else 's are'}"


def find_unusable(facts: Facts, providers: Collection[str]) -> list[ProviderProblem]:
    """The providers that no worker can use. Empty if a worker can still use one of `providers`, because emails are then
    sent through that provider."""
    away = [each for each in facts.troubles if each.workers >= facts.workers]
    return away if {each.provider for each in away} >= set(providers) else []


def problems_with_pauses(
    problems: Sequence[ProviderProblem], pauses: Sequence[Pause], *, now: datetime, workers: int
) -> list[ProviderProblem]:
    """The providers' problems, with the operators' pauses of providers added. A provider's pause replaces any other
    problem of the provider."""
    paused = []
    for pause in pauses:
        if pause.scope is PauseScope.PROVIDER:
            seconds = (pause.until - now).total_seconds() if pause.until else None
            paused.append(ProviderProblem(pause.name, OPERATOR, workers, pause.describe(), seconds))
    names = {problem.provider for problem in paused}
    return [*(problem for problem in problems if problem.provider not in names), *paused]


def _wait_reason(problem: ProviderProblem) -> WaitReason:
    if problem.state == OPERATOR:
        return WaitReason.PAUSED
    if problem.state == "paused":
        return WaitReason.PROVIDER_PAUSED
    # The words are a reason of ours, or say that the provider cannot be reached or answers with errors.
    words = problem.reason
    is_failure = words is None or words in _REASONS or words.partition(":")[0].partition(" (")[0] in _FAILURES
    return WaitReason.PROVIDER_FAILS if is_failure else WaitReason.PROVIDER_REFUSES


def describe_problem(problem: ProviderProblem) -> str:
    """Sentences that say why a provider cannot be used, and how to try it at once."""
    match _wait_reason(problem):
        case WaitReason.PAUSED:
            return problem.reason or ""
        case WaitReason.PROVIDER_PAUSED:
            words = f"{problem.provider} asked us to wait ({problem.reason or 'no reason given'})."
        case WaitReason.PROVIDER_REFUSES:
            words = f"{problem.provider} refuses all emails: {(problem.reason or '').rstrip('.')}."
        case _:
            words = f"{problem.provider} fails for every email ({problem.reason or 'no reason given'})"
            if problem.state == "half_open":
                return f"{words}; the dispatcher tests it with one email."
            words = f"{words}."
    return f"{words} {resume_remedy(problem)}"


def resume_remedy(problem: ProviderProblem) -> str:
    """How an operator ends the wait for a provider."""
    return f"To try it at once: `dispatcher resume provider {problem.provider}`."


def _last(facts: Facts) -> str:
    return f" Its last attempt ended as {facts.error_type}." if facts.error_type else ""


def _also(facts: Facts) -> str:
    """Sentences about providers that some workers cannot use. These problems may be part of the reason why the email
    waits."""
    return "".join(f" {describe_problem(each)}" for each in facts.troubles)


def describe_holder(
    pid: int | None, application: str | None, state: str | None, age_seconds: float | None, is_committing: bool
) -> str:
    """A text about a session that may hold a lock: `pid 4711 (psql), idle in transaction, transaction open for 40 s`. A
    prepared transaction has no pid."""
    if pid is None:
        return "a prepared transaction (see pg_prepared_xacts)"
    age = "" if age_seconds is None else f", transaction open for {age_seconds:.0f} s"
    waits = ", waiting for a synchronous standby to confirm its commit" if is_committing else ""
    return f"pid {pid} ({application or 'unnamed'}), {state or 'of another user'}{age}{waits}"
