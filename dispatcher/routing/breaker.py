"""Whether a provider may be tried now, as one worker sees it.

    closed ──failures in a row, or a fault──▶ open ──time──▶ half open ──one email succeeds──▶ closed
      ▲  │                                     ▲                │
      │  └──throttled──▶ paused                └──it fails──────┘ (and waits twice as long)
      └───────time──────────┘

A failure counts if it concerns the provider as a whole: a connection, a timeout, a server error. What it says about an
email, even a no, is a success here: the provider works.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from dispatcher.domain.backoff import Backoff

FAILURES_IN_A_ROW: Final = 8
"""Fewer are the noise of a busy provider; more is a provider that every email would be tried on in vain."""
FIRST_OPEN_SECONDS: Final = 2.0
LONGEST_OPEN_SECONDS: Final = 60.0
DEFAULT_PAUSE_SECONDS: Final = 1.0
"""For a provider that throttles without saying for how long; doubles while it goes on."""


class State(StrEnum):
    """How a worker sees a provider."""

    CLOSED = "closed"
    PAUSED = "paused"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One provider's breaker in one worker.

    Attributes:
        reason: Why it is not closed; None if it is.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_change: Callable[[State, str | None, float], None],
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: Seconds of a steady clock.
            on_change: Told of each change: the state, the reason, and how many seconds it lasts at least.
            jitter: From 0 up to 1; spreads the probes of many workers.
        """
        self._clock = clock
        self._on_change = on_change
        self._jitter = jitter
        self._state = State.CLOSED
        self._failures = 0
        self._until = 0.0
        self._opens = Backoff(FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS)
        self._pauses = Backoff(DEFAULT_PAUSE_SECONDS, LONGEST_OPEN_SECONDS)
        self._probing = False
        self.reason: str | None = None

    @property
    def state(self) -> State:
        """The state now."""
        if self._state in (State.PAUSED, State.OPEN) and self._clock() >= self._until:
            self._enter(State.CLOSED if self._state is State.PAUSED else State.HALF_OPEN, self.reason, 0.0)
        return self._state

    @property
    def wait_seconds(self) -> float:
        """How long until it may be tried; 0 if it may be now."""
        return max(0.0, self._until - self._clock()) if self.state in (State.PAUSED, State.OPEN) else 0.0

    @property
    def room(self) -> int | None:
        """How many emails may be tried at once now; None for no bound."""
        match self.state:
            case State.CLOSED:
                return None
            case State.HALF_OPEN:
                return 0 if self._probing else 1
            case _:
                return 0

    def begin(self) -> None:
        """An email is tried now; half open, it is the probe."""
        self._probing = self._state is State.HALF_OPEN

    def give_up(self) -> None:
        """The trial ended without a word from the provider, and says nothing about it."""
        self._probing = False

    def succeed(self) -> None:
        """The provider answered about the email."""
        self._probing = False
        self._failures = 0
        if self._state is State.HALF_OPEN:
            self._opens.worked()
            self._enter(State.CLOSED, None, 0.0)
        if self._state is State.CLOSED:
            self._pauses.worked()

    def fail(self, reason: str) -> None:
        """The provider failed as a whole for one email."""
        self._failures += 1
        if self._state is State.HALF_OPEN or self._failures >= FAILURES_IN_A_ROW:
            self.open(reason)

    def open(self, reason: str) -> None:
        """The provider cannot be used at all."""
        self._probing = False
        if self.state is State.OPEN:
            return
        # Half of the wait is jitter: workers that saw the same failure probe one after another.
        longest = self._opens.next_wait(lambda: 1.0)
        self._enter(State.OPEN, reason, longest * (0.5 + 0.5 * self._jitter()))

    def pause(self, seconds: float | None, reason: str) -> None:
        """The provider asked us to slow down, for so long or it did not say."""
        self._probing = False
        state = self.state
        if not seconds:
            # Hundreds of emails may hear the same no at once; it counts once.
            seconds = 0.0 if state is State.PAUSED else self._pauses.next_wait(lambda: 1.0)
        ends_later = self._clock() + seconds > self._until
        if state is State.OPEN or (state is State.PAUSED and not ends_later):
            return
        self._enter(State.PAUSED, reason, seconds)

    def _enter(self, state: State, reason: str | None, seconds: float) -> None:
        self._state = state
        self._until = self._clock() + seconds
        self.reason = None if state is State.CLOSED else reason
        if state is State.CLOSED:
            self._failures = 0
        self._on_change(state, self.reason, seconds)
