"""The outcome of one attempt: `Accepted | Deferred | Rejected | Uncertain`. A value, never an exception.

An answer from the provider is `Accepted`, `Deferred` or `Rejected`. If no answer arrives, the outcome depends on what
was sent: `Uncertain` if the provider may have received enough to accept the email, otherwise `Deferred`. If the
provider cannot be used for any email, the adapter raises `ProviderFault` instead, and the attempt does not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

from dispatcher.domain.values import replace, value


class Reason(StrEnum):
    """Why an email was not accepted. All providers have the same codes. The value of `email_log.error_type`."""

    THROTTLED = "throttled"
    """The provider asked us to send more slowly. The reason is not the email itself."""
    RECIPIENT_DEFERRED = "recipient_deferred"
    """The provider cannot deliver to these recipients now: greylisting, or a full or busy mailbox."""
    REJECTED_RECIPIENT = "rejected_recipient"
    """The provider permanently refuses the recipients."""
    REJECTED_SENDER = "rejected_sender"
    """The provider permanently refuses the sender: the sender is unverified, or this account has no permission to send
    as this sender."""
    INVALID_CONTENT = "invalid_content"
    """The provider, or our rendering, refuses the content or structure of the email."""
    TOO_LARGE = "too_large"
    """The provider refuses the email's size."""
    REFUSED = "refused"
    """The provider refuses the email for a reason that no other code covers."""
    CONNECTION_FAILED = "connection_failed"
    """No connection to the provider was possible. No byte of the email was sent."""
    SERVER_ERROR = "server_error"
    """The provider reported a temporary failure."""
    TIMEOUT_BEFORE_SEND = "timeout_before_send"
    """The attempt timed out before the provider could have received enough to accept the email."""
    CONTENT_DELETED = "content_deleted"
    """The email's content was deleted before it was sent (retention or privacy). There is nothing to send."""
    CONTENT_UNREADABLE = "content_unreadable"
    """PostgreSQL cannot read the email's content, because its storage is damaged. Nothing was sent."""
    INTERNAL_ERROR = "internal_error"
    """Our own code failed on this email before anything was sent."""
    WORKER_CRASHED = "worker_crashed"
    """Workers crashed repeatedly while they rendered this email. Nothing was sent."""
    SUPPRESSED = "suppressed"
    """Every recipient is suppressed: bounced, complained, unsubscribed, or added by an operator. Nothing was sent."""
    KEPT_BACK = "kept_back"
    """DISPATCHER_ALLOW_RECIPIENTS does not allow the recipients, or those who are not suppressed. Nothing was sent."""
    OPTED_OUT = "opted_out"
    """The recipient has asked the provider for no more messages, for example by answering STOP. From now on, the
    recipient is suppressed."""
    PARTLY_DELIVERED = "partly_delivered"
    """Providers accepted the email for some of its recipients. For the others, no attempt is left, or the provider
    refuses the email. A replay sends the email only to the others."""
    DROPPED_BY_PROVIDER = "dropped_by_provider"
    """The provider accepted the email and then dropped it, for example because of its own suppression list."""
    EXPIRED = "expired"
    """The email's `expires_at` passed before a provider accepted the email, as far as we know."""
    CANCELLED = "cancelled"
    """The application or an operator cancelled the email before it was sent."""
    OUTCOME_UNKNOWN = "outcome_unknown"
    """The request was sent, and no valid answer arrived."""


SOME_REFUSED: Final = "refused recipients: "
"""The start of an outcome's detail, if the provider refused some recipients or some recipients are suppressed. The list
of these recipients follows, up to `; ` or the end."""
MAX_POSITIONS: Final = 2000
"""An upper bound for the number of an email's recipients."""
MAX_RANGES: Final = 10
"""How many ranges of refused recipients a detail lists. Consecutive recipients with the same codes form one range."""
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+))? \(([^()]*)\)")
_MORE: Final = re.compile(r" and (\d+) more$")

CONCERNS_PROVIDER: Final = frozenset(
    {Reason.THROTTLED, Reason.CONNECTION_FAILED, Reason.SERVER_ERROR, Reason.TIMEOUT_BEFORE_SEND}
)
"""Reasons that concern the provider and not the email. Routing may immediately try another provider."""

NO_DEAD_LETTER: Final = frozenset({Reason.SUPPRESSED, Reason.KEPT_BACK})
"""Why an email failed although nothing is wrong with the dispatcher or the provider. No operator must decide."""

_BLAMES_RECIPIENTS: Final = frozenset({Reason.REJECTED_RECIPIENT, Reason.OPTED_OUT, *NO_DEAD_LETTER})
"""Reasons that concern the recipients of the attempt. The same email may reach other recipients."""


class Concern(Enum):
    """The cause of a refusal: the email, the provider, or either of the two."""

    EMAIL = auto()
    """The email or its recipients are the cause."""
    EITHER = auto()
    """Either the email or the provider is the cause. The provider's answers to other emails show which of the two."""
    PROVIDER = auto()
    """The provider is the cause: it had not received any part of the email."""


