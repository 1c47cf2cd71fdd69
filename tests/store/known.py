"""A plain model of one email: what must stand in the tables after each thing that may happen to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final
from uuid import UUID

from dispatcher.domain.status import OnUncertain, Status
from dispatcher.store.leases import MOST_LETTER_REPLAYS, Lease, LetterVerdict
from dispatcher.store.replays import ItemOutcome

MORTUARY: Final = (Status.FAILED, Status.HELD)


@dataclass
class Known:
    """One email.

    Attributes:
        expired_at: The end of its lease, once that is past.
        expiries: How many ends its lease has had: each is another one, as the statements see to.
        due_since: The step at which it became due to be published; None while it is not. Its dead letter likewise.
        leases: All that there ever were of it, with the worker of each: most are lost.
        rows: Its attempts, as number, outcome and worker.
        rescue_of: Worker, token and doubt of the lease that a rescue took away when it held the email.
    """

    email_id: UUID
    key: str
    policy: OnUncertain | None
    due_since: int | None
    status: Status = Status.PENDING
    token: int = 0
    attempts: int = 0
    attempt_base: int = 0
    crashes: int = 0
    letter_replays: int = 0
    owner: str | None = None
    expired_at: datetime | None = None
    expiries: int = 0
    dead_letter_since: int | None = None
    is_discarded: bool = False
    was_uncertain: bool = False
    leases: list[tuple[str, Lease]] = field(default_factory=list)
    rows: list[tuple[int, str, str]] = field(default_factory=list)
    rescue_of: tuple[str | None, int | None, bool] | None = None

    @property
    def is_dead(self) -> bool:
        """Whether only a person or evidence can move it."""
        return self.status in MORTUARY

    def is_under(self, lease: Lease) -> bool:
        """Whether that lease is the row's."""
        return self.status is Status.SENDING and self.token == lease.token

    def lease(self, worker: str) -> None:
        """It is a worker's."""
        self.status, self.owner, self.due_since, self.expiries = Status.SENDING, worker, None, 0
        self.token += 1
        self.attempts += 1

    def close(self, status: Status, step: int) -> None:
        """Its lease ends, or the status does without one."""
        self.status, self.owner, self.expired_at = status, None, None
        self.due_since = step if status is Status.PENDING else None
        self.dead_letter_since = step if status in MORTUARY else None

    def release(self, step: int, *, token_moves: bool) -> None:
        """Its lease is given back, the attempt not burnt."""
        self.close(Status.PENDING, step)
        self.attempts -= 1
        self.token += token_moves

    def crash(self, step: int, most_crashes: int) -> None:
        """A worker died while it rendered it."""
        self.release(step, token_moves=True)
        self.crashes += 1
        if self.crashes >= most_crashes:
            self.close(Status.FAILED, step)

    @property
    def rescued_token(self) -> int | None:
        """The token of the lease that a rescue took away, if it holds the email and nobody has touched it since."""
        token = self.rescue_of[1] if self.rescue_of else None
        is_untouched = token is not None and self.token == token + 1 and not self.is_discarded
        return token if self.status is Status.HELD and is_untouched else None

    def recover(self, step: int) -> None:
        """The rescue is undone: nothing was accepted."""
        assert self.rescue_of is not None
        self.was_uncertain = self.rescue_of[2]
        self.close(Status.PENDING, step)
        self.attempt_base += 1
        self._confirm_rescue()

    def record_after_rescue(self, status: Status, outcome: str, step: int) -> None:
        """An attempt's result is written whose lease a rescue has taken away."""
        assert self.rescue_of is not None
        if outcome != "uncertain":
            self.was_uncertain = self.rescue_of[2]
            self.close(Status.PENDING if status is Status.SENDING else status, step)
        self._confirm_rescue()

    def _confirm_rescue(self) -> None:
        if self.rescue_of is not None:
            self.rescue_of = (self.rescue_of[0], None, self.rescue_of[2])

    def record(self, status: Status, outcome: str, step: int) -> None:
        """An attempt's result is written."""
        self.was_uncertain |= outcome == "uncertain"
        self._confirm_rescue()
        if status is Status.SENDING:
            self.attempts, self.expired_at = self.attempts + 1, None
        else:
            self.close(status, step)

    def rescue(self, default: OnUncertain, max_attempts: int, step: int) -> None:
        """Its lease ran out, and nobody says what came of it."""
        resends = (self.policy or default) is OnUncertain.RESEND and self.attempts - self.attempt_base < max_attempts
        self.rescue_of = None if resends else (self.owner, self.token, self.was_uncertain)
        self.close(Status.PENDING if resends else Status.HELD, step)
        self.token += 1
        self.was_uncertain = True

    def replay(self, step: int) -> None:
        """A person sends it again."""
        self.close(Status.PENDING, step)
        self.attempt_base, self.crashes, self.is_discarded = self.attempts, 0, False

    def replay_outcome(self, *, include_held: bool) -> ItemOutcome:
        """What a replay makes of it."""
        if self.status is Status.SENT:
            return ItemOutcome.ALREADY_SENT
        if not self.is_dead:
            return ItemOutcome.UNDER_WAY
        if (self.status is Status.HELD or self.was_uncertain) and not include_held:
            return ItemOutcome.MAY_HAVE_ARRIVED
        return ItemOutcome.REPLAYED

    def letter_verdict(self, attempts: int) -> LetterVerdict:
        """What becomes of a dead letter of so many attempts that is put back."""
        if not self.is_dead or attempts != self.attempts:
            return LetterVerdict.STALE
        if self.status is Status.HELD or self.was_uncertain or self.letter_replays >= MOST_LETTER_REPLAYS:
            return LetterVerdict.REFUSED
        return LetterVerdict.REPLAYED
