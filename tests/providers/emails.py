"""Emails and attempts for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dispatcher.dev import conformance
from dispatcher.domain.outcome import Accepted, Deferred, Outcome, Reason, Uncertain, outcome_name
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.providers.contract import Attempt, Provider
from tests.waiting import Overtime

an_email = conformance.an_email
parsed = conformance.parsed

PATIENCE_SECONDS = 20.0
"""A deadline in seconds that no test should reach."""
SOON_SECONDS = 0.3
"""A deadline in seconds that a test waits for, and that may pass at any point of the attempt."""
LATER_SECONDS = 2.0
"""A deadline in seconds that a test waits for. Even a busy machine reaches the intended point before this deadline."""


def outcome_text(outcome: Outcome | None) -> str:
    """The text of the second and third columns of the tables in `docs/providers.md`."""
    assert outcome is not None
    if isinstance(outcome, Accepted | Uncertain):
        return outcome_name(outcome)
    return f"{outcome_name(outcome)} {outcome.reason}"


class Sending(Attempt):
    """One attempt. `leave` is called at `mark_on_wire`, and `admission` returns a new deadline once the adapter has a
    connection. `left`: how often the adapter called `mark_on_wire`, after its last call of `mark_not_sent`."""

    def __init__(
        self,
        seconds: float = PATIENCE_SECONDS,
        leave: Callable[[], object] = lambda: None,
        admission: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(1, asyncio.get_running_loop().time() + seconds)
        self._leave, self._admission = leave, admission
        self.left = 0
        self.outcome: Outcome | None = None

    def connection_acquired(self) -> None:
        if self._admission is not None:
            self.deadline = self._admission()

    def mark_on_wire(self) -> None:
        self._leave()
        self.left += 1

    def mark_not_sent(self) -> None:
        assert self.left == 1, "`mark_not_sent` was called before `mark_on_wire`"
        self.left = 0


async def send(
    provider: Provider, outgoing: OutgoingEmail, *, seconds: float = PATIENCE_SECONDS, leaves: bool = False
) -> Sending:
    """Make one attempt, and assert that it ends in time. If the email must leave before the deadline (`leaves`), but
    the machine is too slow, the attempt is repeated with a later deadline."""
    sending = await _attempt(provider, outgoing, seconds)
    while leaves and not sending.left and seconds < PATIENCE_SECONDS:
        assert isinstance(sending.outcome, Deferred)
        assert sending.outcome.reason is Reason.TIMEOUT_BEFORE_SEND
        seconds *= 4
        sending = await _attempt(provider, outgoing, seconds)
    return sending


async def _attempt(provider: Provider, outgoing: OutgoingEmail, seconds: float) -> Sending:
    sending = Sending(seconds)
    overtime = Overtime(sending.deadline)
    sending.outcome = await provider.send(outgoing, sending)
    assert overtime.end() < 1, "the adapter returned long after the deadline"
    assert sending.left <= 1, "the adapter called mark_on_wire twice"
    return sending
