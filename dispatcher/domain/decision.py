"""Decides what the worker does after an attempt: maps the provider's outcome to a transition of `domain.status`. A
decision has the texts and codes of its outcome.

accepted                      → MarkSent
deferred, attempts left       → RetryIn     keeps the lease
recipient_deferred            → Redeliver   after each attempt, if redelivery is on; without it as above
deferred, none left           → Redeliver   if redelivery is on, unless its time limit or the email's expiry comes first
                                MarkFailed  otherwise, with the deferral's reason, or `partly_delivered`
rejected                      → MarkFailed
uncertain, policy hold        → MarkHeld
uncertain, policy resend      → Resend      may duplicate: the policy accepts that
uncertain, none left          → MarkHeld    `resend` would retry for ever if the provider never answers

An attempt in which the provider accepts the email for some recipients is a deferral, too: the others get a further
attempt. Such an attempt does not use up the email's attempts. Each one leaves fewer recipients, so they end.

If the provider has idempotency keys, an uncertain email is pinned: it is tried again at this provider only, with the
same key. So until the key expires, no policy causes a duplicate. A later rejection or deferral does not show what
happened to the uncertain attempt. Only an acceptance does:

pinned, attempts left         → RetryIn     for an uncertain outcome or a deferral, until the key expires
pinned, deferred, none left   → Redeliver   as above, if the key has not expired by then
pinned, otherwise             → MarkHeld    also for a rejection: the earlier attempt may have been accepted
                                Resend      by policy, if the key has expired and attempts are left
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, assert_never

from dispatcher.domain.outcome import CONCERNS_PROVIDER, Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.retry import RetryLimits, RetryPolicy
from dispatcher.domain.status import OnUncertain, Transition
from dispatcher.domain.values import dataclass, value


@value
class MarkSent:
    """Record that the provider accepted the email."""

    transition: ClassVar = Transition.ACCEPT
    provider_message_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try to send the email again in this process, under the same lease."""

    transition: ClassVar = Transition.DEFER
    seconds: float


@dataclass(frozen=True, slots=True)
class Redeliver:
    """Release the lease and let the email wait for a redelivery. The email's attempts then count from 1 again."""

    transition: ClassVar = Transition.REDELIVER
    seconds: float


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Record the email as failed. The relay then publishes the email's dead letter. No attempt follows."""

    transition: ClassVar = Transition.FAIL
    reason: Reason
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class MarkHeld:
    """Record that the outcome is unknown. The relay then publishes the email's dead letter."""

    transition: ClassVar = Transition.HOLD
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Resend:
    """Make the email pending again although the provider may have accepted it. The policy allows the duplicate."""

    transition: ClassVar = Transition.RESEND
    detail: str | None = None
    code: str | None = None


Decision = MarkSent | RetryIn | Redeliver | MarkFailed | MarkHeld | Resend


def decide(
    outcome: Outcome,
    attempt_number: int,
    on_uncertain: OnUncertain,
    policy: RetryPolicy,
    random: Callable[[], float],
    *,
    key_seconds: float | None = None,
    limits: RetryLimits | None = None,
    failovers: int = 0,
) -> Decision:
    """Decides what to do after an attempt.

    `attempt_number` counts from 1, after a replay or a redelivery from 1 again. `key_seconds` is how long the provider
    still remembers the key of a pinned email; None if it is not pinned. `limits` is None if the email has none and
    redelivery is off. `failovers` counts attempts before this one, in the same round of providers.
    """
    if isinstance(outcome, Accepted):  # nearly always; a `match` takes three times as long
        return MarkSent(outcome.provider_message_id, outcome.detail)
    if limits is not None:
        policy = policy.limited(limits)
    if key_seconds is not None:
        return _decide_in_doubt(outcome, attempt_number, on_uncertain, policy, random, key_seconds, limits)
    match outcome:
        case Deferred():
            return _decide_deferred(outcome, attempt_number, policy, random, limits, failovers)
        case Rejected(reason, detail, code):
            return MarkFailed(reason, detail, code)
        case Uncertain(detail, code):
            may_resend = on_uncertain is OnUncertain.RESEND and attempt_number < policy.max_attempts
            return Resend(detail, code) if may_resend else MarkHeld(detail, code)
        case _:
            assert_never(outcome)


def _decide_deferred(
    outcome: Deferred,
    attempt_number: int,
    policy: RetryPolicy,
    random: Callable[[], float],
    limits: RetryLimits | None,
    failovers: int,
) -> Decision:
    reason = outcome.reason
    if (partial := outcome.partial) is not None:
        reason = Reason.PARTLY_DELIVERED
        if partial.has_progress and outcome.retry_after == 0.0:
            return RetryIn(0.0)
        if partial.has_progress:
            attempt_number, failovers = 1, 0
    asked = _asked_seconds(outcome, policy)
    seconds = policy.wait_before(attempt_number + 1, asked, random, failovers=failovers)
    wait = limits and limits.redelivery_wait(outcome.retry_after, random)
    # The recipient's server counts quick repetitions as abuse. So there is one attempt per redelivery.
    is_redelivered = wait is not None or (limits is not None and limits.redeliveries > 0)
    if seconds is not None and not (is_redelivered and outcome.reason is Reason.RECIPIENT_DEFERRED):
        return RetryIn(seconds)
    return MarkFailed(reason, outcome.detail, outcome.code) if wait is None else Redeliver(wait)


def _decide_in_doubt(
    outcome: Deferred | Rejected | Uncertain,
    attempt_number: int,
    on_uncertain: OnUncertain,
    policy: RetryPolicy,
    random: Callable[[], float],
    key_seconds: float,
    limits: RetryLimits | None,
) -> Decision:
    """The decision about a pinned email; see the module's docstring."""
    if isinstance(outcome, Rejected):
        return MarkHeld(outcome.detail, outcome.code)
    asked_seconds = _asked_seconds(outcome, policy) if isinstance(outcome, Deferred) else None
    seconds = policy.wait_before(attempt_number + 1, asked_seconds, random)
    if seconds is not None and seconds < key_seconds:
        return RetryIn(seconds)
    if isinstance(outcome, Deferred) and seconds is None:
        wait = limits and limits.redelivery_wait(outcome.retry_after, random)
        if wait is not None and wait < key_seconds:
            return Redeliver(wait)
    may_resend = on_uncertain is OnUncertain.RESEND and seconds is not None
    return (Resend if may_resend else MarkHeld)(outcome.detail, outcome.code)


def _asked_seconds(outcome: Deferred, policy: RetryPolicy) -> float | None:
    """The wait that the provider asked for. If the provider caused the deferral, at most the policy's cap: after a
    longer wait, no retry would follow, and the email would fail."""
    if outcome.reason in CONCERNS_PROVIDER and outcome.retry_after is not None:
        return min(outcome.retry_after, policy.cap_seconds)
    return outcome.retry_after
