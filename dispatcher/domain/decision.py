"""Decides what the worker does after an attempt: maps the provider's outcome to a transition of `domain.status`.

accepted                      → MarkSent
deferred, attempts left       → RetryIn     keeps the lease
deferred, none left           → MarkFailed  with the deferral's reason
rejected                      → MarkFailed
uncertain, policy hold        → MarkHeld
uncertain, policy resend      → Resend      may duplicate: the policy accepts that
uncertain, none left          → MarkHeld    `resend` would retry forever if the provider never answers
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
    """Record that the provider accepted the email.

    Attributes:
        provider_message_id: The provider's id for the email; None if it gave none.
        detail: The provider's answer, scrubbed.
    """

    transition: ClassVar = Transition.ACCEPT
    provider_message_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class RetryIn:
    """Try again in this process, under the same lease.

    Attributes:
        seconds: The wait before the next attempt.
    """

    transition: ClassVar = Transition.DEFER
    seconds: float


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Record the email as failed. The relay then publishes its dead letter. No attempt follows.

    Attributes:
        reason: Our code for the cause.
        detail: The provider's error text, scrubbed.
        code: The provider's error code.
    """

    transition: ClassVar = Transition.FAIL
    reason: Reason
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class MarkHeld:
    """Record that the outcome is unknown. The relay then publishes the email's dead letter.

    Attributes:
        detail: What the worker observed, scrubbed.
        code: The provider's error code, if one arrived.
    """

    transition: ClassVar = Transition.HOLD
    detail: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Resend:
    """Make the email pending again although the provider may have accepted it. The policy allows the duplicate.

    Attributes:
        detail: What the worker observed, scrubbed.
        code: The provider's error code, if one arrived.
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
    """Decides what to do after an attempt.

    Args:
        attempt_number: The number of the attempt that just ended: from 1, and again from 1 after a replay.
        on_uncertain: The email's own policy if it has one, otherwise the host's policy.
        random: Returns a number from 0 up to, but not including, 1. It spreads the retries.
    """
    match outcome:
        case Accepted(provider_message_id, detail):
            return MarkSent(provider_message_id, detail)
        case Deferred(reason, detail, code, retry_after):
            if reason in CONCERNS_PROVIDER and retry_after is not None and retry_after > policy.cap_seconds:
                # A long wait concerns the provider, not this email. It is no reason to fail the email.
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
