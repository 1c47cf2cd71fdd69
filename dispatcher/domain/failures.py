"""Failed and held emails as operators see them: the filter that selects them, the rows of lists, and replays."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from dispatcher.domain.outcome import Reason
from dispatcher.domain.status import Status

DEAD: Final = frozenset({Status.FAILED, Status.HELD})
GROUPINGS: Final = ("cause", "error_type", "provider", "tenant", "status", "domain", "error")
"""By what failed and held emails are grouped. A cause is an error type, a provider, and the error without the words
that have digits or addresses."""
FAILS_AGAIN: Final[Mapping[str | None, str]] = {
    Reason.REJECTED_RECIPIENT: "The recipient was refused: unless the mailbox exists now, the email fails again.",
    Reason.SUPPRESSED: "Unless the suppression was removed, the email fails again.",
    Reason.KEPT_BACK: "Unless DISPATCHER_ALLOW_RECIPIENTS was changed, the email is kept back again.",
    Reason.OPTED_OUT: "Unless the recipient has opted in again, the message fails again.",
}
"""Why a replay of an email with this error type probably fails."""

DEFAULT_PER_SECOND: Final = 50.0
SAMPLE: Final = 5
"""How many emails of each outcome a dry run names."""
MIN_PER_SECOND: Final = 0.01
"""The lowest rate in emails per second. Slower replays would occupy their PostgreSQL session for too long."""
MAX_PER_SECOND: Final = 10_000
_UNPRINTABLE: Final = re.compile(r"[^ -~\u00a1-\u1fff\u2c00-\ud7ff]+")


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects failed and held emails; `actions.dlq.select` makes it, and `dead_emails` in dead.sql applies it.

    Attributes:
        parameters: The value of each filter by name, and `email_ids`; None does not filter. `discarded`: True for
            emails whose dead letter an operator discarded, False for all others.
    """

    parameters: Mapping[str, Any]

    @property
    def email_ids(self) -> Sequence[UUID] | None:
        ids: Sequence[UUID] | None = self.parameters["email_ids"]
        return ids

    @property
    def filters(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.parameters.items()
            if name != "email_ids" and value is not None and (name, value) != ("discarded", False)
        }

    def of(self, email_ids: Iterable[UUID]) -> Selection:
        """The same filter for these emails only."""
        return Selection({**self.parameters, "email_ids": list(email_ids)})


@dataclass(frozen=True, slots=True)
class DeadEmail:
    """A failed or held email, without private data.

    Attributes:
        is_letter_due: Whether the relay must still publish the email's dead letter.
        discarded_at: When an operator discarded the email's dead letter.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    status: Status
    error_type: str | None
    error: str | None
    attempt_count: int
    provider: str | None
    created_at: datetime
    is_letter_due: bool
    discarded_at: datetime | None


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Failed and held emails with the same cause, or with the same value of a property.

    Attributes:
        keys: In groups by cause, the error type, the provider and the error; in others, the value. None: not known.
        sample_id: The newest of these emails.
        emails_in_all: How many emails were grouped, including those of groups that are not returned.
    """

    value: str
    emails: int
    oldest_at: datetime
    newest_at: datetime
    keys: Sequence[str | None]
    held: int
    sample_id: UUID
    sample_key: str
    sample_error: str | None
    emails_in_all: int

    @property
    def fails_again(self) -> str | None:
        """Of a cause: why its emails probably fail again."""
        return FAILS_AGAIN.get(self.keys[0])

    @property
    def filters(self) -> dict[str, Any]:
        """Of a cause: the fields of a filter that selects its emails. The text is the longest part of the error that
        they share."""
        error_type, provider, error = self.keys
        shared = _UNPRINTABLE.split((error or "").replace("…", "\n"))
        text = max(shared, key=len)[:255].strip()  # what a filter takes
        named = {"error_type": error_type, "provider": provider, "text": text}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class HeldEmail:
    """A held email with everything that can show whether it arrived, without private data.

    Attributes:
        discarded_at: When an operator discarded the email's dead letter.
        has_content: Whether the email can be sent again.
        worker: The worker of the last recorded attempt. None if the worker or its host was lost.
        events: The kinds of events that providers reported about the email.
    """

    email_id: UUID
    tenant_id: str
    message_key: str
    correlation_id: str | None
    error_type: str | None
    error: str | None
    provider: str | None
    attempt_count: int
    created_at: datetime
    discarded_at: datetime | None
    provider_message_id: str | None
    expires_at: datetime | None
    has_content: bool
    worker: str | None
    started_at: datetime | None
    finished_at: datetime | None
    outcome: str | None
    provider_code: str | None
    events: Sequence[str] | None


class ReplayState(StrEnum):
    """The state of a replay."""

    RUNNING = "running"
    STOPPING = "stopping"
    """An operator has stopped the replay; a process still runs it."""
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    """Emails are left, and no process runs the replay. It can be resumed."""
    DONE = "done"


class ItemOutcome(StrEnum):
    """What a replay did with one email. Only emails with the outcome `replayed` were changed."""

    REPLAYED = "replayed"
    ALREADY_SENT = "already_sent"
    UNDER_WAY = "under_way"
    """The email is already pending, waiting or sending, for example because of another replay."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    """An operator discarded the dead letter: after the replay was created, or earlier if the replay excludes such
    emails."""
    MAY_HAVE_ARRIVED = "may_have_arrived"
    """The email is held, or failed after an uncertain attempt, and the replay does not include such emails."""
    CONTENT_PRUNED = "content_pruned"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay: a list of emails that an operator sends again.

    Attributes:
        is_active: Whether a process runs the replay now.
        outcomes: The number of emails by outcome, without the emails that still wait.
        per_second: The rate in emails per second; None for no limit.
        paced_with: Replays that were running when this replay began, and include some of the same emails. All of these
            replays together send at the lowest of their rates.
        source: How the emails were selected: `filter`, `ids` or `queue`.
        selection: The filters by name, or the number of ids; empty if a tenant may not see them.
        reason, actor: None if a tenant may not see them.
    """

    id: int
    state: ReplayState
    is_active: bool
    total: int
    waiting: int
    outcomes: Mapping[str, int]
    include_held: bool
    per_second: float | None
    paced_with: Sequence[int]
    reason: str | None
    created_at: datetime
    changed_at: datetime
    source: str
    selection: Mapping[str, Any]
    actor: str | None

    @property
    def replayed(self) -> int:
        return self.outcomes.get(ItemOutcome.REPLAYED, 0)

    @property
    def skipped(self) -> Mapping[str, int]:
        return {each: self.outcomes[each] for each in ItemOutcome if each in self.outcomes and each != "replayed"}

    def describe(self) -> str:
        counts = f"{self.replayed:,} of {self.total:,} replayed, {sum(self.skipped.values()):,} skipped"
        return f"Replay {self.id} is {self.state}: {counts}, {self.waiting:,} remaining"


@dataclass(frozen=True, slots=True)
class Forecast:
    """How many of the selected emails a replay would give an outcome, and the first of them."""

    outcome: ItemOutcome
    emails: int
    sample: list[UUID]


@dataclass(frozen=True, slots=True)
class OverlappingReplay:
    """Another running replay, in which `emails` of the same emails still wait."""

    id: int
    actor: str
    reason: str
    per_second: float | None
    emails: int