@value
class AccountFault:
    """A possible cause of a refusal: our account, host or sender at the provider."""

    remedy: str  # what an operator can do
    # after how many seconds the fault ends by itself; None: an operator must correct something
    seconds: float | None = None
    in_a_row: int = 3  # this many refusals in a row, of different emails, show that the provider refuses all emails
    # Whether the refusal concerns the sender. If so, senders count, and not the recipients' domains.
    by_sender: bool = False


@value
class PartialDelivery:
    """The recipients of an email who need no further attempt, although others do."""

    # by position from 1 over To, Cc and Bcc: None if the provider accepted the email for this recipient; otherwise
    # the code with which the provider refused this recipient for good
    codes: Mapping[int, str | None]
    has_progress: bool = True  # whether the provider accepted the email for at least one recipient in this attempt


@value
class Accepted:
    """The provider took responsibility for the email.

    Attributes:
        provider_message_id: The provider's id for the email; None if the provider gave no id.
        detail: The provider's answer, scrubbed. May list recipients that the provider refused.
    """

    provider_message_id: str | None = None
    detail: str | None = None


@value
class Deferred:
    """The provider refused the email for now, or could not be reached. A later attempt may succeed.

    Attributes:
        reason: Our code for the cause.
        detail: The provider's error text, scrubbed of addresses.
        code: The provider's error code, such as `451 4.7.1` or `429`.
        retry_after: Seconds that the provider asked us to wait; None if the provider named no time.
        known_concern: The cause, if the adapter knows it more precisely than `reason` shows; None: the usual cause for
            this reason.
        fault: The fault of our account that the answer describes; None if it describes none.
        partial: Set if the provider accepted the email for some recipients, and refused only the others for now. The
            next attempt then goes only to these others. `retry_after` is 0 if that attempt may follow at once, because
            the provider limits the recipients of one transaction.
    """

    reason: Reason
    detail: str | None = None
    code: str | None = None
    retry_after: float | None = None
    known_concern: Concern | None = None
    fault: AccountFault | None = None
    partial: PartialDelivery | None = None

    @property
    def concern(self) -> Concern:
        """The cause of the deferral: the email, the provider, or either of the two."""
        if self.known_concern is not None:
            return self.known_concern
        if self.fault is not None:
            return Concern.EITHER
        if self.reason is Reason.CONNECTION_FAILED:
            return Concern.PROVIDER
        return Concern.EITHER if self.reason in CONCERNS_PROVIDER else Concern.EMAIL


@value
class Rejected:
    """The provider permanently refused the email. A further attempt with the same email would fail, too.

    Attributes:
        reason: Our code for the cause.
        detail: The provider's error text, scrubbed of addresses.
        code: The provider's error code, such as `550 5.1.1` or `413`.
        fault: The fault of our account that the answer describes; None if it describes none.
    """

    reason: Reason
    detail: str | None = None
    code: str | None = None
    fault: AccountFault | None = None

    @property
    def concern(self) -> Concern:
        """The cause of the rejection: the email, or either the email or the provider."""
        is_unclear = self.fault is not None or self.reason in (Reason.REFUSED, Reason.REJECTED_SENDER)
        return Concern.EITHER if is_unclear and self.code is not None else Concern.EMAIL


@value
class Uncertain:
    """The email was sent and no valid answer arrived. It is unknown whether the provider accepted it.

    Attributes:
        detail: What the adapter observed, scrubbed of addresses.
        code: The provider's code, if an invalid answer arrived.
    """

    detail: str | None = None
    code: str | None = None

    @property
    def reason(self) -> Reason:
        """Always `outcome_unknown`."""
        return Reason.OUTCOME_UNKNOWN


Outcome = Accepted | Deferred | Rejected | Uncertain


def left_out(detail: str | None) -> str | None:
    """The refused recipients of an accepted email, by the detail of the acceptance, as positions and codes: `2 (550
    5.1.1), 3 (451)`. None if the provider accepted all recipients."""
    if detail is None or not detail.startswith(SOME_REFUSED):
        return None
    return detail.removeprefix(SOME_REFUSED).partition("; ")[0]


def refused_recipients(codes: Mapping[int, str], more: int = 0) -> str:
    """The refused recipients by position, from 1, and code: `refused recipients: 2 (550 5.1.1), 101-150 (452 4.5.3)`.
    `more`: the number of further refused recipients, whose positions are unknown."""
    runs = _runs(codes)
    shown = [f"{positions} ({code})" for positions, _, code in runs[:MAX_RANGES]]
    left = more + sum(count for _, count, _ in runs[MAX_RANGES:])
    return f"{SOME_REFUSED}{', '.join(shown)}{f' and {left} more' if left else ''}"


