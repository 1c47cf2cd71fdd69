"""Whether a provider may be tried now, as one worker sees it.

    closed ──failures in a row, or a fault──▶ open ──time──▶ half open ──one email succeeds──▶ closed
      ▲  │                                     ▲                │
      │  └──throttled──▶ paused                └──probes fail───┘ (and waits twice as long)
      └───────time──────────┘

`TRANSITIONS` has every transition. An event that it does not name for a state changes nothing there.

A failure counts if it may concern the provider as a whole: a connection, a timeout, a server error. Failures count only
as far as they come from different emails and domains (see `evidence`). A connection that failed is about no email,
and always counts. Silence counts too, but only a whole window of it opens the breaker: one restart at the
provider's end silences whatever was on the wire. What the provider says about an email, even a no, is a success here:
the provider works.

Half open, an email that was refused before, or to whose domains others were, is no probe while there may be others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Final

from dispatcher.domain.backoff import Backoff
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.routing.evidence import Blame, Refusals, Suspects

FAILURES_IN_A_ROW: Final = 8
"""Fewer are the noise of a busy provider; more is a provider that every email would be tried on in vain."""
UNREACHED_IN_A_ROW: Final = 3
"""A provider that cannot be reached is no email's fault: opened before a lone email has used up its attempts."""
THROTTLED_IN_A_ROW: Final = 2
"""Emails that are asked to slow down, where the provider names no time: one alone may be about its recipient."""
PROBES: Final = 3
"""So many emails that are not suspect have to fail before a half-open breaker opens again."""
SUSPECT_SECONDS: Final = 1.0
"""How long a half-open breaker waits for an email that is not suspect before it takes any."""
FIRST_OPEN_SECONDS: Final = 2.0
LONGEST_OPEN_SECONDS: Final = 60.0
DEFAULT_PAUSE_SECONDS: Final = 1.0
"""For a provider that throttles without saying for how long, or for less; doubles while it goes on."""
LONGEST_PAUSE_SECONDS: Final = 3600.0
"""Asking again once an hour harms no provider; a reset in the year 30000 would stop us for good."""
_MOST_DOUBLINGS: Final = 6
"""Of an email's own wait: about a minute."""
_TELL_SECONDS: Final = 1.0
"""A pause that is prolonged by less is not told again: hundreds of emails hear the same no, each a moment later."""


class State(StrEnum):
    """How a worker sees a provider."""

    CLOSED = "closed"
    PAUSED = "paused"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(Enum):
    """What changes how a worker sees a provider."""

    WAITED = auto()
    """A pause is over, or the wait of an open breaker."""
    WORKED = auto()
    """The provider answered about an email."""
    FAILED = auto()
    """The provider failed as a whole."""
    THROTTLED = auto()
    """The provider asked us, not one email, to slow down."""


