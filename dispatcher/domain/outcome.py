"""What a provider said about one email: a value, never an exception.

`Accepted | Deferred | Rejected | Uncertain`. Any answer received is known; no answer after a byte that could cause
acceptance left is `Uncertain`; failing before that byte is `Deferred`. What concerns the provider as a whole is a
`ProviderFault` instead, and burns no attempt.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import Final

from dispatcher.domain.values import value


class Reason(StrEnum):
    """Why an email was not accepted: one vocabulary for all providers; the value is `email_log.error_type`."""

    THROTTLED = "throttled"
    """The provider asked us, not this email, to slow down."""
    RECIPIENT_DEFERRED = "recipient_deferred"
    """The provider does not take it for these recipients now: greylisting, a full or busy mailbox."""
    REJECTED_RECIPIENT = "rejected_recipient"
    """The provider refuses the recipients for good."""
    REJECTED_SENDER = "rejected_sender"
    """The provider refuses the sender for good: unverified, or not allowed to this account."""
    INVALID_CONTENT = "invalid_content"
    """The provider, or our own rendering, refuses what the email says or how it is built."""
    TOO_LARGE = "too_large"
    """The provider refuses the email's size."""
    REFUSED = "refused"
    """The provider said a definite no that fits no narrower word."""
    CONNECTION_FAILED = "connection_failed"
    """No connection to the provider; nothing of the email left."""
    SERVER_ERROR = "server_error"
    """The provider answered that it cannot for now."""
    TIMEOUT_BEFORE_SEND = "timeout_before_send"
    """The attempt's deadline passed before a byte that could cause acceptance left."""
    CONTENT_DELETED = "content_deleted"
    """The email's content was deleted before it was sent (retention, privacy); there is nothing to send."""
    CONTENT_UNREADABLE = "content_unreadable"
    """PostgreSQL cannot read the email's content: its storage is damaged; nothing of it left."""
    INTERNAL_ERROR = "internal_error"
    """Our own code failed on this email before anything of it left."""
    WORKER_CRASHED = "worker_crashed"
    """Workers died while they rendered this email, time and again; nothing of it left."""
    OUTCOME_UNKNOWN = "outcome_unknown"
    """The request left and no answer that can be believed came back."""


SOME_REFUSED: Final = "refused recipients: "
"""How the detail of an acceptance for some recipients alone begins; the refused ones follow, up to a `; `."""

CONCERNS_PROVIDER: Final = frozenset(
    {Reason.THROTTLED, Reason.CONNECTION_FAILED, Reason.SERVER_ERROR, Reason.TIMEOUT_BEFORE_SEND}
)
"""A definite no for one of these says nothing about the email: another provider may be tried at once."""


class Concern(Enum):
    """What a deferral may be about."""

    EMAIL = auto()
    """The email, or its recipients."""
    EITHER = auto()
    """The email, or the provider as a whole: the answers to other emails decide."""
    PROVIDER = auto()
    """The provider as a whole: it had seen nothing of the email."""


@value
class Accepted:
    """The provider took responsibility for the email.

    Attributes:
        provider_message_id: The provider's own name for it; None if it gave none.
        detail: The provider's answer, scrubbed; may tell of single recipients that it refused.
    """

    provider_message_id: str | None = None
    detail: str | None = None


@value
class Deferred:
    """The provider refused for now, or was not reached; a later attempt may succeed.

    Attributes:
        reason: Why, in our vocabulary.
        detail: The provider's words, scrubbed of addresses.
        code: The provider's own code, such as `451 4.7.1` or `429`.
        retry_after: Seconds that the provider asked us to wait; None if it did not say.
        known_concern: What it may be about, where the adapter knows more than the reason says.
    """

    reason: Reason
    detail: str | None = None
    code: str | None = None
    retry_after: float | None = None
    known_concern: Concern | None = None

    @property
    def concern(self) -> Concern:
        """What it may be about."""
        if self.known_concern is not None:
            return self.known_concern
        if self.reason is Reason.CONNECTION_FAILED:
            return Concern.PROVIDER
        return Concern.EITHER if self.reason in CONCERNS_PROVIDER else Concern.EMAIL


@value
class Rejected:
    """The provider refused for good; another attempt with the same email would fail alike.

    Attributes:
        reason: Why, in our vocabulary.
        detail: The provider's words, scrubbed of addresses.
        code: The provider's own code, such as `550 5.1.1` or `413`.
    """

    reason: Reason
    detail: str | None = None
    code: str | None = None


@value
class Uncertain:
    """The email left and no believable answer came back: it may have been accepted or not.

    Attributes:
        detail: What was seen, scrubbed of addresses.
        code: The provider's own code, where an answer came that makes no sense.
    """

    detail: str | None = None
    code: str | None = None

    @property
    def reason(self) -> Reason:
        """Always `outcome_unknown`."""
        return Reason.OUTCOME_UNKNOWN


Outcome = Accepted | Deferred | Rejected | Uncertain


def left_out(detail: str | None) -> str | None:
    """The recipients that an acceptance left out, by position and code: `2 (550 5.1.1), 3 (451)`; None if it took all.

    Args:
        detail: The acceptance's.
    """
    if detail is None or not detail.startswith(SOME_REFUSED):
        return None
    return detail.removeprefix(SOME_REFUSED).partition("; ")[0]


_NAMES: Final = {kind: kind.__name__.lower() for kind in (Accepted, Deferred, Rejected, Uncertain)}


def outcome_name(outcome: Outcome) -> str:
    """The outcome's word as it stands in `email_attempt.outcome`, logs and metrics."""
    return _NAMES[type(outcome)]