def delivered_recipients(status: str, outcomes: Mapping[str, str | None] | None) -> str | None:
    """The recipients who have an email that was delivered in part, as positions: `1-2, 5`. None for other emails: a
    `sent` email was delivered to everyone who was not refused. `outcomes`: `email_log.recipient_outcomes`."""
    codes = outcomes if isinstance(outcomes, Mapping) else {}  # the row may be damaged
    accepted = {int(position): "" for position, code in codes.items() if code is None and position.isdecimal()}
    return ", ".join(positions for positions, _, _ in _runs(accepted)) if accepted and status != "sent" else None


def _runs(codes: Mapping[int, str]) -> list[tuple[str, int, str]]:
    """Joins consecutive positions with the same code: their range as a text, their number, and their code."""
    runs: list[tuple[int, int, str]] = []
    for position, code in sorted(codes.items()):
        if runs and runs[-1][1:] == (position - 1, code):
            runs[-1] = (runs[-1][0], position, code)
        else:
            runs.append((position, position, code))
    return [(f"{first}" if first == last else f"{first}-{last}", last - first + 1, code) for first, last, code in runs]


def of_whole_email(
    outcome: Outcome,
    recipients: int,
    suppressed: Mapping[int, str],
    earlier: Mapping[int, str | None],
    *,
    is_in_doubt: bool = False,
) -> Outcome:
    """The outcome of an attempt without some of the email's recipients, as an outcome of the email as it was enqueued.

    If a provider has accepted the email for some recipients, the detail begins with their number. If the provider now
    refuses all others for good, returns an acceptance, because no recipient needs a further attempt. If the email is in
    doubt, returns no acceptance: the refusal does not show that the others have no copy.

    Positions in `outcome` count only the recipients of the attempt; all others count the `recipients` of the email as
    it was enqueued (0 if its content was deleted). `suppressed`: why each suppressed recipient was left out. `earlier`:
    the recipients who needed no attempt any more; see `PartialDelivery.codes`. `is_in_doubt`: whether an earlier
    attempt for the others may have been accepted.
    """
    left = {at: why if why == Reason.KEPT_BACK else f"{Reason.SUPPRESSED}: {why}" for at, why in suppressed.items()}
    absent = {**left, **earlier}
    if earlier and not is_in_doubt and isinstance(outcome, Rejected) and outcome.reason in _BLAMES_RECIPIENTS:
        detail, present = outcome.detail, recipients - len(absent)
        if present > 0 and left_out(detail) is None:
            codes = dict.fromkeys(range(1, present + 1), outcome.code or outcome.reason.value)
            detail = f"{refused_recipients(codes)}; {detail}"
        outcome = Accepted(detail=detail)
    outcome = _renumbered(outcome, absent)
    fresh = outcome.partial if isinstance(outcome, Deferred) else None
    known = {**earlier, **(fresh.codes if fresh else {})}
    if not known or isinstance(outcome, Accepted):
        return outcome
    accepted = sum(code is None for code in known.values())
    of_all = f" of {recipients}" if recipients else ""
    detail = f"delivered to {accepted}{of_all} recipients; {outcome.detail}"
    match outcome:
        case Deferred():
            partial = PartialDelivery(known, has_progress=fresh is not None)
            return replace(outcome, detail=detail, partial=partial)
        case Rejected():
            return replace(outcome, detail=detail, reason=Reason.PARTLY_DELIVERED)
        case Uncertain():
            return replace(outcome, detail=detail)


def _renumbered(outcome: Outcome, absent: Mapping[int, str | None]) -> Outcome:
    """The outcome of an attempt without the `absent` recipients, with positions that count these recipients, too. Those
    that have a text are added to the list of refused recipients."""
    if not absent:
        return outcome
    codes = {position: why for position, why in absent.items() if why is not None}
    present = [position for position in range(1, MAX_POSITIONS + 1) if position not in absent]
    words, more = outcome.detail, 0
    if refused := left_out(words):
        words = words.partition("; ")[2] if words else None
        for first, last, code in _RANGE.findall(refused):
            codes.update(dict.fromkeys(present[int(first) - 1 : int(last or first)], code))
        more = sum(map(int, _MORE.findall(refused)))
    if codes or more:
        words = refused_recipients(codes, more) + (f"; {words}" if words else "")
    if isinstance(outcome, Deferred) and outcome.partial is not None:
        known = {present[position - 1]: code for position, code in outcome.partial.codes.items()}
        return replace(outcome, detail=words, partial=PartialDelivery(known))
    return replace(outcome, detail=words)


_NAMES: Final = {kind: kind.__name__.lower() for kind in (Accepted, Deferred, Rejected, Uncertain)}


def outcome_name(outcome: Outcome) -> str:
    """The name of the outcome in `email_attempt.outcome`, logs and metrics."""
    return _NAMES[type(outcome)]


class Pin(NamedTuple):
    """The only provider that may be tried again, because it may have accepted the email under an idempotency key."""

    provider: str
    since: float  # when the first uncertain attempt began, by `clock.steady_clock`