TRANSITIONS: Final = MappingProxyType(
    {
        (State.CLOSED, Event.FAILED): State.OPEN,
        (State.CLOSED, Event.THROTTLED): State.PAUSED,
        (State.PAUSED, Event.WAITED): State.CLOSED,
        (State.PAUSED, Event.FAILED): State.OPEN,
        (State.PAUSED, Event.THROTTLED): State.PAUSED,
        (State.OPEN, Event.WAITED): State.HALF_OPEN,
        (State.OPEN, Event.THROTTLED): State.OPEN,  # it is probed when the pause is over, too
        (State.HALF_OPEN, Event.WORKED): State.CLOSED,
        (State.HALF_OPEN, Event.FAILED): State.OPEN,
        (State.HALF_OPEN, Event.THROTTLED): State.PAUSED,
    }
)


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
        window: int = FAILURES_IN_A_ROW,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: Seconds of a steady clock.
            on_change: Told of each change: the state, the reason, and how many seconds it lasts at least.
            window: How many emails may be on the wire at once.
            jitter: From 0 up to 1; spreads the probes of many workers.
        """
        self._clock = clock
        self._on_change = on_change
        self._silences_in_a_row = max(window, FAILURES_IN_A_ROW)
        self._jitter = jitter
        self._state = State.CLOSED
        self._refusals = Refusals()
        self._suspects = Suspects()
        self._successes = 0
        self._silences = 0
        self._failed_probes = 0
        self._until = 0.0
        self._told_until = 0.0
        self._opens = Backoff(FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS)
        self._pauses = Backoff(DEFAULT_PAUSE_SECONDS, LONGEST_OPEN_SECONDS)
        self._trials = 0
        self._old_trials = 0
        self._probe: int | None = None
        self.reason: str | None = None

    @property
    def state(self) -> State:
        """The state now."""
        self._look()
        return self._state

    @property
    def wait_seconds(self) -> float:
        """How long until it may be tried; 0 if it may be now, and whoever is told of changes has heard so."""
        return self._look()

    @property
    def room(self) -> int | None:
        """How many emails may be tried at once now; None for no bound."""
        if self._state is State.CLOSED:  # as it nearly always is
            return None
        match self.state:
            case State.CLOSED:
                return None
            case State.HALF_OPEN:
                return 1 if self._probe is None else 0
            case _:
                return 0

    def admits(self, email: OutgoingEmail) -> bool:
        """Whether this email may be tried now: a probe is left to emails that are not suspect."""
        if self._state is State.CLOSED:  # as it nearly always is
            return True
        return self.room != 0 and not self.doubt_seconds(email)

    def doubt_seconds(self, email: OutgoingEmail) -> float:
        """How long the email is to leave the probe to others, because it may be what the provider refuses."""
        if not self._is_half_open or not self._suspects_it(email):
            return 0.0
        if self._probe is not None:
            return SUSPECT_SECONDS
        return max(0.0, self._until + SUSPECT_SECONDS - self._clock())

    def lone_seconds(self, email: OutgoingEmail) -> float:
        """How long an email waits that alone was refused; doubles with each refusal."""
        doublings = min(max(self._suspects.times(email) - 1, 0), _MOST_DOUBLINGS)
        return DEFAULT_PAUSE_SECONDS * 2.0**doublings * (0.5 + 0.5 * self._jitter())

    def begin(self) -> int:
        """An email is tried now; half open, it is the probe. Returns the trial's number, for its end."""
        self._trials += 1
        if self._is_half_open:
            self._probe = self._trials
        return self._trials

    def may_go_on(self, trial: int) -> bool:
        """Whether a trial of which nothing has left may go on: as far as we know all is well, or it is the probe."""
        return self._state is State.CLOSED or self.state is State.CLOSED or trial == self._probe

    def give_up(self, trial: int) -> None:
        """The trial ended without a word from the provider, and says nothing about it."""
        if trial == self._probe:
            self._probe = None

    def succeed(self, trial: int) -> None:
        """The provider answered about the email."""
        self.give_up(trial)
        self._successes += 1
        self._silences = 0
        if self._refusals.total:
            self._refusals.clear()
        if self._is_half_open:
            self._enter(Event.WORKED)
        if self._state is State.CLOSED:
            self._opens.worked()
            self._pauses.worked()

    def fail(
        self,
        trial: int,
        reason: str,
        email: OutgoingEmail | None = None,
        *,
        in_a_row: int = FAILURES_IN_A_ROW,
        by_recipient: bool = False,
    ) -> Blame:
        """The provider failed for one email, perhaps as a whole; returns what that is blamed on.

        Args:
            email: None if the provider had not seen it.
            in_a_row: How many failures, this one included, open it.
            by_recipient: It was said of the recipients: several emails to the same ones count once, and none that was
                refused before, and others got through since.
        """
        self.give_up(trial)
        if not self._is_old(trial):
            is_suspect = email is not None and self._suspects_it(email)
            if not (by_recipient and email is not None and self._suspects.note(email, self._successes)):
                self._refusals.add(email, by_recipient=by_recipient)
            are_enough = self._refusals.are_enough(in_a_row)
            if self._is_half_open and by_recipient and not are_enough:
                # It can be reached again, and what it said may be about this recipient alone.
                self._enter(Event.WORKED)
            elif self._is_half_open:
                self._failed_probes += 1
                if email is None or is_suspect or self._failed_probes >= PROBES:
                    self._open(reason, for_longer=not is_suspect)
            elif are_enough:
                self._open(reason)
        return Blame.EMAIL if self.state is State.CLOSED else Blame.PROVIDER

    def miss(self, trial: int, reason: str) -> None:
        """The email left, and no answer came."""
        self.give_up(trial)
        if self._is_old(trial):
            return
        self._silences += 1
        if self._is_half_open or self._silences >= self._silences_in_a_row:
            self._open(reason)

    def open(self, trial: int, reason: str, email: OutgoingEmail | None = None) -> Blame:
        """The provider cannot be used at all; returns what that is blamed on.

        Args:
            email: The email that it refused so; None if it had not seen any.
        """
        self.give_up(trial)
        if self._is_old(trial):
            return Blame.PROVIDER
        if email is not None and self._suspects.note(email, self._successes):
            return Blame.EMAIL
        self._refusals.add(email)
        self._open(reason)
        return Blame.PROVIDER

    def pause(self, trial: int, seconds: float | None, reason: str, email: OutgoingEmail | None = None) -> Blame:
        """The provider asked us to slow down, for so long or it did not say; returns what that is blamed on.

        Args:
            email: None if the provider had not seen it.
        """
        self.give_up(trial)
        asked = seconds if seconds is not None and seconds >= 0 else 0.0
        is_waiting = self.state in (State.PAUSED, State.OPEN)
        if not is_waiting and email is not None:
            blame = self._blame(email, names_time=asked >= DEFAULT_PAUSE_SECONDS)
            if blame is not Blame.PROVIDER:
                return blame
        if asked < DEFAULT_PAUSE_SECONDS and not is_waiting:
            # Hundreds of emails may hear the same no at once; it counts once.
            asked = max(asked, self._pauses.next_wait(lambda: 1.0))
        self._until = max(self._until, self._clock() + min(asked, LONGEST_PAUSE_SECONDS))
        if self._until <= self._told_until + (_TELL_SECONDS if is_waiting else 0.0):
            return Blame.PROVIDER
        why = self.reason if self._state is State.OPEN else reason
        self._enter(Event.THROTTLED, why, self._until - self._clock())
        return Blame.PROVIDER

    def _blame(self, email: OutgoingEmail, *, names_time: bool) -> Blame:
        """What is to blame if an email is asked to slow down: no email pauses the provider a second time."""
        others_got_through = self._suspects.note(email, self._successes)
        if others_got_through is not None:
            return Blame.EMAIL if others_got_through else Blame.UNKNOWN
        self._refusals.add(email)
        is_for_all = names_time or self._refusals.are_enough(THROTTLED_IN_A_ROW)
        return Blame.PROVIDER if is_for_all else Blame.UNKNOWN

    @property
    def _is_half_open(self) -> bool:
        # Nearly always it is closed, and stays so however long one waits.
        return self._state is not State.CLOSED and self.state is State.HALF_OPEN

    def _suspects_it(self, email: OutgoingEmail) -> bool:
        """Whether the email may be what the provider refuses."""
        return self._suspects.times(email) > 0 or self._refusals.include(email)

    def _look(self) -> float:
        """Ends a wait whose time has come; returns how long it still is, in seconds."""
        if self._state not in (State.PAUSED, State.OPEN):
            return 0.0
        # One look at the clock: between two of them the time may come, and nobody would be told.
        remaining = self._until - self._clock()
        if remaining > 0:
            return remaining
        self._enter(Event.WAITED, self.reason)
        return 0.0

    def _is_old(self, trial: int) -> bool:
        """Whether it began before the breaker last opened: what it tells of is why it opened, and not how it is now."""
        return trial <= self._old_trials

    def _open(self, reason: str, *, for_longer: bool = True) -> None:
        if (self.state, Event.FAILED) not in TRANSITIONS:
            return
        if not for_longer and self._opens.failures:
            self._opens.failures -= 1
        # Half of the wait is jitter: workers that saw the same failure probe one after another.
        longest = self._opens.next_wait(lambda: 1.0)
        # Never before the end of a pause that the provider has asked for.
        seconds = max(longest * (0.5 + 0.5 * self._jitter()), self._until - self._clock())
        self._old_trials = self._trials
        self._enter(Event.FAILED, reason, seconds)

    def _enter(self, event: Event, reason: str | None = None, seconds: float = 0.0) -> None:
        state = self._state = TRANSITIONS[self._state, event]
        self._until = self._told_until = self._clock() + seconds
        self._probe = None
        self._failed_probes = 0
        self.reason = None if state is State.CLOSED else reason
        if state is State.CLOSED:
            self._silences = 0
            self._refusals.clear()
        self._on_change(state, self.reason, seconds)
