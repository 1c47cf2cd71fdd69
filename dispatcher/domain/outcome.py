"""The outcome of one attempt: `Accepted | Deferred | Rejected | Uncertain`. A value, never an exception.

An answer from the provider is `Accepted`, `Deferred` or `Rejected`. If no answer arrives, the outcome depends on what
was sent: `Uncertain` if the provider may have received enough to accept the email, otherwise `Deferred`. If the
provider cannot be used for any email, the adapter raises `ProviderFault` instead, and the attempt does not count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, StrEnum, auto
from typing import Final

from dispatcher.domain.values import value


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
    OPTED_OUT = "opted_out"
    """The recipient has asked the provider for no more messages, for example by answering STOP. From now on, the
    recipient is suppressed."""
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
    """A possible cause of a refusal: our account, host or sender at the provider.

    Attributes:
        remedy: What an operator can do.
        seconds: After how many seconds the fault ends by itself; None: an operator must correct something.
        in_a_row: This many refusals in a row, of different emails, show that the provider refuses all emails.
        by_sender: Whether the refusal concerns the sender. If so, senders count, and not the recipients' domains.
    """

    remedy: str
    seconds: float | None = None
    in_a_row: int = 3
    by_sender: bool = False


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
    """

    reason: Reason
    detail: str | None = None
    code: str | None = None
    retry_after: float | None = None
    known_concern: Concern | None = None
    fault: AccountFault | None = None

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
    """The refused recipients of an accepted email, as positions and codes: `2 (550 5.1.1), 3 (451)`.

    None if the provider accepted all recipients.

    Args:
        detail: The `detail` of the acceptance.
    """
    if detail is None or not detail.startswith(SOME_REFUSED):
        return None
    return detail.removeprefix(SOME_REFUSED).partition("; ")[0]


def refused_recipients(codes: Mapping[int, str], more: int = 0) -> str:
    """The refused recipients by position and code: `refused recipients: 2 (550 5.1.1), 101-150 (452 4.5.3)`.

    Args:
        codes: The code of each refused recipient, by position from 1.
        more: The number of further refused recipients, whose positions are unknown.
    """
    runs: list[tuple[int, int, str]] = []
    for position, code in sorted(codes.items()):
        if runs and runs[-1][1:] == (position - 1, code):
            runs[-1] = (runs[-1][0], position, code)
        else:
            runs.append((position, position, code))
    shown = [f"{first if first == last else f'{first}-{last}'} ({code})" for first, last, code in runs[:MAX_RANGES]]
    left = more + sum(last - first + 1 for first, last, _ in runs[MAX_RANGES:])
    return f"{SOME_REFUSED}{', '.join(shown)}{f' and {left} more' if left else ''}"


def with_suppressed(outcome: Outcome, suppressed: Mapping[int, str]) -> Outcome:
    """Adds the suppressed recipients to the detail of an outcome. The email was sent without these recipients.

    Args:
        outcome: The outcome of the attempt. Positions in its detail count only the recipients that were not left out.
            Positions in the detail of the result count all recipients of the email as it was enqueued.
        suppressed: Why each suppressed recipient was left out, by position in the email as it was enqueued.
    """
    codes = {position: f"{Reason.SUPPRESSED}: {why}" for position, why in suppressed.items()}
    words, more = outcome.detail, 0
    if refused := left_out(words):
        words = words.partition("; ")[2] if words else None
        sent = [position for position in range(1, MAX_POSITIONS + 1) if position not in suppressed]
        for first, last, code in _RANGE.findall(refused):
            codes.update(dict.fromkeys(sent[int(first) - 1 : int(last or first)], code))
        more = sum(map(int, _MORE.findall(refused)))
    return replace(outcome, detail=refused_recipients(codes, more) + (f"; {words}" if words else ""))


_NAMES: Final = {kind: kind.__name__.lower() for kind in (Accepted, Deferred, Rejected, Uncertain)}


def outcome_name(outcome: Outcome) -> str:
    """The name of the outcome in `email_attempt.outcome`, logs and metrics."""
    return _NAMES[type(outcome)]
