"""A circuit breaker: whether one worker may try a provider now.

    closed ──failures in a row, or a fault──▶ open ──time──▶ half open ──one email succeeds──▶ closed
      ▲  │                                     ▲                │
      │  └──throttled──▶ paused                └──probes fail───┘ (and waits twice as long)
      └───────time──────────┘

`TRANSITIONS` contains every transition. An event without a transition for the current state changes nothing.

A failure counts if it may concern the provider as a whole: a failed connection, a timeout, a server error. Failures
count only if they come from different emails and domains (see `evidence`). A failed connection concerns no email and
always counts. Missing answers count, too. But one restart of the provider interrupts every email on the wire. So the
breaker opens only after as many missing answers as the worker can have emails on the wire. An answer that certainly
concerns only the email counts as a success, because it shows that the provider works. Any other refusal is judged
together with the refusals of other emails, whatever its code and its words (see `refuse`).

While the breaker is half open, an email is suspect if it was refused before, or if each domain of its recipients is
also a domain of a refused email. A suspect email is used as a probe only if no other email arrives within
`SUSPECT_SECONDS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Final

from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.retry import Backoff
from dispatcher.routing.evidence import Blame, Refusals, SuspectEmails

FAILURES_IN_A_ROW: Final = 8
"""This many failures in a row open the breaker. Fewer failures are normal at a busy provider. A higher limit would
waste attempts on a failed provider."""
UNREACHED_IN_A_ROW: Final = 3
"""This many failed connections in a row open the breaker. The number is low, because an email is never the cause."""
THROTTLED_IN_A_ROW: Final = 2
"""If the provider gave no wait time, this many throttled emails in a row pause the provider. A single throttled email
may concern only its recipient."""
UNCLEAR_TRIES: Final = 6
"""A verdict against the provider clears an email only of its first refusals, up to this number. Otherwise, a few bad
emails that stop the provider together would never fail."""
UNCLEAR_SECONDS: Final = 300.0
"""For how long an email that is rejected in unknown words is tried again, if nothing shows that the email or the
provider is at fault. It may be the only email. The time is as long as the retries of a deferred email, so that the
refusals of a few emails per minute can show that the provider is at fault."""
PROBES: Final = 3
"""How many emails that are not suspect must fail before a half-open breaker opens again."""
SUSPECT_SECONDS: Final = 1.0
"""How long a half-open breaker waits for an email that is not suspect, before a suspect email may be the probe."""
FIRST_OPEN_SECONDS: Final = 2.0
LONGEST_OPEN_SECONDS: Final = 60.0
DEFAULT_PAUSE_SECONDS: Final = 1.0
"""The first pause, if the provider throttles us and gives no wait time, or a shorter wait time than this. The pause
doubles while the throttling continues."""
LONGEST_PAUSE_SECONDS: Final = 3600.0
"""The longest pause, even if the provider asks for more. Otherwise a wrong time, such as the year 30000, would stop the
sending for ever. One attempt per hour harms no provider."""
_MAX_DOUBLINGS: Final = 6
"""The most doublings of the wait of a single email. The longest wait is about a minute."""
_REPORT_SECONDS: Final = 1.0
"""A pause is not reported again if it grows by less than this. Hundreds of emails may get the same refusal within
moments."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    PAUSED = "paused"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerEvent(Enum):
    WAIT_ENDED = auto()
    """The time of a pause or of an open breaker is over, or an operator has resumed the provider."""
    SUCCEEDED = auto()
    """The provider answered about an email."""
    FAILED = auto()
    """The provider failed as a whole."""
    THROTTLED = auto()
    """The provider throttled us, and not for one email only."""


