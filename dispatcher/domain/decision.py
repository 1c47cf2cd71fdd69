"""What the worker does about an outcome: from what the provider said to one of the transitions in `domain.status`.

The rules:

    accepted                      → MarkSent
    deferred, attempts left       → RetryIn     the lease stays
    deferred, none left           → MarkFailed  with the deferral's reason
    rejected                      → MarkFailed
    uncertain, policy hold        → MarkHeld
    uncertain, policy resend      → Resend      may duplicate; that is the policy's word
    uncertain, none left          → MarkHeld    or `resend` would send for ever to a provider that never answers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, assert_never

from dispatcher.domain.outcome import CONCERNS_PROVIDER, Accepted, Deferred, Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.retry import RetryPolicy
from dispatcher.domain.status import OnUncertain, Transition
from dispatcher.domain.values import value


@value
class MarkSent:
    """Record that the provider accepted.

    Attributes:
        provider_message_id: The provider's own name for the email; None if it gave none.
        detail: The provider's answer, scrubbed.
    """

    transition: ClassVar = Transition.ACCEPT
    provider_message_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try again in this process, under the same lease.

    Attributes:
        seconds: How long to wait first.
    """

    transition: ClassVar = Transition.DEFER
    seconds: float


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Record that no further attempt will be made, and have the dead letter published.

    Attributes:
        reason: Why, in our vocabulary.
        detail: The provider's words, scrubbed.
        code: The provider's own code.
    """

    transition: ClassVar = Transition.FAIL
    reason: Reason
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class MarkHeld:
    """Record that nobody can know whether the email was accepted, and have the dead letter published.

    Attributes:
        detail: What was seen, scrubbed.
        code: The provider's own code, where one came.
    """

    transition: ClassVar = Transition.HOLD
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Resend:
    """Make the email pending again although it may have been accepted: the policy allows the duplicate.

    Attributes:
        detail: What was seen, scrubbed.
        code: The provider's own code, where one came.
    """

    transition: ClassVar = Transition.RESEND
    detail: str | None = None
    code: str | None = None


Decision = MarkSent | RetryIn | MarkFailed | MarkHeld | Resend


def decide(
    outcome: Outcome,
    attempt_number: int,
    on_uncertain: OnUncertain,
    policy: RetryPolicy,
    random: Callable[[], float],
) -> Decision:
    """What to do about the outcome of an attempt.

    Args:
        attempt_number: Of the attempt that ended so, from 1, since the email was enqueued or last replayed.
        on_uncertain: The email's own policy, or else the host's.
        random: From 0 up to 1; spreads the retries.
    """
    match outcome:
        case Accepted(provider_message_id, detail):
            return MarkSent(provider_message_id, detail)
        case Deferred(reason, detail, code, retry_after):
            if reason in CONCERNS_PROVIDER and retry_after is not None and retry_after > policy.cap_seconds:
                # When the provider is back says nothing about this email: no reason to give it up.
                retry_after = policy.cap_seconds
            seconds = policy.wait_before(attempt_number + 1, retry_after, random)
            return MarkFailed(reason, detail, code) if seconds is None else RetryIn(seconds)
        case Rejected(reason, detail, code):
            return MarkFailed(reason, detail, code)
        case Uncertain(detail, code):
            may_resend = on_uncertain is OnUncertain.RESEND and attempt_number < policy.max_attempts
            return Resend(detail, code) if may_resend else MarkHeld(detail, code)
        case _:
            assert_never(outcome)
