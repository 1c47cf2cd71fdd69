"""Emails and attempts for tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dispatcher.dev import conformance
from dispatcher.domain.outcome import Deferred, Outcome, Reason
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Provider
from tests.providers.attempts import FakeAttempt
from tests.waiting import Overtime

an_email = conformance.an_email
parsed = conformance.parsed

PATIENCE_SECONDS = 20.0
"""A deadline that is not the test's subject."""
SOON_SECONDS = 0.3
"""A deadline that is, where it may come at any moment."""
LATER_SECONDS = 2.0
"""One that a busy machine gets to somewhere before."""
MANY_SECONDS = 120.0
"""One for each of hundreds at once, of which most wait for the others."""


@dataclass
class Sending:
    """What came of one attempt.

    Attributes:
        left: How often the adapter said that the email leaves.
        outcome: What it returned.
    """

    left: int = 0
    outcome: Outcome | None = None
    left_at: list[float] = field(default_factory=list)

    def leaving(self) -> None:
        """To be given to the attempt."""
        self.left += 1


async def send(
    provider: Provider, outgoing: OutgoingEmail, *, seconds: float = PATIENCE_SECONDS, leaves: bool = False
) -> Sending:
    """One attempt, and that it ended in time.

    Args:
        leaves: The deadline is to come when the email has left: one that came before, because the machine stood still,
            is put off, for another attempt.
    """
    sending = await _attempt(provider, outgoing, seconds)
    while leaves and not sending.left and seconds < PATIENCE_SECONDS:
        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.TIMEOUT_BEFORE_SEND
        seconds *= 4
        sending = await _attempt(provider, outgoing, seconds)
    return sending


async def send_surely(provider: Provider, outgoing: OutgoingEmail, *, most: int = 3) -> Sending:
    """The attempt that left. Of hundreds of connections one may break off before TLS stands, and nothing leaves."""
    for _ in range(most):
        sending = await send(provider, outgoing, seconds=MANY_SECONDS)
        if sending.left:
            return sending
        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.CONNECTION_FAILED
    raise AssertionError(f"nothing left in {most} attempts")


async def _attempt(provider: Provider, outgoing: OutgoingEmail, seconds: float) -> Sending:
    sending = Sending()
    deadline = asyncio.get_running_loop().time() + seconds
    overtime = Overtime(deadline)
    sending.outcome = await provider.send(outgoing, FakeAttempt(1, deadline, sending.leaving))
    assert overtime.end() < 1, "the adapter came back long after the deadline"
    assert sending.left <= 1, "the adapter told twice that the email leaves"
    return sending