TRANSITIONS: Final = MappingProxyType(
    {
        (BreakerState.CLOSED, BreakerEvent.FAILED): BreakerState.OPEN,
        (BreakerState.CLOSED, BreakerEvent.THROTTLED): BreakerState.PAUSED,
        (BreakerState.PAUSED, BreakerEvent.WAIT_ENDED): BreakerState.CLOSED,
        (BreakerState.PAUSED, BreakerEvent.FAILED): BreakerState.OPEN,
        (BreakerState.PAUSED, BreakerEvent.THROTTLED): BreakerState.PAUSED,
        (BreakerState.OPEN, BreakerEvent.WAIT_ENDED): BreakerState.HALF_OPEN,
        (BreakerState.OPEN, BreakerEvent.THROTTLED): BreakerState.OPEN,  # open at least until the pause ends
        (BreakerState.HALF_OPEN, BreakerEvent.SUCCEEDED): BreakerState.CLOSED,
        (BreakerState.HALF_OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
        (BreakerState.HALF_OPEN, BreakerEvent.THROTTLED): BreakerState.PAUSED,
    }
)


class CircuitBreaker:
    """One provider's circuit breaker in one worker. `reason` says why it is not closed."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_change: Callable[[BreakerState, str | None, float], None],
        *,
        window: int = FAILURES_IN_A_ROW,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`on_change` gets the new state, the reason, and for how many seconds the state lasts at least. `window` is
        how many emails may be on the wire. `jitter` keeps many workers from probing at the same time."""
        self._clock = clock
        self._on_change = on_change
        self._silences_in_a_row = max(window, FAILURES_IN_A_ROW)
        self._jitter = jitter
        self._state = BreakerState.CLOSED
        self._refusals = Refusals()
        self._suspects = SuspectEmails()
        self._succeeded = 0  # the number of the latest attempt that has succeeded
        self._silences = 0
        self._failed_probes = 0
        self._until = 0.0
        self._reported_until = 0.0
        self._opens = Backoff(FIRST_OPEN_SECONDS, LONGEST_OPEN_SECONDS)
        self._pauses = Backoff(DEFAULT_PAUSE_SECONDS, LONGEST_OPEN_SECONDS)
        self._trials = 0
        self._old_trials = 0
        self._probe: int | None = None
        self.reason: str | None = None

    @property
    def state(self) -> BreakerState:
        self._update()
        return self._state

    @property
    def wait_seconds(self) -> float:
        """Seconds until the provider may be tried; 0 if now. If the wait has just ended, first calls `on_change`."""
        return self._update()

    @property
    def room(self) -> int | None:
        """How many emails may be tried now; None for no limit."""
        if self._state is BreakerState.CLOSED:  # fast path
            return None
        match self.state:
            case BreakerState.CLOSED:
                return None
            case BreakerState.HALF_OPEN:
                return 1 if self._probe is None else 0
            case _:
                return 0

    def admits(self, email: OutgoingEmail) -> bool:
        """Whether this email may be tried now. A suspect email may be a probe only after `SUSPECT_SECONDS`."""
        if self._state is BreakerState.CLOSED:  # fast path
            return True
        return self.room != 0 and not self.suspect_wait_seconds(email)

    def suspect_wait_seconds(self, email: OutgoingEmail) -> float:
        """For how many seconds this email must let other emails be the probe, because it is suspect; otherwise 0."""
        if not self._is_half_open or not self._is_suspect(email):
            return 0.0
        if self._probe is not None:
            return SUSPECT_SECONDS
        return max(0.0, self._until + SUSPECT_SECONDS - self._clock())

    def single_email_wait_seconds(self, email: OutgoingEmail) -> float:
        """How long an email waits after a refusal for which only this email is at fault; doubles each time."""
        doublings = min(max(self._suspects.times(email) - 1, 0), _MAX_DOUBLINGS)
        return DEFAULT_PAUSE_SECONDS * 2.0**doublings * (0.5 + 0.5 * self._jitter())

    def begin(self) -> int:
        """Notes the start of an attempt (the probe, if half open). Returns its number, which the other methods take as
        `trial`."""
        self._trials += 1
        if self._is_half_open:
            self._probe = self._trials
        return self._trials

    def may_proceed(self, trial: int) -> bool:
        """Whether this attempt may begin to send: the breaker is closed, or the attempt is the probe."""
        return self._state is BreakerState.CLOSED or self.state is BreakerState.CLOSED or trial == self._probe

    def abandon(self, trial: int) -> None:
        """Notes that an attempt ended before the attempt reached the provider."""
        if trial == self._probe:
            self._probe = None

    def succeed(self, trial: int) -> None:
        self.abandon(trial)
        if trial > self._succeeded:
            self._succeeded = trial
        self._silences = 0
        if self._refusals.total:
            self._refusals.clear()
        if self._is_half_open:
            self._enter(BreakerEvent.SUCCEEDED)
        if self._state is BreakerState.CLOSED:
            self._opens.reset()
            self._pauses.reset()

    def fail(
        self,
        trial: int,
        reason: str,
        email: OutgoingEmail | None = None,
        *,
        in_a_row: int = FAILURES_IN_A_ROW,
        by_recipient: bool = False,
    ) -> Blame:
        """Notes that an attempt failed. Returns whether the email or the provider is at fault.

        `email` is None if the provider has not seen it, which is then never at fault. `in_a_row` failures open the
        breaker. If `by_recipient`, refusals of emails to the same recipients count once; a repeated refusal of one
        email does not count if other emails have succeeded in between.
        """
        self.abandon(trial)
        if not self._is_old(trial):
            is_suspect = email is not None and self._is_suspect(email)
            if not (by_recipient and email is not None and self._suspects.note(email, self._trials, self._succeeded)):
                self._refusals.add(email, by_recipient=by_recipient)
            are_enough = self._refusals.are_enough(in_a_row)
            if self._is_half_open and by_recipient and not are_enough:
                # The provider is reachable again, and the refusal may concern only this recipient. So close the
                # breaker.
                self._enter(BreakerEvent.SUCCEEDED)
            elif self._is_half_open:
                self._failed_probes += 1
                if email is None or is_suspect or self._failed_probes >= PROBES:
                    self._open(reason, for_longer=not is_suspect)
            elif are_enough:
                self._open(reason)
        if self.state is not BreakerState.CLOSED:
            return Blame.PROVIDER
        return Blame.UNKNOWN if email is None else Blame.EMAIL

    def time_out(self, trial: int, reason: str) -> None:
        """Notes that an attempt is uncertain: the provider may have accepted the email, but no answer arrived."""
        self.abandon(trial)
        if self._is_old(trial):
            return
        self._silences += 1
        if self._is_half_open or self._silences >= self._silences_in_a_row:
            self._open(reason)

    def open(
        self, trial: int, reason: str, email: OutgoingEmail | None = None, *, seconds: float | None = None
    ) -> Blame:
        """Notes that the provider cannot be used, for example because of invalid credentials. Opens the breaker, for
        `seconds` or its usual time, unless only this email is at fault. Returns which of them is.

        The email is at fault if other emails have succeeded since its first refusal. If the attempt began before the
        breaker last opened, changes nothing.
        """
        self.abandon(trial)
        if self._is_old(trial):
            return Blame.PROVIDER
        if email is not None and self._suspects.note(email, self._trials, self._succeeded):
            return Blame.EMAIL
        self._refusals.add(email)
        self._open(reason, seconds=seconds)
        return Blame.PROVIDER

    def refuse(
        self,
        trial: int,
        reason: str,
        email: OutgoingEmail,
        *,
        in_a_row: int,
        by_sender: bool = False,
        seconds: float | None = None,
        gives_up: bool = False,
        is_already_counted: bool = False,
    ) -> Blame:
        """Notes a refusal that only the refusals of other emails explain. Opens the breaker if there are enough.
        Returns whether the email or the provider is at fault; `UNKNOWN` if this is not clear yet.

        The email is at fault if another email was tried and succeeded after its first refusal. Of its first
        UNCLEAR_TRIES refusals, only those since the breaker last opened count against it. While the cause is unknown,
        the email is tried again, and each of its refusals counts. So three emails to three domains are enough, if
        nothing succeeds.

        If `gives_up`, the email is at fault after UNCLEAR_SECONDS, even if nothing shows this. If `is_already_counted`,
        another email of the same bulk call has reported the refusal.
        """
        self.abandon(trial)
        if self._is_old(trial):
            return Blame.PROVIDER
        is_suspect = self._is_suspect(email)
        times = self._suspects.times(email) + 1
        judged = self._old_trials if times < UNCLEAR_TRIES else 0
        now = self._clock()
        if self._suspects.note(email, self._trials, self._succeeded, judged=judged, rejected_at=now):
            return Blame.EMAIL
        if not is_already_counted:
            self._refusals.add(email, times=times)
            self._failed_probes += self._is_half_open
        are_enough = self._refusals.are_enough(in_a_row, by_sender=by_sender)
        if are_enough or (self._is_half_open and (is_suspect or self._failed_probes >= PROBES)):
            self._open(reason, for_longer=are_enough or not is_suspect, seconds=seconds)
        if self.state is not BreakerState.CLOSED:
            return Blame.PROVIDER
        is_over = gives_up and now - self._suspects.rejected_since(email) >= UNCLEAR_SECONDS
        return Blame.EMAIL if is_over else Blame.UNKNOWN

    def resume(self) -> None:
        """Ends a pause or the wait of an open breaker now. The next wait is short again. Otherwise changes nothing."""
        if self._update():
            self._opens.reset()
            self._pauses.reset()
            self._enter(BreakerEvent.WAIT_ENDED, self.reason)

    def pause(self, trial: int, seconds: float | None, reason: str, email: OutgoingEmail | None = None) -> Blame:
        """Notes that the provider throttled an attempt. Pauses the provider, unless the email may be at fault. Returns
        which of them is; `UNKNOWN` if this is not clear yet.

        `seconds` is the wait that the provider asked for; `email` is None if it throttled before it saw an email.
        """
        self.abandon(trial)
        asked = seconds if seconds is not None and seconds >= 0 else 0.0
        is_waiting = self.state in (BreakerState.PAUSED, BreakerState.OPEN)
        if not is_waiting and email is not None:
            blame = self._blame(email, names_time=asked >= DEFAULT_PAUSE_SECONDS)
            if blame is not Blame.PROVIDER:
                return blame
        if asked < DEFAULT_PAUSE_SECONDS and not is_waiting:
            # Hundreds of emails may be throttled at the same time. Lengthen the next pause only for the first of these
            # emails: for the others, the breaker is already paused or open.
            asked = max(asked, self._pauses.next_wait(lambda: 1.0))
        self._until = max(self._until, self._clock() + min(asked, LONGEST_PAUSE_SECONDS))
        if self._until <= self._reported_until + (_REPORT_SECONDS if is_waiting else 0.0):
            return Blame.PROVIDER
        why = self.reason if self._state is BreakerState.OPEN else reason
        self._enter(BreakerEvent.THROTTLED, why, self._until - self._clock())
        return Blame.PROVIDER

    def _blame(self, email: OutgoingEmail, *, names_time: bool) -> Blame:
        """Whether the provider or the email caused a throttling. Only an email's first can pause the provider, unless
        the provider gave a time, which concerns all emails."""
        others_succeeded = self._suspects.note(email, self._trials, self._succeeded)
        if others_succeeded is not None:
            return Blame.EMAIL if others_succeeded else Blame.UNKNOWN
        self._refusals.add(email)
        is_for_all = names_time or self._refusals.are_enough(THROTTLED_IN_A_ROW)
        return Blame.PROVIDER if is_for_all else Blame.UNKNOWN

    @property
    def _is_half_open(self) -> bool:
        # Fast path: the breaker is nearly always closed.
        return self._state is not BreakerState.CLOSED and self.state is BreakerState.HALF_OPEN

    def _is_suspect(self, email: OutgoingEmail) -> bool:
        return self._suspects.times(email) > 0 or self._refusals.include(email)

    def _update(self) -> float:
        if self._state not in (BreakerState.PAUSED, BreakerState.OPEN):
            return 0.0
        # Read the clock only once. If the wait ended between two reads, `on_change` would not be called.
        remaining = self._until - self._clock()
        if remaining > 0:
            return remaining
        self._enter(BreakerEvent.WAIT_ENDED, self.reason)
        return 0.0

    def _is_old(self, trial: int) -> bool:
        """Whether the attempt began before the breaker last opened, so that its result is outdated."""
        return trial <= self._old_trials

    def _open(self, reason: str, *, for_longer: bool = True, seconds: float | None = None) -> None:
        if (self.state, BreakerEvent.FAILED) not in TRANSITIONS:
            return
        if not for_longer and self._opens.failures:
            self._opens.failures -= 1
        # Half of the wait is random, so that workers that saw the same failure probe at different times.
        longest = self._opens.next_wait(lambda: 1.0)
        # The wait is never shorter than a pause that the provider has asked for.
        asked = max(min(seconds or 0.0, LONGEST_PAUSE_SECONDS), self._until - self._clock())
        self._old_trials = self._trials
        self._enter(BreakerEvent.FAILED, reason, max(longest * (0.5 + 0.5 * self._jitter()), asked))

    def _enter(self, event: BreakerEvent, reason: str | None = None, seconds: float = 0.0) -> None:
        state = self._state = TRANSITIONS[self._state, event]
        self._until = self._reported_until = self._clock() + seconds
        self._probe = None
        self._failed_probes = 0
        self.reason = None if state is BreakerState.CLOSED else reason
        if state is BreakerState.CLOSED:
            self._silences = 0
            self._refusals.clear()
        self._on_change(state, self.reason, seconds)
